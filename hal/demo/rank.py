# SPDX-License-Identifier: Apache-2.0
"""What one rank of the demo runs: the same layers as any serving stack, with dispatch and combine in the middle."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hal.config import Settings
from hal.demo.model import Array, Model
from hal.placing import fetched, placed, settle

Routing: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]


@dataclass(frozen=True)
class Job:
    """The whole input; every rank takes its part of the tokens by :func:`share`."""

    model: Model
    ids: NDArray[np.int64]
    routing: Routing | None
    """[N, k] each, used by every layer in place of the router."""
    progress: bool = False
    """Rank 0 tells on stderr which layer is done."""
    killed: tuple[int, int] | None = None
    """(rank, layer): that rank's process is killed between that layer's dispatch and combine."""


@dataclass(frozen=True)
class LayerResult:
    """One layer on one rank. Times are seconds."""

    y: Array
    rows: int
    tokens_per_expert: NDArray[np.int32]
    dispatch: float
    experts: float
    combine: float


@dataclass(frozen=True)
class _Rows:
    """What a rank received, as NumPy arrays."""

    x: Array
    scales: NDArray[np.float32] | None
    topk_idx: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    tokens_per_expert: NDArray[np.int32]


def share(items: Array, rank: int, ranks: int) -> Any:
    """This rank's consecutive part; parts differ by one token at most."""
    return np.array_split(items, ranks)[rank]


def run_rank(comm: Any, settings: Settings, job: Job) -> list[LayerResult]:
    """All layers on this rank's tokens."""
    model = job.model
    ids = share(job.ids, comm.rank, comm.world_size)
    routing = None if job.routing is None else tuple(share(part, comm.rank, comm.world_size) for part in job.routing)
    results = []
    with comm.expert_parallel(settings.expert_parallel) as ep:
        x = model.embed(ids)
        for layer in range(model.layers):
            idx, weights = routing or model.route(layer, x)
            dies = job.killed == (comm.rank, layer)
            results.append(_layer(comm, ep, settings, model, layer, (*model.to_wire(x), idx, weights), dies))
            if job.progress and comm.rank == 0:
                print(f"layer {layer + 1} of {model.layers} done", file=sys.stderr, flush=True)
            x = model.next_input(x, results[-1].y)
    return results


def _layer(
    comm: Any, ep: Any, settings: Settings, model: Model, layer: int, tokens: tuple[Any, ...], dies: bool
) -> LayerResult:
    x, scales, idx, weights = (placed(part, ep.device) for part in tokens)
    comm.barrier()
    start = time.perf_counter()
    out = ep.dispatch(x, idx, weights, scales=scales)
    settle(ep.device)
    dispatched = time.perf_counter()
    if dies:
        os.kill(os.getpid(), signal.SIGKILL)
    first = comm.rank * (model.work.num_experts // comm.world_size)
    answer = _by_expert if settings.layout == "expert" else _by_token
    got = _Rows(*(fetched(getattr(out, field.name)) for field in fields(_Rows)))
    rows = placed(answer(model, layer, first, got), ep.device)
    computed = time.perf_counter()
    comm.barrier()
    ready = time.perf_counter()
    y = ep.combine(rows, out.handle, weighted=settings.layout == "expert")
    settle(ep.device)
    done = time.perf_counter()
    real = (got.topk_idx >= 0) if settings.layout == "expert" else (got.topk_idx >= 0).any(axis=1)
    return LayerResult(
        y=np.array(fetched(y)),
        rows=int(real.sum()),
        tokens_per_expert=np.array(got.tokens_per_expert),
        dispatch=dispatched - start,
        experts=computed - dispatched,
        combine=done - ready,
    )


def _by_token(model: Model, layer: int, first: int, out: _Rows) -> Array:
    """Layout rank: a row's experts here, weighted and summed in float32 by ascending expert, rounded once."""
    rows = model.from_wire(out.x, out.scales)
    total = np.zeros(rows.shape, np.float32)
    for local in np.unique(out.topk_idx[out.topk_idx >= 0]):
        at, position = np.nonzero(out.topk_idx == local)
        answer = model.expert(layer, first + int(local), rows[at]).astype(model.stream_dtype)
        total[at] += out.topk_weights[at, position][:, None] * answer.astype(np.float32)
    return total.astype(model.stream_dtype)


def _by_expert(model: Model, layer: int, first: int, out: _Rows) -> Array:
    """Layout expert: each row through its expert; combine applies the weights."""
    rows = model.from_wire(out.x, out.scales)
    answers = np.zeros(rows.shape, model.stream_dtype)
    for local in np.unique(out.topk_idx[out.topk_idx >= 0]):
        at = np.flatnonzero(out.topk_idx == local)
        answers[at] = model.expert(layer, first + int(local), rows[at]).astype(model.stream_dtype)
    return answers
