# SPDX-License-Identifier: Apache-2.0
"""The short way of torch tensors (backends/hal_cuda/quick.py), on emulated GPUs: what it costs, gives and leaves alone."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cuda_emulator import EXPERT, PUSH, RANK, Round, Scenario
from hal_cuda import native
from hal_cuda.array_views import RECEIVED, Part, Views
from hal_cuda.probe import probe_emulator
from hal_cuda.slots import Lease

import hal
from hal.errors import ContractError

torch = pytest.importorskip("torch")
if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

LATENCY = Scenario("schedule latency", settings={"schedule": "latency"})
SCENARIOS = [RANK, PUSH, EXPERT, LATENCY]
CALLS = {("rank", True): 44, ("rank", False): 52, ("expert", True): 48, ("expert", False): 52}
"""Python functions that an eager pair may call, by layout and whether a handle is reused. It was 64, 71, 69 and 73, and time
on the host is what a pair of few tokens costs on GPUs (docs/performance_cuda.md)."""


def spawn(ranks: int, body: Callable[[hal.Communicator], Any]) -> list[Any]:
    return hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", timeout=60.0)


def watched(ep: Any) -> list[bool]:
    """Whether each further call of ``ep`` went the short way."""
    quick, taken = ep._quick(), []

    def watch(way: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            out = way(*arguments)
            taken.append(out is not None)
            return out

        return call

    quick.dispatch, quick.combine = watch(quick.dispatch), watch(quick.combine)
    return taken


def python_calls(body: Callable[[], None]) -> Counter[str]:
    """Functions of Python that ``body`` calls, itself left out."""
    seen: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            seen[frame.f_code.co_name] += 1

    sys.setprofile(note)
    try:
        body()
    finally:
        sys.setprofile(None)
    seen["body"] -= 1
    return +seen


@pytest.mark.parametrize("cached", [True, False], ids=["cached handle", "count exchange"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_an_eager_pair_makes_few_python_calls(layout: str, cached: bool) -> None:
    def body(comm: hal.Communicator) -> Counter[str]:
        ep: Any = comm.expert_parallel(num_experts=8, top_k=2, hidden=64, max_tokens=16, layout=layout)
        # As on GPUs, where tensors come with a stream and nobody waits for its end.
        stream = ep._engine._session.stream
        ep._quick()._stream = {None: stream}.get
        x, weights = torch.zeros(16, 64, dtype=torch.bfloat16), torch.ones(16, 2)
        idx = torch.arange(32).reshape(16, 2) % 8
        handle = ep.dispatch(x, idx, weights).handle
        kept = []  # host memory, unlike that of GPUs, is not kept until the stream is done with it

        def body() -> None:
            out = ep.dispatch(x, None, weights, handle=handle) if cached else ep.dispatch(x, idx, weights)
            kept.append((out.handle, ep.combine(out.x, out.handle)))

        # Least of several: on a busy machine a wait for the row count may look twice.
        counts = [python_calls(body) for _ in range(5)]
        ep._engine.library.stream_sync(0, stream)
        return min(counts, key=Counter.total)

    [seen] = spawn(1, body)
    assert seen.total() <= CALLS[layout, cached], seen.most_common()


@pytest.mark.parametrize("wide", [True, False], ids=["int64", "int32"])
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_it_gives_what_the_reference_says(scenario: Scenario, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CUDA_COMBINE", scenario.combine)
    rounds = [Round(scenario, number) for number in range(3)]

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        taken = watched(ep)
        for one in rounds:
            x, weights = torch.from_numpy(one.x[me]), torch.from_numpy(one.weights[me])
            idx = torch.from_numpy(one.idx[me].astype(np.int64 if wide else np.int32))
            out, answers = ep.dispatch(x, idx, weights), torch.from_numpy(one.answers[me])
            for again in range(2):
                for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets"):
                    given, wanted = getattr(out, name), getattr(one.rows[me], name)
                    assert (given is None) == (wanted is None), name
                    assert given is None or given.numpy().tobytes() == wanted.tobytes(), (name, again)
                assert ep.combine(answers, out.handle).numpy().tobytes() == one.sums[me].tobytes()
                handle = out.handle
                del out, given
                out = ep.dispatch(x, None, weights, handle=handle)
            mine = ep.expert_output(out.handle, x)
            mine.copy_(answers)
            assert ep.combine(mine, out.handle).numpy().tobytes() == one.sums[me].tobytes()
            del out, mine
        assert taken.count(True) == len(taken) == 6 * len(rounds)

    spawn(2, body)


def test_rows_of_one_byte_and_their_scales() -> None:
    settings = {"dtype": "float8_e4m3fn", "combine_dtype": "bfloat16", "scale_dim": 4}

    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(num_experts=4, top_k=1, hidden=64, max_tokens=8, **settings)
        taken = watched(ep)
        x = torch.arange(8 * 64, dtype=torch.float32).reshape(8, 64).to(torch.float8_e4m3fn)
        scales = torch.arange(32, dtype=torch.float32).reshape(8, 4)
        idx = torch.full((8, 1), 2 * (1 - comm.rank), dtype=torch.int32)  # an expert of the other rank's
        out = ep.dispatch(x, idx, scales=scales)
        assert out.x.dtype is torch.float8_e4m3fn
        assert torch.equal(out.x.view(torch.uint8), x.view(torch.uint8))
        assert torch.equal(out.scales, scales)
        y = ep.combine(out.x.to(torch.bfloat16), out.handle)
        assert torch.equal(y, x.to(torch.bfloat16))
        assert taken == [True, True]

    spawn(2, body)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a type": (lambda x: x.double(), "float64"),
    "a shape": (lambda x: x[:, :-1].contiguous(), "hidden"),
    "strides": (lambda x: x.t().contiguous().t(), r"\.contiguous\(\)"),
    "a sparse tensor": (lambda x: x.to_sparse(), "to_dense"),
    "a compressed one": (lambda x: x.to_sparse_csr(), "to_dense"),
    "a tensor of autograd": (lambda x: x.clone().requires_grad_(), "detach"),
    "another device": (lambda x: x.to("meta"), "meta"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_to_be_refused_is_left_to_the_general_way(what: str) -> None:
    change, words = REFUSED[what]

    def body(comm: hal.Communicator) -> None:
        ep = comm.expert_parallel(RANK.spec)
        taken = watched(ep)
        x, idx = torch.ones(4, 64), torch.arange(8).reshape(4, 2) % 4
        out = ep.dispatch(x, idx)
        for call in (
            lambda: ep.dispatch(change(x), idx),
            lambda: ep.dispatch(change(x), handle=out.handle),
            lambda: ep.combine(change(out.x), out.handle),
        ):
            with pytest.raises(ContractError, match=words):
                call()
        assert taken == [True, False, False, False]
        assert torch.equal(ep.combine(out.x, out.handle), x)  # nothing was sent: all goes on
        ep.close()
        with pytest.raises(ContractError, match="closed"):
            ep.dispatch(x, idx)

    spawn(1, body)


def test_a_tensor_holds_its_slot_and_a_handle_does_not() -> None:
    def body(comm: hal.Communicator) -> None:
        ep: Any = comm.expert_parallel(RANK.spec)
        slots = ep._engine._slots
        x, idx = torch.ones(4, 64), torch.arange(8).reshape(4, 2) % 4
        handle = ep.dispatch(x, idx).handle
        assert not slots.any_held()
        for name in ("x", "topk_idx", "topk_weights", "tokens_per_expert"):
            part = getattr(ep.dispatch(x, handle=handle), name)[1:]
            assert slots.any_held(), name
            copy = part.clone()
            for _ in range(4):
                ep.dispatch(torch.zeros(4, 64), handle=handle)
            assert torch.equal(part, copy), name
            del part
            assert not slots.any_held(), name

    spawn(1, body)


def test_a_tensor_that_cannot_be_made_leaves_no_slot_held() -> None:
    library = native.load_emulated()
    memory = torch.zeros(256, dtype=torch.uint8)
    counts = library.leases(1)
    lease = Lease(0, memory, ctypes.addressof(counts.contents))
    parts = (Part(0, RECEIVED, (4,), "float32"), None, Part(64, 3, (), "int32"), Part(128, RECEIVED, (), "int64"))
    views = Views(library, "cpu", parts)
    made = views.tensors(memory.data_ptr(), 2, lease, torch)
    assert [None if part is None else (tuple(part.shape), part.dtype) for part in made] == [
        ((2, 4), torch.float32),
        None,
        ((3,), torch.int32),
        ((2,), torch.int64),
    ]
    assert counts[0] == 3
    del made
    assert counts[0] == 0
    calls = []

    def fails(capsule: Any) -> Any:
        calls.append(counts[0])
        if len(calls) == 3:
            raise RuntimeError("no tensor today")
        return torch._C._from_dlpack(capsule)

    views._python.from_dlpack = fails
    with pytest.raises(RuntimeError, match="no tensor today"):
        views.tensors(memory.data_ptr(), 2, lease, torch)
    gc.collect()
    assert calls == [1, 2, 3]
    assert counts[0] == 0
