# SPDX-License-Identifier: Apache-2.0
"""The host backend: ranks are processes (or threads) of one machine, kernels are C++.

Importing this package loads nothing but its two specs; :mod:`hal_host.transport` is where a transport's author begins.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from hal.backend import Backend, BackendSpec, Probe, TransportSpec


def _probe() -> Probe:
    if sys.platform != "linux":
        return Probe(False, f"needs Linux (memfd, futex), not {sys.platform}", "use a Linux machine or container")
    if importlib.util.find_spec("hal_host._engine") is None:
        return Probe(False, "the C++ engine hal_host._engine was not built", "install moe-hal with a C++20 compiler")
    return Probe(True)


def _load() -> Backend:
    from hal_host.session import HostBackend

    return HostBackend()


def _load_shm() -> Callable[..., Any]:
    from hal_host.shm import Shm

    return Shm


SPEC = BackendSpec("host", _probe, _load, "shm", "CPU ranks on one machine; the embedded default")
SHM = TransportSpec("shm", ("host",), _probe, _load_shm, "shared memory windows (memfd), futex waits")
