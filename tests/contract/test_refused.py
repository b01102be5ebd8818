# SPDX-License-Identifier: Apache-2.0
"""docs/contract.md, section 3: what is refused before anything is sent; everything is usable afterwards.

The whole list with its numbers is tests/test_expert_parallel.py's; here, on real ranks, one rank errs and the others do
not, and the run goes on.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
import tables
from cases import CASES, PLAIN
from layer import Expected, Layer, batch, on_all_ranks
from targets import TIMEOUT

from hal.errors import CapacityError, ContractError, HalError, PeerTimeout


def arrays(layer: Layer, sent, **changes):
    return layer.arguments(sent[layer.rank]) | {n: layer.target.give(a, layer.rank) for n, a in changes.items()}


def bad_inputs(case):
    x, idx = np.zeros((4, case.hidden), np.float32), np.tile(np.arange(case.top_k), (4, 1))
    high, low, twice = idx.copy(), idx.copy(), idx.copy()
    high[2, 1], low[3, 0], twice[1, 2] = case.num_experts, -5, idx[1, 0]
    good = {"x": x, "topk_idx": idx, "topk_weights": np.ones(idx.shape, np.float32)}
    return {
        "hidden": ({**good, "x": x[:, :16].copy()}, r"\(4, 16\).*hidden=32"),
        "dtype": ({**good, "x": x.astype(np.float16)}, r"float16.*float32"),
        "idx shape": ({**good, "topk_idx": idx[:3].copy()}, r"\(3, 3\).*\(4, 3\)"),
        "idx dtype": ({**good, "topk_idx": idx.astype(np.uint8)}, "uint8"),
        "weights": ({**good, "topk_weights": np.ones((4, 1), np.float32)}, r"\(4, 1\).*\(4, 3\)"),
        "scales": ({**good, "scales": np.ones((4, 2), np.float32)}, "unexpected scales"),
        "high id": ({**good, "topk_idx": high}, rf"{case.num_experts}\b"),
        "low id": ({**good, "topk_idx": low}, "-5"),
        "twice": ({**good, "topk_idx": twice}, r"token 1 .*expert 0 twice"),
    }


@pytest.mark.parametrize("name", list(bad_inputs(PLAIN)))
def test_one_rank_errs_and_the_run_goes_on(target, name):
    sent = batch(PLAIN, 1, lambda r: 4)
    expected = Expected(PLAIN, sent)
    answers = expected.answers(1)
    wanted = expected.combine(answers)
    arguments, words = bad_inputs(PLAIN)[name]

    def body(layer: Layer) -> None:
        if layer.rank == 1:
            with pytest.raises(ContractError, match=words):
                layer.ep.dispatch(**{n: layer.target.give(a, layer.rank) for n, a in arguments.items()})
        handle = layer.dispatch(sent[layer.rank], expected)
        if layer.rank == 0:
            with pytest.raises(ContractError, match="rows the handle's dispatch received"):
                layer.ep.combine(layer.target.give(answers[0][1:].copy(), 0), handle)
        layer.combine(answers, handle, wanted)

    on_all_ranks(target, PLAIN, body)


def test_too_many_tokens_on_one_rank(target):
    sent = batch(PLAIN, 2)
    expected = Expected(PLAIN, sent)
    many = batch(PLAIN, 3, lambda r: 17)

    def body(layer: Layer) -> None:
        if layer.rank == 0:
            with pytest.raises(CapacityError, match=r"needed 17, given 16.*max_tokens=17"):
                layer.ep.dispatch(**layer.arguments(many[0]))
        layer.dispatch(sent[layer.rank], expected)

    on_all_ranks(target, PLAIN, body)


def test_settings_that_differ_between_ranks(target):
    sent = batch(PLAIN, 4)
    expected = Expected(PLAIN, sent)

    def body(comm) -> None:
        with pytest.raises(ContractError, match=r"hidden=64.*32"):
            comm.expert_parallel(**{**PLAIN.settings, "hidden": 64 if comm.rank else 32})
        with pytest.raises(ContractError, match=r"top_k=99"):
            comm.expert_parallel(**{**PLAIN.settings, "top_k": 99 if comm.rank else 3})
        Layer(target, PLAIN, comm).dispatch(sent[comm.rank], expected)

    target.run(PLAIN.ranks, PLAIN.nodes, body)


def test_a_rank_that_reuses_a_handle_while_another_exchanges_counts(target):
    sent = batch(PLAIN, 5, lambda r: 4)
    expected = Expected(PLAIN, sent)

    def body(layer: Layer) -> str:
        handle = layer.dispatch(sent[layer.rank], expected)
        with pytest.raises(ContractError) as error:
            layer.ep.dispatch(**layer.arguments(sent[layer.rank], **({"handle": handle} if layer.rank else {})))
        return str(error.value)

    for text in on_all_ranks(target, PLAIN, body):
        assert "handle" in text


def test_a_rank_that_stalls_is_named_when_the_time_is_up(target):
    sent = batch(PLAIN, 6)
    done = threading.Event()

    def body(comm) -> None:
        layer = Layer(target, PLAIN, comm, timeout=1.5)
        if comm.rank:
            assert done.wait(TIMEOUT)
            return
        with pytest.raises(PeerTimeout) as error:
            layer.ep.dispatch(**layer.arguments(sent[0]))
        done.set()
        assert (error.value.rank, error.value.stage.split()[0]) == (1, "dispatch")
        assert 1.4 < error.value.seconds < TIMEOUT / 4
        with pytest.raises(HalError, match="only be closed"):
            layer.ep.dispatch(**layer.arguments(sent[0]))

    target.run(PLAIN.ranks, PLAIN.nodes, body)


def test_a_rank_that_leaves_is_noticed_at_once(target):
    sent = batch(PLAIN, 6)

    def body(comm) -> None:
        layer = Layer(target, PLAIN, comm)
        if comm.rank == 0:
            with pytest.raises(PeerTimeout, match="closed its communicator") as error:
                layer.ep.dispatch(**layer.arguments(sent[0]))
            assert error.value.rank == 1
            assert error.value.seconds < TIMEOUT / 4

    target.run(PLAIN.ranks, PLAIN.nodes, body)


def test_a_closed_communicator_is_said_to_be_closed(target):
    sent = batch(PLAIN, 7)

    def body(comm) -> None:
        layer = Layer(target, PLAIN, comm)
        out = layer.ep.dispatch(**layer.arguments(sent[comm.rank]))
        comm.barrier()
        comm.close()
        for call in (
            lambda: layer.ep.dispatch(**layer.arguments(sent[comm.rank])),
            lambda: layer.ep.combine(out.x, out.handle),
        ):
            with pytest.raises(HalError, match="closed"):
                call()
        layer.ep.close()

    target.run(PLAIN.ranks, PLAIN.nodes, body)


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
def test_more_dispatches_in_flight_than_receive_slots(target, num_buffers):
    case = replace(PLAIN, num_buffers=num_buffers)
    sent = batch(case, 8)
    expected = Expected(case, sent)
    limit = max(1, num_buffers - 1)

    def body(layer: Layer) -> None:
        arguments = layer.arguments(sent[layer.rank])
        # Whether a rank still holds an earlier result must not decide what is refused: peers may hold none.
        held = layer.ep.dispatch(**arguments) if layer.rank % 2 else layer.ep.dispatch(**arguments).handle
        pending = [layer.ep.dispatch_send(**arguments) for _ in range(limit)]
        with pytest.raises(CapacityError, match=rf"needed {limit + 1}, given {limit}.*num_buffers"):
            layer.ep.dispatch_send(**arguments)
        for one in pending:
            layer.check(layer.ep.dispatch_recv(one), expected)
        layer.dispatch(sent[layer.rank], expected)
        del held

    on_all_ranks(target, case, body)


def test_use_after_close(target):
    sent = batch(PLAIN, 7)

    def body(comm) -> None:
        layer = Layer(target, PLAIN, comm)
        with layer.ep:
            out = layer.ep.dispatch(**layer.arguments(sent[comm.rank]))
            comm.barrier()
        with pytest.raises(ContractError, match="closed"):
            layer.ep.combine(out.x, out.handle)
        again = Layer(target, PLAIN, comm)
        again.ep.dispatch(**again.arguments(sent[comm.rank]))
        comm.barrier()

    target.run(PLAIN.ranks, PLAIN.nodes, body)


def test_what_the_tables_call_unsupported_is_refused(target):
    entries = [e for e in tables.UNSUPPORTED if e.covers(str(target), "*", None) or e.where]
    for entry in entries:
        fitting = (c for c in CASES if c.ranks <= target.ranks)
        case = next((c for c in fitting if entry.covers(str(target), "any", c)), None)
        if case is not None:

            def body(comm, case=case) -> None:
                with pytest.raises(ContractError):
                    comm.expert_parallel(**case.settings)

            target.run(case.ranks, case.nodes, body)
