# SPDX-License-Identifier: Apache-2.0
"""How long the host lets its GPU wait for peers (``on_peer_loss="mask"``). A kernel's clock runs on while processes are
stopped; here time counts only while this process runs, so that a pause of the whole machine is nobody's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hal_host.running import RunningTime

_TURN = 0.05
"""Seconds between two looks at the clock: how exactly a time limit is kept."""


class Patience:
    """What is :meth:`lasting` longer than it may is ended by ``give_up``, called on a thread of its own; what ended well all
    the same is followed by ``go_on``."""

    def __init__(self, name: str, give_up: Callable[[], None], go_on: Callable[[], None]) -> None:
        self._give_up, self._go_on = give_up, go_on
        self._lock = threading.Lock()
        self._left: float | None = None
        self._gave_up = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @contextmanager
    def lasting(self, seconds: float) -> Iterator[None]:
        with self._lock:
            self._left, self._gave_up = seconds, False
        try:
            yield
        except BaseException:
            with self._lock:
                self._left = None
            raise
        with self._lock:
            self._left = None
            if self._gave_up:
                self._go_on()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        running = RunningTime()
        while not self._ended.wait(_TURN):
            turn = running.turn()
            with self._lock:
                if self._left is None:
                    continue
                self._left -= turn
                if self._left <= 0:
                    self._left, self._gave_up = None, True
                    self._give_up()
