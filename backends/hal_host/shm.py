# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport's set-up: segments are made here and passed between ranks as descriptors.

What runs for each message is C++ (kernels_host/transport/shm_fabric.hpp).
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hal.bootstrap import Bootstrap
from hal.config import HalConfig
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_host._engine import ShmSegment, ShmTransport
from hal_host.mesh import close_all, connect_mesh

if TYPE_CHECKING:
    from hal.ordering import OrderingProfile

CONTROL_BYTES = 4096
"""Of the control window: one page for each rank (kernels_host/transport/control_block.hpp)."""


class Shm(ShmTransport):
    """One rank's shared memory. Nothing of it has a name: it vanishes with the last process that uses it."""

    def __init__(self, config: HalConfig, bootstrap: Bootstrap) -> None:
        """Collective."""
        self._bootstrap = bootstrap
        self._links = connect_mesh(bootstrap)
        fds = [-1 if link is None else link.fileno() for link in self._links]
        super().__init__(bootstrap.rank, bootstrap.world_size, config.queues, fds)
        self.allocate(CONTROL_BYTES)

    @property
    def profile(self) -> OrderingProfile:
        from hal.ordering import profile

        return profile("shm")

    def allocate(self, nbytes: int) -> int:
        """Collective. ContractError if sizes differ between ranks, CapacityError if this machine has not the memory."""
        fd, trouble = self._create(nbytes)
        try:
            offers = self._bootstrap.all_gather([nbytes, trouble], "window")
            self._check_offers(nbytes, offers)
            fds = self._exchange(fd)
            try:
                return int(self.map([fd if p == self.rank else fds[p] for p in range(self.world_size)], nbytes))
            finally:
                for received in fds.values():
                    os.close(received)
        finally:
            if fd >= 0:
                os.close(fd)

    def memory(self, window: int) -> ShmSegment:
        return self.segment(window)

    def free(self, window: int) -> None:
        """Peers may still write to their own view of it until they free theirs."""
        self.unmap(window)

    def abort(self, reason: str) -> None:
        self.publish_failed(self.rank, reason)
        self.set_failed()

    def close(self) -> None:
        if not self.failed:
            self.publish_closed()
        self.set_failed()
        close_all(self._links)

    def _create(self, nbytes: int) -> tuple[int, list[Any] | None]:
        """A segment's descriptor, or why there is none."""
        needed, available = nbytes * self.world_size, _available_memory()
        if needed > available:
            return -1, ["capacity", needed, available]
        try:
            return ShmSegment.create(nbytes), None
        except HalError as error:
            return -1, ["error", str(error)]

    def _check_offers(self, nbytes: int, offers: list[Any]) -> None:
        sizes = [offer[0] for offer in offers]
        if any(size != nbytes for size in sizes):
            listed = ", ".join(f"rank {r}: {size}" for r, size in enumerate(sizes))
            raise ContractError(f"a window has the same size on every rank, not {listed} bytes")
        for rank, (_, trouble) in enumerate(offers):
            if trouble and trouble[0] == "capacity":
                what = f"symmetric memory for {self.world_size} ranks (bytes)"
                raise CapacityError(what, trouble[1], trouble[2], "use smaller windows or fewer ranks on this machine")
            if trouble:
                raise HalError(f"rank {rank} could not make a window: {trouble[1]}")

    def _exchange(self, fd: int) -> dict[int, int]:
        """Send this rank's descriptor to every peer and take theirs."""
        received: dict[int, int] = {}
        try:
            for link in self._links:
                if link is not None:
                    link.settimeout(self._bootstrap.timeout)
                    with suppress(OSError):  # a lost peer is reported by the read below
                        socket.send_fds(link, [b"w"], [fd])
            for peer, link in enumerate(self._links):
                if link is not None:
                    received[peer] = self._take(link, peer)
        except BaseException:
            for other in received.values():
                os.close(other)
            raise
        return received

    def _take(self, link: socket.socket, peer: int) -> int:
        try:
            data, fds, _, _ = socket.recv_fds(link, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            data, fds, reason = b"", [], str(error)
        else:
            reason = "its process died"
        if not data or len(fds) != 1:
            raise PeerTimeout(peer, "window", expected=1, seen=0, seconds=self._bootstrap.timeout, reason=reason)
        return fds[0]


def _available_memory() -> int:
    """Bytes that this machine can still give, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62
