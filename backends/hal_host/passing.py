# SPDX-License-Identifier: Apache-2.0
"""File descriptors between ranks over the mesh's links, each with the name of the window that it is for.

Several threads of a rank may pass descriptors at once (one for each ExpertParallel): whoever reads a link files what is
not its own for the others.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from hal.errors import PeerTimeout
from hal_host.running import RunningTime

_HEADER = struct.Struct("!IIQ")
_FD = struct.Struct("i")
_POLL_SECONDS = 0.005
Name = tuple[int, int]
"""Of a window: its number, and the view that it belongs to (hal/include/hal/members.hpp)."""


class Passing:
    """One rank's end of all links."""

    def __init__(self, links: list[socket.socket | None]) -> None:
        self._links = links
        self._lock = threading.Lock()
        self._filed: dict[tuple[int, Name], tuple[int, int]] = {}
        self._ended: dict[int, str] = {}

    def send(self, peer: int, name: Name, fd: int, value: int = 0) -> None:
        """``value`` is an unsigned number that goes with it."""
        link = self._links[peer]
        assert link is not None
        with suppress(OSError):  # a lost peer is reported by whoever waits for it
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _FD.pack(fd))]
            link.sendmsg([_HEADER.pack(*name, value)], ancillary, socket.MSG_DONTWAIT)

    def take(self, peer: int, name: Name, timeout: float, look: Callable[[], None] | None = None) -> tuple[int, int]:
        """The descriptor, which is the caller's from now on, and its number. ``look`` is called now and then, and may raise.

        Raises PeerTimeout if the peer ended, or after ``timeout`` seconds.
        """
        start, running, waited = time.monotonic(), RunningTime(), 0.0
        while True:
            with self._lock:
                self._file_all(peer)
                if (peer, name) in self._filed:
                    return self._filed.pop((peer, name))
                ended = self._ended.get(peer)
            waited += running.turn()
            if ended is None and waited > timeout:
                ended = "no answer"
            if look is not None:
                look()
            if ended is not None:
                raise PeerTimeout(peer, "window", expected=1, seen=0, seconds=time.monotonic() - start, reason=ended)
            self._wait(peer)

    def forget(self, number: int, before_view: int) -> None:
        """What peers sent of window ``number`` for earlier views, which this rank left out."""
        with self._lock:
            for peer, name in list(self._filed):
                if name[0] == number and name[1] < before_view:
                    os.close(self._filed.pop((peer, name))[0])

    def close(self) -> None:
        with self._lock:
            for fd, _ in self._filed.values():
                os.close(fd)
            self._filed.clear()

    def _wait(self, peer: int) -> None:
        """Until there may be something to read."""
        link, poll = self._links[peer], select.poll()
        assert link is not None
        poll.register(link, select.POLLIN)
        if not poll.poll(_POLL_SECONDS * 1000):
            return
        time.sleep(0.0005)  # perhaps another thread reads it

    def _file_all(self, peer: int) -> None:
        link = self._links[peer]
        assert link is not None
        while peer not in self._ended:
            try:
                # Not socket.recv_fds, which passes no flags on.
                flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
                data, ancillary, _, _ = link.recvmsg(_HEADER.size, socket.CMSG_LEN(_FD.size), flags)
            except BlockingIOError:
                return
            except OSError as error:
                self._ended[peer] = str(error)
                return
            if len(data) != _HEADER.size or len(ancillary) != 1:
                self._ended[peer] = "its process died"
                return
            number, view, value = _HEADER.unpack(data)
            (fd,) = _FD.unpack(ancillary[0][2])
            self._filed[peer, (number, view)] = fd, value
