# SPDX-License-Identifier: Apache-2.0
"""``hal litmus`` and ``hal check`` as a person uses them."""

from __future__ import annotations

from dataclasses import replace
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
        (["check", "ep", "--schedule", "direct", "--break", "signal:strong:-1=weaken"], "rank 0 makes"),
        (["check", "ep", "--schedule", "direct", "--break", "push:0=weaken"], "makes no such call; PRIMITIVE:ORDER is one"),
        (["check", "ep", "--replay", "sometimes"], "'sometimes' is no schedule"),
        (["check", "ep", "--search", "races", "--ranks", "3", "--schedule", "hierarchical"], "give an even number"),
        (["check", "cuda", "--all", "--losses"], "hal check cuda takes"),
        (["litmus", "list", "epoch"], "hal litmus show epoch"),
        (["litmus", "run", "epoch", "--transport", "shm"], "--transport means nothing"),
        (["litmus", "run", "epoch", "-n", "5"], "-n means nothing"),
        (["litmus", "run", "epoch", "--backend", "host", "--profile", "gin"], "--profile means nothing"),
        (["litmus", "show", "epoch", "--markdown"], "--markdown means nothing"),
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


RUNNABLE = [name for name, program in litmus.library().items() if not on_transport.unsupported(program)]


@pytest.mark.parametrize("name", RUNNABLE)
@pytest.mark.parametrize(
    ("backend", "transport", "states"), [("host", "shm", "shm"), ("ascend", "udma_emulated", "udma")]
)
def test_a_transport_does_nothing_that_its_profile_forbids(
    backend: str, transport: str, states: str, name: str
) -> None:
    result = on_transport.run(litmus.load(name), backend, 30, transport=transport)
    assert result.profile.name == states
    assert sum(result.counts.values()) == 30
    assert result.forbidden == ()


def test_an_outcome_that_the_profile_forbids_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = litmus.run
    # The model of a program that reads 0 only: the transport's 1 is then an outcome that no delivery order gives.
    monkeypatch.setattr(litmus, "run", lambda p, under: replace(real(p, under), outcomes=((0,),)))
    assert main(["litmus", "run", "mp-strong", "--backend", "host", "-n", "5"]) == 1
    seen = capsys.readouterr()
    assert "! 1:r0=1" in seen.out
    assert "the model of shm forbids: 1:r0=1" in seen.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_shipped_kernels_are_right_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Every schedule, completion, layout, scenario and profile: what ``hal check ep --all`` promises of a release."""
    assert main(["check", "ep", "--all", "--max-seconds", "600"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert ", 0 failed, 0 not exhaustive" in last


def test_what_cannot_run_on_a_transport_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["litmus", "run", "two-submitters", "--backend", "host"]) == 2
    assert "a communicator has one thread" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["check", "ep", "--search", "delays", "--delays", "-1"],  # was "0 runs, exhaustive"
        ["check", "ep", "--search", "random", "--ranks", "4", "--runs", "0"],
        ["check", "ep", "--search", "races", "--ranks", "0"],
        ["check", "ep", "--search", "races", "--ranks", "4", "--tokens", "-1"],
        ["check", "ep", "--search", "races", "--ranks", "4", "--rounds", "0"],
        ["check", "ep", "--all", "--max-seconds", "0"],
        ["check", "ep", "--all", "--max-memory", "nan"],
        ["check", "ascend", "--all", "--seed", "-1"],
        ["check", "ascend", "--all", "--seeds", "0"],
        ["check", "mutation", "--out", "/nonexistent/table.md"],
        ["check", "ep", "--replay", "eager", "--svg", "/nonexistent/x.svg"],
        ["litmus", "run", "epoch", "--max-states", "0"],
        ["litmus", "run", "epoch", "--svg", "/"],
        ["litmus", "run", "epoch", "--backend", "host", "--json", "/nonexistent/x.json"],
        ["litmus", "run", "epoch", "--backend", "host", "--seed", "-1"],
    ],
)
def test_an_option_that_makes_no_sense_is_refused_before_any_work(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert [word for word in words if word.startswith("--")][-1] in err


def test_a_program_that_is_no_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.litmus").write_bytes(b"\xff\xfe")
    assert main(["litmus", "run", str(tmp_path / "x.litmus")]) == 2
    assert "x.litmus is no text" in capsys.readouterr().err
