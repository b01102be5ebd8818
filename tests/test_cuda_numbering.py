# SPDX-License-Identifier: Apache-2.0
"""Layout expert with many tokens: entries are numbered once, by the block that looks at their token (emulated GPUs)."""

from __future__ import annotations

from ctypes import c_uint64

import numpy as np
import pytest
from cuda_emulator import EQUAL, Round, Scenario, emulator, run
from hal_cuda import native
from hal_cuda.probe import probe_emulator

import hal
from hal import reference

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

MANY = {"layout": "expert", "max_tokens": 1100, "hidden": 8, "num_experts": 12, "top_k": 3}


class Skewed(Round):
    """Most tokens name the same experts; some name none."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        super().__init__(scenario, number)
        rng = np.random.default_rng(number)
        spec = scenario.spec
        for ids in self.idx:
            ids[: len(ids) // 2] = np.arange(spec.top_k)
            ids[rng.random(ids.shape) < 0.1] = -1
        self.rows, handle = reference.dispatch(spec, self.x, self.idx, self.weights)
        self.answers = [rng.standard_normal(rows.x.shape).astype(np.float32) for rows in self.rows]
        self.back = [rng.random(rows.topk_weights.shape).astype(np.float32) for rows in self.rows]
        self.sums, self.weights_back = reference.combine(self.answers, handle, topk_weights=self.back)


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


def test_ids_are_read_once_to_route_once_to_number_and_once_to_push():
    blocks = 3  # of the emulated GPU
    assert reads_of_each_id(1100) == 3
    # With few tokens every block looks at all of them, and numbers its own experts' entries in two passes.
    assert reads_of_each_id(1024) == 3 * blocks + 1
