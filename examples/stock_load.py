"""Load a checkpoint on one rank with nothing but PyTorch, and print the digest of every tensor.

    python examples/stock_load.py checkpoints/step-100

Proof that a checkpoint needs none of our code to be read: our packages are made impossible to import.
"""

import json
import sys
import warnings

FORBIDDEN = ("ckpt_proto", "ckpt_sidecar", "ckpt_trainer_client")
sys.modules.update(dict.fromkeys(FORBIDDEN))  # type: ignore[arg-type]  # None: import raises

import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from digests import full_tensor_digests  # noqa: E402
from torch.distributed.checkpoint.metadata import TensorStorageMetadata  # noqa: E402


def load_full_tensors(checkpoint_id: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, whole, however many ranks wrote it."""
    metadata = dcp.FileSystemReader(checkpoint_id).read_metadata()
    state_dict = {
        fqn: torch.empty(entry.size, dtype=entry.properties.dtype)
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state_dict, checkpoint_id=checkpoint_id, no_dist=True)
    return state_dict


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    print(json.dumps(full_tensor_digests(load_full_tensors(sys.argv[1]))))
