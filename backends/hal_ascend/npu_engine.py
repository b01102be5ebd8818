# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on an Ascend NPU: outputs from torch_npu, everything else as on the emulated device.

Never run on an NPU.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal_host.engine import Lease

from hal.arrays import ITEMSIZE, Buffer
from hal.backend import Received
from hal.errors import CapacityError, PeerTimeout
from hal_ascend.library import Handle

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_ascend.aclshmem import AclshmemSession

LAYOUTS = ("rank", "expert")
SCHEDULES = ("direct", "hierarchical", "latency")
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
ELEMENTS = ("bfloat16", "float16", "float32")
SIGNAL_STRIDE = 512


def shape_words(spec: ExpertParallelSpec, ranks: int, nodes: int, cores: int, queues: int) -> Any:
    """The settings as kernels_ascend/device/c_abi.h takes them."""
    combined = spec.combined_dtype
    words = (
        ranks, nodes, spec.num_experts, spec.top_k, spec.max_tokens, spec.alignment, spec.num_buffers, spec.scale_dim,
        spec.hidden * ITEMSIZE[spec.dtype], spec.hidden * ITEMSIZE[combined], SIGNAL_STRIDE, LAYOUTS.index(spec.layout),
        SCHEDULES.index(spec.schedule), COMPLETIONS.index(spec.completion), ELEMENTS.index(combined), cores, queues,
    )  # fmt: skip
    return (ctypes.c_int32 * len(words))(*words)


class _Pending:
    """A round between its halves, with what it reads."""

    __slots__ = ("keep", "lease", "round", "state", "tokens", "weights")

    def __init__(self, round_: Handle, lease: Lease | None, state: Any, tokens: int, weights: bool, keep: Any) -> None:
        self.round, self.lease, self.state = round_, lease, state
        self.tokens, self.weights, self.keep = tokens, weights, keep


class NpuEngine:
    """:class:`hal.backend.Engine`."""

    def __init__(self, session: AclshmemSession, spec: ExpertParallelSpec) -> None:
        """Collective."""
        self.spec, self._session, self._library = spec, session, session.library
        self.device = session.platform.view(0, 0, None).device
        nodes = session.config.topology.nodes
        shape = shape_words(spec, session.world_size, nodes, session.cores, session.queues)
        nbytes = ctypes.c_uint64()
        self._library.call("ep_bytes", shape, ctypes.byref(nbytes))
        self.buffer_bytes = nbytes.value
        self._window: int | None = session.allocate(self.buffer_bytes)
        self._memory = session.memory(self._window)
        self._timeout = session.config.timeout if spec.timeout is None else spec.timeout
        self._ep = Handle(self._library, "ep_destroy")
        self._call(
            "ep_create", shape, session.rank, self._memory.address, self._timeout, ctypes.byref(self._ep.pointer)
        )
        self._local_experts = spec.num_experts // session.world_size
        self._free = list(range(spec.num_buffers - 1, -1, -1))
        self._in_flight, self._flight_limit = 0, max(1, spec.num_buffers - 1)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Any | None,
        stream: int | None,
    ) -> _Pending:
        if self._in_flight == self._flight_limit:
            raise CapacityError(
                f"dispatches in flight with num_buffers={self.spec.num_buffers}", self._in_flight + 1, self._flight_limit,
                "receive an earlier dispatch first, or raise num_buffers",
            )  # fmt: skip
        lease = Lease(self._free, self._memory)
        round_ = Handle(self._library, "round_free")
        try:
            self._call(
                "dispatch_send", self._ep.value, lease.slot, x.ptr, x.shape[0], _ptr(topk_idx),
                int(topk_idx is not None and topk_idx.dtype == "int64"), _ptr(topk_weights), _ptr(scales),
                None if state is None else state[0].value, stream, ctypes.byref(round_.pointer),
            )  # fmt: skip
        except BaseException:
            del lease
            raise
        self._in_flight += 1
        return _Pending(round_, lease, (round_, x.shape[0]), x.shape[0], False, (x, topk_idx, topk_weights, scales))

    def dispatch_recv(self, pending: _Pending, stream: int | None) -> Received:
        self._in_flight -= 1
        spec, empty = self.spec, self._session.platform.empty
        rows, offset = ctypes.c_int64(), ctypes.c_uint64()
        self._call("rows", self._ep.value, pending.round.value, ctypes.byref(rows), ctypes.byref(offset))
        n = rows.value
        per_row = (n, spec.top_k) if spec.layout == "rank" else (n,)
        scales = empty((n, spec.scale_dim), "float32") if spec.scale_dim else None
        idx, weights = empty(per_row, "int32"), empty(per_row, "float32")
        counts = empty((self._local_experts,), "int32")
        offsets = empty((self._local_experts + 1,), "int64") if spec.layout == "expert" else None
        outputs = (ctypes.c_uint64 * 5)(_ptr(scales), idx.ptr, weights.ptr, counts.ptr, _ptr(offsets))
        self._call("dispatch_recv", self._ep.value, pending.round.value, outputs, stream)
        x = self._received_x(pending, n, self._memory.address + offset.value)
        return Received(x, scales, idx, weights, counts, offsets, pending.state)

    def _received_x(self, pending: _Pending, rows: int, address: int) -> Buffer:
        """A view that holds the lease, or a copy if too few slots would be left for dispatches still to come."""
        spec = self.spec
        view = Buffer(address, (rows, spec.hidden), spec.dtype, self.device, pending.lease)
        if len(self._free) < self._flight_limit - self._in_flight:
            copy = self._session.platform.empty(view.shape, spec.dtype)
            self._session._primitive(0, copy.ptr, view.ptr, view.nbytes, self._session.rank)
            view = copy
        pending.lease = None
        return view

    def combine_send(
        self, x: Buffer, state: Any, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> _Pending:
        round_ = Handle(self._library, "combine_free")
        self._call(
            "combine_send", self._ep.value, x.ptr, state[0].value, _ptr(topk_weights), int(topk_weights is not None),
            int(weighted), stream, ctypes.byref(round_.pointer),
        )  # fmt: skip
        return _Pending(round_, None, state, state[1], topk_weights is not None, (x, topk_weights))

    def combine_recv(
        self, pending: _Pending, bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        spec, empty = self.spec, self._session.platform.empty
        y = empty((pending.tokens, spec.hidden), spec.combined_dtype)
        weights = empty((pending.tokens, spec.top_k), "float32") if pending.weights else None
        first, second = (*(b.ptr for b in bias), 0, 0)[:2]
        self._call("combine_recv", self._ep.value, pending.round.value, first, second, y.ptr, _ptr(weights), stream)
        return y, weights

    def close(self) -> None:
        if self._window is not None:
            self._session.free(self._window)
            self._window = None

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            self._library.call(name, *arguments, seconds=self._timeout)
        except PeerTimeout:
            self._session.mark_failed()
            raise


def _ptr(buffer: Buffer | None) -> int:
    return 0 if buffer is None else buffer.ptr
