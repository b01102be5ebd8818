# SPDX-License-Identifier: Apache-2.0
"""The demo runs the stack on real ranks, and its check can fail."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hal_cuda.probe import probe_emulator

from hal.cli import main
from hal.cli.demo import _judge
from hal.compose import load_config
from hal.config import Settings
from hal.demo.compare import differences
from hal.demo.dense import run_dense
from hal.demo.model import Model
from hal.demo.rank import Job, LayerResult, run_rank
from hal.demo.text import read_routing, read_text, tokenize


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hal.cli", "demo", *words], text=True, capture_output=True, check=False
    )


def rows_of(text: str) -> list[list[str]]:
    """The table's lines: those that begin with a layer's number."""
    return [line.split() for line in text.splitlines() if line.split() and line.split()[0].isdigit()]


def test_the_demo_says_ok_over_the_licence() -> None:
    done = demo()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("LICENSE of moe-hal: 256 tokens over 4 ranks")
    assert done.stdout.splitlines()[-1].startswith("OK: 3 layers, 256 tokens, 4 ranks")
    assert [row[:2] for row in rows_of(done.stdout)] == [["0", "256"], ["1", "256"], ["2", "256"]]


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_the_demo_goes_on_when_a_rank_is_killed(layout: str) -> None:
    done = demo("on_peer_loss=mask", "topology.nodes=2", "schedule=hierarchical", f"layout={layout}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 3 was killed between dispatch and combine of layer 1; the others went on" in done.stdout
    assert "goes on without rank 3, which has ended (view 1)" in done.stdout + done.stderr
    rows = [int(row[2]) for row in rows_of(done.stdout)]
    assert rows[2] < 0.8 * rows[0], "a fourth of the tokens and of the experts are gone"


def test_the_demo_goes_on_with_emulated_gpus_when_a_rank_is_killed() -> None:
    if not probe_emulator().usable:
        pytest.skip(probe_emulator().reason)
    done = demo("on_peer_loss=mask", "backend=cuda", "transport=gin_emulated", "--layers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rank 3 was killed between dispatch and combine of layer 1; the others went on" in done.stdout


def test_the_demo_kills_nobody_if_nobody_would_be_left() -> None:
    done = demo("on_peer_loss=mask", "ranks=1")
    assert done.returncode != 0
    assert "give at least ranks=2" in done.stdout + done.stderr


def test_the_demo_takes_a_text_and_fewer_tokens_than_ranks(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("three words here")
    done = demo("--text", str(tmp_path / "text"), "--layers", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: 1 layers, 3 tokens, 4 ranks" in done.stdout


def test_the_demo_takes_a_saved_routing(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    idx = np.argsort(random.random((21, 8)), axis=1)[:, :3]
    idx[4] = -1
    np.savez(tmp_path / "saved.npz", topk_idx=idx, topk_weights=random.random((21, 3), np.float32))
    done = demo("--routing", str(tmp_path / "saved.npz"), "ranks=2", "workload.num_experts=8", "--layers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 tokens over 2 ranks" in done.stdout
    assert "top-3" in done.stdout
    layers = rows_of(done.stdout)
    assert layers[0][2] == layers[1][2] == str(sum(len(set(row // 4)) for row in idx if row[0] >= 0))


@pytest.mark.parametrize(
    "overrides",
    [
        ["layout=expert", "alignment=4"],
        ["schedule=hierarchical", "topology.nodes=2"],
        ["schedule=hierarchical", "topology.nodes=2", "layout=expert"],
        ["schedule=latency", "layout=expert", "completion=flag_in_block"],
        ["workload.dtype=float8_e4m3fn", "workload.scale_block=16", "completion=strong_last"],
        ["workload.dtype=int8", "workload.scale_block=16", "layout=expert"],
        ["workload.dtype=float32", "workload.skew=2"],
    ],
)
def test_every_way_gives_the_dense_result(overrides: list[str]) -> None:
    """As threads, which start faster than the command's processes."""
    settings, job, words = small(["workload.hidden=64", *overrides])
    rows, wrong = _judge(settings, job, words, run(settings, job))
    assert wrong == []
    assert len(rows) == 2


def small(overrides: list[str]) -> tuple[Settings, Job, list[str]]:
    settings = load_config(overrides)
    words, ids = tokenize(read_text(None)[1])
    return settings, Job(Model(settings.workload, 2), ids[:90], None), words[:90]


def run(settings: Settings, job: Job) -> list[list[LayerResult]]:
    import hal

    return hal.spawn(settings.ranks, run_rank, settings, job, config=settings.connection)


def test_a_difference_is_found_and_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one element on one rank, a row count and an expert count: each is said, and the exit status is 1."""
    settings, job, words = small(["ranks=2"])
    good = run(settings, job)
    y = good[1][1].y.copy()
    y.view(np.uint16)[7, 3] ^= 1
    counts = good[0][0].tokens_per_expert.copy()
    counts[2] += 1
    broken = [
        [replace(good[0][0], tokens_per_expert=counts), replace(good[0][1], rows=good[0][1].rows + 1)],
        [good[1][0], replace(good[1][1], y=y)],
    ]
    _, wrong = _judge(settings, job, words, broken)
    assert len(wrong) == 3
    assert "layer 0, rank 0: tokens_per_expert is" in wrong[0]
    assert wrong[1].startswith(f"layer 1, rank 1: 1 of {y.size} elements differ in 1 tokens; first in token 7 ")
    assert repr(words[45 + 7]) in wrong[1]
    assert f"layer 1, rank 0: received {good[0][1].rows + 1} rows" in wrong[2]

    monkeypatch.setattr("hal.cli.demo.run_ranks", lambda *_: broken)
    monkeypatch.setattr("hal.cli.demo._prepare", lambda *_: ("text", words, settings, job))
    assert main(["demo"]) == 1
    out = capsys.readouterr().out
    assert "NOT OK" in out
    assert wrong[1] in out


def test_the_float64_result_is_an_independent_check() -> None:
    """A dense result that follows the contract but sums the wrong experts is caught by the plain sum."""
    settings, job, words = small(["ranks=2"])
    dense = next(iter(run_dense(settings, job)))
    shifted = replace(dense, exact=np.roll(dense.exact, 1, axis=0))
    found = differences(0, np.array_split(dense.bits, 2), shifted, words)
    assert len(found) == 2
    assert "farther from the float64 result than rounding explains" in found[0]
    assert differences(0, np.array_split(dense.bits, 2), dense, words) == []
    assert "the ranks gave 45 tokens, the text has 90" in differences(0, [dense.bits[:45]], dense, words)[0]


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"idx": np.zeros((2, 2), np.int64)}, r"\['idx'\].*topk_idx \[N, k\]"),
        ({"topk_idx": np.zeros((2, 2), np.float32)}, r"float32 \[2, 2\]"),
        ({"topk_idx": np.zeros((0, 2), np.int64)}, r"\[0, 2\]"),
        ({"topk_idx": np.full((2, 2), 9)}, "9 … 9, but there are 8 experts"),
        ({"topk_idx": np.full((2, 2), -2)}, "-2 … -2"),
        ({"topk_idx": np.zeros((2, 2), np.int64), "topk_weights": np.zeros((2, 3), np.float32)}, r"float32 \[2, 3\]"),
        ({"topk_idx": np.array([[0, 1]]), "topk_weights": np.array([[1.0, np.nan]])}, "not finite"),
    ],
)
def test_a_wrong_routing_file_is_refused(tmp_path: Path, arrays: dict[str, np.ndarray], expected: str) -> None:
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(ValueError, match=expected):
        read_routing(tmp_path / "wrong.npz", 8)
    np.savez(tmp_path / "whole.npz", topk_idx=np.zeros((99, 2), np.int64))
    whole = (tmp_path / "whole.npz").read_bytes()
    for content in (b"not a zip file", b"", whole[:300]):
        (tmp_path / "text.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"text\.npz"):
            read_routing(tmp_path / "text.npz", 8)
    np.save(tmp_path / "one.npy", np.zeros((2, 2), np.int64))
    with pytest.raises(ValueError, match=r"one\.npy is one array.*np\.savez"):
        read_routing(tmp_path / "one.npy", 8)
