# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="mask" on all GPUs here: a process is killed, and the others go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hal_cuda.probe import gpus

sys.path.insert(0, str(Path(__file__).parents[1]))

from losing_a_rank import lose_a_rank

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("layout", "schedule"), [("rank", "direct"), ("expert", "latency")])
def test_the_others_go_on_without_a_killed_process(run_ranks, tmp_path, layout, schedule):
    lose_a_rank(run_ranks, tmp_path, min(gpus(), 8), layout, schedule, "lsa", "gpus")
