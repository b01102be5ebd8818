# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="mask": ranks are lost in every way, and the others go on with right results and one mask."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_cuda.emulated import ONE_DOMAIN
from hal_cuda.probe import probe_emulator
from hal_host._engine import Members
from hal_host.passing import Passing
from kernel_ranks import random_rows, same_bits
from masking_rounds import Record, expert_rows, inputs, judge, round_of, spec_of

import hal
from hal import reference
from hal.config import TopologyConfig
from hal.errors import ContractError, HalError, PeerTimeout, RankMasked

PATIENT = 30.0
"""Seconds; where no wait should end by the time limit."""
SCHEDULES = ("direct", "hierarchical", "latency")


@dataclass(frozen=True)
class Target:
    """What the ranks run on."""

    name: str
    connection: dict[str, str]
    several_hosts: bool = False

    def nodes(self, ranks: int) -> int:
        """With which schedule hierarchical sums. On one NVLink domain that is by rank."""
        if self.several_hosts:
            return self.hosts(ranks)
        return ranks if self.name == "cuda" else 2

    def hosts(self, ranks: int) -> int:
        """topology.nodes where the schedule asks for nothing."""
        if not self.several_hosts:
            return 1
        return ranks // 2 if ranks % 2 == 0 and ranks > 2 else ranks

    def settings(self, **settings: Any) -> dict[str, Any]:
        """Of an ExpertParallel; skips what is refused here (tests/test_cuda_masking.py)."""
        if self.several_hosts and settings.get("schedule") == "hierarchical":
            pytest.skip("refused over several hosts")
        return settings

    def spawn(self, ranks: int, body: Callable[..., Any], nodes: int | None = None) -> list[Any]:
        nodes = self.hosts(ranks) if nodes is None else nodes
        return hal.spawn(ranks, body, **self.connection, timeout=PATIENT, topology={"nodes": nodes})


EMULATED = {"backend": "cuda", "transport": "gin_emulated"}
HOST = Target("host", {})
CUDA = Target("cuda", EMULATED)
CUDA_HOSTS = Target("cuda_hosts", EMULATED, several_hosts=True)


@pytest.fixture(params=[HOST, CUDA, CUDA_HOSTS], ids=lambda target: target.name)
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    if request.param is not HOST and not probe_emulator().usable:
        pytest.skip(probe_emulator().reason)
    monkeypatch.setenv(ONE_DOMAIN, str(int(not request.param.several_hosts)))
    return request.param


def expert_parallel(comm: hal.Communicator, **settings: Any) -> hal.ExpertParallel:
    return comm.expert_parallel(spec_of(comm.world_size, **settings))


# --- a rank that leaves, in threads ----------------------------------------------------------------------------------


def leaves(comm: hal.Communicator, ep: hal.ExpertParallel, how: str, number: int) -> None:
    """End this rank at some point of round ``number``."""
    tokens = inputs(ep.spec, ep.world_size, number)
    arguments = (tokens.x[ep.rank], tokens.topk_idx[ep.rank], tokens.topk_weights[ep.rank])
    if how == "after dispatch_send":
        ep.dispatch_send(*arguments)
    elif how != "before the round":
        out = ep.dispatch(*arguments)
        if how == "after combine_send":
            ep.combine_send(expert_rows(ep.rank, number, out.x), out.handle)
    comm.close()


@pytest.mark.parametrize("how", ["before the round", "after dispatch_send", "after dispatch", "after combine_send"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_others_go_on(target: Target, schedule: str, layout: str, how: str) -> None:
    settings, nodes = target.settings(schedule=schedule, layout=layout), target.nodes(4)

    def body(comm: hal.Communicator) -> list[Any]:
        ep, rounds = expert_parallel(comm, **settings), []
        for number in range(6):
            if (comm.rank, number) in ((2, 1), (0, 3)):  # the second death, of the rank that served the rendezvous
                leaves(comm, ep, how, number)
                return rounds
            rounds.append(round_of(ep, number, halves=number % 2 == 1))
        assert ep.masked_ranks == (0, 2)
        return rounds

    results = dict(enumerate(target.spawn(4, body, nodes)))
    masks = judge(spec_of(4, **settings), 4, results, nodes=nodes)
    assert [len(results[rank]) for rank in range(4)] == [3, 6, 1, 6]
    early = how in ("before the round", "after dispatch_send")
    assert masks == [
        ((), ()), ((2,) if early else (), (2,)), ((2,), (2,)),
        ((0, 2) if early else (2,), (0, 2)), ((0, 2), (0, 2)), ((0, 2), (0, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize("completion", ["strong_signal_no_cqe", "strong_last", "flag_in_block"])
def test_every_completion_goes_on(completion: str) -> None:
    def body(comm: hal.Communicator) -> list[Any]:
        ep, rounds = expert_parallel(comm, completion=completion), []
        for number in range(4):
            if (comm.rank, number) == (1, 1):
                leaves(comm, ep, "after dispatch_send", number)
                return rounds
            rounds.append(round_of(ep, number))
        return rounds

    results = dict(enumerate(hal.spawn(3, body, timeout=PATIENT)))
    assert judge(spec_of(3, completion=completion), 3, results)[-1] == ((1,), (1,))


def test_two_ranks_may_leave_at_once_and_one_may_be_left_alone(target: Target) -> None:
    def body(comm: hal.Communicator) -> list[Any]:
        ep, rounds = expert_parallel(comm), []
        for number in range(5):
            if (comm.rank in (0, 3) and number == 1) or (comm.rank == 1 and number == 3):
                leaves(comm, ep, "after dispatch", number)
                return rounds
            rounds.append(round_of(ep, number))
        return rounds

    results = dict(enumerate(target.spawn(4, body)))
    assert judge(spec_of(4), 4, results)[-1] == ((0, 1, 3), (0, 1, 3))
    assert len(results[2]) == 5


def test_a_token_whose_experts_are_all_lost_gets_zeros_and_its_bias(target: Target) -> None:
    def body(comm: hal.Communicator) -> Any:
        ep = comm.expert_parallel(
            num_experts=6, top_k=2, hidden=8, max_tokens=4, dtype="float32", layout="expert", on_peer_loss="mask"
        )
        if comm.rank == 2:
            comm.close()
            return None
        x = np.full((2, 8), 4.0, np.float32)
        idx, weights = np.array([[4, 5], [0, 5]]), np.array([[0.5, 0.5], [0.25, 0.75]], np.float32)
        out = ep.dispatch(x, idx, weights)
        assert (out.masked_ranks, ep.masked_ranks) == ((2,), (2,))
        y, back = ep.combine(
            out.x, out.handle, weighted=True, topk_weights=out.topk_weights, bias=np.ones((2, 8), np.float32)
        )
        return y, back

    for y, back in target.spawn(3, body)[:2]:
        assert np.array_equal(y, np.stack([np.full(8, 1.0), np.full(8, 2.0)]).astype(np.float32)), (
            "0.25 * 4 + 1: no more"
        )
        assert np.array_equal(back, np.array([[0, 0], [0.25, 0]], np.float32))


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_handles_from_before_a_loss_still_combine_and_dispatch(target: Target, schedule: str, layout: str) -> None:
    """One from before two losses, used in between and after; and a dispatch is in flight when the second comes."""
    ranks, nodes, weighted = 4, target.nodes(4), layout == "expert"
    settings = target.settings(schedule=schedule, layout=layout, alignment=1 if layout == "rank" else 16)
    spec = spec_of(ranks, **settings, dtype="float8_e4m3fn", scale_dim=2, num_buffers=3)
    tokens = inputs(spec, ranks, 0)
    assert tokens.scales is not None

    def answers(rank: int, number: int, rows: int) -> Any:
        return random_rows(np.random.default_rng([rank, number]), (rows, spec.hidden), "float32")

    def carried(rank: int, number: int, like: Any) -> Any:
        return np.random.default_rng([rank, number, 1]).random(like.shape, np.float32)

    def body(comm: hal.Communicator) -> Any:
        ep, me, done = comm.expert_parallel(spec), comm.rank, []
        given = (tokens.x[me], tokens.topk_idx[me], tokens.topk_weights[me])
        first = ep.dispatch(*given, scales=tokens.scales[me])
        shape = np.array(first.topk_weights)

        def combine(out: Any, number: int) -> None:
            rows = answers(me, number, out.x.shape[0])
            weights = carried(me, number, out.topk_weights)
            got = ep.combine(rows, out.handle, weighted=weighted, topk_weights=weights)
            done.append(([np.array(part) for part in got], ep.masked_ranks))

        comm.barrier()
        if me == 2:
            return None
        combine(first, 1)
        again = ep.dispatch(tokens.x[me], None, tokens.topk_weights[me], scales=tokens.scales[me], handle=first.handle)
        combine(again, 2)
        if me == 1:
            return None
        pending = ep.dispatch_send(*given, scales=tokens.scales[me])
        combine(first, 3)
        combine(again, 4)
        combine(first, 5)
        late = ep.dispatch_recv(pending)
        combine(late, 6)
        assert np.array_equal(np.array(first.topk_weights), shape)
        return np.array(again.x), np.array(again.scales), np.array(late.x), np.array(late.scales), done

    results = target.spawn(ranks, body, nodes)
    planes = (tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.scales)
    want, first = reference.dispatch(spec, *planes)
    want_again, again = reference.dispatch(
        spec, tokens.x, None, tokens.topk_weights, tokens.scales, handle=first, masked=(2,)
    )
    want_late, late = reference.dispatch(spec, *planes, masked=(1, 2))
    calls = [
        (want, first, (2,)), (want_again, again, (2,)), (want, first, (1, 2)), (want_again, again, (1, 2)),
        (want, first, (1, 2)), (want_late, late, (1, 2)),
    ]  # fmt: skip
    for number, (outs, handle, masked) in enumerate(calls, 1):
        x = [answers(rank, number, out.x.shape[0]) for rank, out in enumerate(outs)]
        weights = [carried(rank, number, out.topk_weights) for rank, out in enumerate(outs)]
        options = {"weighted": weighted, "topk_weights": weights, "topology": TopologyConfig(nodes), "masked": masked}
        ys, backs = reference.combine(x, handle, **options)
        for rank in (0, 3):
            (y, back), said = results[rank][4][number - 1]
            assert said == masked
            same_bits(f"call {number}, rank {rank} y", y, ys[rank])
            same_bits(f"call {number}, rank {rank} weights", back, backs[rank])
    for rank in (0, 3):
        for got, plane in zip(
            results[rank][:4],
            (want_again[rank].x, want_again[rank].scales, want_late[rank].x, want_late[rank].scales),
            strict=True,
        ):
            same_bits(f"rank {rank}", got, plane)


def test_views_of_received_rows_outlive_the_view_that_made_them(target: Target) -> None:
    def body(comm: hal.Communicator) -> None:
        ep = expert_parallel(comm)
        out = ep.dispatch(np.full((8, 16), comm.rank + 1, np.float32), np.tile(np.arange(3) * 3, (8, 1)))
        before = np.array(out.x)
        comm.barrier()
        if comm.rank == 0:
            comm.close()
            return
        for number in range(5):
            round_of(ep, number)
        assert np.array_equal(out.x, before)

    target.spawn(3, body)


def test_several_expert_parallels_lose_a_rank_each_in_its_own_call(target: Target) -> None:
    """Two of them in flight at once, from two threads of each rank."""

    def body(comm: hal.Communicator) -> Any:
        eps = [expert_parallel(comm), expert_parallel(comm, layout="expert")]
        found: list[list[Any]] = [[], []]

        def work(which: int) -> None:
            for number in range(6):
                if comm.rank == 1 and number == 2 + which:
                    return
                found[which].append(round_of(eps[which], number))

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    results = target.spawn(3, body)
    for which, layout in enumerate(("rank", "expert")):
        masks = judge(spec_of(3, layout=layout), 3, {rank: found[which] for rank, found in enumerate(results)})
        assert masks[-1] == ((1,), (1,))


def test_events_and_barriers_survive_a_loss(target: Target) -> None:
    def body(comm: hal.Communicator) -> int:
        ep = expert_parallel(comm)
        if comm.rank == 1:
            comm.barrier()
            comm.close()
            return 0
        comm.barrier()
        x, idx = np.ones((4, 16), np.float32), np.tile(np.array([0, 4, 8]), (4, 1))
        out = ep.dispatch_async(x, idx).result()
        comm.barrier()
        y = ep.combine_async(np.array(out.x), out.handle).result()
        assert np.array_equal(y, 2 * x)
        comm.barrier()
        with pytest.raises(PeerTimeout) as raised:
            comm.wait(0, 1, source=1)
        assert raised.value.rank == 1
        comm.barrier()
        return len(ep.dispatch(x, idx).masked_ranks)

    assert target.spawn(3, body) == [1, 0, 1]


# --- a rank that only seems lost -------------------------------------------------------------------------------------


def test_a_slow_rank_is_masked_and_told_so(target: Target) -> None:
    masked = threading.Event()

    def body(comm: hal.Communicator) -> Any:
        ep, rounds = comm.expert_parallel(spec_of(3), timeout=3.0), []
        for number in range(4):
            if (comm.rank, number) == (1, 1):
                assert masked.wait(PATIENT)
                with pytest.raises(RankMasked, match=r"rank 1 was masked by rank [02]: .* raise `timeout`") as told:
                    round_of(ep, number)
                assert (told.value.rank, told.value.by in (0, 2)) == (1, True)
                with pytest.raises(HalError, match="only be closed"):
                    comm.barrier()
                return rounds
            rounds.append(round_of(ep, number))
            if rounds[-1]["combine masked"]:
                masked.set()
        return rounds

    results = dict(enumerate(target.spawn(3, body)))
    assert judge(spec_of(3), 3, results) == [((), ()), *[((1,), (1,))] * 3]


def test_what_is_said_of_a_loss(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    def body(comm: hal.Communicator) -> None:
        ep = expert_parallel(comm)
        if comm.rank == 1:
            comm.close()
            return
        round_of(ep, 0)

    with caplog.at_level(logging.WARNING, "hal"):
        target.spawn(2, body)
    (line,) = (record.getMessage() for record in caplog.records if record.name == "hal")
    assert line == "rank 0 goes on without rank 1, which has ended (view 1)"


# --- processes -------------------------------------------------------------------------------------------------------

PREAMBLE = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
import hal
from masking_rounds import Record, round_of, spec_of
folder = sys.argv[1]
"""


@pytest.mark.parametrize(("schedule", "layout"), [("direct", "expert"), ("hierarchical", "rank"), ("latency", "rank")])
def test_killed_processes_leave_the_others_with_right_results(target, run_ranks, tmp_path, schedule, layout) -> None:
    """Two of four ranks are killed at moments that nobody chose."""
    nodes = target.nodes(4)
    settings = target.settings(schedule=schedule, layout=layout, hidden=512, max_tokens=64)
    script = f"""{PREAMBLE}
comm = hal.connect(timeout={PATIENT}, **{target.connection})
ep, record = comm.expert_parallel(spec_of(4, **{settings!r})), Record(folder, comm.rank)
if comm.rank in (1, 2):
    delay = 0.05 * comm.rank + np.random.default_rng().random() * 0.2
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
number = after = 0
while after < 5:
    got = round_of(ep, number, halves=number % 3 == 2)
    after += len(got["combine masked"]) == 2
    number += 1
    record.add(got)
comm.close()
print("went on")
"""
    outcome = run_ranks(4, script, str(tmp_path), nodes=nodes, keep_going=True, timeout=200)
    assert outcome.status == 128 + 9, outcome
    assert "went on" in outcome.text(0), outcome
    assert "went on" in outcome.text(3), outcome
    masks = judge(spec_of(4, **settings), 4, Record.read(tmp_path), nodes=nodes)
    assert masks[-1] == ((1, 2), (1, 2))


def test_a_stopped_process_that_goes_on_corrupts_nothing(target, run_ranks, tmp_path) -> None:
    """Rank 1 is stopped wherever it happens to be, masked, and woken when the others are well ahead: it hears that it is
    masked, and what it still writes reaches nobody."""
    # Long enough that on a busy machine nobody else is taken for lost.
    settings = {"hidden": 2048 if target is HOST else 128, "max_tokens": 64, "timeout": 8.0}
    script = f"""{PREAMBLE}
comm = hal.connect(timeout={PATIENT}, **{target.connection})
ep, record = comm.expert_parallel(spec_of(3, **{settings!r})), Record(folder, comm.rank)
if comm.rank == 1:
    open(os.path.join(folder, "pid"), "w").write(str(os.getpid()))
number = after = 0
try:
    while after < 15:
        if comm.rank == 1 and number == 1:  # whom to wake is known by now, and one round was whole
            threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
        got = round_of(ep, number)
        if got["combine masked"]:
            after += 1
            if after == 5 and comm.rank == 0:
                os.kill(int(open(os.path.join(folder, "pid")).read()), signal.SIGCONT)
        number += 1
        record.add(got)
except hal.RankMasked as error:
    print("told:", error)
comm.close()
"""
    outcome = run_ranks(3, script, str(tmp_path), nodes=target.hosts(3), timeout=100)
    assert outcome.status == 0, outcome
    assert "told: rank 1 was masked by rank" in outcome.text(1), outcome
    masks = judge(spec_of(3, **settings), 3, Record.read(tmp_path), slow=[1])
    assert masks[-1] == ((1,), (1,))
    assert len(masks) >= 16


def test_a_pause_of_all_ranks_masks_nobody(target, run_ranks, tmp_path) -> None:
    script = f"""{PREAMBLE}
import subprocess
comm = hal.connect(timeout={PATIENT}, **{target.connection})
ep = comm.expert_parallel(spec_of(3), timeout=2.0)
open(os.path.join(folder, f"pid-{{comm.rank}}"), "w").write(str(os.getpid()))
comm.barrier()
if comm.rank == 0:
    pids = " ".join(open(os.path.join(folder, f"pid-{{rank}}")).read() for rank in range(3))
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {{pids}}; sleep 3.5; kill -CONT {{pids}}"], start_new_session=True)
end = time.monotonic() + 4.5
number = 0
while True:
    # Rank 1 is slow, so that the others are stopped in the middle of waits; rank 0 says when it is enough.
    got = round_of(ep, number)
    time.sleep(0.05 * (comm.rank == 1))
    number += 1
    assert got["combine masked"] == ()
    enough = int(comm.rank == 0 and time.monotonic() > end)
    if len(ep.dispatch(np.ones((enough, 16), np.float32), np.tile([0, 3, 6], (enough, 1))).x):
        break
comm.close()
print("rounds", number)
"""
    outcome = run_ranks(3, script, str(tmp_path), nodes=target.hosts(3), timeout=100)
    assert outcome.status == 0, outcome
    assert len({outcome.text(rank) for rank in range(3)}) == 1, outcome


# --- whom a wait in vain is put down to -------------------------------------------------------------------------------

STALL = 4.0
"""Seconds; the time limit of waits in vain below. The second look is a second later."""


def waits_of_ranks(ranks: int, *bodies: Callable[[Any, Callable[..., Any]], Any]) -> list[Any]:
    """``bodies`` of the first ranks, with their transport and a wait(source, seconds) in vain. The other ranks are silent until
    these have ended."""
    begun, ended = threading.Barrier(len(bodies)), threading.Barrier(ranks)

    def body(comm: hal.Communicator) -> Any:
        session: Any = comm._session
        window, got = session.allocate(64), None

        def wait(source: int, seconds: float) -> PeerTimeout:
            with pytest.raises(PeerTimeout) as raised:
                session.fabric(window, seconds, Members()).wait(0, 1, source, "test")
            return raised.value

        if comm.rank < len(bodies):
            begun.wait(PATIENT)
            got = bodies[comm.rank](session.transport, wait)
        ended.wait(4 * PATIENT)
        return got

    return hal.spawn(ranks, body, timeout=PATIENT)


def test_a_relay_that_is_about_to_say_who_is_lost_is_not_blamed() -> None:
    """Rank 1 has given up when rank 0 does, which sees it wait for nobody, and decides a moment later."""

    def relay(transport: Any, wait: Callable[..., PeerTimeout]) -> None:
        decides = time.monotonic() + 1.08 * STALL
        found = wait(2, STALL / 2)
        assert found.rank == 2
        time.sleep(decides - time.monotonic())
        transport.leave_out(0, found.rank)

    found, *_ = waits_of_ranks(3, lambda _, wait: wait(1, STALL), relay)
    assert (found.rank, found.reason) == (2, "the others go on without it")


def test_a_relay_is_blamed_that_neither_waits_nor_answers() -> None:
    found, *_ = waits_of_ranks(3, lambda _, wait: wait(1, STALL), lambda transport, wait: wait(2, STALL / 2))
    assert (found.rank, found.reason) == (1, "no answer")
    assert STALL <= found.seconds < 2 * STALL


def test_of_a_relay_that_waits_in_several_threads_the_oldest_wait_is_followed() -> None:
    """Rank 1 waits for rank 2 all the time, and again and again for others, the one who asks among them."""

    def relay(transport: Any, wait: Callable[..., PeerTimeout]) -> None:
        ended = threading.Event()

        def wait_for(source: int) -> None:
            while not ended.is_set():
                wait(source, 0.05)

        threads = [threading.Thread(target=wait_for, args=(source,)) for source in (0, 3)]
        for thread in threads:
            thread.start()
        wait(2, 1.5 * STALL)
        ended.set()
        for thread in threads:
            thread.join()

    found, *_ = waits_of_ranks(4, lambda _, wait: wait(1, STALL), relay)
    assert found.rank == 2
    assert found.reason == "no answer: rank 1 waits for rank 2 in stage 'test'"


# --- descriptors between ranks ---------------------------------------------------------------------------------------


def test_descriptors_of_several_windows_and_views_are_not_mixed_up() -> None:
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right, open(os.devnull) as null:
        sender, taker = Passing([None, left]), Passing([right, None])
        for name, value in (((1, 1), 5), ((2, 1), 6), ((1, 2), 7)):
            sender.send(1, name, null.fileno(), value)
        for name, value in (((2, 1), 6), ((1, 2), 7)):
            fd, got = taker.take(0, name, PATIENT)
            os.close(fd)
            assert got == value
        taker.forget(1, 2)
        with pytest.raises(PeerTimeout, match=r"rank 0: no answer in stage 'window'"):
            taker.take(0, (1, 1), 0.05)
        left.close()
        with pytest.raises(PeerTimeout, match="rank 0: its process died"):
            taker.take(0, (1, 3), PATIENT)
        taker.close()


# --- where it cannot be had ------------------------------------------------------------------------------------------


def test_a_wrong_word_is_refused() -> None:
    with hal.connect() as comm, pytest.raises(ContractError, match="on_peer_loss='ignore' is not one of error, mask"):
        expert_parallel(comm, on_peer_loss="ignore")


def test_the_emulated_ascend_device_refuses() -> None:
    pytest.importorskip("hal_ascend._engine")
    with (
        hal.connect(backend="ascend", transport="udma_emulated") as comm,
        pytest.raises(
            ContractError, match=r"on_peer_loss='mask' cannot be had here: its backend has no kernels for it"
        ),
    ):
        expert_parallel(comm)
