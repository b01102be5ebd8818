# SPDX-License-Identifier: Apache-2.0
"""The same litmus programs on a real transport, again and again; outcomes counted, and those the model forbids refused."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.checker import litmus
from hal.checker.program import (
    Barrier,
    Instruction,
    Place,
    Program,
    Put,
    Quiet,
    Read,
    Signal,
    Wait,
    Write,
)  # fmt: skip
from hal.errors import ContractError, PeerTimeout
from hal.ordering import OrderingProfile

_WORD = 8
_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class TransportRun:
    program: Program
    profile: OrderingProfile
    counts: dict[str, int]
    """Outcome text (``1:r0=0 1:r1=1``): how often it was seen."""
    forbidden: tuple[str, ...]
    """Seen outcomes that the model of the transport's profile does not allow."""
    seconds: float


def unsupported(program: Program) -> str:
    """Why a program cannot run on a real transport; empty if it can."""
    if len({t.rank for t in program.threads}) != len(program.threads):
        return "it has several threads in one rank, and a communicator has one thread"
    if program.expect.get("sc") == "A" and "deadlock" in str(program.bad):
        return "its bad outcome is a hang, which would end the communicator"
    slots = _slots(program)
    for thread in program.threads:
        for instruction in thread.body:
            if isinstance(instruction, Write) and instruction.dst.window in slots:
                return f"it writes the signal slot {instruction.dst} by hand"
            if isinstance(instruction, Put) and instruction.dst.window in slots:
                return f"it puts into the signal slot {instruction.dst}"
    return ""


def run(program: Program, backend: str = "host", n: int = 1000, **settings: Any) -> TransportRun:
    """Run ``program`` ``n`` times on ranks that are threads (:func:`hal.spawn`), with random pauses between instructions.

    Raises :class:`ContractError` for programs that only make sense in the model.
    """
    import hal

    why = unsupported(program)
    if why:
        raise ContractError(f"{program.name} cannot run on a real transport: {why}")
    started = time.monotonic()
    slots = _slots(program)
    needed = max(1, n * sum(program.windows[w] for w in slots))
    results = hal.spawn(
        program.ranks,
        _rank,
        program,
        n,
        backend=backend,
        queues=max(2, program.queues),
        signal_slots=needed,
        **settings,
    )
    profile = results[0][1]
    counts: Counter[str] = Counter()
    for i in range(n):
        seen = {key: value for rank in results for key, value in rank[0][i].items()}
        counts[" ".join(f"{r}:{name}={seen[(r, name)]}" for r, name in program.registers)] += 1
    allowed = {
        " ".join(f"{r}:{name}={o[i]}" for i, (r, name) in enumerate(program.registers))
        for o in litmus.run(program, profile).outcomes
    }
    forbidden = tuple(sorted(set(counts) - allowed))
    return TransportRun(program, profile, dict(counts), forbidden, time.monotonic() - started)


def _slots(program: Program) -> set[str]:
    """Windows whose words are signalled: they become signal slots; the others are memory."""
    out = set()
    for thread in program.threads:
        for instruction in thread.body:
            if isinstance(instruction, Signal):
                out.add(instruction.slot.window)
            elif isinstance(instruction, Put) and instruction.own is not None:
                out.add(instruction.own.slot.window)
    return out


def _rank(comm: Any, program: Program, n: int) -> tuple[list[dict[tuple[int, str], int]], OrderingProfile]:
    window = comm.window(max(1, n * program.words) * _WORD)
    runner = _Runner(comm, program, window)
    out = []
    for i in range(n):
        comm.barrier(complete=False)
        out.append(runner.once(i))
        if i % 64 == 63:
            comm.barrier(complete=True)
    comm.barrier(complete=True)
    return out, comm.profile


class _Runner:
    """One rank's part. Every iteration has its own words and slots, so nothing is reset."""

    def __init__(self, comm: Any, program: Program, window: Any) -> None:
        self.comm, self.program, self.window = comm, program, window
        self.words = window.array.view(np.uint64)
        self.slots = sorted(_slots(program))
        self.random = random.Random(comm.rank)
        self.body = next((t.body for t in program.threads if t.rank == comm.rank), ())
        self.sources: list[Any] = []

    def once(self, iteration: int) -> dict[tuple[int, str], int]:
        self.at = iteration
        self.registers: dict[str, int] = {}
        self.sources.clear()
        for instruction in self.body:
            # Lets the ranks meet in every way, also when they share a processor.
            if self.random.random() < 0.3:
                time.sleep(self.random.random() * 2e-5)
            self._do(instruction)
        for q in range(self.program.queues):
            self.comm.queue(q).quiet()
        return {(self.comm.rank, name): value for name, value in self.registers.items()}

    def _word(self, place: Place) -> int:
        return self.at * self.program.words + self.program.offset(place)

    def _slot(self, place: Place) -> int:
        per = sum(self.program.windows[w] for w in self.slots)
        before = sum(self.program.windows[w] for w in self.slots[: self.slots.index(place.window)])
        return self.at * per + before + place.index

    def _do(self, instruction: Instruction) -> None:
        match instruction:
            case Put():
                self._put(instruction)
            case Signal(slot, peer, value, op, queue, order):
                self.comm.queue(queue).signal(self._slot(slot), peer, value, op, order)
            case Wait(slot, at_least):
                self._wait(slot, at_least)
            case Quiet(scope, queue, peer):
                for q in range(self.program.queues) if queue is None else (queue,):
                    self.comm.queue(q).quiet(peer, scope)
            case Barrier(complete):
                self.comm.barrier(complete=complete)
            case Write(dst, value):
                self.words[self._word(dst)] = self.registers[value] if isinstance(value, str) else value
            case Read(register, source):
                if source.window in self.slots:
                    self.registers[register] = int(self.comm.read_signal(self._slot(source)))
                else:
                    self.registers[register] = int(self.words[self._word(source)])

    def _put(self, put: Put) -> None:
        if put.source is not None:
            at = self._word(put.source)
            source = self.words[at : at + put.source.count]
        else:
            value = self.registers[put.value] if isinstance(put.value, str) else put.value
            source = np.full(put.dst.count, value, np.uint64)
            self.sources.append(source)  # must stay until quiet
        queue = self.comm.queue(put.queue)
        queue.put(self.window, self._word(put.dst) * _WORD, source, put.peer, put.order)
        if put.own is not None:
            queue.signal(self._slot(put.own.slot), put.peer, put.own.value, put.own.op)

    def _wait(self, place: Place, at_least: int) -> None:
        if place.window in self.slots:
            self.comm.wait(self._slot(place), at_least, timeout=_WAIT_SECONDS)
            return
        until = time.monotonic() + _WAIT_SECONDS
        while self.words[self._word(place)] < at_least:
            if time.monotonic() > until:
                raise PeerTimeout(-1, f"litmus wait {place}", expected=at_least, seconds=_WAIT_SECONDS)
            time.sleep(0)
