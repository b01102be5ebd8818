# SPDX-License-Identifier: Apache-2.0
"""Rounds of dispatch and combine on engines, judged by the reference: what ``hal check BACKEND`` runs on each seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hal import reference
from hal.arrays import as_buffer, to_kind
from hal.backend import Received
from hal.bench.inputs import as_rows
from hal.checker.pictures import Picture
from hal.config import ExpertParallelSpec, TopologyConfig
from hal.errors import CapacityError


class WrongBits(Exception):
    """A result that is not the reference's."""


@dataclass(frozen=True)
class Finding:
    """What went wrong on which seed: wrong bits, what the emulated device found, a hang, an error of hal.errors."""

    seed: int
    text: str
    picture: Picture | None = field(default=None, compare=False)
    """The end of the run, as a diagram, where events are kept."""


@dataclass(frozen=True)
class Report:
    """What a backend's ``check`` found; every claim is bounded by ``runs`` and ``steps``."""

    spec: ExpertParallelSpec
    ranks: int
    nodes: int
    runs: int
    steps: int
    """Of all runs together: scheduler steps on Ascend, kernels run on CUDA."""
    findings: tuple[Finding, ...]


class Round:
    """One batch of all ranks: random tokens and routings, any number of them, and what each rank must get."""

    def __init__(self, spec: ExpertParallelSpec, ranks: int, nodes: int, rng: np.random.Generator) -> None:
        tokens = [int(rng.integers(0, spec.max_tokens + 1)) for _ in range(ranks)]
        self.x = [as_rows(rng.standard_normal((n, spec.hidden)), spec.dtype) for n in tokens]
        choices = [np.argsort(rng.random((n, spec.num_experts)), axis=1) for n in tokens]
        self.idx = [ids[:, : spec.top_k].astype(np.int64) for ids in choices]
        self.weights = [rng.random((n, spec.top_k)).astype(np.float32) for n in tokens]
        scales = [rng.random((n, spec.scale_dim)).astype(np.float32) for n in tokens]
        self.scales = scales if spec.scale_dim else None
        self.want, handle = reference.dispatch(spec, self.x, self.idx, self.weights, self.scales)
        self.answers = [as_rows(rng.standard_normal(w.x.shape), spec.combined_dtype) for w in self.want]
        self.sums = reference.combine(self.answers, handle, topology=TopologyConfig(nodes))

    def play(self, engine: Any, rank: int, *, whole: bool = False) -> None:
        """Dispatch and combine in halves, or ``whole`` where the engine does both halves in one go. Raises WrongBits."""
        received = self.dispatch(engine, rank, None, whole)
        self.combine(engine, rank, received.state, whole)

    def play_again(self, engine: Any, rank: int) -> None:
        """The same, then once more with the handle of the first dispatch."""
        state = self.dispatch(engine, rank, None, False).state
        self.combine(engine, rank, self.dispatch(engine, rank, state, False).state, False)

    def dispatch(self, engine: Any, rank: int, state: Any, whole: bool) -> Received:
        ids = None if state is not None else as_buffer(self.idx[rank])
        scale = None if self.scales is None else as_buffer(self.scales[rank])
        given = (as_buffer(self.x[rank]), ids, as_buffer(self.weights[rank]), scale, state, None)
        received: Received = (
            engine.dispatch(*given) if whole else engine.dispatch_recv(engine.dispatch_send(*given), None)
        )
        same_rows(rank, received, self.want[rank])
        return received

    def combine(self, engine: Any, rank: int, state: Any, whole: bool) -> None:
        answers = as_buffer(self.answers[rank])
        if whole:
            y = engine.combine(answers, state, None, False, (), None)[0]
        else:
            y = engine.combine_recv(engine.combine_send(answers, state, None, False, None), (), None)[0]
        same(rank, "y", y, self.sums[rank])


class InFlight:
    """As many dispatches as may be between their halves. Every rank sends as much as any other, so one that a send ring
    has no room for is refused on all of them, before anything is sent."""

    def __init__(self, spec: ExpertParallelSpec, ranks: int, rng: np.random.Generator) -> None:
        local = spec.num_experts // ranks
        token, position = np.arange(spec.max_tokens)[:, None], np.arange(spec.top_k)
        self.idx = [(rank + position) % ranks * local + (token + position // ranks) % local for rank in range(ranks)]
        most = max(1, spec.num_buffers - 1)
        self.x = [
            [as_rows(rng.standard_normal((len(i), spec.hidden)), spec.dtype) for i in self.idx] for _ in range(most)
        ]
        scales = [rng.random((len(i), spec.scale_dim)).astype(np.float32) for i in self.idx]
        self.scales = scales if spec.scale_dim else None
        self.want = [reference.dispatch(spec, rows, self.idx, None, self.scales)[0] for rows in self.x]

    def play(self, engine: Any, rank: int) -> None:
        """Raises WrongBits."""
        sent: list[Any] = []
        scale = None if self.scales is None else as_buffer(self.scales[rank])
        for rows in self.x:
            try:
                given = (as_buffer(rows[rank]), as_buffer(self.idx[rank]), None, scale, None, None)
                sent.append(engine.dispatch_send(*given))
            except CapacityError:
                break
        for pending, wanted in zip(sent, self.want, strict=False):
            same_rows(rank, engine.dispatch_recv(pending, None), wanted[rank])


def same_rows(rank: int, received: Received, want: reference.Dispatched) -> None:
    """Every field of a dispatch. Raises WrongBits."""
    fields: Sequence[str] = ("x", "scales", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets")
    for name in fields:
        if getattr(want, name) is not None:
            same(rank, name, getattr(received, name), getattr(want, name))


def same(rank: int, name: str, got: Any, want: Any) -> None:
    """Shape and every bit. Raises WrongBits."""
    given = to_kind(got, "numpy")
    if given.shape != want.shape or given.tobytes() != np.ascontiguousarray(want).tobytes():
        raise WrongBits(f"wrong bits: rank {rank}: {name} is not the reference's")
