# SPDX-License-Identifier: Apache-2.0
"""Who left, and how: a thread that listens to one socket from each peer, and ends the waits of this rank's kernels.

A peer says last that it closed, or that it failed and because of whom; one that says nothing has died, since the kernel
closes a dead process's sockets. Kernels look at this rank's *abort words* only in waits that last (device.cuh,
wait_until), so watching costs nothing while all is well.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hal.rendezvous import decode, encode

_LIMIT = 4096
_JOIN_SECONDS = 2.0
DIED = "its process died"


class Watch:
    """``links[p]`` is connected to rank p (hal_host.mesh); None for this rank. ``tell(failed, closed)`` is called, on the
    watching thread, whenever more is known: the rank whose failure ends every wait, or None, and the set of ranks that
    closed, which ends only the waits for them."""

    def __init__(
        self, rank: int, links: list[socket.socket | None], tell: Callable[[int | None, frozenset[int]], None]
    ) -> None:
        self._rank, self._links, self._tell = rank, links, tell
        self._lock = threading.Lock()
        self._said = False
        self.lost: tuple[int, str] | None = None
        """The first failure: rank and reason."""
        self.closed: frozenset[int] = frozenset()
        self.gone: frozenset[int] = frozenset()
        """Those that have ended in whatever way."""
        self._waker, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name=f"hal-watch-{rank}", daemon=True)
        self._thread.start()

    def reason(self, rank: int) -> str | None:
        """Why ``rank`` is held to have failed, if that is what was noticed."""
        return self.lost[1] if self.lost is not None and self.lost[0] == rank else None

    def say_failed(self, fault: int, reason: str) -> None:
        """Tell the peers that this rank gives up because of rank ``fault``, itself perhaps."""
        self._say({"failed": fault, "reason": reason[:400]})

    def say_closed(self) -> None:
        """Tell the peers that this rank leaves, having done all that was asked of it."""
        self._say({"closed": True})

    def _say(self, message: dict[str, Any]) -> None:
        """The first word is the last."""
        with self._lock:
            said, self._said = self._said, True
        if said:
            return
        data = encode(message)
        for link in self._links:
            if link is not None:
                with suppress(OSError):
                    link.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def close(self) -> None:
        """End the thread and the links. Nothing is told from here on."""
        with suppress(OSError):
            self._waker.send(b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join(_JOIN_SECONDS)
        for link in self._links:
            if link is not None:
                link.close()
        self._waker.close()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        heard: dict[int, bytearray] = {}
        with selectors.DefaultSelector() as selector, self._woken:
            selector.register(self._woken, selectors.EVENT_READ, None)
            for peer, link in enumerate(self._links):
                if link is not None:
                    heard[peer] = bytearray()
                    selector.register(link, selectors.EVENT_READ, peer)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    if self._listen(key.data, heard[key.data]):
                        selector.unregister(key.fileobj)

    def _listen(self, peer: int, heard: bytearray) -> bool:
        """Whether all is said."""
        link = self._links[peer]
        assert link is not None
        try:
            data = link.recv(_LIMIT, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        heard += data
        try:
            message = decode(heard, _LIMIT)
        except ValueError:
            message = {}
        if message is None and data:
            return False
        self._note(peer, message or {})
        return True

    def _note(self, peer: int, message: dict[str, Any]) -> None:
        self.gone |= {peer}
        if message.get("closed"):
            self.closed |= {peer}
        elif self.lost is None:
            fault, reason = message.get("failed", peer), str(message.get("reason", DIED))
            self.lost = (peer, f"gave up on this rank: {reason}") if fault == self._rank else (fault, reason)
        self._tell(None if self.lost is None else self.lost[0], self.closed)
