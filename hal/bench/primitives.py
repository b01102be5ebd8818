# SPDX-License-Identifier: Apache-2.0
"""Put and signal, timed and checked, on one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.arrays import to_kind
from hal.bench.sample import Plan, Sample, measure
from hal.config import Settings
from hal.errors import ContractError
from hal.ordering import Order
from hal.placing import fetched
from hal.traffic import Traffic

ROUND_TRIPS = 100
"""In one iteration of signal: one alone is too short for the clock."""


def run_rank(comm: Any, settings: Settings, plan: Plan) -> list[Sample]:
    """A sample for each size."""
    del settings
    if plan.operation == "signal":
        return [_signal(comm, plan)]
    window = comm.window(max(plan.sizes))
    try:
        return [_put(comm, window, plan, at, nbytes) for at, nbytes in enumerate(plan.sizes)]
    finally:
        comm.barrier()
        window.free()


def _put(comm: Any, window: Any, plan: Plan, at: int, nbytes: int) -> Sample:
    """Every rank writes to the next one: a relaxed put and the strong signal behind it, until its own has come."""
    target, source = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    queue, mine = comm.queue(0), _pattern(comm.rank, nbytes)
    arrived = at * (plan.warmup + plan.iterations)  # Signals count generations over all sizes.

    def step() -> None:
        nonlocal arrived
        arrived += 1
        queue.put(window, 0, mine, target, order=Order.RELAXED, signal=(0, 1))
        comm.wait(0, at_least=arrived, source=source)

    seconds = measure(comm, plan, nbytes, step)
    wrong = int(np.count_nonzero(_content(window)[:nbytes] != _pattern(source, nbytes)))
    alone = comm.world_size == 1
    return Sample(
        nbytes, nbytes, "uint8", Traffic(nbytes, 0 if alone else nbytes, nbytes if alone else 0), seconds, wrong
    )


def _content(window: Any) -> Any:
    """This rank's part, wherever it is."""
    buffer = window.buffer
    return fetched(to_kind(buffer, "numpy" if buffer.device == "cpu" else "torch"))


def _signal(comm: Any, plan: Plan) -> Sample:
    """Ranks 0 and 1 answer each other; half a round trip is what one signal takes. Other ranks stand by."""
    if comm.world_size < 2:
        raise ContractError("hal bench signal needs two ranks; say ranks=2")
    queue, peer = comm.queue(0), 1 - comm.rank
    seen = 0

    def step() -> None:
        nonlocal seen
        if comm.rank > 1:
            return
        for _ in range(ROUND_TRIPS):
            seen += 1
            if comm.rank == 0:
                queue.signal(0, peer, 1)
            comm.wait(0, at_least=seen, source=peer)
            if comm.rank == 1:
                queue.signal(0, peer, 1)

    seconds = measure(comm, plan, 8, step) / (2 * ROUND_TRIPS)
    wrong = int(comm.rank < 2 and comm.read_signal(0) != seen)
    return Sample(8, 1, "uint64", Traffic(8, 8, 0), seconds, wrong)


def _pattern(rank: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that differ by rank and by size."""
    return np.random.default_rng([rank, nbytes]).integers(0, 256, nbytes, np.uint8)
