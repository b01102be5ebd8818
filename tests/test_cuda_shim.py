# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU itself: CUDA's words on it do what CUDA says, and what cannot go on ends with a message."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from ctypes import byref, c_int, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hal_cuda import build, native
from hal_cuda.probe import probe_emulator

ROOT = Path(__file__).resolve().parents[1]
COMPILER = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)
if COMPILER is None:
    pytest.skip("no C++ compiler for the test's kernels", allow_module_level=True)

DEVICE = 900
"""Of these tests alone."""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The test's kernels, linked to the emulation in the installed library."""
    emulated = build.shipped(build.EMULATED)
    assert emulated is not None
    native.load_emulated()
    library = tmp_path_factory.mktemp("shim") / "libshim.so"
    folders = ["kernels_cuda/host_shim", "kernels_cuda/include", "kernels_cuda", "kernels_host", "hal/include"]
    told = subprocess.run(
        [
            str(COMPILER),
            *("-x", "c++", str(ROOT / "tests" / "cuda_shim" / "kernels.cu"), "-x", "none"),
            *("-std=c++20", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing"),
            *(f"-I{ROOT / folder}" for folder in folders),
            *("-o", str(library), str(emulated), f"-Wl,-rpath,{emulated.parent}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr
    loaded = ctypes.CDLL(str(library))
    for name, arguments in {
        "to_small": (c_void_p, c_void_p, c_void_p, c_int, c_uint64),
        "from_half": (c_void_p, c_void_p, c_int, c_uint64),
        "collectives": (c_void_p, c_uint64),
        "shared": (c_void_p, c_uint64),
        "hang": (c_int, c_void_p, c_uint64),
        "send": (c_void_p, c_void_p, c_int, c_uint64, c_uint64),
        "receive": (c_void_p, c_void_p, c_uint64, c_int, c_void_p, c_uint64),
        "store_at": (c_void_p, c_uint64),
        "load_at": (c_void_p, c_void_p, c_uint64),
        "slow": (c_void_p, c_uint32, c_uint64, c_uint64),
        "block_of": (c_int, c_int, c_uint64),
    }.items():
        getattr(loaded, f"shim_{name}").argtypes = arguments
    return loaded


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    gpu = Gpu()
    yield gpu
    gpu.close()


class Gpu:
    """Streams of one test."""

    def __init__(self) -> None:
        self.library = native.load_emulated()
        self._streams: list[int] = []
        self.stream = self.new_stream()

    def new_stream(self) -> int:
        self._streams.append(int(self.library.value("stream_create", c_uint64, DEVICE)))
        return self._streams[-1]

    def sync(self, stream: int | None = None) -> None:
        self.library.stream_sync(DEVICE, self.stream if stream is None else stream)

    def close(self) -> None:
        for stream in self._streams:
            self.library.raw_stream_destroy(DEVICE, stream)


def at(array: np.ndarray[Any, Any], index: int = 0) -> int:
    return int(array.ctypes.data) + index * array.itemsize


# --- conversions -----------------------------------------------------------------------------------------------------


def floats() -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(1)
    bits = [rng.integers(0, 1 << 32, 60000, dtype=np.uint32)]
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    exact = np.nan_to_num(halves.astype(np.float32), nan=0.0, posinf=65520.0, neginf=-65520.0)
    # Every half, the ties between neighbours, and both sides of each tie.
    ties = ((exact[:-1].astype(np.float64) + exact[1:]) / 2).astype(np.float32)
    brains = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    for values in (exact.view(np.uint32), ties.view(np.uint32), brains):
        bits += [values, values + 1, values - 1]
    return np.concatenate(bits).view(np.float32)


def test_conversions_round_as_numpy_and_ml_dtypes_do(shim: Any, gpu: Gpu) -> None:
    values = floats()
    halves, brains = np.zeros(len(values), np.uint16), np.zeros(len(values), np.uint16)
    shim.shim_to_small(at(values), at(halves), at(brains), len(values), gpu.stream)
    gpu.sync()
    number = ~np.isnan(values)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(np.float16).view(np.uint16), values.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert (halves[number] == wanted[0][number]).all()
    assert (brains[number] == wanted[1][number]).all()
    assert (halves[~number] == 0x7FFF).all()  # as the hardware has it
    assert (brains[~number] == 0x7FFF).all()


def test_every_half_is_widened_exactly(shim: Any, gpu: Gpu) -> None:
    halves = np.append(np.arange(1 << 16, dtype=np.uint16), np.uint16(0))
    wide = np.zeros(1 << 16, np.float32)
    shim.shim_from_half(at(halves), at(wide), len(wide), gpu.stream)
    gpu.sync()
    wanted = halves[:-1].view(np.float16).astype(np.float32)
    same = (wide.view(np.uint32) == wanted.view(np.uint32)) | (np.isnan(wide) & np.isnan(wanted))
    assert same.all()


# --- collectives, shared memory --------------------------------------------------------------------------------------


def test_collectives(shim: Any, gpu: Gpu) -> None:
    out = np.zeros((10, 64), np.uint32)
    shim.shim_collectives(at(out), gpu.stream)
    gpu.sync()
    t = np.arange(64, dtype=np.uint32)
    lane, base = t & 31, t & ~np.uint32(31)
    assert (out[0] == base + (lane * 7 + 3) % 32).all()
    assert (out[1] == np.where(lane < 5, t, t - 5)).all()
    assert (out[2] == np.where(lane > 26, t, t + 5)).all()
    assert (out[3] == (t ^ 9)).all()
    for i in t:
        warp = t[base == base[i]]
        assert out[4][i] == sum(1 << (w & 31) for w in warp if w % 3 == 0)
        assert out[5][i] == sum(1 << (w & 31) for w in warp if w % 5 == i % 5)
        assert out[6][i] == warp.sum()
        odd = sum(1 << i for i in range(9, 32, 2)) + int(base[i]) + 31
        assert out[7][i] == (odd if lane[i] % 2 else 0)
        assert out[8][i] == 16 * 4 + 2 + 1
        first = int(base[i]) == 0
        assert out[9][i] == int(1.5 * (base[i] + 4)) + first + 2


def test_shared_memory_is_each_blocks_own_and_holds_nothing_at_its_start(shim: Any, gpu: Gpu) -> None:
    for _ in range(2):  # the second launch must not find what the first left
        out = np.zeros((3, 67), np.uint32)
        shim.shim_shared(at(out), gpu.stream)
        gpu.sync()
        assert (out[:, 2] == 0xA5A5A5A5).all()
        for block in range(3):
            assert (out[block, 3:] == block * 1000 + 63 - np.arange(64)).all()


HANGS = {
    0: "lanes 0x00000020 have ended or do not exist",
    1: r"can never go on: .*__ballot_sync with mask 0xffffffff at kernels.cu:\d+.*thread 5 is in __syncthreads",
    2: r"divergent barrier: thread \d+ of block 0 is in __syncthreads at kernels.cu:\d+",
    3: "thread 3 of block 0 has ended while|a barrier that not every thread comes to",
    4: "mask 0x0000ffff, which does not name its own lane",
    5: "wrote outside of its 100 bytes of dynamic shared memory",
}


@pytest.mark.parametrize("which", HANGS)
def test_what_cannot_go_on_ends_with_a_message(shim: Any, gpu: Gpu, which: int) -> None:
    shim.shim_hang(which, None, gpu.stream)
    with pytest.raises(Exception, match=HANGS[which]):
        gpu.sync()
    with pytest.raises(Exception, match="cudaErrorLaunchFailure"):  # the stream stays failed
        gpu.sync()


def test_a_missing_lane_is_named_whether_it_ends_first_or_last(shim: Any, gpu: Gpu) -> None:
    """The order of lanes is the seed's: in some of these launches all others wait when lane 5 ends."""
    said = set()
    for _ in range(400):  # lane 5 is the last of 32 in one of 32
        stream = gpu.new_stream()
        shim.shim_hang(0, None, stream)
        with pytest.raises(Exception, match=HANGS[0]) as told:
            gpu.sync(stream)
        said.add("can never go on" in str(told.value))
    assert said == {False, True}


def test_a_wait_without_a_limit_ends(shim: Any, gpu: Gpu) -> None:
    word = np.zeros(1, np.uint64)
    gpu.library.emulator_limit(0.3)
    try:
        shim.shim_hang(6, at(word), gpu.stream)
        with pytest.raises(Exception, match=r"has only looked at memory for 0\.3 s"):
            gpu.sync()
    finally:
        gpu.library.emulator_limit(300.0)


def test_impossible_launches_are_refused(shim: Any, gpu: Gpu) -> None:
    assert shim.shim_block_of(1, 1025, gpu.stream) == 9  # cudaErrorInvalidConfiguration
    assert shim.shim_block_of(0, 32, gpu.stream) == 9
    gpu.library.stream_destroy(DEVICE, stream := gpu.new_stream())
    assert shim.shim_block_of(1, 32, stream) == 400  # cudaErrorInvalidResourceHandle


# --- streams ---------------------------------------------------------------------------------------------------------


def test_streams_are_asynchronous_and_in_order(shim: Any, gpu: Gpu) -> None:
    out, copy = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    shim.shim_slow(at(out), 7, 100_000_000, gpu.stream)
    gpu.library.copy(DEVICE, at(copy), at(out), 4, gpu.stream)
    assert out[0] == 0  # nobody has waited
    assert gpu.library.value("stream_query", c_int, DEVICE, gpu.stream) == 0
    gpu.sync()
    assert (out[0], copy[0]) == (7, 7)
    assert gpu.library.value("stream_query", c_int, DEVICE, gpu.stream) == 1


def test_streams_know_nothing_of_each_other_until_they_are_ordered(shim: Any, gpu: Gpu) -> None:
    out, early, late = np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32)
    other, third = gpu.new_stream(), gpu.new_stream()
    shim.shim_slow(at(out), 7, 200_000_000, gpu.stream)
    gpu.library.copy(DEVICE, at(early), at(out), 4, other)
    gpu.library.stream_order(DEVICE, gpu.stream, third)
    gpu.library.copy(DEVICE, at(late), at(out), 4, third)
    gpu.sync(other)
    gpu.sync(third)
    assert (early[0], late[0]) == (0, 7)


def test_new_and_freed_memory_is_poisoned(gpu: Gpu) -> None:
    ptr = int(gpu.library.value("malloc", c_uint64, DEVICE, 64, gpu.stream))
    assert ctypes.string_at(ptr, 64) == b"\xb7" * 64
    gpu.library.free(DEVICE, ptr, gpu.stream)
    gpu.sync()


def test_memory_freed_on_a_destroyed_stream_lasts_until_the_stream_has_done_what_it_has(shim: Any, gpu: Gpu) -> None:
    word, seen = np.zeros(1, np.uint64), np.zeros(64, np.uint8)
    stream, after = gpu.new_stream(), gpu.new_stream()
    ptr = int(gpu.library.value("malloc", c_uint64, DEVICE, 64, stream))
    shim.shim_hang(6, at(word), stream)
    gpu.library.copy(DEVICE, at(seen), ptr, 64, stream)
    gpu.library.stream_order(DEVICE, stream, after)
    gpu.library.stream_destroy(DEVICE, stream)
    gpu.library.free(DEVICE, ptr, stream)
    word[0] = 1
    gpu.sync(after)
    assert seen.tobytes() == b"\xb7" * 64


# --- windows and the order of stores -----------------------------------------------------------------------------------


class Windows:
    """Ranks of one process with a window each, made over sockets as sessions do."""

    def __init__(self, ranks: int, nodes: int, nbytes: int) -> None:
        import socket
        import threading

        library = native.load_emulated()
        self._sockets: dict[tuple[int, int], socket.socket] = {}
        for a in range(ranks):
            for b in range(a + 1, ranks):
                self._sockets[a, b], self._sockets[b, a] = socket.socketpair()
        self.library, self.comms, self.records = library, [], [native.Window() for _ in range(ranks)]
        for rank in range(ranks):
            links = [-1 if p == rank else self._sockets[rank, p].fileno() for p in range(ranks)]
            numbers = (c_int * ranks)(*links)
            arguments = (numbers, ranks, rank, nodes, DEVICE, 20.0)
            self.comms.append(int(library.value("emulator_create", c_void_p, *arguments)))
        threads = [
            threading.Thread(target=library.window_create, args=(comm, nbytes, byref(record)))
            for comm, record in zip(self.comms, self.records, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    def close(self) -> None:
        for comm, record in zip(self.comms, self.records, strict=True):
            self.library.window_destroy(comm, byref(record))
            self.library.comm_destroy(comm, 0)
        for link in self._sockets.values():
            link.close()


@pytest.fixture
def pair() -> Iterator[Windows]:
    windows = Windows(2, 1, 4096)
    yield windows
    windows.close()


@pytest.fixture
def two_teams() -> Iterator[Windows]:
    windows = Windows(4, 2, 4096)
    yield windows
    windows.close()


NO_FENCE, FENCE, RELEASE, FENCE_OF_A_WARP, GPU_FENCE_AND_RELEASE, GPU_FENCE = range(6)
ACQUIRES, RELAXED, RELAXED_THEN_FENCE, SHUFFLE, SYNCWARP = range(5)


def stale(shim: Any, gpu: Gpu, pair: Windows, fence: int, how: int = ACQUIRES, rounds: int = 100) -> int:
    """Words that rank 1 found old behind the flag that rank 0 sent after them, in the first of the rounds with any."""
    mine, theirs = pair.records[1], pair.records[0]
    ctypes.memset(int(mine.ptr), 0, 4096)
    counted, other = np.zeros(1, np.uint32), gpu.new_stream()
    target = int(theirs.peers + theirs.peer_stride)
    for epoch in range(1, rounds + 1):
        shim.shim_receive(int(mine.ptr), int(mine.ptr) + 2048, epoch, how, at(counted), other)
        time.sleep(0.001)  # the receiver mostly waits by now
        shim.shim_send(target, target + 2048, fence, epoch, gpu.stream)
        gpu.sync()
        gpu.sync(other)
        if counted[0]:
            break
    return int(counted[0])


def test_a_flag_overtakes_its_data_unless_a_fence_or_a_release_comes_between(
    shim: Any, gpu: Gpu, pair: Windows
) -> None:
    assert stale(shim, gpu, pair, NO_FENCE, rounds=1000) > 0
    assert stale(shim, gpu, pair, FENCE) == 0
    assert stale(shim, gpu, pair, RELEASE) == 0


def test_a_load_is_early_unless_its_thread_acquired(shim: Any, gpu: Gpu, pair: Windows) -> None:
    assert stale(shim, gpu, pair, RELEASE, RELAXED, rounds=1000) > 0
    assert stale(shim, gpu, pair, RELEASE, RELAXED_THEN_FENCE) == 0


def test_a_shuffle_does_not_hand_on_what_a_lane_acquired(shim: Any, gpu: Gpu, pair: Windows) -> None:
    assert stale(shim, gpu, pair, RELEASE, SHUFFLE, rounds=1000) > 0
    assert stale(shim, gpu, pair, RELEASE, SYNCWARP) == 0


def test_a_fence_covers_the_own_warp_alone_without_a_barrier(shim: Any, gpu: Gpu, pair: Windows) -> None:
    assert stale(shim, gpu, pair, FENCE_OF_A_WARP, rounds=1000) > 0  # __syncwarp joins 32 of 64 threads


def test_a_fence_at_gpu_scope_neither_covers_a_peer_nor_hides_stores_from_a_later_release(
    shim: Any, gpu: Gpu, pair: Windows
) -> None:
    assert stale(shim, gpu, pair, GPU_FENCE, rounds=1000) > 0
    assert stale(shim, gpu, pair, GPU_FENCE_AND_RELEASE) == 0


def test_without_the_adversary_stores_are_visible_at_once(shim: Any, gpu: Gpu, pair: Windows) -> None:
    gpu.library.emulator_configure(1, 0)
    try:
        assert stale(shim, gpu, pair, NO_FENCE, RELAXED) == 0
    finally:
        gpu.library.emulator_configure(1, 1)


def test_teams_are_consecutive_ranks_with_equal_strides(two_teams: Windows) -> None:
    for rank, (comm, record) in enumerate(zip(two_teams.comms, two_teams.records, strict=True)):
        properties = native.Properties()
        two_teams.library.comm_properties(comm, byref(properties))
        assert (properties.world, properties.rank) == (4, rank)
        assert (properties.lsa_size, properties.lsa_rank) == (2, rank % 2)
        assert record.ptr == record.peers + rank % 2 * record.peer_stride
        word = c_uint32.from_address(int(record.ptr))
        assert word.value == 0  # windows are zeroed
        word.value = 100 + rank
    for rank, record in enumerate(two_teams.records):  # the peer's part is the peer's memory
        peer = int(record.peers + (1 - rank % 2) * record.peer_stride)
        assert c_uint32.from_address(peer).value == 100 + (rank ^ 1)


def test_another_teams_rank_has_no_address(shim: Any, gpu: Gpu, two_teams: Windows) -> None:
    record, out = two_teams.records[0], np.zeros(1, np.uint32)
    shim.shim_store_at(int(record.peers + 2 * record.peer_stride), gpu.stream)
    with pytest.raises(
        Exception, match=r"byte 0 of a window of 4096 bytes of LSA rank 2, in a team of 2 \(ranks 0 to 1\)"
    ):
        gpu.sync()
    other = gpu.new_stream()
    shim.shim_load_at(int(record.ptr) + 4096, at(out), other)
    with pytest.raises(Exception, match="byte 4096 of a window of 4096 bytes of rank 0"):
        gpu.sync(other)


def test_windows_of_unequal_size_are_refused() -> None:
    import socket
    import threading

    library = native.load_emulated()
    ours, theirs = socket.socketpair()
    told: list[str] = []

    def make(rank: int, link: socket.socket, nbytes: int) -> None:
        numbers = (c_int * 2)(*((-1, link.fileno()) if rank == 0 else (link.fileno(), -1)))
        comm = library.value("emulator_create", c_void_p, numbers, 2, rank, 1, rank, 20.0)
        if library.raw_window_create(comm, nbytes, byref(native.Window())) != 0:
            told.append(library.reason())
        library.comm_destroy(comm, 0)

    threads = [
        threading.Thread(target=make, args=(0, ours, 4096)),
        threading.Thread(target=make, args=(1, theirs, 8192)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    ours.close()
    theirs.close()
    assert sorted(told) == [
        "a window has the same size on every rank: 4096 bytes here, 8192 on rank 1",
        "a window has the same size on every rank: 8192 bytes here, 4096 on rank 0",
    ]


def test_a_peer_that_is_gone_is_named() -> None:
    import socket

    library = native.load_emulated()
    ours, theirs = socket.socketpair()
    numbers = (c_int * 2)(-1, ours.fileno())
    comm = library.value("emulator_create", c_void_p, numbers, 2, 0, 1, 0, 20.0)
    theirs.close()
    start = time.monotonic()
    with pytest.raises(Exception, match="rank 1 is gone while a window was being made"):
        library.window_create(comm, 4096, byref(native.Window()))
    assert time.monotonic() - start < 10
    library.comm_destroy(comm, 0)
    ours.close()
