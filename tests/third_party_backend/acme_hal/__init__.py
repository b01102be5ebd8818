# SPDX-License-Identifier: Apache-2.0
"""A stranger's backend and transport. Only the specs are here, so that listing them loads nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.backend import Backend, BackendSpec, Probe, TransportSpec


def _trace() -> Backend:
    from acme_hal.trace import TraceBackend

    return TraceBackend()


def _socket() -> Callable[..., Any]:
    from acme_hal.socket_transport import SocketTransport

    return SocketTransport


def _absent() -> Backend:
    raise AssertionError("an unusable backend must not be loaded")


TRACE = BackendSpec("acme-trace", lambda: Probe(True), _trace, "shm", "the host backend, with a record of every call")
ABSENT = BackendSpec("acme-absent", lambda: Probe(False, "no Acme card found", "plug one in"), _absent, "shm")
SOCKET = TransportSpec("acme-socket", ("host",), lambda: Probe(True), _socket, "puts as messages over Unix sockets")
NOT_A_SPEC = 42
