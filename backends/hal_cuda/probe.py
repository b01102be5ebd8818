# SPDX-License-Identifier: Apache-2.0
"""Whether CUDA can be used here, told from files and package metadata: no driver is loaded."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hal.backend import Backend, Probe
from hal.errors import BackendUnavailable

_NCCL_NEEDED = (2, 30, 7)
_LIBRARY = "libhal_cuda.so"


def _probe() -> Probe:
    missing = [item for item in (_device(), _nccl(), _kernels()) if item is not None]
    if missing:
        return Probe(False, "; ".join(reason for reason, _ in missing), "; ".join(fix for _, fix in missing))
    return Probe(True)


def _device() -> tuple[str, str] | None:
    if any(re.fullmatch(r"nvidia\d+", path.name) for path in Path("/dev").glob("nvidia*")):
        return None
    return "no NVIDIA GPU (/dev/nvidia0 is missing)", "run on a machine with an NVIDIA GPU and its driver"


def _nccl() -> tuple[str, str] | None:
    needed = ".".join(map(str, _NCCL_NEEDED))
    fix = "pip install 'moe-hal[cuda13]' (or [cuda12])"
    found = []
    for name in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found.append((name, version(name)))
        except PackageNotFoundError:
            continue
    if not found:
        return f"NCCL {needed} or newer is not installed", fix
    if all(tuple(map(int, re.findall(r"\d+", text)[:3])) < _NCCL_NEEDED for _, text in found):
        return f"NCCL is {', '.join(f'{name} {text}' for name, text in found)}; {needed} or newer is needed", fix
    return None


def _kernels() -> tuple[str, str] | None:
    if (Path(__file__).parent / _LIBRARY).is_file():
        return None
    return "this installation has no CUDA kernels", "install HAL where nvcc is on PATH, so that they are built"


def _load() -> Backend:
    probe = _probe()
    raise BackendUnavailable("cuda", probe.reason, probe.fix)
