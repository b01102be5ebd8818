# SPDX-License-Identifier: Apache-2.0
"""Laying ranks out as several hosts of one machine (backends/hal_cuda/software_nic.py). No GPU is needed."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from hal_cuda import software_nic
from hal_cuda.engine import CudaEngine
from hal_cuda.variables import SOFTWARE_NIC_LIBRARY
from hal_cuda.variables import software_nic as software_nic_in_use
from software_nic import build

from hal.errors import BackendUnavailable, ContractError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    library = tmp_path / "libnccl-net-hal-swnic.so"
    library.touch()
    return {"HAL_SWNIC_LIBRARY": str(library), "HOME": str(tmp_path)}


def layout(hosts: int, ranks: int, gpus: str, environ: dict[str, str]) -> list[tuple[int, str]]:
    plan = software_nic.plan(hosts, ranks, gpus=gpus.split(","), environ=environ)
    return [(plan.host(rank), plan.gpu(rank)) for rank in range(ranks)]


def test_rail_peers_have_different_gpus(environ: dict[str, str]) -> None:
    assert layout(2, 2, "0,1", environ) == [(0, "0"), (1, "1")]
    assert layout(2, 4, "0,1", environ) == [(0, "0"), (0, "1"), (1, "1"), (1, "0")]
    assert layout(4, 4, "0", environ) == [(0, "0"), (1, "0"), (2, "0"), (3, "0")]
    assert layout(4, 8, "0,1", environ)[:4] == [(0, "0"), (0, "1"), (1, "1"), (1, "0")]


@pytest.mark.parametrize(
    ("hosts", "ranks", "gpus"), [(2, 2, "0,1"), (2, 4, "3,5"), (4, 8, "0,1"), (3, 6, "0,1,2,3"), (2, 4, "0")]
)
def test_device_that_a_rank_takes_is_the_planned_one(
    hosts: int, ranks: int, gpus: str, environ: dict[str, str]
) -> None:
    """A rank takes device ``rank % count`` of what it sees, and sees all GPUs, so that peers can be reached."""
    plan = software_nic.plan(hosts, ranks, gpus=gpus.split(","), environ=environ)
    for rank in range(ranks):
        seen = plan.environment(rank)["CUDA_VISIBLE_DEVICES"].split(",")
        assert seen[rank % len(seen)] == plan.gpu(rank)
        assert sorted(seen) == sorted(gpus.split(","))


def test_ranks_of_one_host_are_consecutive_and_named_alike(environ: dict[str, str]) -> None:
    plan = software_nic.plan(2, 4, gpus=["0", "1"], environ=environ)
    assert [plan.environment(rank)["NCCL_HOSTID"] for rank in range(4)] == ["hal-host-0"] * 2 + ["hal-host-1"] * 2
    assert plan.environment(3) == {
        "NCCL_NET_PLUGIN": environ["HAL_SWNIC_LIBRARY"],
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_NVLS_ENABLE": "0",
        "CUDA_MODULE_LOADING": "EAGER",
        "NCCL_HOSTID": "hal-host-1",
        "CUDA_VISIBLE_DEVICES": "1,0",
    }


def test_it_says_what_it_set(environ: dict[str, str]) -> None:
    plan = software_nic.plan(2, 4, gpus=["0", "1"], environ=environ)
    text = plan.describe()
    for name in plan.environment(0):
        assert name in text
    assert "host 1: rank 2 on GPU 1, rank 3 on GPU 0" in text
    assert "say nothing about a network" in text
    assert "2 ranks share a GPU" in text


def test_one_gpu_for_two_ranks_of_a_host_is_asked_of_nccl(environ: dict[str, str]) -> None:
    plan = software_nic.plan(2, 4, gpus=["0"], environ=environ)
    assert plan.environment(0)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert "NCCL_MULTI_RANK_GPU_ENABLE" not in software_nic.plan(4, 4, gpus=["0"], environ=environ).environment(0)


@pytest.mark.parametrize(("hosts", "ranks"), [(1, 4), (0, 4), (3, 4), (4, 2)])
def test_uneven_layouts_are_refused(hosts: int, ranks: int, environ: dict[str, str]) -> None:
    with pytest.raises(ContractError, match=f"{ranks} ranks on {hosts} hosts"):
        software_nic.plan(hosts, ranks, gpus=["0", "1"], environ=environ)


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "32"),
        ("CUDA_MODULE_LOADING", "LAZY", "EAGER"),
        ("NCCL_GIN_ENABLE", "0", "1"),
        ("NCCL_CUMEM_ENABLE", "0", "1"),
        ("NCCL_WIN_ENABLE", "0", "1"),
        ("NCCL_P2P_DISABLE", "1", "0"),
        ("NCCL_GIN_TYPE", "3", "2"),
        ("NCCL_NET", "IB", "hal-swnic"),
        ("NCCL_NET_PLUGIN", "/opt/libnccl-net-other.so", "/opt/libnccl-net-hal-swnic.so"),
        ("NCCL_HOSTID", "node7", None),
    ],
)
def test_settings_that_cannot_work_are_refused_with_the_fix(
    name: str, bad: str, good: str | None, environ: dict[str, str]
) -> None:
    with pytest.raises(ContractError, match=rf"{name}={bad} does not work here: .*(unset|set 8)"):
        software_nic.plan(2, 2, gpus=["0", "1"], environ=environ | {name: bad})
    if good is not None:
        software_nic.plan(2, 2, gpus=["0", "1"], environ=environ | {name: good})


def test_all_clashes_are_named_at_once(environ: dict[str, str]) -> None:
    with pytest.raises(ContractError, match=r"NCCL_GIN_ENABLE=0.*CUDA_DEVICE_MAX_CONNECTIONS=1"):
        software_nic.plan(
            2, 2, gpus=["0"], environ=environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NCCL_GIN_ENABLE": "0"}
        )


def test_no_gpu_is_said(environ: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable, match="no GPU"):
        software_nic.plan(2, 2, environ=environ | {"CUDA_VISIBLE_DEVICES": ""})


def test_named_library_must_exist(environ: dict[str, str]) -> None:
    with pytest.raises(BackendUnavailable, match="is no file"):
        software_nic.library({"HAL_SWNIC_LIBRARY": "/nowhere.so"})


def test_without_a_compiler_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software_nic.shutil, "which", lambda name: None)
    for named, said in (({}, "no C++ compiler for"), ({"CXX": "/no/g++ -m64"}, "no C++ compiler '/no/g++ -m64' (CXX)")):
        with pytest.raises(BackendUnavailable, match=re.escape(said) + r".*install g\+\+"):
            software_nic.library({"HAL_CACHE": str(tmp_path)} | named)


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(BackendUnavailable, match=r"cannot keep compiled files in .*set HAL_CACHE"):
        software_nic.library({"HAL_CACHE": str(tmp_path / "file")})


@pytest.mark.slow
def test_plug_in_is_compiled_once_without_cmake_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build()  # skips where nothing can be compiled
    made = software_nic.library({"HAL_CACHE": str(tmp_path)})
    plug_in = ctypes.CDLL(str(made))
    assert plug_in.ncclRmaPlugin_v14
    assert plug_in.ncclNetPlugin_v11
    monkeypatch.setattr(software_nic.subprocess, "run", lambda *a, **k: pytest.fail("compiled a second time"))
    assert software_nic.library({"HAL_CACHE": str(tmp_path)}) == made
    assert [path.name for path in made.parent.iterdir()] == [made.name]


@pytest.mark.parametrize(("failed", "capturing", "waits"), [(0, False, True), (1, False, False), (0, True, False)])
def test_launches_over_the_software_nic_end_before_the_call_returns(failed, capturing, waits):
    """The caller's next driver call may otherwise wait for the launch inside the driver and keep the NIC's copies out."""
    done = []
    library = SimpleNamespace(stream_sync=lambda device, stream: done.append(("waited", device, stream)))
    engine = SimpleNamespace(library=library, _session=SimpleNamespace(device=3), _capturing=lambda on: capturing)

    def launch(*args):
        done.append(("launched", *args))
        return failed

    assert CudaEngine._ended(engine, launch)(17, 5) == failed
    assert done == [("launched", 17, 5), ("waited", 3, 5)][: 1 + waits]


@pytest.mark.parametrize("name", ["NCCL_NET_PLUGIN", "NCCL_GIN_PLUGIN"])
def test_the_software_nic_is_known_by_its_library(name):
    assert software_nic_in_use({name: f"/somewhere/{SOFTWARE_NIC_LIBRARY}"})
    assert not software_nic_in_use({name: "/opt/libnccl-net-ofi.so"})
