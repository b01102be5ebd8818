# SPDX-License-Identifier: Apache-2.0
"""Whether an Ascend NPU, or its emulator, can be used here, told from files and package metadata: no driver is loaded.

What is needed is the list in docs/ascend.md, "What must be there". Each missing thing is named with its own fix.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

from hal.backend import Probe

KERNELS = "libhal_ascend.so"
"""The kernels and the runtime that launches them, built by kernels_ascend/device/CMakeLists.txt."""
SOC_PREFIX = "Ascend950"
"""UDMA queue pairs exist on these only (rule 7)."""

Missing = tuple[str, str]


def probe_hardware() -> Probe:
    checks = (_device, _soc, _ascendcl, _hccl, _shmem, _torch_npu, _kernels)
    missing = [item for item in (check() for check in checks) if item is not None]
    if missing:
        return Probe(False, "; ".join(reason for reason, _ in missing), "; ".join(fix for _, fix in missing))
    return Probe(True)


def probe_emulator() -> Probe:
    if sys.platform != "linux":
        return Probe(False, f"needs Linux (memfd, futex), not {sys.platform}", "use a Linux machine or container")
    if find_spec("hal_ascend._engine") is None:
        return Probe(False, "the C++ engine hal_ascend._engine was not built", "install moe-hal with a C++20 compiler")
    return Probe(True)


def _device() -> Missing | None:
    if any(path.name.removeprefix("davinci").isdigit() for path in Path("/dev").glob("davinci*")):
        return None
    return "no Ascend NPU (/dev/davinci0 is missing)", "run on a machine with an Ascend NPU and its driver"


def _soc() -> Missing | None:
    """The SoC's name, where the driver or the user states it; silent where there is no device at all."""
    name = os.environ.get("ASCEND_SOC_NAME") or _driver_soc()
    if name is None or name.startswith(SOC_PREFIX):
        return None
    return (
        f"the NPU is a {name}, which has no UDMA queue pairs",
        f"use an {SOC_PREFIX}, or set ASCEND_SOC_NAME if this is one",
    )


def _driver_soc() -> str | None:
    for path in (Path("/sys/class/davinci/davinci0/soc_name"), Path("/proc/davinci/soc_name")):
        if path.is_file():
            return path.read_text(encoding="ascii", errors="replace").strip()
    return None


def _library(variable: str, name: str) -> bool:
    root = os.environ.get(variable)
    return bool(root) and any((Path(root or "") / folder / name).is_file() for folder in ("lib64", "lib", "shmem/lib"))


def _ascendcl() -> Missing | None:
    if _library("ASCEND_HOME_PATH", "libascendcl.so"):
        return None
    return (
        "CANN is not set up (no lib64/libascendcl.so under ASCEND_HOME_PATH)",
        "install CANN and source its set_env.sh",
    )


def _hccl() -> Missing | None:
    if _library("ASCEND_HOME_PATH", "libhccl.so"):
        return None
    return "no lib64/libhccl.so under ASCEND_HOME_PATH", "install CANN's communication package (HCCL)"


def _shmem() -> Missing | None:
    if _library("SHMEM_ROOT", "libshmem.so"):
        return None
    return "no lib/libshmem.so under SHMEM_ROOT", "build aclshmem for Ascend950 and set SHMEM_ROOT to its installation"


def _torch_npu() -> Missing | None:
    if find_spec("torch_npu") is not None:
        return None
    return "torch_npu is not installed", "pip install 'moe-hal[ascend]' in an environment with CANN"


def _kernels() -> Missing | None:
    if (Path(__file__).parent / KERNELS).is_file():
        return None
    return (
        f"this installation has no Ascend kernels ({KERNELS})",
        "build kernels_ascend/device with bisheng and install it beside this package (docs/ascend.md)",
    )
