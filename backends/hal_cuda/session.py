# SPDX-License-Identifier: Apache-2.0
"""One rank's connection over NVLink: symmetric windows, and the ordering words as small kernels on a stream of its own."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from ctypes import byref, c_uint64, c_void_p
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_host.mesh import connect_mesh
from hal_host.session import HostSession, ranks_of
from hal_host.shm import Shm

from hal.arrays import Buffer
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import ContractError, HalError, PeerTimeout
from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp, profile
from hal_cuda import native
from hal_cuda.engine import CudaEngine
from hal_cuda.faults import Faults
from hal_cuda.tuning import Tuning, allowed_sms, tuning
from hal_cuda.watch import Watch

if TYPE_CHECKING:
    from hal.checker.program import Program
    from hal_cuda.masking import CudaMaskingEngine

_LINE = 64
_UNIQUE_ID_BYTES = 128
_CLOSE_SECONDS = 1.0
"""How long a healthy rank waits at close for peers that may still write here."""


class SymmetricMemory:
    """A window on this rank; freed by the session, and not before the last array that views it is gone."""

    def __init__(self, library: native.Library, comm: int, team: range, nbytes: int) -> None:
        """Collective. ``team``: the ranks of this one's NVLink domain."""
        self._library, self._comm, self._team = library, comm, team
        self.record: Any = native.Window()
        library.window_create(comm, max(nbytes, 16), byref(self.record))
        if len(team) == 1:  # NCCL's own team may be larger (hal_cuda.gin_session.Gin), and begin at another rank
            self.record.peers = self.record.ptr
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

    def free(self, device: int) -> None:
        """The same once the communicator was aborted."""
        self._library.window_free(self._comm, device, byref(self.record))


class View:
    """Owner of an array over a window."""

    __slots__ = ("__weakref__", "memory")

    def __init__(self, memory: SymmetricMemory) -> None:
        self.memory = memory


class CudaSession:
    """See :class:`hal.backend.Session`. Operations are complete in the order of their calls, on every queue."""

    gin: Any = None
    """What leads to ranks of other domains (``native.Gin``); None in a session of one domain."""
    why_not_mask: str = ""
    """Why ``on_peer_loss="mask"`` cannot be had here; empty if it can."""
    of_a_view = False
    """The session of one view (masking.py): it says of itself alone that it gave up, since why is found out by the hosts."""

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
        self.ranks, self.run_size = bootstrap.ranks, bootstrap.run.world_size
        """The run's ranks that are in this session, all but in one of a view; how many the run has."""
        self.agreement: HostSession | None = None
        """Once an ExpertParallel masks lost ranks: where the hosts agree on who is left, over shared memory."""
        self.masking = False
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
        self._engines: weakref.WeakSet[CudaEngine | CudaMaskingEngine] = weakref.WeakSet()
        self.views: list[CudaSession] = []
        """Of the ExpertParallels that mask lost ranks; they end with this session."""
        self._failed = self._closed = False
        self._barriers = [0] * self.world_size
        self._streams: list[int] = []
        self.stream = self.new_stream()
        # Signal slots, one barrier slot for each peer, and the words that end waits, each on a line of its own.
        self.control = self._symmetric((config.signal_slots + self.world_size + 1) * _LINE)
        self.abort_words = self.control.at(self.rank, (config.signal_slots + self.world_size) * _LINE)
        """Address of this rank's abort words (hal_cuda.h)."""
        self._notices = _Notices(library, self.device, self.abort_words)
        self.watch = Watch(self.rank, connect_mesh(bootstrap), self._hear)
        self.faults = Faults(library, self.device, self.watch, self.ranks)
        self._ep = native.Ep(device=self.device, error=self.faults.address, abort=self.abort_words)
        self._ops = (native.Op * native.MAX_OPS)()
        self._staging = _Staging(library, self.device)
        self._result, self._result_address = _pinned_word(library, self.device)
        bootstrap.barrier()

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
        return self._wait(self._word_of(slot), 0, self.config.timeout, -1, native.STAGE_WAIT)

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int:
        if source is not None and source in self.lost_ranks:
            seen = self.read_signal(slot)
            if seen < at_least:
                raise PeerTimeout(source, "wait", expected=at_least, seen=seen, reason="it is masked")
            return seen
        awaited = -1 if source is None else source
        return self._wait(self._word_of(slot), at_least, timeout, awaited, native.STAGE_WAIT)

    def _word_of(self, slot: int) -> int:
        """What :meth:`_wait` knows a signal slot by."""
        return slot * _LINE

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        self._run([_op(native.QUIET, -1 if peer is None else peer, queue, Order.STRONG)])

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        if self.agreement is not None:
            # Words are complete when their calls return, so it suffices that the hosts meet; they know who is left.
            self.agreement.barrier(ranks, complete, timeout)
            return
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
        self._require_member()
        for i, op in enumerate(ops):
            self._ops[i] = op
        nanoseconds = max(int(seconds * 1e9), 1)
        self.library.ops(byref(self._ep), self._ops, len(ops), nanoseconds, self._result_address, self.stream)
        self.library.stream_sync(self.device, self.stream)
        self.check(seconds)

    def check(self, timeout: float) -> None:
        try:
            self.faults.check(timeout)
        except PeerTimeout as error:
            if not self.masking:
                self.fail(error)
            else:  # the others may be well without that rank
                self.faults.forget()
                self._notices.forget_failure()
            raise

    def play(self, program: Program, repetitions: int, seed: int) -> list[dict[tuple[int, str], int]]:
        """Collective. See :class:`hal.backend.Backend`."""
        from hal_cuda.litmus import play

        return play(self, program, repetitions, seed)

    # --- dispatch and combine ------------------------------------------------------------------------------------

    def expert_parallel(self, spec: ExpertParallelSpec) -> CudaEngine | CudaMaskingEngine:
        engine: CudaEngine | CudaMaskingEngine
        if spec.on_peer_loss == "mask":
            from hal_cuda.masking import CudaMaskingEngine

            engine = CudaMaskingEngine(self, self._agree_by_hosts(), self._bootstrap, spec)
        else:
            engine = CudaEngine(self, spec)
        self._engines.add(engine)
        return engine

    def tuning(self, spec: ExpertParallelSpec, push: bool) -> Tuning:
        """Blocks and threads of an engine's launches."""
        return tuning(spec, self.world_size, push, self.sms)

    @property
    def sms(self) -> int:
        """Multiprocessors that a launch may take."""
        there = int(self.properties.sms)
        return min(there, allowed_sms() or there)

    # --- going on without a lost rank ----------------------------------------------------------------------------

    def among(self, bootstrap: Bootstrap, nodes: int, stream: int) -> CudaSession:
        """Collective among the ranks of ``bootstrap``: a session of these alone, which shares nothing with this one but the
        GPU. ``nodes``: how they sum (topology.nodes). ``stream`` outlives it, for arrays may."""
        config = replace(self.config, signal_slots=1, topology=replace(self.config.topology, nodes=nodes))
        session = self._join(config, bootstrap)
        self.library.stream_destroy(self.device, session._streams.pop())
        session.stream, session.of_a_view = stream, True
        return session

    def new_stream(self) -> int:
        """One that ends with this session."""
        self._streams.append(int(self.library.value("stream_create", c_uint64, self.device)))
        return self._streams[-1]

    def domains_of(self, ranks: Sequence[int]) -> int:
        """NVLink domains in the session of a view. They are equally large: once a rank is lost, those that are left are each
        one of their own, unless all of them are in one of this session's."""
        hosts = len({rank // len(self.team) for rank in ranks})
        return hosts if hosts == 1 or len(ranks) == self.world_size else len(ranks)

    def _join(self, config: HalConfig, bootstrap: Bootstrap) -> CudaSession:
        comm = create_communicator(self.library, bootstrap, self.device)
        properties = native.Properties()
        try:
            self.library.comm_properties(comm, byref(properties))
            return self._session_over(comm, properties, config, bootstrap)
        except BaseException:
            self.library.raw_comm_destroy(comm, 1)
            raise

    def _session_over(
        self, comm: int, properties: native.Properties, config: HalConfig, bootstrap: Bootstrap
    ) -> CudaSession:
        return CudaSession(self.library, comm, properties, config, bootstrap)

    @property
    def lost_ranks(self) -> tuple[int, ...]:
        """Those that are masked."""
        if self.agreement is None:
            return ()
        transport: Any = self.agreement.transport
        return ranks_of(transport.newest_view().lost)

    def end_waits(self) -> None:
        """Every wait for a peer ends, in this rank's kernels; :meth:`wait_again` takes that back."""
        self._notices.write(None, frozenset(range(self.world_size)) - {self.rank})

    def wait_again(self) -> None:
        self._notices.forget_closed()
        self._hear(None if self.watch.lost is None else self.watch.lost[0], self.watch.closed)

    def _agree_by_hosts(self) -> HostSession:
        """Collective, the first time."""
        if self.agreement is None:
            transport: Any = Shm(self.config, self._bootstrap)
            transport.mask_lost_ranks()
            self.agreement = HostSession(self.config, transport)
            self.agreement.masking = self.masking = True
        return self.agreement

    def _hear(self, failed: int | None, closed: Collection[int]) -> None:
        """The watching thread: whose failure ends every wait, and whose end those for them. With masking a rank that failed
        ends those for itself alone."""
        if self.masking:
            failed, closed = None, self.watch.gone
        self._notices.write(failed, closed)

    def _require_member(self) -> None:
        # At close the agreement has ended already, and words may still have to be settled.
        if not self._closed and self.agreement is not None and self.agreement.transport.failed:
            raise HalError("the others went on without this rank: this communicator can only be closed; connect again")

    # --- end -----------------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Somebody of the run failed, and no ExpertParallel masks it: its memory may still be written, and NCCL can only be
        aborted."""
        return self._failed or (self.watch.lost is not None and not self.masking)

    def fail(self, error: PeerTimeout) -> None:
        """A wait of this rank failed: the peers hear because of whom, so that theirs end too."""
        self._failed = True
        self.watch.say_failed(self.rank if self.of_a_view else error.rank, error.reason)

    def abort(self, reason: str) -> None:
        self._failed = True
        self.watch.say_failed(self.rank, reason)
        for view in self.views:
            view.abort(reason)
        if self.agreement is not None:
            self.agreement.abort(reason)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._failed |= self.agreement is not None and self.agreement.transport.failed  # masked by the others
        self._close_views()
        if not self.failed and self.world_size > 1:
            self._settle()
            self.watch.say_closed()
            # A peer may be ahead by one word that it still writes here; give it the time to finish.
            try:
                self._bootstrap.all_gather(None, "closing", _CLOSE_SECONDS)
            except (HalError, ContractError):
                self._failed = self.of_a_view or self.masking  # some may have gone on without: NCCL only aborts it then
        self._failed = self.failed or (self.masking and self.watch.lost is not None)
        self.watch.close()
        self._notices.close()  # what it still writes lies in a window that is freed below
        for engine in list(self._engines):
            engine.close()
        with suppress(HalError):
            if not self._failed:
                for memory in self._memories():
                    if not memory.in_use:
                        memory.destroy()
            self.library.comm_destroy(self._comm, int(self._failed))
            for stream in self._streams:
                self.library.stream_destroy(self.device, stream)
        self.faults.close()

    def _close_views(self) -> None:
        """All of them are told first: whoever waits for this rank need not wait until the first is closed."""
        if self.agreement is None:
            return
        for view in self.views:
            if not view.failed:
                view._settle()
                view.watch.say_closed()
        for view in self.views:
            view.close()
        self.agreement.close()

    def _settle(self) -> None:
        """What this rank owes its peers is out before they are told that it has gone."""
        for engine in list(self._engines):
            engine.drain()

    def _memories(self) -> list[SymmetricMemory]:
        return [*self._windows.values(), *self._retired, self.control]


def _op(kind: int, peer: int, queue: int, order: Order, **fields: int) -> Any:
    return native.Op(kind=kind, peer=peer, queue=queue, order=int(order), **fields)


def _pinned_word(library: native.Library, device: int) -> tuple[c_uint64, int]:
    host, address = c_void_p(), c_uint64()
    library.host_alloc(device, 8, byref(host), byref(address))
    return c_uint64.from_address(host.value or 0), int(address.value)


class _Notices:
    """Writes this rank's abort words in device memory, by a stream of its own: kernels that wait hold the others up."""

    def __init__(self, library: native.Library, device: int, words: int) -> None:
        self._library, self._device, self._words = library, device, words
        self._stream = int(library.value("stream_create", c_uint64, device))
        host, address = c_void_p(), c_uint64()
        library.host_alloc(device, native.ABORT_WORDS.size, byref(host), byref(address))
        self._host = host.value or 0
        self._lock = threading.Lock()
        self._closed: frozenset[int] = frozenset()

    def write(self, failed: int | None, closed: Collection[int]) -> None:
        """As hal_cuda.h states them; who closed stays so. What they say must be there before the word that says so."""
        with self._lock:
            self._closed |= frozenset(closed)
            parts = ([(8, 8), (4, 4)] if self._closed else []) + ([(0, 4)] if failed is not None else [])
            self._write(0 if failed is None else 2 + failed, parts)

    def forget_failure(self) -> None:
        """This rank's kernels may wait again, after one that failed."""
        with self._lock:
            self._write(0, [(0, 4)])

    def forget_closed(self) -> None:
        with self._lock:
            self._closed = frozenset()
            self._write(0, [(4, 4), (8, 8)])

    def _write(self, failed: int, parts: Sequence[tuple[int, int]]) -> None:
        mask = sum(1 << rank for rank in self._closed if rank < native.CLOSED_RANKS)
        data = native.ABORT_WORDS.pack(failed, int(bool(self._closed)), mask)
        ctypes.memmove(self._host, data, len(data))
        with suppress(HalError):  # a device that does not even copy reports it to whoever uses it
            for offset, nbytes in parts:
                self._library.copy(self._device, self._words + offset, self._host + offset, nbytes, self._stream)
            self._library.stream_sync(self._device, self._stream)  # the next one writes the same pinned memory

    def close(self) -> None:
        with self._lock, suppress(HalError):
            self._library.stream_sync(self._device, self._stream)
            self._library.stream_destroy(self._device, self._stream)
        self._library.raw_host_free(self._host)


class _Staging:
    """Pinned memory for puts from host memory; a put is complete before the next uses it."""

    def __init__(self, library: native.Library, device: int) -> None:
        self._library, self._device = library, device
        self._host, self._address, self._nbytes = 0, 0, 0

    def take(self, src: Buffer) -> int:
        self._grow(src.nbytes)
        ctypes.memmove(self._host, src.ptr, src.nbytes)
        return self._address

    def _grow(self, nbytes: int) -> None:
        if nbytes <= self._nbytes:
            return
        if self._host:
            self._library.host_free(self._host)
        host, address = c_void_p(), c_uint64()
        self._nbytes = max(2 * self._nbytes, nbytes, 4096)
        self._library.host_alloc(self._device, self._nbytes, byref(host), byref(address))
        self._host, self._address = host.value or 0, int(address.value)


def create_communicator(library: native.Library, bootstrap: Bootstrap, device: int) -> int:
    """Collective. A communicator of HAL's own over the ranks of ``bootstrap``."""
    identity = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
    if bootstrap.rank == 0:
        library.unique_id(identity)
    identity.raw = bootstrap.all_gather(identity.raw, "NCCL unique id")[0]
    return int(library.value("comm_create", c_void_p, identity, bootstrap.world_size, bootstrap.rank, device))
