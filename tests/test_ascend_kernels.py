# SPDX-License-Identifier: Apache-2.0
"""The Ascend kernels against the reference, bit for bit, on emulated engines that deliver as adversely as the rules allow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ascend_ranks import WorldRanks
from hal_ascend import _engine
from kernel_ranks import dispatch_all, expect_dispatch, random_tokens, round_trip

from hal._validate import DISPATCH_DTYPES
from hal.config import QUANTISED_DTYPES, ExpertParallelSpec
from hal.errors import ContractError

SPEC = ExpertParallelSpec(num_experts=8, top_k=3, hidden=32, max_tokens=7)
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
SCHEDULES = (("direct", 1), ("latency", 1), ("hierarchical", 2))


def options(completion: str, seed: int) -> dict[str, object]:
    """A different engine for each seed. flag_in_block needs 512-byte blocks that do not tear."""
    chunk = (0, 512)[seed % 2] if completion == "flag_in_block" else (0, 64, 512)[seed % 3]
    return {
        "seed": seed, "chunk_bytes": chunk, "sq_depth": 256, "cq_depth": (64, 16)[seed % 2], "cores": 1 + seed % 3,
        "first_index": 2**32 - 40 if seed % 3 == 2 else 0,
    }  # fmt: skip


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize(("schedule", "nodes"), SCHEDULES)
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("dtype", DISPATCH_DTYPES)
def test_every_type_layout_schedule_and_completion(dtype, layout, schedule, nodes, completion):
    scale_dim = 3 if dtype in QUANTISED_DTYPES else 0
    spec = replace(SPEC, dtype=dtype, layout=layout, schedule=schedule, completion=completion, scale_dim=scale_dim)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        with WorldRanks(replace(spec, hidden=(32, 240, 992)[seed]), 4, nodes, **options(completion, seed)) as world:
            round_trip(world, rng, [7, 0, 3, 5])
            round_trip(world, rng, [1, 6, 7, 2], reuse=True)
            assert world.world.warnings == []


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 256, 257])
def test_batches_around_the_submit_limit(rows, completion):
    """One request for each row and one beside it: the limit of 128 lies between 64 and 65 rows as well."""
    spec = replace(SPEC, num_experts=2, top_k=1, hidden=8, max_tokens=max(rows, 1), completion=completion)
    tokens = random_tokens(np.random.default_rng(1), spec, [rows, rows], none=0.0)
    tokens.topk_idx = [np.full((rows, 1), 1 - rank, np.int64) for rank in range(2)]
    for queues in (1, 2):
        with WorldRanks(spec, 2, queues=queues, sq_depth=1024, cq_depth=64, seed=rows) as world:
            expect_dispatch(world, tokens, dispatch_all(world, tokens))


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_many_rounds_wrap_every_ring(completion):
    """Rings of 64 blocks and 16 completions go round many times, past 2^32."""
    wrap = {"first_index": 2**32 - 100, "sq_depth": 64, "cq_depth": 16}
    with WorldRanks(replace(SPEC, completion=completion), 2, **wrap, seed=4) as world:
        rng = np.random.default_rng(3)
        for _ in range(25):
            round_trip(world, rng, rng.integers(0, 8, 2))


@pytest.mark.parametrize("completion", COMPLETIONS)
def test_one_queue_starves(completion):
    """The scheduler serves one (rank, peer, QP) only when nothing else is left to do."""
    for seed in range(12):
        starve = {"strategy": _engine.Strategy.starve_queue, "seed": seed}
        with WorldRanks(replace(SPEC, completion=completion), 2, **starve) as world:
            rng = np.random.default_rng(seed)
            for _ in range(2):
                round_trip(world, rng, [7, 4])


@pytest.mark.parametrize("completion", COMPLETIONS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5])
def test_unbalanced_and_empty_queues(rows, completion):
    """Up to three rows leave QP 1 empty."""
    spec = replace(SPEC, num_experts=2, top_k=1, completion=completion)
    tokens = random_tokens(np.random.default_rng(1), spec, [rows, 0], none=0.0)
    tokens.topk_idx[0] = np.full((rows, 1), 1, np.int64)
    for seed in range(4):
        with WorldRanks(spec, 2, seed=seed) as world:
            expect_dispatch(world, tokens, dispatch_all(world, tokens))


def test_a_world_s_run_depends_on_the_seed_alone():
    spec = replace(SPEC, completion="strong_last")

    def run(seed: int) -> list[dict[str, int]]:
        with WorldRanks(spec, 4, seed=seed) as world:
            round_trip(world, np.random.default_rng(1), [7, 2, 0, 5])
            return [world.world.counters(r) for r in range(4)] + [{"steps": world.world.steps}]

    assert run(11) == run(11)
    assert run(11) != run(12)


def test_flag_in_block_needs_blocks_that_do_not_tear():
    """The baseline's own assumption: an engine that delivers 64 bytes at a time breaks it, and the others' not."""
    torn = 0
    for seed in range(40):
        try:
            with WorldRanks(
                replace(SPEC, completion="flag_in_block", hidden=992), 2, seed=seed, chunk_bytes=64
            ) as world:
                round_trip(world, np.random.default_rng(1), [7, 7])
        except AssertionError:
            torn += 1
    assert torn


def test_ranks_that_disagree_are_told():
    with WorldRanks(SPEC, 2) as world:
        tokens = random_tokens(np.random.default_rng(1), SPEC, [4, 4])
        states = [r.state for r in dispatch_all(world, tokens)]
        with pytest.raises(ContractError, match="rank 1 exchanges counts and this rank reuses a handle"):
            dispatch_all(world, tokens, [states[0], None])
        round_trip(world, np.random.default_rng(1), [4, 4])


def test_bad_ids_in_device_memory_are_refused_by_the_kernel():
    with WorldRanks(replace(SPEC, layout="expert"), 2) as world:
        tokens = random_tokens(np.random.default_rng(1), SPEC, [4, 4], none=0.0)
        good = [idx.copy() for idx in tokens.topk_idx]
        for bad, text in ((8, "topk_idx holds expert 8 in token 2"), (int(good[0][2, 1]), "twice in token 2")):
            tokens.topk_idx = [idx.copy() for idx in good]
            for idx in tokens.topk_idx:
                idx[2, 0] = bad if bad == 8 else idx[2, 1]
            with pytest.raises(ContractError, match=text):
                dispatch_all(world, tokens)
            assert all(world.world.counters(r)["wqes"] == 0 for r in range(2))
        tokens.topk_idx = good
        expect_dispatch(world, tokens, dispatch_all(world, tokens))
