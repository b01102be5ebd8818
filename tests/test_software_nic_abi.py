# SPDX-License-Identifier: Apache-2.0
"""Our declarations of NCCL's plug-in interfaces and of the CUDA driver, compared with the real headers by the compiler.

The comparison with NCCL needs its source (the wheel has no plug-in headers): set HAL_NCCL_SOURCE to a checkout of
NCCL 2.30.7. The one with CUDA needs cuda.h.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from software_nic import SOURCES


def compiles(source: Path, *includes: Path) -> str:
    """The compiler's complaints, or nothing."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    flags = [f"-I{folder}" for folder in (SOURCES, *includes)]
    command = [compiler, "-std=c++20", "-fsyntax-only", "-Wno-enum-compare", *flags, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


def nccl_includes(scratch: Path) -> list[Path]:
    """Folders to include NCCL's plug-in headers from; nccl.h is made from its template where it was not built."""
    home = os.environ.get("HAL_NCCL_SOURCE")
    if not home or not (Path(home) / "src/include/plugin/nccl_rma.h").is_file():
        pytest.skip("HAL_NCCL_SOURCE names no checkout of NCCL 2.30.7 (with src/include/plugin/nccl_rma.h)")
    source = Path(home) / "src"
    versions = dict(
        re.findall(
            r"^NCCL_(MAJOR|MINOR|PATCH)\s*:=\s*(\d+)", (source.parent / "makefiles/version.mk").read_text(), re.M
        )
    )
    numbers = {name.capitalize(): value for name, value in versions.items()}
    numbers |= {
        "Suffix": "",
        "Version": str(int(versions["MAJOR"]) * 10000 + int(versions["MINOR"]) * 100 + int(versions["PATCH"])),
    }
    text = re.sub(r"\$\{nccl:(\w+)\}", lambda found: numbers[found[1]], (source / "nccl.h.in").read_text())
    (scratch / "nccl.h").write_text(text)
    # nccl.h wants a few names of the CUDA runtime; none is part of the plug-in interfaces.
    (scratch / "cuda_runtime.h").write_text(
        "#pragma once\n#include <stddef.h>\ntypedef struct CUstream_st* cudaStream_t;\n"
    )
    (scratch / "cuda_fp16.h").write_text("")
    return [scratch, source / "include", source / "include/plugin"]


def test_nccl_plugin_interfaces_lie_where_nccl_looks(tmp_path: Path) -> None:
    includes = nccl_includes(tmp_path)
    assert compiles(SOURCES / "tests/nccl_layout.cpp", *includes) == ""


def test_a_shifted_field_would_be_found(tmp_path: Path) -> None:
    """The comparison can fail: with one function more in front, it does."""
    includes = nccl_includes(tmp_path)
    shifted = (
        (SOURCES / "nccl_abi.hpp")
        .read_text()
        .replace("    Result (*devices)", "    void* extra;\n    Result (*devices)")
    )
    (tmp_path / "nccl_abi.hpp").write_text(
        "\n".join(line for line in shifted.splitlines() if "static_assert" not in line)
    )
    (tmp_path / "layout.cpp").write_text((SOURCES / "tests/nccl_layout.cpp").read_text())
    complaints = compiles(tmp_path / "layout.cpp", *includes)
    assert "static assertion failed" in complaints


def test_cuda_driver_functions_take_what_we_pass() -> None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = [Path(home) / "include" for home in homes if home and (Path(home) / "include/cuda.h").is_file()]
    if not found:
        pytest.skip("no cuda.h: set CUDA_HOME to a CUDA toolkit")
    assert compiles(SOURCES / "tests/cuda_layout.cpp", found[0]) == ""
