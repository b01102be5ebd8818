# SPDX-License-Identifier: Apache-2.0
"""What joins this machine's GPUs to others', and the kind of GIN that NCCL would use, for `hal doctor` (docs/fabrics.md).

NCCL has the last word (``NCCL_DEBUG=INFO`` shows it). It looks for GIN in the order of 2.30.7: a plug-in's own, GDAKI on
NVIDIA's cards, a CPU thread (proxy) over a plug-in's RMA or over verbs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hal.backend import Examination, Problem
from hal_cuda.machine import Machine, Nic, Port, dotted, numbers, this_machine
from hal_cuda.variables import EVERYWHERE, HAL, REAL_FABRIC, SOFTWARE_NIC, Clash, clashes

GIN_TYPES = {"none": 0, "proxy": 2, "gdaki": 3}
"""As NCCL numbers them (``NCCL_GIN_TYPE``)."""
_GDAKI_DMA_BUF_KERNEL = (6, 1)
_MLX5_WANTED, _RDMA_CORE_WANTED = (1, 25), 44
_EFA_NCCL, _EFA_PLUGIN, _EFA_DRIVER = (2, 31, 2), "1.21", (3, 3, 0)
_OVERRIDE = 'options nvidia NVreg_RegistryDwords="PeerMappingOverride=1" in /etc/modprobe.d, then load the driver again'

_Ports = list[tuple[Nic, Port]]


@dataclass(frozen=True)
class Gin:
    """What NCCL would use between hosts, and why."""

    kind: str
    """``gdaki``, ``proxy``, ``plug-in`` (it decides) or ``none``."""
    why: str


def examine(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Examination | None:
    """This machine, for ``hal doctor``; None where there is neither an NVIDIA GPU nor an RDMA card."""
    machine = this_machine(root, environ)
    return described(machine) if machine.gpus or machine.nics else None


def described(machine: Machine) -> Examination:
    """Facts and problems of ``machine``, in the order in which a person looks."""
    answer = gin(machine)
    return Examination(
        tuple(_facts(machine, answer)), tuple(_problems(machine, answer)), _data(machine, answer)
    )


# --- the kind of GIN -------------------------------------------------------------------------------------------------


def gin(machine: Machine) -> Gin:
    """What NCCL would use on this machine."""
    if machine.environ.get("NCCL_GIN_ENABLE", "").strip() == "0":
        return Gin("none", "NCCL_GIN_ENABLE=0")
    if machine.software_nic:
        return Gin("proxy", "the software NIC is set as NCCL's plug-in: hosts are make-believe")
    own = _own_gin(machine)
    if not machine.plug_in:
        return own
    if own.kind == "none":
        return Gin("plug-in", f"{machine.plug_in} decides; NCCL's own has {own.why}")
    return Gin(own.kind, f"{own.why}; NCCL asks {machine.plug_in} first")


def _own_gin(machine: Machine) -> Gin:
    """Without a plug-in."""
    ports = list(machine.chosen())
    if missing := _missing(machine, ports):
        return Gin("none", missing)
    wanted = machine.environ.get("NCCL_GIN_TYPE", "-1").strip()
    mlx5 = [(nic, port) for nic, port in ports if nic.mlx5] if machine.mlx5 is not None else []
    if wanted in ("-1", "3") and mlx5 and (machine.peermem or machine.dma_buf):
        return Gin("gdaki", f"the GPU posts to {_names(mlx5)} itself, memory by {_direct(machine)}")
    if wanted in ("-1", "2"):
        return Gin("proxy", f"a CPU thread posts to {_names(ports)}, memory by {_direct(machine)}")
    return Gin("none", f"NCCL_GIN_TYPE={wanted}, which nothing here serves")


def _missing(machine: Machine, ports: _Ports) -> str:
    """What keeps NCCL's own GIN away; empty if nothing does."""
    if not machine.nics:
        return "no RDMA card (nothing in /sys/class/infiniband)"
    if machine.environ.get("NCCL_IB_DISABLE", "0").strip() != "0":
        return f"NCCL_IB_DISABLE={machine.environ['NCCL_IB_DISABLE']}"
    if not ports and any(nic.efa for nic in machine.nics):
        return "EFA cards only, which need aws-ofi-nccl"
    if not ports:
        return "no active InfiniBand or RoCE port that NCCL may use"
    if not machine.devices:
        return "no /dev/infiniband/uverbs*, so no card can be opened"
    if machine.verbs is None:
        return "no libibverbs.so.1"
    if not (machine.peermem or machine.old_peermem or machine.dma_buf):
        return "no GPUDirect RDMA (neither nvidia_peermem nor DMA-BUF)"
    return ""


def _direct(machine: Machine) -> str:
    if machine.peermem:
        return "nvidia_peermem"
    return "nv_peer_mem" if machine.old_peermem else "DMA-BUF (expected from kernel and driver, not tried)"


def _names(ports: _Ports) -> str:
    return ", ".join(f"{nic.name}:{port.number}" for nic, port in ports)


# --- facts -----------------------------------------------------------------------------------------------------------


def _facts(machine: Machine, answer: Gin) -> Iterator[tuple[str, str]]:
    modules = "open" if machine.open_modules else "proprietary"
    driver = f"driver {dotted(machine.driver)}, {modules} kernel modules" if machine.driver else "no NVIDIA driver"
    yield "GPUs", f"{machine.gpus}; {driver}; Linux {dotted(machine.kernel) or '?'}"
    for nic in machine.nics:
        for port in nic.ports:
            yield "card", _port_line(machine, nic, port)
    if machine.nics:
        has = [
            "nvidia_peermem is loaded" if machine.peermem else "",
            "nv_peer_mem is loaded" if machine.old_peermem else "",
            "DMA-BUF expected (kernel and open modules)" if machine.dma_buf else "",
        ]
        yield "GPUDirect", "; ".join(filter(None, has)) or "none"
        yield "libraries", f"libibverbs {_found(machine.verbs)}; libmlx5 {_found(machine.mlx5)}"
    number = f" (type {GIN_TYPES[answer.kind]})" if answer.kind in GIN_TYPES else ""
    yield "GIN", f"{answer.kind}{number}: {answer.why}"


def _port_line(machine: Machine, nic: Nic, port: Port) -> str:
    words = [f"{nic.name}:{port.number} {nic.card or nic.driver}", port.link, port.rate, port.state]
    if nic.netdevs:
        words.append("/".join(nic.netdevs))
    if port.link == "Ethernet":
        words.append(
            "RoCE v2 GID " + ", ".join(f"{gid.index} ({gid.readable})" for gid in port.roce_v2[:2])
            if port.roce_v2
            else "no RoCE v2 GID"
        )
    if not machine.named(nic, port):
        words.append(f"left out by NCCL_IB_HCA={machine.environ['NCCL_IB_HCA']}")
    return ", ".join(filter(None, words))


def _data(machine: Machine, answer: Gin) -> dict[str, object]:
    """For ``hal doctor --json``."""
    return {
        "gpus": machine.gpus,
        "driver": dotted(machine.driver),
        "open_modules": machine.open_modules,
        "kernel": dotted(machine.kernel),
        "cards": [
            {
                "name": nic.name, "driver": nic.driver, "card": nic.card, "pci": nic.pci, "port": port.number,
                "link": port.link, "rate": port.rate, "state": port.state,
                "roce_v2": [{"index": gid.index, "address": gid.readable, "netdev": gid.netdev} for gid in port.roce_v2],
            }
            for nic in machine.nics
            for port in nic.ports
        ],
        "nvidia_peermem": machine.peermem,
        "dma_buf_expected": machine.dma_buf,
        "peer_mapping_override": machine.peer_mapping,
        "gin": {"kind": answer.kind, "type": GIN_TYPES.get(answer.kind), "why": answer.why},
    }  # fmt: skip


# --- problems --------------------------------------------------------------------------------------------------------


def _problems(machine: Machine, answer: Gin) -> Iterator[Problem]:
    yield from _variable_problems(machine, HAL)
    if machine.software_nic:
        yield from _variable_problems(machine, (*EVERYWHERE, *SOFTWARE_NIC))
        if faults := machine.environ.get("HAL_SWNIC_FAULTS"):
            yield Problem(f"the software NIC goes wrong on purpose: HAL_SWNIC_FAULTS={faults}", "unset it", breaks=False)
        return
    if any(nic.efa for nic in machine.nics):
        yield from _efa_problems(machine)
    if any(not nic.efa for nic in machine.nics):
        yield from _card_problems(machine, answer)
    yield from _variable_problems(machine, (*EVERYWHERE, *REAL_FABRIC))
    if not machine.nics:
        yield Problem(
            "hosts cannot be joined: there is no RDMA card, so NCCL has no GIN",
            "one NVLink domain needs none (transport lsa); several hosts on this machine: hal run --backend cuda --hosts H",
            breaks=False,
        )


def _variable_problems(machine: Machine, table: Iterable[Clash]) -> Iterator[Problem]:
    for clash in clashes(machine.environ, table):
        yield Problem(clash.text(machine.environ), clash.fix)


def _card_problems(machine: Machine, answer: Gin) -> Iterator[Problem]:
    """InfiniBand and RoCE cards."""
    ports = list(machine.chosen())
    if not ports:
        yield _no_port(machine)
        return
    if not machine.devices:
        yield Problem(
            "/sys shows RDMA cards, but /dev/infiniband has no uverbs device: a container without its cards",
            "start it with --device=/dev/infiniband (Kubernetes: ask for the RDMA resource), or load ib_uverbs",
        )
    yield from _library_problems(machine, ports)
    yield from _direct_problems(machine, ports, answer)
    yield from _gid_problems(machine, ports)
    yield from _fused_problems(machine, ports)
    if machine.memlock != resource.RLIM_INFINITY:
        yield Problem(
            f"this process may lock {machine.memlock // 1024} KiB only, and cards pin what they transfer",
            "ulimit -l unlimited (Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)",
        )


def _no_port(machine: Machine) -> Problem:
    states = [f"{nic.name}:{port.number} {port.state or '?'}" for nic in machine.nics for port in nic.ports]
    active = [nic for nic in machine.nics if any(port.active for port in nic.ports) and not nic.efa]
    if active and "NCCL_IB_HCA" in machine.environ:
        return Problem(
            f"NCCL_IB_HCA={machine.environ['NCCL_IB_HCA']} names no active card; there are: {', '.join(states)}",
            "unset it, or name one of them",
        )
    return Problem(
        f"no RDMA port is active: {', '.join(states)}",
        "check cable and switch; InfiniBand also needs a subnet manager (ibstat shows INIT without one)",
    )


def _library_problems(machine: Machine, ports: _Ports) -> Iterator[Problem]:
    if machine.verbs is None:
        yield Problem("libibverbs.so.1 is not installed", "install rdma-core (Debian, Ubuntu: libibverbs1 ibverbs-providers)")
        return
    if len(machine.verbs) > 2 and machine.verbs[2] < _RDMA_CORE_WANTED:
        yield Problem(
            f"rdma-core is {machine.verbs[2]}, and NCCL's GIN asks for {_RDMA_CORE_WANTED} or newer", "update rdma-core"
        )
    if not any(nic.mlx5 for nic, _ in ports):
        return
    if machine.mlx5 is None:
        yield Problem(
            "libmlx5.so.1 is not installed, so NCCL does not know its cards and GDAKI is left out",
            "install rdma-core's providers (Debian, Ubuntu: ibverbs-providers)",
        )
    elif machine.mlx5 and machine.mlx5 < _MLX5_WANTED:
        yield Problem(
            f"libmlx5 is {dotted(machine.mlx5)}; users of versions before 1.25 (MLNX_OFED 24.10) found no GIN",
            "update to DOCA-OFED, or to a rdma-core whose libmlx5 is 1.25",
            breaks=False,
        )


def _direct_problems(machine: Machine, ports: _Ports, answer: Gin) -> Iterator[Problem]:
    if not machine.gpus:
        return
    fix = "modprobe nvidia_peermem (it comes with NVIDIA's driver and needs MLNX_OFED or DOCA-OFED)"
    newer = f"use NVIDIA's open kernel modules on Linux {dotted(_GDAKI_DMA_BUF_KERNEL)} or newer (DMA-BUF)"
    mlx5 = any(nic.mlx5 for nic, _ in ports)
    if not (machine.peermem or machine.old_peermem or machine.dma_buf):
        yield Problem("no GPUDirect RDMA: neither nvidia_peermem is loaded nor DMA-BUF to be expected", f"{fix}; or {newer}")
    elif mlx5 and not machine.peermem and not machine.dma_buf:
        yield Problem("nv_peer_mem is loaded, which GDAKI does not take, so a CPU thread posts (slower)", fix, breaks=False)
    elif mlx5 and not machine.peermem and machine.kernel < _GDAKI_DMA_BUF_KERNEL:
        yield Problem(
            f"GDAKI by DMA-BUF needs Linux {dotted(_GDAKI_DMA_BUF_KERNEL)} or newer, this is {dotted(machine.kernel)}", fix
        )
    if answer.kind == "gdaki" and not machine.peer_mapping:
        yield Problem(
            "the driver may refuse to map the cards' doorbells into the GPU; a CPU thread then rings them (slower)",
            _OVERRIDE,
            breaks=False,
        )


def _gid_problems(machine: Machine, ports: _Ports) -> Iterator[Problem]:
    wanted = machine.environ.get("NCCL_IB_GID_INDEX", "").strip()
    for nic, port in ports:
        if port.link != "Ethernet":
            continue
        there = ", ".join(f"{gid.index} ({gid.readable})" for gid in port.roce_v2)
        if not port.roce_v2:
            netdev = nic.netdevs[0] if nic.netdevs else "its network device"
            yield Problem(
                f"{nic.name}:{port.number} is RoCE and has no routable RoCE v2 GID",
                f"give {netdev} an IP address (ip addr add … dev {netdev}); show_gids or "
                f"/sys/class/infiniband/{nic.name}/ports/{port.number}/gid_attrs/types lists what it has",
            )
        elif wanted not in ("", "-1") and wanted not in {str(gid.index) for gid in port.roce_v2}:
            yield Problem(
                f"NCCL_IB_GID_INDEX={wanted} is no routable RoCE v2 GID of {nic.name}:{port.number}, which has {there}",
                "unset it: NCCL chooses for each port",
            )


def _fused_problems(machine: Machine, ports: _Ports) -> Iterator[Problem]:
    """NCCL fuses the ports of one card, and its GIN does not take fused ones."""
    if machine.environ.get("NCCL_IB_MERGE_NICS", "1").strip() == "0":
        return
    cards: dict[str, list[str]] = {}
    for nic, port in ports:
        cards.setdefault(nic.pci.rpartition(".")[0] or nic.name, []).append(f"{nic.name}:{port.number}")
    for names in cards.values():
        if len(names) > 1:
            yield Problem(
                f"{' and '.join(names)} are ports of one card: NCCL fuses them, and GIN does not take fused ports",
                "set NCCL_IB_MERGE_NICS=0",
            )


def _efa_problems(machine: Machine) -> Iterator[Problem]:
    if not machine.efa_plug_in:
        yield Problem(
            "EFA cards, but no aws-ofi-nccl: NCCL cannot use them",
            f"install it ({_EFA_PLUGIN} or newer for GIN; AWS's EFA installer 1.50 or newer brings it) and put it on "
            "LD_LIBRARY_PATH",
        )
    if machine.nccl is not None and machine.nccl < _EFA_NCCL:
        yield Problem(
            f"aws-ofi-nccl serves GIN to NCCL {dotted(_EFA_NCCL)} or newer, this is {dotted(machine.nccl)}",
            "update NCCL; HAL compiles its kernels for the one found",
        )
    if not (machine.root / "dev/gdrdrv").exists():
        yield Problem("no /dev/gdrdrv, which aws-ofi-nccl's GIN needs", "load GDRCopy's kernel module, 2.5 or newer")
    version = numbers(machine.read("sys/module/efa/version"))
    if version and version < _EFA_DRIVER:
        yield Problem(
            f"EFA driver {dotted(version)}: the GPU cannot post itself before {dotted(_EFA_DRIVER)}, a CPU thread does",
            "update the EFA driver (EFA installer 1.50)",
            breaks=False,
        )
    if machine.environ.get("NCCL_GIN_TYPE", "").strip() == "5":
        if not machine.peer_mapping:
            yield Problem(
                "NCCL_GIN_TYPE=5 (EFA-GDA) needs the driver's PeerMappingOverride",
                _OVERRIDE,
            )
        yield Problem(
            "EFA-GDA has neither strong signals nor signals in windows, which profile gin needs",
            "unset NCCL_GIN_TYPE: the plug-in's CPU thread has both",
        )


def _found(version: tuple[int, ...] | None) -> str:
    return "is not installed" if version is None else dotted(version) or "of unknown version"
