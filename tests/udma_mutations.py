# SPDX-License-Identifier: Apache-2.0
"""Defects planted one at a time below the unchanged Ascend kernels, and what notices each of them.

``python tests/udma_mutations.py`` prints the table of docs/ascend.md; tests/test_udma_mutations.py holds the page to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from ascend_ranks import WorldRanks
from hal_ascend import _engine
from kernel_ranks import Ranks, dispatch_send, random_tokens, round_trip

from hal.config import ExpertParallelSpec
from hal.errors import CapacityError, ContractError, PeerTimeout

SPEC = ExpertParallelSpec(num_experts=4, top_k=2, hidden=32, max_tokens=7)
SEEDS = range(40)
EQUAL = "equal to the reference"


def three_rounds(world: Ranks | WorldRanks) -> None:
    rng = np.random.default_rng(5)
    for _ in range(3):
        round_trip(world, rng, [world.spec.max_tokens, 3])  # type: ignore[arg-type]


@dataclass(frozen=True)
class Defect:
    """``name`` is a member of _engine.Mutation. ``healthy`` is what the same scenario does without it."""

    name: str
    says: str
    rules: str
    completion: str = "strong_signal"
    healthy: str = EQUAL
    options: dict[str, Any] = field(default_factory=dict)
    scenario: Callable[[Any], None] = three_rounds
    max_tokens: int = 7


def large_batch(world: Ranks | WorldRanks) -> None:
    round_trip(world, np.random.default_rng(5), [150, 150], none=0.0)  # type: ignore[arg-type]


def three_in_flight(world: WorldRanks) -> None:
    """The second round does not fit the ring while the first one is not received."""
    tokens = random_tokens(np.random.default_rng(5), world.spec, [9, 9], none=0.0)
    tokens.topk_idx = [np.tile(np.array([0, 2], np.int64), (9, 1)) for _ in range(2)]  # every token to both ranks

    def work(rank: int) -> None:
        pending = [dispatch_send(world, rank, tokens) for _ in range(3)]  # type: ignore[arg-type]
        for one in pending:
            world.engines[rank].dispatch_recv(one, None)

    world.each(work)


def failing_request(world: WorldRanks) -> None:
    world.world.inject(0, 1, 0, "status", 3)
    three_rounds(world)


DEFECTS = (
    Defect("default_no", "rows carry no order", "30, 34"),
    Defect("strong_on_other_queue", "the strong signal goes to the other QP", "31"),
    Defect("drop_empty_signal", "a queue without rows does not signal", "57"),
    Defect(
        "batch_of_129", "129 descriptors in 8192 bytes", "23",
        options={"sq_depth": 2048}, scenario=large_batch, max_tokens=150,
    ),
    Defect("no_flush", "descriptors are not flushed before the doorbell", "13", "strong_signal_no_cqe"),
    Defect(
        "flush_first_span_only", "only the part before the ring's end is flushed", "13", "strong_signal_no_cqe",
        options={"first_index": 125},
    ),
    Defect("ring_before_copy", "the doorbell does not wait for the descriptors' copy", "14"),
    Defect("early_source_reuse", "sources are overwritten before quiet", "48"),
    Defect("constant_one", "signals carry a constant", "60"),
    Defect("signal_before_quiet", "the step signal does not wait for QP 1", "61", "strong_last"),
    Defect(
        "early_reclaim", "tail = head before the exit barrier", "64", "strong_signal_no_cqe",
        "CapacityError: the second round does not fit", {"sq_depth": 32}, three_in_flight, 9,
    ),
    Defect("wait_on_wrong_slot", "a wait looks at the neighbour's slot", "52, 56"),
    Defect(
        "ignore_cqe_status", "an error status counts as success", "46",
        healthy="Fault of rule 46", scenario=failing_request,
    ),
    Defect("keep_relaxed_bits", "strong is set over relaxed without clearing", "15", "strong_signal_no_cqe"),
)  # fmt: skip


def run(defect: Defect, mutation: Any, seed: int) -> str:
    """What one run ends with: ``equal to the reference``, or the error."""
    options = {"sq_depth": 128, "cq_depth": 128, "chunk_bytes": 64, **defect.options}
    spec = replace(SPEC, completion=defect.completion, max_tokens=defect.max_tokens, num_buffers=4)
    try:
        with WorldRanks(spec, 2, seed=seed, mutation=mutation, timeout=1.0, **options) as world:
            defect.scenario(world)
            warned = [text for text in world.world.warnings if "rule 48" in text]
            if warned:
                return f"detector of {warned[0].partition(': ')[2].partition(';')[0]}"
    except _engine.Fault as fault:
        return f"Fault of rule {fault.rule}"  # type: ignore[attr-defined]
    except _engine.Hang:
        return "Hang"
    except PeerTimeout as error:
        return f"PeerTimeout in '{error.stage}'"
    except CapacityError:
        return "CapacityError: the second round does not fit"
    except ContractError:
        return "ContractError"
    except AssertionError:
        return "other bits than the reference's"
    return EQUAL


@dataclass(frozen=True)
class Verdict:
    defect: Defect
    healthy: set[str]
    caught: dict[str, int]
    """How the defect showed, and on how many of the seeds."""

    @property
    def is_caught(self) -> bool:
        return bool(self.caught) and self.healthy == {self.defect.healthy}


def judge(defect: Defect) -> Verdict:
    healthy = {run(defect, _engine.Mutation.none, seed) for seed in SEEDS}
    caught: dict[str, int] = {}
    for seed in SEEDS:
        end = run(defect, _engine.Mutation.__members__[defect.name], seed)
        if end not in (defect.healthy, EQUAL):  # a defect that a schedule hides is not caught by it
            caught[end] = caught.get(end, 0) + 1
    return Verdict(defect, healthy, caught)


def line(verdict: Verdict) -> str:
    defect = verdict.defect
    shown = ", ".join(f"{end} ({n})" for end, n in sorted(verdict.caught.items(), key=lambda item: (-item[1], item[0])))
    return (
        f"| {defect.says} | {defect.rules} | `{defect.completion}` | {defect.healthy} | {shown or '**not caught**'} |"
    )


def table() -> str:
    head = ["| defect | rules | completion | without it | noticed by (seeds of 40) |", "|---|---|---|---|---|"]
    return "\n".join(head + [line(judge(defect)) for defect in DEFECTS])


if __name__ == "__main__":
    print(table())
