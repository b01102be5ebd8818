# SPDX-License-Identifier: Apache-2.0
"""One rank's connection over NVLink: symmetric windows, and the ordering words as small kernels on a stream of its own."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_uint64, c_void_p
from typing import Any

from hal.arrays import Buffer
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import ContractError, HalError
from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp, profile
from hal_cuda import native
from hal_cuda.engine import CudaEngine
from hal_cuda.faults import Faults
from hal_cuda.sizing import Tuning, tuning

_LINE = 64
_CLOSED = 1 << 32
_CLOSE_SECONDS = 1.0
"""How long a healthy rank waits at close for peers that may still write here."""


class SymmetricMemory:
    """A window on this rank; freed by the session, and not before the last array that views it is gone."""

    def __init__(self, library: native.Library, comm: int, team: range, nbytes: int) -> None:
        """Collective. ``team``: the ranks of this one's NVLink domain."""
        self._library, self._comm, self._team = library, comm, team
        self.record: Any = native.Window()
        library.window_create(comm, max(nbytes, 16), byref(self.record))
        self.ptr, self.nbytes = int(self.record.ptr), nbytes
        self._views: weakref.WeakSet[View] = weakref.WeakSet()
        self.kept = False
        """An engine's arrays still view it: it goes with the process."""

    def at(self, peer: int, offset: int) -> int:
        """As this device addresses it. ContractError for a rank of another NVLink domain, which has no address here."""
        if peer not in self._team:
            raise ContractError(
                f"rank {peer} is in another NVLink domain than this rank's ({self._team[0]} … {self._team[-1]}): loads and "
                "stores do not reach it, operations between domains need GIN"
            )
        return int(self.record.peers + (peer - self._team[0]) * self.record.peer_stride + offset)

    @property
    def in_use(self) -> bool:
        return self.kept or bool(self._views)

    def owner(self) -> View:
        """Owner of an array over this window."""
        view = View(self)
        self._views.add(view)
        return view

    def destroy(self) -> None:
        self._library.window_destroy(self._comm, byref(self.record))


class View:
    """Owner of an array over a window."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: SymmetricMemory) -> None:
        self.memory = memory


class CudaSession:
    """See :class:`hal.backend.Session`. Operations are complete in the order of their calls, on every queue."""

    gin: Any = None
    """What leads to ranks of other domains (``native.Gin``); None in a session of one domain."""

    def __init__(
        self,
        library: native.Library,
        comm: int,
        properties: native.Properties,
        config: HalConfig,
        bootstrap: Bootstrap,
        device_name: str | None = None,
    ) -> None:
        """``device_name``: where arrays live, if not ``cuda:N``."""
        self.rank, self.world_size, self.queues = bootstrap.rank, bootstrap.world_size, config.queues
        self.profile: OrderingProfile = profile("lsa")
        self.device = int(properties.device)
        self.device_name = device_name or f"cuda:{self.device}"
        self.properties, self.config, self.library = properties, config, library
        self._comm, self._bootstrap = comm, bootstrap
        first = self.rank - int(properties.lsa_rank)
        self.team = range(first, first + int(properties.lsa_size))
        """The ranks of this one's NVLink domain."""
        self._windows: dict[int, SymmetricMemory] = {}
        self._retired: list[SymmetricMemory] = []
        self._next = 0
        self._engines: weakref.WeakSet[CudaEngine] = weakref.WeakSet()
        self._failed = self._closed = False
        self._barriers = [0] * self.world_size
        self.stream = int(library.value("stream_create", c_uint64, self.device))
        # Signal slots, one barrier slot for each peer, and the word that ends every wait, each on a line of its own.
        self.control = self._symmetric((config.signal_slots + self.world_size + 1) * _LINE)
        self.faults = Faults(library, self.device)
        self._ep = native.Ep(device=self.device, error=self.faults.address, abort=self.abort_word(self.rank))
        self._ops = (native.Op * native.MAX_OPS)()
        self._staging = _Staging(library, self.device)
        self._result, self._result_address = _pinned_word(library, self.device)
        bootstrap.barrier()

    @property
    def _abort_offset(self) -> int:
        return (self.config.signal_slots + self.world_size) * _LINE

    def abort_word(self, peer: int) -> int:
        """Address of the word that ends every wait of ``peer``, a rank of this rank's NVLink domain."""
        return self.control.at(peer, self._abort_offset)

    # --- windows -------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        memory = self._symmetric(nbytes)
        identity = self._next
        self._next += 1
        self._windows[identity] = memory
        self._bootstrap.barrier()  # nobody writes before everybody has cleared
        return identity

    def view(self, window: int) -> Buffer:
        memory = self._windows[window]
        return Buffer(memory.ptr, (memory.nbytes,), "uint8", self.device_name, memory.owner())

    def free(self, window: int) -> None:
        self.retire(self._windows.pop(window))

    def retire(self, memory: SymmetricMemory) -> None:
        """Free now, or at the end if arrays still view it."""
        if memory.in_use:
            self._retired.append(memory)
        else:
            memory.destroy()

    def memory(self, nbytes: int) -> SymmetricMemory:
        """Collective. A window of an engine."""
        memory = self._symmetric(nbytes)
        self._bootstrap.barrier()
        return memory

    def _symmetric(self, nbytes: int) -> SymmetricMemory:
        return SymmetricMemory(self.library, self._comm, self.team, nbytes)

    # --- words ---------------------------------------------------------------------------------------------------

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None:
        if src.nbytes == 0:
            return
        source = src.ptr
        if not src.device.startswith("cuda"):
            source = self._staging.take(src)
        address = self._windows[window].at(peer, dst_offset)
        self._run([_op(native.PUT, peer, queue, order, address=address, source=source, bytes=src.nbytes)])

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None:
        address = self.control.at(peer, slot * _LINE)
        self._run([_op(native.SIGNAL, peer, queue, order, address=address, value=value, signal_op=int(op))])

    def read_signal(self, slot: int) -> int:
        return self._wait(slot * _LINE, 0, self.config.timeout, -1, native.STAGE_WAIT)

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int:
        return self._wait(slot * _LINE, at_least, timeout, -1 if source is None else source, native.STAGE_WAIT)

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        self._run([_op(native.QUIET, -1 if peer is None else peer, queue, Order.STRONG)])

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        slots = self.config.signal_slots
        others = [rank for rank in ranks if rank != self.rank]
        for start in range(0, len(others), native.MAX_OPS):
            some = others[start : start + native.MAX_OPS]
            mine = (slots + self.rank) * _LINE
            self._run([_op(native.SIGNAL, p, 0, Order.STRONG, address=self.control.at(p, mine), value=1) for p in some])
        for peer in others:
            self._barriers[peer] += 1
            self._wait((slots + peer) * _LINE, self._barriers[peer], timeout, peer, native.STAGE_BARRIER)

    def _wait(self, offset: int, at_least: int, timeout: float, source: int, stage: int) -> int:
        address = self.control.at(self.rank, offset)
        self._run([_op(native.WAIT, source, 0, Order.STRONG, address=address, value=at_least, stage=stage)], timeout)
        return int(self._result.value)

    def _run(self, ops: Sequence[Any], timeout: float | None = None) -> None:
        """Run words and wait for them, so that what the caller does next comes after."""
        seconds = self.config.timeout if timeout is None else timeout
        for i, op in enumerate(ops):
            self._ops[i] = op
        nanoseconds = max(int(seconds * 1e9), 1)
        self.library.ops(byref(self._ep), self._ops, len(ops), nanoseconds, self._result_address, self.stream)
        self.library.stream_sync(self.device, self.stream)
        self.check(seconds)

    def check(self, timeout: float) -> None:
        try:
            self.faults.check(timeout)
        except HalError:
            self._failed = True
            raise

    # --- dispatch and combine ------------------------------------------------------------------------------------

    def expert_parallel(self, spec: ExpertParallelSpec) -> CudaEngine:
        engine = CudaEngine(self, spec)
        self._engines.add(engine)
        return engine

    def tuning(self, spec: ExpertParallelSpec, push: bool) -> Tuning:
        """Blocks and threads of an engine's launches."""
        return tuning(spec, self.world_size, push, self.properties.sms)

    # --- end -----------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """A wait of this rank failed: the NCCL communicator can only be aborted."""
        self._failed = True

    def abort(self, reason: str) -> None:
        """End the peers' waits. The reason travels by the bootstrap; the word names this rank."""
        self._failed = True
        self._end_waits(2 + self.rank)

    def _end_waits(self, value: int) -> None:
        with suppress(HalError):
            word = self._staging.word(value)
            for peer in self.team:
                if peer != self.rank:
                    self.library.copy(self.device, self.abort_word(peer), word, 8, self.stream)
            self.library.stream_sync(self.device, self.stream)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._failed and self.world_size > 1:
            for engine in list(self._engines):
                engine.drain()  # what this rank owes its peers is out before they are told that it has gone
            self._end_waits(_CLOSED | (2 + self.rank))
            # A peer may be ahead by one word that it still writes here; give it the time to finish.
            with suppress(HalError, ContractError):
                self._bootstrap.all_gather(None, "closing", _CLOSE_SECONDS)
        for engine in list(self._engines):
            engine.close()
        with suppress(HalError):
            if not self._failed:
                for memory in self._memories():
                    if not memory.in_use:
                        memory.destroy()
            self.library.comm_destroy(self._comm, int(self._failed))
            self.library.stream_destroy(self.device, self.stream)
        self.faults.close()

    def _memories(self) -> list[SymmetricMemory]:
        return [*self._windows.values(), *self._retired, self.control]


def _op(kind: int, peer: int, queue: int, order: Order, **fields: int) -> Any:
    return native.Op(kind=kind, peer=peer, queue=queue, order=int(order), **fields)


def _pinned_word(library: native.Library, device: int) -> tuple[c_uint64, int]:
    host, address = c_void_p(), c_uint64()
    library.host_alloc(device, 8, byref(host), byref(address))
    return c_uint64.from_address(host.value or 0), int(address.value)


class _Staging:
    """Pinned memory for puts from host memory; a put is complete before the next uses it."""

    def __init__(self, library: native.Library, device: int) -> None:
        self._library, self._device = library, device
        self._host, self._address, self._nbytes = 0, 0, 0

    def take(self, src: Buffer) -> int:
        self._grow(src.nbytes)
        ctypes.memmove(self._host, src.ptr, src.nbytes)
        return self._address

    def word(self, value: int) -> int:
        self._grow(8)
        c_uint64.from_address(self._host).value = value
        return self._host

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self._nbytes:
            return
        if self._host:
            self._library.host_free(self._host)
        host, address = c_void_p(), c_uint64()
        self._nbytes = max(2 * self._nbytes, nbytes, 4096)
        self._library.host_alloc(self._device, self._nbytes, byref(host), byref(address))
        self._host, self._address = host.value or 0, int(address.value)
