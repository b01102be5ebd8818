# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of one ExpertParallel on the host: leases of receive slots around the C++ kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hal.arrays import ITEMSIZE, NUMPY_DTYPES, Buffer
from hal.backend import Received
from hal.errors import CapacityError, ContractError
from hal_host import _engine
from hal_host._engine import AnyFabric, AnyKernels, ShmFabric, ShmKernels, ThreadFabric, ThreadKernels

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_host.session import HostSession

_KERNELS: dict[type, Any] = {ShmFabric: ShmKernels, AnyFabric: AnyKernels, ThreadFabric: ThreadKernels}
_READS_SOURCE_LATER = (AnyFabric, ThreadFabric)
"""Fabrics that may still read a put's source after the call."""


def shape_of(spec: ExpertParallelSpec, ranks: int, nodes: int) -> _engine.EpShape:
    """The settings as the C++ side takes them; :func:`hal_host._engine.buffer_parts` explains its bytes."""
    shape = _engine.EpShape()
    shape.ranks, shape.nodes = ranks, nodes
    for name in ("num_experts", "top_k", "max_tokens", "alignment", "num_buffers", "scale_dim"):
        setattr(shape, name, getattr(spec, name))
    shape.agreed = spec.on_peer_loss == "mask"
    shape.row_bytes = spec.hidden * ITEMSIZE[spec.dtype]
    shape.combine_row_bytes = spec.hidden * ITEMSIZE[spec.combined_dtype]
    for name in ("layout", "schedule", "completion"):
        kind = getattr(_engine, name.capitalize())
        if getattr(spec, name) not in kind.__members__:
            raise ContractError(f"{name} '{getattr(spec, name)}' is not one of {', '.join(kind.__members__)}")
        setattr(shape, name, kind.__members__[getattr(spec, name)])
    if spec.schedule == "latency" and spec.layout == "expert" and ranks * spec.max_tokens % spec.alignment:
        raise ContractError(
            f"schedule 'latency' starts each expert's group after {ranks} ranks * {spec.max_tokens} max_tokens rows, "
            f"which is not a multiple of alignment {spec.alignment}: choose max_tokens so that it is"
        )
    return shape


def buffer_bytes(spec: ExpertParallelSpec, ranks: int, nodes: int, members: _engine.Members) -> int:
    """Of the window of one view."""
    shape = _engine.shape_in_view(shape_of(spec, ranks, nodes), members)
    return sum(size for _, size in _engine.buffer_parts(shape))


class Lease:
    """A receive slot in use. It is free again when the last array over its rows is gone."""

    __slots__ = ("_free", "_keep", "slot")

    def __init__(self, free: list[int], keep: Any) -> None:
        self._free, self._keep = free, keep
        self.slot = free.pop()

    def __del__(self) -> None:
        # list.append is atomic: views may die in any thread.
        self._free.append(self.slot)


class _Dispatch:
    """A dispatch between its halves."""

    __slots__ = ("lease", "round", "source")

    def __init__(self, lease: Lease, round_: Any, source: Any) -> None:
        self.lease, self.round, self.source = lease, round_, source


class _Combine:
    __slots__ = ("round", "source", "weights")

    def __init__(self, round_: Any, source: Any, weights: bool) -> None:
        self.round, self.source, self.weights = round_, source, weights


class _Planes(NamedTuple):
    """What a dispatch gives beside its rows, in the order of :class:`hal.backend.Received`."""

    scales: Buffer | None
    topk_idx: Buffer
    topk_weights: Buffer
    tokens_per_expert: Buffer
    expert_offsets: Buffer | None


class HostEngine:
    """The host's :class:`hal.backend.Engine`."""

    device = "cpu"

    def __init__(self, session: HostSession, spec: ExpertParallelSpec) -> None:
        """Collective: the window is allocated on every rank."""
        nodes = session.config.topology.nodes
        everyone = _engine.Members()
        self.buffer_bytes = buffer_bytes(spec, session.world_size, nodes, everyone)
        self._session = session
        self._window: int | None = session.allocate(self.buffer_bytes)
        fabric = session.fabric(self._window, spec.timeout)
        self._start(fabric, spec, shape_of(spec, session.world_size, nodes), everyone)

    @classmethod
    def over_fabric(
        cls, fabric: Any, spec: ExpertParallelSpec, nodes: int, ranks: int, members: _engine.Members | None = None
    ) -> HostEngine:
        """An engine over a fabric whose window is large enough and zeroed; the caller owns the window."""
        self = cls.__new__(cls)
        members = members or _engine.Members()
        self.buffer_bytes = buffer_bytes(spec, ranks, nodes, members)
        self._window = None
        self._start(fabric, spec, shape_of(spec, ranks, nodes), members)
        return self

    def _start(self, fabric: Any, spec: ExpertParallelSpec, shape: Any, members: _engine.Members) -> None:
        self.spec = spec
        self._fabric = fabric
        element = _engine.Element.__members__[spec.combined_dtype]
        self._kernels = _KERNELS[type(fabric)](fabric, shape, element, members)
        self._base = _engine.window_address(fabric)
        self._local_experts = spec.num_experts // shape.ranks
        self._free = list(range(spec.num_buffers - 1, -1, -1))
        # How many dispatches may be in flight depends on the settings alone, never on what a rank happens to hold, so
        # all ranks refuse alike. One slot is for a view, the others are for them.
        self._in_flight, self._flight_limit = 0, max(1, spec.num_buffers - 1)
        # Without completion entries nothing says early that a source is free, so the kernels read a copy where the
        # fabric does not read sources at once.
        self._copies_sources = spec.completion == "strong_signal_no_cqe" and isinstance(fabric, _READS_SOURCE_LATER)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Any | None,
        stream: int | None,
    ) -> _Dispatch:
        if self._in_flight == self._flight_limit:
            raise CapacityError(
                f"dispatches in flight with num_buffers={self.spec.num_buffers}",
                self._in_flight + 1,
                self._flight_limit,
                "receive an earlier dispatch first, or raise num_buffers",
            )
        lease = Lease(self._free, self._fabric)
        source = copy_of(x) if self._copies_sources else x
        try:
            round_ = self._kernels.dispatch_send(
                lease.slot,
                source.ptr,
                x.shape[0],
                topk_idx.ptr if topk_idx else 0,
                topk_idx is not None and topk_idx.dtype == "int64",
                topk_weights.ptr if topk_weights else 0,
                scales.ptr if scales else 0,
                state,
            )
        except BaseException:
            del lease  # whoever keeps the error keeps this frame, and must not keep the slot
            raise
        self._in_flight += 1
        return _Dispatch(lease, round_, source)

    def dispatch_recv(self, pending: _Dispatch, stream: int | None) -> Received:
        planes = self._planes(pending)
        self._receive_dispatch(pending, planes)
        return self._hand_out(pending, planes)

    def _planes(self, pending: _Dispatch) -> _Planes:
        """Room for what a dispatch gives beside its rows."""
        spec, rows = self.spec, self._kernels.rows(pending.round)
        per_row = (rows, spec.top_k) if spec.layout == "rank" else (rows,)
        return _Planes(
            _empty((rows, spec.scale_dim), "float32") if spec.scale_dim else None,
            _empty(per_row, "int32"),
            _empty(per_row, "float32"),
            _empty((self._local_experts,), "int32"),
            _empty((self._local_experts + 1,), "int64") if spec.layout == "expert" else None,
        )

    def _receive_dispatch(self, pending: _Dispatch, planes: _Planes) -> None:
        self._in_flight -= 1
        scales, topk_idx, topk_weights, counts, offsets = planes
        self._kernels.dispatch_recv(
            pending.round,
            scales.ptr if scales else 0,
            topk_idx.ptr,
            topk_weights.ptr,
            counts.ptr,
            offsets.ptr if offsets else 0,
        )

    def _hand_out(self, pending: _Dispatch, planes: _Planes) -> Received:
        return Received(self._received_x(pending, planes.topk_idx.shape[0]), *planes, pending.round.state)

    def _received_x(self, pending: _Dispatch, rows: int) -> Buffer:
        """A view that holds the lease, or a copy if too few slots would be left for dispatches still to come."""
        spec = self.spec
        ptr = self._base + self._kernels.received_x(pending.round)
        view = Buffer(ptr, (rows, spec.hidden), spec.dtype, "cpu", pending.lease)
        if len(self._free) < self._flight_limit - self._in_flight:
            view = copy_of(view)
        del pending.lease
        return view

    def combine_send(
        self, x: Buffer, state: Any, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> _Combine:
        source, weights = x, topk_weights
        if self._copies_sources:
            source, weights = copy_of(x), copy_of(topk_weights) if topk_weights else None
        return self._combine_send(source, state, weights, weighted, kept=False)

    def combine(
        self,
        x: Buffer,
        state: Any,
        topk_weights: Buffer | None,
        weighted: bool,
        bias: Sequence[Buffer],
        stream: int | None,
    ) -> tuple[Buffer, Buffer | None]:
        """Both halves. ``x`` does not change in between, so this rank's own rows are summed where they lie."""
        return self.combine_recv(self._combine_send(x, state, topk_weights, weighted, kept=True), bias, stream)

    def _combine_send(self, x: Buffer, state: Any, weights: Buffer | None, weighted: bool, kept: bool) -> _Combine:
        address = weights.ptr if weights is not None else 0
        round_ = self._combine_round(x.ptr, state, address, weights is not None, weighted, kept)
        return _Combine(round_, (x, weights), weights is not None)

    def _combine_round(
        self, x: int, state: Any, topk_weights: int, returns_weights: bool, weighted: bool, kept: bool
    ) -> Any:
        return self._kernels.combine_send(x, state, topk_weights, returns_weights, weighted, kept)

    def combine_recv(
        self, pending: _Combine, bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        y, weights = self._sums(pending)
        self._receive_combine(pending, bias, y, weights)
        return y, weights

    def _sums(self, pending: _Combine) -> tuple[Buffer, Buffer | None]:
        """Room for what a combine gives."""
        spec, tokens = self.spec, pending.round.state.tokens
        y = _empty((tokens, spec.hidden), spec.combined_dtype)
        return y, _empty((tokens, spec.top_k), "float32") if pending.weights else None

    def _receive_combine(self, pending: _Combine, bias: Sequence[Buffer], y: Buffer, weights: Buffer | None) -> None:
        first, second = (*(b.ptr for b in bias), 0, 0)[:2]
        self._kernels.combine_recv(pending.round, first, second, y.ptr, weights.ptr if weights else 0)

    def close(self) -> None:
        """Views stay valid: a lease keeps the window mapped."""
        if self._window is not None:
            self._session.free(self._window)
            self._window = None


def _empty(shape: tuple[int, ...], dtype: str) -> Buffer:
    array = np.empty(shape, NUMPY_DTYPES[dtype])
    return Buffer(array.__array_interface__["data"][0], shape, dtype, "cpu", array)


def copy_of(buffer: Buffer) -> Buffer:
    """A private copy of a buffer's bytes."""
    copy = _empty(buffer.shape, buffer.dtype)
    if buffer.nbytes:
        ctypes.memmove(copy.ptr, buffer.ptr, buffer.nbytes)
    return copy
