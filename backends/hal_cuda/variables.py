# SPDX-License-Identifier: Apache-2.0
"""Variables of the user's that keep NCCL from doing what HAL needs: one table, for the software NIC and for real fabrics."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SOFTWARE_NIC_LIBRARY = "libnccl-net-hal-swnic.so"
PLUGINS = ("NCCL_NET_PLUGIN", "NCCL_RMA_PLUGIN", "NCCL_GIN_PLUGIN")


def software_nic(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether NCCL is to use the software NIC."""
    return any(Path(environ.get(name, "")).name == SOFTWARE_NIC_LIBRARY for name in PLUGINS)


@dataclass(frozen=True)
class Clash:
    """A variable and the values of it that do not work."""

    name: str
    wrong: Callable[[str], bool]
    why: str
    fix: str

    def text(self, environ: Mapping[str, str]) -> str:
        return f"{self.name}={environ[self.name]} does not work here: {self.why}"


def _off(value: str) -> bool:
    return value.strip() == "0"


EVERYWHERE = (
    Clash("NCCL_CUMEM_ENABLE", _off, "windows need it", "unset it"),
    Clash("NCCL_WIN_ENABLE", _off, "windows need it", "unset it"),
    Clash("NCCL_GIN_ENABLE", _off, "GIN is what crosses the hosts", "unset it"),
    Clash(
        "NCCL_P2P_DISABLE", lambda value: value.strip() != "0", "ranks of a host then have no LSA team", "unset it"
    ),
)
"""Wherever there are several hosts."""

SOFTWARE_NIC = (
    Clash(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value.strip() == "1",
        "the NIC's copies then queue behind the kernel that waits for them, and it hangs",
        "unset it, or set 8",
    ),
    Clash(
        "CUDA_MODULE_LOADING",
        lambda value: value.upper() == "LAZY",
        "a kernel loaded for the first time while another waits for its peer blocks both",
        "unset it: EAGER is set for the ranks",
    ),
    Clash("NCCL_GIN_TYPE", lambda value: value not in ("-1", "2"), "the software NIC is of type 2 (proxy)", "unset it"),
    Clash("NCCL_NET", lambda value: value != "hal-swnic", "it names another network", "unset it"),
    Clash(
        "NCCL_HOSTID",
        lambda value: True,
        "one value for all ranks makes them one host",
        "unset it: each rank gets its host's",
    ),
    *(
        Clash(name, lambda value: Path(value).name != SOFTWARE_NIC_LIBRARY, "it names another plug-in", "unset it")
        for name in PLUGINS
    ),
)
"""Make-believe hosts, beside :data:`EVERYWHERE`."""

REAL_FABRIC = (
    Clash("NCCL_IB_DISABLE", lambda value: value.strip() != "0", "it hides every InfiniBand and RoCE card", "unset it"),
    Clash(
        "NCCL_CROSS_NIC",
        _off,
        "GIN then reaches ranks of the same rail only, so the world team has none",
        "unset it, unless the fabric's rails are really apart",
    ),
    Clash(
        "NCCL_HOSTID",
        lambda value: True,
        "ranks of one value count as one host, whatever machine they are on",
        "unset it; `hal run --hosts` sets it for each rank",
    ),
)
"""Hosts joined by a network, beside :data:`EVERYWHERE`."""

HAL = (
    Clash(
        "HAL_NCCL_HOME",
        lambda value: bool(value) and not (Path(value) / "lib" / "libnccl.so.2").exists(),
        "there is no lib/libnccl.so.2 in it, so an installed wheel is taken",
        "correct or unset it",
    ),
    Clash("HAL_SWNIC_LIBRARY", lambda value: bool(value) and not Path(value).is_file(), "it is no file", "correct or unset it"),
    Clash(
        "HAL_CUDA_ARCH",
        lambda value: bool(value) and not re.fullmatch(r"\s*\d+\.\d+[af]?\s*(,\s*\d+\.\d+[af]?\s*)*", value),
        "it is no list of compute capabilities",
        "write 9.0 or 9.0,10.0",
    ),
    Clash("HAL_CUDA_COMBINE", lambda value: value not in ("", "pull", "push"), "combine is pull or push", "unset it"),
    Clash(
        "HAL_CUDA_SMS",
        lambda value: bool(value) and not re.fullmatch(r"0*[1-9][0-9]*", value),
        "it is no number of multiprocessors",
        "unset it, or set 1 or more",
    ),
)
"""HAL's own."""


def clashes(environ: Mapping[str, str], table: Iterable[Clash]) -> list[Clash]:
    """Those of ``table`` that are set, and set wrong."""
    return [clash for clash in table if clash.name in environ and clash.wrong(environ[clash.name])]
