# SPDX-License-Identifier: Apache-2.0
"""The software NIC as NCCL sees it: the library is loaded, the two plug-in tables are found by name and their functions
called in NCCL's order, on the stand-in for GPU memory. The ranks are threads of this process."""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import pytest
from software_nic import build

HOST, CUDA = 1, 2
STRICT, NEVER_RESET = 1, 2
ADD = 2
REMOTE_ERROR = 6
_LOGGER = ctypes.CFUNCTYPE(None, c_int, ctypes.c_ulong, c_char_p, c_int, c_char_p, c_char_p)
_FUNCTION = ctypes.CFUNCTYPE


class NetProperties(ctypes.Structure):
    _fields_ = [
        ("name", c_char_p),
        ("pci_path", c_char_p),
        ("guid", c_uint64),
        *[(name, c_int) for name in ("ptr_support", "reg_is_global", "force_flush", "speed", "port")],
        ("latency", ctypes.c_float),
        *[(name, c_int) for name in ("max_comms", "max_recvs", "device_type", "device_version", "device_count")],
        ("devices", c_int * 8),
        ("max_p2p", c_size_t),
        ("max_coll", c_size_t),
        ("max_multi", c_int),
        ("rail", ctypes.c_int16),
        ("plane", ctypes.c_int16),
    ]


class RmaConfig(ctypes.Structure):
    _fields_ = [("contexts", c_int), ("traffic_class", c_int), ("rank_stride", c_int)]


def _table(name: str, functions: list[tuple[str, list[Any]]]) -> type[ctypes.Structure]:
    fields = [("name", c_char_p), *[(function, _FUNCTION(c_int, *arguments)) for function, arguments in functions]]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


PP = POINTER(c_void_p)
_PUT = [c_void_p, c_int, c_uint64, c_void_p, c_size_t, c_uint64, c_void_p, c_uint32]
RmaPlugin = _table(
    "RmaPlugin",
    [
        ("init", [PP, c_uint64, _LOGGER]),
        ("devices", [POINTER(c_int)]),
        ("get_properties", [c_int, POINTER(NetProperties)]),
        ("listen", [c_void_p, c_int, c_void_p, PP]),
        ("connect", [c_void_p, PP, c_int, c_int, c_void_p, PP]),
        ("create_context", [c_void_p, POINTER(RmaConfig), PP]),
        ("reg_mr", [c_void_p, c_void_p, c_size_t, c_int, c_uint64, PP]),
        ("reg_mr_dma_buf", [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, c_uint64, PP]),
        ("dereg_mr", [c_void_p, c_void_p]),
        ("destroy_context", [c_void_p]),
        ("close_coll", [c_void_p]),
        ("close_listen", [c_void_p]),
        ("iput", [*_PUT, PP]),
        (
            "iput_signal",
            [*_PUT, c_uint64, c_void_p, c_uint64, c_uint32, ctypes.c_bool, PP],
        ),
        ("iget", [*_PUT, PP]),
        ("iflush", [c_void_p, c_int, c_void_p, c_uint32, PP]),
        ("test", [c_void_p, c_void_p, POINTER(c_int)]),
        ("progress", [c_void_p]),
        ("query_last_error", [c_void_p, POINTER(ctypes.c_bool)]),
        ("finalize", [c_void_p]),
    ],
)
NetPlugin = _table(
    "NetPlugin",
    [
        ("init", [PP, c_uint64, c_void_p, _LOGGER, c_void_p]),
        ("devices", [POINTER(c_int)]),
        ("get_properties", [c_int, c_void_p]),
        ("listen", [c_void_p, c_int, c_void_p, PP]),
        ("connect", [c_void_p, c_int, c_void_p, PP, PP]),
        ("accept", [c_void_p, PP, PP]),
        ("reg_mr", [c_void_p, c_void_p, c_size_t, c_int, PP]),
        ("reg_mr_dma_buf", [c_void_p, c_void_p, c_size_t, c_int, c_uint64, c_int, PP]),
        ("dereg_mr", [c_void_p, c_void_p]),
        ("isend", [c_void_p, c_void_p, c_size_t, c_int, c_void_p, c_void_p, PP]),
        ("irecv", [c_void_p, c_int, PP, POINTER(c_size_t), POINTER(c_int), PP, PP, PP]),
        ("iflush", [c_void_p, c_int, PP, POINTER(c_int), PP, PP]),
        ("test", [c_void_p, POINTER(c_int), POINTER(c_int)]),
        ("close_send", [c_void_p]),
        ("close_recv", [c_void_p]),
        ("close_listen", [c_void_p]),
    ],
)

messages: list[str] = []


@_LOGGER
def _log(level: int, flags: int, file: bytes, line: int, form: bytes, text: bytes) -> None:
    messages.append(text.decode())  # the plug-in formats itself and passes "%s", text


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build() / "libnccl-net-hal-swnic.so"))
    loaded.hal_swnic_host_allocate.restype = c_void_p
    loaded.hal_swnic_host_allocate.argtypes = [c_size_t]
    loaded.hal_swnic_host_free.argtypes = [c_void_p]
    loaded.hal_swnic_settings.restype = c_char_p
    return loaded


@pytest.fixture
def rma(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("HAL_SWNIC_DEVICE", "host")
    messages.clear()
    return RmaPlugin.in_dll(library, "ncclRmaPlugin_v14")


def ok(result: int) -> None:
    assert result == 0, (result, messages[-3:])


class Rank:
    """One rank: a 64 KiB window, a source of the same size, and 64 signals that peers cannot map."""

    BYTES = 1 << 16

    def __init__(self, library: ctypes.CDLL, rma: Any, rank: int, contexts: int, stride: int) -> None:
        self.library, self.rma, self.rank, self.contexts, self.stride = library, rma, rank, contexts, stride
        self.closed = False
        self.handle = ctypes.create_string_buffer(128)
        self.listening, self.comm, self.queues = c_void_p(), c_void_p(), c_void_p()
        self.window, self.source = (library.hal_swnic_host_allocate(self.BYTES) for _ in range(2))
        self.signals = (c_uint64 * 64)()
        self.window_mr, self.source_mr, self.signal_mr = c_void_p(), c_void_p(), c_void_p()
        ok(rma.listen(None, 0, self.handle, byref(self.listening)))

    def join(self, handles: list[Any]) -> None:
        pointers = (c_void_p * len(handles))(*[ctypes.addressof(handle) for handle in handles])
        ok(self.rma.connect(None, pointers, len(handles), self.rank, self.listening, byref(self.comm)))
        ok(self.rma.close_listen(self.listening))
        ok(self.rma.reg_mr(self.comm, self.window, self.BYTES, CUDA, 0, byref(self.window_mr)))
        ok(self.rma.reg_mr(self.comm, self.source, self.BYTES, CUDA, 0, byref(self.source_mr)))
        ok(self.rma.reg_mr(self.comm, self.signals, 64 * 8, CUDA, STRICT | NEVER_RESET, byref(self.signal_mr)))
        config = RmaConfig(self.contexts, -1, self.stride)
        ok(self.rma.create_context(self.comm, byref(config), byref(self.queues)))

    def put(self, peer: int, offset: int, data: bytes, queue: int = 0) -> c_void_p:
        ctypes.memmove(self.source + offset, data, len(data))
        request = c_void_p()
        arguments = (
            self.queues,
            queue,
            offset,
            self.source_mr,
            len(data),
            offset,
            self.window_mr,
            peer,
            byref(request),
        )
        ok(self.rma.iput(*arguments))
        return request

    def signal(self, peer: int, slot: int, value: int = 1, strong: bool = True, queue: int = 0) -> c_void_p:
        request = c_void_p()
        nothing = (0, None, 0, 0, None)
        ok(
            self.rma.iput_signal(
                self.queues, queue, *nothing, peer, slot * 8, self.signal_mr, value, ADD, strong, byref(request)
            )
        )
        return request

    def test(self, request: c_void_p) -> tuple[int, bool]:
        done = c_int()
        return self.rma.test(self.comm, request, byref(done)), bool(done.value)

    def finish(self, *requests: c_void_p) -> None:
        for request in requests:
            wait_until(lambda request=request: self._done(request))

    def _done(self, request: c_void_p) -> bool:
        result, done = self.test(request)
        ok(result)
        return done

    def read(self, offset: int, size: int) -> bytes:
        return ctypes.string_at(self.window + offset, size)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        ok(self.rma.destroy_context(self.queues))
        for mr in (self.signal_mr, self.source_mr, self.window_mr):
            ok(self.rma.dereg_mr(self.comm, mr))
        ok(self.rma.close_coll(self.comm))
        self.library.hal_swnic_host_free(self.window)
        self.library.hal_swnic_host_free(self.source)


PATIENCE = 60.0
"""Seconds; what takes milliseconds may take seconds on a busy machine, and only a hang takes this long."""
TRIES = range(1, 6)
"""What lasts for a second or two in a test may have passed before a busy machine runs the thread that looks: again then."""


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE} s"
        time.sleep(0.0002)


Connect = Callable[..., list[Rank]]


@pytest.fixture
def connect(library: ctypes.CDLL, rma: Any) -> Iterator[Connect]:
    made: list[Rank] = []

    def make(count: int, contexts: int = 2, stride: int = 1) -> list[Rank]:
        ctx = c_void_p()
        ok(rma.init(byref(ctx), 7, _log))
        made.extend(Rank(library, rma, rank, contexts, stride) for rank in range(count))
        together([lambda rank=rank: rank.join([one.handle for one in made]) for rank in made])
        return made

    yield make
    together([rank.close for rank in made])


def together(actions: list[Callable[[], None]]) -> None:
    with ThreadPoolExecutor(max(len(actions), 1)) as pool:
        for outcome in [pool.submit(action) for action in actions]:
            outcome.result(timeout=2 * PATIENCE)


def test_tables_name_the_plugin_and_properties_make_nccl_use_the_gin_proxy(rma: Any) -> None:
    ctx, count, properties = c_void_p(), c_int(), NetProperties()
    assert rma.name == b"hal-swnic"
    ok(rma.init(byref(ctx), 7, _log))
    ok(rma.devices(byref(count)))
    ok(rma.get_properties(0, byref(properties)))
    assert count.value == 1
    assert properties.device_type == 2, "NCCL_NET_DEVICE_GIN_PROXY"
    assert properties.ptr_support == HOST | CUDA, "no DMA-BUF: NCCL then registers by address"
    assert properties.max_recvs * 32 == 512
    assert properties.rail == properties.plane == -1
    ok(rma.finalize(ctx))


def test_credit_starvation_is_a_setting_that_nccl_reads(rma: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_QUEUE_DEPTH", "32")
    properties = NetProperties()
    ok(rma.get_properties(0, byref(properties)))
    assert properties.max_recvs == 1


def test_put_then_strong_signal_arrives_in_that_order(connect: Connect) -> None:
    first, second = connect(2)
    requests = [first.put(1, i * 100, bytes([i + 1]) * 100) for i in range(20)]
    requests.append(first.signal(1, slot=3, value=5))
    wait_until(lambda: second.signals[3] == 5)
    assert second.read(0, 2000) == b"".join(bytes([i + 1]) * 100 for i in range(20))
    first.finish(*requests)
    assert first.signals[3] == 0, "the signal is the target's, not the sender's"


def test_signals_of_several_sources_add_up_and_inc_counts_one(connect: Connect) -> None:
    ranks = connect(3)
    for rank in ranks:
        rank.finish(*[rank.signal(2, slot=0, value=10) for _ in range(50)])
    wait_until(lambda: ranks[2].signals[0] == 3 * 50 * 10)


def test_get_reads_what_the_peer_has(connect: Connect) -> None:
    first, second = connect(2)
    ctypes.memmove(second.window + 512, b"read me", 7)
    request = c_void_p()
    ok(first.rma.iget(first.queues, 1, 512, first.window_mr, 7, 64, first.source_mr, 1, byref(request)))
    first.finish(request)
    assert ctypes.string_at(first.source + 64, 7) == b"read me"
    ok(first.rma.iflush(first.queues, 0, first.window_mr, 1, byref(request)))
    assert request.value is None, "no request: done at once"


def test_signal_in_a_window_is_a_word_of_the_peer_and_may_be_overwritten_there(connect: Connect) -> None:
    first, second = connect(2)
    word = c_uint64.from_address(second.window + 8)
    word.value = 40
    request = c_void_p()
    nothing = (0, None, 0, 0, None)
    ok(first.rma.iput_signal(first.queues, 0, *nothing, 1, 8, first.window_mr, 2, ADD, True, byref(request)))
    wait_until(lambda: word.value == 42)
    first.finish(request)


def test_self_put_from_host_memory(connect: Connect, rma: Any) -> None:
    """NCCL registers the values that kernels put inline as host memory, and puts to the own rank too."""
    (only,) = connect(1)
    inline, mr, request = (c_uint64 * 8)(*range(8)), c_void_p(), c_void_p()
    ok(rma.reg_mr(only.comm, inline, 64, HOST, 0, byref(mr)))
    ok(rma.iput(only.queues, 0, 16, mr, 8, 128, only.window_mr, 0, byref(request)))
    only.finish(request)
    assert only.read(128, 8) == (2).to_bytes(8, "little")
    ok(rma.dereg_mr(only.comm, mr))


def test_done_is_the_source_read_and_not_the_target_written(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trap of GIN's flush: a completed request says nothing of the target."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "delay=1s,source_early")
    first, second = connect(2)
    for n in TRIES:
        at = 64 * n
        first.finish(first.put(1, at, b"x" * 64))
        early = second.read(at, 64) == bytes(64)  # complete for the source, and not there yet
        ctypes.memset(first.source, 0, Rank.BYTES)
        signalled = first.signal(1, slot=0)
        wait_until(lambda n=n: second.signals[0] == n)
        assert second.read(at, 64) == b"x" * 64, "the strong signal still waits for it"
        first.finish(signalled)
        if early:
            return
    pytest.fail("no request was done before its data had arrived")


def test_destroyed_context_touches_no_memory_any_more(
    connect: Connect, rma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory may be freed as soon as the call returns, also when an operation was still held."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "0>1: stall=6s")
    first, second = connect(2)
    first.put(1, 0, b"late" * 16)
    started = time.monotonic()
    ok(rma.destroy_context(first.queues))
    assert time.monotonic() - started < 5.9, "bounded, and before the stall ends"
    time.sleep(max(0.0, started + 6.3 - time.monotonic()))
    assert second.read(0, 64) == bytes(64)
    config = RmaConfig(1, -1, 1)
    ok(rma.create_context(first.comm, byref(config), byref(first.queues)))  # for closing


def test_queues_do_not_order_each_other(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strong signal on queue 1 says nothing of queue 0, and here it does come first."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "*>*/0: delay=1s")
    first, second = connect(2)
    for n in TRIES:
        at = 64 * n
        put = first.put(1, at, b"y" * 64, queue=0)
        other = first.signal(1, slot=1, queue=1)
        wait_until(lambda n=n: second.signals[1] == n)
        came_first = second.read(at, 64) == bytes(64)
        own = first.signal(1, slot=0, queue=0)
        wait_until(lambda n=n: second.signals[0] == n)
        assert second.read(at, 64) == b"y" * 64
        first.finish(put, other, own)
        if came_first:
            return
    pytest.fail("no signal on queue 1 came before the put on queue 0")


def test_strong_signals_keep_their_order(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits its own time to be published; the target must still never see a later one without the earlier ones."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "ops=300,publish=40ms")
    first, second = connect(2)
    for n in TRIES:
        requests = [first.signal(1, slot) for slot in range(64)]
        steps = set()
        deadline = time.monotonic() + PATIENCE
        while second.signals[63] < n and time.monotonic() < deadline:
            # From the last to the first: what was set when a later one was read must be set now.
            seen = [second.signals[slot] for slot in reversed(range(64))][::-1]
            steps.add(sum(seen))
            assert seen == sorted(seen, reverse=True), seen
        assert second.signals[63] == n
        first.finish(*requests)
        if len(steps) > 3:
            return
    pytest.fail("the signals came all at once: nothing was seen")


def test_weak_signals_may_overtake_each_other(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "ops=300,publish=40ms")
    first, second = connect(2)
    for n in TRIES:
        requests = [first.signal(1, slot, strong=False) for slot in range(64)]
        overtook = False
        deadline = time.monotonic() + PATIENCE
        while sum(second.signals) < 64 * n and time.monotonic() < deadline:
            seen = [second.signals[slot] for slot in reversed(range(64))][::-1]
            overtook |= seen != sorted(seen, reverse=True)
        assert sum(second.signals) == 64 * n
        first.finish(*requests)
        if overtook:
            return
    pytest.fail("no weak signal was seen before an earlier one")


def test_contiguous_puts_become_one_copy(connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "0>1: stall=1s")  # so that all are due together
    monkeypatch.setenv("HAL_SWNIC_STATS", str(tmp_path / "stats"))
    first, second = connect(2)
    requests = [first.put(1, i * 64, bytes([i + 1]) * 64) for i in range(64)]
    requests += [first.put(1, 32768, b"apart"), first.signal(1, 0)]
    wait_until(lambda: second.signals[0] == 1)
    assert second.read(0, 4096) == b"".join(bytes([i + 1]) * 64 for i in range(64))
    first.finish(*requests)
    together([first.close, second.close])
    lines = [json.loads(line) for line in (tmp_path / "stats").read_text().splitlines()]
    sender = next(line for line in lines if line["rank"] == 0)
    assert sender["pieces"] == 65
    assert sender["copies"] == 2


def test_a_context_of_the_rail_reaches_the_rail_only(connect: Connect, rma: Any) -> None:
    ranks = connect(4, contexts=1, stride=2)
    ranks[0].finish(ranks[0].put(2, 0, b"rail"), ranks[0].signal(2, 0))
    wait_until(lambda: ranks[2].signals[0] == 1)
    request = c_void_p()
    put = (ranks[0].queues, 0, 0, ranks[0].source_mr, 4, 0, ranks[0].window_mr, 1, byref(request))
    assert rma.iput(*put) != 0
    assert "rank 1 is not reached by a context of rank stride 2" in messages[-1]
    bad, made = RmaConfig(1, -1, 3), c_void_p()
    assert rma.create_context(ranks[0].comm, byref(bad), byref(made)) != 0
    assert "rank stride 3 does not divide the 4 ranks" in messages[-1]


@pytest.mark.parametrize(
    ("size", "source_offset", "target_offset", "peer", "queue", "said"),
    [
        (100, Rank.BYTES - 99, 0, 1, 0, "local bytes 65437 to 65537 of region 1, which has 65536"),
        (100, 0, Rank.BYTES - 99, 1, 0, "remote bytes 65437 to 65537 of region 0, which has 65536"),
        (8, 0, 2**64 - 8, 1, 0, "remote bytes"),
        (8, 0, 0, 2, 0, "rank 2 of 2"),
        (8, 0, 0, 1, 2, "context 2 of 2"),
    ],
)
def test_put_outside_a_region_is_refused_with_the_numbers(
    connect: Connect, rma: Any, size: int, source_offset: int, target_offset: int, peer: int, queue: int, said: str
) -> None:
    first, _ = connect(2)
    request = c_void_p()
    arguments = (first.queues, queue, source_offset, first.source_mr, size, target_offset, first.window_mr, peer)
    assert rma.iput(*arguments, byref(request)) != 0
    assert said in messages[-1]


def test_put_to_memory_that_cannot_be_exported_is_refused(connect: Connect, rma: Any) -> None:
    first, _ = connect(2)
    request = c_void_p()
    arguments = (first.queues, 0, 0, first.source_mr, 8, 0, first.signal_mr, 1, byref(request))
    assert rma.iput(*arguments) != 0
    assert "was not allocated for export (use ncclMemAlloc)" in messages[-1]


def test_ranks_that_register_different_sizes_all_learn_it(connect: Connect, rma: Any) -> None:
    ranks = connect(2)
    results, mr = [0, 0], [c_void_p(), c_void_p()]

    def register(rank: Rank) -> None:
        size = 4096 if rank.rank == 0 else 8192
        results[rank.rank] = rma.reg_mr(rank.comm, rank.window, size, CUDA, 0, byref(mr[rank.rank]))

    together([lambda rank=rank: register(rank) for rank in ranks])
    assert all(results)
    assert any("with 8192 bytes, this rank 4096" in text for text in messages)
    assert any("with 4096 bytes, this rank 8192" in text for text in messages)


def test_rank_that_does_not_come_is_named_within_the_time(
    library: ctypes.CDLL, rma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_SWNIC_TIMEOUT", "0.5")
    ctx = c_void_p()
    ok(rma.init(byref(ctx), 7, _log))
    ranks = [Rank(library, rma, rank, 1, 1) for rank in range(3)]
    pointers = (c_void_p * 3)(*[ctypes.addressof(rank.handle) for rank in ranks])
    started = time.monotonic()
    assert rma.connect(None, pointers, 3, 0, ranks[0].listening, byref(ranks[0].comm)) != 0
    assert time.monotonic() - started < 30, "the time limit is 0.5 s here, and 60 s where none is set"
    assert "no connection from rank 1 2 within 0.5" in messages[-1]
    for rank in ranks:
        ok(rma.close_listen(rank.listening))


def test_failed_request_gives_a_remote_error_and_the_context_reports_it(
    connect: Connect, rma: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "0>1/0: error=@1")
    first, _ = connect(2)
    good, bad = first.put(1, 0, b"good"), first.put(1, 64, b"bad")
    first.finish(good)
    wait_until(lambda: first.test(bad)[0] == REMOTE_ERROR)
    error = ctypes.c_bool()
    ok(rma.query_last_error(first.queues, byref(error)))
    assert error.value
    first.finish(first.put(1, 128, b"other queue", queue=1))


def test_every_setting_is_listed_and_documented(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_SEED", "1234")
    listed = library.hal_swnic_settings().decode().splitlines()
    assert any(line.startswith("HAL_SWNIC_SEED=1234  # ") for line in listed)
    page = (Path(__file__).parent.parent / "docs" / "software_nic.md").read_text()
    assert [name for line in listed if f"`{(name := line.partition('=')[0])}`" not in page] == []


# --- host collectives ------------------------------------------------------------------------------------------------


@pytest.fixture
def net(library: ctypes.CDLL, rma: Any) -> Any:
    table = NetPlugin.in_dll(library, "ncclNetPlugin_v11")
    ctx = c_void_p()
    ok(table.init(byref(ctx), 7, None, _log, None))
    return table


def pair(net: Any) -> tuple[c_void_p, c_void_p, c_void_p]:
    handle, listening, sender, receiver = ctypes.create_string_buffer(128), c_void_p(), c_void_p(), c_void_p()
    ok(net.listen(None, 0, handle, byref(listening)))
    ok(net.accept(listening, byref(receiver), None))
    assert receiver.value is None, "nobody has connected: NCCL asks again"
    wait_until(lambda: net.connect(None, 0, handle, byref(sender), None) == 0 and sender.value is not None)
    wait_until(lambda: net.accept(listening, byref(receiver), None) == 0 and receiver.value is not None)
    return listening, sender, receiver


def receive(net: Any, comm: c_void_p, into: Any, room: int) -> c_void_p:
    request = c_void_p()
    data, size, tag = (c_void_p * 1)(ctypes.addressof(into)), (c_size_t * 1)(room), (c_int * 1)(0)
    ok(net.irecv(comm, 1, data, size, tag, (c_void_p * 1)(), (c_void_p * 1)(), byref(request)))
    return request


def net_done(net: Any, request: c_void_p, sizes: Any = None) -> bool:
    done = c_int()
    ok(net.test(request, byref(done), sizes))
    return bool(done.value)


def test_host_messages_keep_order_and_size(net: Any) -> None:
    listening, sender, receiver = pair(net)
    big = 1 << 20  # more than the socket holds: send and receive must take turns
    out = [ctypes.create_string_buffer(bytes([i + 1]) * size, size) for i, size in enumerate((5, big, 0 + 1, 77))]
    into = [ctypes.create_string_buffer(big) for _ in out]
    sends = []
    for buffer in out:
        request = c_void_p()
        ok(net.isend(sender, buffer, len(buffer), 0, None, None, byref(request)))
        sends.append(request)
    receives = [receive(net, receiver, buffer, big) for buffer in into]
    sizes = [c_int(-1) for _ in out]
    pending = {("s", i) for i in range(4)} | {("r", i) for i in range(4)}

    def poll() -> bool:
        for kind, i in sorted(pending):
            request = sends[i] if kind == "s" else receives[i]
            if net_done(net, request, byref(sizes[i]) if kind == "r" else None):
                pending.discard((kind, i))
        return not pending

    wait_until(poll)
    assert [size.value for size in sizes] == [5, big, 1, 77]
    assert [into[i].raw[: len(out[i])] for i in range(4)] == [buffer.raw for buffer in out]
    for close, comm in ((net.close_send, sender), (net.close_recv, receiver), (net.close_listen, listening)):
        ok(close(comm))


def test_host_peer_that_closed_gives_an_error_not_a_hang(net: Any) -> None:
    listening, sender, receiver = pair(net)
    request = receive(net, receiver, ctypes.create_string_buffer(64), 64)
    ok(net.close_send(sender))
    done = c_int()
    assert net.test(request, byref(done), None) == REMOTE_ERROR
    ok(net.close_recv(receiver))
    ok(net.close_listen(listening))


def test_more_than_the_allowed_requests_are_put_off(net: Any) -> None:
    listening, sender, receiver = pair(net)
    data, request, taken = ctypes.create_string_buffer(8), c_void_p(), 0
    for _ in range(40):
        ok(net.isend(sender, data, 8, 0, None, None, byref(request)))
        taken += request.value is not None
    assert taken == 32
    for close, comm in ((net.close_send, sender), (net.close_recv, receiver), (net.close_listen, listening)):
        ok(close(comm))


def test_closing_ends_the_threads_and_descriptors_of_a_connection(connect: Connect) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/task").iterdir())), len(list(Path("/proc/self/fd").iterdir()))

    before = held()
    ranks = connect(3)
    for rank in ranks:
        rank.finish(rank.put((rank.rank + 1) % 3, 0, b"z"), rank.signal((rank.rank + 1) % 3, 0))
    assert held()[0] >= before[0] + 3
    together([rank.close for rank in ranks])
    wait_until(lambda: held() == before)
