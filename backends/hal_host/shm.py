# SPDX-License-Identifier: Apache-2.0
"""The shared-memory transport's set-up: segments are made here and passed between ranks as descriptors.

What runs for each message is C++ (kernels_host/transport/shm_fabric.hpp).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal.bootstrap import Bootstrap
from hal.config import HalConfig
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_host._engine import Members, ShmSegment, ShmTransport, second_look
from hal_host.mesh import close_all, connect_mesh
from hal_host.passing import Passing

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
        for link in self._links:
            if link is not None:
                link.setblocking(False)
        self._passing = Passing(self._links)
        self._windows = 0
        fds = [-1 if link is None else link.fileno() for link in self._links]
        super().__init__(bootstrap.rank, bootstrap.world_size, config.queues, fds)
        self.allocate(CONTROL_BYTES)

    @property
    def profile(self) -> OrderingProfile:
        from hal.ordering import profile

        return profile("shm")

    def allocate(self, nbytes: int) -> int:
        """Collective. ContractError if sizes differ between ranks, CapacityError if this machine has not the memory."""
        fd, trouble = self._create(nbytes, self.world_size)
        name = self._windows, 0
        self._windows += 1
        try:
            offers = self._bootstrap.all_gather([nbytes, trouble], "window")
            self._check_offers(nbytes, offers)
            for peer in self._others(Members()):
                self._passing.send(peer, name, fd)
            timeout = self._bootstrap.timeout
            fds, _ = self._take_all(Members(), lambda peer: self._passing.take(peer, name, timeout))
            return self._map(fds, fd, nbytes)
        finally:
            if fd >= 0:
                os.close(fd)

    def renew(self, window: int, members: Members, nbytes: int, ended: int, timeout: float) -> tuple[int, int]:
        """Collective among those that are left: new memory in place of ``window`` (the number of the first view's, the same
        on all ranks), which no lost rank can reach, however late it writes. Returns it, and the largest ``ended`` of all.

        Raises PeerTimeout if one of them is lost meanwhile or a later view was decided, RankMasked if that is without
        this rank, CapacityError if this machine has not the memory.
        """
        name = window, members.view
        others = self._others(members)
        fd, trouble = self._create(nbytes, len(others) + 1)
        if trouble is not None:
            raise self._refused(self.rank, trouble)
        try:
            self._passing.forget(*name)
            for peer in others:
                self._passing.send(peer, name, fd, ended)
            fds, values = self._take_all(members, lambda peer: self._await_renewal(peer, name, members, timeout))
            return self._map(fds, fd, nbytes), max(ended, *values.values()) if values else ended
        finally:
            os.close(fd)

    def look_for_later_view(self, members: Members, stage: str) -> None:
        """PeerTimeout if a later view than that of ``members`` was decided, RankMasked if it is without this rank."""
        later = self.newest_view()
        if later.view <= members.view:
            return
        self.leave_out(members.view, -1)  # raises if it is without this rank
        newly = later.lost & ~members.lost
        raise PeerTimeout((newly & -newly).bit_length() - 1, stage, reason="the others go on without it")

    def _await_renewal(self, peer: int, name: tuple[int, int], members: Members, timeout: float) -> tuple[int, int]:
        stage = "agreement after a lost rank"

        def look() -> None:
            self.look_for_later_view(members, stage)
            if fault := self.find_fault(peer, members):
                raise PeerTimeout(fault[0], stage, reason=fault[1])

        suspect, looks, limit, seconds = -1, 0, timeout, 0.0
        with self.announce(peer, stage):
            while True:
                try:
                    return self._passing.take(peer, name, limit, look)
                except PeerTimeout as error:
                    if error.reason != "no answer":
                        raise
                    root, reason = self.root_of_stall(peer, members)
                    looks, seconds = looks + 1, seconds + error.seconds
                    if root == suspect or looks > self.world_size:
                        raise PeerTimeout(root, stage, expected=1, seconds=seconds, reason=reason) from None
                suspect, limit = root, second_look(timeout)

    def _others(self, members: Members) -> list[int]:
        return [p for p in range(self.world_size) if p != self.rank and not members.lost >> p & 1]

    def _take_all(
        self, members: Members, take: Callable[[int], tuple[int, int]]
    ) -> tuple[dict[int, int], dict[int, int]]:
        """Every other member's descriptor and number, or none left open."""
        fds: dict[int, int] = {}
        values: dict[int, int] = {}
        try:
            for peer in self._others(members):
                fds[peer], values[peer] = take(peer)
        except BaseException:
            for fd in fds.values():
                os.close(fd)
            raise
        return fds, values

    def _map(self, fds: dict[int, int], own: int, nbytes: int) -> int:
        """The window of these segments; a lost rank has none."""
        try:
            return int(self.map([own if p == self.rank else fds.get(p, -1) for p in range(self.world_size)], nbytes))
        finally:
            for fd in fds.values():
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
        self._passing.close()
        close_all(self._links)

    def _create(self, nbytes: int, ranks: int) -> tuple[int, list[Any] | None]:
        """A segment's descriptor, or why there is none. All of ``ranks`` ranks make one."""
        needed, available = nbytes * ranks, _available_memory()
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
            if trouble:
                raise self._refused(rank, trouble)

    def _refused(self, rank: int, trouble: list[Any]) -> HalError:
        if trouble[0] == "capacity":
            what = f"symmetric memory for {self.world_size} ranks (bytes)"
            return CapacityError(what, trouble[1], trouble[2], "use smaller windows or fewer ranks on this machine")
        return HalError(f"rank {rank} could not make a window: {trouble[1]}")


def _available_memory() -> int:
    """Bytes that this machine can still give, as the kernel estimates it."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62
