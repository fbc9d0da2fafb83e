"""Sizes and tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def size(nbytes: float) -> str:
    """Bytes in the unit that gives a number below 1024: ``93.8 MiB``."""
    index = 0
    while nbytes >= 1024 and index < len(UNITS) - 1:
        nbytes /= 1024
        index += 1
    return f"{nbytes:.0f} B" if index == 0 else f"{nbytes:.1f} {UNITS[index]}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))] if rows else []
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
