# SPDX-License-Identifier: Apache-2.0
"""Whether the CUDA backend can be used here, from the file system alone: no driver and no library is loaded."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hal.backend import Probe
from hal_cuda import build, nccl
from hal_cuda.machine import CUDA_13_DRIVER, dotted, driver_version


def present() -> int:
    """GPUs of this machine."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


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
    if visible is None:
        return present()
    named = [name for name in visible.split(",") if name.strip() and name.strip() != "-1"]
    return min(present(), len(named))


def probe() -> Probe:
    """Usable or not, why, and how to mend it."""
    if present() == 0:
        fix = "use backend=host, or backend=cuda transport=gin_emulated, here"
        return Probe(False, "no NVIDIA GPU on this machine (no /dev/nvidia0)", fix)
    if gpus() == 0:
        return Probe(False, "CUDA_VISIBLE_DEVICES hides every GPU", "unset it, or name some")
    found = nccl.installed()
    if not found:
        return Probe(False, "NCCL is not installed", nccl.FIX)
    use = found[0]
    if use.version < nccl.MINIMUM:
        needed = ".".join(map(str, nccl.MINIMUM))
        return Probe(
            False, f"NCCL {use.text} ({use.origin}) is older than {needed}, whose device API is used", nccl.FIX
        )
    driver = driver_version()
    if use.origin.endswith("cu13") and driver and driver < CUDA_13_DRIVER:
        return Probe(
            False,
            f"driver {dotted(driver)} runs programs for CUDA 12, and NCCL is of the wheel for CUDA 13 ({use.origin})",
            "pip uninstall nvidia-nccl-cu13; pip install 'moe-hal[cuda12]'; or install driver 580 or newer",
        )
    if build.ready(use) is None:
        why = build.why_not(use)
        if why:
            return Probe(
                False, f"no kernels compiled for NCCL {use.text}, and they cannot be compiled: {why[0]}", why[1]
            )
    return Probe(True)
