# SPDX-License-Identifier: Apache-2.0
"""One ExpertParallel on all ranks of a case, its inputs, and what hal.reference says that every rank must get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cases import MAX_TOKENS, Case
from numpy.typing import NDArray
from targets import NUMPY_DTYPES, Target, fetch, poison

import hal
from hal import reference
from hal.bench.inputs import as_rows

Array = NDArray[Any]
FIELDS = ("x", "scales", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets")
BY_ROW = FIELDS[:4]


class Tokens:
    """One rank's seeded input to one dispatch: any values, distinct experts in a token, some of them -1."""

    def __init__(self, case: Case, tokens: int, seed: Any, missing: float = 0.2) -> None:
        rng = np.random.default_rng(seed)
        self.x = as_rows(rng.standard_normal((tokens, case.hidden)), case.dtype)
        ids = np.argsort(rng.random((tokens, case.num_experts)), axis=1)[:, : case.top_k].astype(np.int64)
        self.topk_idx = np.where(rng.random(ids.shape) < missing, -1, ids)
        self.topk_weights = rng.standard_normal((tokens, case.top_k)).astype(np.float32)
        self.scales = rng.random((tokens, case.scale_dim)).astype(np.float32) if case.scale_dim else None


def batch(case: Case, seed: Any, counts: Callable[[int], int] | None = None, **options: Any) -> list[Tokens]:
    """Every rank's tokens; by default any number from 0 to ``max_tokens`` each."""
    rng = np.random.default_rng([*np.atleast_1d(seed), 7])
    sizes = [counts(r) if counts else int(rng.integers(0, MAX_TOKENS + 1)) for r in range(case.ranks)]
    return [Tokens(case, size, [*np.atleast_1d(seed), r], **options) for r, size in enumerate(sizes)]


class Expected:
    """What the reference says of one batch."""

    def __init__(self, case: Case, sent: list[Tokens], handle: reference.Routing | None = None) -> None:
        self.case, self.sent = case, sent
        self.rows, self.handle = reference.dispatch(
            hal.ExpertParallelSpec(**case.settings),
            [t.x for t in sent],
            None if handle else [t.topk_idx for t in sent],
            [t.topk_weights for t in sent],
            [t.scales for t in sent] if case.scale_dim else None,
            handle,
        )

    def answers(self, seed: Any) -> list[Array]:
        """Made-up rows of the experts, of the combined type. Padding holds values too: nobody may sum it."""
        dtype = NUMPY_DTYPES[self.case.combine_dtype]
        return [
            np.random.default_rng([*np.atleast_1d(seed), r]).standard_normal(rows.x.shape).astype(dtype)
            for r, rows in enumerate(self.rows)
        ]

    def combine(self, answers: list[Array], **options: Any) -> Any:
        return reference.combine(answers, self.handle, topology=hal.TopologyConfig(self.case.nodes), **options)


class Layer:
    """One rank's ExpertParallel, which takes and gives NumPy arrays and overwrites what the backend gave."""

    def __init__(self, target: Target, case: Case, comm: hal.Communicator, **settings: Any) -> None:
        self.target, self.case, self.rank = target, case, comm.rank
        self.ep = comm.expert_parallel(**case.settings, **settings)

    def arguments(self, tokens: Tokens, **options: Any) -> dict[str, Any]:
        names = (
            ("x", "topk_weights", "scales") if options.get("handle") else ("x", "topk_idx", "topk_weights", "scales")
        )
        return {**{name: self.target.give(getattr(tokens, name), self.rank) for name in names}, **options}

    def dispatch(self, tokens: Tokens, expected: Expected, **options: Any) -> hal.Handle:
        """Dispatch, compare, poison."""
        out = self.ep.dispatch(**self.arguments(tokens, **options))
        return self.check(out, expected)

    def check(self, out: hal.Dispatched, expected: Expected) -> hal.Handle:
        rows = expected.rows[self.rank]
        for name in FIELDS:
            same(name, getattr(out, name), getattr(rows, name))
        # HAL clears what HAL wrote: callers leave padding rows alone that no group has, as schedule latency gives them.
        poison(*(getattr(out, name) for name in BY_ROW), rows=in_use(self.case, rows))
        poison(*(getattr(out, name) for name in FIELDS[len(BY_ROW) :]))
        return out.handle

    def combine(self, answers: list[Array], handle: hal.Handle, wanted: list[Array], **options: Any) -> None:
        y = self.ep.combine(self.target.give(answers[self.rank], self.rank), handle, **options)
        same("y", y, wanted[self.rank])
        poison(y)


def in_use(case: Case, rows: hal.Dispatched) -> Array:
    """Which of a rank's rows are not padding, but that gaps between groups count as in use."""
    if case.schedule != "latency":
        return np.ones(len(rows.x), bool)
    used: Array = (rows.topk_idx >= 0).any(axis=tuple(range(1, rows.topk_idx.ndim)))
    return used


def same(name: str, given: Any, wanted: Array | None) -> None:
    """Equal in type, shape and every bit."""
    if wanted is None:
        assert given is None, f"{name} should be None"
        return
    given = fetch(given)
    assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape), (name, given.shape, wanted.shape)
    if given.tobytes() != np.ascontiguousarray(wanted).tobytes():
        width = wanted.size // len(wanted) * wanted.itemsize  # nothing empty gets here
        rows = np.flatnonzero((bits(given, width) != bits(wanted, width)).any(axis=1))
        row = rows[0]
        begins = [np.ravel(array[row])[:4] for array in (given, wanted)]
        text = f"{name} differs in rows {rows[:8]} of {len(wanted)}; row {row} begins {begins[0]}, expected {begins[1]}"
        raise AssertionError(text)


def bits(array: Array, width: int) -> Array:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1, width)


def on_all_ranks(target: Target, case: Case, body: Callable[[Layer], Any]) -> list[Any]:
    """``body(layer)`` on every rank of the case."""
    return target.run(case.ranks, case.nodes, lambda comm: body(Layer(target, case, comm)))


def only(condition: Callable[[Case], bool]) -> Callable[[Any], Any]:
    """Run a test in the cases that meet the condition."""

    def mark(test: Any) -> Any:
        test.only = condition
        return test

    return mark
