# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on emulated GPUs: dispatch and combine captured once and replayed, whatever is replayed or called around."""

from __future__ import annotations

import ctypes
import threading
from ctypes import byref, c_int, c_uint64, c_void_p
from typing import Any

import pytest
from cuda_emulator import emulator
from cuda_streams import caller_streams  # noqa: F401 (a fixture)
from hal_cuda import native
from hal_cuda.probe import probe_emulator
from hosts_rounds import FORM_NAMES, FORMS, a_case, run_emulated

import hal
from hal.arrays import as_buffer
from hal.errors import HalError

NEEDED = "torch is not installed: pip install 'moe-hal[torch]'"
torch = pytest.importorskip("torch", reason=NEEDED)
graph_rounds = pytest.importorskip("graph_rounds", reason=NEEDED)
if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("caller_streams")

LAYOUTS = ["rank", "expert"]


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays(layout, schedule, shape):
    case = a_case(schedule, layout, shape)
    for seed in range(3):
        with emulator(seed):
            run_emulated(graph_rounds.replays, case, list(range(4 * seed + 1, 4 * seed + 6)))


@pytest.mark.parametrize("num_buffers", [2, 4])
@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_graphs_and_calls_in_any_order(layout, schedule, shape, num_buffers):
    case = a_case(schedule, layout, shape, num_buffers=num_buffers)
    for seed in range(2):
        with emulator(seed):
            run_emulated(graph_rounds.alternating, case, list(range(9 * seed + 1, 9 * seed + 10)), seed)


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_of_halves(layout, schedule, shape):
    run_emulated(graph_rounds.replays, a_case(schedule, layout, shape), [1, 2, 3], True)


@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_replays_of_combines_by_push(schedule, monkeypatch):
    monkeypatch.setenv("HAL_CUDA_COMBINE", "push")
    case = a_case(schedule, "rank", (3, 1))
    for seed in range(2):
        with emulator(seed):
            run_emulated(graph_rounds.alternating, case, list(range(9 * seed + 1, 9 * seed + 10)), seed)
    run_emulated(graph_rounds.refused, case)


def test_replays_of_sums_by_rank_within_one_domain(monkeypatch):
    monkeypatch.setenv("HAL_CUDA_EMULATOR_ONE_DOMAIN", "1")
    case = a_case("hierarchical", "expert", (3, 3))
    for seed in range(2):
        with emulator(seed):
            run_emulated(graph_rounds.alternating, case, list(range(9 * seed + 1, 9 * seed + 10)), seed)
    run_emulated(graph_rounds.refused, case)


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
def test_replays_of_quantised_rows_and_few_buffers(schedule, shape):
    for layout, alignment in (("rank", 1), ("expert", 4)):
        case = a_case(schedule, layout, shape, dtype="float8_e4m3fn", alignment=alignment, num_buffers=1)
        run_emulated(graph_rounds.alternating, case, list(range(1, 7)), 1)


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replays_while_other_slots_are_held(layout, schedule, shape):
    for seed in range(2):
        with emulator(seed):
            counts = run_emulated(graph_rounds.held, a_case(schedule, layout, shape, num_buffers=5), [1, 2, 3, 4, 5])
            assert all(views > 1 for _, views in counts), counts
            assert schedule != "latency" or all(moved > 1 for moved, _ in counts), counts


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_refused_replay_is_told_by_the_next_call(layout, schedule, shape):
    run_emulated(graph_rounds.refused, a_case(schedule, layout, shape))


def test_a_peer_that_does_not_replay_is_named_by_the_next_call():
    told = threading.Event()
    absent = run_emulated(graph_rounds.absent, a_case("direct", "rank", (2, 1)), told)
    assert absent == [1, None]


def test_a_captured_dispatch_ends_no_reading_of_an_experts_output():
    run_emulated(graph_rounds.output_after_a_capture, a_case("direct", "rank", (2, 1)))


# --- the emulated runtime ------------------------------------------------------------------------------------------------

GLOBAL, THREAD_LOCAL = 0, 1


class Gpu:
    """A captured stream of emulated GPU 0, another stream, and memory on it."""

    def __init__(self, mode: int = GLOBAL) -> None:
        self.library = native.load_emulated()
        self.stream, self.other = (int(self.library.value("stream_create", c_uint64, 0)) for _ in range(2))
        self.memory = int(self.library.value("malloc", c_uint64, 0, 16, self.stream))
        self.bytes = (ctypes.c_uint8 * 16).from_address(self.memory)
        self.library.memset(0, self.memory, 1, 16, self.stream)
        self.library.stream_sync(0, self.stream)
        self.library.emulator_begin_capture(self.stream, mode)

    def capturing(self) -> bool:
        return bool(self.library.value("stream_capturing", c_int, 0, self.stream))

    def end(self) -> int:
        return int(self.library.value("emulator_end_capture", c_uint64, self.stream))


def test_a_captured_stream_does_its_work_when_the_graph_is_launched():
    gpu = Gpu()
    library = gpu.library
    library.memset(0, gpu.memory, 7, 8, gpu.stream)
    library.copy(0, gpu.memory + 8, gpu.memory, 8, gpu.stream)
    assert gpu.capturing()
    graph = gpu.end()
    assert not gpu.capturing()
    library.stream_sync(0, gpu.stream)
    assert bytes(gpu.bytes) == bytes([1] * 16)
    for stream in (gpu.stream, gpu.other, gpu.other):
        library.memset(0, gpu.memory, 2, 16, stream)
        library.emulator_launch_graph(graph, stream)
        library.memset(0, gpu.memory, 3, 1, stream)
        library.stream_sync(0, stream)
        assert bytes(gpu.bytes) == bytes([3] + [7] * 15)
    library.emulator_destroy_graph(graph)
    with pytest.raises(HalError, match="no such executable graph"):
        library.emulator_launch_graph(graph, gpu.stream)


REFUSED = {
    "cudaStreamSynchronize": lambda gpu: gpu.library.stream_sync(0, gpu.stream),
    "cudaStreamQuery": lambda gpu: gpu.library.value("stream_query", c_int, 0, gpu.stream),
    "cudaErrorStreamCaptureIsolation": lambda gpu: gpu.library.stream_order(0, gpu.other, gpu.stream),
    "a second stream of one": lambda gpu: gpu.library.stream_order(0, gpu.stream, gpu.other),
    "cudaMallocAsync": lambda gpu: gpu.library.value("malloc", c_uint64, 0, 16, gpu.stream),
    "cudaFreeAsync": lambda gpu: gpu.library.free(0, gpu.memory, gpu.stream),
    "cudaHostAlloc": lambda gpu: gpu.library.host_alloc(0, 8, byref(c_void_p()), byref(c_uint64())),
    "cudaStreamDestroy": lambda gpu: gpu.library.stream_destroy(0, gpu.stream),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_graph_cannot_hold_is_refused_and_ends_the_capture(words):
    gpu = Gpu()
    try:
        gpu.library.memset(0, gpu.memory, 7, 16, gpu.stream)
        with pytest.raises(HalError, match=words):
            REFUSED[words](gpu)
        assert gpu.capturing()
        with pytest.raises(HalError, match="cudaErrorStreamCaptureInvalidated"):
            gpu.library.memset(0, gpu.memory, 8, 16, gpu.stream)
    finally:
        with pytest.raises(HalError, match="cudaErrorStreamCaptureInvalidated"):
            gpu.end()
    gpu.library.memset(0, gpu.memory, 9, 16, gpu.stream)
    gpu.library.stream_sync(0, gpu.stream)
    assert bytes(gpu.bytes) == bytes([9] * 16)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL])
def test_other_threads_may_wait_for_the_device_as_the_mode_says(mode):
    gpu = Gpu(mode)

    def elsewhere(call: Any, *arguments: Any) -> str:
        told = []

        def body() -> None:
            told.append(gpu.library.reason() if call(*arguments) else "")

        thread = threading.Thread(target=body)
        thread.start()
        thread.join()
        return told[0]

    library = gpu.library
    assert elsewhere(library.raw_stream_sync, 0, gpu.other) == ""
    assert "another thread began" in elsewhere(library.raw_emulator_end_capture, gpu.stream, byref(c_uint64()))
    host, address = c_void_p(), c_uint64()
    refused = elsewhere(library.raw_host_alloc, 0, 8, byref(host), byref(address))
    if mode == GLOBAL:
        assert "cudaHostAlloc while a stream is being captured by another thread" in refused
        with pytest.raises(HalError, match="cudaErrorStreamCaptureInvalidated"):
            gpu.end()
    else:
        assert refused == ""
        gpu.end()
        library.host_free(host)


def test_captures_begin_and_end_once():
    library = native.load_emulated()
    with pytest.raises(HalError, match="legacy default stream"):
        library.emulator_begin_capture(0, GLOBAL)
    gpu = Gpu()
    with pytest.raises(HalError, match="captured already"):
        library.emulator_begin_capture(gpu.stream, GLOBAL)
    gpu.end()
    with pytest.raises(HalError, match="not being captured"):
        gpu.end()


def test_a_call_that_waits_for_its_stream_cannot_be_captured():
    """As a synchronisation hidden in HAL would be noticed: callers without streams get finished results."""

    def body(comm: hal.Communicator) -> None:
        x, ids = torch.ones(4, 64), torch.zeros(4, 1, dtype=torch.int32)
        with comm.expert_parallel(num_experts=1, top_k=1, hidden=64, max_tokens=4, dtype="float32") as ep:
            library, stream = native.load_emulated(), comm._session.stream
            handle = ep.dispatch(x, ids).handle
            library.emulator_begin_capture(stream, GLOBAL)
            with pytest.raises(HalError, match="cudaStreamSynchronize"):
                ep._engine.combine(as_buffer(x), handle._state, None, False, (), None)
            with pytest.raises(HalError, match="cudaErrorStreamCaptureInvalidated"):
                library.value("emulator_end_capture", c_uint64, stream)
            assert torch.equal(ep.dispatch(x, ids).x, x)

    hal.spawn(1, body, backend="cuda", transport="gin_emulated", timeout=60.0)
