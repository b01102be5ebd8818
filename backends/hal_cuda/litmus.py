# SPDX-License-Identifier: Apache-2.0
"""Litmus programs for the device: what kernels_cuda/src/litmus.cu plays, and how its results come back.

The words are the program's; what the transport's profile promotes (``weak acts as strong``) is resolved here.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hal.checker.program import Barrier, Instruction, Place, Program, Put, Quiet, Read, Signal, Wait, Write
from hal.errors import ContractError
from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp
from hal_cuda import native

if TYPE_CHECKING:
    from hal_cuda.session import CudaSession

LINE, RANKS, THREADS = 64, 8, 8
PUT, SIGNAL, WAIT, QUIET, BARRIER, WRITE, READ = range(7)
PAUSE_NS, EMULATED_PAUSE_NS = 5_000, 300_000
"""Pauses between instructions last up to this: as long as stores stay unseen, there and on emulated GPUs."""
NETWORK_QUEUE = "gin"
"""A queue of this name goes over GIN also to ranks that stores reach (``queues gin stores``)."""


def why_not_play(program: Program, strong: bool = True) -> str:
    """Why the device cannot play it; empty if it can. ``strong``: whether the network has strong signals."""
    if program.ranks > RANKS or len(program.threads) > THREADS:
        return (
            f"it has {program.ranks} ranks and {len(program.threads)} threads; the device plays {RANKS} and {THREADS}"
        )
    for place, writers in _writers(program).items():
        if len(writers) > 1 and any(_sets(program, place)):
            return f"{place[0]}[{place[1]}] is set by several threads or queues, and the network only adds"
    for rank, queue in _shared_queues(program):
        if any(_completes(i, queue) for t in program.threads if t.rank == rank for i in t.body):
            return f"two threads of rank {rank} share queue {queue}, and one of them completes it"
        if not strong:
            return f"two threads of rank {rank} share queue {queue}, and a strong signal completes it here"
    return ""


def play(session: CudaSession, program: Program, repetitions: int, seed: int) -> list[dict[tuple[int, str], int]]:
    """Collective. The registers of this rank's threads, for each repetition, by (rank, name)."""
    why = _refusal(session, program)
    if why:
        raise ContractError(f"{program.name} cannot be played on {session.profile.name}: {why}")
    code = Code(program, session.profile)
    starts = 0
    barriers = starts + LINE * THREADS
    lines = barriers + LINE * THREADS
    memory = session.memory(lines + LINE * code.lines * repetitions)
    try:
        return _Play(session, code, memory, (starts, barriers, lines), repetitions, seed).results()
    finally:
        session.retire(memory)


@dataclass
class Code:
    """A program as lines and instructions. ``ops(rank)`` are those of the rank's threads, which are numbered from 0."""

    program: Program
    profile: OrderingProfile
    lines: int = 0
    _first: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        writers = _writers(self.program)
        for window, size in self.program.windows.items():
            for index in range(size):
                count = max(1, len(writers.get((window, index), ())))
                self._first[window, index] = (self.lines, count)
                self.lines += count
        self._writers = writers
        self._ops = [
            (thread.rank, self._op(number, thread.rank, instruction))
            for number, thread in enumerate(self.program.threads)
            for instruction in thread.body
        ]

    @property
    def registers(self) -> tuple[tuple[int, str], ...]:
        return self.program.registers

    def threads(self, rank: int) -> list[int]:
        """Numbers of the rank's threads in the whole program."""
        return [number for number, thread in enumerate(self.program.threads) if thread.rank == rank]

    def ops(self, rank: int) -> list[Any]:
        return [op for where, op in self._ops if where == rank]

    def _op(self, number: int, rank: int, instruction: Instruction) -> Any:
        op = native.LitmusOp(
            thread=self.threads(rank).index(number), peer=-1, queue=-1, count=1,
            source_line=-1, stage_line=-1, target_register=-1, value_register=-1, own_line=-1,
        )  # fmt: skip
        match instruction:
            case Put():
                self._put(op, number, rank, instruction)
            case Signal(slot, peer, value, how, queue, order):
                op.what, op.peer, op.queue, op.network = SIGNAL, peer, queue, self._network(queue)
                op.line, op.set, op.value = self._line_of(slot, number, queue), int(how is SignalOp.SET), value
                op.order = int(self.profile.signal_order(order, False))
            case Wait(slot, at_least):
                op.what, op.value = WAIT, at_least
                op.line, op.count = self._first[slot.window, slot.index]
                op.peer = next((p for p in self._signallers(slot, rank)), -1)
            case Quiet(scope, queue, peer):
                op.what, op.order = QUIET, int(scope is QuietScope.REMOTE)
                op.queue, op.peer = -1 if queue is None else queue, -1 if peer is None else peer
            case Barrier(complete):
                op.what, op.order = BARRIER, int(complete)
            case Write(dst, value):
                op.what, op.line = WRITE, self._first[dst.window, dst.index][0]
                self._value(op, rank, value)
            case Read(register, source):
                op.what, op.target_register = READ, self.registers.index((rank, register))
                op.line, op.count = self._first[source.window, source.index]
        return op

    def _put(self, op: Any, number: int, rank: int, put: Put) -> None:
        op.what, op.peer, op.queue, op.network = PUT, put.peer, put.queue, self._network(put.queue)
        op.order, op.count = int(max(put.order, Order.RELAXED)), put.dst.count
        op.line = self._first[put.dst.window, put.dst.index][0]
        if put.source is not None:
            op.source_line = self._first[put.source.window, put.source.index][0]
        else:
            op.stage_line, self.lines = self.lines, self.lines + put.dst.count
            self._value(op, rank, put.value)
        if put.own is not None:
            op.own_line = self._line_of(put.own.slot, number, put.queue)
            op.own_value, op.own_set = put.own.value, int(put.own.op is SignalOp.SET)
            op.own_order = int(self.profile.signal_order(put.own.order, True))

    def _value(self, op: Any, rank: int, value: int | str | None) -> None:
        if isinstance(value, str):
            op.value_register = self.registers.index((rank, value))
        else:
            op.value = value or 0

    def _line_of(self, slot: Place, number: int, queue: int) -> int:
        first, _ = self._first[slot.window, slot.index]
        return first + self._writers[slot.window, slot.index].index((number, queue))

    def _signallers(self, place: Place, rank: int) -> Iterator[int]:
        """Ranks that signal or put to a place of ``rank``."""
        for number, i in _all(self.program):
            if not isinstance(i, Put | Signal) or i.peer != rank:
                continue
            written = [slot for slot, _, _ in _signals(i)] + ([i.dst] if isinstance(i, Put) else [])
            if any(w.window == place.window and w.index <= place.index < w.index + w.count for w in written):
                yield self.program.threads[number].rank

    def _network(self, queue: int) -> int:
        names = self.program.queue_names
        return int(queue < len(names) and names[queue] == NETWORK_QUEUE)


class _Play:
    """One launch on this rank."""

    def __init__(
        self,
        session: CudaSession,
        code: Code,
        memory: Any,
        offsets: tuple[int, int, int],
        repetitions: int,
        seed: int,
    ) -> None:
        self.session, self.code, self.memory, self.repetitions = session, code, memory, repetitions
        self.offsets, self.seed = offsets, seed

    def results(self) -> list[dict[tuple[int, str], int]]:
        session, rank = self.session, self.session.rank
        found = np.zeros((self.repetitions, len(self.code.registers)), np.uint64)
        plays = bool(self.code.threads(rank))
        with self._memory(found.nbytes) if plays else nullcontext((0, 0)) as (ops, results):
            # A kernel that waits for its peer may keep that peer from allocating, where they share a device.
            session._bootstrap.barrier()
            if plays:
                self._launch(ops, results, found)
        # Nobody frees what another still writes to. Another's own waits end first, so that its error is the one told.
        session._bootstrap.all_gather(None, "the end of a litmus program", 3 * session.config.timeout)
        mine = [(i, name) for i, name in enumerate(self.code.registers) if name[0] == rank]
        return [{name: int(row[i]) for i, name in mine} for row in found]

    @contextmanager
    def _memory(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Device addresses of this rank's instructions, and of ``nbytes`` zeroed bytes for its registers."""
        session, library, ops = self.session, self.session.library, self.code.ops(self.session.rank)
        listed = (native.LitmusOp * len(ops))(*ops)
        on = (session.device, session.stream)
        places = []
        try:
            for size in (ctypes.sizeof(listed), max(nbytes, 16)):
                places.append(int(library.value("malloc", ctypes.c_uint64, on[0], size, on[1])))
            library.copy(on[0], places[0], ctypes.addressof(listed), ctypes.sizeof(listed), on[1])
            library.memset(on[0], places[1], 0, max(nbytes, 16), on[1])
            library.stream_sync(*on)  # `listed` goes with this function's frame
            yield places[0], places[1]
        finally:
            for place in places:
                library.free(on[0], place, on[1])

    def _launch(self, ops: int, results: int, found: Any) -> None:
        session, library = self.session, self.session.library
        run = self._described(ops, len(self.code.ops(session.rank)), results)
        ep = native.Ep(
            device=session.device, rank=session.rank, error=session.faults.address,
            abort=session.abort_words, timeout_ns=int(session.config.timeout * 1e9),
        )  # fmt: skip
        gin = session.gin or native.Gin()  # of NVLink alone: none
        library.play(ctypes.byref(ep), ctypes.byref(gin), ctypes.byref(run), session.stream)
        library.stream_sync(session.device, session.stream)
        session.check(session.config.timeout)
        if found.nbytes:
            library.copy(session.device, found.ctypes.data, results, found.nbytes, session.stream)
            library.stream_sync(session.device, session.stream)

    def _described(self, ops: int, count: int, results: int) -> Any:
        session, program = self.session, self.code.program
        mine = self.code.threads(session.rank)
        starts, barriers, lines = self.offsets
        ranks = [t.rank for t in program.threads]
        run = native.Litmus(
            ops=ops, results=results, window=int(self.memory.record.handle),
            off_starts=starts, off_barriers=barriers, off_lines=lines,
            seed=self.seed & (2**64 - 1), pause_ns=EMULATED_PAUSE_NS if session.device_name == "cpu" else PAUSE_NS,
            repetitions=self.repetitions, lines=self.code.lines,
            all_threads=(1 << len(ranks)) - 1,
            barrier_threads=sum(
                1 << i for i, t in enumerate(program.threads) if any(isinstance(x, Barrier) for x in t.body)
            ),
            ops_count=count, registers=len(self.code.registers), ranks=program.ranks, rank=session.rank,
            threads=len(mine), first_thread=mine[0], queues=program.queues,
            network=int(NETWORK_QUEUE in program.queue_names),
        )  # fmt: skip
        for i, rank in enumerate(ranks):
            run.rank_of_thread[i] = rank
        for rank in range(program.ranks):
            run.peer[rank] = self.memory.at(rank, 0) if rank in session.team else 0
        return run


def _refusal(session: CudaSession, program: Program) -> str:
    """Why it cannot be played on this transport: the same on every rank."""
    why = why_not_play(program, "signal.strong" not in session.profile.built)
    if why:
        return why
    capabilities = getattr(session, "capabilities", None)
    if capabilities is not None and capabilities.connection != "full" and capabilities.lsa_size > 1:
        return "GIN has rail connections here, and every rank of a program meets every other"
    if session.queues <= program.queues:
        return (
            f"it needs {program.queues + 1} queues (its own and one for the player), and `queues` is {session.queues}"
        )
    first: dict[int, list[int]] = {}
    for number, thread in enumerate(program.threads):
        first.setdefault(thread.rank, []).append(number)
    for rank, numbers in first.items():
        if numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return f"the threads of rank {rank} do not follow each other in the text"
    return ""


def _writers(program: Program) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Slot: the (thread, queue) that signal it, on any rank. Each gets a line of its own."""
    found: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for number, instruction in _all(program):
        for slot, queue, _ in _signals(instruction):
            known = found.setdefault((slot.window, slot.index), [])
            if (number, queue) not in known:
                known.append((number, queue))
    return found


def _sets(program: Program, slot: tuple[str, int]) -> Iterator[bool]:
    for _, instruction in _all(program):
        for place, _, how in _signals(instruction):
            if (place.window, place.index) == slot:
                yield how is SignalOp.SET


def _signals(instruction: Instruction) -> Sequence[tuple[Place, int, SignalOp]]:
    """(slot, queue, add or set) of what an instruction signals."""
    if isinstance(instruction, Signal):
        return ((instruction.slot, instruction.queue, instruction.op),)
    if isinstance(instruction, Put) and instruction.own is not None:
        return ((instruction.own.slot, instruction.queue, instruction.own.op),)
    return ()


def _all(program: Program) -> Iterator[tuple[int, Instruction]]:
    for number, thread in enumerate(program.threads):
        for instruction in thread.body:
            yield number, instruction


def _shared_queues(program: Program) -> list[tuple[int, int]]:
    """(rank, queue) that two threads of the rank post on."""
    users: dict[tuple[int, int], set[int]] = {}
    for number, thread in enumerate(program.threads):
        for i in thread.body:
            if isinstance(i, Put | Signal):
                users.setdefault((thread.rank, i.queue), set()).add(number)
    return sorted(key for key, threads in users.items() if len(threads) > 1)


def _completes(instruction: Instruction, queue: int) -> bool:
    match instruction:
        case Quiet(QuietScope.REMOTE, which, _):
            return which is None or which == queue
        case Barrier(complete):
            return complete
        case Put(order=Order.STRONG, queue=used):
            return used == queue
        case Signal(op=SignalOp.SET, queue=used):
            return used == queue
    return False
