# SPDX-License-Identifier: Apache-2.0
"""CUDA ranks that are killed, fail or leave while the others' kernels wait: noticed at once, by name (emulated GPUs)."""

from __future__ import annotations

import re
import threading
import time
from ctypes import c_int
from functools import partial

import numpy as np
import pytest
from hal_cuda import native
from hal_cuda.probe import probe_emulator

import hal
from hal.errors import PeerTimeout

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

LIMIT = 60.0
"""Seconds; the communicator's time limit, which no failure here may need."""
AT_ONCE = 12.0
"""Seconds; generous for a loaded machine: it takes milliseconds."""

SCRIPT = f"""
import os, signal, sys, time
import numpy as np
import hal
from hal.errors import PeerTimeout

comm = hal.connect(backend="cuda", transport="gin_emulated", timeout={LIMIT})
me, what = comm.rank, sys.argv[1]
ep = comm.expert_parallel(num_experts=6, top_k=2, hidden=16, max_tokens=8, dtype="float32", layout=sys.argv[2])
x, idx = np.ones((4, 16), np.float32), np.array([[0, 5], [1, 2], [3, 4], [5, 1]])
out = ep.dispatch(x, idx)
comm.barrier()
if me == 1:
    time.sleep(1.0)  # the others' kernels wait by now
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("made up")
start = time.monotonic()
try:
    if what == "killed" and me == 2:
        comm.wait(0, 1, source=1)
    else:
        ep.dispatch(x, idx)
    print("no error")
except PeerTimeout as error:
    print(f"PeerTimeout rank={{error.rank}} after={{time.monotonic() - start:.2f}} {{error}}")
"""


@pytest.mark.parametrize(
    ("what", "layout", "reason"),
    [("killed", "rank", "its process died"), ("raises", "expert", "it failed and said so|RuntimeError: made up")],
)
def test_a_process_that_ends_is_named_at_once_by_kernels_that_wait(run_ranks, what, layout, reason):
    outcome = run_ranks(3, SCRIPT, what, layout, timeout=100.0)
    for rank in (0, 2):
        match = re.search(r"PeerTimeout rank=(\d+) after=(\S+) (.*)", outcome.text(rank))
        assert match, outcome
        assert match[1] == "1"
        assert float(match[2]) < AT_ONCE
        assert re.search(reason, match[3]), match[3]


def spawn(ranks: int, body, timeout: float = LIMIT):
    return hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", timeout=timeout)


def test_each_of_two_ranks_that_closed_is_known_to_have():
    """Also the one that closed first, by a wait that begins after both have."""

    def body(comm: hal.Communicator) -> None:
        comm.barrier()
        if comm.rank == 0:
            session = comm._session
            deadline = time.monotonic() + 20
            while session.watch.closed != {1, 2}:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            for peer in (1, 2):
                with pytest.raises(PeerTimeout, match="closed its communicator") as error:
                    session.wait(peer, 1, LIMIT, peer)
                assert error.value.rank == peer
                session.faults.record.kind = session.faults.record.claimed = 0
                _clear(session)

    start = time.monotonic()
    spawn(3, body)
    assert time.monotonic() - start < LIMIT / 2


def _clear(session) -> None:
    """Take back this rank's own failure, to look a second time."""
    word = np.zeros(1, np.uint32)
    session.library.copy(session.device, session.abort_words, word.ctypes.data, 4, session.stream)
    session.library.stream_sync(session.device, session.stream)


def test_a_rank_that_closed_ends_only_the_waits_for_it():
    signalled = threading.Event()

    def body(comm: hal.Communicator) -> int:
        comm.barrier()
        if comm.rank == 1:
            return 0
        if comm.rank == 2:
            deadline = time.monotonic() + 20
            while not comm._session.watch.closed and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.3)
            comm.queue().signal(5, 0, 7)
            assert signalled.wait(20)
            return 0
        seen = comm.wait(5, 1, source=2)
        signalled.set()
        return seen

    assert spawn(3, body)[0] == 7


def test_a_stalled_rank_is_passed_on_by_the_first_whose_time_is_up():
    done = threading.Event()

    def body(comm: hal.Communicator) -> tuple[int, str] | None:
        comm.barrier()
        if comm.rank == 1:
            assert done.wait(30)
            return None
        if comm.rank == 0:
            with pytest.raises(PeerTimeout) as error:
                comm.wait(0, 1, timeout=0.5, source=1)
        else:
            with pytest.raises(PeerTimeout) as error:
                comm.wait(0, 1, source=0)  # rank 0 would have signalled once it had heard from rank 1
            done.set()
        return error.value.rank, error.value.reason

    results = spawn(3, body)
    assert results[0] == (1, "no answer")
    assert results[2] == (1, "no answer")


X, IDX = np.ones((4, 16), np.float32), np.array([[0, 3], [1, 2], [3, 0], [2, 1]])


def _dispatch_alone(kind: type[BaseException], timeout: float, await_rows) -> list[BaseException]:
    """Rank 0's dispatch, which rank 1 does not come to: it fails with ``kind``, and no block of it is left, so that the
    caller may let go of its arrays. ``await_rows(engine, way, *arguments)`` stands for the engine's own ``way``. Returns that
    error, and what rank 1 is told afterwards."""
    looked = threading.Event()
    return spawn(2, partial(_one_of_two, looked, kind, timeout, await_rows))


def _one_of_two(looked, kind, timeout: float, await_rows, comm: hal.Communicator) -> BaseException:
    ep = comm.expert_parallel(num_experts=4, top_k=2, hidden=16, max_tokens=8, dtype="float32", timeout=timeout)
    if comm.rank == 1:
        assert looked.wait(LIMIT)
        with pytest.raises(PeerTimeout) as told:
            comm.wait(0, 1, source=0)
        return told.value
    session, engine = comm._session, ep._engine
    engine._await_rows = partial(await_rows, engine, engine._await_rows)
    with pytest.raises(kind) as error:
        ep.dispatch(X, IDX)
    idle = session.library.value("stream_query", c_int, session.device, session.stream)
    looked.set()
    assert idle == 1
    return error.value


def test_a_dispatch_that_times_out_has_ended_its_launch():
    """The first block to give up says so while others still run, and handles' memory may go with the error."""

    def told_early(engine, await_rows, *arguments):
        record = engine._faults.record
        record.claimed, record.rank, record.kind = 1, 1, native.TIMEOUT
        return await_rows(*arguments)

    errors = _dispatch_alone(PeerTimeout, 3.0, told_early)
    assert [error.rank for error in errors] == [1, 0]


def test_a_dispatch_that_is_interrupted_has_ended_its_launch_and_waits_for_nobody():
    def interrupted(engine, await_rows, *arguments):
        raise KeyboardInterrupt

    start = time.monotonic()
    errors = _dispatch_alone(KeyboardInterrupt, LIMIT, interrupted)
    assert time.monotonic() - start < LIMIT / 2
    assert "KeyboardInterrupt in a dispatch" in errors[1].reason


def test_the_watching_thread_ends_with_its_session():
    def body(comm: hal.Communicator) -> int:
        comm.barrier()
        return sum(thread.name.startswith("hal-watch") for thread in threading.enumerate())

    assert max(spawn(3, body)) >= 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hal-watch")]
