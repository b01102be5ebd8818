# SPDX-License-Identifier: Apache-2.0
"""What this machine has for joining GPUs of several hosts: driver, RDMA cards, GPUDirect, libraries, NCCL's variables.

Everything is read from files below a root folder and from variables; no driver and no library is loaded.
:mod:`hal_cuda.fabric` draws the conclusions.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hal_cuda import nccl
from hal_cuda.variables import PLUGINS, SOFTWARE_NIC_LIBRARY, software_nic

CUDA_13_DRIVER = (580,)
"""The oldest driver that runs programs made by CUDA 13."""
_MELLANOX = "0x15b3"
_CARDS = {
    "0x1013": "ConnectX-4", "0x1015": "ConnectX-4 Lx", "0x1017": "ConnectX-5", "0x1019": "ConnectX-5 Ex",
    "0x101b": "ConnectX-6", "0x101d": "ConnectX-6 Dx", "0x101f": "ConnectX-6 Lx", "0x1021": "ConnectX-7",
    "0x1023": "ConnectX-8", "0xa2d6": "BlueField-2", "0xa2dc": "BlueField-3",
}  # fmt: skip


@dataclass(frozen=True)
class Gid:
    """One address of a port. ``kind`` is ``RoCE v2``, ``IB/RoCE v1`` or empty."""

    index: int
    address: str
    kind: str
    netdev: str

    @property
    def routable(self) -> bool:
        """Neither unset nor link-local: what NCCL takes for RoCE."""
        parsed = ipaddress.IPv6Address(self.address)
        return bool(int(parsed)) and not parsed.is_link_local

    @property
    def readable(self) -> str:
        parsed = ipaddress.IPv6Address(self.address)
        return str(parsed.ipv4_mapped or parsed)


@dataclass(frozen=True)
class Port:
    number: int
    state: str
    """``ACTIVE``, ``DOWN``, …"""
    link: str
    """``InfiniBand``, ``Ethernet`` (RoCE), or ``Unspecified`` (EFA)."""
    rate: str
    gids: tuple[Gid, ...]

    @property
    def active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def roce_v2(self) -> tuple[Gid, ...]:
        return tuple(gid for gid in self.gids if gid.kind.startswith("RoCE v2") and gid.routable)


@dataclass(frozen=True)
class Nic:
    """One RDMA device of /sys/class/infiniband."""

    name: str
    driver: str
    """``mlx5_core``, ``efa``, ``bnxt_en``, … or empty."""
    card: str
    """ConnectX-7, or vendor:device."""
    pci: str
    netdevs: tuple[str, ...]
    ports: tuple[Port, ...]

    @property
    def mlx5(self) -> bool:
        return self.driver == "mlx5_core"

    @property
    def efa(self) -> bool:
        return self.driver == "efa"


@dataclass(frozen=True)
class Machine:
    """The files and variables that were looked at."""

    root: Path
    environ: Mapping[str, str]
    nccl: tuple[int, int, int] | None
    """Version of the NCCL that HAL would open."""
    memlock: int
    """Bytes that this process may pin; :data:`resource.RLIM_INFINITY` for any."""

    def read(self, path: str) -> str:
        """A file's text without its ends; empty if it cannot be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return ""

    # --- GPUs and kernel -----------------------------------------------------------------------------------------------

    @cached_property
    def gpus(self) -> int:
        return len(list((self.root / "dev").glob("nvidia[0-9]*")))

    @cached_property
    def driver(self) -> tuple[int, ...]:
        return driver_version(self.root)

    @cached_property
    def open_modules(self) -> bool:
        return "Open Kernel Module" in self.read("proc/driver/nvidia/version")

    @cached_property
    def peer_mapping(self) -> bool:
        return bool(re.search(r"PeerMappingOverride=0*1\b", self.read("proc/driver/nvidia/params")))

    @cached_property
    def kernel(self) -> tuple[int, ...]:
        return numbers(self.read("proc/sys/kernel/osrelease"))[:2]

    # --- GPUDirect RDMA ------------------------------------------------------------------------------------------------

    @cached_property
    def peermem(self) -> bool:
        """NVIDIA's module; an installed one without InfiniBand's peer interface does not load."""
        return (self.root / "sys/module/nvidia_peermem/version").exists()

    @cached_property
    def old_peermem(self) -> bool:
        """Its forerunner nv_peer_mem, which GDAKI does not take."""
        folders = ("nv_mem", "nv_mem_nc")
        return any((self.root / "sys/kernel/mm/memory_peers" / name / "version").exists() for name in folders)

    @cached_property
    def dma_buf(self) -> bool:
        """Whether kernel and driver should do it; only a registration shows it."""
        return self.kernel >= (5, 12) and self.open_modules and self.environ.get("NCCL_DMABUF_ENABLE") != "0"

    # --- libraries ---------------------------------------------------------------------------------------------------

    def library(self, *names: str) -> Path | None:
        """The first of ``names`` on LD_LIBRARY_PATH or where distributions put libraries."""
        named = [Path(part) for part in self.environ.get("LD_LIBRARY_PATH", "").split(":") if part]
        usual = [
            self.root / folder
            for base in ("usr/lib", "lib", "usr/local/lib")
            for folder in (f"{base}/x86_64-linux-gnu", f"{base}/aarch64-linux-gnu", f"{base}64", base)
        ]
        return next((f / name for name in names if name for f in (*named, *usual) if (f / name).exists()), None)

    @cached_property
    def verbs(self) -> tuple[int, ...] | None:
        """As in libibverbs.so.1.14.50.0, whose third number is rdma-core's version; () if the name does not say."""
        return _library_version(self.library(self.environ.get("NCCL_IBVERBS_LIB", ""), "libibverbs.so.1"))

    @cached_property
    def mlx5(self) -> tuple[int, ...] | None:
        return _library_version(self.library("libmlx5.so.1"))

    # --- cards -------------------------------------------------------------------------------------------------------

    @cached_property
    def nics(self) -> tuple[Nic, ...]:
        folder = self.root / "sys/class/infiniband"
        return tuple(self._nic(path) for path in sorted(folder.iterdir())) if folder.is_dir() else ()

    @cached_property
    def devices(self) -> bool:
        """Whether verbs can open a card: a container may show cards in /sys and have no device file."""
        return any((self.root / "dev/infiniband").glob("uverbs*"))

    def chosen(self) -> Iterator[tuple[Nic, Port]]:
        """Active InfiniBand and RoCE ports that NCCL_IB_HCA lets NCCL use."""
        for nic in self.nics:
            for port in nic.ports:
                if port.active and port.link in ("InfiniBand", "Ethernet") and self.named(nic, port):
                    yield nic, port

    def named(self, nic: Nic, port: Port) -> bool:
        """By NCCL_IB_HCA: prefixes, or whole names after ``=``; ``^`` in front leaves them out; ``:PORT`` may follow."""
        value = self.environ.get("NCCL_IB_HCA", "")
        if not value:
            return True
        leave_out = value.startswith("^")
        value = value.removeprefix("^")
        exact = value.startswith("=")
        for item in value.removeprefix("=").split(","):
            name, _, number = item.strip().partition(":")
            same = nic.name == name if exact else bool(name) and nic.name.startswith(name)
            if same and number in ("", str(port.number)):
                return not leave_out
        return leave_out

    def _nic(self, path: Path) -> Nic:
        where = f"sys/class/infiniband/{path.name}"
        device = path / "device"
        driver = device / "driver"
        vendor, model = self.read(f"{where}/device/vendor"), self.read(f"{where}/device/device")
        ports = sorted(int(port.name) for port in (path / "ports").glob("[0-9]*"))
        return Nic(
            name=path.name,
            driver=driver.resolve().name if driver.exists() else "",
            card=_CARDS.get(model, f"{vendor}:{model}") if vendor == _MELLANOX else f"{vendor}:{model}".strip(":"),
            pci=device.resolve().name if device.exists() else "",
            netdevs=tuple(sorted(item.name for item in (device / "net").glob("*"))),
            ports=tuple(self._port(where, number) for number in ports),
        )

    def _port(self, nic: str, number: int) -> Port:
        where = f"{nic}/ports/{number}"
        indices = sorted(int(path.name) for path in (self.root / where / "gids").glob("[0-9]*"))
        gids = [
            Gid(
                index,
                address,
                self.read(f"{where}/gid_attrs/types/{index}"),
                self.read(f"{where}/gid_attrs/ndevs/{index}"),
            )
            for index in indices
            if _is_address(address := self.read(f"{where}/gids/{index}"))
        ]
        return Port(
            number,
            self.read(f"{where}/state").rpartition(": ")[2],
            self.read(f"{where}/link_layer"),
            self.read(f"{where}/rate"),
            tuple(gids),
        )

    # --- plug-ins ------------------------------------------------------------------------------------------------------

    @cached_property
    def software_nic(self) -> bool:
        return software_nic(self.environ)

    @cached_property
    def plug_in(self) -> str:
        """Another network plug-in that NCCL would look into, by its name; empty if there is none."""
        for name in PLUGINS:
            value = self.environ.get(name, "")
            if value and value.lower() != "none" and Path(value).name != SOFTWARE_NIC_LIBRARY:
                return value
        unset = [name for name in PLUGINS if name not in self.environ]
        found = self.library(*(f"libnccl-{name.split('_')[1].lower()}.so" for name in unset))
        return found.name if found is not None else ""

    @cached_property
    def efa_plug_in(self) -> bool:
        """aws-ofi-nccl by one of the names that it has had; NCCL finds the first two on its own or by NCCL_NET_PLUGIN=ofi."""
        names = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
        amazon = self.root / "opt/amazon"
        return self.library(*names) is not None or any(amazon.glob("*ofi-nccl/lib*/libnccl-net*.so"))


def driver_version(root: Path = Path("/")) -> tuple[int, ...]:
    """NVIDIA's driver, as in (580, 95, 5); () without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ()
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", text)
    return numbers(found.group(1)) if found else ()


def this_machine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Machine:
    """What is here; another ``root`` holds the files of another machine."""
    found = nccl.installed()
    return Machine(
        root,
        {**_configured(root, environ), **environ},
        found[0].version if found else None,
        resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    )


def _configured(root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """What NCCL's files set: /etc/nccl.conf, then the user's; the environment wins over both."""
    home = environ.get("HOME")
    own = environ.get("NCCL_CONF_FILE") or (f"{home}/.nccl.conf" if home else "")
    found: dict[str, str] = {}
    for path in (root / "etc/nccl.conf", *([Path(own)] if own else [])):
        try:
            lines = path.read_text(errors="replace").splitlines()
        except OSError:
            continue
        pairs = [line.partition("=") for line in lines if not line.startswith("#")]
        found |= {name: value for name, sign, value in pairs if sign}
    return found


def _library_version(path: Path | None) -> tuple[int, ...] | None:
    if path is None:
        return None
    return numbers(path.resolve().name.partition(".so.")[2])


def numbers(text: str) -> tuple[int, ...]:
    """The version that ``text`` begins with; () if it does not begin with one."""
    found = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _is_address(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
