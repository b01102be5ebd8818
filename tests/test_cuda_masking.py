# SPDX-License-Identifier: Apache-2.0
"""What on_peer_loss="mask" has of its own on the CUDA backend (emulated GPUs); tests/test_masking.py has the rest."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_cuda import native
from hal_cuda.crossing import CHANNELS
from hal_cuda.faults import Faults
from hal_cuda.meeting import Ends, Meeting, Words
from hal_cuda.patience import Patience
from hal_cuda.probe import probe_emulator
from hal_cuda.view import View
from hal_cuda.watch import Watch
from hal_host._engine import Members
from kernel_ranks import same_bits
from losing_a_rank import lose_a_rank
from masking_rounds import expert_rows, inputs, judge, round_of, spec_of

import hal
from hal import reference
from hal.arrays import as_buffer
from hal.errors import CapacityError, ContractError, PeerTimeout, RankMasked

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

PATIENT = 30.0


def spawn(ranks: int, body: Any, *args: Any, hosts: int = 1) -> list[Any]:
    layout = {"topology": {"nodes": hosts}, "timeout": PATIENT}
    return hal.spawn(ranks, body, *args, backend="cuda", transport="gin_emulated", **layout)


@pytest.mark.parametrize(
    ("ranks", "hosts", "layout", "schedule"),
    [(3, 1, "expert", "latency"), (4, 2, "rank", "latency"), (3, 3, "expert", "direct")],
)
def test_torch_tensors_go_on_without_a_killed_process(run_ranks, tmp_path, ranks, hosts, layout, schedule):
    """The same script as on GPUs (tests/cuda/test_losing_a_rank.py)."""
    pytest.importorskip("torch")
    lose_a_rank(run_ranks, tmp_path, ranks, layout, schedule, "gin_emulated", "cpu", nodes=hosts)


@pytest.mark.parametrize("combine", ["pull", "push"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_combines_by_reading_and_by_writing_go_on(monkeypatch, layout, combine):
    monkeypatch.setenv("HAL_CUDA_COMBINE", combine)

    def body(comm: hal.Communicator) -> list[Any]:
        ep, rounds = comm.expert_parallel(spec_of(3, layout=layout)), []
        for number in range(4):
            if (comm.rank, number) == (0, 1):
                tokens = inputs(ep.spec, 3, number)
                ep.dispatch(tokens.x[0], tokens.topk_idx[0], tokens.topk_weights[0])
                return rounds
            rounds.append(round_of(ep, number))
        return rounds

    masks = judge(spec_of(3, layout=layout), 3, dict(enumerate(spawn(3, body))))
    assert masks == [((), ()), ((), (0,)), *[((0,), (0,))] * 2]


@pytest.mark.parametrize("hosts", [1, 3])
def test_what_is_refused_is_the_same_before_a_loss_and_after_it(hosts):
    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(spec_of(3, num_buffers=2))
        tokens = np.ones((2, 16), np.float32), np.array([[0, 4, 8]] * 2)
        for number in range(2):
            if (comm.rank, number) == (1, 1):
                return
            sent = ep.dispatch_send(*tokens)
            with pytest.raises(CapacityError, match="receive an earlier dispatch first"):
                ep.dispatch_send(*tokens)
            out = ep.dispatch_recv(sent)
            assert np.array(out.x).shape[0] > 0
        assert ep.masked_ranks == (1,)

    spawn(3, body, hosts=hosts)


def test_experts_may_write_where_expert_output_says_also_after_a_loss():
    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(spec_of(2, top_k=2))
        tokens = np.ones((2, 16), np.float32), np.array([[0, 3]] * 2)
        out = ep.dispatch(*tokens)
        rows = np.asarray(ep.expert_output(out.handle, out.x))
        rows[...] = np.asarray(out.x) * 3
        if comm.rank == 1:
            return
        assert np.array_equal(ep.combine(rows, out.handle), tokens[0] * 3)
        assert ep.masked_ranks == (1,)

    spawn(2, body)


@pytest.mark.parametrize("hosts", [1, 3])
def test_words_between_those_that_are_left_go_on_after_a_wait_in_vain(hosts):
    def body(comm: hal.Communicator) -> None:
        comm.expert_parallel(spec_of(3))
        comm.barrier()
        if comm.rank == 1:
            return
        for _ in range(2):  # the first while rank 1 leaves, perhaps; the second when it has left
            with pytest.raises(PeerTimeout, match="rank 1: it closed its communicator") as raised:
                comm.wait(0, 1, source=1)
            assert raised.value.rank == 1
        other = 2 - comm.rank
        comm.queue(0).signal(1, other, 7)
        assert comm.wait(1, 7, source=other) == 7
        comm.barrier()

    spawn(3, body, hosts=hosts)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_memory_of_a_view_is_given_back_when_no_row_is_referred_to(hosts):
    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(spec_of(4, num_buffers=3))
        tokens = np.ones((2, 16), np.float32), np.array([[0, 4, 8]] * 2)
        first = ep.dispatch(*tokens)
        before = np.array(first.x)
        comm.barrier()
        if comm.rank == 1:
            return
        second = ep.dispatch(*tokens)
        assert ep.masked_ranks == (1,)
        assert [view.ranks for view in ep._engine._left] == [(0, 1, 2, 3)], "its rows are referred to"
        assert np.array_equal(first.x, before)
        del first
        comm.barrier()
        if comm.rank == 2:
            return
        again = np.array(second.x)
        ep.dispatch(*tokens)
        assert ep.masked_ranks == (1, 2)
        assert [view.ranks for view in ep._engine._left] == [(0, 2, 3)]
        assert np.array_equal(second.x, again)

    spawn(4, body, hosts=hosts)


@pytest.mark.parametrize("hosts", [1, 2])
def test_ids_in_device_memory_are_refused_in_the_numbers_of_the_run(hosts):
    """Past the interface's own look at ids, which device memory does not get."""

    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(spec_of(4))
        good = [[0, 5, 9]] * 4
        ep.dispatch(np.ones((4, 16), np.float32), np.array(good))
        comm.barrier()
        if comm.rank == 1:
            return
        x, weights = as_buffer(np.ones((4, 16), np.float32)), as_buffer(np.ones((4, 3), np.float32))

        def dispatch(row: list[int], dtype: type) -> Any:
            ids = np.array([*good[:2], row, *good[:1]], dtype)
            return ep._engine.dispatch(x, as_buffer(ids), weights, None, None, None)

        bad = [([0, 12, 3], "names expert 12, but"), ([10, 7, 10], "expert 10 twice"), ([4, 7, 4], "expert 4 twice")]
        for dtype in (np.int32, np.int64):
            for row, words in bad:
                if comm.rank == 3:
                    with pytest.raises(ContractError, match=f"token 2 .*{words}"):
                        dispatch(row, dtype)
            assert dispatch(good[0], dtype).masked_ranks == (1,)

    spawn(4, body, hosts=hosts)


# --- over several hosts --------------------------------------------------------------------------------------------------

HOSTS = [(2, 2), (4, 2), (3, 3), (6, 3)]
"""Ranks and hosts."""


def rounds_until_death(comm: hal.Communicator, deaths: dict[int, int], settings: dict[str, Any]) -> list[Any]:
    """``deaths``: the round before which a rank closes."""
    ep, rounds = comm.expert_parallel(spec_of(comm.world_size, **settings)), []
    for number in range(6):
        if deaths.get(comm.rank) == number:
            return rounds
        rounds.append(round_of(ep, number, halves=number % 2 == 1))
    return rounds


@pytest.mark.parametrize("signals", ["auto", "weak"])
@pytest.mark.parametrize("shape", HOSTS, ids=lambda s: f"{s[1]}x{s[0] // s[1]}")
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_hosts_lose_ranks_while_rings_go_round(monkeypatch, schedule, layout, shape, signals):
    """Rings of two cells, over networks with strong signals and without; down to one rank where there are two or three. Of
    three hosts of two a whole one is lost first: NCCL has teams of two then, and HAL's kernels none."""
    monkeypatch.setenv(CHANNELS, "2x2")
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", signals)
    (ranks, hosts), settings = shape, {"schedule": schedule, "layout": layout, "max_tokens": 40}
    deaths = {2: {0: 3}, 6: {5: 1, 4: 1, 0: 3}}.get(ranks, {ranks - 1: 1, 0: 3})
    results = dict(enumerate(spawn(ranks, rounds_until_death, deaths, settings, hosts=hosts)))
    masks = judge(spec_of(ranks, **settings), ranks, results, nodes=hosts)
    gone = [tuple(sorted(rank for rank, round_ in deaths.items() if round_ <= number)) for number in range(6)]
    assert masks == [(lost, lost) for lost in gone]


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_those_left_on_one_host_need_no_network(schedule, layout):
    """Ranks 2 and 3 of two hosts close, one after the other: each rank is then a host of its own, and then both of the
    first host are one NVLink domain. A handle from before is used in each of these views."""
    settings = {"schedule": schedule, "layout": layout}

    def body(comm: hal.Communicator) -> Any:
        ep = comm.expert_parallel(spec_of(4, **settings))
        tokens = inputs(ep.spec, 4, 0)
        first = ep.dispatch(*(getattr(tokens, name)[comm.rank] for name in ("x", "topk_idx", "topk_weights")))
        rows, sums, teams = expert_rows(comm.rank, 0, first.x), [], []
        for leaver in (3, 2, None):
            sums.append(np.array(ep.combine(rows, first.handle)))
            teams.append((len(ep._engine._engine.session.team), ep._engine._engine.session.gin is not None))
            comm.barrier()
            if comm.rank == leaver:
                break
        assert teams == [(2, True), (1, True), (2, False)][: len(teams)]
        return sums

    results = spawn(4, body, hosts=2)
    spec = spec_of(4, **settings)
    tokens = inputs(spec, 4, 0)
    outs, handle = reference.dispatch(spec, tokens.x, tokens.topk_idx, tokens.topk_weights)
    rows = [expert_rows(rank, 0, out.x) for rank, out in enumerate(outs)]
    for number, masked in enumerate([(), (3,), (2, 3)]):
        wanted = reference.combine(rows, handle, masked=masked)
        for rank in set(range(4)) - set(masked):
            same_bits(f"combine {number}, rank {rank}", results[rank][number], wanted[rank])


def test_complete_barriers_deliver_between_those_that_are_left():
    """Relaxed puts over GIN are only posted; a complete barrier of those that are left has them delivered."""

    def body(comm: hal.Communicator) -> int:
        ep, window = comm.expert_parallel(spec_of(3)), comm.window(8 * 512)
        comm.barrier()
        if comm.rank == 1:
            return 0
        round_of(ep, 0)
        assert ep.masked_ranks == (1,)
        other, wrong = 2 - comm.rank, 0
        for generation in range(1, 20):
            comm.queue(generation % 2).put(window, 0, np.full(512, generation, np.uint64), other)
            comm.barrier(complete=True)
            wrong += int((np.array(window.array).view(np.uint64) != generation).sum())
            comm.queue(generation % 2).quiet()
            comm.barrier()
        return wrong

    assert spawn(3, body, hosts=3) == [0, 0, 0]


def test_a_host_of_which_one_rank_is_silent_is_not_blamed_for_it():
    """Rank 3 makes no more calls. Its neighbour hands on to the other host what comes from it, and is waited for in vain."""
    masked = threading.Event()

    def body(comm: hal.Communicator) -> Any:
        ep, rounds = comm.expert_parallel(spec_of(4), timeout=8.0), []
        for number in range(4):
            if (comm.rank, number) == (3, 1):
                assert masked.wait(4 * PATIENT)
                with pytest.raises(RankMasked):
                    round_of(ep, number)
                return rounds
            rounds.append(round_of(ep, number))
            if rounds[-1]["combine masked"]:
                masked.set()
        return rounds

    results = dict(enumerate(spawn(4, body, hosts=2)))
    assert judge(spec_of(4), 4, results) == [((), ()), *[((3,), (3,))] * 3]


STALL = 4.0
"""Seconds; the time limit of calls below that wait in vain."""


def rounds_with_one_stuck(body: Any, hosts: int) -> None:
    """Three ranks; ``body(rank, ep, masked)`` prepares that rank 1 waits for the event ``masked`` in its next round. The others
    must leave it out, and nobody else."""
    masked = threading.Event()

    def run(comm: hal.Communicator) -> Any:
        ep, rounds = comm.expert_parallel(spec_of(3), timeout=STALL), []
        body(comm.rank, ep, masked)
        try:
            for number in range(4):
                rounds.append(round_of(ep, number))
                if rounds[-1]["combine masked"]:
                    masked.set()
        except RankMasked:
            assert comm.rank == 1
        finally:
            masked.set()
        return rounds

    results = dict(enumerate(spawn(3, run, hosts=hosts)))
    masks = judge(spec_of(3), 3, results, slow=[1])
    assert len(masks) == 4
    assert masks[-1] == ((1,), (1,))


@pytest.mark.parametrize(("hosts", "wakes"), [(1, False), (3, False), (3, True)])
def test_ranks_whose_kernels_wait_for_each_other_do_not_blame_each_other(monkeypatch, hosts, wakes):
    """A kernel has many waits, and says which one it gave up first: for the rank that is stuck, or for one that waits as well.
    Here it is always another. The stuck rank wakes when it is left out, or when the others have given up and not decided."""
    run = View.combine

    def combine(view: View, *arguments: Any) -> Any:
        stuck = waits.get(view)
        if stuck is not None:
            assert stuck.wait(1.3 * STALL if wakes else 4 * PATIENT) != wakes
        try:
            return run(view, *arguments)
        except PeerTimeout as error:
            innocent = 2 - view.ranks[view.session.rank]
            raise PeerTimeout(innocent, error.stage, seconds=error.seconds) from error

    waits: dict[View, threading.Event] = {}
    monkeypatch.setattr(View, "combine", combine)

    def body(rank: int, ep: hal.ExpertParallel, masked: threading.Event) -> None:
        round_of(ep, 0)
        if rank == 1:
            waits[ep._engine._engine] = masked

    rounds_with_one_stuck(body, hosts)


@pytest.mark.parametrize("told", [0, 2])
def test_a_rank_left_behind_in_the_round_before_is_not_blamed_for_the_next(monkeypatch, told):
    """Rank 1 gets stuck when it has told only one other that it holds the round. That one goes on, and waits for a rank that
    cannot."""
    say = Ends.say
    waits: dict[Ends, threading.Event] = {}

    def say_to_one(ends: Ends) -> None:
        stuck = waits.get(ends)
        if stuck is None:
            say(ends)
            return
        others = ends._others
        ends._others = [told]
        say(ends)
        ends._others = others
        assert stuck.wait(4 * PATIENT)

    monkeypatch.setattr(Ends, "say", say_to_one)

    def body(rank: int, ep: hal.ExpertParallel, masked: threading.Event) -> None:
        round_of(ep, 0)
        if rank == 1:
            waits[ep._engine._engine.ends] = masked

    rounds_with_one_stuck(body, 3)


def test_hierarchical_sums_over_hosts_are_refused_and_nothing_is_broken():
    def body(comm: hal.Communicator) -> None:
        words = r"on 2 hosts of 2 ranks: .* use schedule='direct' or 'latency', or on_peer_loss='error'"
        with pytest.raises(ContractError, match=words):
            comm.expert_parallel(spec_of(4, schedule="hierarchical"))
        comm.barrier()
        comm.expert_parallel(spec_of(4, schedule="hierarchical", on_peer_loss="error"))

    spawn(4, body, hosts=2)


def test_rail_connections_are_refused_and_nothing_is_broken(run_ranks, monkeypatch):
    """In processes, each of which reads once what its card reaches."""
    monkeypatch.setenv("HAL_CUDA_EMULATOR_GIN", "rail")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import hal
from masking_rounds import spec_of
with hal.connect(backend="cuda", transport="gin_emulated", timeout={PATIENT}) as comm:
    for schedule in ("direct", "latency"):
        try:
            comm.expert_parallel(spec_of(4, schedule=schedule))
        except hal.ContractError as error:
            print(error)
    comm.barrier()
    comm.expert_parallel(spec_of(4, schedule="hierarchical", on_peer_loss="error"))
"""
    outcome = run_ranks(4, script, nodes=2)
    assert outcome.status == 0, outcome
    for rank in range(4):
        refused = outcome.lines[rank]
        assert len(refused) == 2, outcome
        assert all("4 ranks are on 2 hosts, and GIN has rail connections only" in line for line in refused), outcome


def test_hosts_meet_in_each_view_by_its_own_numbers():
    def body(comm: hal.Communicator) -> None:
        session, nbytes = comm._session, Words(3).total
        session.transport.mask_lost_ranks()
        session.masking = True
        window = session.allocate(nbytes)
        everyone = Meeting(session, comm._bootstrap, window, Members(), PATIENT)
        for number in range(40):
            assert everyone.all_gather([comm.rank, number]) == [[rank, number] for rank in range(3)]
        assert everyone.all_gather(bytes([comm.rank])) == [b"\0", b"\1", b"\2"]
        with pytest.raises(CapacityError, match="bytes told in 'a book'"):
            everyone.all_gather("x" * 5000, "a book")
        comm.barrier()
        if comm.rank == 1:
            return
        with pytest.raises(PeerTimeout, match=r"rank 1: (closed its|the others go on without)"):
            everyone.all_gather(None, "alone")
        members = session.transport.leave_out(0, 1)
        later, _ = session.transport.renew(window, members, nbytes, 0, PATIENT)
        two = Meeting(session, comm._bootstrap, later, members, PATIENT)
        assert (two.rank, two.world_size, list(two.ranks)) == (comm.rank // 2, 2, [0, 2])
        two.agree("their settings", {"name": "same"})
        with pytest.raises(ContractError, match="rank 1 has name=2 where rank 0 has 0"):
            two.agree("their settings", {"name": comm.rank})
        comm.barrier()
        if comm.rank == 0:
            return
        with pytest.raises(PeerTimeout, match="rank 0: closed its communicator in stage 'last'"):
            two.all_gather(None, "last")

    hal.spawn(3, body, timeout=PATIENT)


def test_kernels_report_in_the_numbers_of_the_run():
    """A view of ranks 0, 2 and 3 of 4 with 2 experts each: its rank 1 is rank 2, its expert 4 is expert 6."""
    watch = Watch(0, [None] * 3, lambda failed, closed: None)
    faults = Faults(native.load_emulated(), 0, watch, (0, 2, 3), [0, 1, 4, 5, 6, 7], 8)
    record = faults.record
    record.kind, record.rank, record.token, record.expert, record.detail = native.BAD_INPUT, 1, 3, 4, native.BAD_DUPLICATE
    with pytest.raises(ContractError, match="token 3 names expert 6 twice"):
        faults.check(1.0)
    record.kind, record.rank, record.token, record.expert, record.detail = native.BAD_INPUT, 1, 3, 9, native.BAD_ID
    with pytest.raises(ContractError, match="token 3 names expert 9, but expert ids are 0 … 7"):
        faults.check(1.0)
    record.kind, record.rank, record.stage = native.TIMEOUT, 1, native.STAGES.index("dispatch rows")
    with pytest.raises(PeerTimeout, match="rank 2: no answer in stage 'dispatch rows'"):
        faults.check(1.0)
    faults.close()
    watch.close()


def test_patience_ends_what_lasts_too_long_and_nothing_else():
    calls: list[str] = []
    patience = Patience("test", lambda: calls.append("ended"), lambda: calls.append("went on"))
    with patience.lasting(PATIENT):
        pass
    assert calls == []
    with patience.lasting(0.1):
        limit = time.monotonic() + PATIENT
        while not calls and time.monotonic() < limit:
            time.sleep(0.01)
    assert calls == ["ended", "went on"]
    with pytest.raises(ValueError, match="made up"), patience.lasting(PATIENT):
        raise ValueError("made up")
    assert len(calls) == 2
    patience.close()
