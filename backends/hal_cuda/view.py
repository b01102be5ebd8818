# SPDX-License-Identifier: Apache-2.0
"""What a rank has of one view of who is left: a smaller run, and its dispatch and combine as the whole run numbers things.

A view is a session of its members alone (:meth:`CudaSession.among`), with a communicator, windows, sockets and abort words of
its own, and a :class:`CudaEngine` over it, whose ranks and experts are numbered without the lost ones. So the kernels know
nothing of lost ranks, and whatever a lost rank still writes lies in memory that the others no longer use. What is left to do is
here: ids into the view's numbers, rows into the caller's places (src/left.cu), and handles of earlier views into this one's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hal.arrays import ITEMSIZE, Buffer
from hal.backend import Received
from hal_cuda.engine import CudaEngine, State
from hal_cuda.memory import Allocator

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_cuda.meeting import Ends, Meeting
    from hal_cuda.session import CudaSession

KERNEL_SECONDS = 86400.0
"""The time limit of a wait in a kernel. The host ends it earlier, when it has itself waited for the time limit."""
Rows = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Routing:
    """The engine's part of a handle."""

    ranks: tuple[int, ...]
    """Of the view in which it was made."""
    state: State
    rows: int
    """Of the caller's arrays."""
    over_hosts: bool
    """It was made over several hosts."""
    moved: _Moved | None = None
    """What it is in the last view, other than its own, in which it was used."""


@dataclass(slots=True, eq=False)
class _Moved:
    view: View
    state: State
    rows: _Uploaded
    """For each row of this state, the row of the caller's arrays; -1 = padding."""


@dataclass(slots=True, eq=False)
class _Uploaded:
    """Numbers in device memory."""

    memory: Buffer
    count: int


class View:
    """Dispatch and combine of one view."""

    def __init__(
        self, base: CudaSession, spec: ExpertParallelSpec, meeting: Meeting, ends: Ends, stream: int
    ) -> None:
        """Collective among the members, who are those of ``meeting``. ``base`` is the communicator's session; ``stream`` is for
        callers that have none."""
        self.ranks, self.ends = tuple(meeting.ranks), ends
        self._all, self._spec = base.world_size, spec
        self._local = spec.num_experts // self._all
        self._whole = len(self.ranks) == self._all
        self._fixed = spec.schedule == "latency"
        nodes = base.config.topology.nodes
        if not self._whole:
            nodes = len(self.ranks) if nodes == self._all else 1
        self.session = base.among(meeting, nodes, stream)
        self._library, self._device = base.library, base.device
        try:
            self.engine = self._make_engine()
        except BaseException:
            self.session.abort("it could not make a view")
            self.session.close()
            raise
        self._allocator = Allocator(base.library, base.device, base.device_name)
        if not self._whole:
            self._numbers = self._upload(self._numbering(range(self._all)))
            self._places = self._upload(self._caller_rows(self.ranks)) if self._fixed else None

    def _make_engine(self) -> CudaEngine:
        spec = replace(self._spec, timeout=KERNEL_SECONDS, on_peer_loss="error")
        if not self._whole:
            # One receive slot more, for what moves a handle of an earlier view into this one (_move).
            experts, buffers = self._local * len(self.ranks), spec.num_buffers + 1
            spec = replace(spec, num_experts=experts, num_buffers=buffers)
            if self._fixed:
                spec = replace(spec, alignment=1)  # rows are put into the caller's places, which are aligned
        engine = self.session.expert_parallel(spec)
        assert isinstance(engine, CudaEngine)
        return engine

    def leave(self) -> None:
        """No kernel of this rank works in the view any more, and those of the others need not wait for this rank."""
        self.session.abort("it goes on in a later view")
        self.session.end_waits()
        self.engine.drain()
        self.session.close()

    # --- dispatch --------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        routing: Routing | None,
        stream: int | None,
    ) -> Received:
        ids, state = self._route(x, topk_idx, routing, stream)
        return self._received(self.engine.dispatch(x, ids, topk_weights, scales, state, stream), x, stream)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        routing: Routing | None,
        stream: int | None,
    ) -> Any:
        ids, state = self._route(x, topk_idx, routing, stream)
        # With the ids, which a launch may have yet to read; the caller keeps the others.
        return self.engine.dispatch_send(x, ids, topk_weights, scales, state, stream, arrays_last=True), x, ids

    def dispatch_recv(self, pending: Any, stream: int | None) -> Received:
        sent, x, _ = pending
        return self._received(self.engine.dispatch_recv(sent, stream), x, stream)

    def _route(
        self, x: Buffer, topk_idx: Buffer | None, routing: Routing | None, stream: int | None
    ) -> tuple[Buffer | None, State | None]:
        if routing is not None:
            if routing.ranks == self.ranks:
                return None, routing.state
            return self._ids_of(routing, x, stream), None  # counts are exchanged once more
        assert topk_idx is not None
        if self._whole:
            return topk_idx, None
        return self._renumbered(topk_idx, self._numbers, x, stream), None

    def _renumbered(self, ids: Buffer, numbers: _Uploaded, like: Buffer, stream: int | None) -> Buffer:
        on = self.engine._on(stream)
        out = self._allocator.empty(like.owner, ids.shape, ids.dtype, on)
        count, wide, topk = ids.shape[0] * ids.shape[1], int(ids.dtype == "int64"), ids.shape[1]
        numbered = (numbers.memory.ptr, numbers.count)
        self._library.renumber(self._device, ids.ptr, wide, count, topk, *numbered, out.ptr, on)
        return out

    def _ids_of(self, routing: Routing, like: Buffer, stream: int | None) -> Buffer:
        """The ids of a handle of an earlier view."""
        numbers = self._upload(self._numbering(routing.ranks))
        shape = (routing.state.tokens, self._spec.top_k)
        ids = Buffer(routing.state.arrays.idx, shape, "int32", self.session.device_name)
        out = self._renumbered(ids, numbers, like, stream)
        self._library.stream_sync(self._device, self.engine._on(stream))  # the numbers may go
        return out

    def _received(self, got: Received, x: Buffer, stream: int | None) -> Received:
        self._finish(stream)
        if self._fixed and not self._whole:
            got = self._spread(got, x, stream)
        return replace(got, state=Routing(self.ranks, got.state, got.x.shape[0], self.engine.over_hosts))

    def _spread(self, got: Received, x: Buffer, stream: int | None) -> Received:
        """Schedule latency: rows into the places that they have among those of all ranks, where lost ones have padding."""
        assert self._places is not None
        on, per_rank, rows = self.engine._on(stream), self._spec.max_tokens, got.x.shape[0]
        full = rows // len(self.ranks) * self._all

        def spread(plane: Buffer, fill: int) -> Buffer:
            out = self._allocator.empty(x.owner, (full, *plane.shape[1:]), plane.dtype, on)
            self._library.memset(self._device, out.ptr, fill, out.nbytes, on)
            assert self._places is not None
            self._move_rows(plane, out, None, self._places, on)
            return out

        offsets = None
        if got.expert_offsets is not None:
            starts = np.arange(self._local + 1, dtype=np.int64) * self._all * per_rank
            offsets = self._allocator.empty(x.owner, starts.shape, "int64", on)
            self._library.copy(self._device, offsets.ptr, starts.ctypes.data, starts.nbytes, on)
        spread_out = replace(
            got,
            x=spread(got.x, 0),
            scales=None if got.scales is None else spread(got.scales, 0),
            topk_idx=spread(got.topk_idx, 0xFF),
            topk_weights=spread(got.topk_weights, 0),
            expert_offsets=offsets,
        )
        self._library.stream_sync(self._device, on)  # `starts` and the slot may go
        return spread_out

    # --- combine ---------------------------------------------------------------------------------------------------

    def combine(
        self,
        x: Buffer,
        routing: Routing,
        topk_weights: Buffer | None,
        weighted: bool,
        bias: Sequence[Buffer],
        stream: int | None,
    ) -> tuple[Buffer, Buffer | None]:
        state, x, weights = self._answers(x, routing, topk_weights, stream)
        out = self.engine.combine(x, state, weights, weighted, bias, stream)
        self._finish(stream)
        return out

    def combine_send(
        self, x: Buffer, routing: Routing, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> Any:
        state, x, weights = self._answers(x, routing, topk_weights, stream)
        return self.engine.combine_send(x, state, weights, weighted, stream)

    def combine_recv(
        self, pending: Any, bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        out = self.engine.combine_recv(pending, bias, stream)
        self._finish(stream)
        return out

    def _answers(
        self, x: Buffer, routing: Routing, weights: Buffer | None, stream: int | None
    ) -> tuple[State, Buffer, Buffer | None]:
        """The handle's state in this view, and the caller's rows and weights in its places."""
        self.engine._refuse_open_combine()
        on = self.engine._on(stream)
        rows: _Uploaded | None
        if routing.ranks == self.ranks:
            state = routing.state
            rows = self._places if self._fixed and not self._whole else None
        else:
            if routing.moved is None or routing.moved.view is not self:
                routing.moved = self._move(routing, x, stream)
            state, rows = routing.moved.state, routing.moved.rows
        if rows is None:
            return state, x, weights

        def gathered(plane: Buffer) -> Buffer:
            out = self._allocator.empty(x.owner, (rows.count, *plane.shape[1:]), plane.dtype, on)
            self._move_rows(plane, out, rows, None, on)
            return out

        return state, gathered(x), None if weights is None else gathered(weights)

    # --- handles of earlier views ----------------------------------------------------------------------------------

    def _move(self, routing: Routing, like: Buffer, stream: int | None) -> _Moved:
        """Collective. The routing is dispatched again in this view, with its own ids and weights; then, by that handle, with
        its rows' earlier numbers in place of the weights, which tells each owner where its rows lay. The rows that travel are
        empty."""
        engine, spec, old = self.engine, self._spec, routing.state
        on = engine._on(stream)
        ids = self._ids_of(routing, like, stream)
        x = self._cleared((old.tokens, spec.hidden), spec.dtype, like, on)
        scales = self._cleared((old.tokens, spec.scale_dim), "float32", like, on) if spec.scale_dim else None
        shape, device = (old.tokens, spec.top_k), self.session.device_name
        # Handles of layout rank keep no weights.
        weights = Buffer(old.arrays.weights, shape, "float32", device) if spec.layout == "expert" else None
        state = engine.dispatch(x, ids, weights, scales, None, stream).state
        named = self._upload(self._rows_at_owners(routing, on))
        numbers = Buffer(named.memory.ptr, shape, "float32", device)
        got = engine.dispatch(x, None, numbers, scales, state, stream)
        self._finish(stream)
        places = self._download(got.topk_weights.ptr, got.topk_weights.shape, on)
        real = self._download(got.topk_idx.ptr, got.topk_idx.shape, on) >= 0
        rows = np.where(real, places, -1)
        if spec.layout == "rank":
            rows = rows.max(axis=1, initial=-1)  # every position that is the owner's names the one row
        if self._fixed and len(routing.ranks) < self._all:
            there = self._caller_rows(routing.ranks)
            rows = np.where(rows < 0, -1, there[np.maximum(rows, 0)])
        return _Moved(self, state, self._upload(rows.astype(np.int32)))

    def _rows_at_owners(self, routing: Routing, on: int) -> Rows:
        """[tokens, top_k] of a handle: the row of each entry at its owner, as the ranks of its view number their rows."""
        arrays, by_expert, ranks = routing.state.arrays, self._spec.layout == "expert", len(routing.ranks)
        shape = (routing.state.tokens, self._spec.top_k)
        ids = np.maximum(self._download(arrays.idx, shape, on), 0)
        owners = ids // self._local
        there: Rows
        if routing.over_hosts:  # counted from this rank's first row at that expert or rank (struct Lists)
            first = self._download(arrays.lists, (ranks * self._local if by_expert else ranks,), on)
            there = self._download(arrays.pos, shape, on) + first[ids if by_expert else owners]
        elif by_expert:
            there = self._download(arrays.pos, shape, on)
        else:
            rows = self._download(arrays.pos, (routing.state.tokens, ranks), on)
            there = np.take_along_axis(rows, owners, axis=1)
        return there

    def _numbering(self, ranks: Sequence[int]) -> Rows:
        """The number in this view of each expert of ``ranks``, in their order; -1: its rank is lost."""
        first = [self.ranks.index(r) * self._local if r in self.ranks else -1 for r in ranks]
        return np.array([-1 if f < 0 else f + e for f in first for e in range(self._local)], np.int32)

    def _caller_rows(self, ranks: Sequence[int]) -> Rows:
        """Schedule latency: for each row of a view of ``ranks``, its row among those of all ranks."""
        groups = self._local if self._spec.layout == "expert" else 1
        sources = np.arange(groups)[:, None] * self._all + np.array(ranks)[None, :]
        places = sources.reshape(-1, 1) * self._spec.max_tokens + np.arange(self._spec.max_tokens)[None, :]
        rows: Rows = places.reshape(-1).astype(np.int32)
        return rows

    # --- memory ----------------------------------------------------------------------------------------------------

    def _finish(self, stream: int | None) -> None:
        """The launch has ended; PeerTimeout or ContractError if it ended badly."""
        self._library.stream_sync(self._device, self.engine._on(stream))
        self.engine._check()

    def _cleared(self, shape: tuple[int, ...], dtype: str, like: Buffer, on: int) -> Buffer:
        out = self._allocator.empty(like.owner, shape, dtype, on)
        self._library.memset(self._device, out.ptr, 0, out.nbytes, on)
        return out

    def _move_rows(self, source: Buffer, target: Buffer, from_: _Uploaded | None, to: _Uploaded | None, on: int) -> None:
        rows = from_ or to
        assert rows is not None
        row_bytes = ITEMSIZE[source.dtype]
        for extent in source.shape[1:]:
            row_bytes *= extent
        from_ptr, to_ptr = (0 if numbers is None else numbers.memory.ptr for numbers in (from_, to))
        self._library.move_rows(self._device, source.ptr, target.ptr, from_ptr, to_ptr, rows.count, row_bytes, on)

    def _upload(self, numbers: Rows) -> _Uploaded:
        numbers = np.ascontiguousarray(numbers)
        on = self.session.stream
        memory = self._allocator.empty(None, (max(numbers.size, 1),), "int32", on)
        if numbers.size:
            self._library.copy(self._device, memory.ptr, numbers.ctypes.data, numbers.nbytes, on)
        self._library.stream_sync(self._device, on)
        return _Uploaded(memory, numbers.size)

    def _download(self, ptr: int, shape: tuple[int, ...], on: int) -> Rows:
        out = np.empty(shape, np.int32)
        if out.size:
            self._library.copy(self._device, out.ctypes.data, ptr, out.nbytes, on)
            self._library.stream_sync(self._device, on)
        return out
