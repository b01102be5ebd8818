# SPDX-License-Identifier: Apache-2.0
"""Wrong elements of a dispatch or combine, counted against the seeded inputs of all ranks (``#wrong`` of the tables)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.bench.inputs import Inputs


def wrong_dispatch(out: Any, sources: Sequence[Inputs], rank: int, num_experts: int, layout: str) -> int:
    """Elements of ``out`` that are not what the contract says: rows in order, and nothing in padding."""
    local = num_experts // len(sources)
    idx, weights = np.asarray(out.topk_idx), np.asarray(out.topk_weights)
    real = idx >= 0 if layout == "expert" else (idx >= 0).any(axis=1)
    parts = [_expected(item, rank * local, local, expert) for expert in _groups(layout, local) for item in sources]
    x, scales, ids, shares = (
        np.concatenate(column) if column[0] is not None else None for column in zip(*parts, strict=True)
    )
    if layout == "expert":
        ids = np.concatenate([np.full(len(part[0]), at // len(sources)) for at, part in enumerate(parts)])
    wrong = _unequal(np.asarray(out.x)[real], x) + _unequal(idx[real], ids) + _unequal(weights[real], shares)
    if scales is not None:
        wrong += _unequal(np.asarray(out.scales)[real], scales)
    return wrong + int(np.count_nonzero(np.asarray(out.x)[~real])) + int(np.count_nonzero(weights[~real]))


def wrong_combine(y: Any, mine: Inputs, *, rank: int, ranks: int, nodes: int, num_experts: int, layout: str) -> int:
    """Elements of ``y`` that are not the token times its rows, when every expert answers with the row it was given.

    ``nodes`` above 1 (schedule hierarchical): each other node's sum is rounded before the nodes are added.
    """
    y = np.asarray(y)
    owner = mine.idx // (num_experts // ranks)
    rows = np.zeros((len(owner), ranks), np.int64)
    for target in range(ranks):
        hits = (owner == target).sum(axis=1)
        rows[:, target] = hits if layout == "expert" else hits > 0
    by_node = rows.reshape(len(rows), nodes, ranks // nodes).sum(axis=2)
    answer = mine.x.astype(np.float32).astype(y.dtype).astype(np.float32)
    total = np.zeros(answer.shape, np.float32)
    for node in range(nodes):
        part = _repeated(answer, by_node[:, node])
        total += part if node == rank // (ranks // nodes) else part.astype(y.dtype).astype(np.float32)
    return _unequal(y, total.astype(y.dtype))


def _groups(layout: str, local: int) -> Sequence[int | None]:
    return range(local) if layout == "expert" else (None,)


def _expected(source: Inputs, first: int, local: int, expert: int | None) -> tuple[Any, Any, Any, Any]:
    """(x, scales, ids, weights) of one source's rows for this rank (``expert`` None) or for one of its experts."""
    if expert is None:
        here = (source.idx >= first) & (source.idx < first + local)
        at = np.flatnonzero(here.any(axis=1))
        ids = np.where(here, source.idx - first, -1)[at]
        weights = np.where(here, source.weights, np.float32(0))[at]
    else:
        at, position = np.nonzero(source.idx == first + expert)
        ids, weights = None, source.weights[at, position]
    return source.x[at], None if source.scales is None else source.scales[at], ids, weights


def _repeated(x: NDArray[np.float32], times: NDArray[np.int64]) -> NDArray[np.float32]:
    """``x`` added to zero ``times`` times, each sum rounded, as combine does."""
    total = np.zeros(x.shape, np.float32)
    for turn in range(int(times.max(initial=0))):
        total[times > turn] += x[times > turn]
    return total


def _unequal(got: NDArray[Any], expected: NDArray[Any] | None) -> int:
    if expected is None or got.shape != expected.shape:
        return max(got.size, 0 if expected is None else expected.size, 1)
    return int(np.count_nonzero(got.astype(np.float32) != expected.astype(np.float32)))
