# SPDX-License-Identifier: Apache-2.0
"""One size of one operation as one rank saw it, and what all ranks' samples say together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.traffic import Traffic


@dataclass(frozen=True)
class Plan:
    """What every rank measures."""

    operation: str
    sizes: tuple[int, ...]
    """Tokens on each rank (dispatch, combine) or bytes (put); one entry for signal."""
    warmup: int
    iterations: int
    progress: bool
    """Rank 0 tells on stderr which size it is at."""


@dataclass(frozen=True)
class Sample:
    """``seconds`` of each iteration on this rank, and how many elements of the last result were wrong."""

    size: int
    count: int
    """Elements that this rank received."""
    dtype: str
    traffic: Traffic
    seconds: NDArray[np.float64]
    wrong: int


@dataclass(frozen=True)
class Row:
    """All ranks: the slowest rank of each iteration, then minimum, median and 99th percentile over iterations."""

    size: int
    count: int
    dtype: str
    traffic: Traffic
    minimum: float
    median: float
    p99: float
    wrong: int

    @property
    def algbw(self) -> float:
        """Logical bytes a second at the median."""
        return self.traffic.logical / self.median

    @property
    def busbw(self) -> float:
        """Link bytes a second at the median."""
        return self.traffic.link / self.median


def measure(comm: Any, plan: Plan, size: int, step: Callable[[], object]) -> NDArray[np.float64]:
    """Seconds of each call of ``step``, after warming up; every rank starts from a barrier."""
    if plan.progress and comm.rank == 0:
        print(f"# {plan.operation} {size}: {plan.warmup} + {plan.iterations} iterations", file=sys.stderr, flush=True)
    seconds = np.zeros(plan.warmup + plan.iterations)
    for iteration in range(len(seconds)):
        comm.barrier()
        start = perf_counter()
        result = step()
        seconds[iteration] = perf_counter() - start
        del result  # Received rows are leased; keeping them would make the next call copy.
    return seconds[plan.warmup :]


def combined(samples: Sequence[Sample]) -> Row:
    """One size's samples of all ranks as a row of the table."""
    slowest = np.max([sample.seconds for sample in samples], axis=0)
    busiest = max(samples, key=lambda sample: sample.traffic.logical)
    return Row(
        size=busiest.size,
        count=max(sample.count for sample in samples),
        dtype=busiest.dtype,
        traffic=Traffic(
            max(sample.traffic.logical for sample in samples),
            max(sample.traffic.link for sample in samples),
            max(sample.traffic.local for sample in samples),
        ),
        minimum=float(slowest.min()),
        median=float(np.median(slowest)),
        p99=float(np.percentile(slowest, 99)),
        wrong=sum(sample.wrong for sample in samples),
    )
