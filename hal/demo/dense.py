# SPDX-License-Identifier: Apache-2.0
"""The same layers in one process without any communication: what the demo's ranks must reproduce.

Two results for each layer. ``bits`` follows the contract's order and roundings (docs/contract.md, section 2), so the ranks
must equal it bit for bit. ``exact`` is the plain float64 sum over all chosen experts, which knows nothing of ranks; with
``bound``, the most that the roundings in between can move an element.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hal.config import Settings
from hal.demo.model import Array, Model, finfo
from hal.demo.rank import Job


@dataclass(frozen=True)
class DenseLayer:
    """[N, H] results of all tokens, and the routing [N, k] that was dispatched."""

    bits: Array
    exact: NDArray[np.float64]
    bound: NDArray[np.float64]
    topk_idx: NDArray[np.int64]


def run_dense(settings: Settings, job: Job) -> Iterator[DenseLayer]:
    """Layer after layer, over all tokens."""
    model, x = job.model, job.model.embed(job.ids)
    for layer in range(model.layers):
        idx, weights = job.routing or model.route(layer, x)
        dispatched, combined = without_the_killed(settings, job, layer, idx)
        done = _layer(settings, model, layer, x, combined, weights)
        yield replace(done, topk_idx=dispatched)
        x = model.next_input(x, done.bits)


def without_the_killed(
    settings: Settings, job: Job, layer: int, idx: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A layer's routing as it is dispatched, and as it is combined. A rank is killed in between: from then on its experts
    are nobody's, and from the next layer on its tokens are gone."""
    if job.killed is None or layer < job.killed[1]:
        return idx, idx
    rank, when = job.killed
    less = np.where(idx // (settings.workload.num_experts // settings.ranks) == rank, -1, idx)
    if layer == when:
        return idx, less
    np.array_split(less, settings.ranks)[rank][...] = -1
    return less, less


def _layer(
    settings: Settings, model: Model, layer: int, x: Array, idx: NDArray[np.int64], weights: NDArray[np.float32]
) -> DenseLayer:
    rows = model.from_wire(*model.to_wire(x))
    ranks, experts, dtype = settings.ranks, model.work.num_experts, model.stream_dtype
    exact, magnitude = np.zeros(rows.shape), np.zeros(rows.shape)
    answers = np.zeros((*idx.shape, rows.shape[1]), dtype)
    for expert in np.unique(idx[idx >= 0]):
        at, position = np.nonzero(idx == expert)
        answer = model.expert(layer, int(expert), rows[at])
        answers[at, position] = answer.astype(dtype)
        term = weights[at, position].astype(np.float64)[:, None] * answer
        exact[at] += term
        magnitude[at] += np.abs(term)

    owner = np.where(idx >= 0, idx // (experts // ranks), -1)
    by_rank = settings.layout == "rank"
    terms = _rank_sums(idx, owner, weights, answers, ranks) if by_rank else _weighted(owner, weights, answers)
    nodes = settings.topology.nodes if settings.schedule.name == "hierarchical" else 1
    home = np.repeat(np.arange(ranks), [len(part) for part in np.array_split(idx, ranks)])
    bits = _summed(terms, ranks // nodes, home, np.zeros(rows.shape, dtype))

    # Each rounding to the rows' type moves a value by at most half a unit in its last place: the expert's answer, the
    # rank's sum, the node's sum and the result. One more covers second-order terms. A float32 sum of k products moves it
    # by at most k units of 2^-24 in the sum and one in the product, and nodes add one each.
    roundings = 2 + by_rank + (nodes > 1) + 1
    sums = (idx.shape[1] + 1 + nodes) * 2.0**-24
    half_unit = float(finfo(dtype).eps) / 2
    smallest = float(finfo(dtype).smallest_subnormal)
    return DenseLayer(bits, exact, (roundings * half_unit + sums) * magnitude + roundings * smallest, idx)


Term: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Owning rank of each token's term (-1 = none), and the terms [N, H]."""


def _rank_sums(
    idx: NDArray[np.int64], owner: NDArray[np.int64], weights: NDArray[np.float32], answers: Array, ranks: int
) -> Iterator[Term]:
    """Layout rank: one term for each rank, its experts summed in float32 by ascending expert and rounded."""
    by_expert = np.argsort(idx, axis=1, kind="stable")
    for rank in range(ranks):
        total = np.zeros((len(idx), answers.shape[2]), np.float32)
        for column in range(idx.shape[1]):
            position = by_expert[:, column]
            at = np.flatnonzero(owner[np.arange(len(idx)), position] == rank)
            chosen = position[at]
            total[at] += weights[at, chosen][:, None] * answers[at, chosen].astype(np.float32)
        here = (owner == rank).any(axis=1)
        yield np.where(here, rank, -1), total.astype(answers.dtype).astype(np.float32)


def _weighted(owner: NDArray[np.int64], weights: NDArray[np.float32], answers: Array) -> Iterator[Term]:
    """Layout expert: one term for each top-k position."""
    for position in range(owner.shape[1]):
        yield owner[:, position], weights[:, position, None] * answers[:, position].astype(np.float32)


def _summed(terms: Iterator[Term], node_ranks: int, home: NDArray[np.int64], y: Array) -> Array:
    """``y`` [N, H] filled with the sum in float32 from zero, in the terms' order.

    By node first where there are several: a node's sum is rounded to ``y``'s type when it crosses to the node of the
    token's ``home`` rank [N].
    """
    nodes: dict[int, NDArray[np.float32]] = {}
    for owner, term in terms:
        for node in np.unique(owner[owner >= 0] // node_ranks):
            total = nodes.setdefault(int(node), np.zeros(y.shape, np.float32))
            at = (owner >= 0) & (owner // node_ranks == node)
            total[at] += term[at]
    total = np.zeros(y.shape, np.float32)
    for node in sorted(nodes):
        crosses = (home // node_ranks != node)[:, None]
        total += np.where(crosses, nodes[node].astype(y.dtype).astype(np.float32), nodes[node])
    y[...] = total.astype(y.dtype)
    return y
