# SPDX-License-Identifier: Apache-2.0
"""``hal bench completion``: what each completion protocol sends, asks of its queues and holds, next to the formulas.

One dispatch of each row size. With P = payload and what travels beside it, a row costs 512 * ceil(P / 480) bytes with a
flag in each block and P otherwise, and every signal 8. Counts are the software's own, on the busiest rank: link headers,
retries and smallest transfers are not in them.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import numpy as np

from hal import report
from hal.arrays import ITEMSIZE, NUMPY_DTYPES, as_buffer
from hal.bench.inputs import routing
from hal.cli.ranks import run_ranks
from hal.compose import load_config
from hal.config import ExpertParallelSpec, Settings
from hal.errors import ContractError
from hal.versions import versions

COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
SIZES = (1, 8, 64, 512, 1024, 4096, 7168)
"""Elements of a row."""
BLOCK, BLOCK_DATA = 512, 480


@dataclass(frozen=True)
class Cost:
    """One rank's dispatch. Bytes unless said."""

    completion: str
    elements: int
    record: int
    """P."""
    rows: int
    data: int
    flags: int
    signals: int
    requests: int
    completions: int
    doorbells: int
    quiets: int
    memory: int
    seconds: float

    @property
    def sent(self) -> int:
        return self.data + self.flags + self.signals

    @property
    def formula(self) -> int:
        blocks = -(-self.record // BLOCK_DATA)
        row = BLOCK * blocks if self.completion == "flag_in_block" else self.record
        return self.rows * row + self.signals


def run(args: argparse.Namespace) -> int:
    settings = load_config(args.overrides)
    sizes = SIZES if args.sizes is None else tuple(int(word) for word in args.sizes.split(","))
    if min(sizes) < 1:
        raise ContractError(f"--sizes has {min(sizes)}; a row has at least 1 element")
    costs: list[list[Cost]] = run_ranks(settings, "hal.bench.completion:run_rank", sizes)
    busiest = [max(of_one, key=lambda cost: cost.sent) for of_one in zip(*costs, strict=True)]
    print(_table(settings, busiest), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps({"versions": versions(), "rows": [asdict(cost) for cost in busiest]}, indent=2))
    return int(any(cost.sent != cost.formula for of_one in costs for cost in of_one))


def run_rank(comm: Any, settings: Settings, sizes: tuple[int, ...]) -> list[Cost]:
    session = comm._session
    if not hasattr(session, "counters"):
        raise ContractError(
            f"backend {settings.connection.backend} with transport {settings.connection.transport or 'default'} does not "
            "count its requests; choose a transport that emulates a device (`hal backends` lists them)"
        )
    return [_cost(comm, settings, completion, size) for size in sizes for completion in COMPLETIONS]


def _cost(comm: Any, settings: Settings, completion: str, elements: int) -> Cost:
    work, session = settings.workload, comm._session
    spec = ExpertParallelSpec(
        work.num_experts, work.top_k, elements, work.tokens, "bfloat16", layout=settings.layout,
        schedule=settings.schedule.name, completion=completion,
    )  # fmt: skip
    # The engine itself: rows of fewer than 16 bytes are below what the interface accepts.
    engine = session.expert_parallel(spec)
    x = np.ones((work.tokens, elements), np.float32).astype(NUMPY_DTYPES["bfloat16"])
    idx = routing(work, comm.rank, work.tokens)
    weights = np.ones(idx.shape, np.float32)
    comm.barrier()
    before, start = session.counters, perf_counter()
    pending = engine.dispatch_send(as_buffer(x), as_buffer(idx), as_buffer(weights), None, None, None)
    engine.dispatch_recv(pending, None)
    seconds = perf_counter() - start
    after, sent = session.counters, engine.traffic
    comm.barrier()
    engine.close()
    moved = {name: after[name] - before[name] for name in after}
    # Ids and weights of the token, 4 bytes each, travel beside the payload, rounded up to 16 bytes.
    record = elements * ITEMSIZE["bfloat16"] + -(-8 * work.top_k // 16) * 16
    return Cost(
        completion, elements, record, sent["rows"], sent["data_bytes"], sent["flag_bytes"], sent["signal_bytes"],
        moved["wqes"], moved["cqes"], moved["doorbells"], moved["quiets"], engine.buffer_bytes, seconds,
    )  # fmt: skip


def _table(settings: Settings, costs: list[Cost]) -> str:
    work, link = settings.workload, settings.connection
    head = (
        f"# hal bench completion: one dispatch, {settings.ranks} ranks on {settings.topology.nodes} node(s), "
        f"{work.tokens} tokens, {work.num_experts} experts, top-{work.top_k}, bfloat16, layout {settings.layout}, schedule "
        f"{settings.schedule.name}, backend {link.backend}, transport {link.transport or 'default'}\n"
        "# busiest rank; bytes by software count: data (blocks' unused tails included), flags, signals; formula: "
        "512*ceil(P/480) a row with flag_in_block, else P, and 8 a signal\n"
        "# requests, completions, doorbells and quiets include the round's counts and words; memory is symmetric\n"
    )
    header = [
        "completion", "elements", "P", "rows", "data", "flags", "signals", "sent", "formula", "requests", "completions",
        "doorbells", "quiets", "memory", "us",
    ]  # fmt: skip
    cells = [
        [c.completion, c.elements, c.record, c.rows, c.data, c.flags, c.signals, c.sent, c.formula, c.requests,
         c.completions, c.doorbells, c.quiets, c.memory, f"{c.seconds * 1e6:.0f}"]
        for c in costs
    ]  # fmt: skip
    return head + report.table(header, cells)
