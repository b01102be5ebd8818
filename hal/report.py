# SPDX-License-Identifier: Apache-2.0
"""Plain-text tables and numbers with units, for the commands."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def table(header: Sequence[str], rows: Sequence[Sequence[object]], *, left: int = 1, prefix: str = "") -> str:
    """Columns as wide as their widest cell; the first ``left`` columns are text, the others are aligned right."""
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = []
    for row in cells:
        parts = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((prefix + "  ".join(parts)).rstrip())
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """``1536`` as ``1.5 KiB``; whole numbers below 1024 as ``17 B``."""
    value = float(nbytes)
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError("unreachable")


def microseconds(seconds: float) -> str:
    """Seconds as microseconds with three significant places at least."""
    value = seconds * 1e6
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"
