# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine in CUDA graphs, captured once and replayed with other tokens and routings, bit for bit against
hal.reference: what tests/test_cuda_graphs.py runs on emulated GPUs and tests/cuda on real ones. Every body takes the rank's
communicator first."""

from __future__ import annotations

import gc
import random
import threading
import time
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from cuda_streams import stream_of
from hosts_rounds import HostsCase, layer_of, one_round
from layer import BY_ROW, FIELDS, Array, Expected, Tokens, in_use, same

import hal
from hal.arrays import as_buffer, to_kind
from hal.errors import ContractError, PeerTimeout

Results = dict[str, Any]


@lru_cache(maxsize=256)
def batch(case: HostsCase, shape: int, seed: int) -> tuple[list[Tokens], Expected]:
    """Every rank's tokens: as many as the graphs of this ``shape`` take, the last of them padded by ids of -1."""
    rng = np.random.default_rng([seed, 11])
    sent = [Tokens(case, case.max_tokens - (3 * rank + shape) % 5, [seed, rank]) for rank in range(case.ranks)]
    for tokens in sent:
        if seed % 3 == 2:  # most to the first experts
            keys = rng.random((len(tokens.x), case.num_experts)) * (1 + np.arange(case.num_experts)) ** 2
            tokens.topk_idx = np.where(tokens.topk_idx < 0, -1, np.argsort(keys, axis=1)[:, : case.top_k])
        tokens.topk_idx[len(tokens.x) - int(rng.integers(0, len(tokens.x) + 1)) * (seed % 2) :] = -1
    return sent, Expected(case, sent)


@lru_cache(maxsize=256)
def wanted(case: HostsCase, shape: int, seed: int) -> tuple[list[Array], list[Array], list[Array], Any, Any]:
    """The experts' made-up answers, weights to carry, biases; the sums of the rows as they came (of quantised ones: of the
    answers), and those of the answers with the weights that came home."""
    sent, expected = batch(case, shape, seed)
    weighted = {"weighted": True} if case.layout == "expert" else {}
    answers, rng = expected.answers(seed), np.random.default_rng(seed)
    carried = [rng.standard_normal(rows.topk_weights.shape).astype(np.float32) for rows in expected.rows]
    bias = [rng.standard_normal(t.x.shape).astype(np.float32).astype(answers[0].dtype) for t in sent]
    plain = expected.combine(answers if case.scale_dim else [rows.x for rows in expected.rows], **weighted)
    full = expected.combine(answers, topk_weights=carried, bias=[[b] for b in bias], **weighted)
    return answers, carried, bias, plain, full


def tensor(ep: hal.ExpertParallel, array: Array) -> Any:
    """On the device of ``ep``, also where that is host memory."""
    engine: Any = ep._engine
    return to_kind(as_buffer(array.copy()), "torch").to(engine.device)


class Captured:
    """One graph, and the arrays that it reads and writes.

    It has every form of dispatch and combine: combine of the received rows where they lie, of ``ep.expert_output``, and of
    rows elsewhere with weights to carry and a bias; and a dispatch that reuses the handle. ``halves``: each call as its two.
    """

    def __init__(
        self,
        comm: hal.Communicator,
        ep: hal.ExpertParallel,
        case: HostsCase,
        on: Any,
        *,
        shape: int = 0,
        halves: bool = False,
    ) -> None:
        self.ep, self.case, self.on, self.shape, self.rank, self.halves = ep, case, on, shape, comm.rank, halves
        self.engine: Any = ep._engine
        self.weighted = case.layout == "expert"
        mine = batch(case, shape, 0)[0][self.rank]
        names = ("x", "topk_idx", "topk_weights", *(["scales"] if case.scale_dim else []))
        self.given = {name: tensor(self.ep, getattr(mine, name)) for name in names}
        combined = getattr(torch, case.combine_dtype)
        on.synchronize()
        comm.barrier()
        with on.capture() as self.graph:
            out = self._dispatch(**self.given)
            # Empty, since a graph would fill them anew.
            self.answers, self.carried = torch.empty_like(out.x, dtype=combined), torch.empty_like(out.topk_weights)
            self.bias = torch.empty_like(self.given["x"], dtype=combined)
            self.results = self._rest(out, self.given, (self.answers, self.carried, self.bias))
        comm.barrier()

    def _dispatch(self, x: Any, **given: Any) -> hal.Dispatched:
        return self.ep.dispatch_recv(self.ep.dispatch_send(x, **given)) if self.halves else self.ep.dispatch(x, **given)

    def _combine(self, x: Any, handle: hal.Handle, bias: Any = None, **options: Any) -> Any:
        options["weighted"] = self.weighted
        if self.halves:
            return self.ep.combine_recv(self.ep.combine_send(x, handle, **options), bias=bias)
        return self.ep.combine(x, handle, bias=bias, **options)

    def _rest(self, out: hal.Dispatched, given: Results, extra: tuple[Any, Any, Any]) -> Results:
        """What follows the dispatch, and all results. ``kept``: what must last as long as work with it may be done."""
        answers, carried, bias = extra
        plain = answers if self.case.scale_dim else out.x  # of the combined type
        y = self._combine(plain, out.handle)
        output = self.ep.expert_output(out.handle, plain)
        self.on.copy(output, plain)
        of_output = self._combine(output, out.handle)
        # In the window it holds combine's slot; elsewhere it is an array, which on emulated GPUs no allocator keeps.
        in_window = self.engine._offset_of(output.data_ptr(), output.nbytes) >= 0
        kept = (out, None if in_window else output)
        del output
        of_answers, home = self._combine(answers, out.handle, topk_weights=carried, bias=bias)
        again = self._dispatch(**{name: a for name, a in given.items() if name != "topk_idx"}, handle=out.handle)
        of_again = self._combine(answers if self.case.scale_dim else again.x, again.handle)
        results: Results = {name: getattr(out, name) for name in FIELDS}
        results |= {f"{name}_again": getattr(again, name) for name in BY_ROW}
        results |= {"y": y, "y_of_output": of_output, "y_of_answers": of_answers, "y_again": of_again, "carried": home}
        return {**results, "kept": (*kept, again)}

    def replay(self, seed: int, bad: int | None = None) -> Results:
        """With the batch of ``seed``, in the stream's order; the results are there once the stream has come that far.
        ``bad``: rank 1 gives this id, which breaks the contract."""
        sent, expected = batch(self.case, self.shape, seed)
        mine = sent[self.rank]
        answers, carried, bias, *_ = wanted(self.case, self.shape, seed)
        with self.on.current():
            kept = []
            for name, to in self.given.items():
                kept.append(tensor(self.ep, getattr(mine, name)))
                if bad is not None and name == "topk_idx" and self.rank == 1:
                    kept[-1][len(to) // 2] = bad
                self.on.copy(to, kept[-1])
            for to, array in ((self.answers, answers[self.rank]), (self.carried, carried[self.rank])):
                self.on.poison(to)  # also the rows that nobody sent
                kept.append(tensor(self.ep, array))
                if len(array):
                    self.on.copy(to[: len(array)], kept[-1])
            kept.append(tensor(self.ep, bias[self.rank]))
            self.on.copy(self.bias, kept[-1])
            # Rows that will be padding hold what the round before left there, and are not the caller's to write.
            filled = np.flatnonzero(np.diff(in_use(self.case, expected.rows[self.rank]), prepend=False, append=False))
            for name, array in self._arrays(self.results).items():
                by_row = name.removesuffix("_again") in BY_ROW
                for begin, end in filled.reshape(-1, 2) if by_row else [(0, len(array))]:
                    self.on.poison(array[begin:end])
            self.graph.replay()
            return {"kept": kept, **self._saved(self.results)}

    def call(self, seed: int) -> Results:
        """The same batch by calls outside the graph, on its stream."""
        mine = batch(self.case, self.shape, seed)[0][self.rank]
        answers, carried, bias, *_ = wanted(self.case, self.shape, seed)
        with self.on.current():
            given = {name: tensor(self.ep, getattr(mine, name)) for name in self.given}
            answer, carry, add = (tensor(self.ep, arrays[self.rank]) for arrays in (answers, carried, bias))
            results = self._rest(self._dispatch(**given), given, (answer, carry, add))
            return {"kept": (given, answer, carry, add, results), **self._saved(results)}

    @staticmethod
    def _arrays(results: Results) -> Results:
        return {name: array for name, array in results.items() if name != "kept" and array is not None}

    def _saved(self, results: Results) -> Results:
        saved = {name: torch.empty_like(array) for name, array in self._arrays(results).items()}
        for name, array in saved.items():
            self.on.copy(array, results[name])
        return saved

    def check(self, seed: int, results: Results) -> None:
        """Once the stream was synchronised."""
        expected = batch(self.case, self.shape, seed)[1]
        *_, plain, (sums, home) = wanted(self.case, self.shape, seed)
        rows = expected.rows[self.rank]
        n = len(rows.x)
        for turn in ("", "_again"):
            for name in BY_ROW:
                if getattr(rows, name) is None:
                    continue
                given = results[name + turn]
                same(f"{name}{turn} of {seed}", given[:n], getattr(rows, name))
                rest = given[n:]
                assert bool((rest == -1).all()) if name == "topk_idx" else not bool(rest.view(torch.uint8).any()), name
        same("tokens_per_expert", results["tokens_per_expert"], rows.tokens_per_expert)
        if rows.expert_offsets is not None:
            same("expert_offsets", results["expert_offsets"], rows.expert_offsets)
        for name in ("y", "y_of_output", "y_again"):
            same(f"{name} of {seed}", results[name], plain[self.rank])
        same(f"y_of_answers of {seed}", results["y_of_answers"], sums[self.rank])
        same("carried", results["carried"], home[self.rank])


def replays(comm: hal.Communicator, case: HostsCase, seeds: list[int], halves: bool = False) -> None:
    """One graph, each replay checked before the next; and calls outside it, in host memory's way, in between."""
    layer, on = layer_of(comm, case), stream_of(comm)
    with layer.ep as ep:
        one_round(layer, case, 0)
        captured = Captured(comm, ep, case, on, halves=halves)
        for seed in seeds:
            results = captured.replay(seed)
            on.synchronize()
            captured.check(seed, results)
            if seed % 2:
                one_round(layer, case, seed, halves=seed % 4 == 1)
                on.synchronize()
            comm.barrier()
        del captured, results
    gc.collect()


def alternating(comm: hal.Communicator, case: HostsCase, seeds: list[int], chance: int) -> None:
    """Two graphs of one ExpertParallel, with other token counts, and calls outside them, in an order that all ranks share;
    a rank may replay what another calls. Nobody waits between rounds, and ranks are late at random."""
    on = stream_of(comm)
    shared, own = random.Random(chance), random.Random(1000 * chance + comm.rank)
    with layer_of(comm, case).ep as ep:
        graphs = [Captured(comm, ep, case, on, shape=shape, halves=shape == chance % 3) for shape in (0, 1)]
        todo: list[tuple[Captured, int, Results]] = []
        for turn, seed in enumerate(seeds):
            captured = graphs[shared.randrange(2)]
            if own.random() < 0.3:
                time.sleep(own.random() * 0.02)
            results = captured.call(seed) if own.random() < 0.4 else captured.replay(seed)
            todo.append((captured, seed, results))
            del results
            if turn % 3 == 2 or turn == len(seeds) - 1:
                on.synchronize()
                while todo:
                    which, given, results = todo.pop()
                    which.check(given, results)
                    del which, results
        comm.barrier()
        del captured, graphs
    gc.collect()


def held(comm: hal.Communicator, case: HostsCase, seeds: list[int]) -> tuple[int, int]:
    """Replays while the caller holds what a call outside received, and while such a call is between its halves. In how many
    of them a slot was offered for their rows that is not the one that they were captured with (schedule latency); and how
    often what was held were views."""
    layer, on = layer_of(comm, case), stream_of(comm)
    moved, views, rank = 0, 0, comm.rank
    with layer.ep as ep:
        # While this is held the graph's results are copied out, so that views may be given later.
        first = ep.dispatch(**layer.arguments(batch(case, 1, 0)[0][rank]))
        on.synchronize()
        captured = Captured(comm, ep, case, on)
        del first
        before: list[tuple[hal.Dispatched, Expected]] = []  # held for one turn more
        for seed in seeds:
            sent, expected = batch(case, 1, seed)
            arguments = layer.arguments(sent[rank])
            view = ep.dispatch(**arguments)
            x = as_buffer(view.x)
            views += captured.engine._offset_of(x.ptr, x.nbytes) >= 0
            del x
            pending = ep.dispatch_send(**arguments)
            moved += captured.engine._slots._offered is not None
            on.synchronize()
            results = captured.replay(seed)
            on.synchronize()
            out = ep.dispatch_recv(pending)
            captured.check(seed, results)
            before.append((view, expected))
            for received, rows in (*before, (out, expected)):
                for name in FIELDS:
                    same(f"{name} at {seed}", getattr(received, name), getattr(rows.rows[rank], name))
            y = ep.combine(view.x, out.handle, **({"weighted": True} if case.layout == "expert" else {}))
            same("y", y, wanted(case, 1, seed)[3][rank])
            del view, out, pending, results, y, received, before[:-1]
        del captured, before
    gc.collect()
    return moved, views


def refused(comm: hal.Communicator, case: HostsCase) -> None:
    """Ids of one rank break the contract in a replay, also in the graph's first: the next call of every rank says so, and
    replays and calls after it are right. What is launched in that replay by its handle waits for nobody."""
    on = stream_of(comm)
    with layer_of(comm, case).ep as ep:
        captured = Captured(comm, ep, case, on)
        for seed, bad in enumerate([case.num_experts, -7, 0, 2**31 - 1]):  # 0: at every position of the token
            kept = captured.replay(seed, bad)
            on.synchronize()
            comm.barrier()
            with pytest.raises(
                ContractError, match=("twice" if bad == 0 else str(bad)) if comm.rank == 1 else "rank 1"
            ):
                captured.call(seed)
            comm.barrier()
            results = captured.call(seed) if seed % 2 else captured.replay(seed)
            on.synchronize()
            captured.check(seed, results)
            del results, kept
        del captured
    gc.collect()


def absent(comm: hal.Communicator, case: HostsCase, told: threading.Event) -> int | None:
    """Rank 1 does not replay what the others do. Whom the error of their next call names."""
    on = stream_of(comm)
    with comm.expert_parallel(**case.settings, timeout=3.0) as ep:
        captured = Captured(comm, ep, case, on)
        if comm.rank == 1:
            told.wait(100)
            return None
        kept = captured.replay(1)
        on.synchronize()
        with pytest.raises(PeerTimeout) as error:
            captured.call(1)
        told.set()
        del kept
        return error.value.rank


def output_after_a_capture(comm: hal.Communicator, case: HostsCase) -> None:
    """Peers may read an expert's output until the next dispatch; one that is only captured does not end that."""
    on = stream_of(comm)
    with comm.expert_parallel(**case.settings) as ep:
        engine: Any = ep._engine
        mine = batch(case, 0, 1)[0][comm.rank]
        x, ids = tensor(ep, mine.x), tensor(ep, mine.topk_idx)

        def in_window() -> bool:
            output = ep.expert_output(handle, x)
            return bool(engine._offset_of(output.data_ptr(), output.nbytes) >= 0)

        with on.current():
            handle = ep.dispatch(x, ids).handle
            assert in_window()
            output = ep.expert_output(handle, x)
            on.poison(output)
            y = ep.combine(output, handle)
            del output
            assert not in_window()
        comm.barrier()
        with on.capture():
            kept = ep.dispatch(x, ids)
        comm.barrier()
        with on.current():
            assert not in_window()
            again = ep.dispatch(x, ids)
            assert in_window()
        on.synchronize()
        del kept, again, y
    gc.collect()
