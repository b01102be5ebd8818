# SPDX-License-Identifier: Apache-2.0
"""hal.torch: gradients against a dense single-process layer, and a small training run equal to the dense one."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import numpy as np
import pytest
from standin import Meeting

import hal
from hal.config import QUANTISED_DTYPES
from hal.errors import ContractError

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'moe-hal[torch]'")

RANKS, EXPERTS, TOP_K, HIDDEN = 2, 6, 3, 8
SPEC = {"num_experts": EXPERTS, "top_k": TOP_K, "hidden": HIDDEN, "max_tokens": 64, "dtype": "float32"}


class Rank:
    """One rank of the embedded backend, and a way for the test's threads to exchange tensors."""

    def __init__(self, comm: hal.Communicator, meeting: Meeting) -> None:
        self.rank, self.make, self.meeting, self.turn = comm.rank, comm.expert_parallel, meeting, 0

    def all_gather(self, value: object) -> list:
        self.turn += 1
        self.meeting.put("values", self.turn, self.rank, value)
        return self.meeting.get("values", self.turn)


def run(ranks: int, one: Callable[[Rank], object]) -> list:
    meeting = Meeting(ranks)
    return hal.spawn(ranks, lambda comm: one(Rank(comm, meeting)), timeout=60.0)


class Layer(torch.nn.Module):
    """A router and experts; every rank holds all parameters and uses its own experts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.router = torch.nn.Parameter(torch.randn(HIDDEN, EXPERTS, generator=generator))
        self.experts = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) * 0.4)
        self.bias = torch.nn.Parameter(torch.randn(HIDDEN, generator=generator))

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, idx = (x @ self.router).softmax(dim=-1).topk(TOP_K, dim=-1)
        return torch.where(weights < 0.05, -1, idx), weights

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        idx, weights = self.route(x)
        every = torch.stack([torch.tanh(x @ self.experts[e]) for e in range(EXPERTS)], dim=1)
        chosen = every.gather(1, idx.clamp(min=0)[..., None].expand(-1, -1, HIDDEN))
        return (chosen * torch.where(idx >= 0, weights, 0)[..., None]).sum(dim=1) + self.bias

    def parallel(self, ep, x: torch.Tensor) -> torch.Tensor:
        idx, weights = self.route(x)
        out = hal.torch.dispatch(ep, x, idx, weights)
        mine = self.experts[ep.expert_range.start : ep.expert_range.stop]
        if ep.spec.layout == "rank":
            every = torch.stack([torch.tanh(out.x @ matrix) for matrix in mine], dim=1)
            chosen = every.gather(1, out.topk_idx.clamp(min=0).long()[..., None].expand(-1, -1, HIDDEN))
            rows = (chosen * out.topk_weights[..., None]).sum(dim=1)
        else:
            rows = torch.tanh(torch.einsum("nh,nhg->ng", out.x, mine[out.topk_idx.clamp(min=0).long()]))
        bias = self.bias.expand_as(x).contiguous()
        return hal.torch.combine(ep, rows, out.handle, weighted=ep.spec.layout == "expert", bias=bias)


def batch(turn: int, rank: int) -> torch.Tensor:
    tokens = (3 + 4 * rank + turn) % 9  # zero tokens on rank 1 in turn 2
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(100 * turn + rank))


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return (y * y).sum() + y.sum()


LAYOUTS = [{"layout": "rank"}, {"layout": "expert"}, {"layout": "expert", "alignment": 4}]


@pytest.mark.parametrize("options", LAYOUTS)
def test_gradients_equal_the_dense_layers(options):
    def one(rank: Rank) -> None:
        ep = rank.make(**SPEC, **options)
        for turn in range(4):
            layer, reference = Layer(), Layer()
            x, copy = batch(turn, rank.rank).requires_grad_(), batch(turn, rank.rank).requires_grad_()
            y = layer.parallel(ep, x)
            loss_of(y).backward()
            parts = [batch(turn, r) for r in range(RANKS)]
            parts[rank.rank] = copy
            dense = [reference.dense(part) for part in parts]
            sum(map(loss_of, dense)).backward()
            close = {"rtol": 1e-5, "atol": 1e-5}
            torch.testing.assert_close(y, dense[rank.rank], **close)
            torch.testing.assert_close(x.grad, copy.grad, **close)
            mine = slice(ep.expert_range.start, ep.expert_range.stop)
            torch.testing.assert_close(layer.experts.grad[mine], reference.experts.grad[mine], **close)
            gathered = rank.all_gather((layer.router.grad, layer.bias.grad))
            torch.testing.assert_close(sum(g for g, _ in gathered), reference.router.grad, **close)
            torch.testing.assert_close(sum(g for _, g in gathered), reference.bias.grad, **close)

    run(RANKS, one)


@pytest.mark.parametrize("options", LAYOUTS)
def test_a_training_run_equals_the_dense_one(options):
    steps = 12

    def one(rank: Rank) -> list[float]:
        ep, layer, losses = rank.make(**SPEC, **options), Layer(), []
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
        for turn in range(steps):
            x = batch(turn, rank.rank).requires_grad_()
            loss = loss_of(layer.parallel(ep, x))
            optimizer.zero_grad()
            loss.backward()
            for parameter in layer.parameters():
                parameter.grad = sum(rank.all_gather(parameter.grad))
            optimizer.step()
            losses.append(sum(rank.all_gather(loss.item())))
        return losses

    layer, expected = Layer(), []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for turn in range(steps):
        loss = sum(loss_of(layer.dense(batch(turn, rank))) for rank in range(RANKS))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    first, *rest = run(RANKS, one)
    assert all(losses == first for losses in rest)
    assert len(set(first)) == steps, "the loss must move"
    np.testing.assert_allclose(first, expected, rtol=1e-4)


@pytest.mark.parametrize("options", LAYOUTS)
def test_gradcheck_by_differences(options):
    """Numeric derivatives of everything differentiable, in whole powers of two so that float32 loses nothing."""

    def one(rank: Rank) -> None:
        ep = rank.make(**SPEC, **options)
        rng = np.random.default_rng(rank.rank)
        x = torch.from_numpy(rng.integers(-4, 5, (3, HIDDEN)).astype(np.float32))
        idx = torch.from_numpy(np.argsort(rng.random((3, EXPERTS)), axis=1)[:, :TOP_K].copy())
        weights = torch.from_numpy(rng.integers(-4, 5, (3, TOP_K)).astype(np.float32))

        def value(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            out = hal.torch.dispatch(ep, x, idx, weights)
            weighted = ep.spec.layout == "expert"
            factor = 2 if weighted else out.topk_weights.sum(dim=-1, keepdim=True)
            return hal.torch.combine(ep, out.x * factor, out.handle, weighted=weighted).sum()

        x.requires_grad_()
        weights.requires_grad_()
        value(x, weights).backward()
        for array in (x, weights):
            flat, grad = array.detach().view(-1), array.grad.view(-1)
            for i in range(flat.numel()):  # linear in each element, so the central difference is exact
                ends = []
                for step in (1.0, -1.0):
                    flat[i] += step
                    ends.append(value(x.detach(), weights.detach()).item())
                    flat[i] -= step
                assert grad[i].item() == (ends[0] - ends[1]) / 2

    run(RANKS, one)


def test_rows_may_be_changed_in_place():
    def one(rank: Rank) -> None:
        for dtype in ("float32", "bfloat16"):
            ep = rank.make(**{**SPEC, "dtype": dtype})
            x = torch.ones(4, HIDDEN, dtype=getattr(torch, dtype), requires_grad=True)
            out = hal.torch.dispatch(ep, x, torch.arange(TOP_K).expand(4, -1).contiguous())
            y = hal.torch.combine(ep, out.x.mul_(2), out.handle)
            y.sum().backward()
            torch.testing.assert_close(x.grad, torch.full_like(x, 2))

    run(1, one)


def test_a_reused_handle_has_gradients_too():
    def one(rank: Rank) -> None:
        ep = rank.make(**SPEC)
        idx = torch.arange(TOP_K).expand(4, -1).contiguous()
        first = hal.torch.dispatch(ep, torch.zeros(4, HIDDEN), idx)
        x = torch.ones(4, HIDDEN, requires_grad=True)
        out = hal.torch.dispatch(ep, x, handle=first.handle)
        hal.torch.combine(ep, out.x * 3, out.handle).sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, 3))

    run(1, one)


def test_what_cannot_be_trained_is_refused():
    def one(rank: Rank) -> None:
        idx = torch.arange(TOP_K).expand(2, -1).contiguous()
        for dtype in QUANTISED_DTYPES:
            quantised = rank.make(**{**SPEC, "hidden": 16, "dtype": dtype})
            x = torch.zeros(2, 16).to(getattr(torch, dtype))
            if dtype != "int8":  # torch itself gives no gradient to integers
                with pytest.raises(ContractError, match=f"gradients cannot travel as {dtype}"):
                    hal.torch.dispatch(quantised, x.clone().requires_grad_(), idx)
            out = hal.torch.dispatch(quantised, x, idx)
            with pytest.raises(ContractError, match="gradients cannot travel"):
                hal.torch.combine(quantised, torch.zeros(2, 16, dtype=torch.bfloat16, requires_grad=True), out.handle)
        ep = rank.make(**SPEC, layout="expert")
        plain = ep.dispatch(torch.zeros(2, HIDDEN), idx)
        with pytest.raises(ContractError, match=r"use hal\.torch\.dispatch's handle"):
            hal.torch.combine(ep, plain.x, plain.handle, weighted=True)

    run(1, one)


def test_nothing_is_kept_after_backward():
    """A graph that referred to itself would hold its receive slot for ever."""

    def one(rank: Rank) -> None:
        ep = rank.make(**SPEC, layout="expert")
        x = torch.ones(4, HIDDEN, requires_grad=True)
        weights = torch.ones(4, TOP_K, requires_grad=True)
        out = hal.torch.dispatch(ep, x, torch.arange(TOP_K).expand(4, -1).contiguous(), weights)
        alive = weakref.ref(out.x), weakref.ref(out.topk_weights)
        y = hal.torch.combine(ep, out.x * 2, out.handle, weighted=True)
        y.sum().backward()
        del out, y
        assert [ref() for ref in alive] == [None, None]

    gc.disable()
    try:
        run(1, one)
    finally:
        gc.enable()
