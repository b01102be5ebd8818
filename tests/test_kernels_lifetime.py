# SPDX-License-Identifier: Apache-2.0
"""What a caller holds never changes, refused calls leave everything usable, and waits end with the rank at fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_ranks import (
    Ranks,
    bits,
    combine_all,
    dispatch_all,
    dispatch_send,
    expect_dispatch,
    random_rows,
    random_tokens,
    round_trip,
)

from hal.arrays import as_buffer, to_kind
from hal.config import ExpertParallelSpec
from hal.errors import CapacityError, ContractError, PeerTimeout

SPEC = ExpertParallelSpec(num_experts=8, top_k=3, hidden=32, max_tokens=7)
SCHEDULES = (("direct", 1), ("latency", 1), ("hierarchical", 2))


@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_rows_that_somebody_holds_never_change(num_buffers, schedule, nodes):
    rng = np.random.default_rng(1)
    spec = replace(SPEC, schedule=schedule, num_buffers=num_buffers)
    with Ranks(spec, 4, nodes) as world:
        held = []
        for _ in range(5):
            tokens = random_tokens(rng, spec, rng.integers(0, 8, 4).tolist())
            received = dispatch_all(world, tokens)
            expect_dispatch(world, tokens, received)
            held.append([(to_kind(r.x, "numpy"), bits(to_kind(r.x, "numpy"))) for r in received])
            del received
        for round_ in held:
            for array, before in round_:
                assert bits(array) == before


def test_views_are_leases_and_the_last_slot_is_copied_out():
    rng = np.random.default_rng(2)
    with Ranks(SPEC, 2) as world:
        first_byte, size = world.windows[0].ctypes.data, world.windows[0].size

        def is_view(received):
            return first_byte <= received.x.ptr < first_byte + size

        first = dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))
        second = dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))
        assert is_view(first[0])
        assert not is_view(second[0])
        del first
        third = dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))
        assert is_view(third[0])
        array = to_kind(third[0].x, "numpy")
        del third
        assert not is_view(dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))[0]), "an array holds the lease too"
        del array
        assert is_view(dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))[0])


def test_too_many_dispatches_in_flight():
    rng = np.random.default_rng(3)
    with Ranks(replace(SPEC, num_buffers=3), 2) as world:
        held = dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))  # a view takes no slot from those in flight
        tokens = random_tokens(rng, SPEC, [5, 5])

        def work(rank):
            pending = [dispatch_send(world, rank, tokens) for _ in range(2)]
            with pytest.raises(CapacityError, match=r"needed 3, given 2.*num_buffers"):
                dispatch_send(world, rank, tokens)
            return [world.engines[rank].dispatch_recv(p, None) for p in pending]

        both = world.each(work)
        for i in range(2):
            expect_dispatch(world, tokens, [received[i] for received in both])
        del both, held
        round_trip(world, rng, [3, 4])


def test_too_many_combines_in_flight():
    rng = np.random.default_rng(4)
    with Ranks(SPEC, 2) as world:
        received = dispatch_all(world, random_tokens(rng, SPEC, [5, 5]))

        def work(rank):
            engine, x = world.engines[rank], received[rank].x
            pending = [engine.combine_send(x, received[rank].state, None, False, None) for _ in range(2)]
            with pytest.raises(ContractError, match="2 may be in flight"):
                engine.combine_send(x, received[rank].state, None, False, None)
            for p in pending:
                engine.combine_recv(p, (), None)

        world.each(work)
        received.clear()
        round_trip(world, rng, [3, 4])


@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
def test_one_rank_reuses_a_handle_and_the_others_exchange(schedule, nodes):
    rng = np.random.default_rng(5)
    with Ranks(replace(SPEC, schedule=schedule), 4, nodes) as world:
        tokens = random_tokens(rng, SPEC, [5, 5, 5, 5])
        received = dispatch_all(world, tokens)
        for _ in range(4):

            def work(rank):
                with pytest.raises(ContractError) as error:
                    dispatch_send(world, rank, tokens, received[rank].state if rank == 2 else None)
                return str(error.value)

            texts = world.each(work)
            for rank in (0, 1, 3):
                assert texts[rank].startswith("rank 2 reuses a handle and this rank exchanges counts")
            assert texts[2].startswith("rank 0 exchanges counts and this rank reuses a handle")
        received.clear()
        round_trip(world, rng, [3, 4, 0, 7])


def test_ranks_reuse_different_handles():
    rng = np.random.default_rng(6)
    with Ranks(SPEC, 2) as world:
        tokens = random_tokens(rng, SPEC, [5, 5])
        one, two = (dispatch_all(world, tokens) for _ in range(2))

        def work(rank):
            with pytest.raises(ContractError, match=f"rank {1 - rank} reuses the handle of another dispatch"):
                dispatch_send(world, rank, tokens, (one, two)[rank][rank].state)

        world.each(work)


@pytest.mark.parametrize("completion", ["strong_signal", "flag_in_block"])
def test_weights_carried_back_on_some_ranks_only(completion):
    rng = np.random.default_rng(7)
    with Ranks(replace(SPEC, completion=completion), 2) as world:
        received = dispatch_all(world, random_tokens(rng, SPEC, [7, 7], none=0.0))

        def work(rank):
            engine, r = world.engines[rank], received[rank]
            pending = engine.combine_send(r.x, r.state, r.topk_weights if rank == 0 else None, False, None)
            with pytest.raises(ContractError, match=f"rank {1 - rank} .*topk_weights in combine"):
                engine.combine_recv(pending, (), None)

        world.each(work)


def test_bad_expert_ids_are_refused_before_anything_is_sent():
    rng = np.random.default_rng(8)
    with Ranks(replace(SPEC, layout="expert"), 2) as world:
        for bad, text in ((8, "expert 8"), (-2, "expert -2"), (2**40, f"expert {2**40}")):
            tokens = random_tokens(rng, SPEC, [5, 5])
            tokens.topk_idx[0] = tokens.topk_idx[0].astype(np.int64)
            tokens.topk_idx[0][3, 1] = bad
            with pytest.raises(ContractError, match=text):
                dispatch_send(world, 0, tokens)
        tokens.topk_idx[0][3] = [4, 1, 4]
        with pytest.raises(ContractError, match="expert 4 twice"):
            dispatch_send(world, 0, tokens)
        round_trip(world, rng, [5, 2])


def test_a_rank_that_does_not_dispatch_is_named():
    tokens = random_tokens(np.random.default_rng(9), SPEC, [7, 7])
    with Ranks(SPEC, 2, timeout=0.2) as world:  # the other rank has nothing to do, so that any limit is long enough
        with pytest.raises(PeerTimeout) as error:
            dispatch_send(world, 0, tokens)
        assert (error.value.rank, error.value.stage) == (1, "dispatch ready")


def test_a_rank_that_does_not_combine_is_named():
    rng = np.random.default_rng(9)
    with Ranks(SPEC, 2) as world:
        received = dispatch_all(world, random_tokens(rng, SPEC, [7, 7]))
        world.world.timeout = 0.2
        pending = world.engines[0].combine_send(received[0].x, received[0].state, None, False, None)
        with pytest.raises(PeerTimeout) as error:
            world.engines[0].combine_recv(pending, (), None)
        assert (error.value.rank, error.value.stage) == (1, "combine rows")


def test_an_alignment_that_fixed_places_cannot_keep():
    with pytest.raises(ContractError, match="not a multiple of alignment 16"):
        Ranks(replace(SPEC, layout="expert", schedule="latency", alignment=16), 4)


def test_sources_may_change_after_send():
    rng = np.random.default_rng(10)
    for completion in ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block"):
        with Ranks(replace(SPEC, completion=completion), 2) as world:
            tokens = random_tokens(rng, SPEC, [7, 7])
            original = [x.copy() for x in tokens.x]

            def work(rank, tokens=tokens):
                pending = dispatch_send(world, rank, tokens)
                tokens.x[rank][:] = 7
                received = world.engines[rank].dispatch_recv(pending, None)
                x = random_rows(np.random.default_rng(rank), received.x.shape, "bfloat16")
                sent = world.engines[rank].combine_send(as_buffer(x), received.state, None, False, None)
                x[:] = 7
                return received, world.engines[rank].combine_recv(sent, (), None)

            results = world.each(work)
            tokens.x = original
            received = [r for r, _ in results]
            expect_dispatch(world, tokens, received)
            x = [random_rows(np.random.default_rng(rank), r.x.shape, "bfloat16") for rank, r in enumerate(received)]
            again = combine_all(world, x, [r.state for r in received])
            for rank in range(2):
                assert bits(to_kind(results[rank][1][0], "numpy")) == bits(to_kind(again[rank][0], "numpy"))
