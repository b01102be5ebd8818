# SPDX-License-Identifier: Apache-2.0
"""Run a mixture-of-experts layer stack over a text on local ranks, and compare it with one process.

Words become seeded embeddings; in each layer a router picks top-k experts, dispatch sends the rows to the ranks that own
them, the experts compute, combine sums their answers at home. Every rank's result must equal the dense one-process result
bit for bit, and lie as close to the plain float64 sum as the roundings in between allow.

  hal demo                                            four ranks, the licence text
  hal demo --text README.md --hosts 2 -n 4 schedule=hierarchical
  hal demo layout=expert workload=v3_decode ranks=2
  hal demo --routing saved.npz workload.num_experts=64
  hal demo on_peer_loss=mask                          the last rank is killed half-way; the others go on without it
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal import report
from hal.arrays import NUMPY_DTYPES
from hal.cli import add_layout, add_overrides, layout_overrides
from hal.cli.ranks import run_ranks
from hal.compose import load_config
from hal.config import Settings
from hal.demo.compare import differences, worst_share_of_bound
from hal.demo.dense import DenseLayer, run_dense
from hal.demo.model import Model
from hal.demo.rank import Job, LayerResult
from hal.demo.text import read_routing, read_text, tokenize
from hal.errors import ContractError
from hal.hosts import arranged
from hal.traffic import row_matrix

_HEADER = (
    "layer", "tokens", "rows", "to others", "dispatched", "combined", "dispatch us", "experts us", "combine us",
    "rank skew", "expert skew", "bits", "of bound",
)  # fmt: skip
_LEGEND = """\
rows        dispatched rows, one for each token and rank (layout rank) or token and expert (layout expert)
to others   rows whose expert is on another rank; `dispatched` and `combined` are their payload and scale bytes
us          the slowest rank, from a barrier to its own return
skew        largest over mean: rows received by a rank, assignments of an expert
bits        the dense one-process result in the contract's order, compared bit for bit
of bound    largest distance from the float64 result, as a share of what the roundings allow"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, metavar="FILE", help="text to run over (default: this package's licence)")
    parser.add_argument(
        "--routing", type=Path, metavar="FILE", help="saved routing .npz: topk_idx [N, k], topk_weights [N, k]"
    )
    parser.add_argument("--layers", type=int, default=3, help="layers in the stack (default 3)")
    add_layout(parser)
    add_overrides(parser)


def run(args: argparse.Namespace) -> int:
    settings = load_config(layout_overrides(args))
    if args.layers < 1:
        raise ContractError(f"--layers is {args.layers}; it must be at least 1")
    source, words, settings, job = _prepare(args, settings)
    hosts = arranged(settings)
    print("\n".join([_headline(source, settings, job), *hosts.describe()]), flush=True)
    started = time.perf_counter()
    ranks: list[list[LayerResult] | None] = run_ranks(settings, "hal.demo.rank:run_rank", job, hosts)
    elapsed = time.perf_counter() - started
    rows, wrong = _judge(settings, job, words, ranks)
    print(report.table(_HEADER, rows, left=0))
    print(_LEGEND)
    if wrong:
        print("\n".join([*wrong, "NOT OK: the ranks and the one-process result differ"]))
        return 1
    if job.killed:
        rank, layer = job.killed
        print(f"rank {rank} was killed between dispatch and combine of layer {layer}; the others went on without it")
    print(f"OK: {len(rows)} layers, {len(job.ids)} tokens, {settings.ranks} ranks, {elapsed:.1f} s with start-up")
    return 0


def _killed(settings: Settings, layers: int) -> tuple[int, int] | None:
    """Whom the demo kills, and in which layer."""
    if settings.on_peer_loss == "error":
        return None
    if settings.ranks < 2:
        raise ContractError("on_peer_loss=mask shows how ranks go on without one, so give at least ranks=2")
    return settings.ranks - 1, layers // 2


def _prepare(args: argparse.Namespace, settings: Settings) -> tuple[str, list[str], Settings, Job]:
    """The input, cut to what the ranks may hold, and the settings that a saved routing decides."""
    work = settings.workload
    source, text = read_text(args.text)
    words, ids = tokenize(text)
    if not words:
        raise ContractError(f"{source} has no words")
    routing = None
    if args.routing is not None:
        idx, weights = routing = read_routing(args.routing, work.num_experts)
        most = -(-len(idx) // settings.ranks)
        work = replace(work, top_k=idx.shape[1], tokens=max(work.tokens, most))
        settings = replace(settings, workload=work)
        source = f"{args.routing} over {source}"
        repeats = -(-len(idx) // len(words))
        words, ids = (words * repeats)[: len(idx)], np.tile(ids, repeats)[: len(idx)]
        routing = idx, weights
    limit = work.tokens * settings.ranks
    return (
        source,
        words[:limit],
        settings,
        Job(Model(work, args.layers), ids[:limit], routing, sys.stderr.isatty(), _killed(settings, args.layers)),
    )


def _headline(source: str, settings: Settings, job: Job) -> str:
    work, connection = settings.workload, settings.connection
    return (
        f"{source}: {len(job.ids)} tokens over {settings.ranks} ranks on {settings.topology.nodes} node(s); hidden "
        f"{work.hidden}, {work.num_experts} experts, top-{work.top_k}, {work.dtype}\n"
        f"backend {connection.backend}, transport {connection.transport or 'default'}, schedule {settings.schedule.name}, "
        f"completion {settings.completion.name}, layout {settings.layout}"
    )


def _judge(
    settings: Settings, job: Job, words: Sequence[str], ranks: Sequence[Sequence[LayerResult] | None]
) -> tuple[list[tuple[object, ...]], list[str]]:
    """A table row for each layer, and what is wrong. A killed rank has no results, and nothing is said of its tokens."""
    rows, wrong = [], []
    for layer, dense in enumerate(run_dense(settings, job)):
        results = {rank: done[layer] for rank, done in enumerate(ranks) if done is not None}
        parts = [
            results[rank].y if rank in results else part
            for rank, part in enumerate(np.array_split(dense.bits, settings.ranks))
        ]
        found = differences(layer, parts, dense, words)
        sent = row_matrix(
            np.array_split(dense.topk_idx, settings.ranks), settings.workload.num_experts, settings.layout
        )
        found += _count_differences(layer, settings, results, sent, dense)
        rows.append(_row(layer, settings, list(results.values()), parts, sent, dense, found))
        wrong += found
    return rows, wrong


def _row(
    layer: int,
    settings: Settings,
    results: Sequence[LayerResult],
    parts: Sequence[NDArray[Any]],
    sent: NDArray[np.int64],
    dense: DenseLayer,
    found: Sequence[str],
) -> tuple[object, ...]:
    work = settings.workload
    crossing = int(sent.sum() - np.trace(sent))
    row_bytes = work.hidden * NUMPY_DTYPES[work.dtype].itemsize + 4 * work.scale_dim
    received = sent.sum(axis=0)
    assigned = np.concatenate([item.tokens_per_expert for item in results])
    return (
        layer,
        len(dense.bits),
        int(sent.sum()),
        crossing,
        report.size(crossing * row_bytes),
        report.size(crossing * work.hidden * dense.bits.dtype.itemsize),
        *(
            f"{max(times) * 1e6:.0f}"
            for times in (
                [item.dispatch for item in results],
                [item.experts for item in results],
                [item.combine for item in results],
            )
        ),
        _skew(received),
        _skew(assigned),
        "differ" if found else "equal",
        f"{worst_share_of_bound(parts, dense):.2f}",
    )


def _count_differences(
    layer: int, settings: Settings, results: Mapping[int, LayerResult], sent: NDArray[np.int64], dense: DenseLayer
) -> list[str]:
    """Received rows and counts for each expert against the routing."""
    found = []
    local = settings.workload.num_experts // settings.ranks
    assigned = np.bincount(dense.topk_idx[dense.topk_idx >= 0], minlength=settings.workload.num_experts)
    for rank, item in results.items():
        if item.rows != sent[:, rank].sum():
            found.append(f"layer {layer}, rank {rank}: received {item.rows} rows, expected {sent[:, rank].sum()}")
        expected = assigned[rank * local : (rank + 1) * local]
        if not np.array_equal(item.tokens_per_expert, expected):
            found.append(
                f"layer {layer}, rank {rank}: tokens_per_expert is {item.tokens_per_expert.tolist()}, expected "
                f"{expected.tolist()}"
            )
    return found


def _skew(counts: NDArray[np.generic]) -> str:
    mean = float(np.mean(counts.astype(np.float64)))
    return f"{float(counts.max()) / mean:.2f}" if mean else "-"
