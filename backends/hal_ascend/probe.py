# SPDX-License-Identifier: Apache-2.0
"""Whether an Ascend NPU can be used here, told from files and package metadata: no driver is loaded."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from hal.backend import Backend, Probe
from hal.errors import BackendUnavailable

_KERNELS = "libhal_ascend.so"


def _probe() -> Probe:
    missing = [item for item in (_device(), _sdk(), _shmem(), _torch_npu(), _kernels()) if item is not None]
    if missing:
        return Probe(False, "; ".join(reason for reason, _ in missing), "; ".join(fix for _, fix in missing))
    return Probe(True)


def _device() -> tuple[str, str] | None:
    if any(path.name.removeprefix("davinci").isdigit() for path in Path("/dev").glob("davinci*")):
        return None
    return "no Ascend NPU (/dev/davinci0 is missing)", "run on a machine with an Ascend NPU and its driver"


def _sdk() -> tuple[str, str] | None:
    home = os.environ.get("ASCEND_HOME_PATH")
    if home and (Path(home) / "lib64" / "libascendcl.so").exists():
        return None
    return "CANN is not set up (no lib64/libascendcl.so under ASCEND_HOME_PATH)", "install CANN and source its set_env.sh"


def _shmem() -> tuple[str, str] | None:
    root = os.environ.get("SHMEM_ROOT")
    if root and any(Path(root).glob("**/libshmem.so")):
        return None
    return "aclshmem is not set up (no libshmem.so under SHMEM_ROOT)", "build aclshmem and set SHMEM_ROOT"


def _torch_npu() -> tuple[str, str] | None:
    if find_spec("torch_npu") is not None:
        return None
    return "torch_npu is not installed", "pip install 'moe-hal[ascend]' in an environment with CANN"


def _kernels() -> tuple[str, str] | None:
    if (Path(__file__).parent / _KERNELS).is_file():
        return None
    return "this installation has no Ascend kernels", "install HAL where bisheng is on PATH, so that they are built"


def _load() -> Backend:
    probe = _probe()
    raise BackendUnavailable("ascend", probe.reason, probe.fix)
