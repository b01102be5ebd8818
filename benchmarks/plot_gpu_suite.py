# SPDX-License-Identifier: Apache-2.0
"""Draw the benchmark rows of benchmarks/gpu_suite.py for several numbers of GPUs side by side.

    python benchmarks/plot_gpu_suite.py RESULTS/*-gpu-suite.json --out ep.svg

Takes records of the suite, and those of benchmarks/cuda_expert_parallel.py --part suite. One line for each number of ranks
and type: times of dispatch and of the pair, and bytes over the link. Times over the software NIC and of emulated runs are
left out: they are not times of anything. Needs matplotlib: pip install 'moe-hal[plot]'.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Points = list[tuple[float, float]]
LAYOUTS = {
    "rank": [("rank", "pair")],
    "expert": [("expert", "pair"), ("expert", "hierarchical")],
}
"""For each row of pictures: (layout, case) of its lines."""
_LINES = {"bfloat16": "-", "float8_e4m3fn": "--"}


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured rows of dispatch and combine, whichever record they are in."""
    steps = [step for part in record.get("parts", []) for step in part.get("steps", [])]
    rows = [row for holder in (record, *steps) for row in holder.get("rows") or []]
    return [row for row in rows if "pair_us" in row and "layout" in row and not row.get("note")]


def series(
    records: Sequence[dict[str, Any]], layout: str, case: str, value: str, skew: float
) -> dict[tuple[int, str], Points]:
    """(ranks, dtype): value over tokens. Times are medians in microseconds."""
    found: dict[tuple[int, str], dict[int, float]] = {}
    for record in records:
        for row in rows_of(record):
            if (row["layout"], row["case"], row.get("skew", 0.0)) != (layout, case, skew) or value not in row:
                continue
            number = row[value]["median"] if isinstance(row[value], dict) else row[value]
            ranks = row.get("ranks") or record["shape"]["ranks"]
            found.setdefault((ranks, row["dtype"]), {})[row["tokens"]] = number
    return {key: sorted(points.items()) for key, points in sorted(found.items())}


def draw(records: Sequence[dict[str, Any]], path: Path) -> int:
    """The pictures; returns the number of lines in them."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "hal", "svg.fonttype": "none", "font.size": 8})  # same records, same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(13, 7.5), layout="constrained", squeeze=False)
    pictures = (
        ("dispatch_us", "dispatch, µs"),
        ("pair_us", "dispatch + combine, µs"),
        ("link_GBs", "dispatch, GB/s leaving"),
    )
    lines = 0
    for line_of_axes, (layout, cases) in zip(axes, LAYOUTS.items(), strict=True):
        for axis, (value, label) in zip(line_of_axes, pictures, strict=True):
            for where, case in cases:
                for skew in (0.0, 2.0):
                    lines += _lines(axis, series(records, where, case, value, skew), case, skew)
            axis.set(xlabel="tokens on each rank", ylabel=label, title=f"layout {layout}")
            axis.set_xscale("log", base=2)
            axis.set_yscale("linear" if value == "link_GBs" else "log")
            axis.grid(alpha=0.3)
            if axis.lines:
                axis.legend(fontsize=6)
    told = sorted({f"{r['machine']}, {r['date'][:10]}, commit {r['commit']}" for r in records})
    figure.suptitle("; ".join(told))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return lines


def _lines(axis: Any, found: dict[tuple[int, str], Points], case: str, skew: float) -> int:
    for (ranks, dtype), points in found.items():
        label = (
            f"EP{ranks} {dtype}" + (", sums by rank" if case == "hierarchical" else "") + (", skewed" if skew else "")
        )
        marker = ("o" if case == "pair" else "s") if not skew else "x"
        axis.plot(
            *zip(*points, strict=True),
            _LINES.get(dtype, ":"),
            color=f"C{ranks.bit_length() - 1}",
            marker=marker,
            markersize=3,
            alpha=0.5 if skew else 1.0,
            label=label,
        )
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="SVG, PNG or PDF")
    options = parser.parse_args()
    lines = draw([json.loads(path.read_text()) for path in options.records], options.out)
    print(f"{options.out}: {lines} lines" + ("" if lines else "; the records hold no measured rows"))


if __name__ == "__main__":
    main()
