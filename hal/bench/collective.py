# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine, timed and checked, on one rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from hal.arrays import NUMPY_DTYPES
from hal.bench.inputs import Inputs, inputs
from hal.bench.sample import Plan, Sample, measure
from hal.bench.verify import wrong_combine, wrong_dispatch
from hal.config import Settings
from hal.placing import fetched, placed, settle
from hal.traffic import row_matrix, traffic


def run_rank(comm: Any, settings: Settings, plan: Plan) -> list[Sample]:
    """A sample for each size. Experts are left out: each row is its own answer."""
    with comm.expert_parallel(settings.expert_parallel) as ep:
        one = _dispatch if plan.operation == "dispatch" else _combine
        return [one(comm, ep, settings, plan, tokens) for tokens in plan.sizes]


def _dispatch(comm: Any, ep: Any, settings: Settings, plan: Plan, tokens: int) -> Sample:
    work = settings.workload
    sources = [inputs(work, rank, tokens) for rank in range(comm.world_size)]
    mine = sources[comm.rank]
    given = _on_device(mine, ep.device)

    def step() -> Any:
        out = ep.dispatch(**given)
        settle(ep.device)
        return out

    seconds = measure(comm, plan, tokens, step)
    out = step()
    got = SimpleNamespace(**{name: fetched(getattr(out, name)) for name in ("x", "scales", "topk_idx", "topk_weights")})
    wrong = wrong_dispatch(got, sources, comm.rank, work.num_experts, settings.layout)
    row_bytes = work.hidden * mine.x.dtype.itemsize + 4 * work.scale_dim
    return _sample(comm, settings, tokens, sources, row_bytes, work.dtype, seconds, wrong)


def _combine(comm: Any, ep: Any, settings: Settings, plan: Plan, tokens: int) -> Sample:
    work = settings.workload
    sources = [inputs(work, rank, tokens) for rank in range(comm.world_size)]
    mine = sources[comm.rank]
    out = ep.dispatch(**_on_device(mine, ep.device))
    dtype = NUMPY_DTYPES[work.combined_dtype]
    rows = placed(np.array(fetched(out.x)).astype(np.float32).astype(dtype), ep.device)

    def step() -> Any:
        y = ep.combine(rows, out.handle)
        settle(ep.device)
        return y

    seconds = measure(comm, plan, tokens, step)
    y = fetched(step())
    wrong = wrong_combine(
        y,
        mine,
        rank=comm.rank,
        ranks=comm.world_size,
        nodes=settings.topology.nodes if settings.schedule.name == "hierarchical" else 1,
        num_experts=work.num_experts,
        layout=settings.layout,
    )
    return _sample(comm, settings, tokens, sources, work.hidden * dtype.itemsize, dtype.name, seconds, wrong)


def _on_device(mine: Inputs, device: str) -> dict[str, Any]:
    """As dispatch takes them."""
    given = {"x": mine.x, "topk_idx": mine.idx, "topk_weights": mine.weights, "scales": mine.scales}
    return {name: placed(array, device) for name, array in given.items()}


def _sample(
    comm: Any,
    settings: Settings,
    tokens: int,
    sources: list[Inputs],
    row_bytes: int,
    dtype: str,
    seconds: Any,
    wrong: int,
) -> Sample:
    sent = row_matrix([item.idx for item in sources], settings.workload.num_experts, settings.layout)
    moved = traffic(sent, comm.rank, row_bytes)
    return Sample(tokens, int(sent[:, comm.rank].sum()) * settings.workload.hidden, dtype, moved, seconds, wrong)
