# SPDX-License-Identifier: Apache-2.0
"""Many rounds, any sizes: random work with a slow rank, and Hypothesis over routings."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import tables
from cases import CASES, MAX_TOKENS, PLAIN
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layer import Expected, Layer, Tokens, batch, on_all_ranks
from targets import fetch

SHAPES = [
    replace(PLAIN, shape=(3, 1)),
    replace(PLAIN, shape=(4, 2), schedule="hierarchical", layout="expert", alignment=4, dtype="bfloat16"),
    replace(PLAIN, shape=(3, 1), schedule="latency", dtype="float8_e4m3fn"),
    replace(PLAIN, shape=(2, 1), layout="expert", num_buffers=1, completion="strong_last"),
    replace(PLAIN, shape=(2, 1), layout="expert", completion="flag_in_block"),
    replace(PLAIN, shape=(3, 1), completion="strong_signal_no_cqe", num_buffers=4),
]


def test_a_hundred_rounds_with_random_sizes_and_a_slow_rank(target, case):
    """A rank that lags by chance meets peers that are up to a round ahead; results are held, dropped and poisoned."""
    kinds = [batch(case, seed) for seed in range(10)]
    wanted = [Expected(case, sent) for sent in kinds]
    answers = [expected.answers(seed) for seed, expected in enumerate(wanted)]
    sums = [expected.combine(rows) for expected, rows in zip(wanted, answers, strict=True)]
    order = np.random.default_rng(3).integers(0, 10, 100)

    def body(layer: Layer) -> None:
        rng = np.random.default_rng(layer.rank)
        held = []
        for turn, kind in enumerate(order):
            if rng.random() < (0.3 if layer.rank == turn // 30 % case.ranks else 0.05):
                time.sleep(rng.random() * 0.004)
            if rng.random() < 0.3:
                out = layer.ep.dispatch(**layer.arguments(kinds[kind][layer.rank]))
                held.append((out.x, wanted[kind].rows[layer.rank].x))
                handle = out.handle
                del out
            else:
                handle = layer.dispatch(kinds[kind][layer.rank], wanted[kind])
            layer.combine(answers[kind], handle, sums[kind])
            if len(held) > 3:
                x, copy = held.pop(0)
                assert fetch(x).tobytes() == copy.tobytes()
                del x

    on_all_ranks(target, case, body)


test_a_hundred_rounds_with_random_sizes_and_a_slow_rank.cases = SHAPES


@st.composite
def routings(draw, target):
    """A case that the target supports and every rank's routing: any sizes, any -1, any skew."""
    fitting = [case for case in CASES if case.ranks <= target.ranks]
    unsupported = (tables.find(tables.UNSUPPORTED, str(target), "test_any_routing", case) for case in fitting)
    case = draw(st.sampled_from([case for case, no in zip(fitting, unsupported, strict=True) if no is None]))
    sent = []
    for rank in range(case.ranks):
        tokens = Tokens(case, draw(st.integers(0, MAX_TOKENS)), [rank, draw(st.integers(0, 99))])
        experts = draw(st.lists(st.integers(0, case.num_experts - 1), min_size=1, unique=True))
        for token in range(len(tokens.x)):
            row = draw(st.permutations(experts))[: case.top_k]
            tokens.topk_idx[token] = [*row, *[-1] * (case.top_k - len(row))]
        sent.append(tokens)
    return case, sent


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_routing(target, data):
    case, sent = data.draw(routings(target))
    expected = Expected(case, sent)
    answers = expected.answers(0)
    weighted = case.layout == "expert"
    wanted = expected.combine(answers, weighted=weighted)

    def body(layer: Layer) -> None:
        for _ in range(2):
            handle = layer.dispatch(sent[layer.rank], expected)
            layer.combine(answers, handle, wanted, weighted=weighted)

    on_all_ranks(target, case, body)
