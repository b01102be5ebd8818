# SPDX-License-Identifier: Apache-2.0
"""Draws what ``hal bench --plot`` measured. Imported only for that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal.bench.sample import Row
from hal.errors import ContractError


def draw(file: Path, operation: str, runs: Sequence[tuple[str, Sequence[Row]]]) -> None:
    """Median time with minimum … p99 as a band, and bandwidth, over the logical size; one line for each run."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    time: Any = axes[0]
    bandwidth: Any = axes[1]
    for label, rows in runs:
        size = [max(row.traffic.logical, 1) for row in rows]
        time.plot(size, [row.median * 1e6 for row in rows], marker="o", label=label)
        time.fill_between(size, [row.minimum * 1e6 for row in rows], [row.p99 * 1e6 for row in rows], alpha=0.2)
        bandwidth.plot(size, [row.algbw / 1e9 for row in rows], marker="o", label=label)
    for axis, name in ((time, "time (us): median, minimum to p99"), (bandwidth, "algbw (GB/s)")):
        axis.set(xscale="log", xlabel="size (bytes)", ylabel=name)
        axis.grid(visible=True, alpha=0.3)
    time.set(yscale="log")
    time.legend()
    figure.suptitle(f"hal bench {operation}")
    try:
        figure.savefig(file, dpi=150)
    except (OSError, ValueError) as error:
        raise ContractError(f"cannot draw {file}: {error}") from error
    finally:
        pyplot.close(figure)
