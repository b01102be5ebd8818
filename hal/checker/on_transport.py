# SPDX-License-Identifier: Apache-2.0
"""The same litmus programs on a real transport, again and again; outcomes counted, and those the model forbids refused."""

from __future__ import annotations

import operator
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hal.checker import litmus
from hal.checker.program import (
    Barrier,
    Condition,
    Instruction,
    Place,
    Program,
    Put,
    Quiet,
    Read,
    Signal,
    Term,
    Wait,
    Write,
)  # fmt: skip
from hal.config import BackendConfig, Settings, TopologyConfig, TransportConfig
from hal.errors import ContractError, PeerTimeout
from hal.hosts import arranged
from hal.launch import spawn
from hal.ordering import OrderingProfile
from hal.registry import known_backend

_WORD = 8
_TOGETHER = 24
"""Programs that share a communicator."""
_WAIT_SECONDS = 10.0


@dataclass(frozen=True)
class TransportRun:
    program: Program
    profile: OrderingProfile
    counts: dict[str, int]
    """Outcome text (``1:r0=0 1:r1=1``): how often it was seen."""
    forbidden: tuple[str, ...]
    """Seen outcomes that the model of the transport's profile does not allow."""
    bad: int | None
    """How often the program's bad outcome was seen; None where it speaks of more than registers."""
    allowed: bool
    """Whether the model allows the bad outcome."""
    seconds: float

    @property
    def verdict(self) -> str:
        """One line: what was seen against what the model says."""
        total, may = sum(self.counts.values()), "allowed" if self.allowed else "forbidden"
        if self.bad is None:
            return f"bad outcome ({self.program.bad}): {may} by the model; not seen from registers"
        return f"bad outcome ({self.program.bad}): {may} by the model, seen {self.bad} of {total} times"


def unsupported(program: Program, backend: str = "host") -> str:
    """Why a program cannot run on a backend's transports; empty if it can."""
    if program.expect.get("sc") == "A" and "deadlock" in str(program.bad):
        return "its bad outcome is a hang, which would end the communicator"
    slots = slots_of(program)
    for thread in program.threads:
        for instruction in thread.body:
            if isinstance(instruction, Write) and instruction.dst.window in slots:
                return f"it writes the signal slot {instruction.dst} by hand"
            if isinstance(instruction, Put) and instruction.dst.window in slots:
                return f"it puts into the signal slot {instruction.dst}"
    on_device: Callable[[Program], str] | None = getattr(known_backend(backend).load(), "why_not_play", None)
    if on_device is not None:
        return on_device(program)
    if len({t.rank for t in program.threads}) != len(program.threads):
        return "it has several threads in one rank, and a communicator has one thread"
    return ""


@dataclass(frozen=True)
class NotRun:
    """A program that this backend or transport cannot run, and why."""

    program: Program
    why: str


def run(
    program: Program, backend: str = "host", n: int = 1000, *, hosts: int = 1, seed: int = 0, **settings: Any
) -> TransportRun:
    """:func:`run_all` of one program. Raises :class:`ContractError` when it only makes sense in the model."""
    (result,) = run_all([program], backend, n, hosts=hosts, seed=seed, **settings)
    if isinstance(result, NotRun):
        raise ContractError(f"{program.name} cannot run on a real transport: {result.why}")
    return result


def run_all(
    programs: Sequence[Program], backend: str = "host", n: int = 1000, *, hosts: int = 1, seed: int = 0, **settings: Any
) -> Iterator[TransportRun | NotRun]:
    """Run each program ``n`` times, with random pauses between instructions that ``seed`` chooses; results as they come.

    A backend whose sessions play programs on their device (``Session.play``) does so in one launch; on others each
    instruction is a call of the communicator. Ranks are threads of this process (:func:`hal.spawn`), or processes where
    the backend needs variables of their own for several ``hosts``; idle ones fill the last host up. Two dozen programs with
    equally many ranks share a communicator, since connecting may take longer than playing.

    Raises :class:`ContractError` for layouts that make no sense, and what a rank raises.
    """
    if n < 1 or hosts < 1:
        raise ContractError(f"{n} runs on {hosts} hosts: give at least 1 of each")
    runnable: dict[int, list[Program]] = {}
    for program in programs:
        why = unsupported(program, backend)
        if why:
            yield NotRun(program, why)
        else:
            runnable.setdefault(-(-program.ranks // hosts) * hosts, []).append(program)
    transport = settings.pop("transport", None)
    played = hasattr(known_backend(backend).load(), "why_not_play")
    for ranks, equal in sorted(runnable.items()):
        for start in range(0, len(equal), _TOGETHER):
            some = equal[start : start + _TOGETHER]
            slots = 0 if played else sum(_signal_slots(p, n) for p in some)
            full = Settings(
                backend=BackendConfig(backend),
                transport=TransportConfig(transport),
                topology=TopologyConfig(hosts),
                ranks=ranks,
                # One more than the programs', for what a device's player has to say to its peers besides.
                queues=max(2, *(p.queues + 1 for p in some)),
                signal_slots=max(1, slots),
                **settings,
            )
            layout = arranged(full)
            work = (some, n, seed)
            if layout.plan is None:
                told = spawn(ranks, _rank, full, work, config=full.connection)
            else:
                from hal.cli.ranks import run_ranks

                told = run_ranks(full, f"{__name__}:_rank", work, layout)
            for i, program in enumerate(some):
                yield _judged(program, n, [rank[i] for rank in told])


def _judged(program: Program, n: int, ranks: Sequence[_Told]) -> TransportRun | NotRun:
    """``ranks``: what each rank tells of the program."""
    if refused := [told.refused for told in ranks if told.refused]:
        return NotRun(program, refused[0])
    profile = ranks[0].profile
    counts: Counter[str] = Counter()
    bad: int | None = 0
    for i in range(n):
        seen = {key: value for told in ranks for key, value in told.registers[i].items()}
        counts[" ".join(f"{r}:{name}={seen[(r, name)]}" for r, name in program.registers)] += 1
        held = holds(program.bad, seen)
        bad = None if held is None or bad is None else bad + held
    model = litmus.run(program, profile)
    allowed = {" ".join(f"{r}:{name}={o[i]}" for i, (r, name) in enumerate(program.registers)) for o in model.outcomes}
    forbidden = tuple(sorted(set(counts) - allowed))
    may = model.code[0] == "A" or "outcome is allowed" in model.reason
    return TransportRun(program, profile, dict(counts), forbidden, bad, may, max(told.seconds for told in ranks))


def holds(condition: Condition, seen: Mapping[tuple[int, str], int]) -> bool | None:
    """Whether a condition holds for these registers of a run that ended; None if it speaks of final memory."""
    if condition.op in ("and", "or"):
        assert isinstance(condition.left, Condition)
        assert isinstance(condition.right, Condition)
        both = holds(condition.left, seen), holds(condition.right, seen)
        if None in both:
            return None
        return all(both) if condition.op == "and" else any(both)
    if condition.op == "is":
        return False  # a deadlock
    values = []
    for term in (condition.left, condition.right):
        assert isinstance(term, Term)
        if term.kind not in ("number", "register"):
            return None
        values.append(term.value if term.kind == "number" else seen[term.rank, term.name])
    return bool(_COMPARE[condition.op](*values))


_COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


def slots_of(program: Program) -> set[str]:
    """Windows whose words are signalled: they become signal slots; the others are memory."""
    out = set()
    for thread in program.threads:
        for instruction in thread.body:
            if isinstance(instruction, Signal):
                out.add(instruction.slot.window)
            elif isinstance(instruction, Put) and instruction.own is not None:
                out.add(instruction.own.slot.window)
    return out


def _signal_slots(program: Program, n: int) -> int:
    return n * sum(program.windows[w] for w in slots_of(program))


@dataclass(frozen=True)
class _Told:
    """One rank's part of a program's runs."""

    registers: list[dict[tuple[int, str], int]]
    profile: OrderingProfile
    seconds: float
    refused: str = ""


def _rank(comm: Any, settings: Settings, work: tuple[Sequence[Program], int, int]) -> list[_Told]:
    programs, n, seed = work
    play = getattr(comm._session, "play", None) or _Calls(comm).play
    told = []
    for program in programs:
        started = time.monotonic()
        try:
            registers = play(program, n, seed)
            told.append(_Told(registers, comm.profile, time.monotonic() - started))
        except ContractError as error:  # what this transport's profile refuses, on every rank and before anything moves
            told.append(_Told([], comm.profile, 0.0, str(error)))
    return told


class _Calls:
    """Plays programs by calls of the communicator, one for each instruction."""

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._slots_used = 0

    def play(self, program: Program, n: int, seed: int) -> list[dict[tuple[int, str], int]]:
        comm = self._comm
        window = comm.window(max(1, n * program.words) * _WORD)
        runner = _Runner(comm, program, window, self._slots_used, seed)
        self._slots_used += _signal_slots(program, n)
        out = []
        for i in range(n):
            comm.barrier(complete=False)
            out.append(runner.once(i))
            if i % 64 == 63:
                comm.barrier(complete=True)
        comm.barrier(complete=True)
        return out


class _Runner:
    """One rank's part. Every iteration has its own words and slots, so nothing is reset."""

    def __init__(self, comm: Any, program: Program, window: Any, first_slot: int, seed: int) -> None:
        self.first_slot = first_slot
        self.comm, self.program, self.window = comm, program, window
        self.words = window.array.view(np.uint64)
        self.slots = sorted(slots_of(program))
        self.random = random.Random((seed << 8) + comm.rank)
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
        return self.first_slot + self.at * per + before + place.index

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
