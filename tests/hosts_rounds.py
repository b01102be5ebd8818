# SPDX-License-Identifier: Apache-2.0
"""Rounds over several hosts, bit for bit against hal.reference: what tests/test_cuda_hosts.py runs on emulated GPUs and
tests/cuda/test_hosts_on_gpus.py on real ones. Every body takes the rank's communicator first."""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "contract"))

from cases import Case
from layer import Array, Expected, Layer, Tokens, same
from targets import NUMPY_DTYPES, Target, poison

import hal
from hal.arrays import as_buffer
from hal.errors import ContractError, PeerTimeout


@dataclass(frozen=True)
class HostsCase(Case):
    """``max_tokens`` and experts of a rank to choose, and how unevenly experts are."""

    max_tokens: int = 24
    experts_per_rank: int = 2
    skew: float = 0.0

    @property
    def num_experts(self) -> int:
        return max(self.ranks * self.experts_per_rank, self.ranks * -(-self.top_k // self.ranks))

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "max_tokens": self.max_tokens}


def a_case(schedule: str, layout: str, shape: tuple[int, int], **changes: Any) -> HostsCase:
    """``shape``: ranks and hosts."""
    plain = {"dtype": "bfloat16", "alignment": 1, "top_k": 3, "num_buffers": 2, "hidden": 32}
    return HostsCase(schedule, layout, "strong_signal", shape=shape, **{**plain, **changes})


FORMS = [("direct", (3, 1)), ("latency", (3, 1)), ("direct", (4, 2)), ("hierarchical", (4, 2)), ("latency", (4, 2))]
"""Schedules, with ranks and hosts."""
FORM_NAMES = [f"{schedule}-{hosts}x{ranks // hosts}" for schedule, (ranks, hosts) in FORMS]


def run_emulated(body: Any, case: Case, *args: Any, timeout: float = 60.0) -> list[Any]:
    """``body(comm, case, *args)`` on ranks with emulated GPUs."""
    config = hal.HalConfig("cuda", "gin_emulated", hal.TopologyConfig(case.nodes), timeout=timeout)
    return hal.spawn(case.ranks, body, case, *args, config=config)


@lru_cache(maxsize=256)
def batch(case: HostsCase, seed: int) -> tuple[list[Tokens], Expected]:
    """Every rank's tokens, any number of them, some ranks none; and what comes of them."""
    rng = np.random.default_rng([seed, 7])
    sizes = [0 if rng.random() < 0.15 else int(rng.integers(0, case.max_tokens + 1)) for _ in range(case.ranks)]
    if seed == 0:
        sizes = [case.max_tokens] * case.ranks
    sent = [Tokens(case, size, [seed, rank]) for rank, size in enumerate(sizes)]
    if case.skew:
        chance = 1.0 / (1.0 + rng.permutation(case.num_experts)) ** case.skew
        for tokens in sent:
            keys = rng.random((len(tokens.x), case.num_experts)) ** (1.0 / chance)
            ids = np.argsort(-keys, axis=1)[:, : case.top_k]
            tokens.topk_idx = np.where(tokens.topk_idx < 0, -1, ids)
    return sent, Expected(case, sent)


@lru_cache(maxsize=256)
def sums(case: HostsCase, seed: int, weighted: bool, biases: int) -> tuple[list[Array], list[list[Array]], list[Array]]:
    """Made-up answers of the experts, biases, and every rank's result."""
    sent, expected = batch(case, seed)
    answers = expected.answers(seed + 1)
    rng, dtype = np.random.default_rng(seed), NUMPY_DTYPES[case.combine_dtype]
    bias = [[rng.standard_normal((len(t.x), case.hidden)).astype(dtype) for _ in range(biases)] for t in sent]
    return answers, bias, expected.combine(answers, weighted=weighted, bias=bias)


class OnThisDevice(Target):
    """Arrays go where the rank's ExpertParallel wants them."""

    def give(self, array: Array | None, rank: int) -> Any:
        if array is None or self.on_cpu:
            return array
        import torch

        return super().give(array, torch.cuda.current_device())


def layer_of(comm: hal.Communicator, case: Case) -> Layer:
    emulated = comm.config.transport == "gin_emulated"
    return Layer(OnThisDevice(comm.config.backend, comm.config.transport or "gin", "", emulated), case, comm)


def one_round(layer: Layer, case: HostsCase, seed: int, handle: Any = None, *, halves: bool = False) -> hal.Handle:
    """Dispatch, or dispatch again with the handle of the same seed, and combine in one of its forms."""
    (sent, expected), ep, rank, give = batch(case, seed), layer.ep, layer.rank, layer.target.give
    given = layer.arguments(sent[rank], **({} if handle is None else {"handle": handle}))
    out = ep.dispatch_recv(ep.dispatch_send(**given)) if halves else ep.dispatch(**given)
    handle = layer.check(out, expected)
    del out
    weighted, biases = case.layout == "expert" and seed % 2 == 0, seed % 3
    answers, bias, wanted = sums(case, seed, weighted, biases)
    options = {"weighted": weighted} if case.layout == "expert" else {}
    mine, my_bias = give(answers[rank], rank), [give(b, rank) for b in bias[rank]] or None
    if halves:
        y = ep.combine_recv(ep.combine_send(mine, handle, **options), bias=my_bias)
    else:
        y = ep.combine(mine, handle, bias=my_bias, **options)
    same("y", y, wanted[rank])
    return handle


def carried_weights(layer: Layer, case: HostsCase, seed: int, handle: hal.Handle) -> None:
    _, expected = batch(case, seed)
    answers, _, _ = sums(case, seed, False, 0)
    rng = np.random.default_rng(seed)
    carried = [rng.standard_normal(rows.topk_weights.shape).astype(np.float32) for rows in expected.rows]
    wanted, home = expected.combine(answers, topk_weights=carried)
    give, rank = layer.target.give, layer.rank
    y, weights = layer.ep.combine(give(answers[rank], rank), handle, topk_weights=give(carried[rank], rank))
    same("y", y, wanted[rank])
    same("topk_weights", weights, home[rank])


def every_form(comm: hal.Communicator, case: HostsCase, seeds: list[int]) -> None:
    """Each seed's batch in every form of dispatch and combine."""
    layer = layer_of(comm, case)
    with layer.ep:
        for seed in seeds:
            handle = one_round(layer, case, seed)
            carried_weights(layer, case, seed, handle)
            again = one_round(layer, case, seed, handle)
            carried_weights(layer, case, seed, again)
            one_round(layer, case, seed, halves=True)
            one_round(layer, case, seed, handle, halves=True)


def plain_rounds(comm: hal.Communicator, case: HostsCase, seeds: list[int]) -> None:
    """Dispatch and combine of each seed's batch, one after the other."""
    layer = layer_of(comm, case)
    for seed in seeds:
        one_round(layer, case, seed)
    layer.ep.close()


def skewed_ranks(comm: hal.Communicator, case: HostsCase, seeds: list[int], rounds: int) -> None:
    """Rounds one after the other, ranks late at random; handles of earlier rounds are used again."""
    layer = layer_of(comm, case)
    chance = random.Random(comm.rank)
    with layer.ep:
        kept: dict[int, hal.Handle] = {}
        order = random.Random(1)
        for _ in range(rounds):
            seed = order.choice(seeds)
            if chance.random() < 0.3:
                time.sleep(chance.random() * 0.01)
            reuses = order.random() < 0.3
            kept[seed] = one_round(layer, case, seed, kept.get(seed) if reuses else None, halves=order.random() < 0.3)


def in_flight(comm: hal.Communicator, case: HostsCase, seeds: list[int]) -> None:
    """Two dispatches on their way at once, and a combine between its halves beside them."""
    layer = layer_of(comm, case)
    ep, rank, give = layer.ep, comm.rank, layer.target.give
    with ep:
        handle = one_round(layer, case, seeds[0])
        answers, _, wanted = sums(case, seeds[0], False, 0)
        for one, two in pairwise(seeds[1:]):
            combining = ep.combine_send(give(answers[rank], rank), handle)
            first = ep.dispatch_send(**layer.arguments(batch(case, one)[0][rank]))
            second = ep.dispatch_send(**layer.arguments(batch(case, two)[0][rank]))
            same("y", ep.combine_recv(combining), wanted[rank])
            handle = layer.check(ep.dispatch_recv(first), batch(case, one)[1])
            layer.check(ep.dispatch_recv(second), batch(case, two)[1])
            answers, _, wanted = sums(case, one, False, 0)


def refusals(comm: hal.Communicator, case: HostsCase) -> None:
    """Ids that break the contract are refused by the kernel before a row moves, and so is a handle that not all ranks
    reuse; then rounds work. Below the interface, which looks at ids in host memory itself."""
    layer = layer_of(comm, case)
    engine, rank = layer.ep._engine, comm.rank

    def dispatch(tokens: Tokens, state: Any = None) -> Any:
        given = [as_buffer(layer.target.give(a, rank)) for a in (tokens.x, tokens.topk_idx)]
        return engine.dispatch(given[0], None if state else given[1], None, None, state, None)

    def in_halves(tokens: Tokens, on: int | None) -> None:
        """Refused by the first half, or with a stream by the second, before which the caller's arrays change."""
        given = [as_buffer(layer.target.give(a, rank)) for a in (tokens.x, tokens.topk_idx)]
        words = "twice" if rank == 1 else "rank 1 gave ids.*Dispatch again"
        if on is None:
            with pytest.raises(ContractError, match=words):
                engine.dispatch_send(*given, None, None, None, None)
            return
        sent = engine.dispatch_send(*given, None, None, None, on)
        engine.drain()
        poison(*(array.owner for array in given))
        with pytest.raises(ContractError, match=words):
            engine.dispatch_recv(sent, on)

    with layer.ep:
        one_round(layer, case, 0)
        for bad, word in ((case.num_experts, str(case.num_experts)), (-7, "-7"), (None, "twice")):
            tokens = Tokens(case, case.max_tokens, [5, rank], missing=0.0)
            tokens.topk_idx[3, 1] = tokens.topk_idx[3, 0] if bad is None else bad
            if rank == 1:
                with pytest.raises(ContractError, match=word):
                    dispatch(tokens)
            handle = one_round(layer, case, 2)  # the others' first try of it met rank 1's error, and moved nothing
        tokens = Tokens(case, case.max_tokens, [5, rank], missing=0.0)
        tokens.topk_idx[3, 1] = tokens.topk_idx[3, 0] if rank == 1 else tokens.topk_idx[3, 1]
        for on in (None, engine._session.stream):
            in_halves(tokens, on)
            one_round(layer, case, 1)
        with pytest.raises(ContractError, match="handle"):
            dispatch(batch(case, 2)[0][rank], handle._state if rank == 0 else None)
        one_round(layer, case, 2, handle)
        one_round(layer, case, 1)


@dataclass
class Absence:
    """Rank ``rank`` does not come to a call of round ``turn``: its dispatch, or its combine. ``closes``: it leaves; else it
    stays until ``told`` (ranks that are threads), or for ``seconds``."""

    rank: int
    turn: int = 1
    combine: bool = False
    closes: bool = False
    told: threading.Barrier | None = None
    seconds: float = 0.0


def absence(comm: hal.Communicator, case: HostsCase, absent: Absence) -> tuple[int, str, float]:
    """Whom this rank's error names, in which stage, and after how many seconds; (-1, "", 0) of the absent rank."""
    layer = layer_of(comm, case)
    rank, give = comm.rank, layer.target.give
    for turn in range(absent.turn):
        one_round(layer, case, turn)
    sent, expected = batch(case, 0)
    handle = layer.dispatch(sent[rank], expected) if absent.combine else None
    if rank == absent.rank:
        if absent.told is not None and not absent.closes:
            absent.told.wait(100)
        time.sleep(absent.seconds)
        return -1, "", 0.0
    start = time.monotonic()
    answer = give(expected.answers(0)[rank], rank)
    with pytest.raises(PeerTimeout) as error:
        layer.dispatch(sent[rank], expected) if handle is None else layer.ep.combine(answer, handle)
    seconds = time.monotonic() - start
    if absent.told is not None and not absent.closes:
        absent.told.wait(100)
    return error.value.rank, error.value.stage, seconds
