# SPDX-License-Identifier: Apache-2.0
"""GIN on GPUs, over the software NIC: HAL's words between make-believe hosts, and every promise of kernels' primitives."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hal_cuda import software_nic

pytestmark = pytest.mark.cuda(gpus=1)  # make-believe hosts may share one
PROGRAM = Path(__file__).parents[1] / "gin_bodies.py"
FAULTS = "reorder=300us,split=4K,publish=100us,source_early,read=100us,complete=50us"


def run(hosts: int, ranks: int, seconds: float = 300.0, **settings: str) -> list[dict[str, Any]]:
    """What each rank of ``hosts`` make-believe hosts printed."""
    plan, token = software_nic.plan(hosts, ranks), secrets.token_hex(32)
    shared = {"HAL_WORLD_SIZE": str(ranks), "HAL_NODES": str(hosts), "HAL_TOKEN": token, **settings}
    started = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), "gin"],
            env={**os.environ, **shared, **plan.environment(rank), "HAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        told = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * ranks, "\n".join(error[-2000:] for _, error in told)
    return [json.loads(text.splitlines()[-1]) for text, _ in told]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("signals", ["auto", "weak"])
@pytest.mark.parametrize(("hosts", "ranks"), [(2, 2), (2, 4)])
def test_words_and_promises(hosts: int, ranks: int, signals: str) -> None:
    for told in run(hosts, ranks, HAL_SWNIC_FAULTS=FAULTS, HAL_SWNIC_SEED="5", HAL_CUDA_GIN_SIGNALS=signals):
        assert told["profile"] == ("gin" if signals == "auto" else "gin-weak")
        assert told["capabilities"]["gin_type"] == "proxy"
        assert told["wrong"] == []
        assert {name: bad for name, (bad, _) in told["hold"].items() if bad} == {}
        assert all(checked for _, checked in told["hold"].values())


@pytest.mark.timeout(400)
def test_signals_before_their_data_are_caught() -> None:
    """The control."""
    told = run(2, 2, HAL_SWNIC_FAULTS="delay=3ms,early_signal")
    assert any(rank["wrong"] or any(bad for bad, _ in rank["hold"].values()) for rank in told)
