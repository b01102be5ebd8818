# SPDX-License-Identifier: Apache-2.0
"""What ranks of two NVLink domains do in tests of GIN: on the emulation (tests/test_gin_session.py), and on GPUs over the
software NIC (tests/cuda/test_gin.py, kernels_cuda/software_nic/check_on_gpus.py), where this file is the program of a rank:

    python tests/gin_bodies.py gin        # or gin_emulated; HAL_RANK and the rest as hal run sets them

Each body runs on every rank and returns what is to be compared; the peers are chosen so that half of the traffic crosses
domains. The program prints one line of JSON."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # a checkout needs no installation
    root = Path(__file__).resolve().parents[1]
    sys.path[:0] = [str(root), str(root / "backends")]

import numpy as np

import hal
from hal import Order, PeerTimeout


def host(window: Any) -> np.ndarray:
    """A copy of this rank's part of a window, as bytes."""
    if window.buffer.device == "cpu":
        return np.array(window.array)
    copy, session = np.empty(window.nbytes, np.uint8), window._communicator._session
    session.library.copy(session.device, copy.ctypes.data, window.buffer.ptr, copy.nbytes, session.stream)
    session.library.stream_sync(session.device, session.stream)
    return copy


def before(comm: hal.Communicator, slot: int) -> int:
    """What ``slot`` holds from earlier bodies, before anybody signals."""
    comm.barrier()
    value = comm.read_signal(slot)
    comm.barrier()
    return value


def ring(comm: hal.Communicator, rounds: int = 12, words: int = 512) -> int:
    """Each round: data to the right by relaxed puts, a strong signal, and an acknowledgement to the left. Words torn."""
    window, queue = comm.window(words * 8), comm.queue(0)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    torn, old = 0, before(comm, 0)
    for generation in range(1, rounds + 1):
        data = np.full(words, comm.rank << 32 | generation, np.int64)
        half = words // 2
        queue.put(window, half * 8, data[half:], right)
        queue.put(window, 0, data[:half], right)
        queue.signal(0, right)
        comm.wait(0, old + generation, source=left)
        torn += int((host(window).view(np.int64) != (left << 32 | generation)).sum())
        queue.signal(1, left, generation, op="set")
        comm.wait(1, generation, source=right)
    return torn


def across(comm: hal.Communicator) -> int:
    """The rank with this one's place in the other of two domains."""
    return (comm.rank + comm.world_size // 2) % comm.world_size


def strong_put_is_a_flag(comm: hal.Communicator) -> int:
    window, queue, stale = comm.window(4096 + 64), comm.queue(0), 0
    peer, old = across(comm), before(comm, 0)
    for generation in range(1, 6):
        queue.put(window, 0, np.full(512, generation, np.uint64), peer)
        queue.put(window, 4096, np.array([generation], np.uint64), peer, order="strong")
        deadline = time.monotonic() + comm.config.timeout
        while host(window)[4096:4104].view(np.uint64)[0] != generation:
            assert time.monotonic() < deadline, "the flag never came"
        stale += int((host(window)[:4096].view(np.uint64) != generation).sum())
        queue.signal(0, peer)
        comm.wait(0, old + generation, source=peer)
    return stale


def bundled_signal(comm: hal.Communicator) -> bool:
    window, queue, peer = comm.window(24), comm.queue(1), across(comm)
    signals: list[tuple[Any, ...]] = [(5, 1), (5, 1, "add"), (5, 3, "set", Order.RELAXED)]
    for i, signal in enumerate(signals):  # each in a place of its own: relaxed puts pass one another, and signals
        queue.put(window, 8 * i, b"%08d" % signal[1], peer, Order.RELAXED, signal)
    comm.wait(5, 3, source=peer)
    return bool(host(window).tobytes() == b"000000010000000100000003")


def signals_add_set_and_wrap(comm: hal.Communicator) -> tuple[int, int, list[int]]:
    queue, n = comm.queue(0), comm.world_size
    for peer in range(n):
        for _ in range(10):
            queue.signal(7, peer, (1 << 32) + 1)
    added = comm.wait(7, 10 * n * ((1 << 32) + 1))
    comm.barrier()
    sets = []
    # Every rank in turn sets what all have added to, neighbours and others; the set value stands, and adds go on from it.
    for turn in range(n):
        if comm.rank == turn:
            for peer in range(n):
                comm.queue(turn % 2).signal(8, peer, 1000 + turn, op="set")
        comm.barrier()
        sets.append(comm.read_signal(8))
        comm.barrier()
        queue.signal(8, (comm.rank + 1) % n, 5)
        comm.wait(8, 1005 + turn, source=(comm.rank - 1) % n)
        comm.barrier()
    queue.signal(9, across(comm), (1 << 64) - 1, op="set")
    comm.wait(9, (1 << 64) - 1, source=across(comm))
    comm.barrier()
    queue.signal(9, across(comm), 2)  # wraps, as an unsigned word does
    comm.barrier()
    return added, comm.read_signal(9), sets


def every_slot_and_queue(comm: hal.Communicator) -> list[int]:
    slots = 12
    for slot in range(slots):
        for peer in range(comm.world_size):
            comm.queue(slot % comm.config.queues).signal(slot, peer, slot + 1)
    comm.barrier()
    return [comm.read_signal(slot) for slot in range(slots)]


def quiet_and_complete_barrier(comm: hal.Communicator) -> list[int]:
    window, seen = comm.window(comm.world_size), []
    for generation in range(1, 6):
        for peer in range(comm.world_size):
            comm.queue(peer % 2).put(window, comm.rank, bytes([generation]), peer, Order.NONE)
        if generation % 2:
            comm.queue(0).quiet()
            comm.queue(1).quiet(peer=across(comm))
            comm.queue(1).quiet()
            comm.barrier(complete=False)
        else:
            comm.barrier()
        seen += [int(v) for v in host(window) if v != generation]
        comm.barrier()
    return seen


def sources_in_a_window(comm: hal.Communicator) -> int:
    """No copy is made of a source in a window: it may change after quiet("source"), and not before. Wrong words."""
    source, target, queue, wrong = comm.window(1 << 14), comm.window(1 << 14), comm.queue(0), 0
    words, old = 1 << 11, before(comm, 0)
    for generation in range(1, 6):
        comm.queue(1).put(source, 0, np.full(words, generation, np.int64), comm.rank)
        comm.barrier()
        queue.put(target, 0, source.buffer, across(comm))
        queue.quiet(scope="source")
        comm.queue(1).put(source, 0, np.full(words, -1, np.int64), comm.rank)
        queue.signal(0, across(comm))
        comm.wait(0, old + generation, source=across(comm))
        wrong += int((host(target).view(np.int64) != generation).sum())
        comm.barrier()
    return wrong


def large_puts(comm: hal.Communicator) -> bool:
    """Longer than what is kept of sources, and more of them than a queue takes."""
    nbytes = 5 << 20
    window, queue, old = comm.window(nbytes), comm.queue(0), before(comm, 0)
    data = np.random.default_rng(across(comm)).integers(0, 255, nbytes, dtype=np.uint8)
    mine = np.random.default_rng(comm.rank).integers(0, 255, nbytes, dtype=np.uint8)
    queue.put(window, 0, mine, across(comm))
    queue.signal(0, across(comm))
    comm.wait(0, old + 1, source=across(comm))
    whole = bool((host(window) == data).all())
    comm.barrier()
    for i in range(60):
        queue.put(window, 8 * i, np.array([i + 1], np.int64), across(comm))
    queue.signal(0, across(comm))
    comm.wait(0, old + 2, source=across(comm))
    return whole and bool((host(window)[:480].view(np.int64) == np.arange(1, 61)).all())


def team_barriers(comm: hal.Communicator) -> list[int]:
    """Barriers of each team cover what its members put before."""
    window, wrong = comm.window(64 * comm.world_size), []
    for generation in range(1, 4):
        for name in ("lsa", "rail", "world"):
            team = comm.team(name)
            value = 10 * generation + len(name)
            for peer in team.ranks:
                comm.queue(generation % 2).put(window, 64 * comm.rank, bytes([value] * 64), peer)
            comm.barrier(team)
            rows = host(window).reshape(comm.world_size, 64)
            wrong += [rank for rank in team.ranks if (rows[rank] != value).any()]
            comm.barrier(team)
    return wrong


def missing_peer(comm: hal.Communicator, seconds: float = 1.0) -> Any:
    """Nobody signals; the wait ends in time and names whom it waited for."""
    comm.barrier()
    if comm.rank != 0:
        time.sleep(2 * seconds)  # alive, and not closed
        return None
    try:
        comm.wait(3, 7, timeout=seconds, source=across(comm))
    except PeerTimeout as error:
        return error.rank, error.stage, error.expected, error.seen
    return "no timeout"


WORDS = {
    "ring": (ring, 0),
    "strong_put_is_a_flag": (strong_put_is_a_flag, 0),
    "bundled_signal": (bundled_signal, True),
    "quiet_and_complete_barrier": (quiet_and_complete_barrier, []),
    "sources_in_a_window": (sources_in_a_window, 0),
    "team_barriers": (team_barriers, []),
    "large_puts": (large_puts, True),
}
"""Bodies with the same result on every rank, whatever the number of ranks."""


def main(transport: str) -> None:
    """Every body, then every check of GIN's promises (hal_cuda.gin_check)."""
    from hal_cuda import gin_check

    with hal.connect(backend="cuda", transport=transport, timeout=20.0, signal_slots=16) as comm:
        session: Any = comm._session
        told: dict[str, Any] = {"rank": comm.rank, "profile": comm.profile.name}
        told["capabilities"] = dataclasses.asdict(session.capabilities)
        told["wrong"] = [name for name, (body, expected) in WORDS.items() if body(comm) != expected]
        for kind, names in (("hold", gin_check.HOLD), ("may_fail", gin_check.MAY_FAIL)):
            told[kind] = {name: dataclasses.astuple(gin_check.check(session, name)) for name in names}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
