# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder run on each rank; every body takes the rank's communicator first."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import oracle
import pytest
import torch
from hal_cuda.facts import of_session

import hal
from hal.config import QUANTISED_DTYPES, ExpertParallelSpec
from hal.placing import settle

FIELDS = ("x", "scales", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets")


def same(name: str, given: Any, wanted: Any) -> None:
    """Equal in type, shape and every bit."""
    if wanted is None:
        assert given is None, name
        return
    assert (given.dtype, given.shape) == (wanted.dtype, wanted.shape), (
        name,
        given.dtype,
        given.shape,
        wanted.dtype,
        wanted.shape,
    )
    if given.numel() == 0:
        return
    a, b = (
        given.contiguous().view(torch.uint8).view(len(given), -1),
        wanted.contiguous().view(torch.uint8).view(len(wanted), -1),
    )
    wrong = (a != b).any(1).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise AssertionError(
            f"{name}: {len(wrong)} of {len(given)} rows differ, first {wrong[:8].tolist()}; row {row}: "
            f"{given[row].flatten()[:6]} where {wanted[row].flatten()[:6]} is right"
        )


def poison(*arrays: Any) -> None:
    for array in arrays:
        if array is not None and array.numel():
            array.view(torch.uint8).fill_(0xEE)


def device_of(comm: hal.Communicator) -> str:
    """Where its tensors are; emulated GPUs take the host's."""
    return str(comm._session.device_name)


class Round:
    """One batch through dispatch and combine, compared with the oracle."""

    def __init__(self, comm: hal.Communicator, ep: Any, counts: list[int], seed: int, skew: float = 0.0) -> None:
        self.ep, self.spec, self.me = ep, ep.spec, comm.rank
        self.world = comm.world_size
        self.device = torch.device(ep._engine.device)
        self.batch = oracle.inputs(self.spec, counts, seed, self.device, skew)
        self.rows = [oracle.dispatch(self.spec, self.batch, r) for r in range(self.world)]
        self.seed = seed

    def arguments(self, handle: Any = None) -> dict[str, Any]:
        me = self.me
        given = {"x": self.batch.x[me].clone(), "topk_weights": self.batch.topk_weights[me].clone()}
        if self.batch.scales[me] is not None:
            given["scales"] = self.batch.scales[me].clone()
        if handle is None:
            idx = self.batch.topk_idx[me]
            given["topk_idx"] = idx.int() if self.seed % 2 else idx.clone()
        else:
            given["handle"] = handle
        return given

    def used(self) -> Any:
        """Which rows are not padding; what a caller puts into the others may stay there (docs/contract.md, section 1)."""
        return self.rows[self.me].used

    def check(self, out: Any) -> None:
        wanted = self.rows[self.me]
        for name in FIELDS:
            same(name, getattr(out, name), getattr(wanted, name))

    def dispatch(self, handle: Any = None, halves: bool = False) -> Any:
        given = self.arguments(handle)
        out = self.ep.dispatch_recv(self.ep.dispatch_send(**given)) if halves else self.ep.dispatch(**given)
        poison(*given.values()) if handle is None else None
        self.check(out)
        return out

    def combine(
        self,
        handle: Any,
        seed: int,
        *,
        into: Any = None,
        halves: bool = False,
        by_rank: bool = False,
        poisons: bool = True,
        **options: Any,
    ) -> Any:
        answers = oracle.answers(self.spec, [len(r.x) for r in self.rows], seed, self.device)
        mine = answers[self.me].clone()
        if into is not None:
            used = self.used()
            into[used] = mine[used]
            mine = into
        weighted = options.get("weighted", False)
        bias = tuple(
            torch.randn(self.batch.x[self.me].shape, device=self.device).to(mine.dtype)
            for _ in range(options.pop("biases", 0))
        )
        carried = None
        if options.pop("carry", False):
            generator = torch.Generator().manual_seed(seed + 1)
            carried = [torch.randn(r.topk_weights.shape, generator=generator).to(self.device) for r in self.rows]
            options["topk_weights"] = carried[self.me].clone()
        if halves:
            options.pop("weighted", None)
            y = self.ep.combine_recv(
                self.ep.combine_send(mine, handle, weighted=weighted, **options), bias=bias or None
            )
        else:
            y = self.ep.combine(mine, handle, bias=bias or None, **options)
        if poisons and into is None:
            poison(mine)
        elif poisons:
            into.view(torch.uint8)[self.used()] = 0xEE
        if carried is not None:
            y, weights = y
            same("weights", weights, oracle.weights_home(self.spec, self.batch, self.rows, carried, self.me))
        same(
            "y",
            y,
            oracle.combine(
                self.spec, self.batch, self.rows, answers, self.me, weighted=weighted, bias=bias, by_rank=by_rank
            ),
        )
        return y


def spread(sizes: list[int], ranks: int) -> list[int]:
    """Tokens of every rank: those given, by turns."""
    return [sizes[rank % len(sizes)] for rank in range(ranks)]


def divided(settings: dict[str, Any], ranks: int) -> dict[str, Any]:
    """``settings`` with at least their number of experts, as many on each rank."""
    return {**settings, "num_experts": -(-settings["num_experts"] // ranks) * ranks}


def rounds(comm: hal.Communicator, settings: dict[str, Any], counts: list[list[int]], options: dict[str, Any]) -> None:
    """Rounds of the given token counts through one ExpertParallel, in every form that dispatch and combine have."""
    with comm.expert_parallel(**divided(settings, comm.world_size)) as ep:
        expert = ep.spec.layout == "expert"
        other = ep.spec.dtype != ep.spec.combine_dtype
        by_rank = ep.spec.schedule == "hierarchical" and comm.config.topology.nodes > 1
        for number, sizes in enumerate(counts):
            seed = 101 * number + options.get("seed", 1)
            r = Round(comm, ep, spread(sizes, comm.world_size), seed, options.get("skew", 0.0))
            out = r.dispatch()
            r.combine(out.handle, 7, by_rank=by_rank)
            r.combine(out.handle, 8, into=None if other else out.x, weighted=expert, biases=number % 3, by_rank=by_rank)
            r.combine(out.handle, 9, carry=True, by_rank=by_rank)
            handle = out.handle
            del out
            again = r.dispatch(handle)
            r.combine(again.handle, 10, weighted=expert, carry=True, biases=1, by_rank=by_rank)
            del again
            output = ep.expert_output(handle, r.batch.x[r.me])
            r.combine(handle, 12, into=output, weighted=expert, by_rank=by_rank, poisons=False)
            del output
            halves = r.dispatch(halves=True)
            r.combine(halves.handle, 11, halves=True, weighted=expert, biases=2, carry=number % 2 == 0, by_rank=by_rank)
            handle = halves.handle
            del halves
            r.dispatch(handle, halves=True)
    gc.collect()


def large(comm: hal.Communicator, settings: dict[str, Any], counts: list[int], options: dict[str, Any]) -> None:
    """One large round, with results compared whole."""
    with comm.expert_parallel(**settings) as ep:
        by_rank = ep.spec.schedule == "hierarchical" and comm.config.topology.nodes > 1
        r = Round(comm, ep, spread(counts, comm.world_size), 3, options.get("skew", 0.0))
        for i in range(2):
            out = r.dispatch()
            into = None if ep.spec.dtype in QUANTISED_DTYPES or i else out.x
            r.combine(out.handle, 5 + i, into=into, by_rank=by_rank)
    gc.collect()


def words(comm: hal.Communicator) -> None:
    """Puts, signals, waits, quiets and barriers of every rank to the next."""
    me, device = comm.rank, device_of(comm)
    peer, source = (me + 1) % comm.world_size, (me - 1) % comm.world_size
    window = comm.window(1 << 20)
    queue = comm.queue(0)
    mine = torch.as_tensor(hal.to_kind(window.buffer, torch.empty(0)), device=device)
    for turn in range(1, 30):
        data = torch.full((1000 + turn,), turn + 25 * me, dtype=torch.uint8, device=device)
        settle(device)
        queue.put(window, 16 * turn + 1, data, peer)
        queue.signal(3, peer, 1)
        assert comm.wait(3, turn, source=source) >= turn
        assert bool((mine[16 * turn + 1 : 16 * turn + 1001 + turn] == turn + 25 * source).all())
        queue.quiet()
        comm.barrier()
    queue.put(window, 0, b"from the host's memory", peer, order="strong", signal=(4, 7, "set"))
    assert comm.wait(4, 7) == 7
    assert bytes(mine[:22].cpu().numpy()) == b"from the host's memory"
    comm.barrier()
    window.free()


def timeouts(comm: hal.Communicator) -> str:
    """Rank 1 stays away; the others must be told so, in time."""
    ep = comm.expert_parallel(num_experts=8, top_k=2, hidden=64, max_tokens=16, timeout=1.0)
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device_of(comm))
    idx = torch.tensor([[0, 5]] * 4, device=device_of(comm))
    if comm.rank == 1:
        time.sleep(4.0)
        return "slept"
    start = time.monotonic()
    with pytest.raises(hal.PeerTimeout) as told:
        ep.dispatch(x, idx)
    assert time.monotonic() - start < 3.0
    assert told.value.rank == 1
    return str(told.value)


def killed(comm: hal.Communicator) -> None:
    """Rank 1's process ends while the others' kernels wait for it; they must be told at once."""
    ep = comm.expert_parallel(num_experts=8, top_k=2, hidden=64, max_tokens=16, timeout=60.0)
    x = torch.zeros(4, 64, dtype=torch.bfloat16, device=device_of(comm))
    idx = torch.tensor([[0, 5]] * 4, device=device_of(comm))
    ep.dispatch(x, idx)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(1.0)
        os._exit(9)
    start = time.monotonic()
    with pytest.raises(hal.PeerTimeout, match="its process died") as told:
        ep.dispatch(x, idx)
    assert time.monotonic() - start < 4.0
    assert told.value.rank == 1


def refusals(comm: hal.Communicator) -> None:
    """Ids that break the contract are refused where they were given, before any row moves; the other ranks' dispatch is then
    for the next one given there."""
    device, local = device_of(comm), 8 // comm.world_size
    received = 4 * comm.world_size if comm.rank in (0 // local, 5 // local) else 0
    for layout in ("rank", "expert"):
        with comm.expert_parallel(num_experts=8, top_k=2, hidden=64, max_tokens=16, layout=layout) as ep:
            x = torch.ones(4, 64, dtype=torch.bfloat16, device=device)
            good = torch.tensor([[0, 5]] * 4, device=device)
            for bad, word in (([7, 8], "8"), ([3, 3], "twice"), ([-2, 1], "-2")):
                if comm.rank == 1:
                    ids = good.clone()
                    ids[2] = torch.tensor(bad, device=device)
                    with pytest.raises(hal.ContractError, match=word):
                        ep.dispatch(x, ids)
                assert len(ep.dispatch(x, good).x) == received
            handle = ep.dispatch(x, good).handle
            with pytest.raises(hal.ContractError, match="handle"):
                mixed(ep, x, good, handle if comm.rank == 0 else None)
            comm.barrier()


def mixed(ep: Any, x: Any, idx: Any, handle: Any) -> None:
    """One rank reuses a handle. With a stream its call does not wait, and it is told by the next one."""
    if handle is not None:
        ep.dispatch(x, handle=handle)
        ep._engine.drain()
    ep.dispatch(x, idx)


def many_rounds(comm: hal.Communicator, settings: dict[str, Any], number: int) -> None:
    """Many rounds, ranks delayed at random against each other, every result compared; views kept across rounds."""
    device = device_of(comm)
    random = torch.Generator().manual_seed(comm.rank)
    with comm.expert_parallel(**settings) as ep:
        most = ep.spec.max_tokens
        sizes = torch.randint(0, most + 1, (number, comm.world_size), generator=torch.Generator().manual_seed(9)).tolist()
        prepared = [Round(comm, ep, size, i) for i, size in enumerate(sizes[:25])]
        wanted = [
            oracle.combine(
                ep.spec, r.batch, r.rows, [rows.x for rows in r.rows], comm.rank, weighted=ep.spec.layout == "expert"
            )
            for r in prepared
        ]
        kept: list[Any] = []
        wrong = torch.zeros((), dtype=torch.int64, device=device)
        for i in range(number):
            r, y_wanted = prepared[i % len(prepared)], wanted[i % len(prepared)]
            if i % 7 == comm.rank and device.startswith("cuda"):
                torch.cuda._sleep(int(torch.randint(0, 400_000, (1,), generator=random)))
            if i % 50 == 13 + comm.rank:
                time.sleep(0.003)
            me = comm.rank
            out = ep.dispatch(r.batch.x[me], r.batch.topk_idx[me], r.batch.topk_weights[me])
            y = ep.combine(out.x, out.handle, weighted=ep.spec.layout == "expert")
            raw = torch.int16
            rows = r.rows[me]
            wrong += (
                (out.x.view(raw) != rows.x.view(raw)).sum()
                + (out.topk_idx != rows.topk_idx).sum()
                + (y.view(raw) != y_wanted.view(raw)).sum()
            )
            kept.append((out.x, rows.x))
            if len(kept) > i % 3:
                x, x_wanted = kept.pop(0)
                wrong += (x.view(raw) != x_wanted.view(raw)).sum()
            del out, y
        assert int(wrong) == 0, int(wrong)
        kept.clear()
    gc.collect()


def frameworks(comm: hal.Communicator) -> None:
    """CuPy and JAX arrays in and out."""
    import cupy

    with comm.expert_parallel(num_experts=8, top_k=2, hidden=64, max_tokens=16, dtype="float32") as ep:
        r = Round(comm, ep, spread([9, 5], comm.world_size), 4)
        me = comm.rank
        with cupy.cuda.Device(me):
            out = ep.dispatch(
                cupy.asarray(r.batch.x[me]), cupy.asarray(r.batch.topk_idx[me]), cupy.asarray(r.batch.topk_weights[me])
            )
            assert isinstance(out.x, cupy.ndarray)
            y = ep.combine(out.x, out.handle)
            assert isinstance(y, cupy.ndarray)
            cupy.cuda.Device(me).synchronize()
        same("x", torch.as_tensor(out.x, device=r.device), r.rows[me].x)
        same(
            "y",
            torch.as_tensor(y, device=r.device),
            oracle.combine(ep.spec, r.batch, r.rows, [rows.x for rows in r.rows], me),
        )
        del out, y
        import jax

        device = jax.devices()[me]
        with jax.default_device(device):
            given = [
                jax.device_put(a.cpu().numpy(), device)
                for a in (r.batch.x[me], r.batch.topk_idx[me].int(), r.batch.topk_weights[me])
            ]
            out = ep.dispatch(*given)
            assert isinstance(out.x, jax.Array)
            y = ep.combine(out.x, out.handle)
            assert isinstance(y, jax.Array)
        same("x", torch.from_dlpack(out.x), r.rows[me].x)
        same("y", torch.from_dlpack(y), oracle.combine(ep.spec, r.batch, r.rows, [rows.x for rows in r.rows], me))
        del out, y, given
    gc.collect()


def facts(comm: hal.Communicator) -> dict[str, Any]:
    return of_session(comm._session)


def symmetric_bytes(comm: hal.Communicator, spec: ExpertParallelSpec) -> int:
    with comm.expert_parallel(spec) as ep:
        return int(ep.buffer_bytes)
