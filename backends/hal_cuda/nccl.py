# SPDX-License-Identifier: Apache-2.0
"""Where NCCL is: its shared library, its headers and its version, without loading it."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

MINIMUM = (2, 30, 7)
HOME = "HAL_NCCL_HOME"
"""A folder with ``lib/libnccl.so.2`` (and ``include/nccl.h``), used in place of the wheels."""
_WHEELS = ("nvidia-nccl-cu13", "nvidia-nccl-cu12")
FIX = (
    "pip install 'moe-hal[cuda13]' (or [cuda12]); if torch pins an older one, "
    "pip install --no-deps 'nvidia-nccl-cu13>=2.30.7'"
)
"""Where NCCL is not installed, or too old."""


@dataclass(frozen=True)
class Nccl:
    """One installed NCCL."""

    version: tuple[int, int, int]
    library: Path
    include: Path | None
    origin: str

    @property
    def code(self) -> int:
        """As NCCL_VERSION_CODE has it."""
        return self.version[0] * 10000 + self.version[1] * 100 + self.version[2]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


def installed() -> list[Nccl]:
    """Every NCCL found, the one to use first."""
    found = [nccl for nccl in [_from_home(), *map(_from_wheel, _WHEELS)] if nccl is not None]
    return found if os.environ.get(HOME) else sorted(found, key=lambda nccl: nccl.version, reverse=True)


def is_open(library: Path) -> bool:
    """Whether this process has loaded that very file, whoever opened it."""
    wanted = library.resolve()
    with open("/proc/self/maps", encoding="utf-8") as lines:
        paths = {line.split(maxsplit=5)[5].strip() for line in lines if "libnccl" in line}
    return any(os.path.exists(path) and os.path.samefile(path, wanted) for path in paths)


def _from_home() -> Nccl | None:
    home = os.environ.get(HOME)
    return _at(Path(home), HOME) if home else None


def _from_wheel(name: str) -> Nccl | None:
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "libnccl.so.2":
            return _at(Path(str(file.locate())).resolve().parent.parent, name)
    return None


def _at(root: Path, origin: str) -> Nccl | None:
    library, include = root / "lib" / "libnccl.so.2", root / "include"
    if not library.exists():
        return None
    header = include / "nccl.h"
    if header.exists():
        return Nccl(_header_version(header), library, include, origin)
    try:
        version = metadata.version(origin)
    except metadata.PackageNotFoundError:
        return None
    major, minor, patch = (int(part) for part in version.split(".")[:3])
    return Nccl((major, minor, patch), library, None, origin)


def _header_version(header: Path) -> tuple[int, int, int]:
    text = header.read_text()
    parts = [re.search(rf"#define\s+NCCL_{name}\s+(\d+)", text) for name in ("MAJOR", "MINOR", "PATCH")]
    major, minor, patch = (int(part.group(1)) if part else 0 for part in parts)
    return major, minor, patch
