# SPDX-License-Identifier: Apache-2.0
"""What a result measured on GPUs is filed with: when, on what, with which versions, by which command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal_cuda import nccl

if TYPE_CHECKING:
    from hal_cuda.session import CudaSession

COMMIT = "HAL_COMMIT"
"""The commit that is run, where the sources came without their repository."""


def of_session(session: CudaSession) -> dict[str, Any]:
    """What one rank knows of its GPU and its NCCL."""
    properties = session.properties
    return {
        "nccl": properties.nccl_version,
        "gpu": properties.gpu.decode(),
        "lsa": properties.lsa_size,
        "gin": properties.gin_type,
    }


def of_machine() -> dict[str, Any]:
    """The same without a session, from nvidia-smi and the NCCL that would be used; and how many GPUs there are."""
    found, names = nccl.installed(), _smi("name")
    none = f"none ({platform.machine()}, {os.cpu_count()} cores)"
    return {"nccl": found[0].code if found else 0, "gpu": names[0] if names else none, "gpus": len(names)}


def record_of(what: str, facts: dict[str, Any], gpus: int, command: str, **results: Any) -> dict[str, Any]:
    """``results`` under the run's facts: ``facts`` of one of its sessions or of the machine, driver, commit and date."""
    return {
        "what": what,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{gpus} x {facts['gpu']}",
        "driver": next(iter(_smi("driver_version")), ""),
        "nccl": facts["nccl"],
        "commit": commit(),
        "command": command,
        **results,
    }


def write_record(path: Path, what: str, facts: dict[str, Any], gpus: int, command: str, **results: Any) -> None:
    """:func:`record_of` as a JSON file."""
    write(path, record_of(what, facts, gpus, command, **results))


def write(path: Path, record: dict[str, Any]) -> None:
    """A whole file or the one before: a run that is ended while it writes keeps what it had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(record, indent=1) + "\n")
    draft.replace(path)


def commit() -> str:
    """HAL_COMMIT, or what git says of the checkout that this file lies in (``+`` = changed since); empty if neither."""
    named = os.environ.get(COMMIT)
    if named:
        return named
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    return next(iter(_lines(asked)), "")


def _smi(field: str) -> list[str]:
    """Of each GPU; nothing where nvidia-smi is not."""
    return _lines(["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"])


def _lines(command: list[str]) -> list[str]:
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.splitlines() if told.returncode == 0 else []
