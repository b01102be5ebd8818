# SPDX-License-Identifier: Apache-2.0
"""The kernels of a view in which ranks are masked, against the reference: what they dispatch and combine, what becomes of
handles that were made before, and the word that every round ends with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hal_host._engine import Members
from kernel_ranks import Ranks, Tokens, arrays, bits, random_rows, random_tokens, same_bits

from hal import reference
from hal.arrays import as_buffer, to_kind
from hal.config import ExpertParallelSpec
from hal.errors import ContractError, PeerTimeout

COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
SPEC = ExpertParallelSpec(
    num_experts=12, top_k=3, hidden=8, max_tokens=7, dtype="float32", combine_dtype="float32", on_peer_loss="mask"
)


def spec_for(schedule: str, layout: str, completion: str = "strong_signal") -> ExpertParallelSpec:
    alignment = 4 if layout == "expert" and schedule != "latency" else 1
    return replace(SPEC, schedule=schedule, layout=layout, completion=completion, alignment=alignment)


def lost_bits(masked: Sequence[int]) -> int:
    return sum(1 << rank for rank in masked)


def expect_dispatch(
    world: Ranks, tokens: Tokens, received: dict[int, Any], handle: reference.Routing | None = None
) -> reference.Routing:
    want, routing = reference.dispatch(
        world.spec, tokens.x, None if handle else tokens.topk_idx, tokens.topk_weights, handle=handle,
        masked=world.masked,
    )  # fmt: skip
    for rank, got in received.items():
        for name, array in arrays(got).items():
            same_bits(f"rank {rank} {name}", array, getattr(want[rank], name))
    return routing


def dispatch(world: Ranks, tokens: Tokens, states: dict[int, Any] | None = None) -> dict[int, Any]:
    def work(rank: int) -> Any:
        engine = world.engines[rank]
        idx = None if states else as_buffer(tokens.topk_idx[rank])
        weights = as_buffer(tokens.topk_weights[rank])
        pending = engine.dispatch_send(
            as_buffer(tokens.x[rank]), idx, weights, None, states[rank] if states else None, None
        )
        return engine.dispatch_recv(pending, None)

    return dict(zip(world.present, world.each(work), strict=True))


def combine_as_the_reference(
    world: Ranks, rng: np.random.Generator, received: dict[int, Any], handle: reference.Routing
) -> None:
    spec = world.spec
    rows = [random_rows(rng, (handle.row_count[r], spec.hidden), "float32") for r in range(world.ranks)]
    for weighted in (False, spec.layout == "expert"):
        weights = [
            rng.random((n, spec.top_k) if spec.layout == "rank" else (n,)).astype(np.float32) for n in handle.row_count
        ]

        def work(rank: int, weighted: bool = weighted, weights: list[Any] = weights) -> Any:
            engine, state = world.engines[rank], received[rank].state
            plain = engine.combine(as_buffer(rows[rank]), state, None, weighted, (), None)
            sent = engine.combine_send(as_buffer(rows[rank]), state, as_buffer(weights[rank]), weighted, None)
            return plain, engine.combine_recv(sent, (), None)

        results = dict(zip(world.present, world.each(work), strict=True))
        want, home = reference.combine(
            rows, handle, weighted=weighted, topk_weights=weights, topology=world.topology, masked=world.masked
        )
        for rank, (plain, (y, back)) in results.items():
            same_bits(f"rank {rank} y", to_kind(plain[0], "numpy"), want[rank])
            same_bits(f"rank {rank} y, halves", to_kind(y, "numpy"), want[rank])
            same_bits(f"rank {rank} weights", to_kind(back, "numpy"), home[rank])


@pytest.mark.parametrize("masked", [(1,), (0, 3)], ids=str)
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("schedule", ["direct", "hierarchical", "latency"])
def test_what_survivors_get_is_what_the_reference_says(schedule, layout, masked):
    rng = np.random.default_rng([len(schedule), len(layout), *masked])
    for completion in COMPLETIONS:
        spec = spec_for(schedule, layout, completion)
        tokens = random_tokens(rng, spec, (5, 0, 7, 3) if 1 not in masked else (5, 6, 0, 3))
        with Ranks(spec, 4, nodes=2) as everyone:
            before = dispatch(everyone, tokens)
            old_handle = expect_dispatch(everyone, tokens, before)
        with Ranks(spec, 4, nodes=2, members=Members(1, lost_bits(masked))) as world:
            # Rows that were dispatched when everyone was there.
            combine_as_the_reference(world, rng, before, old_handle)
            # The same routing again.
            old_states = {rank: before[rank].state for rank in world.present}
            again = dispatch(world, tokens, old_states)
            combine_as_the_reference(world, rng, again, expect_dispatch(world, tokens, again, old_handle))
            # New tokens, and their routing again.
            fresh = random_tokens(rng, spec, (2, 4, 6, 1))
            received = dispatch(world, fresh)
            handle = expect_dispatch(world, fresh, received)
            combine_as_the_reference(world, rng, received, handle)
            received = dispatch(world, fresh, {rank: got.state for rank, got in received.items()})
            combine_as_the_reference(world, rng, received, expect_dispatch(world, fresh, received, handle))


def test_hierarchical_sums_stay_the_same_bits_when_rows_go_the_direct_way():
    """bfloat16 partial sums are rounded for the wire; a flat sum would differ."""
    spec = replace(spec_for("hierarchical", "expert"), top_k=6, dtype="bfloat16", combine_dtype="bfloat16", hidden=64)
    rng = np.random.default_rng(5)
    tokens = random_tokens(rng, spec, (7, 7, 7, 7), none=0.0)
    want, handle = reference.dispatch(spec, tokens.x, tokens.topk_idx, tokens.topk_weights, masked=(2,))
    rows = [random_rows(rng, out.x.shape, "bfloat16") for out in want]
    with Ranks(spec, 4, nodes=2, members=Members(1, 0b100)) as world:
        received = dispatch(world, tokens)

        def work(rank: int) -> Any:
            return world.engines[rank].combine(as_buffer(rows[rank]), received[rank].state, None, False, (), None)[0]

        results = dict(zip(world.present, world.each(work), strict=True))
        by_node = reference.combine(rows, handle, topology=world.topology, masked=(2,))
    flat = reference.combine(rows, handle, masked=(2,))
    assert any(bits(flat[r]) != bits(by_node[r]) for r in world.present), "the case must tell the two apart"
    for rank, y in results.items():
        same_bits(f"rank {rank}", to_kind(y, "numpy"), by_node[rank])


@pytest.mark.parametrize("schedule", ["direct", "latency"])
def test_no_round_ends_before_every_rank_holds_it(schedule):
    """Rank 2 sends its rows and never says that it has the others': nobody gets a result."""
    spec = spec_for(schedule, "rank")
    tokens = random_tokens(np.random.default_rng(1), spec, (3, 3, 3))
    with Ranks(replace(spec, num_experts=12), 3, timeout=1.0) as world:

        def work(rank: int) -> Any:
            engine = world.engines[rank]
            pending = engine.dispatch_send(
                as_buffer(tokens.x[rank]), as_buffer(tokens.topk_idx[rank]), None, None, None, None
            )
            if rank == 2:
                return None
            with pytest.raises(PeerTimeout) as raised:
                engine.dispatch_recv(pending, None)
            return raised.value.rank, raised.value.stage

        assert world.each(work)[:2] == [(2, "dispatch agreement")] * 2


def test_a_masked_rank_has_no_kernels():
    with pytest.raises(ContractError, match="this rank itself is masked"):
        Ranks(SPEC, 4, members=Members(1, 0b10), without_masked=False)
    with pytest.raises(ContractError, match="ranks are masked and the shape has no agreement"):
        Ranks(replace(SPEC, on_peer_loss="error"), 4, members=Members(1, 0b10))
    with pytest.raises(ContractError, match="at most 64 ranks, not 65"):
        Ranks(replace(SPEC, num_experts=65, hidden=4, max_tokens=1), 65)
