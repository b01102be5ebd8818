# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend's communicator: a torch process group's own where that can be, which HAL then never destroys."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hal_cuda import build, nccl

from hal.config import HalConfig
from hal.errors import HalError

HERE = Path(__file__).parent


@pytest.fixture
def exchange(monkeypatch):
    """``exchange(groups, library)`` calls backend._communicator on a thread for each rank; the handles they got."""
    torch = pytest.importorskip("torch")
    from hal_cuda.backend import _communicator

    from hal.group import TorchGroup

    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())

    def run(groups: list[Any], libraries: list[Any]) -> list[Any]:
        world = len(groups)
        table: dict[str, list[Any]] = {}
        barrier = threading.Barrier(world, timeout=20)
        got: list[Any] = [None] * world

        class Meeting:
            def __init__(self, rank: int) -> None:
                self.rank, self.world_size = rank, world
                group = TorchGroup.__new__(TorchGroup)
                group.rank, group.world_size, group.process_group = rank, world, groups[rank]
                self.run = SimpleNamespace(group=group)

            def all_gather(self, value: Any, what: str) -> list[Any]:
                table.setdefault(what, [None] * world)[self.rank] = value
                barrier.wait()
                return table[what]

        def rank(index: int) -> None:
            got[index] = _communicator(libraries[index], Meeting(index), index)

        threads = [threading.Thread(target=rank, args=(index,)) for index in range(world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        return got

    return run


class ProcessGroup:
    """torch's, as far as adopt.py looks at it."""

    def __init__(self, pointer: int | None) -> None:
        self.pointer = pointer

    def _get_backend(self, device: Any) -> Any:
        if self.pointer is None:
            return SimpleNamespace()
        return SimpleNamespace(_comm_ptr=lambda: self.pointer)


class Library:
    """Says what was asked of it; a communicator made here is 7, an adopted one a thousand more than the pointer."""

    def __init__(self, was_open: bool = True) -> None:
        self.nccl_was_open, self.nccl_path = was_open, "/opt/libnccl.so.2"

    def unique_id(self, identity: Any) -> None:
        identity.raw = b"u" * 128

    def value(self, name: str, kind: Any, *arguments: Any) -> int:
        if name == "comm_adopt":
            return 1000 + int(arguments[0])
        assert name == "comm_create"
        assert arguments[0].raw == b"u" * 128  # rank 0's
        return 7


def test_every_rank_adopts_or_none_does(exchange, caplog):
    caplog.set_level("INFO", logger="hal.cuda")
    assert exchange([ProcessGroup(11), ProcessGroup(12)], [Library(), Library()]) == [1011, 1012]
    assert "adopted from the process group" in caplog.text
    for groups, libraries, why in (
        ([ProcessGroup(11), ProcessGroup(0)], [Library(), Library()], "rank 1: .* no NCCL communicator yet"),
        ([ProcessGroup(None), ProcessGroup(12)], [Library(), Library()], "rank 0: .* does not tell"),
        ([ProcessGroup(11), ProcessGroup(12)], [Library(), Library(False)], "rank 1: torch uses another NCCL"),
    ):
        caplog.clear()
        assert exchange(groups, libraries) == [7, 7]
        assert re.search(f"cannot be adopted: {why}", caplog.text)


def test_only_the_very_file_counts_as_the_same_nccl(tmp_path):
    original = next(Path(p) for p in _loaded_libraries())
    library = tmp_path / "libnccl.so.2"
    shutil.copy(original, library)
    assert not nccl.is_open(library)
    handle = ctypes.CDLL(str(library))
    assert nccl.is_open(library)
    link = tmp_path / "link" / "libnccl.so.2"
    link.parent.mkdir()
    link.symlink_to(library)
    assert nccl.is_open(link)
    copy = tmp_path / "copy" / "libnccl.so.2"
    copy.parent.mkdir()
    shutil.copy(original, copy)
    assert not nccl.is_open(copy)
    del handle


def _loaded_libraries() -> list[str]:
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sorted({line.split()[-1] for line in lines if "/libm.so" in line or "/libm-" in line})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_adopted_communicator_is_never_destroyed(tmp_path):
    """The compiled runtime against an NCCL that counts. Needs no GPU: nothing is launched."""
    compiler, sources = build.nvcc(), build.sources()
    headers = [
        found.include for found in nccl.installed() if found.include is not None and found.version >= nccl.MINIMUM
    ]
    if compiler is None or not headers:
        pytest.skip("needs nvcc and NCCL's headers")
    assert sources is not None
    places = ["-I", str(sources / "include"), "-isystem", str(headers[0])]
    common = [compiler, "-std=c++17", "-Xcompiler", "-fPIC", "-shared", "-cudart", "static", *places]
    fake, runtime = tmp_path / "libnccl.so.2", tmp_path / "libruntime.so"
    for output, files in (
        (fake, [HERE / "fake_nccl.cpp"]),
        (runtime, [sources / "src" / name for name in ("nccl_runtime.cu", "memory.cu")]),
    ):
        extra = ["-gencode=arch=compute_90,code=sm_90"] if output == runtime else []
        told = subprocess.run(
            [*common, *extra, *map(str, files), "-ldl", "-o", str(output)], capture_output=True, text=True, check=False
        )
        assert told.returncode == 0, told.stderr[-3000:]
    library, counts = ctypes.CDLL(str(runtime)), ctypes.CDLL(str(fake))
    counts.fake_lent.restype = ctypes.c_void_p
    library.hal_cuda_comm_destroy.argtypes = (ctypes.c_void_p, ctypes.c_int)

    def calls() -> list[int]:
        return [counts.fake_calls(name) for name in (b"device create", b"device destroy", b"destroy", b"abort")]

    assert library.hal_cuda_load_nccl(str(fake).encode(), ctypes.byref(ctypes.c_int())) == 0
    comm = ctypes.c_void_p()
    lent = ctypes.c_void_p(counts.fake_lent())
    for failed, wanted in ((0, [1, 1, 0, 0]), (1, [2, 1, 0, 0])):  # after a failure NCCL's device side is left alone
        assert library.hal_cuda_comm_adopt(lent, 0, ctypes.byref(comm)) == 0
        assert library.hal_cuda_comm_destroy(comm, failed) == 0
        assert calls() == wanted
    identity = ctypes.create_string_buffer(128)
    for failed, wanted in ((0, [3, 2, 1, 0]), (1, [4, 2, 1, 1])):  # one of HAL's own
        assert library.hal_cuda_comm_create(identity, 1, 0, 0, ctypes.byref(comm)) == 0
        assert library.hal_cuda_comm_destroy(comm, failed) == 0
        assert calls() == wanted


def test_more_ranks_than_gpus_are_told_what_to_do(monkeypatch):
    """NCCL's own words name a variable under which ranks of one NVLink domain would wait for each other on one GPU."""
    from hal_cuda import backend

    library = SimpleNamespace(value=lambda name, kind: 2)

    def refuse(*_: Any) -> int:
        raise HalError("cuda: ncclCommInitRank: Multiple Ranks are using the same GPU/Partition. Set ...")

    monkeypatch.setattr(backend.native, "load", lambda: library)
    monkeypatch.setattr(backend, "create_communicator", refuse)
    bootstrap = SimpleNamespace(rank=2, world_size=3, run=SimpleNamespace(group=None))
    with pytest.raises(HalError, match=r"3 ranks.*sees 2\).*a rank for each GPU.*--hosts H -n 3"):
        backend.connect_nccl(HalConfig("cuda"), bootstrap)
