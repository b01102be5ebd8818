# SPDX-License-Identifier: Apache-2.0
"""What a bug report needs: versions of everything that can change a result, read without importing any of it."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "moe-hal",
    "numpy",
    "ml_dtypes",
    "hydra-core",
    "torch",
    "torch_npu",
    "jax",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "matplotlib",
)


def versions() -> dict[str, str | None]:
    """Package versions (None = not installed) after the machine's own."""
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "processors": str(os.cpu_count()),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def show_versions() -> None:
    """Print :func:`versions`, one a line."""
    for name, text in versions().items():
        print(f"{name:<18} {text or '-'}")
