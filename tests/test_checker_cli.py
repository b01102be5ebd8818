# SPDX-License-Identifier: Apache-2.0
"""``hal litmus`` and ``hal check`` as a person uses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hal.checker import litmus, mutation, mutation_report, on_transport
from hal.cli import main

pytest.importorskip("hal_host._engine", reason="the C++ engine is not built")


def test_the_whole_library_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["litmus", "run", "--all"]) == 0
    out = capsys.readouterr().out
    assert "differences from the expectation: 0" in out
    assert out.count("\n") >= len(litmus.library())


def test_a_difference_from_the_expectation_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "mine.litmus"
    text = litmus.load("mp-flag").text().replace("expect A: shm lsa gin gin-weak udma", "expect F: udma\nexpect A: shm")
    program.write_text(text)
    assert main(["litmus", "run", str(program), "--profile", "udma"]) == 1
    assert "mp-flag under udma: A, expected F" in capsys.readouterr().out


def test_list_show_and_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["litmus", "list"]) == 0
    assert "trap: a payload word that changed is no proof (mended by mp-strong)" in capsys.readouterr().out
    assert main(["litmus", "show", "epoch"]) == 0
    assert "signal flag[0] = 2 to 1" in capsys.readouterr().out
    assert main(["litmus", "profiles", "udma"]) == 0
    assert "UDMA rule 29" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["litmus", "run", "nothing"], "unknown litmus program 'nothing'; known: "),
        (["litmus", "run", "epoch", "--profile", "ib"], "unknown ordering profile 'ib'; known: sc, shm"),
        (["litmus", "profiles", "ib"], "unknown ordering profile 'ib'"),
        (["litmus", "run"], "needs names or --all"),
        (["check", "ep"], "say what to check"),
        (["check", "ep", "--schedule", "ring"], "unknown schedule 'ring'"),
        (["check", "ep", "--schedule", "direct", "--break", "signal=weaken"], "is no mutant"),
        (["check", "ep", "--schedule", "direct", "--break", "signal:strong:999=weaken"], "rank 0 makes"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_a_diagram_in_the_terminal_and_as_svg(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "two.svg"
    assert main(["litmus", "run", "two-queues", "--profile", "gin", "--diagram", "--svg", str(svg)]) == 0
    assert "schedule: hold 0.0w" in capsys.readouterr().out
    assert svg.read_text().startswith("<svg")


def test_breaking_the_last_strong_signal_that_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    svg = tmp_path / "broken.svg"
    words = ["check", "ep", "--schedule", "direct", "--completion", "strong_signal"]
    assert main([*words, "--break", "signal:strong:last=weaken", "--svg", str(svg)]) == 1
    out = capsys.readouterr().out
    assert "schedule: hold 0." in out
    assert "=> wrong data" in out
    assert "</svg>" in svg.read_text()


def test_check_ep_says_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ep", "--schedule", "latency", "--completion", "strong_last", "--profile", "gin"]) == 0
    out = capsys.readouterr().out
    assert "0 failed, 0 not exhaustive" in out
    assert "every schedule up to the order of independent steps" in out


def test_a_mutation_run_leaves_nothing_unexplained() -> None:
    result = mutation.run(["direct"], ["strong_last"])
    assert mutation_report.unexplained(result) == []
    assert sum(result.killed.values()) > 300
    page = mutation_report.markdown(result, 1.0)
    assert "**unexplained**" not in page
    assert "0 unexplained" in page


@pytest.mark.parametrize("name", ["mp-flag", "two-queues", "epoch", "isa2", "cumulative-count", "source-reuse-quiet"])
def test_programs_run_on_the_host_transport(name: str) -> None:
    result = on_transport.run(litmus.load(name), "host", 50)
    assert sum(result.counts.values()) == 50
    assert result.forbidden == ()


def test_what_cannot_run_on_a_transport_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["litmus", "run", "two-submitters", "--backend", "host"]) == 2
    assert "a communicator has one thread" in capsys.readouterr().err
