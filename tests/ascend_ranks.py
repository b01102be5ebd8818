# SPDX-License-Identifier: Apache-2.0
"""The Ascend kernels of all ranks in one deterministic world, for the checks of tests/kernel_ranks.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from hal_ascend import _engine
from hal_ascend.engine import ELEMENTS, AscendEngine, ascend_shape, memory_bytes
from hal_host.engine import combine_dtype

from hal.config import ExpertParallelSpec, TopologyConfig

GUARD = 4096


class WorldRanks:
    """What kernel_ranks.Ranks is, on emulated PEs under a seeded, adversarial scheduler. ``options`` are the World's."""

    def __init__(
        self,
        spec: ExpertParallelSpec,
        ranks: int,
        nodes: int = 1,
        *,
        queues: int = 2,
        cores: int = 2,
        timeout: float = 20.0,
        **options: Any,
    ) -> None:
        self.spec, self.ranks, self.topology = spec, ranks, TopologyConfig(nodes)
        shape = ascend_shape(spec, ranks, nodes)
        self.nbytes = memory_bytes(shape)
        options.setdefault("sq_depth", 512)
        options.setdefault("cq_depth", 512)
        self.world = _engine.World(ranks, self.nbytes + GUARD, qp_num=queues + 2, **options)
        self.windows = [np.frombuffer(self.world.heap(r), np.uint8) for r in range(ranks)]
        for window in self.windows:
            window[self.nbytes :] = 0xA5
        self.launches = _engine.WorldEngines(self.world)
        element = ELEMENTS[combine_dtype(spec)]
        self.engines = []
        for rank in range(ranks):
            base = self.windows[rank].ctypes.data
            kernels = _engine.Kernels(self.launches, shape, rank, queues, element, base, timeout, cores)
            self.engines.append(AscendEngine.over_kernels(kernels, spec, shape, base, self.windows[rank]))
        self._pool = ThreadPoolExecutor(ranks)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """``work(rank)`` on every rank at once; the first error is raised after all have ended."""
        for _ in range(self.ranks):
            self.launches.enter()

        def run(rank: int) -> Any:
            try:
                return work(rank)
            finally:
                self.launches.leave()

        futures = [self._pool.submit(run, rank) for rank in range(self.ranks)]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def check_sentinels(self) -> None:
        for window in self.windows:
            assert (window[self.nbytes :] == 0xA5).all(), "a kernel wrote past the end of its window"

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> WorldRanks:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.check_sentinels()
        self.close()
