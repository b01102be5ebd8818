# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md, section 1: what every rank receives, bit for bit, whatever the settings."""

from __future__ import annotations

import numpy as np
import pytest
from cases import MAX_TOKENS
from layer import FIELDS, Expected, Layer, batch, on_all_ranks, same
from targets import fetch


def rounds(target, case, batches):
    """Dispatch each batch in turn, in one ExpertParallel."""
    wanted = [Expected(case, sent) for sent in batches]

    def body(layer: Layer) -> None:
        for sent, expected in zip(batches, wanted, strict=True):
            layer.dispatch(sent[layer.rank], expected)

    on_all_ranks(target, case, body)


def test_rows_padding_and_counts_with_another_number_of_tokens_on_every_rank_and_call(target, case):
    rounds(target, case, [batch(case, turn) for turn in range(4)])


@pytest.mark.parametrize("empty", ["first", "all but first", "all"])
def test_ranks_without_tokens(target, case, empty):
    none = {"first": lambda r: r == 0, "all but first": lambda r: r > 0, "all": lambda r: True}[empty]
    full = batch(case, 3)  # before and after, so that something stale could show
    rounds(target, case, [full, batch(case, 4, lambda r: 0 if none(r) else 5), full])


def test_tokens_without_experts(target, case):
    rounds(target, case, [batch(case, 0), batch(case, 1, lambda r: 6, missing=1.0), batch(case, 2, missing=0.7)])


def test_every_rank_full_and_everything_to_one_rank(target, case):
    full = batch(case, 5, lambda r: MAX_TOKENS, missing=0.0)
    skewed = batch(case, 6, lambda r: MAX_TOKENS)
    for tokens in skewed:
        tokens.topk_idx[:] = np.arange(case.num_experts)[-case.top_k :][::-1]
    rounds(target, case, [full, skewed, full])


def test_int32_ids_and_omitted_weights(target, case):
    sent = batch(case, 8)
    for tokens in sent:
        tokens.topk_weights[:] = 1
        tokens.topk_idx = tokens.topk_idx.astype(np.int32)
    expected = Expected(case, sent)
    on_all_ranks(target, case, lambda layer: layer.dispatch(sent[layer.rank], expected, topk_weights=None))


def test_a_handle_repeats_the_routing_with_new_rows_and_weights(target, case):
    first, again = batch(case, 9, lambda r: 3 + r), batch(case, 10, lambda r: 3 + r)
    expected = Expected(case, first)
    repeated = Expected(case, again, expected.handle)

    def body(layer: Layer) -> None:
        handle = layer.dispatch(first[layer.rank], expected)
        for _ in range(2):
            handle = layer.dispatch(again[layer.rank], repeated, handle=handle)
        layer.dispatch(first[layer.rank], expected)

    on_all_ranks(target, case, body)


def test_the_same_input_gives_the_same_bits(target, case):
    sent = batch(case, 11)

    def body(layer: Layer) -> None:
        outs = [layer.ep.dispatch(**layer.arguments(sent[layer.rank])) for _ in range(3)]
        kept = [[fetch(a) if a is not None else None for a in (getattr(out, f) for f in FIELDS)] for out in outs]
        for other in kept[1:]:
            for name, one, two in zip(FIELDS, kept[0], other, strict=True):
                same(name, two, one) if one is not None else None

    on_all_ranks(target, case, body)


def test_input_may_change_after_the_call(target, case):
    sent = batch(case, 12)
    expected = Expected(case, sent)

    def body(layer: Layer) -> None:
        arguments = layer.arguments(sent[layer.rank])
        arguments = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
        pending = layer.ep.dispatch_send(**arguments)
        for array in arguments.values():
            if isinstance(array, np.ndarray):
                array.view(np.uint8)[...] = 0xEE
            elif array is not None:
                array.zero_()
        layer.check(layer.ep.dispatch_recv(pending), expected)

    on_all_ranks(target, case, body)
