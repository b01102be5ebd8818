# SPDX-License-Identifier: Apache-2.0
"""The Ascend kernels of all ranks in one deterministic world, for the checks of tests/kernel_ranks.py."""

from __future__ import annotations

from typing import Any

from hal_ascend.check import World

from hal.config import ExpertParallelSpec

GUARD = 4096
"""Bytes of sentinel behind each window."""


class WorldRanks(World):
    """What kernel_ranks.Ranks is, on emulated PEs under a seeded, adversarial scheduler. ``options`` are the World's."""

    def __init__(self, spec: ExpertParallelSpec, ranks: int, nodes: int = 1, **options: Any) -> None:
        super().__init__(spec, ranks, nodes, slack=GUARD, **options)
        for window in self.windows:
            window[self.nbytes :] = 0xA5

    def check_sentinels(self) -> None:
        for window in self.windows:
            assert (window[self.nbytes :] == 0xA5).all(), "a kernel wrote past the end of its window"

    def __enter__(self) -> WorldRanks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check_sentinels()
        self.close()
