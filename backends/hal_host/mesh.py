# SPDX-License-Identifier: Apache-2.0
"""A Unix socket between every two ranks: it passes file descriptors, and its end of file tells that a peer is gone."""

from __future__ import annotations

import hmac
import os
import secrets
import selectors
import socket
import struct
import time

from hal.bootstrap import Bootstrap
from hal.errors import PeerTimeout
from hal.rendezvous import peer_uid, private

_KEY_BYTES = 32
_HELLO = struct.Struct(f"!I{_KEY_BYTES}s")


def connect_mesh(bootstrap: Bootstrap) -> list[socket.socket | None]:
    """Collective. ``links[p]`` is connected to rank ``p``; None for this rank. Strangers that connect are dropped."""
    rank, size = bootstrap.rank, bootstrap.world_size
    links: list[socket.socket | None] = [None] * size
    if size == 1:
        return links
    deadline = time.monotonic() + bootstrap.timeout
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("")  # the kernel chooses an abstract name
        listener.listen(1024)
        key = secrets.token_bytes(_KEY_BYTES)
        name = listener.getsockname()
        offers = bootstrap.all_gather(name + key, "mesh")
        try:
            for peer in range(rank):
                links[peer] = _connect(offers[peer][:-_KEY_BYTES], offers[peer][-_KEY_BYTES:], rank, peer, deadline)
            _accept_higher(listener, key, rank, links, deadline)
        except BaseException:
            close_all(links)
            raise
    return links


def close_all(links: list[socket.socket | None]) -> None:
    for link in links:
        if link is not None:
            link.close()


def _connect(name: bytes, key: bytes, rank: int, peer: int, deadline: float) -> socket.socket:
    link = private(socket.socket(socket.AF_UNIX))
    try:
        link.settimeout(max(deadline - time.monotonic(), 0.001))
        link.connect(name)
        link.sendall(_HELLO.pack(rank, key))
    except OSError as error:
        link.close()
        raise PeerTimeout(peer, "mesh", reason=f"could not be reached ({error})") from error
    return link


def _accept_higher(
    listener: socket.socket, key: bytes, rank: int, links: list[socket.socket | None], deadline: float
) -> None:
    """Accept every higher rank. All connections are read side by side, so that a silent stranger delays nobody."""
    strangers: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while missing := [p for p in range(rank + 1, len(links)) if links[p] is None]:
                left = deadline - time.monotonic()
                if left <= 0:
                    reason = f"did not connect (missing: {missing})"
                    raise PeerTimeout(missing[0], "mesh", expected=len(links), reason=reason)
                for ready, _ in selector.select(left):
                    sock = ready.fileobj
                    assert isinstance(sock, socket.socket)
                    if sock is listener:
                        connection = private(listener.accept()[0])
                        strangers[connection] = b""
                        selector.register(connection, selectors.EVENT_READ)
                        continue
                    data = _read(sock, _HELLO.size - len(strangers[sock]))
                    strangers[sock] += data
                    if data and len(strangers[sock]) < _HELLO.size:
                        continue
                    selector.unregister(sock)
                    peer = _introduced(sock, strangers.pop(sock), key)
                    if peer in missing and links[peer] is None:
                        links[peer] = sock
                    else:
                        sock.close()
        finally:
            for stranger in strangers:
                stranger.close()


def _read(sock: socket.socket, limit: int) -> bytes:
    try:
        return sock.recv(limit)
    except OSError:
        return b""


def _introduced(sock: socket.socket, hello: bytes, key: bytes) -> int:
    """The rank that said this hello; -1 for a stranger."""
    if len(hello) != _HELLO.size or peer_uid(sock) != os.getuid():
        return -1
    rank, theirs = _HELLO.unpack(hello)
    return int(rank) if hmac.compare_digest(theirs, key) else -1
