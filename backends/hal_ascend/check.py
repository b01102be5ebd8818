# SPDX-License-Identifier: Apache-2.0
"""The shipped Ascend kernels under seeded, adversarial deliveries, judged by the reference.

Each seed is one schedule of cores, descriptors, pieces and completion entries within the UDMA rules (docs/ascend.md), and
gives the same run every time, so a failing seed is the replay. ``hal check``'s subjects explore the host kernels; this is
the same question put to the kernels that write descriptors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np

from hal.checker.rounds import Finding, InFlight, Report, Round, WrongBits
from hal.config import ExpertParallelSpec, TopologyConfig
from hal.errors import CapacityError, ContractError, HalError
from hal_ascend import _engine
from hal_ascend.engine import ELEMENTS, AscendEngine, ascend_shape, memory_bytes
from hal_ascend.session import LEAST_RING
from hal_ascend.trace import picture

CHUNK_BYTES = 64
BLOCK_BYTES = 512


class World:
    """Every rank's engine over one deterministic world. ``options`` are _engine.World's; ``slack`` bytes lie behind each
    window."""

    def __init__(
        self,
        spec: ExpertParallelSpec,
        ranks: int,
        nodes: int = 1,
        *,
        queues: int = 2,
        cores: int = 2,
        timeout: float = 20.0,
        slack: int = 0,
        **options: Any,
    ) -> None:
        self.spec, self.ranks, self.topology = spec, ranks, TopologyConfig(nodes)
        shape = ascend_shape(spec, ranks, nodes)
        self.nbytes = memory_bytes(shape)
        options.setdefault("sq_depth", 512)
        options.setdefault("cq_depth", 512)
        self.world = _engine.World(ranks, self.nbytes + slack, qp_num=queues + 2, **options)
        self.windows = [np.frombuffer(self.world.heap(rank), np.uint8) for rank in range(ranks)]
        self.launches = _engine.WorldEngines(self.world)
        element = ELEMENTS[spec.combined_dtype]
        self.engines = []
        for rank, window in enumerate(self.windows):
            base = window.ctypes.data
            kernels = _engine.Kernels(self.launches, shape, rank, queues, element, base, timeout, cores)
            self.engines.append(AscendEngine.over_kernels(kernels, spec, shape, base, window))
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

    def play(self, batch: Round | InFlight) -> None:
        """A batch through every rank's engine."""
        self.each(lambda rank: batch.play(self.engines[rank], rank))

    def close(self) -> None:
        self._pool.shutdown()


def check(
    spec: ExpertParallelSpec,
    ranks: int = 2,
    nodes: int = 1,
    *,
    seeds: Iterable[int] = range(40),
    rounds: int = 2,
    mutation: str = "none",
    **options: Any,
) -> Report:
    """On each seed ``rounds`` dispatches and combines of random routings, then dispatches in flight together (but for
    schedule hierarchical), then one round more. ``mutation`` names a planted defect of _engine.Mutation; ``options`` are
    _engine.World's. Rings are the smallest that the completion allows, and begin at 0, before their
    end, or before the end of 32-bit indices, by turns."""
    if mutation not in _engine.Mutation.__members__:
        raise ContractError(f"unknown mutation '{mutation}'; known: {', '.join(_engine.Mutation.__members__)}")
    chunk = BLOCK_BYTES if spec.completion == "flag_in_block" else CHUNK_BYTES
    depth = LEAST_RING
    if spec.completion == "strong_signal_no_cqe":
        depth = _smallest_ring(ascend_shape(spec, ranks, nodes))
    findings: list[Finding] = []
    runs = steps = 0
    for seed in seeds:
        first = (0, depth - 20, 2**32 - 20)[seed % 3]
        settings = {"chunk_bytes": chunk, "sq_depth": depth, "cq_depth": 128, "first_index": first, **options}
        world = World(
            spec, ranks, nodes, seed=seed, mutation=_engine.Mutation.__members__[mutation], timeout=1.0, **settings
        )
        try:
            for number in range(rounds):
                world.play(Round(spec, ranks, nodes, np.random.default_rng([7, number])))
            if spec.schedule != "hierarchical":
                world.play(InFlight(spec, ranks, np.random.default_rng([8])))
            world.play(Round(spec, ranks, nodes, np.random.default_rng([7, rounds])))
            problems = world.world.warnings
        except (_engine.Fault, _engine.Hang, HalError, WrongBits) as error:
            problems = [str(error) if isinstance(error, WrongBits) else f"{type(error).__name__}: {error}"]
        finally:
            world.close()
        runs, steps = runs + 1, steps + world.world.steps
        for problem in problems[:1]:
            drawn = picture(world.world.recent, ranks, seed, problem)
            findings.append(Finding(seed, problem, drawn))
    return Report(spec, ranks, nodes, runs, steps, tuple(findings))


def _smallest_ring(shape: Any) -> int:
    """Depth of a send ring that holds one full round; wraps and a round too many are then quick to reach."""
    for depth in (32, 64, 128, 256, 512, 1024):
        with suppress(CapacityError):
            _engine.require_ring(shape, depth)
            return depth
    return 2048
