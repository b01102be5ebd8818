# SPDX-License-Identifier: Apache-2.0
"""Explain the symmetric memory that a workload needs on each rank: every part, its bytes and its formula.

hal size workload=v3_decode ranks=8
hal size workload=v3_prefill backend=cuda ranks=8
hal size workload=v3_prefill ranks=16 topology.nodes=2 schedule=hierarchical layout=expert
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hal import report
from hal.arrays import ITEMSIZE
from hal.cli import add_overrides
from hal.compose import load_config
from hal.config import Settings
from hal.errors import ContractError
from hal.sizing import buffer_parts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON: total, parts")
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    settings = load_config(args.overrides)
    nodes = settings.topology.nodes
    if settings.ranks % nodes:
        raise ContractError(
            f"{settings.ranks} ranks cannot be laid out on {nodes} equal nodes; choose a divisor of ranks"
        )
    parts = buffer_parts(
        settings.expert_parallel, settings.ranks, nodes, settings.backend.name, settings.transport.name
    )
    total = sum(part.nbytes for part in parts)
    if args.json:
        print(json.dumps({"total": total, "parts": [asdict(part) for part in parts]}, indent=2))
        return 0
    print(_headline(settings))
    rows = [(part.name, part.nbytes, report.size(part.nbytes), part.formula) for part in parts if part.nbytes]
    print(_aligned([*rows, ("total", total, report.size(total), "on each rank, allocated once")]))
    print("Bytes include what aligns each part; rows are counted for the worst routing, so none is refused.")
    return 0


def _headline(settings: Settings) -> str:
    work = settings.workload
    return (
        f"backend {settings.backend.name}, {settings.ranks} ranks on {settings.topology.nodes} node(s), schedule "
        f"{settings.schedule.name}, completion {settings.completion.name}, layout {settings.layout}, "
        f"num_buffers {settings.schedule.num_buffers}\n"
        f"max_tokens {work.tokens}, top_k {work.top_k}, {work.num_experts} experts, row {work.hidden} x {work.dtype} = "
        f"{work.hidden * ITEMSIZE[work.dtype]} B, scales {4 * work.scale_dim} B, combined row {work.hidden} x "
        f"{work.combined_dtype} = {work.hidden * ITEMSIZE[work.combined_dtype]} B"
    )


def _aligned(rows: list[tuple[str, int, str, str]]) -> str:
    numbers = report.table(("part", "bytes", ""), [row[:3] for row in rows]).splitlines()
    formulas = ["formula", *(row[3] for row in rows)]
    return "\n".join(f"{line}  {formula}" for line, formula in zip(numbers, formulas, strict=True))
