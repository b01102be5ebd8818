# SPDX-License-Identifier: Apache-2.0
"""Schedule latency of the CUDA backend on emulated GPUs: offers made ahead, counts beside the rows, and what goes wrong."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_emulator import EQUAL, SEEDS, Round, Scenario, emulator, run
from hal_cuda.probe import probe_emulator

import hal
from hal import _validate, reference
from hal.errors import ContractError

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

RANK = Scenario("latency, layout rank", ranks=3, rounds=4, settings={"schedule": "latency", "num_experts": 6})
PUSH = replace(RANK, name="latency, pushed", combine="push")
EXPERT = Scenario("latency, layout expert", rounds=4, settings={"schedule": "latency", "layout": "expert"})
SCENARIOS = (RANK, PUSH, EXPERT)
NAMES = [scenario.name for scenario in SCENARIOS]


def spawn(ranks: int, body: Any, timeout: float = 20.0) -> list[Any]:
    return hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", timeout=timeout)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_rows_are_right_whenever_stores_become_visible(scenario):
    rounds = [Round(scenario, number) for number in range(scenario.rounds)]
    for seed in range(6):
        with emulator(seed):
            assert run(scenario, rounds) == EQUAL, seed


@pytest.mark.parametrize(
    ("scenario", "mutation"),
    [
        (RANK, "release_is_relaxed"),
        (RANK, "barrier_without_order"),
        (EXPERT, "fence_does_nothing"),
        (EXPERT, "acquire_is_relaxed"),
    ],
    ids=["release", "barrier", "fence", "acquire"],
)
def test_a_word_that_orders_nothing_is_noticed(scenario, mutation):
    rounds = [Round(scenario, number) for number in range(scenario.rounds)]

    def ends(seed: int) -> str:
        with emulator(seed, mutation):
            return run(scenario, rounds)

    assert any(ends(seed) != EQUAL for seed in SEEDS)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("cached", [False, True])
def test_rows_leave_before_the_peer_begins_its_round(layout, cached):
    """With counts exchanged first, rank 0 would wait here until rank 1 begins."""
    scenario = Scenario("ahead", settings={"schedule": "latency", "layout": layout, "num_buffers": 3})
    rounds = [Round(scenario, number) for number in range(3)]
    sent = threading.Event()

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        handle = None
        for one in rounds:
            if me == 1 and one is not rounds[0]:
                assert sent.wait(20)
            rows = one.rows[me]
            if cached and handle is not None:
                pending = ep.dispatch_send(rounds[0].x[me], topk_weights=rounds[0].weights[me], handle=handle)
                rows = rounds[0].rows[me]
            else:
                pending = ep.dispatch_send(one.x[me], one.idx[me], one.weights[me])
            if me == 0 and one is not rounds[0]:
                sent.set()
            out = ep.dispatch_recv(pending)
            assert out.x.tobytes() == rows.x.tobytes()
            assert out.topk_idx.tobytes() == rows.topk_idx.tobytes()
            handle = out.handle
            comm.barrier()
            sent.clear()
            comm.barrier()
            del out

    spawn(2, body)


def test_slots_are_offered_ahead_while_some_are_free():
    scenario = Scenario("offers", settings={"schedule": "latency", "num_buffers": 2})
    one = Round(scenario, 1)

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        slots = ep._engine._slots
        held = []
        for turn in range(6):
            offered = slots._offered
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            assert out.x.tobytes() == one.rows[me].x.tobytes()
            if turn in (1 + me, 3):  # ranks hold results at different times
                held.append((out.x, out.x.copy()))
            else:
                held.clear()
            # With one result held and one in hand, no slot is left to offer.
            assert (slots._offered is None) == (turn in (2 + me, 4)), (turn, offered)
            assert all(view.tobytes() == copy.tobytes() for view, copy in held)
            del out

    spawn(2, body)


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("combine", ["pull", "push"])
def test_a_slot_that_was_offered_to_no_avail_gives_its_rows_on(layout, combine, monkeypatch):
    """A CUDA graph's arrays are where they were captured, whatever was offered before its replay: rows move there."""
    monkeypatch.setenv("HAL_CUDA_COMBINE", combine)
    settings = {"schedule": "latency", "layout": layout, "num_buffers": 4, "num_experts": 6}
    scenario = Scenario("relocated", ranks=3, settings=settings)
    rounds = [Round(scenario, number) for number in range(9)]
    moved = []

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        engine = ep._engine
        capturing = False
        monkeypatch.setattr(engine, "_capturing", lambda on: capturing)
        for turn, one in enumerate(rounds):
            capturing = turn % 4 == 1 + me % 2  # as if replayed now; ranks do it in different rounds
            offered = engine._slots._offered
            halves = turn % 3 == 2
            arguments = one.x[me], one.idx[me], one.weights[me]
            out = ep.dispatch_recv(ep.dispatch_send(*arguments)) if halves else ep.dispatch(*arguments)
            slot = (out.x.ctypes.data - engine.slot_address(0)) // engine.place.slot_bytes
            if capturing and offered is not None:
                moved.append(slot != offered)
            for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert"):
                assert getattr(out, name).tobytes() == getattr(one.rows[me], name).tobytes(), (turn, name)
            capturing = False
            y = ep.combine(one.answers[me], out.handle)
            assert y.tobytes() == one.sums[me].tobytes()
            del out, y

    spawn(3, body)
    assert any(moved)


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_several_dispatches_are_in_flight_and_reuse_handles(layout):
    scenario = Scenario("flights", settings={"schedule": "latency", "layout": layout, "num_buffers": 4, "top_k": 3})
    rounds = [Round(scenario, number) for number in range(3)]

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        for reversed_order in (False, True):
            pending = [ep.dispatch_send(one.x[me], one.idx[me], one.weights[me]) for one in rounds]
            order = list(enumerate(pending))
            if reversed_order and me == 0:
                order.reverse()
            handles = {}
            for index, sent in order:
                out = ep.dispatch_recv(sent)
                for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert"):
                    assert getattr(out, name).tobytes() == getattr(rounds[index].rows[me], name).tobytes()
                handles[index] = out.handle
                del out
            again = [ep.dispatch_send(one.x[me], None, one.weights[me], handle=handles[0]) for one in [rounds[0]] * 3]
            for sent in again:
                assert ep.dispatch_recv(sent).x.tobytes() == rounds[0].rows[me].x.tobytes()
            for index, one in enumerate(rounds):
                assert ep.combine(one.answers[me], handles[index]).tobytes() == one.sums[me].tobytes()

    spawn(2, body)


@pytest.mark.parametrize("schedule", ["direct", "latency"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("bad", [99, -7, "twice"])
def test_bad_ids_that_only_kernels_see_are_refused_on_every_rank(schedule, layout, bad, monkeypatch):
    """Ids in device memory: the dispatch kernel checks them. Emulated, ids are in host memory, so that check is left out."""
    monkeypatch.setattr(_validate, "check_routing", lambda *given: None)
    scenario = Scenario("bad", settings={"schedule": schedule, "layout": layout})
    one = Round(scenario, 2)
    ids = one.idx[1].copy()
    ids[2] = ids[2, 0] if bad == "twice" else bad

    def body(comm: hal.Communicator) -> str:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        with pytest.raises(ContractError) as error:  # noqa: PT012 (latency is told by the rank's next call)
            ep.dispatch(one.x[me], ids if me else one.idx[me], one.weights[me])
            if schedule == "latency":
                ep.dispatch(one.x[me], one.idx[me], one.weights[me])
        comm.barrier()
        for _ in range(2):
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            assert out.x.tobytes() == one.rows[me].x.tobytes()
            assert ep.combine(one.answers[me], out.handle).tobytes() == one.sums[me].tobytes()
        return str(error.value)

    if schedule == "direct":
        # Rank 0's part of the round is done again with rank 1's next, so it is told nothing.
        def told(comm: hal.Communicator) -> str:
            ep, me = comm.expert_parallel(scenario.spec), comm.rank
            text = ""
            if me:
                with pytest.raises(ContractError) as error:
                    ep.dispatch(one.x[me], ids, one.weights[me])
                text = str(error.value)
            for _ in range(2):
                out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
                assert out.x.tobytes() == one.rows[me].x.tobytes()
                assert ep.combine(one.answers[me], out.handle).tobytes() == one.sums[me].tobytes()
            return text

        body = told
    texts = spawn(2, body)
    assert ("twice" if bad == "twice" else str(bad)) in texts[1]
    if schedule == "latency":
        assert "rank 1 gave ids that break the contract" in texts[0]


def test_a_rank_that_reuses_a_handle_alone_is_told():
    scenario = Scenario("mixed", settings={"schedule": "latency"})
    one = Round(scenario, 2)

    def body(comm: hal.Communicator) -> str:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        handle = ep.dispatch(one.x[me], one.idx[me], one.weights[me]).handle
        # Without a stream of the caller's, a call ends when its kernel has, and so tells of it itself.
        routing = {"handle": handle} if me else {"topk_idx": one.idx[me]}
        with pytest.raises(ContractError, match="reuses a handle") as error:
            ep.dispatch(one.x[me], topk_weights=one.weights[me], **routing)
        comm.barrier()
        assert ep.dispatch(one.x[me], one.idx[me], one.weights[me]).x.tobytes() == one.rows[me].x.tobytes()
        return str(error.value)

    spawn(2, body)


def test_rows_that_no_peer_writes_are_padding_also_in_a_used_slot():
    scenario = Scenario("padding", settings={"schedule": "latency", "layout": "expert", "num_buffers": 2})
    full, none = Round(scenario, 1), np.zeros((0, scenario.spec.hidden), np.float32)
    ids, weights = np.zeros((0, scenario.spec.top_k), np.int32), np.zeros((0, scenario.spec.top_k), np.float32)
    empty, _ = reference.dispatch(scenario.spec, [none, none], [ids, ids], [weights, weights])

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        for turn in range(6):
            if turn % 2 == 0:
                out = ep.dispatch(full.x[me], full.idx[me], full.weights[me])
                rows = full.rows[me]
            else:
                out = ep.dispatch(none, ids, weights)
                rows = empty[me]
            for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert"):
                assert getattr(out, name).tobytes() == getattr(rows, name).tobytes(), (turn, name)
            del out

    spawn(2, body)
