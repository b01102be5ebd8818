# SPDX-License-Identifier: Apache-2.0
"""Measure dispatch, combine, put or signal over local ranks, and check the results; compare completion protocols.

  hal bench dispatch workload=v3_decode
  hal bench combine --sizes 1,16,128 layout=expert
  hal bench dispatch -m workload=small,skewed topology.nodes=1,2 --json results.json
  hal bench put --sizes 8,4096,1048576 -n 4 --hosts 2
  hal bench completion backend=ascend transport=udma_emulated

The table follows nccl-tests. An iteration starts at a barrier and takes as long as its slowest rank; minimum, median and
99th percentile are over iterations. Exit status 1 when an element is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hal import report
from hal.bench.sample import Plan, Row, Sample, combined
from hal.cli import add_layout, add_overrides, layout_overrides, output_file
from hal.cli.ranks import run_ranks
from hal.compose import load_config, load_sweep
from hal.config import Settings
from hal.errors import ContractError
from hal.hosts import Hosts, arranged
from hal.versions import versions

_FUNCTIONS = {
    "dispatch": "hal.bench.collective:run_rank",
    "combine": "hal.bench.collective:run_rank",
    "put": "hal.bench.primitives:run_rank",
    "signal": "hal.bench.primitives:run_rank",
}
_ROWS_COUNTED = """\
size        logical bytes: payload and scales of all rows of the busiest rank, in its busier direction
link, local of those, rows to or from other ranks; rows that stay on a rank (largest rank)
algbw       size / median time; busbw  link / median time; GB/s = 1e9 bytes a second
not counted expert ids, weights, counts and signals; experts are left out"""
_COUNTED = {
    "dispatch": _ROWS_COUNTED,
    "combine": _ROWS_COUNTED,
    "put": """\
size        bytes that each rank puts to the next one, relaxed, with a strong signal behind; timed until its own arrived
algbw       size / median time; busbw  the same without what a rank puts to itself; GB/s = 1e9 bytes a second""",
    "signal": "time        half a round trip of one strong 8-byte signal between ranks 0 and 1, over 100 round trips",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", choices=[*_FUNCTIONS, "completion"])
    parser.add_argument("-m", "--multirun", action="store_true", help="sweep: every combination of key=a,b overrides")
    parser.add_argument(
        "--sizes",
        metavar="N,N…",
        help="tokens on each rank (dispatch, combine) bytes (put) or row elements (completion)",
    )
    parser.add_argument("--iterations", type=int, default=20, help="timed iterations of each size (default 20)")
    parser.add_argument("--warmup", type=int, default=5, help="iterations before them (default 5)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write rows, settings and versions")
    parser.add_argument("--plot", type=output_file, metavar="FILE", help="draw times and bandwidth (needs matplotlib)")
    add_layout(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    if args.iterations < 1 or args.warmup < 0:
        raise ContractError(
            f"--iterations is {args.iterations} and --warmup {args.warmup}; at least 1 and 0 are needed"
        )
    if args.plot is not None:
        _require_matplotlib()
    args.overrides = layout_overrides(args)
    if args.operation == "completion":
        if args.multirun:
            raise ContractError("hal bench completion compares the protocols of one workload: leave -m out")
        from hal.bench.completion import run as compare

        return compare(args)
    runs = load_sweep(args.overrides) if args.multirun else [([], load_config(args.overrides))]
    results = [_measured(args, chosen, settings) for chosen, settings in runs]
    if args.json is not None:
        args.json.write_text(
            json.dumps({"versions": versions(), "runs": [_as_json(*item) for item in results]}, indent=2), encoding="utf-8"
        )
    if args.plot is not None:
        from hal.bench.plot import draw

        draw(args.plot, args.operation, [(" ".join(chosen) or "default", rows) for chosen, _, rows in results])
    return int(any(row.wrong for _, _, rows in results for row in rows))


def _measured(args: argparse.Namespace, chosen: list[str], settings: Settings) -> tuple[list[str], Settings, list[Row]]:
    plan = Plan(args.operation, _sizes(args, settings), args.warmup, args.iterations, sys.stderr.isatty())
    hosts = arranged(settings)
    print(_header(plan, chosen, settings, hosts), flush=True)
    samples: list[list[Sample]] = run_ranks(settings, _FUNCTIONS[args.operation], plan, hosts)
    rows = [combined(of_one_size) for of_one_size in zip(*samples, strict=True)]
    print(_table(plan, rows), flush=True)
    return chosen, settings, rows


def _sizes(args: argparse.Namespace, settings: Settings) -> tuple[int, ...]:
    largest = settings.workload.tokens if args.operation in ("dispatch", "combine") else 4 << 20
    if args.operation == "signal":
        return (8,)
    if args.sizes is None:
        smallest = 1 if args.operation in ("dispatch", "combine") else 8
        powers = [smallest * 4**power for power in range(32)]
        return (*[size for size in powers if size < largest], largest)
    try:
        sizes = tuple(int(word) for word in args.sizes.split(","))
    except ValueError:
        raise ContractError(f"--sizes is '{args.sizes}'; write numbers with commas, for example 1,16,128") from None
    least = 0 if args.operation in ("dispatch", "combine") else 1
    if min(sizes) < least:
        raise ContractError(f"--sizes has {min(sizes)}; at least {least} is needed")
    if args.operation in ("dispatch", "combine") and max(sizes) > largest:
        raise ContractError(
            f"--sizes has {max(sizes)} tokens, more than workload.tokens={largest}; raise workload.tokens"
        )
    return sizes


def _header(plan: Plan, chosen: Sequence[str], settings: Settings, hosts: Hosts) -> str:
    work, link = settings.workload, settings.connection
    lines = [
        f"hal bench {plan.operation} {' '.join(chosen)}".rstrip(),
        f"backend {link.backend}, transport {link.transport or 'default'}, {settings.ranks} ranks on "
        f"{settings.topology.nodes} node(s), {plan.warmup} + {plan.iterations} iterations",
    ]
    if plan.operation in ("dispatch", "combine"):
        lines.append(
            f"hidden {work.hidden}, {work.num_experts} experts, top-{work.top_k}, {work.dtype} dispatched, "
            f"{work.combined_dtype} combined, skew {work.skew:g}, layout {settings.layout}, schedule "
            f"{settings.schedule.name}, completion {settings.completion.name}"
        )
    return "\n".join(f"# {line}" for line in (*lines, *hosts.describe(), *_COUNTED[plan.operation].splitlines()))


def _table(plan: Plan, rows: Sequence[Row]) -> str:
    by_tokens = plan.operation in ("dispatch", "combine")
    header = ["size", "count", "type", "min", "time", "p99", "algbw", "busbw", "#wrong", "link", "local"]
    units = ["(B)", "(elements)", "", "(us)", "(us, median)", "(us)", "(GB/s)", "(GB/s)", "", "(B)", "(B)"]
    cells = [units]
    for row in rows:
        times = [report.microseconds(value) for value in (row.minimum, row.median, row.p99)]
        moved = row.traffic
        cells.append(
            [str(moved.logical), str(row.count), row.dtype, *times, f"{row.algbw / 1e9:.2f}", f"{row.busbw / 1e9:.2f}",
             str(row.wrong), str(moved.link), str(moved.local)]
        )  # fmt: skip
    if by_tokens:
        header, cells = (
            ["tokens", *header],
            [["", *units], *([str(r.size), *c] for r, c in zip(rows, cells[1:], strict=True))],
        )
    lines = report.table(header, cells, left=0).splitlines()
    return "\n".join(["# " + lines[0], "# " + lines[1], *("  " + line for line in lines[2:])])


def _as_json(chosen: Sequence[str], settings: Settings, rows: Sequence[Row]) -> dict[str, Any]:
    return {
        "overrides": list(chosen),
        "settings": asdict(settings),
        "hosts": arranged(settings).describe(),
        "rows": [{**asdict(row), "algbw": row.algbw, "busbw": row.busbw} for row in rows],
    }


def _require_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise ContractError("--plot needs matplotlib: pip install 'moe-hal[plot]'")
