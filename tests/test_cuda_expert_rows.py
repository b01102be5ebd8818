# SPDX-License-Identifier: Apache-2.0
"""Layout expert: whichever blocks push, keep and take a token's rows, each row is moved once (emulated GPUs)."""

from __future__ import annotations

from ctypes import string_at
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_emulator import EQUAL, Round, Scenario, Skewed, emulator, run
from hal_cuda import emulated
from hal_cuda.probe import probe_emulator

import hal

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)

PIECES = {"layout": "expert", "hidden": 2100, "num_experts": 6, "top_k": 3, "max_tokens": 25}
"""Rows of three pieces, of which the last is shorter."""


@pytest.mark.parametrize("schedule", ["direct", "latency"])
@pytest.mark.parametrize("push_warps", [1, 4])
@pytest.mark.parametrize("kind", [Round, Skewed])
def test_rows_of_several_pieces(monkeypatch, kind, push_warps, schedule):
    """One of three blocks pushes, or two do. Tokens go to other ranks only, to their own only, or nowhere."""
    usual = emulated.EmulatedCudaSession.tuning

    def tuning(self: Any, *arguments: Any) -> Any:
        return replace(usual(self, *arguments), push_warps=push_warps)

    monkeypatch.setattr(emulated.EmulatedCudaSession, "tuning", tuning)
    scenario = Scenario("pieces", ranks=3, settings={**PIECES, "schedule": schedule})
    rounds = [kind(scenario, number) for number in range(3)]
    for seed in range(2):
        with emulator(seed):
            assert run(scenario, rounds) == EQUAL, seed


@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_one_rank_has_nobody_to_push_to(schedule):
    scenario = Scenario("alone", ranks=1, settings={**PIECES, "schedule": schedule})
    assert run(scenario, [Skewed(scenario, 1)]) == EQUAL


@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_the_handle_has_words_for_every_entry(schedule):
    """Whoever moves an entry's row writes them. Memory that nobody wrote reads as places that lead nowhere, so sums would not
    show it."""
    scenario = Scenario("handle", ranks=3, settings={**PIECES, "schedule": schedule})
    one = Skewed(scenario, 2)

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
        arrays, ids = out.handle._state.arrays, one.idx[me]

        def words(address: int, dtype: type) -> np.ndarray:
            return np.frombuffer(string_at(address, ids.nbytes), dtype).reshape(ids.shape)

        assert (words(arrays.idx, np.int32) == ids).all()
        assert (words(arrays.weights, np.float32) == np.where(ids >= 0, one.weights[me], 0)).all()
        place = words(arrays.pos, np.int32)
        assert (place[ids < 0] == -1).all()
        assert (place[ids >= 0] >= 0).all()

    hal.spawn(3, body, backend="cuda", transport="gin_emulated", timeout=20.0)
