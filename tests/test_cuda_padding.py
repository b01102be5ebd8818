# SPDX-License-Identifier: Apache-2.0
"""Rows of a receive slot that nobody uses are padding, though a dispatch clears only those that an earlier one wrote (emulated
GPUs)."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from ctypes import c_uint64
from typing import Any

import numpy as np
import pytest
from cuda_emulator import emulator
from cuda_streams import caller_streams, stream_of  # noqa: F401 (a fixture)
from hal_cuda import native
from hal_cuda.probe import probe_emulator
from hosts_rounds import FORM_NAMES, FORMS, HostsCase, a_case, layer_of, run_emulated
from layer import BY_ROW, Array, Expected, Tokens, in_use, same

import hal
from hal.arrays import as_buffer, to_kind
from hal.errors import ContractError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moe-hal[torch]'")
if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

pytestmark = pytest.mark.usefixtures("caller_streams")

LAYOUTS = ["rank", "expert"]
SIZES = [24, 2, 24, 0, 7, 24, 1]
"""Tokens of each rank, one dispatch after the other: few after many, also where the many landed in another slot."""


def sent(case: HostsCase, tokens: int, seed: int) -> list[Tokens]:
    """As many tokens of every rank, and so that each has an expert somewhere."""
    return [Tokens(case, tokens, [seed, rank], missing=0.0) for rank in range(case.ranks)]


def padded(case: HostsCase, batch: Sequence[Tokens]) -> list[Tokens]:
    """As many tokens as a graph takes, the last of them with ids of -1."""
    full = sent(case, case.max_tokens, 99)
    for tokens, few in zip(full, batch, strict=True):
        n = len(few.x)
        tokens.topk_idx[n:] = -1
        for name in ("x", "topk_idx", "topk_weights", "scales"):
            if getattr(tokens, name) is not None:
                getattr(tokens, name)[:n] = getattr(few, name)
    return full


def check(out: hal.Dispatched, rows: hal.Dispatched, what: Any) -> None:
    """Also that rows beyond the last that are there are padding."""
    n = len(rows.x)
    for name in BY_ROW:
        given, wanted = getattr(out, name), getattr(rows, name)
        if wanted is None:
            continue
        same(f"{name} of {what}", given[:n], wanted)
        rest = given[n:]
        bad = rest != -1 if name == "topk_idx" else rest.view(torch.uint8) != 0
        assert not bool(bad.any()), f"{name} of {what}: stale rows {torch.nonzero(bad)[:4]} beyond {n}"


class Graph:
    """A dispatch, whole or in halves, in a CUDA graph: of the worst case's shapes."""

    def __init__(self, comm: hal.Communicator, ep: hal.ExpertParallel, case: HostsCase, halves: bool) -> None:
        self.case, self.on, self.rank = case, stream_of(comm), comm.rank
        layer = sent(case, case.max_tokens, 0)[comm.rank]
        self.given = {name: self._tensor(getattr(layer, name)) for name in ("x", "topk_idx", "topk_weights")}
        comm.barrier()
        with self.on.capture() as self.graph:
            self.out = ep.dispatch_recv(ep.dispatch_send(**self.given)) if halves else ep.dispatch(**self.given)
        comm.barrier()

    def _tensor(self, array: Array) -> Any:
        return to_kind(as_buffer(array.copy()), "torch")

    def replay(self, batch: Sequence[Tokens]) -> None:
        full = padded(self.case, batch)
        kept = [self._tensor(getattr(full[self.rank], name)) for name in self.given]
        for to, array in zip(self.given.values(), kept, strict=True):
            self.on.copy(to, array)
        self.graph.replay()
        self.on.synchronize()
        check(self.out, Expected(self.case, full).rows[self.rank], f"a replay of {len(batch[0].x)} tokens")


def replays(comm: hal.Communicator, case: HostsCase, halves: bool) -> None:
    """With calls outside in between, which have slots of their own or, of few, the graph's."""
    layer = layer_of(comm, case)
    with layer.ep as ep:
        graph = Graph(comm, ep, case, halves)
        for turn, tokens in enumerate(SIZES):
            graph.replay(sent(case, tokens, turn))
            if turn % 3 == 1:
                batch = sent(case, SIZES[turn - 1], 50 + turn)
                layer.dispatch(batch[comm.rank], Expected(case, batch))
            comm.barrier()
        del graph
    gc.collect()


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_after_many_in_a_graph(layout, schedule, shape, halves):
    for num_buffers in (1, 3):
        case = a_case(schedule, layout, shape, num_buffers=num_buffers, alignment=4 if layout == "expert" else 1)
        run_emulated(replays, case, halves)


def calls(comm: hal.Communicator, case: HostsCase, halves: bool) -> None:
    """Each result is let go of before the next dispatch, so slots come round; and handles are used again."""
    layer = layer_of(comm, case)
    with layer.ep as ep:
        for turn, tokens in enumerate(SIZES):
            batch = sent(case, tokens, turn)
            expected, handle = Expected(case, batch), None
            for _ in range(2):
                given = layer.arguments(batch[comm.rank], **({} if handle is None else {"handle": handle}))
                out = ep.dispatch_recv(ep.dispatch_send(**given)) if halves else ep.dispatch(**given)
                handle = layer.check(out, expected)
                del out


@pytest.mark.parametrize("halves", [False, True], ids=["whole", "halves"])
@pytest.mark.parametrize("shape", [(3, 1), (4, 2)], ids=["1x3", "2x2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_after_many_in_fixed_slots(layout, shape, halves):
    for num_buffers in (1, 2, 4):
        run_emulated(calls, a_case("latency", layout, shape, num_buffers=num_buffers), halves)


def unreceived(comm: hal.Communicator, case: HostsCase) -> None:
    """A send half's rows land though its receive half never comes; the slot is then used again."""
    layer = layer_of(comm, case)
    with layer.ep as ep:
        for turn in range(case.num_buffers + 1):  # every slot's bounds are low
            batch = sent(case, 1, turn)
            layer.dispatch(batch[comm.rank], Expected(case, batch))
        many = sent(case, case.max_tokens, 20)[comm.rank]
        pending = ep.dispatch_send(**layer.arguments(many))
        del pending
        gc.collect()
        for turn in range(2 * case.num_buffers):
            batch = sent(case, 2, 30 + turn)
            expected = Expected(case, batch)
            given = layer.arguments(batch[comm.rank])
            out = ep.dispatch_recv(ep.dispatch_send(**given)) if turn % 2 else ep.dispatch(**given)
            layer.check(out, expected)
            del out


@pytest.mark.parametrize("shape", [(3, 1), (4, 2)], ids=["1x3", "2x2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_that_no_receive_half_counted_are_cleared(layout, shape):
    run_emulated(unreceived, a_case("latency", layout, shape, num_buffers=4))


def refused(comm: hal.Communicator, case: HostsCase) -> None:
    """Rank 1's ids break the contract, when the others' rows may have landed already."""
    layer = layer_of(comm, case)
    with layer.ep as ep:
        for turn in range(2 * case.num_buffers):
            batch = sent(case, 1, turn)
            layer.dispatch(batch[comm.rank], Expected(case, batch))
        engine: Any = ep._engine
        for turn in range(case.num_buffers):
            many = sent(case, case.max_tokens, 20 + turn)[comm.rank]
            if comm.rank == 1:
                many.topk_idx[3, 1] = case.num_experts
            comm.barrier()
            with pytest.raises(ContractError, match=str(case.num_experts) if comm.rank == 1 else "rank 1"):
                engine.dispatch(*(as_buffer(a) for a in (many.x, many.topk_idx, many.topk_weights)), None, None, None)
            comm.barrier()
        for turn in range(2 * case.num_buffers):
            batch = sent(case, 1, 30 + turn)
            layer.dispatch(batch[comm.rank], Expected(case, batch))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_refused_round_are_cleared(layout):
    case = a_case("latency", layout, (3, 1), num_buffers=2)
    for seed in range(3):
        with emulator(seed):
            run_emulated(refused, case)


def rows_cleared(comm: hal.Communicator, case: HostsCase, sizes: list[int]) -> tuple[list[float], list[int]]:
    """By each replay of rank 0's graph: how many rows its kernel stores; and how many were in use before and are no more. The
    ranks of even number send nothing and no token has two experts, so what others send is stored by others."""
    counted: list[float] = []
    wanted: list[int] = []
    with comm.expert_parallel(**case.settings) as ep:
        graph = Graph(comm, ep, case, halves=False)
        x, library = as_buffer(graph.out.x), native.load_emulated()
        before = np.ones(x.shape[0], bool)
        for turn, tokens in enumerate(sizes):
            batch = [sent(case, tokens if rank % 2 else 0, turn)[rank] for rank in range(case.ranks)]
            rows = Expected(case, padded(case, batch)).rows[comm.rank]
            used = np.pad(in_use(case, rows), (0, x.shape[0] - len(rows.x)))
            if comm.rank == 0:
                library.emulator_count_stores(x.ptr, x.nbytes, c_uint64())
            comm.barrier()
            graph.replay(batch)
            comm.barrier()
            if comm.rank == 0:
                counted.append(library.value("emulator_count_stores", c_uint64, 0, 0) * 16 / (x.nbytes // x.shape[0]))
            wanted.append(int((before & ~used).sum()))
            before = used
            comm.barrier()
        del graph
    gc.collect()
    return counted, wanted


@pytest.mark.parametrize(("schedule", "shape"), FORMS, ids=FORM_NAMES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_row_is_cleared_that_is_padding_already(layout, schedule, shape):
    counted, wanted = run_emulated(rows_cleared, a_case(schedule, layout, shape, top_k=1), [24, 2, 2, 0, 0, 5])[0]
    assert counted == wanted
    assert wanted[0] > wanted[1] > 0
    assert wanted[4:] == [0, 0]
