# SPDX-License-Identifier: Apache-2.0
"""hal_ascend.check: the shipped kernels hold on every seed, and the four classic mistakes do not."""

from __future__ import annotations

import pytest
from hal_ascend.check import check

from hal.config import ExpertParallelSpec

SPEC = ExpertParallelSpec(num_experts=4, top_k=2, hidden=32, max_tokens=6)


@pytest.mark.parametrize("completion", ["strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block"])
@pytest.mark.parametrize(("schedule", "nodes"), [("direct", 1), ("latency", 1), ("hierarchical", 2)])
def test_the_shipped_kernels_hold(schedule: str, nodes: int, completion: str) -> None:
    spec = ExpertParallelSpec(**{**vars(SPEC), "schedule": schedule, "completion": completion})
    report = check(spec, 4 if nodes > 1 else 2, nodes, seeds=range(10))
    assert report.findings == ()
    assert report.runs == 10
    assert report.steps > 1000


@pytest.mark.parametrize(
    ("mutation", "completion"),
    [
        ("default_no", "strong_signal"),
        ("strong_on_other_queue", "strong_signal"),
        ("drop_empty_signal", "strong_signal"),
    ],
)
def test_a_weakened_primitive_is_found(mutation: str, completion: str) -> None:
    spec = ExpertParallelSpec(**{**vars(SPEC), "completion": completion})
    first, again = (check(spec, mutation=mutation, rounds=3).findings for _ in range(2))
    assert first
    assert first == again, "a failing seed is its own replay"
