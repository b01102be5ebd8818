# SPDX-License-Identifier: Apache-2.0
"""What a result measured on GPUs is filed with: when, on what, with which versions, by which command."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hal_cuda.session import CudaSession


def of_session(session: CudaSession) -> dict[str, Any]:
    """What one rank knows of its GPU and its NCCL."""
    properties = session.properties
    return {
        "nccl": properties.nccl_version,
        "gpu": properties.gpu.decode(),
        "lsa": properties.lsa_size,
        "gin": properties.gin_type,
    }


def write_record(path: Path, what: str, facts: dict[str, Any], gpus: int, command: str, **results: Any) -> None:
    """A JSON file with ``results`` and the run's facts: ``facts`` of one of its sessions, and the commit in HAL_COMMIT."""
    record = {
        "what": what,
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "machine": f"{gpus} x {facts['gpu']}",
        "driver": _driver(),
        "nccl": facts["nccl"],
        "commit": os.environ.get("HAL_COMMIT", ""),
        "command": command,
        **results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _driver() -> str:
    """Its version; empty where nvidia-smi is not."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    except OSError:
        return ""
    return told[0] if told else ""
