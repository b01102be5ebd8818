# SPDX-License-Identifier: Apache-2.0
"""The specification itself, against cases worked out by hand and against the dense computation."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal import reference
from hal.config import ExpertParallelSpec, TopologyConfig
from hal.errors import ContractError

SPEC = ExpertParallelSpec(num_experts=4, top_k=2, hidden=8, max_tokens=3, dtype="float32")
# Two ranks with experts 0, 1 and 2, 3. Rank 0 has three tokens, rank 1 has two.
IDX = [np.array([[0, 2], [1, 0], [3, -1]]), np.array([[-1, -1], [2, 0]])]
WEIGHTS = [
    np.array([[0.5, 0.25], [1, 2], [3, 4]], np.float32),
    np.array([[5, 6], [7, 8]], np.float32),
]
X = [np.arange(24, dtype=np.float32).reshape(3, 8), 100 + np.arange(16, dtype=np.float32).reshape(2, 8)]


def test_layout_rank_by_hand():
    (zero, one), _ = reference.dispatch(SPEC, X, IDX, WEIGHTS)
    np.testing.assert_array_equal(zero.x, [X[0][0], X[0][1], X[1][1]])
    np.testing.assert_array_equal(zero.topk_idx, [[0, -1], [1, 0], [-1, 0]])
    np.testing.assert_array_equal(zero.topk_weights, np.float32([[0.5, 0], [1, 2], [0, 8]]))
    np.testing.assert_array_equal(zero.tokens_per_expert, [3, 1])
    assert zero.expert_offsets is None
    np.testing.assert_array_equal(one.x, [X[0][0], X[0][2], X[1][1]])
    np.testing.assert_array_equal(one.topk_idx, [[-1, 0], [1, -1], [0, -1]])
    np.testing.assert_array_equal(one.tokens_per_expert, [2, 1])


def test_layout_expert_by_hand():
    spec = replace(SPEC, layout="expert", alignment=2)
    (zero, one), _ = reference.dispatch(spec, X, IDX, WEIGHTS)
    nothing = np.zeros(8, np.float32)
    np.testing.assert_array_equal(zero.x, [X[0][0], X[0][1], X[1][1], nothing, X[0][1], nothing])
    np.testing.assert_array_equal(zero.topk_idx, [0, 0, 0, -1, 1, -1])
    np.testing.assert_array_equal(zero.topk_weights, np.float32([0.5, 2, 8, 0, 1, 0]))
    np.testing.assert_array_equal(zero.expert_offsets, [0, 4, 6])
    np.testing.assert_array_equal(zero.tokens_per_expert, [3, 1])
    np.testing.assert_array_equal(one.x, [X[0][0], X[1][1], X[0][2], nothing])
    np.testing.assert_array_equal(one.topk_weights, np.float32([0.25, 7, 3, 0]))


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_latency_has_fixed_places(layout):
    spec = replace(SPEC, layout=layout, schedule="latency")
    (zero, _), _ = reference.dispatch(spec, X, IDX, WEIGHTS)
    rows = {0: X[0][0], 1: X[0][1], 3: X[1][1]}
    if layout == "expert":
        rows |= {6: X[0][1]}
        np.testing.assert_array_equal(zero.expert_offsets, [0, 6, 12])
    assert len(zero.x) == (6 if layout == "rank" else 12)
    for n, row in enumerate(zero.x):
        np.testing.assert_array_equal(row, rows.get(n, np.zeros(8)))
        assert (n in rows) == bool((zero.topk_idx[n] >= 0).any())


def test_combine_by_hand():
    spec = replace(SPEC, layout="expert")
    out, handle = reference.dispatch(spec, X, IDX, WEIGHTS)
    y = reference.combine([o.x for o in out], handle, weighted=True, bias=[[np.ones_like(x)] for x in X])
    np.testing.assert_array_equal(y[0], [X[0][0] * 0.75 + 1, X[0][1] * 3 + 1, X[0][2] * 3 + 1])
    np.testing.assert_array_equal(y[1], [np.ones(8), X[1][1] * 15 + 1])
    y, weights = reference.combine([o.x for o in out], handle, topk_weights=[o.topk_weights for o in out])
    np.testing.assert_array_equal(y[0], [X[0][0] * 2, X[0][1] * 2, X[0][2]])
    np.testing.assert_array_equal(weights[0], [[0.5, 0.25], [1, 2], [3, 0]])
    np.testing.assert_array_equal(weights[1], [[0, 0], [7, 8]])


def test_each_sum_is_rounded_once_in_order():
    """1 + 2^-24 + 2^-24 is 1 when summed from the left in float32, and more than 1 otherwise."""
    spec = ExpertParallelSpec(num_experts=3, top_k=3, hidden=4, max_tokens=1, dtype="float32", layout="expert")
    idx = [np.array([[0, 1, 2]]), np.empty((0, 3)), np.empty((0, 3))]
    _, handle = reference.dispatch(spec, [np.zeros((len(i), 4), np.float32) for i in idx], idx)
    tiny = np.float32(2.0**-24)
    rows = [np.full((1, 4), v, np.float32) for v in (1, tiny, tiny)]
    assert (reference.combine(rows, handle)[0] == 1).all()
    rows = [np.full((1, 4), v, np.float32) for v in (tiny, tiny, 1)]
    assert (reference.combine(rows, handle)[0] > 1).all()


def test_hierarchical_rounds_what_crosses_and_nothing_else():
    """Two nodes of two ranks. 256 + 1 needs nine bits: bfloat16 has eight, so the sum survives at home only."""
    spec = ExpertParallelSpec(num_experts=4, top_k=2, hidden=4, max_tokens=1, dtype="bfloat16", schedule="hierarchical")
    rows = [np.full((1, 4), v, ml_dtypes.bfloat16) for v in (256, 1, 256, 1)]
    bias = [[np.full((1, 4), -256, ml_dtypes.bfloat16)]] + [[np.zeros((0, 4), ml_dtypes.bfloat16)]] * 3

    def combined(experts):
        idx = [np.array([experts])] + [np.empty((0, 2))] * 3
        x = [np.zeros((len(i), 4), ml_dtypes.bfloat16) for i in idx]
        _, handle = reference.dispatch(spec, x, idx)
        return reference.combine(rows, handle, bias=bias, topology=TopologyConfig(2))[0]

    assert (combined([0, 1]) == 1).all()
    assert (combined([2, 3]) == 0).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from(["rank", "expert"]), st.integers(1, 3), st.integers(1, 3))
def test_equals_the_dense_layer(seed, layout, nodes, node_ranks):
    """With integers small enough that no sum rounds, dispatch and combine are the sum over each token's experts."""
    rng = np.random.default_rng(seed)
    ranks = nodes * node_ranks
    spec = ExpertParallelSpec(
        num_experts=2 * ranks, top_k=2, hidden=4, max_tokens=5, dtype="float32", layout=layout, alignment=1,
        schedule=str(rng.choice(["direct", "latency", "hierarchical"])),
    )  # fmt: skip
    counts = rng.integers(0, 6, ranks)
    x = [rng.integers(-9, 9, (t, 4)).astype(np.float32) for t in counts]
    idx = [np.array([rng.permutation(2 * ranks)[:2] for _ in range(t)], np.int64).reshape(t, 2) for t in counts]
    idx = [np.where(rng.random(i.shape) < 0.2, -1, i) for i in idx]
    scale = 1 + np.arange(2 * ranks)  # expert e multiplies by e + 1
    out, handle = reference.dispatch(spec, x, idx)
    answers = []
    for rank, o in enumerate(out):
        ids = o.topk_idx.reshape(len(o.x), 2 if layout == "rank" else 1)
        factor = np.where(ids >= 0, scale[2 * rank + ids], 0).sum(1, keepdims=True)
        answers.append((o.x * factor).astype(np.float32))
    y = reference.combine(answers, handle, topology=TopologyConfig(nodes))
    for rank in range(ranks):
        factor = np.where(idx[rank] >= 0, scale[idx[rank]], 0).sum(1, keepdims=True)
        np.testing.assert_array_equal(y[rank], x[rank] * factor)


def test_what_the_reference_refuses():
    _, handle = reference.dispatch(SPEC, X, IDX)
    with pytest.raises(ContractError, match="not both"):
        reference.dispatch(SPEC, X, IDX, handle=handle)
    with pytest.raises(ContractError, match="layout 'expert'"):
        reference.combine(X, handle, weighted=True)
