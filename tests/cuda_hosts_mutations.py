# SPDX-License-Identifier: Apache-2.0
"""Defects planted one at a time below the unchanged kernels of several hosts, in the words of GIN and of NVLink.

``python tests/cuda_hosts_mutations.py NUMBER`` says how the first seed that notices it does; without a number, how many of the
seeds notice each. tests/test_cuda_hosts.py asks for one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import cuda_emulator
import hosts_rounds
from hal_cuda import native
from hal_cuda.crossing import CHANNELS

import hal
from hal.config import TopologyConfig
from hal.errors import HalError

NETWORK_MUTATIONS = (
    "none",
    "strong_signal_is_weak",
    "flush_does_nothing",
    "signal_on_other_queue",
    "weak_signal_adds_twice",
)
"""emulation::NetworkMutation, in its order (kernels_cuda/emulation/gin.hpp)."""
SEEDS = range(1, 61)
"""The first few notice nearly always; a busy machine may need more."""


@dataclass(frozen=True)
class Defect:
    """``name`` is of NETWORK_MUTATIONS or of cuda_emulator.MUTATIONS."""

    name: str
    says: str
    schedule: str = "hierarchical"
    layout: str = "rank"
    shape: tuple[int, int] = (2, 2)
    faults: str | None = None
    """Of the network card; None = its defaults."""
    channels: str = "1x2"
    max_tokens: int = 24

    @property
    def case(self) -> hosts_rounds.HostsCase:
        return hosts_rounds.a_case(self.schedule, self.layout, self.shape, hidden=272, max_tokens=self.max_tokens)


FEW: Any = {"channels": "1x8", "max_tokens": 3}
"""So few cells that none is given back: a post to the network would force a warp's stores out, as it does on a GPU."""
DEFECTS = (
    Defect("strong_signal_is_weak", "a cell's signal covers nothing"),
    Defect("strong_signal_is_weak", "a row's signal covers nothing", "direct"),
    Defect("signal_on_other_queue", "a cell's signal goes to another queue"),
    Defect("signal_on_other_queue", "a row's signal goes to another queue", "direct"),
    Defect(
        "flush_does_nothing",
        "staged rows are overwritten before the network has read them",
        "direct",
        faults="reorder=2ms,source_early,read=2ms",
    ),
    Defect("weak_signal_adds_twice", "room is given back before its cells were taken"),
    Defect("release_is_relaxed", "rows stored over NVLink are signalled by a relaxed add", shape=(6, 2), **FEW),
    Defect("release_is_relaxed", "the same, direct", "direct", shape=(6, 2), **FEW),
    Defect("barrier_without_order", "the block's other warps' stores are not joined", shape=(4, 2)),
)


@contextmanager
def planted(defect: Defect, seed: int) -> Iterator[None]:
    library = native.load_emulated()
    network = defect.name if defect.name in NETWORK_MUTATIONS else "none"
    settings = {"HAL_SWNIC_SEED": str(seed), CHANNELS: defect.channels}
    if defect.faults is not None:
        settings["HAL_SWNIC_FAULTS"] = defect.faults
    below = "none" if network != "none" else defect.name
    with mock.patch.dict(os.environ, settings), cuda_emulator.emulator(seed, below):
        library.emulator_mutate_network(NETWORK_MUTATIONS.index(network))
        try:
            yield
        finally:
            library.emulator_mutate_network(0)


def run(defect: Defect, seed: int) -> str:
    """What some rounds end with: nothing, or the error."""
    config = hal.HalConfig("cuda", "gin_emulated", TopologyConfig(defect.case.nodes), timeout=4.0)
    with planted(defect, seed):
        try:
            hal.spawn(defect.case.ranks, hosts_rounds.plain_rounds, defect.case, [0, 1, 2, 3, 4, 5], config=config)
        except AssertionError:
            return "other bits than the reference's"
        except HalError as error:
            return type(error).__name__
    return ""


def caught(defect: Defect, seeds: range = SEEDS) -> str:
    """How the first seed that notices it does."""
    return next((end for seed in seeds if (end := run(defect, seed))), "")


def main() -> None:
    """``NUMBER``: how the first seed that notices that defect does. Without: how many of the seeds notice each."""
    if len(sys.argv) > 1:
        print(caught(DEFECTS[int(sys.argv[1])]))
        return
    for defect in DEFECTS:
        ends = [run(defect, seed) for seed in SEEDS[:12]]
        print(f"{defect.name:24} {defect.schedule:13} noticed by {sum(map(bool, ends))} of {len(ends)}: {defect.says}")


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # ranks of failed rounds may still be running
