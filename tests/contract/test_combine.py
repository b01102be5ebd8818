# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md, section 2: sums, their order and rounding, bit for bit; handles in any order; halves and events."""

from __future__ import annotations

import numpy as np
import pytest
from layer import Array, Expected, Layer, batch, on_all_ranks, only, same
from targets import NUMPY_DTYPES, fetch, in_kind, kinds_of, poison


def biases(case, sent, count: int) -> list[list[Array]]:
    dtype = NUMPY_DTYPES[case.combine_dtype]
    rng = np.random.default_rng(count)
    return [[rng.standard_normal((len(t.x), case.hidden)).astype(dtype) for _ in range(count)] for t in sent]


@pytest.mark.parametrize("bias_count", [0, 1, 2])
def test_plain_sums_and_biases(target, case, bias_count):
    sent = batch(case, 20 + bias_count)
    expected = Expected(case, sent)
    answers, bias = expected.answers(1), biases(case, sent, bias_count)
    wanted = expected.combine(answers, bias=bias)

    def body(layer: Layer) -> None:
        handle = layer.dispatch(sent[layer.rank], expected)
        mine = [layer.target.give(b, layer.rank) for b in bias[layer.rank]]
        layer.combine(answers, handle, wanted, bias=mine[0] if bias_count == 1 else mine or None)

    on_all_ranks(target, case, body)


@only(lambda case: case.layout == "expert")
def test_weighted_sums(target, case):
    sent = batch(case, 23)
    expected = Expected(case, sent)
    answers, bias = expected.answers(2), biases(case, sent, 1)
    wanted, plain = expected.combine(answers, weighted=True, bias=bias), expected.combine(answers)

    def body(layer: Layer) -> None:
        handle = layer.dispatch(sent[layer.rank], expected)
        layer.combine(answers, handle, wanted, weighted=True, bias=layer.target.give(bias[layer.rank][0], layer.rank))
        layer.combine(answers, handle, plain)

    on_all_ranks(target, case, body)


@only(lambda case: case.layout == "expert")
def test_weights_given_with_a_handle_are_the_ones_that_count(target, case):
    first, again = batch(case, 24, lambda r: 4), batch(case, 25, lambda r: 4)
    expected = Expected(case, first)
    repeated = Expected(case, again, expected.handle)
    answers = expected.answers(3)
    wanted = [e.combine(answers, weighted=True) for e in (expected, repeated)]

    def body(layer: Layer) -> None:
        old = layer.dispatch(first[layer.rank], expected)
        new = layer.dispatch(again[layer.rank], repeated, handle=old)
        layer.combine(answers, new, wanted[1], weighted=True)
        layer.combine(answers, old, wanted[0], weighted=True)

    on_all_ranks(target, case, body)


def test_weights_are_carried_home(target, case):
    sent = batch(case, 26)
    expected = Expected(case, sent)
    answers = expected.answers(4)
    rng = np.random.default_rng(5)
    carried = [rng.standard_normal(rows.topk_weights.shape).astype(np.float32) for rows in expected.rows]
    wanted, home = expected.combine(answers, topk_weights=carried)

    def body(layer: Layer) -> None:
        handle = layer.dispatch(sent[layer.rank], expected)
        give = layer.target.give
        for _ in range(2):
            y, weights = layer.ep.combine(
                give(answers[layer.rank], layer.rank), handle, topk_weights=give(carried[layer.rank], layer.rank)
            )
            same("y", y, wanted[layer.rank])
            same("topk_weights", weights, home[layer.rank])
            poison(y, weights)

    on_all_ranks(target, case, body)


def test_handles_in_any_order_and_more_than_once(target, case):
    batches = [batch(case, seed) for seed in (27, 28, 29)]
    wanted = [Expected(case, sent) for sent in batches]
    answers = [expected.answers(seed) for seed, expected in enumerate(wanted)]
    sums = [expected.combine(rows) for expected, rows in zip(wanted, answers, strict=True)]

    def body(layer: Layer) -> None:
        handles = [layer.dispatch(sent[layer.rank], e) for sent, e in zip(batches, wanted, strict=True)]
        for i in (1, 0, 2, 0, 2, 1, 1):
            layer.combine(answers[i], handles[i], sums[i])

    on_all_ranks(target, case, body)


def test_combines_back_to_back(target, case):
    """No dispatch between them that would hold a fast rank back: its rows must not reach a sum still being made."""
    sent = batch(case, 35, lambda r: 16)
    expected = Expected(case, sent)
    answers = [expected.answers(seed) for seed in (1, 2, 3)]
    sums = [expected.combine(rows) for rows in answers]

    def body(layer: Layer) -> None:
        handle = layer.dispatch(sent[layer.rank], expected)
        given = [layer.target.give(rows[layer.rank], layer.rank) for rows in answers]
        for turn in range(40):
            same("y", layer.ep.combine(given[turn % 3], handle), sums[turn % 3][layer.rank])

    on_all_ranks(target, case, body)


def test_halves_leave_room_for_other_work(target, case):
    """A combine of one batch is on its way while the next dispatch starts; each is received later."""
    batches = [batch(case, seed) for seed in (30, 31, 32)]
    wanted = [Expected(case, sent) for sent in batches]
    answers = [expected.answers(seed) for seed, expected in enumerate(wanted)]
    sums = [expected.combine(rows) for expected, rows in zip(wanted, answers, strict=True)]

    def body(layer: Layer) -> None:
        ep, rank, give = layer.ep, layer.rank, layer.target.give
        handle = layer.dispatch(batches[0][rank], wanted[0])
        for i in (1, 2):
            combining = ep.combine_send(give(answers[i - 1][rank], rank), handle)
            dispatching = ep.dispatch_send(**layer.arguments(batches[i][rank]))
            y = ep.combine_recv(combining)
            same("y", y, sums[i - 1][rank])
            handle = layer.check(ep.dispatch_recv(dispatching), wanted[i])
        layer.combine(answers[2], handle, sums[2])

    on_all_ranks(target, case, body)


def test_events(target, case):
    sent = batch(case, 33)
    expected = Expected(case, sent)
    answers, bias = expected.answers(7), biases(case, sent, 1)
    wanted = expected.combine(answers, bias=bias)

    def body(layer: Layer) -> None:
        give, rank = layer.target.give, layer.rank
        first = layer.ep.dispatch_async(**layer.arguments(sent[rank]))
        handle = layer.check(first.result(), expected)
        events = [
            layer.ep.combine_async(give(answers[rank], rank), handle, bias=give(bias[rank][0], rank)) for _ in range(3)
        ]
        layer.dispatch(sent[rank], expected)
        for event in events:
            assert event.done(), "a blocking call waits for the events before it"
            event.wait()
            same("y", event.result(), wanted[rank])

    on_all_ranks(target, case, body)


def test_the_callers_kind_of_array(target, case):
    sent = batch(case, 34)
    expected = Expected(case, sent)
    answers = expected.answers(8)
    wanted = expected.combine(answers)
    kinds = kinds_of(target)
    if len(kinds) == 1:
        pytest.skip(f"{target}: the other tests use its one kind, {kinds[0]}")

    def body(layer: Layer) -> None:
        tokens = sent[layer.rank]
        for kind in kinds:
            given = [in_kind(a, kind) for a in (tokens.x, tokens.topk_idx.astype(np.int32), tokens.topk_weights)]
            out = layer.ep.dispatch(*given, scales=in_kind(tokens.scales, kind))
            fields = [out.x, out.scales, out.topk_idx, out.topk_weights, out.tokens_per_expert]
            y = layer.ep.combine(in_kind(answers[layer.rank], kind), out.handle)
            for array in (*fields, y):
                assert array is None or type(array).__module__.split(".")[0] in {kind, "jaxlib"}
            same("x", out.x, expected.rows[layer.rank].x)
            same("topk_idx", out.topk_idx, expected.rows[layer.rank].topk_idx)
            same("y", y, wanted[layer.rank])
            assert fetch(out.tokens_per_expert).sum() >= 0

    on_all_ranks(target, case, body)
