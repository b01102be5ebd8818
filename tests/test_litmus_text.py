# SPDX-License-Identifier: Apache-2.0
"""The text form: round trips, and errors with line, column and what was expected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hal.checker.litmus import library, load, run
from hal.checker.parser import LitmusError, parse
from hal.checker.program import OwnSignal, ProgramBuilder
from hal.errors import ContractError
from hal.ordering import Order, SignalOp

HEAD = "litmus t\nwindow d[2] s[1]\nrank 0\n"


@pytest.mark.parametrize("name", sorted(library()))
def test_text_round_trip(name: str) -> None:
    program = library()[name]
    assert parse(program.text()) == replace(program, queue_names=())


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (HEAD + "  put d[2] = 1 to 1\n", 4, 7, r"d\[2..2\] is outside d\[2\]; expected 0..1"),
        (HEAD + "  put d[0] = 1 too 1\n", 4, 16, "expected 'to', found 'too'"),
        (HEAD + "  put d[0] = 300 to 1\n", 4, 14, "a value or a register must be at most 255, not 300"),
        (HEAD + "  put e[0] = 1 to 1\n", 4, 7, "no window 'e'; expected one of d, s"),
        (HEAD + "  put d[0..1] from s[0] to 1\n", 4, 15, r"takes 2 words; expected as many, found s\[0\]"),
        (HEAD + "  put d[0] = 1 to 1 order strng\n", 4, 27, "expected 'none' or 'relaxed' or 'strong', found 'strng'"),
        (HEAD + "  put d[0] = 1 to 1 queue rows\n", 4, 27, "no queue 'rows'"),
        (HEAD + "  jump d[0]\n", 4, 3, "expected an instruction .put, signal, wait"),
        (HEAD + "  wait s[0] > 1\n", 4, 13, "expected '>=', found '>'"),
        (HEAD + "  wait s[0] >=\n", 4, 15, "expected the awaited value .a number., found end of line"),
        (HEAD + "  put d[0] = 1 to 1 ; x\n", 4, 21, "unexpected character ';'"),
        (HEAD + "  r0 = read d[0]\nbad 0:r1 == 1\n", 5, 5, "no register 0:r1; expected one of 0:r0"),
        (HEAD + "  r0 = read d[0]\nbad 0:r0 =\n", 5, 10, "expected '==' or"),
        (HEAD + "  wait s[0] >= 1\n", 5, 1, "expected 'bad CONDITION', found end of file"),
        ("litmus t\nneeds put.fast\n", 2, 7, "expected one of put.none"),
        ("litmus t\nexpect Q: sc\n", 2, 8, "expected a verdict"),
        ("litmus t\nwindow d[1] d[1]\n", 2, 13, "window 'd' is declared twice"),
        ("window d[1]\n", 1, 1, "expected 'litmus NAME'"),
        (HEAD + "  put d[0] = r0 to 1\nbad deadlock\n", 1, 1, "uses register 'r0' before reading"),
        (HEAD + "  barrier\n  barrier\nrank 1\n  barrier\nbad deadlock\n", 1, 1, "different numbers of barriers"),
    ],
)
def test_malformed_programs(text: str, line: int, column: int, message: str) -> None:
    with pytest.raises(LitmusError, match=message) as caught:
        parse(text, "x.litmus")
    assert (caught.value.line, caught.value.column) == (line, column)
    assert str(caught.value).startswith(f"x.litmus:{line}:{column}: ")


def test_the_builder_writes_what_the_text_says() -> None:
    b = ProgramBuilder("mp-bundled", data=2, sig=1)
    own = OwnSignal(b.at("sig"), SignalOp.ADD, 1)
    b.rank(0).put(b.at("data", 0, 2), 1, 1, own=own)
    b.rank(1).wait(b.at("sig"), 1).read("r0", b.at("data")).read("r1", b.at("data", 1))
    built = b.build("1:r0 == 0 or 1:r1 == 0")
    shipped = load("mp-bundled")
    assert (built.threads, built.windows, built.bad) == (shipped.threads, shipped.windows, shipped.bad)


def test_the_builder_writes_loops() -> None:
    b = ProgramBuilder("chunks", chunk=4, count=1)
    for i in range(4):
        b.rank(0).put(b.at("chunk", i), 1, i + 1).signal(b.at("count"), 1, order=Order.STRONG)
        b.rank(1).wait(b.at("count"), i + 1).read(f"r{i}", b.at("chunk", i))
    program = b.build(" or ".join(f"1:r{i} != {i + 1}" for i in range(4)))
    assert run(program, "udma").code == "F"


def test_the_builder_refuses_places_outside_a_window() -> None:
    b = ProgramBuilder("t", data=1)
    with pytest.raises(ContractError, match=r"data\[1\] is outside data\[1\]"):
        b.at("data", 1)
    with pytest.raises(ContractError, match="no window 'sig'"):
        b.at("sig")
    with pytest.raises(ContractError, match="either a value or a source"):
        b.rank(0).put(b.at("data"), 1)
