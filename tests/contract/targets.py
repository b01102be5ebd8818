# SPDX-License-Identifier: Apache-2.0
"""What the suite runs on: each registered backend with each of its transports, and how arrays get there and back."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hal
from hal import registry
from hal.arrays import ITEMSIZE, NUMPY_DTYPES, as_buffer, to_kind
from hal.placing import fetched, placed

sys.path.insert(0, str(Path(__file__).parent.parent))
DEVICES = {"cuda": "cuda", "ascend": "npu"}
"""What torch calls a backend's devices."""
TIMEOUT = 60.0
"""Seconds; far above what any round takes, so that only a real hang meets it."""


@dataclass(frozen=True)
class Target:
    """A backend and a transport. ``reason`` says why it cannot be used here; empty if it can."""

    backend: str
    transport: str
    reason: str
    on_cpu: bool = False
    """Its arrays live in host memory: the host backend, or an emulated device."""

    def __str__(self) -> str:
        return f"{self.backend}/{self.transport}"

    @property
    def ranks(self) -> int:
        """How many ranks it can run: devices have one each."""
        return sys.maxsize if self.on_cpu else _devices(self.backend)

    def run(
        self, ranks: int, nodes: int, function: Callable[..., Any], *args: Any, timeout: float = TIMEOUT
    ) -> list[Any]:
        """``function(comm, *args)`` on every rank; the results in rank order."""
        config = hal.HalConfig(self.backend, self.transport, hal.TopologyConfig(nodes), timeout=timeout)
        return hal.spawn(ranks, function, *args, config=config)

    def give(self, array: NDArray[Any] | None, rank: int) -> Any:
        """A NumPy array where this backend wants it."""
        return placed(array, "cpu" if self.on_cpu else f"{DEVICES[self.backend]}:{rank}")


def fetch(array: Any) -> NDArray[Any]:
    """Any array that a backend gave, as a NumPy copy."""
    return fetched(array).copy()


def poison(*arrays: Any, rows: NDArray[Any] | None = None) -> None:
    """Overwrite what a backend gave (or some rows of it), so that who reuses the memory without filling it is seen."""
    which = slice(None) if rows is None else rows
    for array in arrays:
        if array is None or not len(array):
            continue
        if isinstance(array, np.ndarray):
            array.view(np.uint8).reshape(len(array), -1)[which] = 0xEE
        else:
            import torch

            array.view(torch.uint8).view(len(array), -1)[which] = 0xEE


def kinds_of(target: Target) -> list[str]:
    """The array libraries that can be tried; those that are not installed are left out."""
    installed = [name for name in ("numpy", "torch", "jax") if importlib.util.find_spec(name)]
    return installed if target.on_cpu else ["torch"]


def in_kind(array: NDArray[Any] | None, kind: str) -> Any:
    return None if array is None else to_kind(as_buffer(array), kind)


def _devices(backend: str) -> int:
    import torch

    return int(getattr(torch, DEVICES[backend]).device_count())


def all_targets() -> list[Target]:
    found = []
    for name, backend in registry.backends().items():
        probe = backend.probe()
        for transport, spec in registry.transports(name).items() or [(backend.default_transport, None)]:
            reached = spec.probe() if spec is not None else probe
            emulated = spec is not None and spec.brings_device
            worst = reached if probe.usable or emulated else probe
            reason = "" if worst.usable else f"{worst.reason}; {worst.fix}"
            found.append(Target(name, transport, reason, name == "host" or emulated))
    return found


__all__ = ["ITEMSIZE", "NUMPY_DTYPES", "TIMEOUT", "Target", "all_targets", "fetch", "in_kind", "kinds_of", "poison"]
