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
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hal.arrays import Buffer
from hal.backend import Received
from hal.config import ExpertParallelSpec
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_cuda import native
from hal_cuda.crossing import CHANNELS, Crossing, crossing
from hal_cuda.faults import Faults, PeerRefused
from hal_cuda.layout import HandleLayout, Layout, handle_layout, layout
from hal_cuda.memory import Allocator
from hal_cuda.over_hosts import OverHosts
from hal_cuda.slots import Lease, Slots
from hal_cuda.views import torch_of, view

if TYPE_CHECKING:
    from hal.expert_parallel import ExpertParallel
    from hal_cuda.session import CudaSession

PULL_TOKENS = 512
"""Up to this many tokens combine reads the peers' rows; above, ranks push them (docs/performance_cuda.md)."""
COMBINE = "HAL_CUDA_COMBINE"
"""``pull`` or ``push`` for every size, the same on all ranks: reading is best where experts write to expert_output."""
MAX_RANKS, MAX_TOP_K = 64, 32
_COMBINE_TYPES = {"bfloat16": 0, "float16": 1, "float32": 2}


@dataclass(slots=True)
class State:
    """The engine's part of a handle."""

    tokens: int
    memory: Buffer
    place: HandleLayout
    rows: int
    """Rows of the receiver's arrays, padding included."""
    shared: Buffer | None = None
    """Of the dispatch whose routing this one reuses."""


@dataclass(slots=True)
class PendingDispatch:
    state: State
    lease: Lease
    view: bool
    sequence: int
    """0 = nobody waits for a row count."""
    call: tuple[Any, ...]
    """Arguments of launch_dispatch, to do it again; keeps the caller's x until the receive half."""

    @property
    def like(self) -> Any:
        return self.call[0]

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
        set_by = {name: os.environ.get(name, "") for name in (COMBINE, CHANNELS)}
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
        self._allocator = Allocator(self.library, session.device, self.device)
        self.tuning = session.tuning(spec, self._push)
        self._state_memory = int(self.library.value("malloc", c_uint64, session.device, self.library.state_bytes, 0))
        self.library.memset(session.device, self._state_memory, 0, self.library.state_bytes, 0)
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
        self._places: dict[int, HandleLayout] = {}
        self._last_stream: int | None = None
        self._combine_open = False
        self._read_late = False
        """Peers may still read an expert's output: until the next dispatch nobody writes there."""
        self._closed = False
        self._failure: str | None = None
        self._whole = PendingCombine(
            State(0, Buffer(0, (0,), "uint8", self.device), HandleLayout(*[0] * 9), 0), None, None, None, False
        )
        self._ep = self._description()
        self.description = byref(self._ep)
        self.launch, self.launch_combine = self._launches()
        self._dispatch_args = native.DispatchArgs()
        self._combine_args = native.CombineArgs()
        session._bootstrap.barrier()

    def quick(self, ep: ExpertParallel) -> Any:
        """The short way for torch tensors on GPUs, once torch is there."""
        if "torch" not in sys.modules or self.device == "cpu":
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
        pending = self._dispatch(x, topk_idx, topk_weights, scales, state, stream, native.SEND | native.RECV)
        return self.received(pending, stream)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: State | None,
        stream: int | None,
    ) -> PendingDispatch:
        self.admit()
        pending = self._dispatch(x, topk_idx, topk_weights, scales, state, stream, native.SEND)
        self._finish(stream)  # callers without streams may change their arrays now
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
            self._name_handle(args, pending.state)
            args.tokens, args.cached, args.slot = 0, int(pending.state.shared is not None), pending.lease.slot
            args.phases, args.host_word, args.pad_to_rows, args.next_slot = native.RECV, 0, 0, -1
            blocks, spread = self.tuning.dispatch_blocks, self._fixed or self._spec.layout == "expert"
            args.blocks, args.threads = blocks if spread else min(8, blocks), self.tuning.threads
            on = self._on(stream)
            self.launch(byref(args), on)
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
        addresses = (x.ptr, *(0 if array is None else array.ptr for array in (topk_idx, topk_weights, scales)))
        wide = topk_idx is not None and topk_idx.dtype == "int64"
        return self.launch_dispatch(x.owner, x.shape[0], addresses, wide, state, stream, phases)

    def launch_dispatch(
        self,
        like: Any,
        tokens: int,
        addresses: tuple[int, ...],
        wide: bool,
        state: State | None,
        stream: int | None,
        phases: int,
    ) -> PendingDispatch:
        """``addresses`` of x, ids, weights and scales; 0 = not given. ``like``: an array to allocate like."""
        on = self._on(stream)
        self._check()
        capturing = self._capturing(on)
        lease, offer = self._slots.for_dispatch(self._window, capturing)
        try:
            new = self._new_state(like, tokens, state, on)
            exact = not (self._fixed or capturing) and state is None
            if not exact and state is None:
                new.rows = self.place.slot_rows
            args = self._dispatch_args
            args.x, args.topk_idx, args.topk_weights, args.scales = addresses
            args.idx_is_64, args.tokens, args.cached = wide, tokens, state is not None
            args.slot, args.next_slot, args.phases = lease.slot, offer, phases
            args.pad_to_rows = 0 if self._fixed or not (capturing or state is not None) else new.rows
            self._sequence = (self._sequence + 1) & 0xFFFFFFFF
            args.sequence, args.host_word = self._sequence, self._host_word_address + 8 * lease.slot if exact else 0
            self._name_handle(args, new)
            args.blocks, args.threads = self._dispatch_shape(tokens)
            self.launch(byref(args), on)
        except BaseException:
            lease.ended = True
            raise
        self._read_late = False
        if not capturing:
            self._slots.launched(offer)
        call = (like, tokens, addresses, wide, state, stream, phases)
        view = self._slots.may_view(lease, capturing)
        return PendingDispatch(new, lease, view, self._sequence if exact else 0, call)

    def settle(self, pending: PendingDispatch) -> None:
        """Wait for the row count of a dispatch with exact shapes."""
        while pending.sequence:
            try:
                pending.state.rows = self._await_rows(pending.lease.slot, pending.sequence)
                pending.sequence = 0
                return
            except PeerRefused:
                # Nothing moved, and that rank's error is its own. Its next dispatch is this one's match.
                pending.lease.ended = True
                pending.take(self.launch_dispatch(*pending.call))
            except HalError:
                pending.lease.ended = True  # no array comes of it, though the traceback refers to it
                raise

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

    def _arrays(self, pending: PendingDispatch, stream: int | None) -> Received:
        """What has been received: views of its slot, or copies."""
        state, spec = pending.state, self._spec
        rows, place, local = state.rows, self.place, spec.num_experts // self._session.world_size
        words = (rows, spec.top_k) if spec.layout == "rank" else (rows,)
        base = self.slot_address(pending.lease.slot)

        torch, lease, device, library = torch_of(pending.like), pending.lease, self.device, self.library

        def part(offset: int, shape: tuple[int, ...], dtype: str) -> Buffer:
            if pending.view:
                return view(library, base + offset, shape, dtype, device, lease, torch)
            return self._copy_out(Buffer(base + offset, shape, dtype, self.device, lease), pending.like, stream)

        return Received(
            part(0, (rows, spec.hidden), spec.dtype),
            part(place.slot_scales, (rows, spec.scale_dim), "float32") if spec.scale_dim else None,
            part(place.slot_idx, words, "int32"),
            part(place.slot_weights, words, "float32"),
            part(place.slot_counts, (local,), "int32"),
            part(place.slot_offsets, (local + 1,), "int64") if spec.layout == "expert" else None,
            state,
        )

    def _await_rows(self, slot: int, sequence: int) -> int:
        """The row count of an exact dispatch, while its rows still move."""
        rows = c_uint32()
        # The kernel's own limit is the timeout, and it may have to wait for the GPU's earlier work first.
        raw = self.library.raw_await_rows
        while (status := raw(self._host_word + 8 * slot, sequence, self._faults.host, 1.0, byref(rows))) == 1:
            self._check()
            # A launch that failed will never write; one that ended wrote before this look, so look once more.
            if self.library.value("stream_query", c_int, self._session.device, self._last_stream or 0):
                status = raw(self._host_word + 8 * slot, sequence, self._faults.host, 0.0, byref(rows))
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
        spare = not self._push and not self._read_late
        lease = self._slots.for_output(self._window, self._capturing(on)) if spare else None
        if lease is None:
            return self._allocator.empty(like, shape, dtype, on)
        ptr = self._window.ptr + self.place.slots + lease.slot * self.place.slot_bytes
        return view(self.library, ptr, shape, dtype, self.device, lease, torch_of(like))

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
            return self._combine(pending, bias, stream, native.SEND | native.RECV)
        finally:
            pending.end()

    def combine_send(
        self, x: Buffer, state: State, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> PendingCombine:
        pending = self._pending_combine(x, state, topk_weights, weighted, stream, fused=False)
        try:
            args = self._name_combine(pending, native.SEND, x.ptr, -1)
            self.launch_combine(byref(args), self._on(stream))
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
        offset = self._offset(x)
        needs = self._push or weights is not None or not fused or offset < 0
        in_output = self._in_output(offset)
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
        whole = phases == native.SEND | native.RECV
        args = self._name_combine(pending, phases, pending.x.ptr, self._offset(pending.x) if whole else -1)
        args.out, args.out_weights = y.ptr, 0 if back is None else back.ptr
        args.bias0 = bias[0].ptr if bias else 0
        args.bias1 = bias[1].ptr if len(bias) > 1 else 0
        self.launch_combine(byref(args), on)
        self._finish(stream)
        return y, back

    def name_whole_combine(self, state: State, x: int, nbytes: int, weighted: bool, on: int) -> Any:
        """Arguments of a combine in one launch, without weights to carry or biases; the caller fills in where to."""
        self._on(on)
        self._check()
        self._refuse_open_combine()
        pending = self._whole
        pending.state, pending.weighted = state, weighted
        offset = self._offset_of(x, nbytes)
        self._read_late |= self._in_output(offset)
        pending.scratch = self._slots.scratch(self._window, self._capturing(on)) if self._push or offset < 0 else None
        try:
            return self._name_combine(pending, native.SEND | native.RECV, x, offset)
        finally:
            pending.scratch = None  # free for the next call: launches follow one another

    def _name_combine(self, pending: PendingCombine, phases: int, x: int, offset: int) -> Any:
        args, state = self._combine_args, pending.state
        args.x, args.out, args.bias0, args.bias1, args.out_weights = x, 0, 0, 0, 0
        # Not told by the address: an empty array has none.
        args.carries_weights = pending.weights is not None
        args.row_weights = 0 if pending.weights is None else pending.weights.ptr
        own, handle = state.memory.ptr, state.place
        shared = state.shared.ptr if state.shared is not None else own
        args.pos, args.idx, args.counts = shared + handle.pos, shared + handle.idx, shared + handle.counts
        args.lists = shared + handle.lists
        args.weights = own + handle.weights
        args.source = (own if self._spec.layout == "expert" else shared) + handle.source
        args.window_offset = offset
        args.late_done = self._in_output(offset)
        args.tokens, args.weighted, args.phases = state.tokens, pending.weighted, phases
        args.scratch_slot = pending.scratch.slot if pending.scratch is not None else 0
        args.push, args.push_blocks = self._push, self.tuning.push_blocks
        args.blocks, args.threads = self._combine_shape(state.tokens)
        return args

    # --- shapes of launches --------------------------------------------------------------------------------------

    def _launches(self) -> tuple[Callable[[Any, int], None], Callable[[Any, int], None]]:
        """The kernels of dispatch and combine: for one NVLink domain, or over hosts."""
        library = self.library
        if self._over_hosts is None:
            return partial(library.dispatch, self.description), partial(library.combine, self.description)
        both = (self.description, self._over_hosts.description)
        return partial(library.hosts_dispatch, *both), partial(library.hosts_combine, *both)

    def _dispatch_shape(self, tokens: int) -> tuple[int, int]:
        if self._crossing is not None:
            return self._crossing.shape(self.tuning.dispatch_blocks, self.tuning.threads)
        most, spec = self.tuning.dispatch_blocks, self._spec
        if spec.layout == "expert":
            # A block's warps push a row each and fence together: few tokens are better spread over small blocks.
            small = tokens <= PULL_TOKENS
            return min(most, max(tokens // 2, 16)), min(128, self.tuning.threads) if small else self.tuning.threads
        pieces = -(-self.place.row_bytes // 4096)
        units = tokens * pieces + self._session.world_size * -(-tokens // 32)
        if units > 1024:
            return most, self.tuning.threads
        warps = self.tuning.small_threads // 32
        return max(min(-(-units // warps), self._session.properties.sms), 1), self.tuning.small_threads

    def _combine_shape(self, tokens: int) -> tuple[int, int]:
        if self._crossing is not None:
            return self._crossing.shape(self.tuning.combine_blocks, self.tuning.threads)
        if self._push:
            return self.tuning.combine_blocks, self.tuning.threads
        units = tokens * -(-self.place.combine_row_bytes // 2048)
        warps = self.tuning.threads // 32
        return max(min(-(-units // warps), self.tuning.combine_blocks), 1), self.tuning.threads

    # --- the rest ------------------------------------------------------------------------------------------------

    def _new_state(self, like: Any, tokens: int, reused: State | None, on: int) -> State:
        place = self._places.get(tokens)
        if place is None:
            place = handle_layout(self._spec, self._session.world_size, self.place, tokens, self._crossing)
            self._places[tokens] = place
        if reused is not None and self._spec.layout == "rank":
            # Nothing of such a handle changes with the rows or the weights that travel.
            return State(tokens, reused.memory, place, reused.rows, reused.shared or reused.memory)
        memory = self._allocator.empty(like, (place.total,), "uint8", on)
        if reused is None:
            return State(tokens, memory, place, 0)
        return State(tokens, memory, place, reused.rows, reused.shared or reused.memory)

    def _name_handle(self, args: Any, state: State) -> None:
        own, place = state.memory.ptr, state.place
        shared = state.shared.ptr if state.shared is not None else own
        args.pos, args.idx, args.counts = shared + place.pos, shared + place.idx, shared + place.counts
        args.expert_counts, args.expert_offsets = shared + place.expert_counts, shared + place.expert_offsets
        args.weights, args.source, args.lists = own + place.weights, own + place.source, shared + place.lists

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

    def _offset(self, x: Buffer) -> int:
        """Where in the window x lies, or -1."""
        return self._offset_of(x.ptr, x.nbytes)

    def _offset_of(self, ptr: int, nbytes: int) -> int:
        at = ptr - self._window.ptr
        return int(at) if at >= 0 and at + nbytes <= self._window.nbytes and nbytes else -1

    def _refuse_open_combine(self) -> None:
        if self._combine_open:
            raise ContractError("a combine_send is still without its combine_recv: receive it before the next combine")

    def _in_output(self, offset: int) -> bool:
        """Whether rows at this offset lie where ep.expert_output puts them."""
        return offset >= self.place.slots + self._slots.combine_slot * self.place.slot_bytes

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
        return bool(self.library.value("stream_capturing", c_int, self._session.device, on))

    def _finish(self, stream: int | None) -> None:
        """Callers without streams get finished results."""
        if stream is None:
            self.library.stream_sync(self._session.device, self._session.stream)
            self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise HalError(f"this communicator can only be closed, since it met a PeerTimeout: {self._failure}")
        try:
            self._faults.check(self._timeout)
        except PeerTimeout as error:
            self._failure = str(error)
            self._session.fail(error)
            raise

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
            self._over_hosts.close()
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
        for memory in (self._state_memory, self._scratch):
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
    return wanted == "push" or (not wanted and spec.max_tokens > PULL_TOKENS)


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
