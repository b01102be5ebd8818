# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md in torch, whole arrays at a time: what rank ``me`` must get, from the inputs of all ranks. The small
cases of this are held against hal/reference.py by test_oracle.py, which needs no GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hal.config import QUANTISED_DTYPES, ExpertParallelSpec

Tensor = torch.Tensor


@dataclass
class Batch:
    """All ranks' inputs."""

    x: list[Tensor]
    topk_idx: list[Tensor]
    topk_weights: list[Tensor]
    scales: list[Tensor | None]


@dataclass
class Rows:
    """What one rank receives, and where every row came from."""

    x: Tensor
    scales: Tensor | None
    topk_idx: Tensor
    topk_weights: Tensor
    tokens_per_expert: Tensor
    expert_offsets: Tensor | None
    used: Tensor
    place: dict[int, Tensor] = field(default_factory=dict)
    """Source rank: layout rank [T] row of each token here, layout expert [T, k] row of each entry here; -1 = none."""


def inputs(spec: ExpertParallelSpec, counts: list[int], seed: int, device: Any, skew: float = 0.0) -> Batch:
    """Seeded inputs of all ranks; ``skew`` above 0 makes low expert ids more likely."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    batch = Batch([], [], [], [])
    quantised = spec.dtype in QUANTISED_DTYPES
    for tokens in counts:
        score = torch.rand(tokens, spec.num_experts, generator=generator)
        score = score - skew * torch.arange(spec.num_experts) / spec.num_experts
        ids = score.topk(spec.top_k, dim=1).indices
        ids = torch.where(torch.rand(ids.shape, generator=generator) < 0.1, -1, ids)
        raw = torch.randint(-(2**31), 2**31 - 1, (tokens, spec.hidden // 4 + 1), generator=generator, dtype=torch.int64)
        values = (raw.to(torch.float32) / 2**31).repeat_interleave(4, 1)[:, : spec.hidden]
        values = values * torch.linspace(0.5, 2.0, spec.hidden)
        if spec.dtype == "int8":
            values = values * 60  # of at most 2 in size
        batch.x.append(values.to(getattr(torch, spec.dtype)).contiguous().to(device))
        batch.topk_idx.append(ids.to(device))
        batch.topk_weights.append(torch.randn(ids.shape, generator=generator).to(device))
        has_scales = quantised and spec.scale_dim
        batch.scales.append(torch.rand(tokens, spec.scale_dim, generator=generator).to(device) if has_scales else None)
    return batch


def dispatch(spec: ExpertParallelSpec, batch: Batch, me: int) -> Rows:
    return _by_rank(spec, batch, me) if spec.layout == "rank" else _by_expert(spec, batch, me)


def _empty(spec: ExpertParallelSpec, batch: Batch, rows: int, per_row: tuple[int, ...]) -> Rows:
    device = batch.x[0].device
    return Rows(
        torch.zeros(rows, spec.hidden, dtype=torch.float32, device=device).to(batch.x[0].dtype),
        torch.zeros(rows, spec.scale_dim, device=device) if spec.scale_dim else None,
        torch.full((rows, *per_row), -1, dtype=torch.int32, device=device),
        torch.zeros(rows, *per_row, device=device),
        torch.zeros(0),
        None,
        torch.zeros(rows, dtype=torch.bool, device=device),
    )


def _copy(dtype: torch.dtype, into: Tensor, rows: Tensor, source: Tensor) -> None:
    raw = torch.uint8 if dtype.itemsize == 1 else torch.int16 if dtype.itemsize == 2 else torch.int32
    into.view(raw)[rows] = source.view(raw)


def _by_rank(spec: ExpertParallelSpec, batch: Batch, me: int) -> Rows:
    local = spec.num_experts // len(batch.x)
    here = [(idx // local == me) & (idx >= 0) for idx in batch.topk_idx]
    tokens = [h.any(1).nonzero().flatten() for h in here]
    fixed = spec.schedule == "latency"
    total = len(batch.x) * spec.max_tokens if fixed else sum(map(len, tokens))
    out = _empty(spec, batch, total, (spec.top_k,))
    counts = torch.zeros(local, dtype=torch.int64, device=batch.x[0].device)
    first = 0
    for source, chosen in enumerate(tokens):
        begin = source * spec.max_tokens if fixed else first
        rows = torch.arange(begin, begin + len(chosen), device=chosen.device)
        mask = here[source][chosen]
        _copy(out.x.dtype, out.x, rows, batch.x[source][chosen])
        out.topk_idx[rows] = torch.where(mask, batch.topk_idx[source][chosen] - me * local, -1).int()
        out.topk_weights[rows] = torch.where(mask, batch.topk_weights[source][chosen], 0.0)
        if out.scales is not None:
            out.scales[rows] = batch.scales[source][chosen]
        out.used[rows] = True
        place = torch.full((len(batch.x[source]),), -1, device=chosen.device)
        place[chosen] = rows
        out.place[source] = place
        counts += torch.bincount((batch.topk_idx[source] - me * local)[here[source]].flatten(), minlength=local)
        first += len(chosen)
    out.tokens_per_expert = counts.int()
    return out


def _by_expert(spec: ExpertParallelSpec, batch: Batch, me: int) -> Rows:
    world, device = len(batch.x), batch.x[0].device
    local = spec.num_experts // world
    fixed = spec.schedule == "latency"
    counts = torch.stack(
        [
            torch.bincount((i - me * local)[(i // local == me) & (i >= 0)].flatten(), minlength=local)
            for i in batch.topk_idx
        ]
    )
    totals = counts.sum(0)
    aligned = (totals + spec.alignment - 1) // spec.alignment * spec.alignment
    if fixed:
        aligned = torch.full_like(totals, world * spec.max_tokens)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=device), aligned.cumsum(0)])
    out = _empty(spec, batch, int(offsets[-1]), ())
    for source, idx in enumerate(batch.topk_idx):
        mask = (idx // local == me) & (idx >= 0)
        entry = mask.flatten().nonzero().flatten()
        expert = (idx.flatten()[entry] - me * local).long()
        order = torch.argsort(expert, stable=True)
        entry, expert = entry[order], expert[order]
        within = (
            torch.arange(len(expert), device=device)
            - torch.cat([torch.zeros(1, dtype=torch.int64, device=device), counts[source].cumsum(0)[:-1]])[expert]
        )
        before = source * spec.max_tokens if fixed else counts[:source].sum(0)[expert]
        rows = offsets[expert] + before + within
        token = entry // spec.top_k
        _copy(out.x.dtype, out.x, rows, batch.x[source][token])
        out.topk_idx[rows] = expert.int()
        out.topk_weights[rows] = batch.topk_weights[source].flatten()[entry]
        if out.scales is not None:
            out.scales[rows] = batch.scales[source][token]
        out.used[rows] = True
        place = torch.full((idx.numel(),), -1, device=device)
        place[entry] = rows
        out.place[source] = place.view(idx.shape)
    out.tokens_per_expert, out.expert_offsets = totals.int(), offsets
    return out


def answers(spec: ExpertParallelSpec, rows: list[int], seed: int, device: Any) -> list[Tensor]:
    """Made-up rows of the experts of all ranks, padding included."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    dtype = getattr(torch, spec.combine_dtype or spec.dtype)
    return [
        (
            torch.randn(n, min(spec.hidden, 64), generator=generator).repeat(1, -(-spec.hidden // 64))[:, : spec.hidden]
            * torch.linspace(0.5, 2.0, spec.hidden)
        )
        .to(dtype)
        .contiguous()
        .to(device)
        for n in rows
    ]


def combine(
    spec: ExpertParallelSpec,
    batch: Batch,
    received: list[Rows],
    y: list[Tensor],
    me: int,
    *,
    weighted: bool = False,
    bias: tuple[Tensor, ...] = (),
    by_rank: bool = False,
) -> Tensor:
    """``by_rank``: each rank's part is summed first, and rounded when it comes from another rank."""
    idx = batch.topk_idx[me]
    acc = torch.zeros(len(idx), spec.hidden, device=idx.device)
    if spec.layout == "rank":
        for rank, rows in enumerate(received):
            acc = _add(acc, y[rank], rows.place[me], None)
    elif by_rank:
        for rank, rows in enumerate(received):
            part = torch.zeros_like(acc)
            for j in range(spec.top_k):
                part = _add(part, y[rank], rows.place[me][:, j], batch.topk_weights[me][:, j] if weighted else None)
            any_here = (rows.place[me] >= 0).any(1)
            sent = part if rank == me else part.to(y[rank].dtype).float()
            acc = torch.where(any_here[:, None], acc + sent, acc)
    else:
        for j in range(spec.top_k):
            for rank, rows in enumerate(received):
                acc = _add(acc, y[rank], rows.place[me][:, j], batch.topk_weights[me][:, j] if weighted else None)
    for array in bias:
        acc = acc + array.float()
    return acc.to(y[me].dtype)


def _add(acc: Tensor, y: Tensor, place: Tensor, weight: Tensor | None) -> Tensor:
    here = place >= 0
    if len(y) == 0:
        return acc
    rows = y[place.clamp(min=0)].float()
    if weight is not None:
        rows = rows * weight[:, None]
    return torch.where(here[:, None], acc + rows, acc)


def weights_home(
    spec: ExpertParallelSpec, batch: Batch, received: list[Rows], carried: list[Tensor], me: int
) -> Tensor:
    idx = batch.topk_idx[me]
    local = spec.num_experts // len(batch.x)
    out = torch.zeros(idx.shape, device=idx.device)
    for rank, rows in enumerate(received):
        here = (idx // local == rank) & (idx >= 0)
        place = rows.place[me]
        if spec.layout == "rank":
            got = carried[rank][place.clamp(min=0)] if len(carried[rank]) else torch.zeros_like(out)
        else:
            got = carried[rank][place.clamp(min=0)] if len(carried[rank]) else torch.zeros_like(out)
        out = torch.where(here, got, out)
    return out
