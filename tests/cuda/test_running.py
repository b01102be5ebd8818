# SPDX-License-Identifier: Apache-2.0
"""What surrounds dispatch and combine on GPUs: words, graphs, frameworks, refusals, time limits, many rounds."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from hosts_rounds import a_case

pytestmark = pytest.mark.cuda


def settings(**changes: Any) -> dict[str, Any]:
    return {"num_experts": 8, "top_k": 3, "hidden": 128, "max_tokens": 32, "num_buffers": 3, **changes}


def test_words(ranks):
    ranks.run("words")


def test_bad_ids_are_refused_before_rows_move(ranks):
    ranks.run("refusals")


@pytest.mark.parametrize("schedule", ["direct", "latency"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("max_tokens", [32, 600])
def test_graph_replays(ranks, layout, schedule, max_tokens):
    shape = {"max_tokens": max_tokens, "hidden": 128, "experts_per_rank": 4}
    case = a_case(schedule, layout, (ranks.number, 1), num_buffers=3, **shape)
    ranks.run("replays", case, [1, 2, 3, 4, 5, 6], module="graph_rounds")
    ranks.run("alternating", case, list(range(7, 16)), 1, module="graph_rounds")
    if max_tokens == 32:
        ranks.run("held", replace(case, num_buffers=5), [1, 2, 3], module="graph_rounds")
        ranks.run("refused", case, module="graph_rounds")


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("max_tokens", [48, 600])
def test_a_thousand_rounds_of_uneven_ranks(ranks, layout, max_tokens):
    ranks.run("many_rounds", settings(layout=layout, max_tokens=max_tokens, num_buffers=4), 1000)


def test_cupy_and_jax(ranks):
    pytest.importorskip("cupy")
    pytest.importorskip("jax")
    ranks.run("frameworks")


def test_a_missing_peer_is_named_in_time(ranks):
    told = ranks.run("timeouts")
    ranks.close()  # after a PeerTimeout a communicator can only be closed
    for rank, text in enumerate(told):
        assert rank == 1 or ("rank 1" in text and "dispatch" in text), text


def test_a_killed_peer_is_named_at_once(ranks):
    with pytest.raises(AssertionError, match="the process ended") as told:
        ranks.run("killed")
    ranks.close()
    blamed = [rank for rank in range(ranks.number) if f"rank {rank}:" in str(told.value)]
    assert blamed == [1]  # the others found everything as it should be


def test_size_of_the_window(ranks):
    from hal_cuda.layout import payload_bytes

    from hal.config import ExpertParallelSpec

    spec = ExpertParallelSpec(256, 8, 7168, 8192, num_buffers=1)
    slots = 2  # one to receive, and combine's
    assert ranks.run("symmetric_bytes", spec)[0] <= 1.05 * slots * payload_bytes(spec, ranks.number)
