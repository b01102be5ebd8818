# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads over the C++ kernels, and the reference's answer beside theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from hal_host import _engine
from hal_host.engine import HostEngine, buffer_bytes
from hal_host.session import ranks_of

from hal import reference
from hal.arrays import as_buffer, to_kind
from hal.bench.inputs import as_rows
from hal.config import ExpertParallelSpec, TopologyConfig

GUARD = 4096
"""Bytes of sentinel behind each window."""


class Ranks:
    """Engines of all ranks over one in-process world. ``lazy`` fabrics deliver as late and as shuffled as allowed.

    With ``members`` it is a view: the masked ranks have no engine (None).
    """

    def __init__(
        self,
        spec: ExpertParallelSpec,
        ranks: int,
        nodes: int = 1,
        *,
        lazy: bool = True,
        queues: int = 2,
        timeout: float = 60.0,
        members: _engine.Members | None = None,
        without_masked: bool = True,
    ) -> None:
        self.spec, self.ranks, self.topology = spec, ranks, TopologyConfig(nodes)
        members = members or _engine.Members()
        self.masked = ranks_of(members.lost)
        self.present = [r for r in range(ranks) if r not in self.masked or not without_masked]
        self.nbytes = buffer_bytes(spec, ranks, nodes, members)
        self.world = _engine.ThreadWorld(ranks, queues, self.nbytes + GUARD, timeout, lazy)
        self.fabrics = [_engine.ThreadFabric(self.world, r) for r in range(ranks)]
        self.windows = [
            np.frombuffer(_engine.memory(_engine.window_address(f), f.size, False), np.uint8) for f in self.fabrics
        ]
        for window in self.windows:
            window[self.nbytes :] = 0xA5
        self.engines: list[Any] = [None] * ranks
        for r in self.present:
            self.engines[r] = HostEngine.over_fabric(self.fabrics[r], spec, nodes, ranks, members)
        self._pool = ThreadPoolExecutor(ranks)

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """``work(rank)`` on every present rank at once; the first error is raised after all have ended."""
        futures = [self._pool.submit(work, rank) for rank in self.present]
        for future in futures:
            future.exception()
        return [future.result() for future in futures]

    def check_sentinels(self) -> None:
        for window in self.windows:
            assert (window[self.nbytes :] == 0xA5).all(), "a kernel wrote past the end of its window"

    def close(self) -> None:
        self._pool.shutdown()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.check_sentinels()
        self.close()


@dataclass
class Tokens:
    """One dispatch's input on all ranks."""

    x: list[Any]
    topk_idx: list[Any]
    topk_weights: list[Any]
    scales: list[Any] | None


def random_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    return as_rows(rng.standard_normal(shape), dtype)


def random_tokens(
    rng: np.random.Generator, spec: ExpertParallelSpec, counts: Sequence[int], *, none: float = 0.2, skew: float = 0.0
) -> Tokens:
    """Rows and distinct experts at random; ``none`` of the ids become -1, ``skew`` of the tokens go to the same experts."""

    def ids(tokens: int) -> Any:
        idx = (
            np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(tokens)])
            if tokens
            else np.empty((0, spec.top_k))
        )
        idx = np.where(rng.random((tokens, 1)) < skew, np.arange(spec.top_k), idx)
        return np.where(rng.random(idx.shape) < none, -1, idx).astype(rng.choice(["int32", "int64"]))

    return Tokens(
        [random_rows(rng, (t, spec.hidden), spec.dtype) for t in counts],
        [ids(t) for t in counts],
        [rng.random((t, spec.top_k)).astype(np.float32) for t in counts],
        [rng.random((t, spec.scale_dim)).astype(np.float32) for t in counts] if spec.scale_dim else None,
    )


def bits(array: Any) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def same_bits(name: str, got: Any, want: Any) -> None:
    if want is None:
        assert got is None, name
        return
    assert got.shape == want.shape, f"{name}: {got.shape}, want {want.shape}"
    assert got.dtype == want.dtype, f"{name}: {got.dtype}, want {want.dtype}"
    a = np.ascontiguousarray(got).view(np.uint8).reshape(-1)
    b = np.ascontiguousarray(want).view(np.uint8).reshape(-1)
    if not np.array_equal(a, b):
        first = int(np.argmax(a != b)) // want.dtype.itemsize
        at = np.unravel_index(first, want.shape)
        raise AssertionError(f"{name} differs first at {tuple(map(int, at))}: {got[at]}, want {want[at]}")


def arrays(received: Any) -> dict[str, Any]:
    names = ("x", "scales", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets")
    return {n: None if getattr(received, n) is None else to_kind(getattr(received, n), "numpy") for n in names}


def buffer(array: Any) -> Any:
    return None if array is None else as_buffer(array)


def dispatch_send(world: Ranks, rank: int, tokens: Tokens, state: Any = None) -> Any:
    scales = None if tokens.scales is None else tokens.scales[rank]
    idx = None if state is not None else tokens.topk_idx[rank]
    return world.engines[rank].dispatch_send(
        buffer(tokens.x[rank]), buffer(idx), buffer(tokens.topk_weights[rank]), buffer(scales), state, None
    )


def dispatch_all(world: Ranks, tokens: Tokens, states: Sequence[Any] | None = None) -> list[Any]:
    """Received of all ranks."""

    def work(rank: int) -> Any:
        pending = dispatch_send(world, rank, tokens, states[rank] if states is not None else None)
        return world.engines[rank].dispatch_recv(pending, None)

    return world.each(work)


def expect_dispatch(world: Ranks, tokens: Tokens, received: Sequence[Any]) -> reference.Routing:
    """Every plane of every rank against the reference; returns its handle."""
    want, handle = reference.dispatch(world.spec, tokens.x, tokens.topk_idx, tokens.topk_weights, tokens.scales)
    for rank in range(world.ranks):
        for name, array in arrays(received[rank]).items():
            same_bits(f"rank {rank} {name}", array, getattr(want[rank], name))
    return handle


def combine_all(
    world: Ranks,
    x: Sequence[Any],
    states: Sequence[Any],
    *,
    weighted: bool = False,
    weights: Sequence[Any] | None = None,
    bias: Sequence[Sequence[Any]] | None = None,
) -> list[Any]:
    def work(rank: int) -> Any:
        engine = world.engines[rank]
        w = None if weights is None else as_buffer(weights[rank])
        pending = engine.combine_send(as_buffer(x[rank]), states[rank], w, weighted, None)
        return engine.combine_recv(pending, [as_buffer(b) for b in bias[rank]] if bias is not None else (), None)

    return world.each(work)


def expect_combine(
    world: Ranks, handle: reference.Routing, x: Sequence[Any], results: Sequence[Any], **options: Any
) -> None:
    want = reference.combine(x, handle, topology=world.topology, **options)
    y, weights = want if isinstance(want, tuple) else (want, [None] * world.ranks)
    for rank in range(world.ranks):
        got_y, got_weights = results[rank]
        same_bits(f"rank {rank} y", to_kind(got_y, "numpy"), y[rank])
        same_bits(
            f"rank {rank} returned weights",
            None if got_weights is None else to_kind(got_weights, "numpy"),
            weights[rank],
        )


def round_trip(
    world: Ranks, rng: np.random.Generator, counts: Sequence[int], *, reuse: bool = False, **tokens_options: Any
) -> None:
    """Dispatch and every kind of combine of one random routing, compared with the reference bit for bit."""
    spec = world.spec
    tokens = random_tokens(rng, spec, counts, **tokens_options)
    received = dispatch_all(world, tokens)
    handle = expect_dispatch(world, tokens, received)
    if reuse:
        tokens.x = [random_rows(rng, array.shape, spec.dtype) for array in tokens.x]
        tokens.topk_weights = [rng.random(w.shape).astype(np.float32) for w in tokens.topk_weights]
        received = dispatch_all(world, tokens, [r.state for r in received])
        handle = expect_dispatch(world, tokens, received)
    states = [r.state for r in received]
    dtype = spec.combined_dtype
    y = [random_rows(rng, r.x.shape, dtype) for r in received]
    expect_combine(world, handle, y, combine_all(world, y, states))
    weights = [rng.random(r.topk_weights.shape).astype(np.float32) for r in received]
    bias = [[random_rows(rng, (t, spec.hidden), dtype) for _ in range(rng.integers(1, 3))] for t in counts]
    weighted = spec.layout == "expert"
    results = combine_all(world, y, states, weighted=weighted, weights=weights, bias=bias)
    expect_combine(world, handle, y, results, weighted=weighted, topk_weights=weights, bias=bias)
