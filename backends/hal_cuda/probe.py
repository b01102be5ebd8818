# SPDX-License-Identifier: Apache-2.0
"""Whether the CUDA backend can be used here, from the file system alone: no driver and no library is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hal.backend import Probe
from hal_cuda import build, nccl

_WHEEL_FIX = (
    "pip install 'moe-hal[cuda13]' (or [cuda12]); if torch pins an older one, "
    "pip install --no-deps 'nvidia-nccl-cu13>=2.30.7'"
)


def probe_emulator() -> Probe:
    """Of emulated GPUs."""
    if sys.platform != "linux":
        return Probe(False, f"needs Linux (memfd), not {sys.platform}", "use a Linux machine or container")
    if build.shipped(build.EMULATED) is None:
        return Probe(False, f"{build.EMULATED} was not built", "install moe-hal with a C++20 compiler")
    return Probe(True)


def gpus() -> int:
    """GPUs that this process may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if visible is None:
        return present
    named = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(present, len(named))


def probe() -> Probe:
    """Usable or not, why, and how to mend it."""
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        return Probe(False, "no NVIDIA GPU on this machine (no /dev/nvidia0)", "use backend=host here")
    if gpus() == 0:
        return Probe(False, "CUDA_VISIBLE_DEVICES hides every GPU", "unset it, or name some")
    found = nccl.installed()
    if not found:
        return Probe(False, "NCCL is not installed", _WHEEL_FIX)
    use = found[0]
    if use.version < nccl.MINIMUM:
        needed = ".".join(map(str, nccl.MINIMUM))
        return Probe(
            False, f"NCCL {use.text} ({use.origin}) is older than {needed}, whose device API is used", _WHEEL_FIX
        )
    if build.ready(use) is None:
        why = build.why_not(use)
        if why:
            return Probe(
                False, f"no kernels compiled for NCCL {use.text}, and they cannot be compiled: {why[0]}", why[1]
            )
    return Probe(True)
