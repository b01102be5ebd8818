# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md, section 1, "Lifetime": what a caller holds never changes, and what nobody holds is given back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from layer import Expected, Layer, batch, on_all_ranks
from targets import fetch


@pytest.mark.parametrize("hold", ["first", "every other", "all"])
def test_a_held_result_never_changes(target, case, hold):
    """Ranks hold different results for different times, so that their free slots differ."""
    batches = [batch(case, seed, lambda r, seed=seed: (5 * r + seed) % 17) for seed in range(12)]
    wanted = [Expected(case, sent) for sent in batches]

    def body(layer: Layer) -> None:
        held = []
        for turn, (sent, expected) in enumerate(zip(batches, wanted, strict=True)):
            out = layer.ep.dispatch(**layer.arguments(sent[layer.rank]))
            keep = {"first": turn == layer.rank, "every other": (turn + layer.rank) % 2 == 0, "all": True}[hold]
            if keep:
                held.append((turn, out.x, fetch(out.x)))
            else:
                layer.check(out, expected)
            del out
            for then, view, copy in held:
                assert fetch(view).tobytes() == copy.tobytes(), f"the result of round {then} changed in round {turn}"
                assert copy.tobytes() == wanted[then].rows[layer.rank].x.tobytes()

    on_all_ranks(target, case, body)


def test_a_part_of_a_view_holds_it_too(target, case):
    batches = [batch(case, seed, lambda r: 9, missing=0.0) for seed in range(5)]

    def body(layer: Layer) -> None:
        out = layer.ep.dispatch(**layer.arguments(batches[0][layer.rank]))
        part = out.x[1:].reshape(-1)[::3]
        copy = fetch(part.copy() if isinstance(part, np.ndarray) else part.clone())
        del out
        gc.collect()
        for sent in batches[1:]:
            layer.ep.dispatch(**layer.arguments(sent[layer.rank]))
        assert fetch(part.copy() if isinstance(part, np.ndarray) else part.clone()).tobytes() == copy.tobytes()

    on_all_ranks(target, case, body)


def test_views_outlive_the_expert_parallel_and_the_communicator(target, case):
    sent = batch(case, 3, lambda r: 8)
    expected = Expected(case, sent)

    def body(layer: Layer) -> object:
        x = layer.ep.dispatch(**layer.arguments(sent[layer.rank])).x
        layer.ep.close()
        return x

    views = on_all_ranks(target, case, body)
    gc.collect()
    for rank, x in enumerate(views):
        assert fetch(x).tobytes() == expected.rows[rank].x.tobytes()
