"""A byte-level GPT and its corpus: the part of the example that has nothing to do with checkpoints."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

VOCABULARY = 256
"""One token per byte value."""


@dataclass(frozen=True)
class GPTConfig:
    """Size of the model: about `12 * layers * width**2` parameters."""

    layers: int = 4
    width: int = 256
    heads: int = 8
    context: int = 128


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, 4 * config.width),
            nn.GELU(),
            nn.Linear(4 * config.width, config.width),
        )

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class TinyGPT(nn.Module):
    """Bytes in, next-byte logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Corpus:
    """The sources of Python's standard library as one string of bytes: real text on any machine."""

    def __init__(self) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
        if not text:
            raise FileNotFoundError(f"no *.py under {root}: this Python ships without its sources")
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def batch(self, size: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """`size` random windows and the bytes that follow; the seed alone decides which."""
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.text) - context, (size, 1), generator=generator)
        windows = self.text[starts + torch.arange(context + 1)].long()
        return windows[:, :-1], windows[:, 1:]
