# SPDX-License-Identifier: Apache-2.0
"""A backend of threads for tests of the interface alone: engines that meet in a shared table and compute with NumPy.

It states docs/contract.md in the plainest way, has no symmetric memory, and records what the interface handed it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hal.arrays import NUMPY_DTYPES, as_buffer, as_numpy
from hal.backend import Received
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec
from hal.expert_parallel import ExpertParallel


class Meeting:
    """All ranks put something down and all pick everything up; used as bootstrap and as wire."""

    def __init__(self, ranks: int, timeout: float = 60.0) -> None:
        self.ranks, self.timeout = ranks, timeout
        self._rounds: dict[tuple[str, int], list[Any]] = {}
        self._changed = threading.Condition()

    def put(self, name: str, turn: int, rank: int, value: Any) -> None:
        with self._changed:
            self._rounds.setdefault((name, turn), [None] * self.ranks)[rank] = (value,)
            self._changed.notify_all()

    def get(self, name: str, turn: int) -> list[Any]:
        with self._changed:
            table = self._rounds.setdefault((name, turn), [None] * self.ranks)
            if not self._changed.wait_for(lambda: None not in table, self.timeout):
                raise TimeoutError(f"{name} {turn}: {[entry is not None for entry in table]}")
            return [entry[0] for entry in table]


class Rank:
    """Bootstrap and session of one rank."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.world_size, self.meeting, self._turn = rank, meeting.ranks, meeting, 0
        self.engine: Engine | None = None

    agree = Bootstrap.agree

    def all_gather(self, value: Any, what: str = "") -> list[Any]:
        self._turn += 1
        self.meeting.put("bootstrap", self._turn, self.rank, value)
        return self.meeting.get("bootstrap", self._turn)

    def expert_parallel(self, spec: ExpertParallelSpec) -> Engine:
        self.engine = Engine(self, spec)
        return self.engine

    def make(self, **settings: Any) -> ExpertParallel:
        return ExpertParallel(self, self, ExpertParallelSpec(**settings), timeout=60.0)


class Engine:
    """See hal.backend.Engine."""

    device = "cpu"

    def __init__(self, rank: Rank, spec: ExpertParallelSpec) -> None:
        self.rank, self.spec, self.calls = rank, spec, []
        self.local = spec.num_experts // rank.world_size
        self.buffer_bytes = spec.max_tokens * spec.hidden
        self.name = f"ep{rank._turn}"
        self._turn, self.closed = 0, False

    def dispatch_send(self, x, topk_idx, topk_weights, scales, state, stream):
        self.calls.append(("dispatch", x, topk_idx, topk_weights, scales, state, stream))
        idx = state["idx"] if topk_idx is None else as_numpy(topk_idx).copy()
        weights = np.ones(idx.shape, np.float32) if topk_weights is None else as_numpy(topk_weights).copy()
        mine = (as_numpy(x).copy(), idx, weights, None if scales is None else as_numpy(scales).copy())
        return self._send(mine), idx, weights

    def dispatch_recv(self, pending, stream):
        turn, idx, weights = pending
        sent = self.rank.meeting.get(self.name, turn)
        rows = _rank_rows(sent, self.rank.rank, self.local) if self.spec.layout == "rank" else None
        counts = np.zeros(self.local, np.int32)
        first = self.rank.rank * self.local
        for _, ids, _, _ in sent:
            for expert in range(self.local):
                counts[expert] += (ids == first + expert).sum()
        offsets = None
        if rows is None:
            padded = -(-counts.astype(np.int64) // self.spec.alignment) * self.spec.alignment
            offsets = np.concatenate(([0], np.cumsum(padded)))
            rows = _expert_rows(sent, first, offsets)
        state = {"idx": idx, "weights": weights, "rows": rows, "sent": [ids for _, ids, _, _ in sent]}
        n, spec = len(rows), self.spec
        x = np.zeros((n, spec.hidden), NUMPY_DTYPES[spec.dtype])
        scales = np.zeros((n, spec.scale_dim), np.float32)
        shape = (n, spec.top_k) if offsets is None else (n,)
        out_idx, out_w = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
        for row, source in enumerate(rows):
            if source is None:
                continue
            rank, token, expert = source
            xs, ids, ws, scs = sent[rank]
            x[row] = xs[token]
            if spec.scale_dim:
                scales[row] = scs[token]
            here = (ids[token] >= first) & (ids[token] < first + self.local)
            if expert is None:
                out_idx[row], out_w[row] = np.where(here, ids[token] - first, -1), np.where(here, ws[token], 0)
            else:
                out_idx[row], out_w[row] = expert, ws[token][ids[token] == first + expert][0]
        arrays = (x, scales if spec.scale_dim else None, out_idx, out_w, counts, offsets)
        return Received(*(None if a is None else as_buffer(a) for a in arrays), state)

    def combine_send(self, x, state, topk_weights, weighted, stream):
        self.calls.append(("combine", x, state, topk_weights, weighted, stream))
        carried = None if topk_weights is None else as_numpy(topk_weights).copy()
        turn = self._send((as_numpy(x).copy(), carried, state["rows"]))
        return turn, state, weighted

    def combine_recv(self, pending, bias, stream):
        turn, state, weighted = pending
        answers = self.rank.meeting.get(self.name, turn)
        idx = state["idx"]
        total = np.zeros((len(idx), self.spec.hidden), np.float32)
        home = np.zeros(idx.shape, np.float32)
        for token, ids in enumerate(idx):
            for rank, position in self._sources(ids):
                x, carried, rows = answers[rank]
                expert = None if self.spec.layout == "rank" else ids[position] - rank * self.local
                row = rows.index((self.rank.rank, token, expert))
                value = x[row].astype(np.float32)
                total[token] += state["weights"][token, position] * value if weighted else value
                if carried is not None and expert is None:
                    here = ids // self.local == rank
                    home[token, here] = carried[row][here]
                elif carried is not None:
                    home[token, position] = carried[row]
        for one in bias:
            total += as_numpy(one).astype(np.float32)
        y = as_buffer(total.astype(NUMPY_DTYPES[self.spec.combine_dtype]))
        return y, as_buffer(home) if answers[0][1] is not None else None

    def _sources(self, ids):
        """(rank, top-k position) in summation order."""
        if self.spec.layout == "expert":
            return [(e // self.local, j) for j, e in enumerate(ids) if e >= 0]
        return [(r, 0) for r in sorted({e // self.local for e in ids.tolist() if e >= 0})]

    def _send(self, value):
        self._turn += 1
        self.rank.meeting.put(self.name, self._turn, self.rank.rank, value)
        return self._turn

    def close(self) -> None:
        self.closed = True


def _rank_rows(sent, rank, local):
    return [
        (s, t, None)
        for s, (_, ids, _, _) in enumerate(sent)
        for t, row in enumerate(ids)
        if (row // local == rank).any()
    ]


def _expert_rows(sent, first, offsets):
    rows: list[Any] = [None] * int(offsets[-1])
    for expert in range(len(offsets) - 1):
        named = [
            (s, t, expert)
            for s, (_, ids, _, _) in enumerate(sent)
            for t in np.flatnonzero((ids == first + expert).any(axis=1)).tolist()
        ]
        rows[int(offsets[expert]) : int(offsets[expert]) + len(named)] = named
    return rows


def run(ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """``function(rank, *args)`` on threads; results in rank order, the first error raised."""
    meeting = Meeting(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(function, Rank(rank, meeting), *args) for rank in range(ranks)]
        return [future.result() for future in futures]
