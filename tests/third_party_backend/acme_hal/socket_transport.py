# SPDX-License-Identifier: Apache-2.0
"""A transport in Python: every operation is a message to the target rank, which applies messages in order.

A stream keeps its order, so every operation is as good as strong; ``quiet(REMOTE)`` asks for an acknowledgement.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
from hal_host.mesh import connect_mesh
from hal_host.transport import Transport

from hal.bootstrap import Bootstrap
from hal.config import HalConfig
from hal.errors import ContractError, PeerTimeout
from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp, profile

_HEADER = struct.Struct("!I")
_WORD = struct.Struct("<Q")


class SocketTransport(Transport):
    """One rank's end: a socket and a receiving thread for each peer."""

    def __init__(self, config: HalConfig, bootstrap: Bootstrap) -> None:
        super().__init__(bootstrap.rank, bootstrap.world_size, config.queues)
        self._bootstrap = bootstrap
        self._windows: dict[int, np.ndarray[Any, Any]] = {}
        self._next = 0
        self._changed = threading.Condition()
        self._acknowledged = [0] * self.world_size
        self._asked = [0] * self.world_size
        self._dead: set[int] = set()
        self._closed: set[int] = set()
        self._links = connect_mesh(bootstrap)
        self._send_locks = [threading.Lock() for _ in self._links]
        for peer, link in enumerate(self._links):
            if link is not None:
                link.settimeout(None)
                threading.Thread(target=self._receive, args=(peer, link), daemon=True).start()

    @property
    def profile(self) -> OrderingProfile:
        return profile("verbs-rc")

    def allocate(self, nbytes: int) -> int:
        sizes = self._bootstrap.all_gather(nbytes, "acme window")
        if len(set(sizes)) != 1:
            raise ContractError(f"window sizes differ: {sizes}")
        window, self._next = self._next, self._next + 1
        self._windows[window] = np.zeros(nbytes, np.uint8)
        self._bootstrap.barrier()  # no message may arrive before the memory is there
        return window

    def memory(self, window: int) -> np.ndarray[Any, Any]:
        return self._windows[window]

    def free(self, window: int) -> None:
        with self._changed:
            self._windows.pop(window, None)

    def put(self, window: int, queue: int, peer: int, dst_offset: int, src: memoryview, order: Order) -> None:
        assert isinstance(order, Order)
        self._post(peer, ("put", window, dst_offset, bytes(src)))

    def signal(
        self, window: int, queue: int, peer: int, slot_offset: int, value: int, op: SignalOp, order: Order
    ) -> None:
        self._post(peer, ("add" if op is SignalOp.ADD else "set", window, slot_offset, value))

    def wait(
        self, window: int, slot_offset: int, at_least: int, source: int, queue: int, stage: str, timeout: float
    ) -> int:
        deadline = time.monotonic() + timeout
        with self._changed:
            while (value := self._load(window, slot_offset)) < at_least:
                left = deadline - time.monotonic()
                if fault := self._fault(source, left):
                    rank, reason = fault
                    raise PeerTimeout(
                        rank, stage, queue=queue, expected=at_least, seen=value, seconds=timeout - left, reason=reason
                    )
                self._changed.wait(min(left, 1.0))
        return value

    def _fault(self, source: int, left: float) -> tuple[int, str] | None:
        if self._dead:
            return min(self._dead), "its connection ended"
        if source in self._closed:
            return source, "closed its communicator"
        return (source, "no answer") if left <= 0 else None

    def quiet(self, queue: int, peer: int, scope: QuietScope) -> None:
        if scope is QuietScope.SOURCE:
            return  # a message is a copy
        peers = [p for p in range(self.world_size) if p != self.rank and peer in (-1, p)]
        for p in peers:
            self._asked[p] += 1
            self._post(p, ("ask", self._asked[p]))
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self._closed or self._all_answered(peers), timeout=30)

    def _all_answered(self, peers: list[int]) -> bool:
        return all(self._acknowledged[p] >= self._asked[p] for p in peers)

    def abort(self, reason: str) -> None:
        self.set_failed()  # and so no "bye": the peers take the end of the connection for a death

    def close(self) -> None:
        for peer in range(self.world_size):
            if peer != self.rank and not self.failed:
                self._post(peer, ("bye",))
        self.set_failed()
        for link in self._links:
            if link is not None:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
                link.close()

    def _load(self, window: int, offset: int) -> int:
        return int(_WORD.unpack_from(self._windows[window], offset)[0])

    def _post(self, peer: int, message: tuple[Any, ...]) -> None:
        if peer == self.rank:
            self._apply(peer, message)
            return
        data = pickle.dumps(message)
        link = self._links[peer]
        assert link is not None
        try:
            with self._send_locks[peer]:
                link.sendall(_HEADER.pack(len(data)) + data)
        except OSError:
            pass  # the receiving thread reports the death to whoever waits

    def _receive(self, peer: int, link: socket.socket) -> None:
        try:
            with link.makefile("rb") as stream:
                while header := stream.read(_HEADER.size):
                    self._apply(peer, pickle.loads(stream.read(_HEADER.unpack(header)[0])))
        except (OSError, EOFError, struct.error, ValueError):
            pass
        with self._changed:
            if peer not in self._closed:
                self._dead.add(peer)
            self._changed.notify_all()

    def _apply(self, peer: int, message: tuple[Any, ...]) -> None:
        kind, *fields = message
        if kind == "ask":
            self._post(peer, ("answer", *fields))
            return
        with self._changed:
            if kind == "bye":
                self._closed.add(peer)
            elif kind == "answer":
                self._acknowledged[peer] = fields[0]
            elif fields[0] in self._windows:
                self._write(kind, *fields)
            self._changed.notify_all()

    def _write(self, kind: str, window: int, offset: int, value: Any) -> None:
        memory = self._windows[window]
        if kind == "put":
            memory[offset : offset + len(value)] = np.frombuffer(value, np.uint8)
        else:
            before = self._load(window, offset) if kind == "add" else 0
            _WORD.pack_into(memory, offset, (before + value) % (1 << 64))
