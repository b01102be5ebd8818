# SPDX-License-Identifier: Apache-2.0
"""Layout expert with many tokens: entries are numbered once, by the block that looks at their token (emulated GPUs)."""

from __future__ import annotations

from ctypes import c_uint64

import pytest
from cuda_emulator import EQUAL, Round, Scenario, Skewed, emulator, run
from hal_cuda import native
from hal_cuda.probe import probe_emulator

import hal

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

MANY = {"layout": "expert", "max_tokens": 1100, "hidden": 8, "num_experts": 12, "top_k": 3}


@pytest.mark.parametrize("schedule", ["direct", "latency"])
@pytest.mark.parametrize("kind", [Round, Skewed])
def test_rows_of_many_tokens_are_in_order(schedule, kind):
    """Places are by source token, whichever block numbered them, over more groups of tokens than a block has warps."""
    scenario = Scenario("many", settings={**MANY, "schedule": schedule})
    with emulator(2):
        assert run(scenario, [kind(scenario, 3), kind(scenario, 4)]) == EQUAL


def test_a_block_that_owns_no_expert_and_one_that_has_no_tokens():
    scenario = Scenario("few experts", settings={**MANY, "num_experts": 2, "top_k": 1, "max_tokens": 1056})
    assert run(scenario, [Round(scenario, 5)]) == EQUAL


def reads_of_each_id(tokens: int) -> float:
    """How often a dispatch of layout expert reads each id of rank 0."""
    scenario = Scenario("counted", settings={**MANY, "max_tokens": tokens})
    one = Round(scenario, 3)
    library = native.load_emulated()
    loads = c_uint64()

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        if me == 0:
            library.emulator_count_loads(one.idx[0].ctypes.data, one.idx[0].nbytes, loads)
        comm.barrier()
        ep.dispatch(one.x[me], one.idx[me], one.weights[me])

    hal.spawn(2, body, backend="cuda", transport="gin_emulated", timeout=20.0)
    library.emulator_count_loads(0, 0, loads)
    return loads.value / one.idx[0].size


def test_ids_are_read_to_route_to_number_to_push_and_to_keep():
    blocks = 3  # of the emulated GPU
    assert reads_of_each_id(1100) == 4
    # With few tokens every block looks at all of them, and numbers its own experts' entries in two passes.
    assert reads_of_each_id(1024) == 3 * blocks + 2
