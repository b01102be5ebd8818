# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine over several hosts: the CUDA kernels on emulated GPUs, NVLink inside a host and GIN between them."""

from __future__ import annotations

from typing import Any

import hosts_rounds
import pytest
from hal_cuda.crossing import CHANNELS, crossing
from hosts_rounds import a_case

import hal
from hal._validate import complete_spec
from hal.config import QUANTISED_DTYPES, ExpertParallelSpec, TopologyConfig
from hal.errors import ContractError

SHAPES = [(2, 2), (4, 2), (4, 4), (6, 2)]
"""Ranks and hosts."""
SCHEDULES = ["direct", "hierarchical"]


def run(body: Any, case: Any, *args: Any, timeout: float = 60.0) -> list[Any]:
    config = hal.HalConfig("cuda", "gin_emulated", TopologyConfig(case.nodes), timeout=timeout)
    return hal.spawn(case.ranks, body, case, *args, config=config)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[1]}x{s[0] // s[1]}")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_every_form(layout, schedule, shape):
    run(hosts_rounds.every_form, a_case(schedule, layout, shape), [0, 1, 2])
