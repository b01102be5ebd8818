# SPDX-License-Identifier: Apache-2.0
"""The software NIC's CUDA code, run on a driver without a GPU (kernels_cuda/software_nic/tests/fake_cuda.cpp): streams that
run later and overtake each other, pageable and pinned memory told apart, memory that belongs to one GPU or another. The
real driver is another matter: kernels_cuda/software_nic/check_on_gpus.py."""

from __future__ import annotations

import pytest
from software_nic import torture

FAULTS = ["", "reorder=200us,split=64K", "reorder=500us,source_early,complete=100us"]


@pytest.mark.parametrize("faults", FAULTS)
@pytest.mark.parametrize(
    "options",
    [
        "gpus=1",
        "gpus=2",
        "gpus=2 ranks=4 rounds=4",
        "gpus=2 signal=weak",
        "gpus=1 signal=va",
        "gpus=2 source=host puts=200",
        "gpus=2 source=host slot=200000",
        "gpus=1 slot=5000000 puts=2 rounds=2",
        "gpus=2 slot=5000000 puts=2 rounds=2",
    ],
    ids=lambda options: options.replace(" ", "-"),
)
def test_order_and_data(options: str, faults: str) -> None:
    """Staging in steps, peer copies, values put inline beyond the room for them, snapshots, signals of both kinds."""
    result = torture(*options.split(), DEVICE="cuda", FAULTS=faults)
    assert "crashed" not in result
    assert "killed" not in result, result["log"]
    assert result["broken"] == result["unfinished"] == result["failed_requests"] == 0
    assert result["finished"] == result["ranks"]
    assert result["checked"] > 0


@pytest.mark.parametrize(("copy", "gpus"), [("stage", 2), ("auto", 1), ("auto", 2)])
@pytest.mark.parametrize("signal", ["auto", "rmw"])
def test_routes_and_signals(copy: str, gpus: int, signal: str) -> None:
    result = torture(f"gpus={gpus}", DEVICE="cuda", COPY=copy, SIGNAL=signal)
    assert result["checked"] == 2 * 2 * 6 * 12
    assert result["broken"] == 0


def test_direct_copies_within_one_gpu_are_what_staging_avoids() -> None:
    """The fake driver ends whoever asks for one, so the tests above show that nobody does."""
    result = torture("gpus=1", DEVICE="cuda", COPY="peer")
    assert result["killed"] == 2
    assert "a direct copy within one GPU" in result["log"]


def test_early_signals_are_caught_here_too() -> None:
    result = torture("gpus=2", "seeds=5", DEVICE="cuda", FAULTS="delay=20ms,early_signal")
    assert result["seeds_broken"] == 5


def test_killed_peer_is_noticed() -> None:
    result = torture(
        "gpus=2", "ranks=3", "rounds=20", DEVICE="cuda", FAULTS="1>*: kill=@20; 0>1: stall=5s@30; 2>1: stall=5s@30"
    )
    assert result["finished"] == result["noticed"] == 2
    assert result["broken"] == 0
