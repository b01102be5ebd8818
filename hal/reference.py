# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in plain NumPy, for all ranks at once: the specification that every backend is compared with.

Inputs and results are lists with one entry for each rank. Nothing here is fast, and nothing is left open: rows, padding,
the order of every sum and every rounding are as docs/contract.md says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hal.config import ExpertParallelSpec, TopologyConfig
from hal.errors import ContractError

Array = NDArray[np.generic]


@dataclass
class Routing:
    """The handle: for every row that a rank received, the token and top-k positions that it came from."""

    spec: ExpertParallelSpec
    topk_idx: list[NDArray[np.int64]]
    """[ranks][T, k], global expert ids."""
    topk_weights: list[NDArray[np.float32]]
    rows: list[dict[tuple[int, int, int], int]] = field(default_factory=list)
    """[ranks]: (source rank, token, local expert; -1 in layout rank) -> row."""
    row_count: list[int] = field(default_factory=list)
    """[ranks]: N, padding included."""
    masked: frozenset[int] = frozenset()
    """Ranks that were lost: they have no tokens, and their experts are nobody's."""

    @property
    def ranks(self) -> int:
        return len(self.topk_idx)

    @property
    def local_experts(self) -> int:
        return self.spec.num_experts // self.ranks

    def owner(self, expert: int) -> int:
        return expert // self.local_experts

    def owners(self, source: int, token: int) -> list[int]:
        """The ranks that own one of a token's experts, ascending."""
        return sorted({self.owner(int(e)) for e in self.topk_idx[source][token] if e >= 0})


@dataclass
class Dispatched:
    """What one rank receives; shapes as in docs/contract.md, section 1."""

    x: Array
    scales: NDArray[np.float32] | None
    topk_idx: NDArray[np.int32]
    topk_weights: NDArray[np.float32]
    tokens_per_expert: NDArray[np.int32]
    expert_offsets: NDArray[np.int64] | None


def dispatch(
    spec: ExpertParallelSpec,
    x: Sequence[Array],
    topk_idx: Sequence[ArrayLike] | None,
    topk_weights: Sequence[NDArray[np.float32] | None] | None = None,
    scales: Sequence[NDArray[np.float32]] | None = None,
    handle: Routing | None = None,
    masked: Collection[int] = (),
) -> tuple[list[Dispatched], Routing]:
    """Dispatch of all ranks: ``x[r]`` [T_r, H] to what each rank receives, and the handle.

    With ``handle``, ``topk_idx`` is None and the routing is the handle's. Weights left out are ones. ``masked`` ranks are
    lost: a token that names one of their experts names none there, and their own tokens do not exist. Their entries of
    ``x`` and the others are not looked at, and what is given for them as a result is nobody's.
    """
    if (topk_idx is None) == (handle is None):
        raise ContractError("give topk_idx or handle, not both and not neither")
    idx = [np.asarray(i, np.int64) for i in topk_idx] if topk_idx is not None else handle.topk_idx  # type: ignore[union-attr]
    idx = [_without(spec, masked, rank, idx) for rank in range(len(idx))]
    weights = [
        np.ones(i.shape, np.float32) if topk_weights is None or topk_weights[r] is None else np.asarray(topk_weights[r])
        for r, i in enumerate(idx)
    ]
    routing = Routing(spec, idx, weights, masked=frozenset(masked))
    for rank in range(routing.ranks):
        rows, count = _place_latency(routing, rank) if spec.schedule == "latency" else _place(routing, rank)
        routing.rows.append(rows)
        routing.row_count.append(count)
    return [_receive(routing, rank, x, scales) for rank in range(routing.ranks)], routing


def _without(
    spec: ExpertParallelSpec, masked: Collection[int], rank: int, topk_idx: Sequence[NDArray[np.int64]]
) -> NDArray[np.int64]:
    """A rank's expert ids once ``masked`` ranks are lost: none for a lost rank, -1 for an expert of one."""
    if rank in masked:
        return np.empty((0, spec.top_k), np.int64)
    idx = topk_idx[rank]
    return np.where(np.isin(idx // (spec.num_experts // len(topk_idx)), list(masked)), -1, idx)


def _arrivals(routing: Routing, rank: int, group: int) -> list[list[int]]:
    """[source ranks]: the tokens sent to this rank (group -1) or to its local expert ``group``, ascending."""
    first = rank * routing.local_experts
    if group < 0:
        return [[t for t in range(len(idx)) if rank in routing.owners(s, t)] for s, idx in enumerate(routing.topk_idx)]
    return [[t for t, ids in enumerate(idx) if first + group in ids] for idx in routing.topk_idx]


def _groups(routing: Routing) -> list[int]:
    return [-1] if routing.spec.layout == "rank" else list(range(routing.local_experts))


def _place(routing: Routing, rank: int) -> tuple[dict[tuple[int, int, int], int], int]:
    """Rows one behind the other, by source rank, then token; each expert's group starts aligned."""
    rows: dict[tuple[int, int, int], int] = {}
    n = 0
    for group in _groups(routing):
        for source, tokens in enumerate(_arrivals(routing, rank, group)):
            for token in tokens:
                rows[source, token, group] = n
                n += 1
        if group >= 0:
            n = -(-n // routing.spec.alignment) * routing.spec.alignment
    return rows, n


def _place_latency(routing: Routing, rank: int) -> tuple[dict[tuple[int, int, int], int], int]:
    """Fixed places: ``max_tokens`` rows for each source (and local expert)."""
    rows: dict[tuple[int, int, int], int] = {}
    groups = _groups(routing)
    for g, group in enumerate(groups):
        for source, tokens in enumerate(_arrivals(routing, rank, group)):
            for i, token in enumerate(tokens):
                rows[source, token, group] = (g * routing.ranks + source) * routing.spec.max_tokens + i
    return rows, len(groups) * routing.ranks * routing.spec.max_tokens


def _receive(
    routing: Routing, rank: int, x: Sequence[Array], scales: Sequence[NDArray[np.float32]] | None
) -> Dispatched:
    spec, n, local = routing.spec, routing.row_count[rank], routing.local_experts
    per_row = (n, spec.top_k) if spec.layout == "rank" else (n,)
    out = Dispatched(
        np.zeros((n, spec.hidden), x[rank].dtype),
        np.zeros((n, spec.scale_dim), np.float32) if spec.scale_dim else None,
        np.full(per_row, -1, np.int32),
        np.zeros(per_row, np.float32),
        np.zeros(local, np.int32),
        _expert_offsets(routing, rank) if spec.layout == "expert" else None,
    )
    for (source, token, _), row in routing.rows[rank].items():
        out.x[row] = x[source][token]
        if out.scales is not None and scales is not None:
            out.scales[row] = scales[source][token]
    for (source, token, group), row in routing.rows[rank].items():
        for j, expert in enumerate(routing.topk_idx[source][token]):
            if expert < 0 or routing.owner(int(expert)) != rank or group not in (-1, expert - rank * local):
                continue
            at = (row, j) if spec.layout == "rank" else row
            out.topk_idx[at] = expert - rank * local
            out.topk_weights[at] = routing.topk_weights[source][token, j]
            out.tokens_per_expert[expert - rank * local] += 1
    return out


def _expert_offsets(routing: Routing, rank: int) -> NDArray[np.int64]:
    spec = routing.spec
    if spec.schedule == "latency":
        return np.arange(routing.local_experts + 1, dtype=np.int64) * (routing.ranks * spec.max_tokens)
    sizes = [sum(map(len, _arrivals(routing, rank, g))) for g in range(routing.local_experts)]
    aligned = [-(-size // spec.alignment) * spec.alignment for size in sizes]
    return np.concatenate([[0], np.cumsum(aligned)]).astype(np.int64)


@dataclass
class Term:
    """One row of a token's sum."""

    owner: int
    row: int
    weight: np.float32 | None


def combine(
    x: Sequence[Array],
    handle: Routing,
    *,
    weighted: bool = False,
    topk_weights: Sequence[NDArray[np.float32]] | None = None,
    bias: Sequence[Sequence[Array]] | None = None,
    topology: TopologyConfig | None = None,
    masked: Collection[int] = (),
) -> list[Array] | tuple[list[Array], list[NDArray[np.float32]]]:
    """Combine of all ranks: the experts' rows ``x[r]`` [N_r, H] to each home's ``y`` [T_r, H].

    ``bias[r]`` are rank r's bias arrays. With ``topk_weights[r]`` (shape as dispatch gave them) these are carried home:
    the result is ``(y, topk_weights [T_r, k])``. ``topology`` matters with schedule hierarchical only. ``masked`` ranks are
    lost, since the handle's dispatch or before: their experts' rows are left out of every sum, and the weights that they
    would carry home are 0. Nothing is put in their place. What is given for a lost rank as a result is nobody's.
    """
    if weighted and handle.spec.layout == "rank":
        raise ContractError("weighted=True needs layout 'expert': in layout 'rank' a row already sums several experts")
    nodes = topology.nodes if topology is not None and handle.spec.schedule == "hierarchical" else 1
    y = []
    for home in range(handle.ranks):
        out = np.zeros((len(handle.topk_idx[home]), handle.spec.hidden), x[home].dtype)
        for token in range(len(out)):
            terms = [term for term in _terms(handle, home, token, weighted) if term.owner not in masked]
            acc = _sum_token(x, terms, home, handle.ranks, nodes)
            for array in bias[home] if bias is not None else ():
                acc = acc + array[token].astype(np.float32)
            out[token] = acc.astype(out.dtype)
        y.append(out)
    if topk_weights is None:
        return y
    return y, [_weights_home(handle, home, topk_weights, masked) for home in range(handle.ranks)]


def _terms(handle: Routing, home: int, token: int, weighted: bool) -> list[Term]:
    """A token's rows in the order in which they are summed: by rank, or by top-k position."""
    if handle.spec.layout == "rank":
        return [Term(r, handle.rows[r][home, token, -1], None) for r in handle.owners(home, token)]
    terms = []
    for j, expert in enumerate(handle.topk_idx[home][token].tolist()):
        if expert >= 0:
            owner = handle.owner(expert)
            row = handle.rows[owner][home, token, expert - owner * handle.local_experts]
            terms.append(Term(owner, row, handle.topk_weights[home][token, j] if weighted else None))
    return terms


def _sum_rows(x: Sequence[Array], terms: Sequence[Term]) -> NDArray[np.float32]:
    """From zero, one term after the other; each product and each sum is rounded to float32."""
    acc = np.zeros(x[0].shape[1], np.float32)
    for term in terms:
        row = x[term.owner][term.row].astype(np.float32)
        acc = acc + (row if term.weight is None else row * term.weight)
    return acc


def _sum_token(x: Sequence[Array], terms: Sequence[Term], home: int, ranks: int, nodes: int) -> NDArray[np.float32]:
    """With several nodes each node's part is summed first, and rounded to the rows' type if it crosses to another node.
    The home's own node's part never crosses, so it is not rounded."""
    if nodes == 1:
        return _sum_rows(x, terms)
    node_ranks = ranks // nodes
    acc = np.zeros(x[0].shape[1], np.float32)
    for node in range(nodes):
        part = [term for term in terms if term.owner // node_ranks == node]
        if part:
            partial = _sum_rows(x, part)
            crosses = node != home // node_ranks
            acc = acc + (partial.astype(x[0].dtype).astype(np.float32) if crosses else partial)
    return acc


def _weights_home(
    handle: Routing, home: int, topk_weights: Sequence[NDArray[np.float32]], masked: Collection[int]
) -> NDArray[np.float32]:
    """Each top-k position's weight as its expert's rank gave it; 0 where there is no expert."""
    out = np.zeros(handle.topk_idx[home].shape, np.float32)
    for token, ids in enumerate(handle.topk_idx[home].tolist()):
        for j, expert in enumerate(ids):
            if expert < 0 or handle.owner(expert) in masked:
                continue
            owner = handle.owner(expert)
            if handle.spec.layout == "rank":
                out[token, j] = topk_weights[owner][handle.rows[owner][home, token, -1], j]
            else:
                out[token, j] = topk_weights[owner][
                    handle.rows[owner][home, token, expert - owner * handle.local_experts]
                ]
    return out
