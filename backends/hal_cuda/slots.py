# SPDX-License-Identifier: Apache-2.0
"""Receive slots and who holds them (docs/contract.md, section 1, Lifetime)."""

from __future__ import annotations

import weakref

from hal.errors import CapacityError


class Lease:
    """Keeps one slot from being written; the arrays that view the slot refer to it, and so it ends with the last."""

    __slots__ = ("__weakref__", "slot", "window")

    def __init__(self, slot: int, window: object) -> None:
        self.slot = slot
        self.window = window
        """Keeps the memory itself."""


class Slots:
    """The slots of one ExpertParallel on one rank.

    At least one slot stays free between calls: combine's scratch, and the next dispatch, need it. A slot that a CUDA
    graph uses is written whenever the graph is replayed, so no view outside graphs is given on it.
    """

    def __init__(self, count: int) -> None:
        self._held: list[weakref.ref[Lease] | None] = [None] * count
        self._in_graph = [False] * count

    def free(self) -> list[int]:
        return [slot for slot, held in enumerate(self._held) if held is None or held() is None]

    def for_dispatch(self, window: object, capturing: bool) -> tuple[Lease, bool]:
        """A lease for one dispatch, and whether its arrays may view the slot (else they are copied out)."""
        free = self.free()
        if not free:
            raise CapacityError("receive slots", len(self._held) + 1, len(self._held), "raise num_buffers, or receive first")
        good = [slot for slot in free if capturing or not self._in_graph[slot]]
        view = len(free) > 1 and bool(good)
        lease = Lease(good[0] if view else free[-1], window)
        self._held[lease.slot] = weakref.ref(lease)
        self._in_graph[lease.slot] |= capturing
        return lease, view

    def scratch(self, window: object, capturing: bool) -> Lease:
        """A slot for one combine's own use."""
        free = self.free()
        if not free:
            raise CapacityError("receive slots", len(self._held) + 1, len(self._held), "raise num_buffers, or receive first")
        lease = Lease(free[-1], window)
        self._held[lease.slot] = weakref.ref(lease)
        self._in_graph[lease.slot] |= capturing
        return lease
