# SPDX-License-Identifier: Apache-2.0
"""Ascend NPUs through UDMA queue pairs, and the same kernels on an emulated engine (docs/ascend.md).

Importing this package loads nothing but its specs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.backend import Backend, BackendSpec, TransportSpec
from hal_ascend.probe import probe_emulator, probe_hardware


def _load() -> Backend:
    from hal_ascend.backend import AscendBackend

    return AscendBackend()


def _load_aclshmem() -> Callable[..., Any]:
    from hal_ascend.aclshmem import AclshmemSession

    return AclshmemSession


def _load_emulated() -> Callable[..., Any]:
    from hal_ascend.session import EmulatedAscendSession

    return EmulatedAscendSession


SPEC = BackendSpec("ascend", probe_hardware, _load, "aclshmem", "Ascend NPUs, UDMA queue pairs")
ACLSHMEM = TransportSpec("aclshmem", ("ascend",), probe_hardware, _load_aclshmem, "UDMA queue pairs of an Ascend NPU")
UDMA_EMULATED = TransportSpec(
    "udma_emulated",
    ("ascend",),
    probe_emulator,
    _load_emulated,
    "the Ascend kernels on an emulated UDMA engine, on CPUs of one machine",
    brings_device=True,
)
