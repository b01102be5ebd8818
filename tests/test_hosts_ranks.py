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
from pair import Pair

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


def test_two_ranks_are_refused_what_breaks_the_contract():
    """What tests/cuda/test_running.py runs on two GPUs, where nothing but the kernels looks at ids."""
    pair = Pair(timeout=60.0, transport="gin_emulated")
    pair.run("refusals")
    pair.close()


def test_rounds_run_there():
    case = a_case("direct", "rank", (2, 2))
    hosts_ranks.run("every_form", 2, 2, case, [0, 1], transport="gin_emulated")
