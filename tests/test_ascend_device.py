# SPDX-License-Identifier: Apache-2.0
"""What is only used on real devices, as far as a machine without one can hold it: the device build's host files compile
against the shim, and libhal_ascend's C interface with the session and engine above it run on one emulated PE."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_ascend import ACLSHMEM, SPEC, aclshmem, probe
from hal_ascend.aclshmem import AclshmemSession
from hal_ascend.library import RELEASES, SIGNATURES, Library
from kernel_ranks import random_tokens, same_bits

from hal import reference
from hal.arrays import NUMPY_DTYPES, Buffer, as_buffer, to_kind
from hal.backend import Probe
from hal.bootstrap import Bootstrap, Run
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import ContractError, HalError
from hal.ordering import Order, QuietScope, SignalOp

ROOT = Path(__file__).resolve().parents[1]
ASCEND = ROOT / "kernels_ascend"
INCLUDE = [f"-I{ASCEND}", f"-I{ASCEND / 'host_shim'}", f"-I{ROOT / 'kernels_host'}", f"-I{ROOT / 'hal/include'}"]
FLAGS = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-Wno-attributes", "-ffp-contract=off"]


def run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["abi_probe.cpp", "acl_runtime.cpp", "c_abi.cpp"])
def test_the_device_build_s_files_compile_against_the_shim(name: str) -> None:
    run(["g++", *FLAGS, "-fsyntax-only", *INCLUDE, str(ASCEND / "device" / name)])


def test_the_abi_probe_sees_a_wrong_constant(tmp_path: Path) -> None:
    wrong = tmp_path / "shmem.h"
    text = (ASCEND / "host_shim" / "shmem.h").read_text()
    wrong.write_text(
        text.replace(
            "ACLSHMEMX_UDMA_ODR_RO = 5, ACLSHMEMX_UDMA_ODR_SO = 6",
            "ACLSHMEMX_UDMA_ODR_RO = 6, ACLSHMEMX_UDMA_ODR_SO = 5",
        )
    )
    command = ["g++", *FLAGS, "-fsyntax-only", f"-I{tmp_path}", *INCLUDE, str(ASCEND / "device" / "abi_probe.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert "order codes" in done.stderr


def test_the_device_build_names_what_it_lacks() -> None:
    done = subprocess.run(
        ["cmake", "-P", str(ASCEND / "device" / "CMakeLists.txt")], capture_output=True, text=True, timeout=60, check=False,
        env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert "ASCEND_HOME_PATH is not set" in done.stderr


def test_the_c_header_and_ctypes_name_the_same_functions() -> None:
    header = (ASCEND / "device" / "c_abi.h").read_text()
    for name, arguments in SIGNATURES.items():
        start = header.index(f"hal_ascend_{name}(")
        inside = header[header.index("(", start) + 1 : header.index(")", start)]
        assert len(arguments) == (0 if inside == "void" else inside.count(",") + 1), name
    assert all(f"void hal_ascend_{name}(void*" in header for name in RELEASES)


def test_the_probe_names_each_missing_thing_with_its_fix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setenv("SHMEM_ROOT", str(tmp_path))
    monkeypatch.setattr(probe, "_device", lambda: None)
    monkeypatch.setattr(probe, "_torch_npu", lambda: None)
    monkeypatch.setattr(probe, "_kernels", lambda: None)
    monkeypatch.setenv("ASCEND_SOC_NAME", "Ascend910B")
    found = probe.probe_hardware()
    assert not found.usable
    for word in ("Ascend910B", "libascendcl.so", "libhccl.so", "libshmem.so"):
        assert word in found.reason
    assert found.fix.count(";") == found.reason.count(";") == 3
    (tmp_path / "lib64").mkdir()
    for name in ("libascendcl.so", "libhccl.so", "libshmem.so"):
        (tmp_path / "lib64" / name).touch()
    monkeypatch.setenv("ASCEND_SOC_NAME", "Ascend950PR")
    assert probe.probe_hardware() == Probe(True)
    assert SPEC.probe is probe.probe_hardware is ACLSHMEM.probe


class HostPlatform:
    """Where torch_npu would be: NumPy arrays."""

    device = 0

    def empty(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        array = np.full(shape, 0, NUMPY_DTYPES[dtype])
        return Buffer(array.__array_interface__["data"][0], shape, dtype, "cpu", array)

    def view(self, address: int, nbytes: int, owner: Any) -> Buffer:
        return Buffer(address, (nbytes,), "uint8", "cpu", owner)

    def stream(self) -> int | None:
        return None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    folder = tmp_path_factory.mktemp("ascend")
    device = [ASCEND / "device" / name for name in ("acl_runtime.cpp", "c_abi.cpp")]
    sources = [
        *device, ASCEND / "launch" / "ep_host.cpp", ASCEND / "kernels" / "entry.cpp",
        *sorted((ASCEND / "emulation").glob("*.cpp")), ROOT / "kernels_host" / "fiber" / "fiber.cpp",
        ROOT / "tests" / "ascend_one_device" / "fake_sdk.cpp",
    ]  # fmt: skip
    objects = [folder / f"{source.parent.name}_{source.stem}.o" for source in sources]
    jobs = [
        ["g++", *FLAGS, "-O1", "-fPIC", "-c", *INCLUDE, str(s), "-o", str(o)]
        for s, o in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, jobs))
    run(["g++", "-shared", "-o", str(folder / "libhal_ascend.so"), *map(str, objects), "-lpthread"])
    return Library(folder / "libhal_ascend.so")


@pytest.mark.slow
def test_the_real_session_and_engine_on_one_emulated_pe(library: Library) -> None:
    config = HalConfig("ascend", "aclshmem")
    bootstrap = Bootstrap(Run(0, 1), 10.0)
    session = AclshmemSession(config, bootstrap, library, HostPlatform())
    window = session.allocate(4096)
    data = np.arange(64, dtype=np.uint8)
    session.put(window, 128, as_buffer(data), 0, 0, Order.STRONG)
    session.quiet(0, None, QuietScope.REMOTE)
    got = (np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 64).from_address(session.address(window) + 128))).copy()
    assert (got == data).all()
    session.signal(3, 0, 5, SignalOp.ADD, 0, Order.STRONG)
    assert session.wait(3, 5, 1.0, 0) == session.read_signal(3) == 5
    session.barrier([0], True, 1.0)
    spec = ExpertParallelSpec(num_experts=4, top_k=2, hidden=64, max_tokens=8, layout="expert", alignment=4)
    for completion in ("strong_signal", "strong_last", "flag_in_block"):
        one_rank_round(session, ExpertParallelSpec(**{**vars(spec), "completion": completion}))
    with pytest.raises(ContractError, match="HAL_RAW_QUEUE_BINDING"):
        session.expert_parallel(ExpertParallelSpec(**{**vars(spec), "completion": "strong_signal_no_cqe"}))
    with pytest.raises(HalError, match="expected 9, seen 5"):
        session.wait(3, 9, 0.05, 0)
    with pytest.raises(HalError, match="only be closed"):
        session.allocate(64)
    session.close()
    bootstrap.close()


def one_rank_round(session: AclshmemSession, spec: ExpertParallelSpec) -> None:
    engine = session.expert_parallel(spec)
    rng = np.random.default_rng(1)
    tokens = random_tokens(rng, spec, [7])
    x, idx, weights = (as_buffer(a[0]) for a in (tokens.x, tokens.topk_idx, tokens.topk_weights))
    received = engine.dispatch_recv(engine.dispatch_send(x, idx, weights, None, None, None), None)
    want, handle = reference.dispatch(spec, tokens.x, tokens.topk_idx, tokens.topk_weights, None)
    for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets"):
        same_bits(name, to_kind(getattr(received, name), "numpy"), getattr(want[0], name))
    y, _ = engine.combine_recv(engine.combine_send(received.x, received.state, None, True, None), (), None)
    same_bits("y", to_kind(y, "numpy"), reference.combine([want[0].x], handle, weighted=True)[0])
    engine.close()


@pytest.mark.parametrize("name", ["HAL_ASCEND_CORES", "HAL_ASCEND_HEAP_BYTES"])
@pytest.mark.parametrize("value", ["0", "-1", "eight"])
def test_a_device_of_impossible_shape_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ContractError, match=name):
        aclshmem._positive(name, 8)
