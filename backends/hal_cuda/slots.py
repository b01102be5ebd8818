# SPDX-License-Identifier: Apache-2.0
"""Receive slots and who holds them (docs/contract.md, section 1, Lifetime)."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable
from typing import Any

from hal.errors import CapacityError
from hal_cuda.native import Library


class Lease:
    """Keeps one slot from being written. Arrays that view the slot refer to it, or are counted by ``count``; the slot is
    free when both are gone, or when the lease was ended because no array came of it: whoever keeps an error keeps the
    frames of its traceback, and must not keep the slot."""

    __slots__ = ("__weakref__", "count", "ended", "slot", "window")

    def __init__(self, slot: int, window: object, count: int) -> None:
        self.slot, self.window, self.ended = slot, window, False
        self.count = count
        """Address of the slot's counter of DLPack arrays."""


def _nobody() -> None:
    """Who holds a slot that nobody has held yet."""


class Slots:
    """The slots of one ExpertParallel on one rank: ``num_buffers`` receive slots, and one more, combine's: its scratch, or
    the experts' output.

    Which dispatches are refused depends on the settings and the calls alone, never on what a rank happens to hold: arrays
    view a slot only while enough others stay free for the dispatches that may still be in flight, and combine has a slot of
    its own. A slot that a CUDA graph uses is written whenever the graph is replayed, so no view outside graphs is given on
    it. With ``ahead`` (schedule latency) a dispatch may offer a slot for the next one: peers may write there from then on,
    so nobody else gets it.
    """

    def __init__(self, library: Library, num_buffers: int, ahead: bool = False) -> None:
        self._receive = range(num_buffers)
        self.combine_slot = num_buffers
        count = num_buffers + 1
        self._held: list[Callable[[], Lease | None]] = [_nobody] * count
        self._counts: Any = library.leases(count)
        self._address = ctypes.addressof(self._counts.contents)
        self._in_graph = [False] * count
        self._ahead = ahead
        self._offered: int | None = None
        self.in_flight, self.flight_limit = 0, max(1, num_buffers - 1)
        """Dispatches between their halves, and how many there may be."""

    @property
    def count(self) -> int:
        return len(self._held)

    def any_held(self) -> bool:
        return any(self.is_held(slot) for slot in range(self.count))

    def is_held(self, slot: int) -> bool:
        if self._counts[slot]:
            return True
        lease = self._held[slot]()
        return lease is not None and not lease.ended

    def for_dispatch(self, window: object, capturing: bool) -> tuple[Lease, int]:
        """A lease for one dispatch, and the slot to offer for the next one, or -1. Once it is launched, :meth:`launched` is
        told of the latter."""
        free = self._free()
        if self._offered is not None and not capturing:
            slot = self._offered
        elif not free and self._offered is not None:
            slot = self._offered  # a graph's: whoever comes first, it or the next dispatch, uses up the offer
        else:
            free = free or self._reclaimed()
            slot = free[0]
            if self._in_graph[slot] and not capturing:  # slots of graphs last: no view is given on them
                slot = min(free, key=self._in_graph.__getitem__)
        offer = -1
        if self._ahead and not capturing:  # a graph is replayed who knows when: it offers nothing for what follows
            offer = next((other for other in free if other != slot and not self._in_graph[other]), -1)
        return self._lease(slot, window, capturing), offer

    def launched(self, offer: int) -> None:
        """A dispatch outside graphs has used up what was offered for it, and offers ``offer`` for the next, unless -1."""
        self._offered = offer if offer >= 0 else None

    def may_view(self, lease: Lease, capturing: bool) -> bool:
        """Whether what the dispatch of ``lease`` received may be given as views; else it is copied out."""
        left = len(self._free()) + (self._offered is not None and self._offered != lease.slot)
        return left >= self.flight_limit - self.in_flight and (capturing or not self._in_graph[lease.slot])

    def for_output(self, window: object, capturing: bool) -> Lease | None:
        """A lease for the experts' output, or None when combine's slot is in use."""
        slot = self.combine_slot
        if self.is_held(slot) or (self._in_graph[slot] and not capturing):
            return None
        return self._lease(slot, window, capturing)

    def scratch(self, window: object, capturing: bool, over_output: bool = False) -> Lease:
        """Combine's slot for one combine; ``over_output``: for the weights of rows that lie in it as the experts' output."""
        slot = self.combine_slot
        if self.is_held(slot):
            if over_output:
                return Lease(slot, window, self._address + 8 * slot)
            gc.collect()  # an error that was dealt with may keep an array in a cycle with its traceback
        if self.is_held(slot):
            raise CapacityError(
                "combine's slot",
                2,
                1,
                f"an array of ep.expert_output is held ({self._holder(slot)}): give it to combine whole, or let go of it",
            )
        return self._lease(slot, window, capturing)

    def _free(self) -> list[int]:
        """Receive slots that nobody holds and that are not offered."""
        counts, held, offered = self._counts, self._held, self._offered
        # is_held, written out: every dispatch looks twice at every slot.
        return [
            slot
            for slot in self._receive
            if slot != offered and not counts[slot] and ((lease := held[slot]()) is None or lease.ended)
        ]

    def _reclaimed(self) -> list[int]:
        gc.collect()
        free = self._free()
        if not free:
            held = "; ".join(f"slot {slot}: {self._holder(slot)}" for slot in self._receive)
            count = len(self._receive)
            raise CapacityError("receive slots", count + 1, count, f"raise num_buffers, or let go of results ({held})")
        return free

    def _holder(self, slot: int) -> str:
        if slot == self._offered:
            return "offered to the peers for the next dispatch"
        return f"{self._counts[slot]} tensors" if self._counts[slot] else "an array, or a dispatch that is not received"

    def _lease(self, slot: int, window: object, capturing: bool) -> Lease:
        lease = Lease(slot, window, self._address + 8 * slot)
        self._held[slot] = weakref.ref(lease)
        self._in_graph[slot] |= capturing
        return lease
