# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of one ExpertParallel on one GPU: arguments, leases and shapes; the work is in the kernels.

A call costs the host one launch and no synchronisation, except that a dispatch with exact shapes waits for one word
that the kernel writes as soon as the counts are known, while the rows still move.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import addressof, byref, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hal.arrays import Buffer
from hal.backend import Received
from hal.config import ExpertParallelSpec
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_cuda import native
from hal_cuda.array_views import RECEIVED, Part, Views, received_views, torch_of
from hal_cuda.crossing import CHANNELS, Crossing, crossing
from hal_cuda.faults import Faults, PeerRefused
from hal_cuda.layout import HandleLayout, Layout, dirty_bytes, handle_layout, layout
from hal_cuda.memory import Allocator
from hal_cuda.over_hosts import OverHosts
from hal_cuda.slots import Lease, Slots
from hal_cuda.tuning import PUSHING_SMS, SMS, allowed_sms
from hal_cuda.variables import software_nic

if TYPE_CHECKING:
    from hal.expert_parallel import ExpertParallel
    from hal_cuda.session import CudaSession

PULL_TOKENS = 512
"""Up to this many tokens combine reads the peers' rows; above, ranks push them (docs/performance_cuda.md)."""
COMBINE = "HAL_CUDA_COMBINE"
"""``pull`` or ``push`` for every size, the same on all ranks: reading is best where experts write to expert_output."""
MAX_RANKS, MAX_TOP_K = 64, 32
_WHOLE = native.SEND | native.RECV
_COMBINE_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}


@dataclass(frozen=True, slots=True)
class Sized:
    """What follows from a number of tokens."""

    handle: HandleLayout
    dispatch: tuple[int, int]
    """Blocks and threads of the launch; of combine's likewise."""
    combine: tuple[int, int]


@dataclass(slots=True)
class State:
    """The engine's part of a handle."""

    tokens: int
    sized: Sized
    arrays: Any
    """native.HandleArrays."""
    rows: int
    """Rows of the receiver's arrays, padding included."""
    memory: Any
    """Keeps the arrays, but for those of the dispatch whose routing this one reuses."""
    routing: Any
    """Keeps those."""


@dataclass(slots=True)
class PendingDispatch:
    state: State
    lease: Lease
    view: bool
    sequence: int
    """0 = nobody waits for a row count."""
    cached: bool
    """The routing is an earlier dispatch's."""
    like: Any
    """An array to allocate like: the caller's x, kept until the receive half."""
    stream: int | None
    call: tuple[Any, ...] | None
    """Arguments of launch_dispatch, to do it again; None when the arrays may have changed since."""

    def take(self, other: PendingDispatch) -> None:
        self.state, self.lease, self.view, self.sequence = other.state, other.lease, other.view, other.sequence


@dataclass(slots=True)
class PendingCombine:
    state: State
    x: Any
    scratch: Lease | None
    weights: Buffer | None
    weighted: bool

    def end(self) -> None:
        """The scratch is free for what is launched from here on, whoever still refers to this."""
        if self.scratch is not None:
            self.scratch.ended = True


class CudaEngine:
    """See :class:`hal.backend.Engine`. ``dispatch`` and ``combine`` do both halves in one kernel."""

    def __init__(self, session: CudaSession, spec: ExpertParallelSpec) -> None:
        self._session, self._spec, self.library = session, spec, session.library
        world = session.world_size
        self.local_experts = spec.num_experts // world
        set_by = {name: os.environ.get(name, "") for name in (COMBINE, CHANNELS, SMS)}
        session._bootstrap.agree("settings of the CUDA backend", set_by)
        self._crossing = crosses(session, spec)
        self._push = self._crossing is None and pushes(spec, world, session.config.topology.nodes)
        self.place: Layout = layout(spec, world, self._push, self._crossing)
        self.buffer_bytes = self.place.total
        self.device = session.device_name
        self._timeout = float(spec.timeout or session.config.timeout)
        self._window = session.memory(self.place.total)
        self._fixed = spec.schedule == "latency"
        self._slots = Slots(self.library, spec.num_buffers, ahead=self._fixed)
        local = range(self.local_experts)
        experts = [rank * self.local_experts + e for rank in session.ranks for e in local]
        all_experts = session.run_size * self.local_experts
        self._faults = Faults(self.library, session.device, session.watch, session.ranks, experts, all_experts)
        self._error = self._faults.record
        self._allocator = Allocator(self.library, session.device, self.device)
        self.tuning, self._sms = session.tuning(spec, self._push), session.sms
        self._state_memory = self._allocate(self.library.state_bytes, 0)
        self._dirty = self._allocate(dirty_bytes(spec, world), 0xFF)  # the window is not cleared
        self.library.stream_sync(session.device, 0)
        self._scratch = self._allocate_scratch()
        self._over_hosts = (
            None if self._crossing is None else OverHosts(session, spec, self._crossing, self._window, self.place)
        )
        host, address = c_void_p(), c_uint64()
        self.library.host_alloc(session.device, 8 * self._slots.count, byref(host), byref(address))
        ctypes.memset(host, 0, 8 * self._slots.count)
        # One word for each slot: as many dispatches may be on their way.
        self._host_word, self._host_word_address = host.value or 0, int(address.value)
        self._sequence = 0
        self._sized: dict[int, Sized] = {}
        self._row_count, self._capture_status = c_uint32(), c_int()
        self._last_stream: int | None = None
        self._combine_open = False
        self._read_late = False
        """Peers may still read an expert's output: until the next dispatch nobody writes there."""
        self._read_late_outside = False
        """The same outside graphs, where a dispatch that is only captured ends nothing."""
        self._closed = False
        self._failure: str | None = None
        self._views = received_views(self.library, self.device, spec, world, self.place)
        rows_out = Part(0, RECEIVED, (spec.hidden,), spec.combine_dtype or spec.dtype)
        self._output_views = Views(self.library, self.device, [rows_out])
        self._output_begin = self.place.slots + self._slots.combine_slot * self.place.slot_bytes
        self._ep = self._description()
        self._dispatch_args = native.DispatchArgs()
        self._combine_args = self._new_combine_args()
        """Of combines in one launch, without weights to carry or biases: what names those stays 0."""
        self._combine_args_at = addressof(self._combine_args)
        self._launch_dispatch, self._launch_combine = self._launches()
        session._bootstrap.barrier()

    def quick(self, ep: ExpertParallel) -> Any:
        """The short way for torch tensors, once torch is there."""
        if "torch" not in sys.modules:
            return None
        from hal_cuda.quick import Quick

        return Quick(self, ep)

    # --- dispatch ------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: State | None,
        stream: int | None,
    ) -> Received:
        """Both halves as one kernel."""
        self.admit()
        pending = self._dispatch(x, topk_idx, topk_weights, scales, state, stream, _WHOLE)
        return self.received(pending, stream)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: State | None,
        stream: int | None,
        arrays_last: bool = False,
    ) -> PendingDispatch:
        """``arrays_last``: they stay as they are until the receive half, so that it can do this again."""
        self.admit()
        pending = self._dispatch(x, topk_idx, topk_weights, scales, state, stream, native.SEND)
        if not arrays_last:
            pending.call = None
        try:
            self._finish(stream)  # callers without streams may change their arrays now
        except BaseException:
            self._abandon(pending)
            raise
        self._slots.in_flight += 1
        return pending

    def admit(self) -> None:
        """Refuse a dispatch for which no receive slot is sure to be free; on all ranks alike."""
        slots = self._slots
        if slots.in_flight == slots.flight_limit:
            raise CapacityError(
                f"dispatches in flight with num_buffers={self._spec.num_buffers}",
                slots.in_flight + 1,
                slots.flight_limit,
                "receive an earlier dispatch first, or raise num_buffers",
            )

    def dispatch_recv(self, pending: PendingDispatch, stream: int | None) -> Received:
        self._slots.in_flight -= 1
        try:
            self.settle(pending)
            args = self._dispatch_args
            args.handle = pending.state.arrays
            args.tokens, args.cached, args.slot = pending.state.tokens, pending.cached, pending.lease.slot
            args.phases, args.host_word, args.pad_to_rows, args.next_slot = native.RECV, 0, 0, -1
            blocks, spread = self.tuning.dispatch_blocks, self._fixed or self._spec.layout == "expert"
            args.blocks, args.threads = blocks if spread else min(8, blocks), self.tuning.threads
            on = self._on(stream)
            if self._launch_dispatch(on):
                raise self.library.error()
            pending.view = self._slots.may_view(pending.lease, self._capturing(on))
        except BaseException:
            pending.lease.ended = True
            raise
        return self.received(pending, stream)

    def _dispatch(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: State | None,
        stream: int | None,
        phases: int,
    ) -> PendingDispatch:
        ids, weights, factors = (0 if array is None else array.ptr for array in (topk_idx, topk_weights, scales))
        wide = topk_idx is not None and topk_idx.dtype == "int64"
        return self.launch_dispatch(x.owner, x.shape[0], x.ptr, ids, weights, factors, wide, state, stream, phases)

    def launch_dispatch(
        self,
        like: Any,
        tokens: int,
        x: int,
        ids: int,
        weights: int,
        scales: int,
        wide: bool,
        reused: State | None,
        stream: int | None,
        phases: int,
    ) -> PendingDispatch:
        """By addresses, 0 = not given; ``wide``: ids of 64 bits. ``like``: an array to allocate like."""
        on = self._on(stream)
        self._check()
        capturing = self._capturing(on)
        lease, offer = self._slots.for_dispatch(self._window, capturing)
        try:
            state = self._new_state(like, tokens, reused, on)
            exact = not (self._fixed or capturing) and reused is None
            if not exact and reused is None:
                state.rows = self.place.slot_rows
            args, slot = self._dispatch_args, lease.slot
            args.x, args.topk_idx, args.topk_weights, args.scales = x, ids, weights, scales
            args.idx_is_64, args.tokens, args.cached = wide, tokens, reused is not None
            args.slot, args.next_slot, args.phases, args.handle = slot, offer, phases, state.arrays
            args.pad_to_rows = 0 if self._fixed or not (capturing or reused is not None) else state.rows
            args.sequence = self._sequence = (self._sequence + 1) & 0xFFFFFFFF
            args.host_word = self._host_word_address + 8 * slot if exact else 0
            (args.blocks, args.threads), args.push_warps = state.sized.dispatch, self.tuning.push_warps
            if self._launch_dispatch(on):
                raise self.library.error()
        except BaseException:
            lease.ended = True
            raise
        self._read_late_outside = capturing and (self._read_late or self._read_late_outside)
        self._read_late = False
        if not capturing:
            self._slots.launched(offer)
        call = (like, tokens, x, ids, weights, scales, wide, reused, stream, phases)
        view = self._slots.may_view(lease, capturing)
        return PendingDispatch(state, lease, view, self._sequence if exact else 0, reused is not None, like, stream, call)

    def settle(self, pending: PendingDispatch) -> None:
        """Wait for the row count of a dispatch with exact shapes."""
        while pending.sequence:
            try:
                pending.state.rows = self._await_rows(pending.lease.slot, pending.sequence)
                pending.sequence = 0
                return
            except PeerRefused:
                self._abandon(pending)
                if pending.call is None:
                    raise
                # Nothing moved, and that rank's error is its own. Its next dispatch is this one's match.
                pending.take(self.launch_dispatch(*pending.call))
            except BaseException as error:
                if not isinstance(error, HalError):
                    # Ctrl-C: this rank leaves the round, and its kernel need not wait for the peers.
                    self._session.abort(f"{type(error).__name__} in a dispatch")
                    self._session.end_waits()
                self._abandon(pending)
                raise

    def _abandon(self, pending: PendingDispatch) -> None:
        """Before an error lets go of what the launch uses. The block that reports a failure is the first to end: the others
        still read the caller's arrays and write the handle's, which go where no stream orders it when nobody refers to them.
        No array comes of the launch, though the traceback refers to it.
        """
        if pending.stream is None:
            self.drain()
        pending.lease.ended = True

    def slot_address(self, slot: int) -> int:
        return int(self._window.ptr + self.place.slots + slot * self.place.slot_bytes)

    def received(self, pending: PendingDispatch, stream: int | None) -> Received:
        try:
            self.settle(pending)  # which may have done it again: what is pending is another dispatch then
            self._finish(stream)
            return self._arrays(pending, stream)
        except BaseException:
            pending.lease.ended = True
            raise

    def received_tensors(self, pending: PendingDispatch, stream: int | None, torch: Any) -> tuple[Any, ...] | None:
        """:meth:`received` as tensors; None where it gives no views, or no rows."""
        try:
            if pending.sequence:
                self.settle(pending)
            if stream is None:
                self._finish(stream)
            rows, lease = pending.state.rows, pending.lease
            if not (pending.view and rows):
                return None
            return self._views.tensors(self.slot_address(lease.slot), rows, lease, torch)
        except BaseException:
            pending.lease.ended = True
            raise

    def _arrays(self, pending: PendingDispatch, stream: int | None) -> Received:
        """What has been received: views of its slot, or copies."""
        state, lease = pending.state, pending.lease
        base, torch = self.slot_address(lease.slot), torch_of(pending.like) if pending.view else None
        arrays = self._views.buffers(base, state.rows, lease, torch)
        if not pending.view:
            arrays = [None if part is None else self._copy_out(part, pending.like, stream) for part in arrays]
        x, scales, topk_idx, topk_weights, counts, offsets = arrays
        return Received(x, scales, topk_idx, topk_weights, counts, offsets, state)

    def _await_rows(self, slot: int, sequence: int) -> int:
        """The row count of an exact dispatch, while its rows still move."""
        rows, at = self._row_count, byref(self._row_count)
        # The kernel's own limit is the timeout, and it may have to wait for the GPU's earlier work first.
        raw = self.library.raw_await_rows
        while (status := raw(self._host_word + 8 * slot, sequence, self._faults.host, 1.0, at)) == 1:
            self._check()
            # A launch that failed will never write; one that ended wrote before this look, so look once more.
            if self.library.value("stream_query", c_int, self._session.device, self._last_stream or 0):
                status = raw(self._host_word + 8 * slot, sequence, self._faults.host, 0.0, at)
                break
        self._check()
        if status != 0:
            raise HalError("cuda: a dispatch ended without a row count")
        return int(rows.value)

    def _copy_out(self, buffer: Buffer, like: Any, stream: int | None) -> Buffer:
        on = self._on(stream)
        out = self._allocator.empty(like, buffer.shape, buffer.dtype, on)
        if buffer.nbytes:
            self.library.copy(self._session.device, out.ptr, buffer.ptr, buffer.nbytes, on)
            self._finish(stream)
        return out

    # --- combine -------------------------------------------------------------------------------------------------

    def expert_output(self, state: State, like: Any, stream: int | None) -> Buffer:
        """[N, hidden] of the combined type, in the window if a slot can be spared: combine then copies nothing."""
        on = self._on(stream)
        shape, dtype = (state.rows, self._spec.hidden), self._spec.combine_dtype or self._spec.dtype
        capturing = self._capturing(on)
        spare = not self._push and not self._read_late and (capturing or not self._read_late_outside)
        lease = self._slots.for_output(self._window, capturing) if spare else None
        if lease is None:
            return self._allocator.empty(like, shape, dtype, on)
        output: Buffer
        [output] = self._output_views.buffers(self.slot_address(lease.slot), state.rows, lease, torch_of(like))
        return output

    def combine(
        self,
        x: Buffer,
        state: State,
        topk_weights: Buffer | None,
        weighted: bool,
        bias: Sequence[Buffer],
        stream: int | None,
    ) -> tuple[Buffer, Buffer | None]:
        """Both halves as one kernel."""
        pending = self._pending_combine(x, state, topk_weights, weighted, stream, fused=True)
        try:
            return self._combine(pending, bias, stream, _WHOLE)
        finally:
            pending.end()

    def combine_send(
        self, x: Buffer, state: State, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> PendingCombine:
        pending = self._pending_combine(x, state, topk_weights, weighted, stream, fused=False)
        try:
            args = self._name_pending(pending, native.SEND, -1)
            if self._launch_combine(addressof(args), self._on(stream)):
                raise self.library.error()
            self._finish(stream)
        except BaseException:
            pending.end()
            raise
        self._combine_open = True
        return pending

    def combine_recv(
        self, pending: PendingCombine, bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        self._combine_open = False
        try:
            return self._combine(pending, bias, stream, native.RECV)
        finally:
            pending.end()

    def _pending_combine(
        self, x: Buffer, state: State, weights: Buffer | None, weighted: bool, stream: int | None, *, fused: bool
    ) -> PendingCombine:
        on = self._on(stream)
        self._check()
        self._refuse_open_combine()
        offset = self._offset_of(x.ptr, x.nbytes)
        needs = self._push or weights is not None or not fused or offset < 0
        in_output = offset >= self._output_begin
        self._read_late |= in_output
        scratch = self._slots.scratch(self._window, self._capturing(on), in_output) if needs else None
        return PendingCombine(state, x, scratch, weights, weighted)

    def _combine(
        self, pending: PendingCombine, bias: Sequence[Buffer], stream: int | None, phases: int
    ) -> tuple[Buffer, Buffer | None]:
        on = self._on(stream)
        spec, tokens, like = self._spec, pending.state.tokens, pending.x.owner
        y = self._allocator.empty(like, (tokens, spec.hidden), pending.x.dtype, on)
        back = None
        if pending.weights is not None:
            back = self._allocator.empty(like, (tokens, spec.top_k), "float32", on)
        whole = phases == _WHOLE
        args = self._name_pending(pending, phases, self._offset_of(pending.x.ptr, pending.x.nbytes) if whole else -1)
        args.out, args.out_weights = y.ptr, 0 if back is None else back.ptr
        args.bias0 = bias[0].ptr if bias else 0
        args.bias1 = bias[1].ptr if len(bias) > 1 else 0
        if self._launch_combine(addressof(args), on):
            raise self.library.error()
        self._finish(stream)
        return y, back

    def combine_rows(self, x: int, nbytes: int, state: State, weighted: bool, out: int, stream: int | None) -> None:
        """:meth:`combine` by addresses, without weights to carry or biases."""
        on = self._on(stream)
        self._check()
        self._refuse_open_combine()
        offset, slot = self._offset_of(x, nbytes), 0
        self._read_late |= offset >= self._output_begin
        if self._push or offset < 0:  # free again at once: launches follow one another
            slot = self._slots.scratch(self._window, self._capturing(on)).slot
        args = self._combine_args
        self._name_combine(args, state, weighted, _WHOLE, x, offset, slot)
        args.out = out
        if self._launch_combine(self._combine_args_at, on):
            raise self.library.error()
        if stream is None:
            self._finish(stream)

    def _name_pending(self, pending: PendingCombine, phases: int, offset: int) -> Any:
        args, scratch, weights = self._new_combine_args(), pending.scratch, pending.weights
        slot = scratch.slot if scratch is not None else 0
        self._name_combine(args, pending.state, pending.weighted, phases, pending.x.ptr, offset, slot)
        # Not told by the address: an empty array has none.
        args.carries_weights = weights is not None
        args.row_weights = 0 if weights is None else weights.ptr
        return args

    def _name_combine(
        self, args: Any, state: State, weighted: bool, phases: int, x: int, offset: int, scratch_slot: int
    ) -> None:
        args.x, args.window_offset, args.late_done = x, offset, offset >= self._output_begin
        args.handle, args.tokens, args.weighted, args.phases = state.arrays, state.tokens, weighted, phases
        args.scratch_slot = scratch_slot
        args.blocks, args.threads = state.sized.combine

    def _new_combine_args(self) -> Any:
        few = self.tuning.combine_blocks <= self.tuning.few_blocks
        return native.CombineArgs(push=self._push, push_blocks=self.tuning.push_blocks, fly_ahead=few)

    # --- shapes of launches --------------------------------------------------------------------------------------

    def tune(self, **changes: int) -> None:
        """Other numbers of :class:`hal_cuda.tuning.Tuning`, for measurements; before the first dispatch."""
        self.tuning = replace(self.tuning, **changes)
        self._combine_args = self._new_combine_args()
        self._combine_args_at = addressof(self._combine_args)

    def _launches(self) -> tuple[Callable[[int], int], Callable[[int, int], int]]:
        """The kernels of dispatch, on a stream, and of combine, by its arguments' address: for one NVLink domain or over
        hosts. Not 0 = failed."""
        library, ep, dispatch_args = self.library, addressof(self._ep), addressof(self._dispatch_args)
        if self._over_hosts is None:
            return partial(library.raw_dispatch, ep, dispatch_args), partial(library.raw_combine, ep)
        both = (ep, self._over_hosts.description)
        dispatch = partial(library.raw_hosts_dispatch, *both, dispatch_args)
        combine = partial(library.raw_hosts_combine, *both)
        return (self._ended(dispatch), self._ended(combine)) if software_nic() else (dispatch, combine)

    def _ended(self, launch: Callable[..., int]) -> Callable[..., int]:
        """``launch``, which then waits for its end. The software NIC's copies are driver calls of this process; calls that
        wait for the launch inside the driver, as the caller's next copy to pageable memory may be, would keep them out."""

        def launched(*args: int) -> int:
            failed, on = launch(*args), args[-1]
            if not failed and not self._capturing(on):
                self.library.stream_sync(self._session.device, on)
            return failed

        return launched

    def _dispatch_shape(self, tokens: int) -> tuple[int, int]:
        if self._crossing is not None:
            return self._crossing.shape(self.tuning.dispatch_blocks, self.tuning.threads)
        most, spec = self.tuning.dispatch_blocks, self._spec
        if spec.layout == "expert":
            return min(most, max(tokens // 2, 16)), self._pushing_threads(tokens)
        pieces = -(-self.place.row_bytes // 4096)
        units = tokens * pieces + self._session.world_size * -(-tokens // 32)
        if units > 1024:
            return most, self.tuning.threads
        warps = self.tuning.small_threads // 32
        return max(min(-(-units // warps), self._sms), 1), self.tuning.small_threads

    def _pushing_threads(self, tokens: int) -> int:
        """Of blocks whose warps push a row each and fence together: few tokens are better spread over small blocks."""
        return min(128, self.tuning.threads) if tokens <= PULL_TOKENS else self.tuning.threads

    def _combine_shape(self, tokens: int) -> tuple[int, int]:
        if self._crossing is not None:
            return self._crossing.shape(self.tuning.combine_blocks, self.tuning.threads)
        if self._push:
            return self.tuning.combine_blocks, self._pushing_threads(tokens)
        units = tokens * -(-self.place.combine_row_bytes // 2048)
        warps = self.tuning.threads // 32
        return max(min(-(-units // warps), self.tuning.combine_blocks), 1), self.tuning.threads

    # --- the rest ------------------------------------------------------------------------------------------------

    def _new_state(self, like: Any, tokens: int, reused: State | None, on: int) -> State:
        if reused is not None and self._spec.layout == "rank":
            return reused  # nothing of such a handle changes with the rows or the weights that travel
        sized = self._sized.get(tokens)
        if sized is None:
            place = handle_layout(self._spec, self._session.world_size, self.place, tokens, self._crossing)
            sized = Sized(place, self._dispatch_shape(tokens), self._combine_shape(tokens))
            self._sized[tokens] = sized
        place = sized.handle
        own, memory = self._allocator.memory(like, (place.total,), "uint8", on)
        if reused is not None:
            arrays = native.HandleArrays.from_buffer_copy(reused.arrays)
            arrays.weights, arrays.source = own + place.weights, own + place.source
            return State(tokens, sized, arrays, reused.rows, memory, reused.routing)
        arrays = native.HandleArrays()
        arrays.pos, arrays.idx, arrays.counts = own + place.pos, own + place.idx, own + place.counts
        arrays.expert_counts, arrays.expert_offsets = own + place.expert_counts, own + place.expert_offsets
        arrays.weights, arrays.source, arrays.lists = own + place.weights, own + place.source, own + place.lists
        return State(tokens, sized, arrays, 0, memory, memory)

    def _allocate(self, nbytes: int, fill: int) -> int:
        """This rank's own memory, filled in the default stream's order."""
        memory = int(self.library.value("malloc", c_uint64, self._session.device, nbytes, 0))
        self.library.memset(self._session.device, memory, fill, nbytes, 0)
        return memory

    def _allocate_scratch(self) -> int:
        """Where a launch's blocks tell one another what they found in the ids."""
        spec, session = self._spec, self._session
        groups = -(-spec.max_tokens // 32)
        counted = groups if spec.layout == "expert" else session.properties.sms
        words = session.world_size * groups + counted * spec.num_experts
        return int(self.library.value("malloc", c_uint64, session.device, 4 * words, 0))

    def _description(self) -> Any:
        session, spec, place = self._session, self._spec, self.place
        return native.Ep(
            device=session.device,
            peers=self._window.record.peers,
            peer_stride=self._window.record.peer_stride,
            state=self._state_memory,
            scratch=self._scratch,
            dirty=self._dirty,
            error=self._faults.address,
            abort=session.abort_words,
            timeout_ns=int(self._timeout * 1e9),
            off_header=place.header,
            off_arrive=place.arrive,
            off_dispatch_flags=place.dispatch_flags,
            off_ready=place.ready,
            off_done=place.done,
            off_combine_flags=place.combine_flags,
            off_slots=place.slots,
            slot_bytes=place.slot_bytes,
            slot_scales=place.slot_scales,
            slot_idx=place.slot_idx,
            slot_weights=place.slot_weights,
            slot_counts=place.slot_counts,
            slot_offsets=place.slot_offsets,
            slot_meta=place.slot_meta,
            slot_back=place.slot_back,
            slot_own=place.slot_own,
            slot_tallies=place.slot_tallies,
            world=session.world_size,
            rank=session.rank,
            experts=spec.num_experts,
            local_experts=spec.num_experts // session.world_size,
            topk=spec.top_k,
            max_tokens=spec.max_tokens,
            scale_dim=spec.scale_dim,
            row_bytes=place.row_bytes,
            combine_row_bytes=place.combine_row_bytes,
            combine_type=_COMBINE_TYPES[spec.combine_dtype or spec.dtype],
            expert_layout=int(spec.layout == "expert"),
            fixed_slots=int(self._fixed),
            alignment=spec.alignment,
            slots=place.slot_count,
            slot_rows=place.slot_rows,
            owner_inverse=min(0xFFFFFFFF // (spec.num_experts // session.world_size) + 1, 0xFFFFFFFF),
            keep_source=int(self._push),
        )

    def _offset_of(self, ptr: int, nbytes: int) -> int:
        """Where in the window an array lies, or -1."""
        at = ptr - self._window.ptr
        return int(at) if at >= 0 and at + nbytes <= self._window.nbytes and nbytes else -1

    def _refuse_open_combine(self) -> None:
        if self._combine_open:
            raise ContractError("a combine_send is still without its combine_recv: receive it before the next combine")

    def _on(self, stream: int | None) -> int:
        """The stream to launch on. Launches of one engine follow each other, so a change of stream is ordered."""
        on = self._session.stream if stream is None else stream
        if on != self._last_stream:
            if self._last_stream is not None and not self._capturing(on):
                self.library.stream_order(self._session.device, self._last_stream, on)
            self._last_stream = on
        return on

    def _capturing(self, on: int) -> bool:
        if on == 0:
            return False  # the legacy default stream cannot be captured
        self.library.stream_capturing(self._session.device, on, byref(self._capture_status))
        return bool(self._capture_status.value)

    def _finish(self, stream: int | None) -> None:
        """Callers without streams get finished results."""
        if stream is None:
            self.library.stream_sync(self._session.device, self._session.stream)
            self._check()

    def _check(self) -> None:
        if self._error.kind == 0 and self._failure is None:
            return
        if self._failure is not None:
            raise HalError(f"this communicator can only be closed, since it met a PeerTimeout: {self._failure}")
        try:
            self._faults.check(self._timeout)
        except PeerTimeout as error:
            self._failure = str(error)
            self._session.fail(error)
            raise

    @property
    def over_hosts(self) -> bool:
        """Whether handles are those of several hosts."""
        return self._crossing is not None

    def drain(self) -> None:
        """Until this rank's launches have ended."""
        if not self._closed:
            with suppress(HalError):  # the caller's stream may be gone, and its launches with it
                self.library.stream_sync(self._session.device, self._last_stream or 0)

    def close(self) -> None:
        if self._closed:
            return
        if self._session.failed:
            self._closed = True
            return  # kernels may still run into their limit; the memory goes with the process
        self.drain()
        self._closed = True
        if self._over_hosts is not None:
            self._over_hosts.settle()
        if self._slots.any_held():
            self._window.kept = True  # arrays still view it
        self._session.retire(self._window)
        self._free()

    def give_back(self) -> bool:
        """After the session of a view was aborted, when no launch of this rank is left: the memory, unless arrays still view
        the window. Whether it was given back."""
        if self._slots.any_held():
            return False
        self._window.free(self._session.device)
        self._free()
        return True

    def _free(self) -> None:
        if self._over_hosts is not None:
            self._over_hosts.free()
        for memory in (self._state_memory, self._scratch, self._dirty):
            self.library.free(self._session.device, memory, 0)
        self._faults.close()


def crosses(session: CudaSession, spec: ExpertParallelSpec) -> Crossing | None:
    """How rows reach other hosts, or None where one NVLink domain spans the run. ContractError for what cannot be."""
    world, local = session.world_size, int(session.properties.lsa_size)
    if local == world:
        return None
    _check_limits(spec, world)
    hosts, nodes = world // local, session.config.topology.nodes
    if spec.schedule == "hierarchical" and nodes != hosts:
        raise ContractError(
            f"schedule='hierarchical' sums by host, and {world} ranks are on {hosts} hosts here, but topology.nodes is "
            f"{nodes}: set topology.nodes={hosts}"
        )
    if spec.schedule != "hierarchical" and session.gin.rail:
        raise ContractError(
            f"schedule={spec.schedule!r} puts rows to every rank, and GIN has rail connections only here: use "
            "schedule='hierarchical'"
        )
    return crossing(spec, world, hosts)


def pushes(spec: ExpertParallelSpec, world: int, nodes: int) -> bool:
    """Whether combine pushes its rows home (else it reads the peers'). ContractError for what the kernels do not do."""
    by_rank_sums = _check_spec(spec, world, nodes)
    if spec.layout == "expert":
        return by_rank_sums
    wanted = os.environ.get(COMBINE, "")
    if wanted not in ("", "pull", "push"):
        raise ContractError(f"{COMBINE}={wanted!r}: give 'pull' or 'push', or unset it")
    sms = allowed_sms()
    few = sms is not None and sms < PUSHING_SMS
    return wanted == "push" or (not wanted and spec.max_tokens > PULL_TOKENS and not few)


def _check_spec(spec: ExpertParallelSpec, world: int, nodes: int) -> bool:
    """Refuse what these kernels do not do. True if each rank sums its own rows of a token before they travel."""
    _check_limits(spec, world)
    if spec.schedule != "hierarchical" or nodes == 1:
        return False
    if nodes != world:
        raise ContractError(
            f"schedule='hierarchical' with {nodes} nodes of {world // nodes} ranks: on one NVLink domain this backend sums "
            f"by rank (topology.nodes={world}) or not at all (topology.nodes=1)"
        )
    return True


def _check_limits(spec: ExpertParallelSpec, world: int) -> None:
    if spec.completion != "strong_signal":
        raise ContractError(
            f"completion={spec.completion!r} belongs to UDMA queues; on NVLink and GIN use 'strong_signal'"
        )
    if world > MAX_RANKS:
        raise ContractError(f"{world} ranks: the CUDA kernels take at most {MAX_RANKS}")
    if spec.top_k > MAX_TOP_K:
        raise ContractError(f"top_k={spec.top_k}: the CUDA kernels take at most {MAX_TOP_K}")
