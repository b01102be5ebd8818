# SPDX-License-Identifier: Apache-2.0
"""Time as it counts against a peer (``on_peer_loss="mask"``): only while this process runs itself."""

from __future__ import annotations

import time

LONGEST_TURN = 0.1
"""Seconds. A longer turn counts as this long: this process was itself stopped (kLongestTurn of shm_transport.cpp)."""


class RunningTime:
    """To be asked often: between two questions passes one turn."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def turn(self) -> float:
        """Seconds since the last turn."""
        now = time.monotonic()
        turn, self._before = min(now - self._before, LONGEST_TURN), now
        return turn
