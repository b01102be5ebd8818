# SPDX-License-Identifier: Apache-2.0
"""Reads the text form of litmus programs (docs/checker.md). Every error gives line, column and what was expected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from hal.checker.program import (
    MAX_VALUE,
    Barrier,
    Condition,
    Instruction,
    OwnSignal,
    Place,
    Program,
    Put,
    Quiet,
    Read,
    Signal,
    Term,
    Thread,
    Wait,
    Write,
)  # fmt: skip
from hal.errors import ContractError
from hal.ordering import WORDS, Order, QuietScope, SignalOp

VERDICTS = ("A", "F", "-", "E", "A!", "F!")
_TOKEN = re.compile(r"\s*(?:(\d+)|([A-Za-z_][\w.-]*)|(\.\.|\+=|>=|<=|==|!=|[\[\]=<>():,!-]))")
_COMPARISONS = ("==", "!=", "<=", ">=", "<", ">")


class LitmusError(ContractError):
    """A malformed program: where, and what was expected there."""

    def __init__(self, where: str, line: int, column: int, message: str) -> None:
        self.line, self.column = line, column
        super().__init__(f"{where}:{line}:{column}: {message}")


@dataclass(frozen=True)
class _Token:
    text: str
    column: int
    kind: str  # number, name, symbol, end


class _Line:
    """One line's tokens, read from left to right."""

    def __init__(self, where: str, number: int, text: str) -> None:
        self.where, self.number = where, number
        self.tokens: list[_Token] = []
        self.at = 0
        stop = len(text.split("#", 1)[0].rstrip())
        pos = 0
        while pos < stop:
            match = _TOKEN.match(text, pos, stop)
            if not match:
                column = pos + len(text[pos:stop]) - len(text[pos:stop].lstrip()) + 1
                raise LitmusError(where, number, column, f"unexpected character '{text[column - 1]}'")
            kind = ("number", "name", "symbol")[(match.lastindex or 1) - 1]
            self.tokens.append(_Token(match.group(match.lastindex or 1), match.start(match.lastindex or 1) + 1, kind))
            pos = match.end()
        self.tokens.append(_Token("end of line", stop + 1, "end"))

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def fail(self, expected: str) -> NoReturn:
        found = self.next.text if self.next.kind == "end" else f"'{self.next.text}'"
        raise LitmusError(self.where, self.number, self.next.column, f"expected {expected}, found {found}")

    def error(self, column: int, message: str) -> NoReturn:
        raise LitmusError(self.where, self.number, column, message)

    def take(self, *texts: str) -> str | None:
        if self.next.kind != "end" and self.next.text in texts:
            self.at += 1
            return self.tokens[self.at - 1].text
        return None

    def need(self, *texts: str) -> str:
        found = self.take(*texts)
        if found is None:
            self.fail(" or ".join(f"'{t}'" for t in texts))
        return found

    def name(self, what: str) -> str:
        if self.next.kind != "name":
            self.fail(what)
        self.at += 1
        return self.tokens[self.at - 1].text

    def number_(self, what: str, largest: int = MAX_VALUE) -> int:
        if self.next.kind != "number":
            self.fail(f"{what} (a number)")
        token = self.next
        if int(token.text) > largest:
            self.error(token.column, f"{what} must be at most {largest}, not {token.text}")
        self.at += 1
        return int(token.text)

    def end(self, expected: str = "the end of the line") -> None:
        if self.next.kind != "end":
            self.fail(expected)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self.where = where
        self.lines = text.splitlines()
        self.fields: dict[str, Any] = {
            "name": "", "windows": {}, "about": "", "trap": "", "mended_by": "", "needs": (), "expect": {},
            "queue_names": (),
        }  # fmt: skip
        self.bodies: dict[tuple[int, str], list[Instruction]] = {}
        self.body: list[Instruction] | None = None
        self.bad: tuple[_Line, int] | None = None

    def parse(self) -> Program:
        for number, text in enumerate(self.lines, 1):
            words = text.split("#", 1)[0].split(maxsplit=1)
            if not words:
                continue
            if words[0] in ("about", "trap"):
                self.fields[words[0]] = " ".join(text.split(maxsplit=1)[1:]).strip()
                continue
            self._line(_Line(self.where, number, text))
        last = len(self.lines) + 1
        if not self.fields["name"]:
            raise LitmusError(self.where, 1, 1, "expected 'litmus NAME' in the program")
        if self.bad is None:
            raise LitmusError(self.where, last, 1, "expected 'bad CONDITION', found end of file")
        threads = tuple(Thread(rank, name, tuple(body)) for (rank, name), body in self.bodies.items())
        program = Program(threads=threads, bad=Condition("is", Term("deadlock")), **self.fields)
        line, at = self.bad
        line.at = at
        condition = _Conditions(line, program).read()
        line.end("'and', 'or' or the end of the line")
        return check(Program(threads=threads, bad=condition, **self.fields), self.where)

    def _line(self, line: _Line) -> None:
        heads: dict[str, Callable[[_Line], None]] = {
            "litmus": self._name, "mended-by": self._mended, "needs": self._needs, "window": self._windows,
            "queues": self._queues, "rank": self._rank, "bad": self._bad, "expect": self._expect,
        }  # fmt: skip
        token = line.next
        if token.text in heads:
            line.at += 1
            heads[token.text](line)
            return
        if self.body is None:
            line.fail("one of " + ", ".join(heads) + ", about, trap")
        self.body.append(_Instructions(line, self.fields["windows"], self.fields["queue_names"]).read())
        line.end()

    def _name(self, line: _Line) -> None:
        self.fields["name"] = line.name("the program's name")
        line.end()

    def _mended(self, line: _Line) -> None:
        self.fields["mended_by"] = line.name("the name of the mended program")
        line.end()

    def _needs(self, line: _Line) -> None:
        words = []
        while line.next.kind != "end":
            token = line.next
            words.append(line.name("a word of the contract"))
            if words[-1] not in WORDS:
                line.error(token.column, f"expected one of {', '.join(WORDS)}, found '{token.text}'")
        self.fields["needs"] = tuple(words)

    def _windows(self, line: _Line) -> None:
        while line.next.kind != "end":
            name = line.name("a window's name")
            line.need("[")
            size = line.number_("the window's size in words")
            line.need("]")
            if name in self.fields["windows"]:
                line.error(line.tokens[line.at - 4].column, f"window '{name}' is declared twice")
            self.fields["windows"][name] = size

    def _queues(self, line: _Line) -> None:
        names = []
        while line.next.kind != "end":
            names.append(line.name("a queue's name"))
        self.fields["queue_names"] = tuple(names)

    def _rank(self, line: _Line) -> None:
        rank = line.number_("the rank", 7)
        thread = line.name("the thread's name") if line.take("thread") else ""
        line.end("'thread NAME' or the end of the line")
        self.body = self.bodies.setdefault((rank, thread), [])

    def _bad(self, line: _Line) -> None:
        # Read last, when every register is known.
        self.bad = (line, line.at)

    def _expect(self, line: _Line) -> None:
        token = line.next
        verdict = line.tokens[line.at].text if line.next.kind in ("name", "symbol") else line.fail("a verdict")
        line.at += 1
        verdict += line.take("!") or ""
        if verdict not in VERDICTS:
            line.error(token.column, f"expected a verdict ({', '.join(VERDICTS)}), found '{verdict}'")
        line.need(":")
        while line.next.kind != "end":
            self.fields["expect"][line.name("a profile's name")] = verdict


class _Instructions:
    """Reads one instruction."""

    def __init__(self, line: _Line, windows: dict[str, int], queue_names: Sequence[str]) -> None:
        self.line, self.windows, self.queue_names = line, windows, queue_names

    def read(self) -> Instruction:
        line = self.line
        table: dict[str, Callable[[], Instruction]] = {
            "put": self._put, "signal": self._signal, "wait": self._wait, "quiet": self._quiet,
            "barrier": self._barrier, "write": self._write,
        }  # fmt: skip
        token = line.next
        if token.text in table:
            line.at += 1
            return table[token.text]()
        if token.kind != "name" or line.tokens[line.at + 1].text != "=":
            line.fail(f"an instruction ({', '.join(table)}, or REGISTER = read PLACE)")
        line.at += 2
        line.need("read")
        return Read(token.text, self._place())

    def _place(self, many: bool = False) -> Place:
        line, token = self.line, self.line.next
        window = line.name("a place, as in data[0]")
        if window not in self.windows:
            line.error(
                token.column, f"no window '{window}'; expected one of {', '.join(self.windows) or 'none declared'}"
            )
        line.need("[")
        index = last = line.number_("an index")
        if many and line.take(".."):
            last = line.number_("the last index")
        line.need("]")
        if last >= self.windows[window] or last < index:
            size = self.windows[window]
            line.error(token.column, f"{window}[{index}..{last}] is outside {window}[{size}]; expected 0..{size - 1}")
        return Place(window, index, last - index + 1)

    def _value(self) -> int | str:
        if self.line.next.kind == "name":
            return self.line.name("a register")
        return self.line.number_("a value or a register")

    def _update(self) -> tuple[SignalOp, int]:
        op = SignalOp.ADD if self.line.need("+=", "=") == "+=" else SignalOp.SET
        return op, self.line.number_("the signal's value")

    def _order(self, default: Order) -> Order:
        if self.line.take("order"):
            return Order[self.line.need("none", "relaxed", "strong").upper()]
        return default

    def _queue(self) -> int:
        line = self.line
        if not line.take("queue"):
            return 0
        if line.next.kind == "name":
            token = line.next
            name = line.name("a queue")
            if name not in self.queue_names:
                line.error(
                    token.column, f"no queue '{name}'; expected a number or one of {', '.join(self.queue_names)}"
                )
            return list(self.queue_names).index(name)
        return line.number_("the queue", 31)

    def _put(self) -> Put:
        line = self.line
        dst = self._place(many=True)
        value: int | str | None = None
        source = None
        token = line.next
        if line.need("=", "from") == "=":
            value = self._value()
        else:
            source = self._place(many=True)
            if source.count != dst.count:
                line.error(token.column, f"{dst} takes {dst.count} words; expected as many, found {source}")
        line.need("to")
        peer = line.number_("the target rank", 7)
        queue = self._queue()
        order = self._order(Order.RELAXED)
        own = None
        if line.take("signal"):
            slot = self._place()
            op, amount = self._update()
            own = OwnSignal(slot, op, amount, self._order(Order.RELAXED))
        line.end("'queue', 'order', 'signal' or the end of the line")
        return Put(dst, peer, value, source, queue, order, own)

    def _signal(self) -> Signal:
        slot = self._place()
        op, value = self._update()
        self.line.need("to")
        peer = self.line.number_("the target rank", 7)
        queue = self._queue()
        return Signal(slot, peer, value, op, queue, self._order(Order.STRONG))

    def _wait(self) -> Wait:
        slot = self._place()
        self.line.need(">=")
        return Wait(slot, self.line.number_("the awaited value"))

    def _quiet(self) -> Quiet:
        line = self.line
        scope = QuietScope[(line.take("source", "remote") or "remote").upper()]
        queue: int | None = None
        if line.next.text == "queue" and line.tokens[line.at + 1].text == "all":
            line.at += 2
        elif line.next.text == "queue":
            queue = self._queue()
        peer = None
        if line.take("peer") and not line.take("all"):
            peer = line.number_("the peer or 'all'", 7)
        line.end("'source', 'remote', 'queue N', 'peer N' or the end of the line")
        return Quiet(scope, queue, peer)

    def _barrier(self) -> Barrier:
        return Barrier((self.line.take("complete", "arrive") or "complete") == "complete")

    def _write(self) -> Write:
        dst = self._place()
        self.line.need("=")
        return Write(dst, self._value())


class _Conditions:
    """or of and of comparisons; parentheses; ``deadlock``."""

    def __init__(self, line: _Line, program: Program) -> None:
        self.line, self.program = line, program

    def read(self) -> Condition:
        left = self._and()
        while self.line.take("or"):
            left = Condition("or", left, self._and())
        return left

    def _and(self) -> Condition:
        left = self._one()
        while self.line.take("and"):
            left = Condition("and", left, self._one())
        return left

    def _one(self) -> Condition:
        line = self.line
        if line.take("("):
            inner = self.read()
            line.need(")")
            return inner
        if line.take("deadlock"):
            return Condition("is", Term("deadlock"))
        left = self._term()
        return Condition(line.need(*_COMPARISONS), left, self._term())

    def _term(self) -> Term:
        line, token = self.line, self.line.next
        number = line.number_("a number, RANK:REGISTER, RANK:PLACE or deadlock")
        if not line.take(":"):
            return Term("number", value=number)
        name_token = line.next
        name = line.name("a register or a place")
        if line.take("["):
            index = line.number_("an index")
            line.need("]")
            if index >= self.program.windows.get(name, 0):
                line.error(name_token.column, f"no word {name}[{index}] in the program's windows")
            return Term("memory", number, name, index)
        if (number, name) not in self.program.registers:
            known = ", ".join(f"{r}:{n}" for r, n in self.program.registers) or "none"
            line.error(token.column, f"no register {number}:{name}; expected one of {known}")
        return Term("register", number, name)


def parse(text: str, where: str = "<program>") -> Program:
    """A program from its text. Raises :class:`LitmusError` with line, column and what was expected."""
    return _Parser(text, where).parse()


def parse_condition(text: str, program: Program) -> Condition:
    """A condition over ``program``'s registers and memory."""
    line = _Line("<condition>", 1, text)
    condition = _Conditions(line, program).read()
    line.end("'and', 'or' or the end of the line")
    return condition


def check(program: Program, where: str = "<program>") -> Program:
    """What the grammar cannot say: limits of the explorer, registers read before they are written."""

    def fail(message: str) -> NoReturn:
        raise LitmusError(where, 1, 1, f"program {program.name}: {message}")

    if not program.threads:
        fail("expected at least one 'rank N'")
    if len(program.threads) > 8:
        fail(f"{len(program.threads)} threads; expected at most 8")
    if len(program.registers) > 24:
        fail(f"{len(program.registers)} registers; expected at most 24")
    if program.ranks * program.words > 64:
        fail(f"{program.ranks} ranks of {program.words} words; expected at most 64 words in all")
    counts = {n for t in program.threads if (n := sum(isinstance(i, Barrier) for i in t.body))}
    if len(counts) > 1:
        fail(f"threads pass different numbers of barriers ({sorted(counts)}); expected equal numbers")
    owners: dict[tuple[int, str], str] = {}
    for thread in program.threads:
        written = set()
        for instruction in thread.body:
            if isinstance(instruction, Read):
                written.add(instruction.register)
                if owners.setdefault((thread.rank, instruction.register), thread.name) != thread.name:
                    fail(f"two threads of rank {thread.rank} read into '{instruction.register}'; expected one")
            value = getattr(instruction, "value", None)
            if isinstance(value, str) and value not in written:
                fail(f"rank {thread.rank} uses register '{value}' before reading into it, in '{instruction}'")
    return program
