# SPDX-License-Identifier: Apache-2.0
"""Rounds of dispatch and combine on emulated GPUs, compared with hal.reference; defects planted below the kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hal_cuda import native
from hal_cuda.emulated import MUTATIONS

import hal
from hal import reference
from hal.config import ExpertParallelSpec
from hal.errors import PeerTimeout

EQUAL, OTHER = "equal to the reference", "other bits than the reference's"
TIMEOUT = 20.0


@contextmanager
def emulator(seed: int, mutation: str = "none", adversary: bool = True) -> Iterator[None]:
    """Emulated GPUs of this process with a seed, and a defect of hal_cuda.emulated.MUTATIONS."""
    library = native.load_emulated()
    library.emulator_configure(seed, int(adversary))
    library.emulator_mutate(MUTATIONS.index(mutation))
    try:
        yield
    finally:
        library.emulator_mutate(0)
        library.emulator_configure(1, 1)


@dataclass(frozen=True)
class Scenario:
    """Rounds of one ExpertParallel. ``combine``: HAL_CUDA_COMBINE."""

    name: str
    ranks: int = 2
    combine: str = "pull"
    rounds: int = 3
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> ExpertParallelSpec:
        given = {"num_experts": 4, "top_k": 2, "hidden": 64, "max_tokens": 12, "dtype": "float32", **self.settings}
        return ExpertParallelSpec(**given)


class Round:
    """Every rank's input to one round, and what each must get."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        spec, ranks = scenario.spec, scenario.ranks
        rng = np.random.default_rng(number)
        sizes = [spec.max_tokens, 7, 3, 9][:ranks]
        self.x = [rng.standard_normal((size, spec.hidden)).astype(np.float32) for size in sizes]
        self.idx = [
            np.argsort(rng.random((size, spec.num_experts)), axis=1)[:, : spec.top_k].astype(np.int32) for size in sizes
        ]
        self.weights = [rng.random((size, spec.top_k)).astype(np.float32) for size in sizes]
        self.rows, handle = reference.dispatch(spec, self.x, self.idx, self.weights)
        self.answers = [rng.standard_normal(rows.x.shape).astype(np.float32) for rows in self.rows]
        self.back = [rng.random(rows.topk_weights.shape).astype(np.float32) for rows in self.rows]
        self.sums, self.weights_back = reference.combine(self.answers, handle, topk_weights=self.back)


class Skewed(Round):
    """Half of the tokens name the same experts; a tenth of all ids are -1, and a token may have no other."""

    def __init__(self, scenario: Scenario, number: int) -> None:
        super().__init__(scenario, number)
        rng = np.random.default_rng(number)
        spec = scenario.spec
        for ids in self.idx:
            ids[: len(ids) // 2] = np.arange(spec.top_k)
            ids[rng.random(ids.shape) < 0.1] = -1
        self.rows, handle = reference.dispatch(spec, self.x, self.idx, self.weights)
        self.answers = [rng.standard_normal(rows.x.shape).astype(np.float32) for rows in self.rows]
        self.back = [rng.random(rows.topk_weights.shape).astype(np.float32) for rows in self.rows]
        self.sums, self.weights_back = reference.combine(self.answers, handle, topk_weights=self.back)


def run(scenario: Scenario, rounds: list[Round]) -> str:
    """What the rounds end with: :data:`EQUAL`, :data:`OTHER`, or the error."""

    def body(comm: hal.Communicator) -> bool:
        ep = comm.expert_parallel(scenario.spec)
        me, equal = comm.rank, True
        for one in rounds:
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert"):
                equal &= getattr(out, name).tobytes() == getattr(one.rows[me], name).tobytes()
            y, back = ep.combine(one.answers[me], out.handle, topk_weights=one.back[me])
            equal &= y.tobytes() == one.sums[me].tobytes() and back.tobytes() == one.weights_back[me].tobytes()
            del out, y, back
        return equal

    before = os.environ.get("HAL_CUDA_COMBINE")
    os.environ["HAL_CUDA_COMBINE"] = scenario.combine
    try:
        equal = hal.spawn(scenario.ranks, body, backend="cuda", transport="gin_emulated", timeout=TIMEOUT)
    except PeerTimeout as error:
        return f"PeerTimeout in '{error.stage}'"
    finally:
        os.environ.pop("HAL_CUDA_COMBINE")
        if before is not None:
            os.environ["HAL_CUDA_COMBINE"] = before
    return EQUAL if all(equal) else OTHER


RANK = Scenario("dispatch of layout rank, combine by pull")
PUSH = Scenario("dispatch of layout rank, combine by push", combine="push")
EXPERT = Scenario("dispatch of layout expert, combine by pull", settings={"layout": "expert"})


HEALTHY_SEEDS, SEEDS = range(6), range(60)


@dataclass(frozen=True)
class Defect:
    """A member of :data:`MUTATIONS` and where it must be noticed."""

    name: str
    says: str
    scenario: Scenario


@dataclass(frozen=True)
class Verdict:
    healthy: set[str]
    """How the scenario ends without the defect, on :data:`HEALTHY_SEEDS`."""
    caught: str | None
    """How it ends with it, on the first of :data:`SEEDS` on which it is not :data:`EQUAL`."""


def judge(defect: Defect) -> Verdict:
    rounds = [Round(defect.scenario, number) for number in range(defect.scenario.rounds)]

    def end(seed: int, mutation: str) -> str:
        with emulator(seed, mutation):
            return run(defect.scenario, rounds)

    healthy = {end(seed, "none") for seed in HEALTHY_SEEDS}
    return Verdict(healthy, next((text for s in SEEDS if (text := end(s, defect.name)) != EQUAL), None))


def line(defect: Defect) -> str:
    """Of the table in docs/cuda.md."""
    return f"| {defect.says} | {defect.scenario.name} |"


DEFECTS = (
    Defect("release_is_relaxed", "`red.release` and `st.release` release nothing", RANK),
    Defect("acquire_is_relaxed", "`ld.acquire` acquires nothing", RANK),
    Defect("acquire_is_relaxed", "`ld.acquire` acquires nothing", EXPERT),
    Defect("barrier_without_order", "`__syncthreads` orders nothing", RANK),
    Defect("fence_does_nothing", "`__threadfence_system` does nothing", EXPERT),
    Defect("fence_does_nothing", "`__threadfence_system` does nothing", PUSH),
    Defect("fence_at_gpu_scope", "`__threadfence_system` acts as `__threadfence`", EXPERT),
    Defect("fence_at_gpu_scope", "`__threadfence_system` acts as `__threadfence`", PUSH),
    Defect("fence_at_gpu_scope", "`__threadfence_system` acts as `__threadfence`", RANK),
    Defect("gpu_fence_does_nothing", "`__threadfence` does nothing", RANK),
    Defect("copies_unawaited", "a wait for a bulk copy waits for nothing", RANK),
)
