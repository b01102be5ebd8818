# SPDX-License-Identifier: Apache-2.0
"""on_peer_loss="mask" on all GPUs here, and over make-believe hosts: a process is killed, and the others go on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hal_cuda import software_nic
from hal_cuda.probe import gpus

sys.path.insert(0, str(Path(__file__).parents[1]))

from losing_a_rank import lose_a_rank

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("layout", "schedule"), [("rank", "direct"), ("expert", "latency")])
def test_the_others_go_on_without_a_killed_process(run_ranks, tmp_path, layout, schedule):
    lose_a_rank(run_ranks, tmp_path, min(gpus(), 8), layout, schedule, "lsa", "gpus")


@pytest.mark.cuda(gpus=1)  # make-believe hosts may share one
@pytest.mark.parametrize(("layout", "schedule", "ranks", "hosts"), [("expert", "direct", 3, 3), ("rank", "latency", 4, 2)])
def test_the_others_go_on_over_make_believe_hosts(run_ranks, tmp_path, layout, schedule, ranks, hosts):
    """Ranks 0, 2 and 3 of two hosts are left, or 0 and 2 of three."""
    plan = software_nic.plan(hosts, ranks)
    where = ("gin", "gpus")
    lose_a_rank(run_ranks, tmp_path, ranks, layout, schedule, *where, nodes=hosts, environment=plan.environment)
