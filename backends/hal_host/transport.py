# SPDX-License-Identifier: Apache-2.0
"""What a transport of the host backend must offer. Start here to write one.

Subclass :class:`hal_host.Transport <hal_host._engine.Transport>`, call its ``__init__(rank, world_size, queues)``, and
override the methods of :class:`HostTransport`. Register a ``hal.backend.TransportSpec`` under the entry point
``hal.transports``; its ``load`` returns the class, which is called with ``(config, bootstrap)`` on every rank.
The compiled dispatch and combine kernels then run on it as they run on shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from hal_host._engine import Transport

if TYPE_CHECKING:
    from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp

__all__ = ["HostTransport", "Transport"]


class HostTransport(Protocol):
    """One rank's end. Windows are named by small integers; all offsets and sizes are bytes; calls come from any thread,
    without the GIL held by the caller's kernel. The words promise what docs/contract.md says, within (peer, queue)."""

    rank: int
    world_size: int
    queues: int
    failed: bool
    """A PeerTimeout was met (kept by the base class)."""
    profile: OrderingProfile
    """What this transport promises natively."""

    def allocate(self, nbytes: int) -> int:
        """Collective; zeroed memory of the same size on every rank."""

    def memory(self, window: int) -> Any:
        """This rank's part, a writable buffer of bytes; stays valid while somebody holds it."""

    def free(self, window: int) -> None: ...

    def put(self, window: int, queue: int, peer: int, dst_offset: int, src: memoryview, order: Order) -> None:
        """``src`` stays unchanged until ``quiet(SOURCE)``. ``peer`` may be this rank."""

    def signal(
        self, window: int, queue: int, peer: int, slot_offset: int, value: int, op: SignalOp, order: Order
    ) -> None:
        """Add or set a 64-bit little-endian word of the window, atomically (adds wrap)."""

    def wait(
        self, window: int, slot_offset: int, at_least: int, source: int, queue: int, stage: str, timeout: float
    ) -> int:
        """The value of this rank's word once it is ``>= at_least``. PeerTimeout after ``timeout`` seconds, or when a
        peer is known to be dead. ``source`` is the rank whose signal is awaited, -1 for any."""

    def quiet(self, queue: int, peer: int, scope: QuietScope) -> None:
        """``peer`` < 0: all peers on that queue."""

    def set_failed(self) -> None: ...

    def abort(self, reason: str) -> None:
        """Tell the peers that this rank failed, if the transport can."""

    def close(self) -> None:
        """Idempotent; never waits for a peer."""
