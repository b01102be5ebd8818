# SPDX-License-Identifier: Apache-2.0
"""Builds the software NIC once for all its tests, and runs its torture program."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "kernels_cuda" / "software_nic"
BUILD = ROOT / "build" / "software_nic"


@functools.cache
def build() -> Path:
    """The folder with libnccl-net-hal-swnic.so and swnic_torture, up to date."""
    if shutil.which("cmake") is None or (shutil.which("c++") or shutil.which("g++")) is None:
        pytest.skip("building the software NIC needs cmake and a C++20 compiler")
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        configure = ["cmake", "-S", str(SOURCES), "-B", str(BUILD), "-DHAL_WERROR=ON"]
        for command in (configure, ["cmake", "--build", str(BUILD), "-j", "2"]):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
    return BUILD


def environment(**settings: str) -> dict[str, str]:
    """This process's variables, the stand-in for a GPU, and HAL_SWNIC_<name> for each setting."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HAL_SWNIC_", "NCCL_"))}
    return clean | {"HAL_SWNIC_DEVICE": "host"} | {f"HAL_SWNIC_{name}": value for name, value in settings.items()}


def torture(*options: str, **settings: str) -> dict[str, Any]:
    """What swnic_torture counted, with its messages as ``log``. DEVICE="cuda" is the fake driver (tests/fake_cuda.cpp)."""
    variables = environment(**settings)
    if settings.get("DEVICE") == "cuda":
        variables["LD_LIBRARY_PATH"] = str(build() / "fake_cuda")
    done = subprocess.run(
        [str(build() / "swnic_torture"), *options],
        env=variables,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result | {"log": done.stderr}


WAITS = (150, 600, 2_400, 10_000)
"""Microseconds that pieces of a put wait in turn: on a busy machine whoever reads the memory may come later than all
pieces of a quick network, so an outcome that must be seen is looked for in ever slower ones."""


def torture_until_seen(*names: str, options: tuple[str, ...] = (), faults: str) -> dict[str, Any]:
    """As torture, once each of ``names`` was counted: an outcome that is allowed, and that a search must really meet.

    ``faults`` is a format of one number, of :data:`WAITS`.
    """
    for wait in WAITS:
        result = torture(*options, FAULTS=faults.format(wait))
        assert result["broken"] == 0, result
        if all(result[name] > 0 for name in names):
            return result
    raise AssertionError(f"{names} were not all seen: {result}")
