# SPDX-License-Identifier: Apache-2.0
"""One rank's connection to ranks of other NVLink domains: NVLink inside this rank's own, GIN to the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hal.arrays import Buffer
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import BackendUnavailable, ContractError, HalError, PeerTimeout
from hal.ordering import Order, QuietScope, SignalOp, profile
from hal_cuda import native
from hal_cuda.memory import Pooled
from hal_cuda.session import CudaSession, SymmetricMemory, _op

if TYPE_CHECKING:
    from hal_cuda.engine import CudaEngine
    from hal_cuda.masking import CudaMaskingEngine

SIGNALS = "HAL_CUDA_GIN_SIGNALS"
"""``auto``: strong signals where the network has them. ``weak``: do without (profile gin-weak), to try such a network."""
TRAFFIC_CLASS = "HAL_CUDA_GIN_TRAFFIC_CLASS"
"""A number for the network's packets; unset = NCCL's own choice."""
KERNEL_SIGNALS = 64
"""Indexed signals of each queue that kernels may use."""
_OUTBOX = 4 << 20
"""Bytes that wait for the network to read them; longer puts go in parts of this size."""
_UNREAD = 16
"""Posts to one (queue, peer) until the network must have read them: below any queue's depth, so no post waits for room."""
_NCCL_CHOOSES = -(1 << 31)


@dataclass(frozen=True)
class Capabilities:
    """What GIN is here, in words."""

    gin_type: str
    """none, proxy, GDAKI or GPI."""
    connection: str
    """full: every rank can be reached. rail: those with the same place in their NVLink domain."""
    queues: int
    strong_signals: bool
    va_signals: bool
    """Signals may be words of windows."""
    traffic_class: int | None
    lsa_size: int
    rail_size: int


class Gin:
    """GIN of one NCCL communicator: its description for kernels, and what it can do."""

    def __init__(
        self, library: native.Library, comm: int, config: HalConfig, bootstrap: Bootstrap, apart: bool = False
    ) -> None:
        """Collective, before the first window. BackendUnavailable says why where there is none. ``apart``: every rank is a
        domain of its own, whatever NCCL's are."""
        wanted = {SIGNALS: os.environ.get(SIGNALS, "auto"), TRAFFIC_CLASS: os.environ.get(TRAFFIC_CLASS, "")}
        bootstrap.agree("settings of GIN", wanted)
        needs = native.GinNeeds(
            queues=config.queues,
            signals=KERNEL_SIGNALS,
            strong=int(_choice(wanted[SIGNALS]) == "auto"),
            traffic_class=_traffic_class(wanted[TRAFFIC_CLASS]),
            slots=config.signal_slots,
        )
        self.record: Any = native.Gin()
        got = native.GinProperties()
        if library.raw_gin_create(comm, byref(needs), byref(self.record), byref(got)) != 0:
            reason = library.reason()
            if "HAL_SWNIC_" in reason:  # a variable of the emulated network, which another transport would not mend
                raise ContractError(reason)
            raise BackendUnavailable("cuda", reason, "use transport=lsa on ranks of one NVLink domain")
        if apart:
            self.record.lsa_size, self.record.lsa_rank, self.record.peers = 1, 0, self.record.words
        self.capabilities = Capabilities(
            native.GIN_TYPES.get(got.type, str(got.type)),
            native.GIN_CONNECTIONS[got.connection],
            int(got.contexts),
            bool(got.strong),
            bool(got.va_signals),
            None if got.traffic_class == _NCCL_CHOOSES else int(got.traffic_class),
            int(self.record.lsa_size),
            int(self.record.world // self.record.lsa_size),
        )


class GinSession(CudaSession):
    """See :class:`hal.backend.Session`. To ranks of other domains relaxed operations are only posted: what the profile
    (gin, or gin-weak where the network has no strong signals) allows can be seen."""

    def __init__(
        self,
        library: native.Library,
        comm: int,
        properties: native.Properties,
        config: HalConfig,
        bootstrap: Bootstrap,
        gin: Gin,
        device_name: str | None = None,
    ) -> None:
        self.gin, self.capabilities = gin.record, gin.capabilities
        properties.lsa_size, properties.lsa_rank = gin.record.lsa_size, gin.record.lsa_rank
        super().__init__(library, comm, properties, config, bootstrap, device_name)
        self.profile = profile("gin" if gin.capabilities.strong_signals else "gin-weak")
        self._outbox = self.memory(_OUTBOX)
        self._outbox_end = 0
        self._unread: dict[tuple[int, int], int] = {}
        """Posts to each (queue, peer) since its sources were last known to be read."""
        self.signalled: dict[int, int] = {}
        """Rounds of hal_cuda.gin_check in which indexed signals of a queue were raised."""
        self._hosts = self.world_size // len(self.team)
        if self._hosts > 1 and gin.capabilities.connection != "full":
            self.why_not_mask = (
                f"{self.world_size} ranks are on {self._hosts} hosts, and GIN has rail connections only between these, but "
                "once a rank is lost, rows go from every rank to every other"
            )

    # --- words ---------------------------------------------------------------------------------------------------

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None:
        if peer in self.team:
            super().put(window, dst_offset, src, peer, queue, order)
            return
        target = self._windows[window]
        if order is Order.STRONG and src.nbytes:
            self._check_reach(peer)
            self._run([_op(native.QUIET, peer, queue, order)])
            order = Order.RELAXED
        for start in range(0, src.nbytes, _OUTBOX):
            nbytes = min(src.nbytes - start, _OUTBOX)
            source_window, source = self._source(src, start, nbytes)
            self._post(
                native.PUT, peer, queue, order, address=dst_offset + start, window=target.record.handle, bytes=nbytes,
                source=source, source_window=source_window,
            )  # fmt: skip

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None:
        # Where the profile has no weak signal of its own, none is sent.
        order = self.profile.signal_order(order, bundled=False)
        self._post(native.SIGNAL, peer, queue, order, address=slot, value=value, signal_op=int(op))

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        if scope is QuietScope.SOURCE:
            self._flush([queue])
            return
        if peer is not None and peer not in self.team:
            self._check_reach(peer)
        if peer is None:
            self._quiet_all(queue)
        else:
            self._run([_op(native.QUIET, peer, queue, Order.STRONG)])

    def _quiet_all(self, queue: int) -> None:
        """To all ranks that are left; with none lost, side by side."""
        lost = self.lost_ranks
        left = [rank for rank in range(self.world_size) if rank not in lost] if lost else [-1]
        self._quiets([(queue, peer) for peer in left])

    def _quiets(self, flows: Sequence[tuple[int, int]], ep: Any = None) -> None:
        """Of each (queue, peer), one after the other in as few launches as may be; peer -1: of all, side by side."""
        ops = [_op(native.QUIET, peer, queue, Order.STRONG) for queue, peer in flows]
        for start in range(0, len(ops), native.MAX_OPS):
            self._run(ops[start : start + native.MAX_OPS], ep=ep)

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        if self.agreement is not None:
            if complete:
                self._deliver(ranks, timeout)
            self.agreement.barrier(ranks, complete, timeout)  # the hosts know who is left
            return
        outside = [rank for rank in ranks if rank not in self.team]
        if all(self._reaches(rank) for rank in outside):
            self._meet(ranks, complete, timeout)
            return
        if len(ranks) != self.world_size:
            raise ContractError(
                f"a barrier of ranks {list(ranks)} needs GIN between all of them, and GIN reaches only the rail here; use "
                "the teams world, lsa or rail"
            )
        # Over the rails: what a rank put before is at its rail's ranks, and these tell their neighbours.
        self._meet(self.team, True, timeout)
        self._meet([rank for rank in ranks if self._reaches(rank)], complete, timeout)
        self._meet(self.team, True, timeout)

    def _deliver(self, ranks: Iterable[int], timeout: float) -> None:
        """What this rank put on any queue is at those of ``ranks`` that are left."""
        for peer in ranks:
            for queue in range(self.queues):
                if peer in self.team or peer in self.lost_ranks:
                    break
                try:
                    self._run([_op(native.QUIET, peer, queue, Order.STRONG)], timeout)
                except PeerTimeout:
                    if peer not in self.watch.gone:
                        raise

    def _meet(self, ranks: Iterable[int], complete: bool, timeout: float) -> None:
        others = [rank for rank in ranks if rank != self.rank]
        order = Order.STRONG if complete else Order.RELAXED
        if complete and not self.capabilities.strong_signals and any(rank not in self.team for rank in others):
            for queue in range(self.queues):  # all peers of a queue at once, before one after the other
                self._run([_op(native.QUIET, -1, queue, order)], timeout)
        for kind in (native.ARRIVE, native.AWAIT):
            for start in range(0, len(others), native.MAX_OPS):
                some = others[start : start + native.MAX_OPS]
                self._run([_op(kind, peer, 0, order, stage=native.STAGE_BARRIER) for peer in some], timeout)

    def _wait(self, offset: int, at_least: int, timeout: float, source: int, stage: int) -> int:
        self._run([_op(native.WAIT, source, 0, Order.STRONG, address=offset, value=at_least, stage=stage)], timeout)
        return int(self._result.value)

    def _word_of(self, slot: int) -> int:
        return slot

    # --- posting -------------------------------------------------------------------------------------------------

    def _reaches(self, peer: int) -> bool:
        size = len(self.team)
        return peer in self.team or self.capabilities.connection == "full" or peer % size == self.rank % size

    def _check_reach(self, peer: int) -> None:
        if not self._reaches(peer):
            raise ContractError(
                f"rank {self.rank} cannot reach rank {peer}: GIN has rail connections here, to the ranks with the same "
                "place in their NVLink domain; go through that rank's neighbour on this rail (team 'rail', then 'lsa')"
            )

    def _post(self, kind: int, peer: int, queue: int, order: Order, **fields: int) -> None:
        self._check_reach(peer)
        if peer not in self.team:
            posted = self._unread.get((queue, peer), 0)
            if posted >= _UNREAD:
                self._flush([queue])
                posted = 0
            self._unread[queue, peer] = posted + 1
        self._run([_op(kind, peer, queue, order, network=1, **fields)])

    def _flush(self, queues: Iterable[int]) -> None:
        for queue in queues:
            self._run([_op(native.QUIET, -1, queue, Order.STRONG, source_only=1)])
            for key in [key for key in self._unread if key[0] == queue]:
                del self._unread[key]

    def _source(self, src: Buffer, start: int, nbytes: int) -> tuple[int, int]:
        """(window, offset) of the bytes: where they are if that is a window, else a copy in the outbox."""
        address = src.ptr + start
        for memory in self._windows.values():
            if memory.ptr <= address and address + nbytes <= memory.ptr + memory.nbytes:
                return int(memory.record.handle), address - memory.ptr
        begin = -(-self._outbox_end // 16) * 16
        if begin + nbytes > _OUTBOX:
            self._flush({queue for queue, _ in self._unread})
            begin = 0
        self._outbox_end = begin + nbytes
        self.library.copy(self.device, self._outbox.ptr + begin, address, nbytes, self.stream)
        # The source may change when this returns, whatever kind of memory it is.
        self.library.stream_sync(self.device, self.stream)
        return int(self._outbox.record.handle), begin

    def _run(self, ops: Sequence[Any], timeout: float | None = None, ep: Any = None) -> None:
        """``ep``: what kernels are told of this session, if not the usual."""
        if all(op.kind == native.PUT and not op.network for op in ops):
            super()._run(ops, timeout)
            return
        seconds = self.config.timeout if timeout is None else timeout
        self._require_member()
        for i, op in enumerate(ops):
            self._ops[i] = op
        nanoseconds = max(int(seconds * 1e9), 1)
        ep = self._ep if ep is None else ep
        self.library.gin_ops(
            byref(ep), byref(self.gin), self._ops, len(ops), nanoseconds, self._result_address, self.stream
        )
        self.library.stream_sync(self.device, self.stream)
        self.check(seconds)

    def run_check(self, args: Any) -> None:
        """Run the kernel of :mod:`hal_cuda.gin_check` to its end."""
        seconds = self.config.timeout
        self.library.gin_check(byref(self._ep), byref(self.gin), byref(args), int(seconds * 1e9), self.stream)
        self.library.stream_sync(self.device, self.stream)
        self.check(seconds)

    # --- going on without a lost rank ----------------------------------------------------------------------------

    def expert_parallel(self, spec: ExpertParallelSpec) -> CudaEngine | CudaMaskingEngine:
        if (spec.on_peer_loss, spec.schedule) == ("mask", "hierarchical") and self._hosts > 1:
            raise ContractError(
                f"on_peer_loss='mask' with schedule='hierarchical' on {self._hosts} hosts of {len(self.team)} ranks: this "
                "schedule rounds each host's sum, and once a rank is lost, rows go from rank to rank and give other bits; use "
                "schedule='direct' or 'latency', or on_peer_loss='error'"
            )
        return super().expert_parallel(spec)

    def _session_over(
        self, comm: int, properties: native.Properties, config: HalConfig, bootstrap: Bootstrap
    ) -> CudaSession:
        domains = self.domains_of(bootstrap.ranks)
        if domains == 1:
            return super()._session_over(comm, properties, config, bootstrap)
        gin = Gin(self.library, comm, config, bootstrap, apart=domains == bootstrap.world_size)
        return GinSession(self.library, comm, properties, config, bootstrap, gin)

    # --- end -----------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        super()._settle()
        if self.masking or self.of_a_view:
            for queue in range(self.queues):
                with suppress(HalError):
                    self._quiet_all(queue)
            return
        # Those that closed need nothing more. One that closes meanwhile must not end the quiet, or words for the others, who
        # may wait for them, would be lost with this rank; its memory stays for a while yet. So nobody's last word is heard.
        left = [rank for rank in range(self.world_size) if rank not in self.team and rank not in self.watch.gone]
        unheard = Pooled(self.library, self.device, native.ABORT_WORDS.size, self.stream)
        self.library.memset(self.device, unheard.ptr, 0, native.ABORT_WORDS.size, self.stream)
        ep = native.Ep.from_buffer_copy(self._ep)
        ep.abort = unheard.ptr
        with suppress(HalError):
            self._quiets([(queue, peer) for queue in range(self.queues) for peer in left if self._reaches(peer)], ep)

    def _memories(self) -> list[SymmetricMemory]:
        return [*super()._memories(), self._outbox]


def _choice(text: str) -> str:
    if text not in ("auto", "weak"):
        raise ContractError(f"{SIGNALS} is {text!r}; choose one of: auto, weak")
    return text


def _traffic_class(text: str) -> int:
    if not text:
        return _NCCL_CHOOSES
    if not text.isdigit():
        raise ContractError(f"{TRAFFIC_CLASS} is {text!r}; it must be a number, or unset for NCCL's own choice")
    return int(text)
