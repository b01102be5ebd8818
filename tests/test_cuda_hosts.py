# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over several hosts: the CUDA kernels on emulated GPUs, NVLink inside a host and GIN between them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import hosts_rounds
import pytest
from cuda_hosts_mutations import DEFECTS, NETWORK_MUTATIONS, SEEDS, Defect
from hal_cuda import native
from hal_cuda.crossing import CHANNELS, crossing
from hal_cuda.layout import buffer_parts, layout
from hosts_rounds import Absence, a_case, run_emulated

import hal
from hal._validate import complete_spec
from hal.config import ExpertParallelSpec
from hal.errors import ContractError

SHAPES = [(2, 2), (4, 2), (4, 4), (6, 2)]
"""Ranks and hosts."""
SCHEDULES = ["direct", "hierarchical"]
LAYOUTS = ["rank", "expert"]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[1]}x{s[0] // s[1]}")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("rows", LAYOUTS)
def test_every_form(rows, schedule, shape):
    run_emulated(hosts_rounds.every_form, a_case(schedule, rows, shape), [0, 1])


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float8_e4m3fn", "top_k": 8},
        {"dtype": "float32", "hidden": 1040, "max_tokens": 6},
        {"dtype": "float16", "top_k": 1, "experts_per_rank": 1},
        {"dtype": "int8", "skew": 3.0, "max_tokens": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_types_and_shapes(schedule, changes):
    for rows, alignment in (("rank", 1), ("expert", 8)):
        run_emulated(hosts_rounds.every_form, a_case(schedule, rows, (4, 2), alignment=alignment, **changes), [1, 2])


@pytest.mark.parametrize("signals", ["auto", "weak"])
@pytest.mark.parametrize("channels", ["1x2", "3x2", "2x5"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_small_rings_and_late_ranks(monkeypatch, schedule, channels, signals):
    """Rings go round many times in a round; networks without strong signals; several channels on one queue."""
    monkeypatch.setenv(CHANNELS, channels)
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", signals)
    for seed, rows in enumerate(LAYOUTS):
        monkeypatch.setenv("HAL_SWNIC_SEED", str(seed + len(channels)))
        run_emulated(hosts_rounds.skewed_ranks, a_case(schedule, rows, (4, 2), max_tokens=30), [0, 1, 2, 3], 8)


@pytest.mark.parametrize("rows", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_halves_in_flight(schedule, rows):
    run_emulated(hosts_rounds.in_flight, a_case(schedule, rows, (4, 2), num_buffers=4), [0, 1, 2, 3])


@pytest.mark.parametrize("rows", LAYOUTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_refusals_move_nothing(schedule, rows):
    run_emulated(hosts_rounds.refusals, a_case(schedule, rows, (4, 2)))


# --- faults --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("absent", [0, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_stays_away_from_a_dispatch_is_named(schedule, absent):
    case = a_case(schedule, "rank", (4, 2))
    told = run_emulated(hosts_rounds.absence, case, Absence(absent, told=threading.Barrier(4)), timeout=3.0)
    assert {rank: name for rank, (name, *_) in enumerate(told) if rank != absent} == dict.fromkeys(
        {0, 1, 2, 3} - {absent}, absent
    )
    assert {stage for _, stage, _ in told if stage} == {"dispatch header"}


def test_a_rank_that_leaves_is_named_at_once():
    told = run_emulated(hosts_rounds.absence, a_case("hierarchical", "rank", (4, 2)), Absence(2, closes=True), timeout=30.0)
    assert [name for name, *_ in told] == [2, 2, -1, 2]
    assert max(seconds for *_, seconds in told) < 20.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_stays_away_from_a_combine_is_named(schedule):
    """Rank 0 may wait for rank 2, which waits for the absent rank: then rank 2's own error says so."""
    case = a_case(schedule, "rank", (4, 2))
    told = run_emulated(hosts_rounds.absence, case, Absence(3, combine=True, told=threading.Barrier(4)), timeout=3.0)
    names = [name for name, *_ in told]
    assert names[1:] == [3, 3, -1]
    assert names[0] == 3 or names[names[0]] == 3
    assert all(seconds < 30.0 for *_, seconds in told)


def test_a_card_that_stands_still_is_noticed(monkeypatch):
    """Rank 1's card stops after some operations to rank 0, which says what it waited for and how far that had come."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "1>0: stall=forever@12")
    with pytest.raises(hal.PeerTimeout) as told:
        run_emulated(hosts_rounds.plain_rounds, a_case("hierarchical", "rank", (2, 2)), [0, 1, 2, 3, 4], timeout=2.0)
    assert told.value.rank in (0, 1)
    assert told.value.stage in native.STAGES
    assert told.value.seen < told.value.expected


# --- planted defects -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", range(len(DEFECTS)), ids=lambda n: f"{DEFECTS[n].name}-{DEFECTS[n].schedule}")
def test_the_defect_is_caught(number):
    """In a process of its own: ranks that a failed round leaves behind still write into its memory."""
    script = Path(__file__).with_name("cuda_hosts_mutations.py")
    done = subprocess.run(
        [sys.executable, str(script), str(number)], capture_output=True, text=True, timeout=280, check=False
    )
    if done.returncode == -signal.SIGSEGV:
        return  # an index out of a cell that was read before it had come: an illegal access on a GPU
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip(), f"none of the seeds {SEEDS} noticed {DEFECTS[number]}"


def test_the_list_of_defects_is_complete():
    header = (Path(__file__).parents[1] / "kernels_cuda" / "emulation" / "gin.hpp").read_text(encoding="utf-8")
    body = header.partition("enum class NetworkMutation")[2].partition("{")[2].partition("count,")[0]
    names = tuple(line.split(",")[0].strip() for line in body.splitlines() if "," in line)
    assert names == NETWORK_MUTATIONS
    assert {d.name for d in DEFECTS} >= set(NETWORK_MUTATIONS) - {"none"}
    assert all(isinstance(d, Defect) for d in DEFECTS)


# --- sizes and settings --------------------------------------------------------------------------------------------------


def spec_of(**changes: Any) -> ExpertParallelSpec:
    given: dict[str, Any] = {"num_experts": 64, "top_k": 8, "hidden": 512, "max_tokens": 4096, **changes}
    return complete_spec(ExpertParallelSpec(**given), 16, 1.0)


def test_rings_do_not_grow_with_the_tokens():
    def rings(tokens: int) -> int:
        spec = spec_of(schedule="hierarchical", max_tokens=tokens)
        place = layout(spec, 16, False, crossing(spec, 16, 4))
        return place.slots - place.sending

    assert rings(512) == rings(65536)
    assert rings(64) < rings(512)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_the_parts_add_up(schedule, layout_name):
    spec = spec_of(schedule=schedule, layout=layout_name)
    over = crossing(spec, 16, 4)
    parts = buffer_parts(spec, 16, False, over)
    assert sum(part.nbytes for part in parts) == layout(spec, 16, False, over).total
    assert all(part.nbytes >= 0 and part.formula for part in parts)
    assert over.warps <= 384
    for wanted in ((20, 512), (3, 64), (132, 256)):
        blocks, threads = over.shape(*wanted)
        assert blocks >= wanted[0]
        assert blocks * threads // 32 >= over.warps
        assert threads <= 512
    assert 2 * over.batch <= over.cells


def test_hosts_of_unequal_size_and_wrong_settings_are_refused(monkeypatch):
    with pytest.raises(ContractError, match="16 ranks cannot be laid out on 3 equal hosts"):
        crossing(spec_of(), 16, 3)
    for wrong in ("4", "0x8", "4x1", "axb"):
        monkeypatch.setenv(CHANNELS, wrong)
        with pytest.raises(ContractError, match=wrong):
            crossing(spec_of(), 16, 4)
