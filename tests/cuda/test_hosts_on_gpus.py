# SPDX-License-Identifier: Apache-2.0
"""The rounds of tests/test_cuda_hosts.py on GPUs: make-believe hosts of one machine, joined by the software NIC."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

import hosts_ranks
from hal_cuda.crossing import CHANNELS
from hosts_rounds import a_case

pytestmark = pytest.mark.cuda(gpus=1)  # make-believe hosts may share one


@pytest.fixture(scope="module", autouse=True)
def ended():
    yield
    hosts_ranks.close()


SHAPES = [(2, 2), (4, 2), (4, 4)]
"""Ranks and hosts."""
FAULTS = "reorder=200us,split=4K,source_early"


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[1]}x{s[0] // s[1]}")
@pytest.mark.parametrize("schedule", ["direct", "hierarchical", "latency"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_every_form(layout, schedule, shape):
    case = a_case(schedule, layout, shape)
    hosts_ranks.run("every_form", case.nodes, case.ranks, case, [0, 1, 2])


@pytest.mark.parametrize("signals", ["auto", "weak"])
@pytest.mark.parametrize("schedule", ["direct", "hierarchical"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_small_rings_late_ranks_and_a_reordering_card(layout, schedule, signals):
    case = a_case(schedule, layout, (2, 2), max_tokens=200, hidden=2064, top_k=8, dtype="float8_e4m3fn")
    settings = {CHANNELS: "3x2", "HAL_CUDA_GIN_SIGNALS": signals, "HAL_SWNIC_FAULTS": FAULTS, "HAL_SWNIC_SEED": "5"}
    hosts_ranks.run("skewed_ranks", case.nodes, case.ranks, case, [0, 1, 2, 3], 20, **settings)


@pytest.mark.parametrize("schedule", ["direct", "hierarchical", "latency"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("signals", ["auto", "weak"])
def test_two_hundred_rounds_of_reordering(signals, layout, schedule):
    """Signals that the network orders after rows, and those that the sender holds back until rows have arrived."""
    case = a_case(schedule, layout, (2, 2))
    settings = {"HAL_CUDA_GIN_SIGNALS": signals, "HAL_SWNIC_FAULTS": FAULTS, "HAL_SWNIC_SEED": "11"}
    hosts_ranks.run("skewed_ranks", case.nodes, case.ranks, case, list(range(8)), 200, **settings)


@pytest.mark.parametrize("schedule", ["direct", "hierarchical"])
def test_halves_in_flight_and_refusals(schedule):
    for layout in ("rank", "expert"):
        case = a_case(schedule, layout, (2, 2), num_buffers=4)
        hosts_ranks.run("in_flight", case.nodes, case.ranks, case, [0, 1, 2, 3])
        hosts_ranks.run("refusals", case.nodes, case.ranks, case)


@pytest.mark.parametrize("schedule", ["direct", "hierarchical", "latency"])
def test_graph_replays(schedule):
    for layout in ("rank", "expert"):
        case = a_case(schedule, layout, (2, 2))
        hosts_ranks.run("replays", case.nodes, case.ranks, case, [1, 2, 3], module="graph_rounds")
