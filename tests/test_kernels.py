# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of the C++ kernels against the reference, bit for bit: every row, every plane, padding too.

The fabric is the lazy one: relaxed rows arrive shuffled, and as late as the contract allows.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_ranks import (
    Ranks,
    bits,
    combine_all,
    dispatch_all,
    dispatch_send,
    expect_combine,
    expect_dispatch,
    random_rows,
    random_tokens,
    round_trip,
)

from hal._validate import DISPATCH_DTYPES
from hal.arrays import as_buffer, to_kind
from hal.config import QUANTISED_DTYPES, ExpertParallelSpec

SPEC = ExpertParallelSpec(num_experts=8, top_k=3, hidden=32, max_tokens=7)
LAYOUTS = ("rank", "expert")
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
SCHEDULES = (("direct", 1), ("latency", 1), ("hierarchical", 2))


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DISPATCH_DTYPES)
def test_every_type_layout_schedule_and_completion(dtype, layout, schedule, nodes, completion):
    scale_dim = 3 if dtype in QUANTISED_DTYPES else 0
    spec = replace(SPEC, dtype=dtype, layout=layout, schedule=schedule, completion=completion, scale_dim=scale_dim)
    rng = np.random.default_rng(1)
    with Ranks(spec, 4, nodes) as world:
        round_trip(world, rng, [7, 0, 3, 5])
        round_trip(world, rng, [1, 6, 7, 2], reuse=True)


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "nodes"), [(4, 2), (6, 2), (6, 3), (4, 4), (4, 1)])
def test_nodes_of_any_size(ranks, nodes, layout, completion):
    spec = replace(SPEC, num_experts=12, layout=layout, schedule="hierarchical", completion=completion, alignment=4)
    rng = np.random.default_rng(2)
    with Ranks(spec if layout == "expert" else replace(spec, alignment=1), ranks, nodes) as world:
        for _ in range(2):
            round_trip(world, rng, rng.integers(0, 8, ranks).tolist(), reuse=True)


def test_direct_and_hierarchical_place_rows_alike():
    rng = np.random.default_rng(3)
    spec = replace(SPEC, layout="expert", alignment=2)
    tokens = random_tokens(rng, spec, [7, 3, 5, 0])
    with Ranks(spec, 4) as direct, Ranks(replace(spec, schedule="hierarchical"), 4, 2) as two_level:
        for one, other in zip(dispatch_all(direct, tokens), dispatch_all(two_level, tokens), strict=True):
            for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets"):
                a, b = getattr(one, name), getattr(other, name)
                assert a.shape == b.shape
                assert bits(to_kind(a, "numpy")) == bits(to_kind(b, "numpy"))


@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "counts", [[0, 0, 0, 0], [7, 0, 0, 0], [0, 7, 7, 7], [1, 1, 1, 1]], ids=lambda c: "-".join(map(str, c))
)
def test_ranks_without_tokens(counts, layout, schedule, nodes):
    rng = np.random.default_rng(4)
    with Ranks(replace(SPEC, layout=layout, schedule=schedule), 4, nodes) as world:
        for _ in range(3):
            round_trip(world, rng, counts)


@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_without_experts_and_tokens_that_all_agree(layout, schedule, nodes):
    rng = np.random.default_rng(5)
    with Ranks(replace(SPEC, layout=layout, schedule=schedule), 4, nodes) as world:
        round_trip(world, rng, [7, 7, 7, 7], none=1.0)
        round_trip(world, rng, [7, 7, 7, 7], none=0.0, skew=1.0)
        round_trip(world, rng, [7, 7, 7, 7], none=0.9)


@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("alignment", [1, 2, 16])
def test_alignment(alignment, schedule, nodes):
    spec = replace(SPEC, layout="expert", alignment=alignment, schedule=schedule, max_tokens=8, dtype="float32")
    rng = np.random.default_rng(6)
    with Ranks(spec, 4, nodes) as world:
        for _ in range(3):
            round_trip(world, rng, rng.integers(0, 9, 4).tolist())


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("queues", [1, 3])
def test_any_number_of_queues(queues, schedule, nodes, completion):
    rng = np.random.default_rng(7)
    with Ranks(replace(SPEC, schedule=schedule, completion=completion), 4, nodes, queues=queues) as world:
        round_trip(world, rng, [7, 2, 0, 4], reuse=True)


def test_one_rank():
    rng = np.random.default_rng(8)
    for layout in LAYOUTS:
        for schedule in ("direct", "latency", "hierarchical"):
            with Ranks(replace(SPEC, layout=layout, schedule=schedule), 1) as world:
                round_trip(world, rng, [5], reuse=True)


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_handles_in_any_order_and_more_than_once(layout, schedule, nodes, completion):
    """dispatch, dispatch, dispatch (first handle), combine second, combine first, combine second again."""
    rng = np.random.default_rng(9)
    with Ranks(replace(SPEC, layout=layout, schedule=schedule, completion=completion), 4, nodes) as world:
        first, second = random_tokens(rng, SPEC, [7, 2, 4, 1]), random_tokens(rng, SPEC, [0, 5, 7, 3])
        got = [dispatch_all(world, first), dispatch_all(world, second)]
        handles = [expect_dispatch(world, first, got[0]), expect_dispatch(world, second, got[1])]
        again = dispatch_all(world, first, [r.state for r in got[0]])
        expect_dispatch(world, first, again)
        for which in (1, 0, 1):
            x = [random_rows(rng, r.x.shape, "bfloat16") for r in got[which]]
            expect_combine(world, handles[which], x, combine_all(world, x, [r.state for r in got[which]]))


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("backwards", [False, True])
def test_two_rounds_in_flight(backwards, schedule, nodes, completion):
    """send, send, recv, recv of both operations, received in either order, many times over."""
    rng = np.random.default_rng(10)
    spec = replace(SPEC, schedule=schedule, completion=completion, num_buffers=3)
    with Ranks(spec, 4, nodes) as world:
        for _ in range(4):
            tokens = [random_tokens(rng, SPEC, rng.integers(0, 8, 4).tolist()) for _ in range(2)]
            order = [1, 0] if backwards else [0, 1]

            def dispatches(rank, tokens=tokens, order=order):
                pending = [dispatch_send(world, rank, t) for t in tokens]
                done = {i: world.engines[rank].dispatch_recv(pending[i], None) for i in order}
                return done[0], done[1]

            per_rank = world.each(dispatches)
            received = [[both[i] for both in per_rank] for i in range(2)]
            handles = [expect_dispatch(world, tokens[i], received[i]) for i in range(2)]
            x = [[random_rows(rng, r.x.shape, "bfloat16") for r in got] for got in received]

            def combines(rank, received=received, x=x, order=order):
                engine = world.engines[rank]
                pending = [
                    engine.combine_send(as_buffer(x[i][rank]), received[i][rank].state, None, False, None)
                    for i in range(2)
                ]
                done = {i: engine.combine_recv(pending[i], (), None) for i in order}
                return done[0], done[1]

            per_rank = world.each(combines)
            for i in range(2):
                expect_combine(world, handles[i], x[i], [both[i] for both in per_rank])


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("lazy", [False, True])
def test_a_hundred_rounds_with_a_slow_rank(lazy, schedule, nodes, completion):
    """Nothing but the kernels keeps ranks together: fast ranks run as far ahead as the protocol lets them."""
    rng = np.random.default_rng(11)
    layout = "expert" if lazy else "rank"
    spec = replace(SPEC, layout=layout, schedule=schedule, completion=completion, hidden=16, top_k=2)
    rounds = [random_tokens(rng, spec, rng.integers(0, 8, 4).tolist()) for _ in range(100)]
    slow, delay = rng.integers(4, size=100), 0.002 * rng.random(100)

    with Ranks(spec, 4, nodes, lazy=lazy) as world:

        def work(rank):
            engine, results = world.engines[rank], []
            for i, tokens in enumerate(rounds):
                if rank == slow[i]:
                    time.sleep(delay[i])
                got = engine.dispatch_recv(dispatch_send(world, rank, tokens), None)
                ys = []
                for scale in (1, 2, 3):  # combines back to back, with more rounds than stagings
                    x = as_buffer((to_kind(got.x, "numpy") * scale).astype(got.x.dtype))
                    if rank == slow[-i] and scale == 2:
                        time.sleep(delay[i])
                    ys.append(engine.combine_recv(engine.combine_send(x, got.state, None, False, None), (), None))
                results.append((private_copy(got), ys))
                del got
            return results

        per_rank = world.each(work)
        for i, tokens in enumerate(rounds):
            received = [results[i][0] for results in per_rank]
            handle = expect_dispatch(world, tokens, received)
            for n, scale in enumerate((1, 2, 3)):
                x = [(to_kind(r.x, "numpy") * scale).astype(r.x.dtype) for r in received]
                expect_combine(world, handle, x, [results[i][1][n] for results in per_rank])


def private_copy(received):
    """What was received, off the receive slot, so that every slot is used again and again."""
    return replace(received, x=as_buffer(to_kind(received.x, "numpy").copy()))


@st.composite
def worlds(draw):
    nodes, node_ranks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ranks = nodes * node_ranks
    local = draw(st.integers(1, 4))
    layout = draw(st.sampled_from(LAYOUTS))
    schedule = draw(st.sampled_from(["direct", "latency", "hierarchical"]))
    dtype = draw(st.sampled_from(DISPATCH_DTYPES))
    max_tokens = draw(st.integers(1, 12))
    alignment = draw(st.integers(1, 9)) if layout == "expert" and schedule != "latency" else 1
    spec = ExpertParallelSpec(
        num_experts=ranks * local,
        top_k=draw(st.integers(1, min(6, ranks * local))),
        hidden=16 * draw(st.integers(1, 40)),
        max_tokens=max_tokens,
        dtype=dtype,
        combine_dtype=draw(st.sampled_from([None, "float32"])),
        scale_dim=draw(st.integers(1, 5)) if dtype in QUANTISED_DTYPES else 0,
        layout=layout,
        alignment=alignment,
        schedule=schedule,
        completion=draw(st.sampled_from(COMPLETIONS)),
        num_buffers=draw(st.integers(1, 3)),
    )
    counts = [draw(st.lists(st.integers(0, max_tokens), min_size=ranks, max_size=ranks)) for _ in range(2)]
    return spec, ranks, nodes, counts, draw(st.floats(0, 1)), draw(st.integers(0, 2**32 - 1))


@settings(max_examples=60)
@given(worlds())
def test_any_sizes_and_routings(world_):
    spec, ranks, nodes, counts, none, seed = world_
    rng = np.random.default_rng(seed)
    with Ranks(spec, ranks, nodes) as world:
        for per_rank in counts:
            round_trip(world, rng, per_rank, reuse=True, none=none, skew=float(rng.random() < 0.3))
