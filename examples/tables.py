"""Markdown tables, as the example, the demo and the benchmark print them."""

from collections.abc import Sequence


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its columns padded, so that it reads well in a terminal too."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    lines = (
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in (headings, rule, *rows)
    )
    return "\n".join(f"| {line} |" for line in lines)
