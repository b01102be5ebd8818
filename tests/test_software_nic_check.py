# SPDX-License-Identifier: Apache-2.0
"""The GPU check's own judgement (kernels_cuda/software_nic/check_on_gpus.py), and that its kernel compiles."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from software_nic import SOURCES


@pytest.fixture(scope="module")
def check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_on_gpus", SOURCES / "check_on_gpus.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def outcome(codes: list[int], bad: int = 0, checked: int = 2 * 20 * 65536, log: str = "") -> dict[str, Any]:
    results = [{"bad": bad, "checked": checked, "us_per_round": 1.0} for code in codes if code == 0]
    return {"codes": codes, "results": results, "log": log}


def test_verdicts(check: ModuleType) -> None:
    clean = check.Case("clean", 2, 2)
    assert check.verdict(clean, outcome([0, 0])) == "ok"
    assert "3 wrong" not in check.verdict(clean, outcome([0, 0]))
    assert "6 wrong words" in check.verdict(clean, outcome([0, 0], bad=3))
    assert "words checked" in check.verdict(clean, outcome([0, 0], checked=1))
    assert "exit statuses" in check.verdict(clean, outcome([0, 3]))


def test_control_that_is_not_caught_fails(check: ModuleType) -> None:
    control = check.Case("control", 2, 2, expect="broken")
    assert "prove nothing" in check.verdict(control, outcome([0, 0]))
    assert check.verdict(control, outcome([0, 0], bad=1)) == "ok"


def test_lost_peer_must_be_named(check: ModuleType) -> None:
    loss = check.Case("loss", 2, 2, expect="loss")
    assert (
        check.verdict(loss, outcome([3, -9], log="NCCL WARN rank 0: rank 1 (pid 7) has died; its operations fail"))
        == "ok"
    )
    assert check.verdict(loss, outcome([3, -9])) == "nobody named rank 1"
    assert "should die" in check.verdict(loss, outcome([124, -9]))
    assert "should die" in check.verdict(loss, outcome([0, 0]))


def test_verdicts_of_words(check: ModuleType) -> None:
    def result(bad: int = 0, checked: int = 8, wrong: tuple[str, ...] = ()) -> dict[str, Any]:
        return {"wrong": list(wrong), "hold": {"strong word": [bad, checked]}, "may_fail": {"flag": [9, 9]}}

    words, control = check.Case("words", 2, 2, words=True), check.Case("control", 2, 2, words=True, expect="broken")
    assert check.words_verdict(words, [result(), result()]) == "ok"
    assert "strong word: 3 wrong words" in check.words_verdict(words, [result(), result(bad=3)])
    assert "ring" in check.words_verdict(words, [result(), result(wrong=("ring",))])
    assert "looked at nothing" in check.words_verdict(words, [result(), result(checked=0)])
    assert "prove nothing" in check.words_verdict(control, [result(), result()])
    assert check.words_verdict(control, [result(bad=1), result()]) == "ok"


def test_cases_are_named_once_and_have_a_control_for_each_layout(check: ModuleType) -> None:
    cases = check.cases(seeds=3)
    assert len({case.name for case in cases}) == len(cases)
    for ranks in (2, 4):
        assert any(case.ranks == ranks and case.expect == "broken" for case in cases)


@pytest.mark.slow
def test_gin_kernel_compiles(tmp_path: Path) -> None:
    home = os.environ.get("HAL_NCCL_HOME")
    if shutil.which("nvcc") is None or not home or not (Path(home) / "include/nccl_device.h").is_file():
        pytest.skip("needs nvcc, and HAL_NCCL_HOME naming NCCL 2.30.7 with include/nccl_device.h")
    source = SOURCES / "tests/gin_alltoall.cu"
    command = ["nvcc", "-std=c++17", "-arch=sm_90", f"-I{home}/include", "-c", str(source), "-o", str(tmp_path / "o")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
