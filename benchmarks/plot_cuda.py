# SPDX-License-Identifier: Apache-2.0
"""Draw what benchmarks/cuda_expert_parallel.py recorded, beside the model of hal_cuda/tuning.py.

    python benchmarks/plot_cuda.py benchmarks/results/DATE-cuda-expert-parallel.json [--out FILE.svg]

Without ``--out`` the picture (SVG) lies beside the record. Needs matplotlib: pip install 'moe-hal[plot]'.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hal_cuda.tuning import Rates, combine_estimate, dispatch_estimate

from hal.config import ExpertParallelSpec

LARGE = 4096
"""Tokens of the sweep over multiprocessors."""
FIXED_DISPATCH, FIXED_PULL = 22.0, 8.0
"""Microseconds beside the model's, fitted (docs/performance_cuda.md)."""

Rows = list[dict[str, Any]]
Points = list[tuple[float, float]]


def rows_of(record: dict[str, Any], case: str, dtype: str = "bfloat16", layout: str = "rank") -> Rows:
    """Rows of one case, in the order of their tokens."""
    found = [r for r in record["rows"] if (r["case"], r.get("dtype"), r.get("layout", layout)) == (case, dtype, layout)]
    return sorted(found, key=lambda row: int(row["tokens"]))


def pairs(record: dict[str, Any]) -> dict[str, Points]:
    """Microseconds over tokens, for what is compared in the first picture."""
    plain = rows_of(record, "pair")
    best = [row for row in rows_of(record, "pull") if row["combine_sms"] == 64]
    gathers = {row["tokens"]: row["us"]["median"] for row in rows_of(record, "all-gather")}
    both = [(r["tokens"], gathers[r["tokens"]] + r["us"]["median"]) for r in rows_of(record, "reduce-scatter")]
    return {
        "dispatch": [(row["tokens"], row["dispatch_us"]["median"]) for row in plain],
        "dispatch + combine": [(row["tokens"], row["pair_us"]["median"]) for row in plain],
        "the same, pull on 64 multiprocessors": [(row["tokens"], row["pair_us"]["median"]) for row in best],
        "all-gather + reduce-scatter": both,
    }


def bandwidth(record: dict[str, Any]) -> dict[str, Points]:
    """GB/s on the link over tokens, of dispatch."""
    return {
        dtype: [(row["tokens"], row["link_GBs"]) for row in rows_of(record, "pair", dtype)]
        for dtype in ("bfloat16", "float8_e4m3fn")
    }


def sweep(record: dict[str, Any]) -> dict[str, Points]:
    """Microseconds over multiprocessors at 4096 tokens; a combine is its pair without the dispatch."""
    push, pull = rows_of(record, "sweep, push"), rows_of(record, "sweep, pull")

    def combine(rows: Rows) -> Points:
        return [(r["combine_sms"], r["pair_us"]["median"] - r["dispatch_us"]["median"]) for r in rows]

    return {
        "dispatch": [(row["dispatch_sms"], row["dispatch_us"]["median"]) for row in push],
        "combine by pull": combine(pull),
        "combine by push": combine(push),
    }


def model(record: dict[str, Any], blocks: list[int]) -> dict[str, Points]:
    """What hal_cuda/tuning.py says of the sweep, with the fixed times that were fitted."""
    shape, rates = record["shape"], Rates()
    spec = ExpertParallelSpec(shape["experts"], shape["top_k"], shape["hidden"], LARGE)
    row_bytes = 2 * shape["hidden"]
    dispatch = dispatch_estimate(spec, shape["ranks"], LARGE, row_bytes, rates)
    combine = combine_estimate(spec, shape["ranks"], LARGE, row_bytes, False, rates)
    return {
        "model of dispatch": [(n, dispatch.seconds(n, rates) * 1e6 + FIXED_DISPATCH) for n in blocks],
        "model of pull": [(n, combine.seconds(n, rates) * 1e6 + FIXED_PULL) for n in blocks],
    }


def draw(record: dict[str, Any], path: Path) -> None:
    """Three pictures side by side."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "hal", "svg.fonttype": "none", "font.size": 8}
    )  # the same record, the same file
    import matplotlib.pyplot as plt

    figure, (times, rates, blocks) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _lines(times, pairs(record), "tokens on each GPU", "µs", log=True)
    _lines(rates, bandwidth(record), "tokens on each GPU", "GB/s on the link, dispatch")
    rates.set_xscale("log", base=2)
    measured = sweep(record)
    _lines(blocks, measured, "multiprocessors, 4096 tokens", "µs")
    numbers = sorted({int(x) for points in measured.values() for x, _ in points})
    for label, points in model(record, numbers).items():
        blocks.plot(*zip(*points, strict=True), "k:" if "dispatch" in label else "k--", linewidth=0.8, label=label)
    blocks.set_ylim(0, 700)
    blocks.legend()
    nccl = record["nccl"]
    version = f"{nccl // 10000}.{nccl // 100 % 100}.{nccl % 100}"
    shape = record["shape"]
    figure.suptitle(
        f"{record['machine']}, NCCL {version}, {record['date'][:10]}, commit {record['commit']}: hidden {shape['hidden']}, "
        f"top-{shape['top_k']} of {shape['experts']} experts, median of graph replays"
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def _lines(axes: Any, series: dict[str, Points], x: str, y: str, log: bool = False) -> None:
    for label, points in series.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=label)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    draw(record, options.out or options.record.with_suffix(".svg"))


if __name__ == "__main__":
    main()
