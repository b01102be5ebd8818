# SPDX-License-Identifier: Apache-2.0
"""What a result of the CUDA backend must say of where it came from: GPUs, driver, NCCL, commit, command, date."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal_cuda import nccl

COMMIT = "HAL_COMMIT"
"""The commit that is run, where the sources came without their repository."""


def gpus() -> list[str]:
    """Names of the GPUs that this process may use, by nvidia-smi; none where it is missing."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    rows = [row.split(", ", 1) for row in _smi("index,name")]
    if visible is None:
        return [name for _, name in rows]
    wanted = [part.strip() for part in visible.split(",")]
    return [name for index, name in rows if index in wanted]


def facts(command: Sequence[str] = ()) -> dict[str, Any]:
    """The run's facts, for the head of a result file. ``command``: what was run; default this process's own."""
    found, names = nccl.installed(), gpus()
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{len(names)} x {names[0]}" if names else f"no GPU ({platform.machine()}, {os.cpu_count()} cores)",
        "driver": next(iter(_smi("driver_version")), ""),
        "nccl": found[0].text if found else "",
        "python": platform.python_version(),
        "commit": commit(),
        "command": shlex.join(command or [Path(sys.executable).name, *sys.argv]),
    }


def commit() -> str:
    """HAL_COMMIT, or what git says of the checkout that this file lies in (``+`` = changed since); empty if neither."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    here = str(Path(__file__).parent)
    try:
        said = ["git", "-C", here, "describe", "--always", "--dirty=+", "--exclude=*"]
        return subprocess.run(said, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _smi(fields: str) -> list[str]:
    try:
        asked = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
