# SPDX-License-Identifier: Apache-2.0
"""The shipped CUDA kernels on emulated GPUs under a seeded adversary, judged by the reference.

Each seed is one run: in which order threads go on, how long stores over NVLink are kept back until a fence or release
forces them out, and what the network does between hosts, all within what the PTX model and GIN promise (docs/cuda.md). Ranks
are threads of this process and share its processors, so a seed repeats the adversary's choices, not the whole run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hal.checker.rounds import Finding, InFlight, Report, Round, WrongBits
from hal.config import ExpertParallelSpec, HalConfig, TopologyConfig
from hal.errors import ContractError, HalError
from hal.launch import spawn
from hal_cuda import native
from hal_cuda.emulated import MUTATIONS
from hal_cuda.engine import COMBINE

if TYPE_CHECKING:
    from hal.communicator import Communicator

TRANSPORT = "gin_emulated"
SECONDS = 10.0
"""Of a wait: processors are shared, and a defect that hangs a rank ends a run only then."""
NETWORK_SEED = "HAL_SWNIC_SEED"


def check(
    spec: ExpertParallelSpec,
    ranks: int = 2,
    nodes: int = 1,
    *,
    seeds: Iterable[int] = range(40),
    rounds: int = 2,
    mutation: str = "none",
) -> Report:
    """On each seed ``rounds`` dispatches and combines of random routings, whole and in halves by turns, then a reused
    handle, then dispatches in flight together (but for schedule hierarchical), then one round more. ``mutation`` names a
    defect planted below the kernels (hal_cuda.emulated.MUTATIONS).

    Raises ContractError for what the kernels do not do, and for an unknown mutation.
    """
    if mutation not in MUTATIONS:
        raise ContractError(f"unknown mutation '{mutation}'; known: {', '.join(MUTATIONS)}")
    spec = replace(spec, timeout=SECONDS)
    config = HalConfig("cuda", TRANSPORT, TopologyConfig(nodes), timeout=SECONDS)
    batches = _batches(spec, ranks, nodes, rounds)
    findings: list[Finding] = []
    runs = steps = 0
    for seed in seeds:
        with _adversary(seed, MUTATIONS.index(mutation)):
            try:
                steps += sum(spawn(ranks, _rank, spec, batches, config=config))
            except ContractError:
                raise
            except (HalError, WrongBits) as error:
                text = str(error) if isinstance(error, WrongBits) else f"{type(error).__name__}: {error}"
                findings.append(Finding(seed, text))
        runs += 1
    return Report(spec, ranks, nodes, runs, steps, tuple(findings))


def _batches(spec: ExpertParallelSpec, ranks: int, nodes: int, rounds: int) -> list[tuple[str, Round | InFlight]]:
    """The same on every seed, so that they are made once."""
    made: list[tuple[str, Round | InFlight]] = []
    for number in range(rounds):
        batch = Round(spec, ranks, nodes, np.random.default_rng([7, number]))
        made.append(("halves" if number % 2 else "whole", batch))
    made.append(("again", Round(spec, ranks, nodes, np.random.default_rng([9]))))
    if spec.schedule != "hierarchical":
        made.append(("flight", InFlight(spec, ranks, np.random.default_rng([8]))))
    made.append(("whole", Round(spec, ranks, nodes, np.random.default_rng([7, rounds]))))
    return made


def _rank(comm: Communicator, spec: ExpertParallelSpec, batches: list[tuple[str, Any]]) -> int:
    """Kernels run."""
    kernels = 0
    with comm.expert_parallel(spec) as ep:
        engine = ep._engine
        for kind, batch in batches:
            if kind == "flight":
                batch.play(engine, comm.rank)
                kernels += 2 * len(batch.x)
            elif kind == "again":
                batch.play_again(engine, comm.rank)
                kernels += 6
            else:
                batch.play(engine, comm.rank, whole=kind == "whole")
                kernels += 2 if kind == "whole" else 4
    return kernels


@contextmanager
def _adversary(seed: int, mutation: int) -> Iterator[None]:
    """The emulator and the network with a seed and a defect; combine pulls and pushes by turns, unless it was chosen."""
    library = native.load_emulated()
    ours = {NETWORK_SEED: str(seed), COMBINE: os.environ.get(COMBINE) or ("pull", "push")[seed % 2]}
    before = {name: os.environ.get(name) for name in ours}
    library.emulator_configure(seed, 1)
    library.emulator_mutate(mutation)
    os.environ.update(ours)
    try:
        yield
    finally:
        library.emulator_mutate(0)
        library.emulator_configure(1, 1)
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
