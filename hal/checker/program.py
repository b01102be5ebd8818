# SPDX-License-Identifier: Apache-2.0
"""Litmus programs: what they consist of, and a builder for writing them in Python.

A program has ranks (each with one or more threads), symmetric windows of words, and queues. Words hold 0 to 255 and
start at 0. Every instruction runs at most once; loops are written out, which the builder does for you.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hal.errors import ContractError
from hal.ordering import Order, QuietScope, SignalOp

MAX_VALUE = 255


@dataclass(frozen=True)
class Place:
    """``count`` words of a window, from ``index``."""

    window: str
    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        last = f"..{self.index + self.count - 1}" if self.count > 1 else ""
        return f"{self.window}[{self.index}{last}]"


@dataclass(frozen=True)
class OwnSignal:
    """The signal bundled with a put."""

    slot: Place
    op: SignalOp
    value: int
    order: Order = Order.RELAXED


@dataclass(frozen=True)
class Put:
    """Write ``value`` (a number or a register) or the words at ``source`` to ``dst`` at ``peer``."""

    dst: Place
    peer: int
    value: int | str | None = None
    source: Place | None = None
    queue: int = 0
    order: Order = Order.RELAXED
    own: OwnSignal | None = None

    def __str__(self) -> str:
        what = f"= {self.value}" if self.source is None else f"from {self.source}"
        own = ""
        if self.own:
            op = "+=" if self.own.op is SignalOp.ADD else "="
            own = f" signal {self.own.slot} {op} {self.own.value} order {self.own.order.name.lower()}"
        return f"put {self.dst} {what} to {self.peer} queue {self.queue} order {self.order.name.lower()}{own}"


@dataclass(frozen=True)
class Signal:
    """Add to or set an 8-byte slot at ``peer``."""

    slot: Place
    peer: int
    value: int
    op: SignalOp = SignalOp.ADD
    queue: int = 0
    order: Order = Order.STRONG

    def __str__(self) -> str:
        op = "+=" if self.op is SignalOp.ADD else "="
        order = self.order.name.lower()
        return f"signal {self.slot} {op} {self.value} to {self.peer} queue {self.queue} order {order}"


@dataclass(frozen=True)
class Wait:
    """Block until the own word is at least ``at_least`` (acquire)."""

    slot: Place
    at_least: int

    def __str__(self) -> str:
        return f"wait {self.slot} >= {self.at_least}"


@dataclass(frozen=True)
class Quiet:
    """None = every queue, every peer."""

    scope: QuietScope = QuietScope.REMOTE
    queue: int | None = None
    peer: int | None = None

    def __str__(self) -> str:
        queue = "all" if self.queue is None else self.queue
        peer = "all" if self.peer is None else self.peer
        return f"quiet {self.scope.name.lower()} queue {queue} peer {peer}"


@dataclass(frozen=True)
class Barrier:
    """Every thread that has barriers arrives; with ``complete`` each first completes its rank's own operations."""

    complete: bool = True

    def __str__(self) -> str:
        return f"barrier {'complete' if self.complete else 'arrive'}"


@dataclass(frozen=True)
class Write:
    """Store to the own window."""

    dst: Place
    value: int | str

    def __str__(self) -> str:
        return f"write {self.dst} = {self.value}"


@dataclass(frozen=True)
class Read:
    """Load one word of the own window into a register."""

    register: str
    source: Place

    def __str__(self) -> str:
        return f"{self.register} = read {self.source}"


Instruction = Put | Signal | Wait | Quiet | Barrier | Write | Read


@dataclass(frozen=True)
class Thread:
    rank: int
    name: str
    body: tuple[Instruction, ...]


@dataclass(frozen=True)
class Term:
    """A number, a register (``1:r0``), a word of final memory (``1:data[0]``) or ``deadlock``."""

    kind: str
    rank: int = 0
    name: str = ""
    index: int = 0
    value: int = 0

    def __str__(self) -> str:
        return {
            "number": str(self.value),
            "register": f"{self.rank}:{self.name}",
            "memory": f"{self.rank}:{self.name}[{self.index}]",
            "deadlock": "deadlock",
        }[self.kind]


@dataclass(frozen=True)
class Condition:
    """``op`` is a comparison of two terms, or ``and`` / ``or`` of two conditions, or ``is`` (a term alone)."""

    op: str
    left: Condition | Term
    right: Condition | Term | None = None

    def __str__(self) -> str:
        if self.right is None:
            return str(self.left)
        return f"({self.left} {self.op} {self.right})"


@dataclass(frozen=True)
class Program:
    """A litmus program. ``bad`` is what must not be seen; ``expect`` maps profile names to verdicts."""

    name: str
    windows: Mapping[str, int]
    threads: tuple[Thread, ...]
    bad: Condition
    about: str = ""
    trap: str = ""
    """The trap of the contract that this program falls into, if any."""
    mended_by: str = ""
    needs: tuple[str, ...] = ()
    """Words the program is about: under a profile that does not have them natively the verdict is ``-``."""
    expect: Mapping[str, str] = field(default_factory=dict)
    queue_names: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        peers = [i.peer for t in self.threads for i in t.body if isinstance(i, Put | Signal)]
        return 1 + max([t.rank for t in self.threads] + peers)

    @property
    def queues(self) -> int:
        return 1 + max((i.queue for t in self.threads for i in t.body if isinstance(i, Put | Signal)), default=0)

    @property
    def registers(self) -> tuple[tuple[int, str], ...]:
        """(rank, register) in the order of their first assignment."""
        seen: dict[tuple[int, str], None] = {}
        for thread in self.threads:
            for instruction in thread.body:
                if isinstance(instruction, Read):
                    seen[(thread.rank, instruction.register)] = None
        return tuple(seen)

    @property
    def words(self) -> int:
        """Words of one rank's memory, all windows together."""
        return sum(self.windows.values())

    def offset(self, place: Place) -> int:
        """Word offset of a place in a rank's memory."""
        start = 0
        for name, size in self.windows.items():
            if name == place.window:
                return start + place.index
            start += size
        raise ContractError(f"program {self.name}: no window '{place.window}'; it has {', '.join(self.windows)}")

    def text(self) -> str:
        """The program in the text form (docs/checker.md); :func:`hal.checker.parser.parse` reads it back."""
        lines = [f"litmus {self.name}"]
        if self.about:
            lines.append(f"about {self.about}")
        if self.trap:
            lines.append(f"trap {self.trap}")
        if self.mended_by:
            lines.append(f"mended-by {self.mended_by}")
        if self.needs:
            lines.append("needs " + " ".join(self.needs))
        lines.append("window " + " ".join(f"{n}[{s}]" for n, s in self.windows.items()))
        for t in self.threads:
            lines.append(f"rank {t.rank}" + (f" thread {t.name}" if t.name else ""))
            lines += [f"  {i}" for i in t.body]
        lines.append(f"bad {self.bad}")
        verdicts: dict[str, list[str]] = {}
        for name, verdict in self.expect.items():
            verdicts.setdefault(verdict, []).append(name)
        lines += [f"expect {verdict}: {' '.join(names)}" for verdict, names in verdicts.items()]
        return "\n".join(lines) + "\n"


class RankBuilder:
    """Appends instructions to one thread; every method returns the builder, so calls can be chained."""

    def __init__(self, rank: int, name: str) -> None:
        self.rank, self.name = rank, name
        self.body: list[Instruction] = []

    def put(
        self,
        dst: Place,
        to: int,
        value: int | str | None = None,
        *,
        source: Place | None = None,
        queue: int = 0,
        order: Order = Order.RELAXED,
        own: OwnSignal | None = None,
    ) -> RankBuilder:
        if (value is None) == (source is None):
            raise ContractError("put: give either a value or a source, not both and not neither")
        self.body.append(Put(dst, to, value, source, queue, order, own))
        return self

    def signal(
        self,
        slot: Place,
        to: int,
        value: int = 1,
        *,
        op: SignalOp = SignalOp.ADD,
        queue: int = 0,
        order: Order = Order.STRONG,
    ) -> RankBuilder:
        self.body.append(Signal(slot, to, value, op, queue, order))
        return self

    def wait(self, slot: Place, at_least: int) -> RankBuilder:
        self.body.append(Wait(slot, at_least))
        return self

    def quiet(
        self, scope: QuietScope = QuietScope.REMOTE, queue: int | None = None, peer: int | None = None
    ) -> RankBuilder:
        self.body.append(Quiet(scope, queue, peer))
        return self

    def barrier(self, complete: bool = True) -> RankBuilder:
        self.body.append(Barrier(complete))
        return self

    def write(self, dst: Place, value: int | str) -> RankBuilder:
        self.body.append(Write(dst, value))
        return self

    def read(self, register: str, source: Place) -> RankBuilder:
        self.body.append(Read(register, source))
        return self


class ProgramBuilder:
    """Writes a program in Python::

    b = ProgramBuilder("mp", data=2, sig=1)
    b.rank(0).put(b.at("data"), to=1, value=1).signal(b.at("sig"), to=1)
    b.rank(1).wait(b.at("sig"), 1).read("r0", b.at("data"))
    program = b.build(bad="1:r0 == 0")
    """

    def __init__(self, name: str, **windows: int) -> None:
        self._name, self._windows = name, windows
        self._threads: dict[tuple[int, str], RankBuilder] = {}

    def at(self, window: str, index: int = 0, count: int = 1) -> Place:
        size = self._windows.get(window)
        if size is None:
            raise ContractError(f"no window '{window}'; this program has {', '.join(self._windows)}")
        if index < 0 or count < 1 or index + count > size:
            raise ContractError(f"{Place(window, index, count)} is outside {window}[{size}]")
        return Place(window, index, count)

    def rank(self, rank: int, thread: str = "") -> RankBuilder:
        return self._threads.setdefault((rank, thread), RankBuilder(rank, thread))

    def build(self, bad: str, *, expect: Mapping[str, str] | None = None, about: str = "") -> Program:
        """``bad`` in the text form's condition syntax. Raises :class:`LitmusError` for a malformed program."""
        from hal.checker.parser import check, parse_condition

        threads = tuple(Thread(t.rank, t.name, tuple(t.body)) for t in self._threads.values())
        program = Program(
            self._name,
            dict(self._windows),
            threads,
            Condition("is", Term("deadlock")),
            about,
            expect=dict(expect or {}),
        )
        return check(replace(program, bad=parse_condition(bad, program)))
