# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of the C++ kernels against the reference, bit for bit: every row, every plane, padding included."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_ranks import Ranks, round_trip

from hal.config import ExpertParallelSpec

SPEC = ExpertParallelSpec(num_experts=8, top_k=3, hidden=32, max_tokens=7)
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
SCHEDULES = (("direct", 1), ("latency", 1), ("hierarchical", 2))


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_layout_schedule_and_completion(dtype, layout, schedule, nodes, completion):
    scale_dim = 3 if dtype.startswith("float8") else 0
    spec = replace(SPEC, dtype=dtype, layout=layout, schedule=schedule, completion=completion, scale_dim=scale_dim)
    rng = np.random.default_rng(1)
    with Ranks(spec, 4, nodes) as world:
        round_trip(world, rng, [7, 0, 3, 5])
        round_trip(world, rng, [1, 6, 7, 2], reuse=True)
