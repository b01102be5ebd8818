# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of hal/include/hal and the fixed-order sum, each alone."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hal_host import _engine
from hal_host.engine import shape_of
from hypothesis import given
from hypothesis import strategies as st

from hal.config import ExpertParallelSpec

U32 = st.integers(0, 2**32 - 1)


@given(U32, st.integers(0, 2**31 - 1))
def test_epochs_compare_across_the_wrap(wanted, ahead):
    later = (wanted + ahead) % 2**32
    assert _engine.reached(later, wanted)
    assert _engine.reached(wanted, later) == (ahead == 0)


@given(st.integers(1, 2**44 - 1), st.integers(0, 63), st.booleans(), st.integers(0, 2**13 - 1))
def test_ready_words_carry_everything(epoch, slot, reuse, tag):
    assert _engine.ready_round_trip(epoch, slot, reuse, tag) == (epoch, slot, reuse, tag)


@given(st.integers(1, 10**12), st.integers(1, 64))
def test_credit_is_the_round_that_used_the_staging_before(n, depth):
    credit = _engine.wanted_credit(n, depth)
    assert credit == max(0, n - depth)
    assert credit == 0 or credit % depth == n % depth


@given(U32, st.integers(0, 300), st.integers(0, 20), st.integers(0, 12))
def test_request_rings_fill_to_the_guard_across_the_wrap(tail, used, need, guard):
    head = (tail + used) % 2**32
    assert _engine.ring_fits(head, tail, need, 256, guard) == (used + need + guard < 256)


@given(st.permutations(range(1, 9)))
def test_credits_say_all_before(order):
    finished, done = _engine.FinishedRounds(), set()
    for n in order:
        finished.finish(n)
        done.add(n)
        assert finished.all_until == next(i for i in itertools.count(1) if i not in done) - 1


@given(st.integers(0, 40), st.integers(1, 4))
def test_last_row_of_each_queue(total, queues):
    used = [_engine.queue_of(n, min(queues, 2)) for n in range(total)]
    for queue in range(2):
        on_it = [n for n, q in enumerate(used) if q == queue]
        assert _engine.last_on_queue(total, queue, min(queues, 2)) == (on_it[-1] if on_it else -1)
    if queues > 1:
        assert used == [int(n % 4 == 3) for n in range(total)]


SHAPES = list(
    itertools.product(
        ("rank", "expert"),
        (("direct", 4, 1), ("latency", 4, 1), ("hierarchical", 6, 2), ("hierarchical", 4, 4)),
        ("strong_signal", "flag_in_block"),
        (1, 3),
    )
)


@pytest.mark.parametrize(("layout", "schedule", "completion", "buffers"), SHAPES)
def test_nothing_in_the_buffer_overlaps_and_the_parts_add_up(layout, schedule, completion, buffers):
    name, ranks, nodes = schedule
    spec = ExpertParallelSpec(
        num_experts=12, top_k=3, hidden=24, max_tokens=5, layout=layout, schedule=name, completion=completion,
        num_buffers=buffers, alignment=5,
    )  # fmt: skip
    shape = shape_of(spec, ranks, nodes)
    parts = _engine.buffer_parts(shape)
    assert [p for p, _ in parts] == ["signals", "headers", "counts", "receive", "rail", "gather", "home"]
    end = 0
    for what, offset, nbytes in sorted(_engine.buffer_map(shape), key=lambda part: part[1]):
        assert offset >= end, f"{what} at {offset} overlaps what ends at {end}"
        end = offset + nbytes
    assert end <= sum(size for _, size in parts)
    per_row = 48 + 32
    if (
        completion == "strong_signal"
    ):  # within 5 % of the plain count of rows, but for the planes' rounding to 512 bytes
        receive = dict(parts)["receive"] / buffers
        assert 0 <= receive - _engine.receive_rows(shape) * per_row <= 2 * 512


def test_group_starts_are_aligned():
    spec = ExpertParallelSpec(num_experts=4, top_k=2, hidden=8, max_tokens=9, layout="expert", alignment=4)
    shape = shape_of(spec, 2, 1)
    counts = [3, 0, 5, 1, 2, 0, 4, 1]
    assert _engine.group_starts(shape, counts, 0) == [0, 8, 8]
    assert _engine.group_starts(shape, counts, 1) == [0, 12, 16]


ELEMENTS = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


def sum_rows(dtype: str, rows: list[Any], weights: list[float]) -> Any:
    y = np.empty_like(rows[0])
    _engine.sum_rows(getattr(_engine.Element, dtype), [r.ctypes.data for r in rows], weights, len(y), y.ctypes.data)
    return y


def expected_sum(rows: list[Any], weights: list[float]) -> Any:
    acc = np.zeros(len(rows[0]), np.float32)
    for i, row in enumerate(rows):
        acc = acc + (row.astype(np.float32) * np.float32(weights[i]) if weights else row.astype(np.float32))
    return acc.astype(rows[0].dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_value_survives(dtype):
    """Zero plus the value, rounded: the very bits of NumPy and ml_dtypes, also for subnormals, -0 and every NaN."""
    every = np.arange(2**16, dtype=np.uint16).view(ELEMENTS[dtype])
    with np.errstate(invalid="ignore"):  # signalling NaNs
        want = expected_sum([every], [])
    np.testing.assert_array_equal(sum_rows(dtype, [every], []).view(np.uint16), want.view(np.uint16))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_of_float32_is_nearest_even(dtype):
    """Sums that land on, just below and just above every tie and every value of the 16-bit type."""
    grid = np.arange(2**16, dtype=np.uint16).view(ELEMENTS[dtype])
    grid = grid[np.isfinite(grid.astype(np.float32))]
    step = np.spacing(np.abs(grid.astype(np.float32))) * (2**16 if dtype == "bfloat16" else 2**13)
    for fraction in (0.5, 0.49, 0.51, 0.25):
        small = (step * fraction).astype(ELEMENTS[dtype])
        with np.errstate(over="ignore"):
            want = expected_sum([grid, small], [])
        np.testing.assert_array_equal(sum_rows(dtype, [grid, small], []).view(np.uint16), want.view(np.uint16))


@given(
    st.sampled_from(sorted(ELEMENTS)), st.integers(1, 200), st.integers(1, 9), st.booleans(), st.integers(0, 2**32 - 1)
)
def test_sum_has_the_order_and_roundings_of_the_reference(dtype, width, count, weighted, seed):
    rng = np.random.default_rng(seed)
    rows = [
        (rng.standard_normal(width) * 10.0 ** rng.integers(-4, 4)).astype(np.float32).astype(ELEMENTS[dtype])
        for _ in range(count)
    ]
    weights = rng.random(count).astype(np.float32).tolist() if weighted else []
    want = expected_sum(rows, weights)
    got = sum_rows(dtype, rows, weights)
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
