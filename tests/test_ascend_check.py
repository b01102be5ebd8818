# SPDX-License-Identifier: Apache-2.0
"""hal_ascend.check: the shipped kernels hold on every seed, and the four classic mistakes do not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hal_ascend.check import check
from hal_ascend.session import EmulatorOptions

from hal.cli import main
from hal.cli.check_device import checkable
from hal.config import ExpertParallelSpec
from hal.errors import ContractError

SPEC = ExpertParallelSpec(num_experts=4, top_k=2, hidden=32, max_tokens=6)


@pytest.mark.parametrize("completion", ["strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block"])
@pytest.mark.parametrize(("schedule", "nodes"), [("direct", 1), ("latency", 1), ("hierarchical", 2)])
def test_the_shipped_kernels_hold(schedule: str, nodes: int, completion: str) -> None:
    spec = replace(SPEC, schedule=schedule, completion=completion, num_buffers=4)
    report = check(spec, 4 if nodes > 1 else 2, nodes, seeds=range(10))
    assert report.findings == ()
    assert report.runs == 10
    assert report.steps > 1000


@pytest.mark.parametrize(
    ("mutation", "completion"),
    [
        ("default_no", "strong_signal"),
        ("strong_on_other_queue", "strong_signal"),
        ("drop_empty_signal", "strong_signal"),
        ("early_reclaim", "strong_signal_no_cqe"),
    ],
)
def test_a_weakened_primitive_is_found(mutation: str, completion: str) -> None:
    spec = replace(SPEC, completion=completion, num_buffers=4)
    first, again = (check(spec, mutation=mutation, rounds=3).findings for _ in range(2))
    assert first
    assert first == again, "a failing seed is its own replay"


def test_a_finding_is_drawn_with_the_operation_that_others_overtook() -> None:
    report = check(replace(SPEC, num_buffers=4), mutation="default_no", rounds=3)
    drawn = report.findings[0].picture
    assert drawn is not None
    assert drawn.text.splitlines()[0].split() == ["rank", "0", "rank", "1"]
    starred = [line.strip() for line in drawn.text.splitlines() if line.lstrip().startswith("*")]
    assert re.match(r"\*write [01]\.\d+ NO \d+ B to [01] q\d", starred[0])
    assert any(" lands" in line for line in starred[1:])
    assert report.findings[0].text.split()[0] in drawn.text
    assert 'marker-end="url(#a)"' in drawn.svg


def test_int8_rows_and_their_scales_hold() -> None:
    spec = replace(SPEC, dtype="int8", scale_dim=3, combine_dtype="bfloat16", layout="expert", num_buffers=4)
    assert check(spec, seeds=range(5)).findings == ()


# --- hal check ascend -----------------------------------------------------------------------------------------------


def test_every_protocol_in_one_table_that_says_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "ascend", "--all", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("ok ") for line in out.splitlines()) == 3 * 4 * 2
    assert "# 24 protocols, 0 failed; 48 runs" in out
    assert "seeded adversarial search, not exhaustive: seeds 0 … 1" in out


@pytest.mark.parametrize(
    ("mutation", "completion", "broke"),
    [
        ("default_no", "strong_signal", "Fault: rule 17"),
        ("strong_on_other_queue", "strong_signal", "wrong bits"),
        ("early_reclaim", "strong_signal_no_cqe", "Fault: rule 16"),
        ("drop_empty_signal", "strong_signal", "PeerTimeout: rank 1: no answer in stage 'dispatch rows'"),
    ],
)
def test_a_planted_defect_is_caught_and_its_seed_replays(
    mutation: str, completion: str, broke: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "ascend", "--completion", completion, "--mutation", mutation]) == 1
    out = capsys.readouterr().out
    assert out.startswith(f"caught direct/{completion}")
    seed = re.search(r"  seed \d+: (.*)", out)
    words = re.search(r"  replay with: hal (.*)", out)
    assert seed is not None
    assert words is not None
    assert broke in seed[1]
    assert main(words[1].split()) == 1
    assert seed[0] in capsys.readouterr().out
    healthy = words[1].replace(f" --mutation {mutation}", "").split()
    assert main(healthy) == 0


def test_a_defect_that_a_protocol_does_not_meet_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "ascend", "--completion", "strong_last", "--mutation", "drop_empty_signal", "--seeds", "3"]
    assert main(words) == 0
    assert "drop_empty_signal is not noticed" in capsys.readouterr().out


def test_help_names_the_backends_that_can_be_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "--help"])
    assert f"emulated device ({', '.join(checkable())})" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ascend"], "say what to check"),
        (["ascend", "--mutation", "typo"], "unknown mutation 'typo'; known: none, default_no"),
        (["ascend", "--schedule", "ring"], "schedule='ring' is not one of direct"),
        (["ascend", "--schedule", "hierarchical", "--ranks", "3"], "a multiple of 2"),
        (["ascend", "--all", "--profile", "udma"], "stand in for a profile"),
        (["host", "--all"], "backend 'host' has no emulated device to run its kernels on (ascend, cuda have)"),
        (["ascent", "--all"], "'ascent' is nothing to check: say ep, mutation, or a backend (ascend, cuda)"),
        (["ep", "--all", "--mutation", "default_no"], "hal check ep takes --break"),
    ],
)
def test_mistakes_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [["check", "ascend", "--all"], ["size", "backend=ascend"]])
def test_a_missing_extension_module_is_said(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hal_ascend.probe.find_spec", lambda name: None)
    assert main(words) == 2
    assert "the C++ engine hal_ascend._engine was not built" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("CORES", "0"), ("SQ_DEPTH", "128"), ("SQ_DEPTH", "3000"), ("CQ_DEPTH", "8"), ("CORES", "two")]
)
def test_a_device_of_impossible_shape_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"HAL_UDMA_{name}", value)
    with pytest.raises(ContractError, match=f"HAL_UDMA_{name}"):
        EmulatorOptions.from_environment()
