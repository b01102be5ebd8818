# SPDX-License-Identifier: Apache-2.0
"""Hypothesis over whole programs: any settings, and any sequence of dispatches and combines, whole and in halves.

Every target runs them, GPUs too where they are (mark ``cuda``). All ranks make the same calls; what they hold differs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import tables
from cases import MAX_TOKENS, VALUES, Case
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer import Expected, Layer, Tokens, on_all_ranks, same
from targets import fetch

EXAMPLES = int(os.environ.get("HAL_PROGRAM_EXAMPLES", "25"))
"""Programs for each target; more for a long run."""


@dataclass(frozen=True)
class Step:
    """A dispatch, and combines of what it received."""

    reuse: int
    """Which earlier handle's routing it repeats; -1 = a new one."""
    halves: bool
    early: bool
    """In halves: the combine of the step before lies between them."""
    holder: int
    """The rank that holds the result until the end, or -1."""
    combines: tuple[tuple[bool, int, bool], ...]
    """In halves, biases, and whether weights are carried home."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layout = draw(st.sampled_from(VALUES["layout"]))
    ranks = draw(st.integers(1, 4))
    return Case(
        draw(st.sampled_from(("direct", "latency", "hierarchical"))),
        layout,
        "strong_signal",
        draw(st.sampled_from(VALUES["dtype"])),
        (ranks, 1),
        draw(st.sampled_from((1, 2, 4, 16))) if layout == "expert" else 1,
        draw(st.integers(1, 9)),
        draw(st.integers(1, 4)),
        16 * draw(st.integers(1, 20)),
    )


@st.composite
def steps(draw: st.DrawFn, number: int, ranks: int) -> Step:
    halves = draw(st.booleans())
    combine = st.tuples(st.booleans(), st.integers(0, 2), st.booleans())
    return Step(
        draw(st.integers(-1, number - 1)) if number and draw(st.booleans()) else -1,
        halves,
        halves and draw(st.booleans()),
        draw(st.integers(-1, ranks - 1)),
        tuple(draw(st.lists(combine, max_size=2))),
    )


class Plan:
    """One step with its inputs, and what the reference says of it."""

    def __init__(self, case: Case, step: Step, earlier: list[Plan], seed: int, sizes: list[int]) -> None:
        self.case, self.step = case, step
        first = earlier[step.reuse] if step.reuse >= 0 else None
        if first is not None:
            sizes = [len(tokens.x) for tokens in first.sent]
        self.sent = [Tokens(case, size, [seed, rank]) for rank, size in enumerate(sizes)]
        self.expected = Expected(case, self.sent, first.expected.handle if first is not None else None)
        self.answers = self.expected.answers(seed)
        rng = np.random.default_rng([seed, 99])
        self.bias = [
            [rng.standard_normal((size, case.hidden)).astype(self.answers[0].dtype) for _ in range(2)] for size in sizes
        ]
        self.back = [rng.standard_normal(rows.topk_weights.shape).astype(np.float32) for rows in self.expected.rows]
        weighted = case.layout == "expert"
        self.wanted = []
        for number, (_, biases, carry) in enumerate(step.combines):
            options: dict[str, Any] = {"weighted": weighted and number == 0}
            if biases:
                options["bias"] = [given[:biases] for given in self.bias]
            if carry:
                options["topk_weights"] = self.back
            self.wanted.append((options["weighted"], self.expected.combine(self.answers, **options)))

    def combine(self, layer: Layer, handle: Any) -> None:
        rank, give = layer.rank, layer.target.give
        for (halves, biases, carry), (weighted, wanted) in zip(self.step.combines, self.wanted, strict=True):
            x = give(self.answers[rank], rank)
            options: dict[str, Any] = {"weighted": weighted}
            if carry:
                options["topk_weights"] = give(self.back[rank], rank)
            bias = tuple(give(array, rank) for array in self.bias[rank][:biases]) or None
            if halves:
                got = layer.ep.combine_recv(layer.ep.combine_send(x, handle, **options), bias=bias)
            else:
                got = layer.ep.combine(x, handle, bias=bias, **options)
            y, back = got if carry else (got, None)
            sums, weights = wanted if carry else (wanted, None)
            same("y", y, sums[rank])
            if carry:
                assert weights is not None
                same("topk_weights", back, weights[rank])


def run(layer: Layer, plans: list[Plan]) -> None:
    rank, handles, held = layer.rank, [], []
    for number, plan in enumerate(plans):
        step = plan.step
        reused = {"handle": handles[step.reuse]} if step.reuse >= 0 else {}
        arguments = layer.arguments(plan.sent[rank], **reused)
        if step.halves:
            pending = layer.ep.dispatch_send(**arguments)
            if step.early and number:
                plans[number - 1].combine(layer, handles[number - 1])
            out = layer.ep.dispatch_recv(pending)
        else:
            out = layer.ep.dispatch(**arguments)
        if step.holder == rank:
            rows = plan.expected.rows[rank].x
            same("x", out.x, rows)
            held.append((out.x, rows))
            handles.append(out.handle)
        else:
            handles.append(layer.check(out, plan.expected))
        del out, arguments
        plan.combine(layer, handles[-1])
        for view, rows in held:
            assert fetch(view).tobytes() == np.ascontiguousarray(rows).tobytes(), f"a result changed in step {number}"


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_program(target, data):
    case = data.draw(cases())
    assume(case.ranks <= target.ranks)
    assume(tables.find(tables.UNSUPPORTED, str(target), "test_any_program", case) is None)
    assume(case.schedule != "latency" or case.ranks * MAX_TOKENS % case.alignment == 0)
    plans: list[Plan] = []
    for number in range(data.draw(st.integers(1, 5))):
        step = data.draw(steps(number, case.ranks))
        sizes = [data.draw(st.integers(0, MAX_TOKENS)) for _ in range(case.ranks)]
        plans.append(Plan(case, step, plans, number, sizes))
    on_all_ranks(target, case, lambda layer: run(layer, plans))
