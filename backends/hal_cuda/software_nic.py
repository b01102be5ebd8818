# SPDX-License-Identifier: Apache-2.0
"""Several hosts on one machine: where each rank goes, and what NCCL must be told so that it uses the software NIC.

``plan(hosts, ranks)`` lays the ranks out and says what it set; ``Plan.environment(rank)`` is what a launcher adds to the
variables of one rank before it starts. docs/software_nic.md explains every variable.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hal.errors import BackendUnavailable, ContractError
from hal_cuda.build import cache
from hal_cuda.variables import EVERYWHERE, SOFTWARE_NIC, SOFTWARE_NIC_LIBRARY, clashes

LIBRARY = "HAL_SWNIC_LIBRARY"
"""Path of a plug-in built elsewhere."""
_FLAGS = (
    "-std=c++20",
    "-O2",
    "-DNDEBUG",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-static-libstdc++",
    "-static-libgcc",
    "-Wl,-z,nodelete",
)


@dataclass(frozen=True)
class Plan:
    """Where each rank goes. Ranks of one host are consecutive, as NCCL requires."""

    hosts: int
    ranks: int
    gpus: tuple[str, ...]
    """As CUDA_VISIBLE_DEVICES names them."""
    library: Path

    @property
    def ranks_per_host(self) -> int:
        return self.ranks // self.hosts

    @property
    def shares_gpus_in_host(self) -> bool:
        """Whether two ranks of one host have the same GPU."""
        return self.ranks_per_host > len(self.gpus)

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def gpu(self, rank: int) -> str:
        """Turned by one from host to host, so that ranks of one rail have different GPUs where there are two."""
        return self.gpus[(rank % self.ranks_per_host + self.host(rank)) % len(self.gpus)]

    def visible(self, rank: int) -> tuple[str, ...]:
        """All GPUs, in an order in which ``rank % len(gpus)``, the device a rank takes, is :meth:`gpu`."""
        start = (self.gpus.index(self.gpu(rank)) - rank) % len(self.gpus)
        return self.gpus[start:] + self.gpus[:start]

    def environment(self, rank: int) -> dict[str, str]:
        """What rank ``rank`` needs beside the launcher's own variables."""
        if not 0 <= rank < self.ranks:
            raise ContractError(f"rank {rank} of {self.ranks}")
        return self._common() | {
            "NCCL_HOSTID": f"hal-host-{self.host(rank)}",
            "CUDA_VISIBLE_DEVICES": ",".join(self.visible(rank)),
        }

    def _common(self) -> dict[str, str]:
        multi_rank = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if self.shares_gpus_in_host else {}
        return {
            "NCCL_NET_PLUGIN": str(self.library),
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_NVLS_ENABLE": "0",
            "CUDA_MODULE_LOADING": "EAGER",
            **multi_rank,
        }

    def describe(self) -> str:
        """What was set and why, for the person who started the run."""
        lines = [
            f"{self.hosts} hosts x {self.ranks_per_host} ranks on {len(self.gpus)} GPUs, joined by the software NIC"
        ]
        for host in range(self.hosts):
            mine = [rank for rank in range(self.ranks) if self.host(rank) == host]
            lines.append(f"  host {host}: " + ", ".join(f"rank {rank} on GPU {self.gpu(rank)}" for rank in mine))
        lines += [f"  {name}={value}" for name, value in self._common().items()]
        lines.append("  NCCL_HOSTID and CUDA_VISIBLE_DEVICES: one value for each rank, as laid out above")
        lines += [f"  note: {note}" for note in self.notes()]
        return "\n".join(lines)

    def notes(self) -> list[str]:
        """What the layout costs."""
        notes = ["times measured over the software NIC say nothing about a network"]
        shared = -(-self.ranks // len(self.gpus))
        if shared > 1:
            notes.append(
                f"{shared} ranks share a GPU by turns of about 2 ms, so an exchange takes milliseconds; results are the same"
            )
        if self.shares_gpus_in_host:
            notes.append(
                "ranks of one host share a GPU, which NCCL allows on request only (NCCL_MULTI_RANK_GPU_ENABLE)"
            )
        return notes


def plan(hosts: int, ranks: int, *, gpus: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> Plan:
    """Lay ``ranks`` out on ``hosts`` equal make-believe hosts of this machine.

    ``gpus``: as CUDA_VISIBLE_DEVICES names them; default: those that this process sees. Raises ContractError for a layout
    or a setting in ``environ`` that cannot work, with the fix; BackendUnavailable when there is no GPU or no plug-in.
    """
    if hosts < 2 or ranks < hosts or ranks % hosts:
        raise ContractError(
            f"cannot lay out {ranks} ranks on {hosts} hosts: give at least 2 hosts, and ranks that they divide evenly"
        )
    found = tuple(gpus) if gpus is not None else visible_gpus(environ)
    if not found:
        raise BackendUnavailable(
            "cuda", "there is no GPU for the ranks", "use backend=host, which needs no software NIC"
        )
    _refuse_clashes(environ)
    return Plan(hosts, ranks, found, library(environ))


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """GPUs by the names that CUDA_VISIBLE_DEVICES takes; no driver is loaded."""
    present = sorted(int(path.name.removeprefix("nvidia")) for path in Path("/dev").glob("nvidia[0-9]*"))
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return tuple(str(index) for index in range(len(present)))
    return tuple(name.strip() for name in chosen.split(",") if name.strip() not in ("", "-1"))


def _refuse_clashes(environ: Mapping[str, str]) -> None:
    wrong = clashes(environ, (*EVERYWHERE, *SOFTWARE_NIC))
    if wrong:
        raise ContractError("; ".join(f"{clash.text(environ)} ({clash.fix})" for clash in wrong))


# --- the plug-in itself ----------------------------------------------------------------------------------------------


def sources() -> Path | None:
    """The folder of the plug-in's C++: in the package when installed from a wheel, beside it in a checkout."""
    here = Path(__file__).resolve().parent
    for folder in (here / "kernels" / "software_nic", here.parent.parent / "kernels_cuda" / "software_nic"):
        if (folder / "rma_plugin.cpp").is_file():
            return folder
    return None


def library(environ: Mapping[str, str] = os.environ) -> Path:
    """The plug-in: the one named by HAL_SWNIC_LIBRARY, the installed one, or one compiled now (half a minute) and kept.

    Raises BackendUnavailable with the fix.
    """
    if named := environ.get(LIBRARY):
        if not Path(named).is_file():
            raise BackendUnavailable("cuda", f"{LIBRARY}={named} is no file", "correct or unset it")
        return Path(named)
    for folder in (Path(__file__).resolve().parent, Path(sysconfig.get_path("platlib")) / "hal_cuda"):
        if (folder / "lib" / SOFTWARE_NIC_LIBRARY).is_file():
            return folder / "lib" / SOFTWARE_NIC_LIBRARY
    return _compile(environ)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile NCCL's plug-in for the software NIC (half a minute, once), and say where it is."""
    argparse.ArgumentParser(prog="python -m hal_cuda.software_nic", description=main.__doc__).parse_args(argv)
    try:
        print(library())
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _compile(environ: Mapping[str, str]) -> Path:
    folder = sources()
    if folder is None:
        raise BackendUnavailable(
            "cuda", "the software NIC's sources are not in this installation", "install moe-hal again"
        )
    compiler = environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
    words = shlex.split(compiler or "")
    if not words or shutil.which(words[0]) is None:
        named = f"no C++ compiler '{compiler}' (CXX)" if compiler else "no C++ compiler"
        raise BackendUnavailable("cuda", f"{named} for the software NIC", "install g++ 11 or newer, or set CXX to one")
    units = sorted(folder.glob("*.cpp"))
    digest = hashlib.sha256(" ".join((*words, *_FLAGS)).encode())
    for path in sorted([*units, *folder.glob("*.hpp")]):
        digest.update(path.name.encode() + path.read_bytes())
    target = cache("software_nic", environ) / digest.hexdigest()[:16] / SOFTWARE_NIC_LIBRARY
    if target.is_file():
        return target
    print("hal_cuda: compiling the software NIC, once (half a minute)", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Several ranks may come at once: each compiles to a name of its own, and renaming is atomic.
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / SOFTWARE_NIC_LIBRARY
        command = [*words, *_FLAGS, *map(str, units), "-o", str(made), "-pthread", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise BackendUnavailable(
                "cuda",
                f"the software NIC does not compile: {done.stderr.strip()[-800:]}",
                "use g++ 11 or newer, or build it elsewhere and set HAL_SWNIC_LIBRARY",
            )
        os.replace(made, target)
    return target


if __name__ == "__main__":
    sys.exit(main())
