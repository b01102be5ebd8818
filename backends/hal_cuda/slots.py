# SPDX-License-Identifier: Apache-2.0
"""Receive slots and who holds them (docs/contract.md, section 1, Lifetime)."""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

from hal.errors import CapacityError
from hal_cuda.native import Library


class Lease:
    """Keeps one slot from being written. Arrays that view the slot refer to it, or are counted by ``count``; the slot is
    free when both are gone, or when the lease was ended because no array came of it."""

    __slots__ = ("__weakref__", "count", "ended", "slot", "window")

    def __init__(self, slot: int, window: object, count: int) -> None:
        self.slot, self.window, self.ended = slot, window, False
        self.count = count
        """Address of the slot's counter of DLPack arrays."""


class Slots:
    """The slots of one ExpertParallel on one rank.

    At least one slot stays free between calls: combine's scratch, and the next dispatch, need it. A slot that a CUDA
    graph uses is written whenever the graph is replayed, so no view outside graphs is given on it.
    """

    def __init__(self, library: Library, count: int) -> None:
        self._held: list[weakref.ref[Lease] | None] = [None] * count
        self._counts: Any = library.leases(count)
        self._address = ctypes.addressof(self._counts.contents)
        self._in_graph = [False] * count
        self._is_output = [False] * count

    def free(self) -> list[int]:
        return [slot for slot in range(len(self._held)) if not self.is_held(slot)]

    def is_held(self, slot: int) -> bool:
        if self._counts[slot]:
            return True
        held = self._held[slot]
        lease = held() if held is not None else None
        return lease is not None and not lease.ended

    def for_dispatch(self, window: object, capturing: bool) -> tuple[Lease, bool]:
        """A lease for one dispatch, and whether its arrays may view the slot (else they are copied out)."""
        free = self._some()
        good = [slot for slot in free if capturing or not self._in_graph[slot]]
        view = len(free) > 1 and bool(good)
        return self._lease(good[0] if view else free[-1], window, capturing), view

    def for_output(self, window: object, capturing: bool) -> Lease | None:
        """A lease for an expert's output, or None when no slot can be spared."""
        if len(self.free()) < 2:
            return None
        lease, view = self.for_dispatch(window, capturing)
        self._is_output[lease.slot] = True
        return lease if view else None

    def is_output(self, slot: int) -> bool:
        """Whether the slot was last leased for an expert's output."""
        return self._is_output[slot]

    def scratch(self, window: object, capturing: bool) -> Lease:
        """A slot for one combine's own use."""
        return self._lease(self._some()[-1], window, capturing)

    def _some(self) -> list[int]:
        free = self.free()
        if not free:
            count = len(self._held)
            raise CapacityError("receive slots", count + 1, count, "raise num_buffers, or receive what was sent first")
        return free

    def _lease(self, slot: int, window: object, capturing: bool) -> Lease:
        lease = Lease(slot, window, self._address + 8 * slot)
        self._held[slot] = weakref.ref(lease)
        self._is_output[slot] = False
        self._in_graph[slot] |= capturing
        return lease
