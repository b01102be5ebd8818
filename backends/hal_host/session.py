# SPDX-License-Identifier: Apache-2.0
"""The host backend's session: the seam of hal/backend.py over whichever transport the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hal.arrays import Buffer
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import HalError
from hal.ordering import Order, QuietScope, SignalOp
from hal.registry import get_transport
from hal.sizing import Part, window_parts
from hal_host._engine import AnyFabric, ShmFabric, ShmTransport, buffer_parts, memory

if TYPE_CHECKING:
    from hal.backend import Engine
    from hal.ordering import OrderingProfile
    from hal_host.transport import HostTransport

SLOT_BYTES = 64
"""One cache line for each slot, since slots of different publishers must not share one."""


class HostBackend:
    """The loaded backend (hal/backend.py)."""

    name = "host"

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> HostSession:
        transport = get_transport(config.transport or "shm", "host").load()(config, bootstrap)
        try:
            return HostSession(config, transport)
        except BaseException:
            transport.close()
            raise

    def buffer_parts(self, spec: ExpertParallelSpec, ranks: int, nodes: int, transport: str | None) -> list[Part]:
        """See :func:`hal.sizing.buffer_parts`."""
        from hal_host.engine import shape_of

        shape = shape_of(spec, ranks, nodes)
        return window_parts(buffer_parts(shape), shape.signal_stride)


class HostSession:
    """One rank's connection. The communicator's own slots, and a barrier counter for each peer, are a window too."""

    def __init__(self, config: HalConfig, transport: HostTransport) -> None:
        """Collective."""
        self.config, self.transport = config, transport
        self.rank, self.world_size, self.queues = transport.rank, transport.world_size, transport.queues
        self.profile: OrderingProfile = transport.profile
        self._slots = transport.allocate((config.signal_slots + self.world_size) * SLOT_BYTES)
        self._barriers = [0] * self.world_size

    def allocate(self, nbytes: int) -> int:
        self._require_usable()
        return self.transport.allocate(nbytes)

    def view(self, window: int) -> Buffer:
        owner = np.frombuffer(self.transport.memory(window), np.uint8)
        return Buffer(owner.ctypes.data, owner.shape, "uint8", "cpu", owner)

    def free(self, window: int) -> None:
        self.transport.free(window)

    def fabric(self, window: int, timeout: float | None = None) -> ShmFabric | AnyFabric:
        """What compiled kernels run on: inlined shared memory, or calls to any other transport."""
        self._require_usable()
        seconds = self.config.timeout if timeout is None else timeout
        transport: Any = self.transport
        if isinstance(transport, ShmTransport):
            return ShmFabric(transport, window, seconds)
        return AnyFabric(transport, window, seconds)

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None:
        self._require_usable()
        if src.nbytes:
            self.transport.put(window, queue, peer, dst_offset, memory(src.ptr, src.nbytes, True), order)

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None:
        self._require_usable()
        self.transport.signal(self._slots, queue, peer, slot * SLOT_BYTES, value, op, order)

    def read_signal(self, slot: int) -> int:
        return self.wait(slot, 0, self.config.timeout, None)

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int:
        self._require_usable()
        return self.transport.wait(
            self._slots, slot * SLOT_BYTES, at_least, -1 if source is None else source, 0, "wait", timeout
        )

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        self._require_usable()
        self.transport.quiet(queue, -1 if peer is None else peer, scope)

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        """Every member counts up its slot at every other member, then waits for theirs. Counts are kept for each pair
        of ranks, so barriers of different teams may alternate."""
        self._require_usable()
        if complete:
            for queue in range(self.queues):
                self.transport.quiet(queue, -1, QuietScope.REMOTE)
        first = self.config.signal_slots
        others = [r for r in ranks if r != self.rank]
        for peer in others:
            slot = (first + self.rank) * SLOT_BYTES
            self.transport.signal(self._slots, 0, peer, slot, 1, SignalOp.ADD, Order.STRONG)
        for peer in others:
            self._barriers[peer] += 1
            slot = (first + peer) * SLOT_BYTES
            self.transport.wait(self._slots, slot, self._barriers[peer], peer, 0, "barrier", timeout)

    def expert_parallel(self, spec: ExpertParallelSpec) -> Engine:
        self._require_usable()
        from hal_host.engine import HostEngine

        engine: Engine = HostEngine(self, spec)
        return engine

    def abort(self, reason: str) -> None:
        self.transport.abort(reason)

    def close(self) -> None:
        self.transport.close()

    def _require_usable(self) -> None:
        if self.transport.failed:
            raise HalError("this communicator was closed or met a PeerTimeout, and can only be closed; connect again")
