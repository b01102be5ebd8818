# SPDX-License-Identifier: Apache-2.0
"""The rank processes that tests/cuda/test_hosts_on_gpus.py runs its rounds on, here with emulated GPUs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import hosts_ranks
from hosts_rounds import a_case
from ranks import Ranks

EMULATED = {"module": "test_hosts_ranks", "transport": "gin_emulated"}


@pytest.fixture(autouse=True)
def ended():
    yield
    hosts_ranks.close()
    assert not hosts_ranks._kept


def who(comm: Any) -> tuple[int, int, str]:
    return comm.rank, os.getpid(), os.environ.get("HAL_TESTED", "")


def fail_on_one(comm: Any) -> None:
    assert comm.rank != 1, "said on purpose"


def test_processes_stay_until_one_fails():
    first, again = (hosts_ranks.run("who", 2, 2, **EMULATED) for _ in range(2))
    assert [rank for rank, _, _ in first] == [0, 1]
    assert first == again
    other = hosts_ranks.run("who", 2, 2, **EMULATED, HAL_TESTED="yes")
    assert [told for _, _, told in other] == ["yes", "yes"]
    with pytest.raises(AssertionError, match=r"^rank 1:[^$]*said on purpose"):
        hosts_ranks.run("fail_on_one", 2, 2, **EMULATED)
    assert not {pid for _, pid, _ in first} & {pid for _, pid, _ in hosts_ranks.run("who", 2, 2, **EMULATED)}


@pytest.mark.parametrize("number", [2, 4])
def test_what_runs_on_two_gpus_runs_on_four(number: int) -> None:
    """Bodies of tests/cuda, where nothing but the kernels looks at ids."""
    ranks = Ranks(number, timeout=60.0, transport="gin_emulated")
    ranks.run("refusals")
    ranks.run("words")
    common = {"num_experts": 2, "top_k": 2, "hidden": 64, "max_tokens": 8, "num_buffers": 3}
    for layout in ("rank", "expert"):
        ranks.run("rounds", {**common, "layout": layout}, [[5, 3], [0, 4]], {})
        ranks.run("many_rounds", {**common, "layout": layout, "num_experts": 8}, 12)
    ranks.close()


def test_sums_by_rank_run_on_four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CUDA_EMULATOR_ONE_DOMAIN", "1")
    ranks = Ranks(4, nodes=4, timeout=60.0, transport="gin_emulated")
    settings = {"num_experts": 8, "top_k": 3, "hidden": 64, "max_tokens": 8, "num_buffers": 3, "layout": "expert"}
    ranks.run("rounds", {**settings, "schedule": "hierarchical"}, [[5, 3], [0, 4]], {})
    ranks.close()


def test_rounds_run_there():
    case = a_case("direct", "rank", (2, 2))
    hosts_ranks.run("every_form", 2, 2, case, [0, 1], transport="gin_emulated")
