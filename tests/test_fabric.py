# SPDX-License-Identifier: Apache-2.0
"""What `hal doctor` says of machines with RDMA cards (backends/hal_cuda/fabric.py), on made-up file systems."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hal_cuda
import pytest
from hal_cuda import fabric
from hal_cuda.machine import Machine

from hal.backend import Examination
from hal.cli import main

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x)  Tue Sep 23 2025\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 10:11:41 UTC 2025\n"
LINK_LOCAL, IPV4 = "fe80:0000:0000:0000:0e42:a1ff:fe00:0001", "0000:0000:0000:0000:0000:ffff:0a00:0005"

WITHOUT_V2 = ((LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"))


class Fake:
    """A root folder that looks like a machine with eight GPUs."""

    def __init__(self, root: Path, *, driver: str = OPEN, kernel: str = "6.8.0-60-generic", peermem: bool = True) -> None:
        self.root, self.environ, self.nccl = root, {}, (2, 30, 7)
        self.environ: dict[str, str]
        for index in range(8):
            self.write(f"dev/nvidia{index}", "")
        self.write("proc/driver/nvidia/version", driver)
        self.write("proc/driver/nvidia/params", 'ModifyDeviceFiles: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
        self.write("proc/sys/kernel/osrelease", kernel + "\n")
        if peermem:
            self.write("sys/module/nvidia_peermem/version", "580.95.05\n")
        self.write("dev/infiniband/uverbs0", "")
        self.library("libibverbs.so.1", "libibverbs.so.1.14.50.0")
        self.library("libmlx5.so.1", "libmlx5.so.1.25.50.0")

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)

    def remove(self, path: str) -> None:
        (self.root / path).unlink()

    def library(self, name: str, real: str, folder: str = "usr/lib/x86_64-linux-gnu") -> None:
        self.write(f"{folder}/{real}", "")
        link = self.root / folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(real)

    def card(
        self,
        name: str,
        link: str = "InfiniBand",
        *,
        driver: str = "mlx5_core",
        model: str = "0x1021",
        pci: str = "0000:19:00.0",
        state: str = "4: ACTIVE",
        gids: tuple[tuple[str, str], ...] = ((LINK_LOCAL, "IB/RoCE v1"),),
    ) -> None:
        """As Linux shows a card: /sys/class/infiniband holds links, and a table of GIDs has unused places."""
        device, ib = f"sys/devices/{pci}", f"sys/devices/{pci}/infiniband/{name}"
        self.write(f"{device}/vendor", "0x15b3\n" if driver == "mlx5_core" else "0x1d0f\n")
        self.write(f"{device}/device", model + "\n")
        self.write(f"sys/bus/pci/drivers/{driver}/bind", "")
        if not (self.root / device / "driver").exists():
            (self.root / device / "driver").symlink_to(f"../../bus/pci/drivers/{driver}")
        self.write(f"{device}/net/net-{name}/mtu", "4096\n")
        port = f"{ib}/ports/1"
        for file, text in (("state", state), ("link_layer", link), ("rate", "400 Gb/sec (4X NDR)")):
            self.write(f"{port}/{file}", text + "\n")
        for index, (address, kind) in enumerate([*gids, ("0000:" * 7 + "0000", "")]):
            self.write(f"{port}/gids/{index}", address + "\n")
            self.write(f"{port}/gid_attrs/types/{index}", kind + "\n")
            self.write(f"{port}/gid_attrs/ndevs/{index}", f"net-{name}\n")
        (self.root / ib / "device").symlink_to("../..")
        listing = self.root / "sys/class/infiniband"
        listing.mkdir(parents=True, exist_ok=True)
        (listing / name).symlink_to(f"../../devices/{pci}/infiniband/{name}")

    def machine(self, **changes: Any) -> Machine:
        return replace(Machine(self.root, self.environ, self.nccl, resource.RLIM_INFINITY), **changes)

    def examined(self, **changes: Any) -> Examination:
        return fabric.described(self.machine(**changes))


@pytest.fixture
def infiniband(tmp_path: Path) -> Fake:
    """ConnectX-7 with everything that GDAKI wants."""
    fake = Fake(tmp_path)
    fake.card("mlx5_0")
    fake.card("mlx5_1", pci="0000:3b:00.0")
    return fake


@pytest.fixture
def roce(tmp_path: Path) -> Fake:
    fake = Fake(tmp_path)
    fake.card("mlx5_0", "Ethernet", gids=(*WITHOUT_V2, (IPV4, "RoCE v2")))
    return fake


@pytest.fixture
def efa(tmp_path: Path) -> Fake:
    fake = Fake(tmp_path, peermem=False)
    fake.card("rdmap79s0", "Unspecified", driver="efa", model="0xefa2")
    fake.write("sys/module/efa/version", "3.3.0g\n")
    fake.write("dev/gdrdrv", "")
    fake.library("libnccl-net.so", "libnccl-net-ofi.so", "opt/amazon/ofi-nccl/lib")
    fake.environ["LD_LIBRARY_PATH"] = str(fake.root / "opt/amazon/ofi-nccl/lib")
    fake.nccl = (2, 31, 2)
    return fake


def problems(found: Examination) -> list[str]:
    return [problem.text for problem in found.problems]


def only(found: Examination) -> str:
    """The text and fix of the only problem."""
    assert len(found.problems) == 1, problems(found)
    return f"{found.problems[0].text}; {found.problems[0].fix}"


def kind(found: Examination) -> Any:
    return found.data["gin"]["kind"]


# --- InfiniBand ------------------------------------------------------------------------------------------------------


def test_connectx_7_has_gdaki(infiniband: Fake) -> None:
    found = infiniband.examined()
    assert problems(found) == []
    assert found.data["gin"] == {
        "kind": "gdaki", "type": 3, "why": "the GPU posts to mlx5_0:1, mlx5_1:1 itself, memory by nvidia_peermem"
    }  # fmt: skip
    facts = dict(reversed(found.facts))  # the first of each label
    assert facts["GPUs"] == "8; driver 580.95.5, open kernel modules; Linux 6.8"
    assert facts["card"] == "mlx5_0:1 ConnectX-7, InfiniBand, 400 Gb/sec (4X NDR), ACTIVE, net-mlx5_0"
    assert facts["libraries"] == "libibverbs 1.14.50.0; libmlx5 1.25.50.0"
    assert [card["pci"] for card in found.data["cards"]] == ["0000:19:00.0", "0000:3b:00.0"]


def test_dma_buf_is_enough_with_open_modules(tmp_path: Path) -> None:
    fake = Fake(tmp_path, peermem=False)
    fake.card("mlx5_0")
    assert kind(fake.examined()) == "gdaki"
    assert "DMA-BUF (expected" in fabric.gin(fake.machine()).why
    fake.environ["NCCL_DMABUF_ENABLE"] = "0"
    assert kind(fake.examined()) == "none"


@pytest.mark.parametrize(
    ("driver", "kernel", "expected", "word"),
    [
        (CLOSED, "6.8.0", "none", "modprobe nvidia_peermem"),
        (OPEN, "5.4.0", "none", "neither nvidia_peermem is loaded nor DMA-BUF"),
        (OPEN, "5.15.0-1", "gdaki", "GDAKI by DMA-BUF needs Linux 6.1 or newer, this is 5.15"),
    ],
)
def test_missing_gpudirect_is_named_with_the_fix(
    driver: str, kernel: str, expected: str, word: str, tmp_path: Path
) -> None:
    fake = Fake(tmp_path, driver=driver, kernel=kernel, peermem=False)
    fake.card("mlx5_0")
    found = fake.examined()
    assert kind(found) == expected
    assert word in only(found)


def test_old_peermem_serves_the_proxy_only(tmp_path: Path) -> None:
    fake = Fake(tmp_path, driver=CLOSED, peermem=False)
    fake.card("mlx5_0")
    fake.write("sys/kernel/mm/memory_peers/nv_mem/version", "1.3\n")
    found = fake.examined()
    assert (kind(found), found.data["gin"]["type"]) == ("proxy", 2)
    assert "GDAKI does not take" in only(found)
    assert not found.problems[0].breaks


def test_another_vendors_card_has_the_proxy(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.card("bnxt_re0", "Ethernet", driver="bnxt_en", model="0x1760", gids=((IPV4, "RoCE v2"),))
    found = fake.examined()
    assert kind(found) == "proxy"
    assert problems(found) == []


@pytest.mark.parametrize(
    ("remove", "expected", "word"),
    [
        ("dev/infiniband/uverbs0", "none", "--device=/dev/infiniband"),
        ("usr/lib/x86_64-linux-gnu/libibverbs.so.1", "none", "libibverbs1"),
        ("usr/lib/x86_64-linux-gnu/libmlx5.so.1", "proxy", "ibverbs-providers"),
        ("sys/module/nvidia_peermem/version", "gdaki", None),
    ],
)
def test_each_missing_piece(infiniband: Fake, remove: str, expected: str, word: str | None) -> None:
    infiniband.remove(remove)
    found = infiniband.examined()
    assert kind(found) == expected
    assert problems(found) == [] if word is None else word in only(found)


def test_old_libraries_are_named(infiniband: Fake) -> None:
    infiniband.library("libibverbs.so.1", "libibverbs.so.1.14.39.0")
    infiniband.library("libmlx5.so.1", "libmlx5.so.1.24.39.0")
    assert problems(infiniband.examined()) == [
        "rdma-core is 39, and NCCL's GIN asks for 44 or newer",
        "libmlx5 is 1.24.39.0; users of versions before 1.25 (MLNX_OFED 24.10) found no GIN",
    ]


def test_libraries_on_the_path_come_first(infiniband: Fake) -> None:
    infiniband.library("libmlx5.so.1", "libmlx5.so.1.24.0.0", "opt/rdma/lib")
    infiniband.environ["LD_LIBRARY_PATH"] = f"/nowhere:{infiniband.root}/opt/rdma/lib"
    assert "libmlx5 is 1.24" in only(infiniband.examined())


def test_doorbells_need_the_drivers_leave(infiniband: Fake) -> None:
    infiniband.write("proc/driver/nvidia/params", 'RegistryDwords: ""\n')
    found = infiniband.examined()
    assert "PeerMappingOverride=1" in only(found)
    assert not found.problems[0].breaks


def test_locked_memory(infiniband: Fake) -> None:
    assert "may lock 64 KiB only" in only(infiniband.examined(memlock=65536))
    assert "ulimit -l unlimited" in only(infiniband.examined(memlock=65536))


def test_two_ports_of_one_card_are_fused(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.card("mlx5_0", pci="0000:19:00.0")
    fake.card("mlx5_1", pci="0000:19:00.1")
    assert "mlx5_0:1 and mlx5_1:1 are ports of one card" in only(fake.examined())
    fake.environ["NCCL_IB_MERGE_NICS"] = "0"
    assert problems(fake.examined()) == []


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT"])
def test_a_port_that_is_not_active(state: str, tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.card("mlx5_0", state=state)
    found = fake.examined()
    assert kind(found) == "none"
    assert f"no RDMA port is active: mlx5_0:1 {state[3:]}" in only(found)
    fake.card("mlx5_1", pci="0000:3b:00.0")  # one is enough
    assert problems(fake.examined()) == []
    assert "mlx5_0" not in fabric.gin(fake.machine()).why


# --- RoCE ------------------------------------------------------------------------------------------------------------


def test_roce_v2(roce: Fake) -> None:
    found = roce.examined()
    assert (kind(found), problems(found)) == ("gdaki", [])
    assert found.data["cards"][0]["roce_v2"] == [{"index": 3, "address": "10.0.0.5", "netdev": "net-mlx5_0"}]
    assert any(text.endswith("RoCE v2 GID 3 (10.0.0.5)") for _, text in found.facts)


def test_roce_without_a_v2_address(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.card("mlx5_0", "Ethernet", gids=WITHOUT_V2)
    told = only(fake.examined())
    assert "mlx5_0:1 is RoCE and has no routable RoCE v2 GID" in told
    assert "ip addr add … dev net-mlx5_0" in told


@pytest.mark.parametrize(("index", "bad"), [("3", False), ("-1", False), ("1", True), ("2", True), ("9", True)])
def test_a_gid_index_that_is_none(index: str, bad: bool, roce: Fake) -> None:
    roce.environ["NCCL_IB_GID_INDEX"] = index
    found = roce.examined()
    if bad:
        assert f"NCCL_IB_GID_INDEX={index} is no routable RoCE v2 GID of mlx5_0:1, which has 3 (10.0.0.5)" in only(found)
    else:
        assert problems(found) == []


# --- EFA -------------------------------------------------------------------------------------------------------------


def test_efa_with_its_plug_in(efa: Fake) -> None:
    found = efa.examined()
    assert problems(found) == []
    assert (kind(found), found.data["gin"]["type"]) == ("plug-in", None)
    assert "libnccl-net.so decides" in found.data["gin"]["why"]


def test_efa_without_what_it_needs(efa: Fake) -> None:
    (efa.root / "opt/amazon/ofi-nccl/lib/libnccl-net.so").unlink()
    efa.remove("opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so")
    efa.remove("dev/gdrdrv")
    efa.write("sys/module/efa/version", "2.13.0g\n")
    efa.nccl = (2, 30, 7)
    found = efa.examined()
    assert kind(found) == "none"
    told = problems(found)
    assert [text.split(":")[0].split(",")[0] for text in told] == [
        "EFA cards", "aws-ofi-nccl serves GIN to NCCL 2.31.2 or newer", "no /dev/gdrdrv", "EFA driver 2.13.0"
    ]  # fmt: skip


def test_efas_gpu_posting_lacks_what_hal_needs(efa: Fake) -> None:
    efa.environ["NCCL_GIN_TYPE"] = "5"
    efa.write("proc/driver/nvidia/params", "")
    told = problems(efa.examined())
    assert told == [
        "NCCL_GIN_TYPE=5 (EFA-GDA) needs the driver's PeerMappingOverride",
        "EFA-GDA has neither strong signals nor signals in windows, which profile gin needs",
    ]


# --- no card, software NIC, variables ---------------------------------------------------------------------------------


def test_no_card(tmp_path: Path) -> None:
    found = Fake(tmp_path).examined()
    assert found.data["gin"] == {"kind": "none", "type": 0, "why": "no RDMA card (nothing in /sys/class/infiniband)"}
    assert "hal run --backend cuda --hosts" in only(found)
    assert not found.problems[0].breaks


def test_the_software_nic_is_known(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.environ["NCCL_NET_PLUGIN"] = "/cache/libnccl-net-hal-swnic.so"
    found = fake.examined()
    assert (kind(found), problems(found)) == ("proxy", [])
    assert "software NIC" in found.data["gin"]["why"]
    fake.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    assert "it hangs; unset it, or set 8" in only(fake.examined())


@pytest.mark.parametrize(
    ("name", "value", "expected", "fix"),
    [
        ("NCCL_GIN_ENABLE", "0", "none", "unset"),
        ("NCCL_CUMEM_ENABLE", "0", "gdaki", "unset"),
        ("NCCL_WIN_ENABLE", "0", "gdaki", "unset"),
        ("NCCL_P2P_DISABLE", "1", "gdaki", "unset"),
        ("NCCL_CROSS_NIC", "0", "gdaki", "rails"),
        ("NCCL_HOSTID", "node7", "gdaki", "hal run --hosts"),
        ("NCCL_IB_DISABLE", "1", "none", "unset"),
        ("NCCL_IB_HCA", "mlx6", "none", "name one of them"),
        ("NCCL_IB_HCA", "^mlx5", "none", "name one of them"),
    ],
)
def test_variables_that_break_things(name: str, value: str, expected: str, fix: str, infiniband: Fake) -> None:
    infiniband.environ[name] = value
    found = infiniband.examined()
    assert kind(found) == expected
    assert f"{name}={value}" in only(found)
    assert fix in found.problems[0].fix


@pytest.mark.parametrize(
    ("value", "chosen"),
    [
        ("mlx5_1", ["mlx5_1"]), ("mlx5", ["mlx5_0", "mlx5_1"]), ("=mlx5", []), ("=mlx5_0:1", ["mlx5_0"]),
        ("mlx5_0:2", []), ("^mlx5_0", ["mlx5_1"]), ("^=mlx5_1,mlx5_7", ["mlx5_0"]),
    ],
)  # fmt: skip
def test_cards_by_name(value: str, chosen: list[str], infiniband: Fake) -> None:
    infiniband.environ["NCCL_IB_HCA"] = value
    assert [nic.name for nic, _ in infiniband.machine().chosen()] == chosen


@pytest.mark.parametrize(("value", "expected"), [("2", "proxy"), ("3", "gdaki"), ("-1", "gdaki"), ("4", "none")])
def test_the_kind_asked_for(value: str, expected: str, infiniband: Fake) -> None:
    infiniband.environ["NCCL_GIN_TYPE"] = value
    assert kind(infiniband.examined()) == expected


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("HAL_NCCL_HOME", "/nowhere", "no lib/libnccl.so.2"), ("HAL_SWNIC_LIBRARY", "/nowhere.so", "it is no file"),
        ("HAL_CUDA_ARCH", "sm_90", "no list of compute capabilities"), ("HAL_CUDA_COMBINE", "both", "pull or push"),
        ("HAL_CUDA_SMS", "0", "no number of multiprocessors"), ("HAL_CUDA_SMS", "few", "no number of multiprocessors"),
    ],
)  # fmt: skip
def test_variables_of_our_own(name: str, value: str, why: str, infiniband: Fake) -> None:
    infiniband.environ[name] = value
    assert f"{name}={value} does not work here: " in only(infiniband.examined())
    assert why in only(infiniband.examined())
    infiniband.environ = {"HAL_CUDA_ARCH": "9.0, 10.0a", "HAL_CUDA_COMBINE": "push", "HAL_NCCL_HOME": ""}
    assert problems(infiniband.examined()) == []


def test_faults_on_purpose_are_mentioned(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    fake.environ |= {"NCCL_NET_PLUGIN": "/cache/libnccl-net-hal-swnic.so", "HAL_SWNIC_FAULTS": "reorder=1ms"}
    assert "goes wrong on purpose: HAL_SWNIC_FAULTS=reorder=1ms" in only(fake.examined())


def test_another_plug_in_is_mentioned(infiniband: Fake) -> None:
    infiniband.environ["NCCL_NET_PLUGIN"] = "sharp"
    found = infiniband.examined()
    assert kind(found) == "gdaki"
    assert found.data["gin"]["why"].endswith("NCCL asks sharp first")
    infiniband.environ["NCCL_NET_PLUGIN"] = "none"
    assert "asks" not in infiniband.examined().data["gin"]["why"]


def test_nccls_files_count_and_the_environment_wins(infiniband: Fake, tmp_path: Path) -> None:
    infiniband.write("etc/nccl.conf", "# site\nNCCL_IB_DISABLE=1\nNCCL_WIN_ENABLE=0\n")
    infiniband.write("home/.nccl.conf", "NCCL_WIN_ENABLE=1\n")
    found = fabric.examine(infiniband.root, {"HOME": str(infiniband.root / "home")})
    assert found is not None
    assert kind(found) == "none"
    assert [text for text in problems(found) if "does not work here" in text] == [
        "NCCL_IB_DISABLE=1 does not work here: it hides every InfiniBand and RoCE card"
    ]
    found = fabric.examine(infiniband.root, {"HOME": "/nowhere", "NCCL_IB_DISABLE": "0", "NCCL_WIN_ENABLE": "1"})
    assert found is not None
    assert kind(found) == "gdaki"


def test_nothing_is_said_where_there_is_nothing(tmp_path: Path) -> None:
    assert fabric.examine(tmp_path, {}) is None


# --- the command -----------------------------------------------------------------------------------------------------


def test_doctor_shows_it(roce: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    roce.environ["NCCL_IB_GID_INDEX"] = "0"
    monkeypatch.setattr(hal_cuda, "SPEC", replace(hal_cuda.SPEC, examine=roce.examined))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "this machine, for backend cuda:" in text
    assert "gdaki (type 3)" in text
    assert "  problem  NCCL_IB_GID_INDEX=0 is no routable RoCE v2 GID" in text
    assert "      fix  unset it" in text
    assert main(["doctor", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["machine"]["cuda"]
    assert told["gin"]["type"] == 3
    assert told["problems"][0]["breaks"] is True


def test_a_look_that_fails_hides_nothing(
    roce: Fake, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> Examination:
        raise OSError("sysfs is gone")

    monkeypatch.setattr(hal_cuda, "SPEC", replace(hal_cuda.SPEC, examine=broken))
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "backend host" in text
    assert "OSError: sysfs is gone" in text


def test_this_machine_is_looked_at_without_a_driver() -> None:
    code = (
        "from hal.inventory import examinations; examinations()\n"
        "maps = open('/proc/self/maps').read()\n"
        "print([name for name in ('libcuda.so', 'libnccl', 'libibverbs', 'libmlx5') if name in maps])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
