# SPDX-License-Identifier: Apache-2.0
"""The meeting point of a run: a small server in rank 0 that admits ranks and carries their small collective exchanges.

It listens on an abstract Unix socket, which vanishes with its process, whatever way that ends: no file is left behind
and none can be stale. It admits only processes of the same user that know the run's token; everybody else is told why
not and dropped, without disturbing the run, at start-up and later.
"""

from __future__ import annotations

import hmac
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

HELLO_LIMIT = 4096
"""Bytes of a frame before its sender is admitted."""
FRAME_LIMIT = 16 << 20
"""Bytes of a frame of a member."""
HELLO_SECONDS = 5.0
"""A stranger that has not introduced itself after this long is dropped."""
FLUSH_SECONDS = 0.5
"""How long a closing server goes on sending to peers that do not read."""

_LENGTH = struct.Struct("!I")


def encode(message: dict[str, Any]) -> bytes:
    """A frame: four bytes of length, then JSON."""
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def decode(buffer: bytearray, limit: int) -> dict[str, Any] | None:
    """Take the first whole frame out of ``buffer``; ValueError if it is not one of ours."""
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > limit:
        raise ValueError(f"not a HAL message, or one of {length} bytes where {limit} are allowed")
    if len(buffer) < _LENGTH.size + length:
        return None
    body = bytes(buffer[_LENGTH.size : _LENGTH.size + length])
    del buffer[: _LENGTH.size + length]
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("not a HAL message")
    return message


def peer_uid(connection: socket.socket) -> int:
    """The user id of the process at the other end, as the kernel states it."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def names(ranks: list[int]) -> str:
    """``rank 3`` or ``ranks 1, 3``."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


_private: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def private(sock: socket.socket) -> socket.socket:
    """Close ``sock`` in children forked by this process: a helper that held it would hide this rank's death."""
    _private.add(sock)
    return sock


def _close_private() -> None:
    for sock in list(_private):
        sock.close()


os.register_at_fork(after_in_child=_close_private)


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    since: float
    rank: int | None = None
    """None until admitted."""
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    refused: bool = False


class Server(threading.Thread):
    """Serves one communicator's ranks until rank 0 closes its own end.

    A member says ``{"gather": n, "what": ..., "value": ...}``, ``{"who": n}`` (its patience with gather n, or with the
    rendezvous if n is null, has ended) or ``{"bye": reason or null}``. It hears ``{"ready": true}``, ``{"gathered": n,
    "values": [...]}``, ``{"mismatch": text}``, ``{"fault": rank, "present": count, "reason": text}`` or ``{"refused":
    text}``.
    """

    def __init__(self, listener: socket.socket, own: socket.socket, world_size: int, hello: dict[str, Any]) -> None:
        super().__init__(name="hal-rendezvous", daemon=True)
        self._listener, self._world_size, self._hello = listener, world_size, hello
        self._members: dict[int, _Connection] = {}
        # Whoever came and did not die since: a rank that lost its patience is not one that never came.
        self._came: set[int] = set()
        self._gone: dict[int, str] = {}
        self._gathers: dict[int, dict[int, tuple[str, Any]]] = {}
        self._ready = False
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._enter(self._add(own), 0)

    def run(self) -> None:
        try:
            while 0 in self._members:
                looked = time.monotonic()
                for key, mask in self._selector.select(timeout=1.0):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._connections:
                        self._serve(key.data, mask)
                self._drop_silent_strangers(looked)
            self._farewell()
        finally:
            for connection in list(self._connections):
                self._drop(connection)
            self._listener.close()
            self._selector.close()

    # Connections.

    def _add(self, sock: socket.socket) -> _Connection:
        sock.setblocking(False)
        connection = _Connection(private(sock), time.monotonic())
        self._connections.add(connection)
        self._selector.register(sock, selectors.EVENT_READ, connection)
        return connection

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        connection = self._add(sock)
        if peer_uid(sock) != os.getuid():
            self._refuse(connection, f"this run belongs to user {os.getuid()}, not to user {peer_uid(sock)}")

    def _serve(self, connection: _Connection, mask: int) -> None:
        if mask & selectors.EVENT_WRITE:
            self._flush(connection)
        if not mask & selectors.EVENT_READ:
            return
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            if connection.rank is not None:
                self._came.discard(connection.rank)
            self._lost(connection, "its process died")
            return
        if connection.refused:
            return
        connection.received += data
        try:
            limit = HELLO_LIMIT if connection.rank is None else FRAME_LIMIT
            while not connection.refused and (message := decode(connection.received, limit)) is not None:
                if connection.rank is None:
                    self._admit(connection, message)
                else:
                    self._answer(connection, connection.rank, message)
        except (ValueError, KeyError, TypeError) as error:
            self._refuse(connection, f"not a HAL rank: {error}")

    def _send(self, connection: _Connection, message: dict[str, Any]) -> None:
        connection.unsent += encode(message)
        self._flush(connection)

    def _flush(self, connection: _Connection) -> None:
        try:
            while connection.unsent:
                del connection.unsent[: connection.socket.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            connection.unsent.clear()  # its end of file arrives as a read event
        if connection in self._connections:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        if connection in self._connections:
            self._connections.remove(connection)
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def _refuse(self, connection: _Connection, reason: str) -> None:
        """Tell why not; the other end closes, or is dropped with the silent ones."""
        connection.refused, connection.since = True, time.monotonic()
        self._send(connection, {"refused": reason})
        if connection.rank is not None:
            self._leave(connection.rank, "it sent something that is not a HAL message")
            connection.rank = None

    def _drop_silent_strangers(self, looked: float) -> None:
        """Those that had said nothing at the last look, which began at ``looked``: this thread may not have run since."""
        for connection in list(self._connections):
            if connection.rank is None and looked - connection.since > HELLO_SECONDS:
                self._drop(connection)

    # Members.

    def _admit(self, connection: _Connection, hello: dict[str, Any]) -> None:
        ours = self._hello
        if not hmac.compare_digest(str(hello.get("token")).encode(), str(ours["token"]).encode()):
            self._refuse(connection, "wrong run token")
            return
        rank = hello["rank"]
        if hello.get("version") != ours["version"]:
            reason = f"rank {rank} runs HAL {hello.get('version')}, rank 0 runs {ours['version']}"
        elif hello.get("world_size") != self._world_size:
            reason = f"rank {rank} expects {hello.get('world_size')} ranks, this run has {self._world_size}"
        elif not isinstance(rank, int) or not 0 <= rank < self._world_size:
            reason = f"there is no rank {rank} among {self._world_size}"
        elif rank in self._members:
            reason = f"rank {rank} is taken by another process of this run"
        elif self._ready:
            reason = f"rank {rank} already left this run; start all ranks again"
        else:
            self._enter(connection, rank)
            return
        self._refuse(connection, reason)

    def _enter(self, connection: _Connection, rank: int) -> None:
        connection.rank = rank
        self._members[rank] = connection
        self._came.add(rank)
        if len(self._members) == self._world_size:
            self._ready = True
            self._tell(set(self._members), {"ready": True})

    def _answer(self, connection: _Connection, rank: int, message: dict[str, Any]) -> None:
        if "gather" in message:
            self._gather(message["gather"], rank, message["what"], message["value"])
        elif "who" in message:
            number = message["who"]
            # What ended meanwhile has its answer under way; a second one would be taken for the next exchange's.
            if number is None and not self._ready:
                self._send(connection, self._missing(self._came))
            elif number in self._gathers:
                self._send(connection, self._missing(set(self._gathers[number])))
        elif "bye" in message:
            self._lost(connection, message["bye"] or "it closed its communicator")
        else:
            raise ValueError(f"unknown message {sorted(message)}")

    def _gather(self, number: int, rank: int, what: str, value: Any) -> None:
        values = self._gathers.setdefault(number, {})
        values[rank] = (what, value)
        if len(values) == self._world_size:
            del self._gathers[number]
            if len({what for what, _ in values.values()}) == 1:
                reply: dict[str, Any] = {"gathered": number, "values": [values[r][1] for r in sorted(values)]}
            else:
                calls = ", ".join(f"rank {r} called '{values[r][0]}'" for r in sorted(values))
                reply = {"mismatch": f"all ranks must make the same collective calls in the same order: {calls}"}
            self._tell(set(values), reply)
        elif self._gone:
            self._fail(number)

    def _fail(self, number: int) -> None:
        """Gather ``number`` cannot end, since somebody who has not given its value is gone."""
        values = self._gathers[number]
        for rank, reason in self._gone.items():
            if rank not in values:
                fault = {"fault": rank, "present": len(values), "reason": reason}
                self._tell(set(values), fault)
                return

    def _lost(self, connection: _Connection, reason: str) -> None:
        rank = connection.rank
        self._drop(connection)
        if rank is not None:
            self._leave(rank, reason)

    def _leave(self, rank: int, reason: str) -> None:
        self._members.pop(rank, None)
        if self._ready:
            self._gone.setdefault(rank, reason)
            for number in list(self._gathers):
                self._fail(number)

    def _tell(self, ranks: set[int], message: dict[str, Any]) -> None:
        """Rank 0 hears last: it may end its process, and this thread with it, as soon as it has."""
        for rank in sorted(ranks & self._members.keys(), reverse=True):
            self._send(self._members[rank], message)

    def _missing(self, present: set[int]) -> dict[str, Any]:
        missing = sorted(set(range(self._world_size)) - present)
        reason = f"{names(missing)} missing of {self._world_size}" if missing else "rank 0 is too slow"
        return {"fault": missing[0] if missing else 0, "present": len(present), "reason": reason}

    def _farewell(self) -> None:
        """Rank 0 leaves: whoever still waits hears for whom, and what was promised is sent."""
        if not self._ready:
            self._tell(set(self._members), self._missing(self._came))
        for values in self._gathers.values():
            # If rank 0 gave its value, its patience has ended before the others': they are told what it was told.
            self._tell(set(values), self._missing(set(values)))
        deadline = time.monotonic() + FLUSH_SECONDS
        while any(c.unsent for c in self._connections) and time.monotonic() < deadline:
            for key, mask in self._selector.select(timeout=0.05):
                if key.data in self._connections and mask & selectors.EVENT_WRITE:
                    self._flush(key.data)
