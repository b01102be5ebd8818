# SPDX-License-Identifier: Apache-2.0
"""The kernel library: the one in the wheel if it fits, else compiled once and kept in a cache.

Nothing about a workload goes into the key, so no token count, expert count, top-k or number of multiprocessors ever
compiles anything. ``python -m hal_cuda.build`` compiles ahead of time.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from hal.errors import BackendUnavailable
from hal_cuda.machine import CUDA_13_DRIVER, dotted, driver_version
from hal_cuda.nccl import FIX, Nccl, installed

CACHE = "HAL_CACHE"
"""Folder for what is compiled on first use; default: XDG_CACHE_HOME, or ~/.cache."""
ARCHITECTURES = "HAL_CUDA_ARCH"
"""Compute capabilities to compile for, as in ``9.0,10.0``; default: those of the GPUs here, or 9.0."""
MINIMUM = (12, 2)
"""CUDA that NCCL asks for to compile its device API."""
_OTHER_TOOLKIT = "set CUDA_HOME to a toolkit that fits, for example CUDA 12.8, or update the driver"
FLAGS = ("-std=c++17", "-O3", "-Xcompiler", "-fPIC,-Wall,-Wextra")
EMULATED = "libhal_cuda_emulated.so"
_LIBRARY = "libhal_cuda.so"


def sources() -> Path | None:
    """The folder of the CUDA sources: in the package when installed from a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels", here.parent.parent / "kernels_cuda"):
        if (folder / "src").is_dir():
            return folder
    return None


def nvcc() -> str | None:
    """nvcc's path: of CUDA_HOME, of PATH, of /usr/local/cuda, of the wheel nvidia-cuda-nvcc (CUDA 13; the wheel for CUDA 12
    has none); or None."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home and (Path(home) / "bin" / "nvcc").exists():
        return str(Path(home) / "bin" / "nvcc")
    found = shutil.which("nvcc")
    return found or (fallback if Path(fallback := "/usr/local/cuda/bin/nvcc").exists() else _nvcc_of_wheel())


def _nvcc_of_wheel() -> str | None:
    try:
        files = metadata.distribution("nvidia-cuda-nvcc").files or []
    except metadata.PackageNotFoundError:
        return None
    found = [Path(str(file.locate())) for file in files if file.name == "nvcc"]
    return str(found[0]) if found and os.access(found[0], os.X_OK) else None


@functools.lru_cache
def toolkit(compiler: str) -> tuple[int, int]:
    """The CUDA release of an nvcc, as in (13, 0); (0, 0) if it does not say."""
    try:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    except (OSError, subprocess.SubprocessError):
        told = ""
    found = re.search(r"release (\d+)\.(\d+)", told)
    return (int(found.group(1)), int(found.group(2))) if found else (0, 0)


def ready(nccl: Nccl) -> Path | None:
    """A compiled library for this NCCL: the wheel's, or the cache's."""
    found = shipped(f"libhal_cuda-nccl{nccl.code}.so")
    if found is not None:
        return found
    if why_not(nccl) is not None:
        return None
    cached = _folder(nccl) / _LIBRARY
    return cached if cached.exists() else None


def shipped(name: str) -> Path | None:
    """A library that the wheel brought, or the build of an editable installation."""
    for folder in (Path(__file__).resolve().parent, Path(sysconfig.get_path("platlib")) / "hal_cuda"):
        if (folder / "lib" / name).exists():
            return folder / "lib" / name
    return None


def why_not(nccl: Nccl) -> tuple[str, str] | None:
    """What keeps the kernels from being compiled, and the fix; None if nothing does."""
    if sources() is None:
        return "the CUDA sources are not in this installation", "install moe-hal again"
    compiler = nvcc()
    if compiler is None:
        wheels = "pip install 'cuda-toolkit[nvcc,cccl,cudart]==13.0.*'"
        return "nvcc is not on the PATH", f"install the CUDA toolkit, set CUDA_HOME, or, for CUDA 13, {wheels}"
    if nccl.include is None:
        return f"{nccl.library} has no nccl.h beside it", "install NCCL from its wheel, or set HAL_NCCL_HOME"
    release, driver = toolkit(compiler), driver_version()
    if (0, 0) < release < MINIMUM:
        return f"{compiler} is of CUDA {dotted(release)}, and NCCL's device API needs {dotted(MINIMUM)}", _OTHER_TOOLKIT
    if release[0] >= 13 and driver and driver < CUDA_13_DRIVER:
        return f"{compiler} is of CUDA {dotted(release)}, whose programs driver {dotted(driver)} does not run", _OTHER_TOOLKIT
    return None


def library(nccl: Nccl) -> Path:
    """The library to load; compiles it (about half a minute) when neither the wheel nor the cache has it."""
    found = ready(nccl)
    if found is not None:
        return found
    problem = why_not(nccl)
    if problem is not None:
        raise BackendUnavailable("cuda", *problem)
    folder = _folder(nccl)
    with _lock(folder.with_suffix(".lock")):
        if not (folder / _LIBRARY).exists():  # another process may have been first
            _compile_into(folder, nccl)
    return folder / _LIBRARY


def command(output: Path, include: Path, architectures: Sequence[str]) -> list[str]:
    """The whole compilation as one command."""
    folder, compiler = sources(), nvcc()
    assert folder is not None
    assert compiler is not None
    names = [arch.replace(".", "") for arch in architectures]
    targets = [f"-gencode=arch=compute_{name},code=sm_{name}" for name in names]
    targets.append(f"-gencode=arch=compute_{names[0]},code=compute_{names[0]}")  # newer GPUs translate this one
    files = [str(path) for path in sorted((folder / "src").glob("*.cu"))]
    places = ["-I", str(folder / "include"), "-isystem", str(include)]
    if (libraries := Path(compiler).resolve().parent.parent / "lib").is_dir():  # wheels have no lib64, where nvcc looks
        places += ["-L", str(libraries)]
    return [
        compiler,
        *FLAGS,
        *targets,
        *places,
        "-shared",
        "-cudart",
        "static",
        "-t",
        "0",
        "-o",
        str(output),
        *files,
        "-ldl",
    ]


def architectures() -> list[str]:
    """What to compile for."""
    wanted = os.environ.get(ARCHITECTURES)
    if wanted:
        return [name.strip() for name in wanted.split(",")]
    asked = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        answer = []
    return sorted(set(answer)) or ["9.0"]


def _compile_into(folder: Path, nccl: Nccl) -> None:
    assert nccl.include is not None
    draft = Path(tempfile.mkdtemp(prefix=folder.name, dir=folder.parent))
    try:
        told = subprocess.run(
            command(draft / _LIBRARY, nccl.include, architectures()), capture_output=True, text=True, check=False
        )
        if told.returncode != 0:
            text = told.stderr or told.stdout
            raise BackendUnavailable("cuda", f"nvcc failed: {text[-2000:]}", _fix(text))
        os.rename(draft, folder)  # whoever finds the folder finds a whole library
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fix(text: str) -> str:
    """For what nvcc says when it does not fit the machine."""
    if "Unsupported gpu architecture" in text:
        return f"use a CUDA toolkit that knows this GPU, or set {ARCHITECTURES}=9.0, which the driver translates for newer ones"
    if "unsupported GNU version" in text or "unsupported clang version" in text:
        return "set NVCC_PREPEND_FLAGS='-ccbin g++-12' (or another compiler that this toolkit takes), or use a newer toolkit"
    return "see the message"


def _folder(nccl: Nccl) -> Path:
    return cache("cuda") / _key(nccl)


def cache(part: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The folder that keeps ``part`` of what is compiled here; made if it is not there."""
    base = environ.get(CACHE) or environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(base) / "hal" / part
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BackendUnavailable("cuda", f"cannot keep compiled files in {folder}: {error.strerror}", f"set {CACHE}") from error
    return folder


def _key(nccl: Nccl) -> str:
    """Everything that the library depends on."""
    digest = hashlib.sha256()
    folder = sources()
    assert folder is not None
    for path in sorted([*folder.glob("src/*"), *folder.glob("include/*")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    compiler = os.stat(nvcc() or "")
    facts = (nccl.code, str(nccl.include), compiler.st_size, compiler.st_mtime_ns, architectures(), FLAGS)
    digest.update(repr(facts).encode())
    return f"nccl{nccl.code}-{digest.hexdigest()[:20]}"


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Compile for the NCCL found here (about half a minute, once), and say where the library is."""
    argparse.ArgumentParser(prog="python -m hal_cuda.build", description=main.__doc__).parse_args(argv)
    found = installed()
    try:
        if not found:
            raise BackendUnavailable("cuda", "NCCL is not installed", FIX)
        print(library(found[0]))
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
