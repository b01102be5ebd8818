# SPDX-License-Identifier: Apache-2.0
"""The shipped kernels with on_peer_loss="mask" under the checker: ranks stop at their steps, and the others go on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hal.checker import ep, masking
from hal.checker.masking import LAST, NEVER, NOTICED, Losses

pytest.importorskip("hal_host._engine", reason="the C++ engine is not built")

PROTOCOLS = list(ep.protocols())


@pytest.mark.parametrize(("schedule", "completion"), PROTOCOLS)
def test_a_rank_may_stop_anywhere(schedule: str, completion: str) -> None:
    for number, scenario in enumerate(masking.scenarios(schedule, completion)):
        wrong = [v.line() for v in masking.check(scenario, "udma", every=7 + number) if not v.right]
        assert not wrong, wrong[:3]


def test_every_single_step_of_one_protocol() -> None:
    (scenario, *_) = masking.scenarios("direct", "strong_signal", ["rank"])
    verdicts = list(masking.check(scenario, "srd"))
    wrong = [v.line() for v in verdicts if not v.right]
    assert not wrong, wrong[:3]
    assert {v.masked for v in verdicts} >= {(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 2)}, "every loss was met"


@pytest.mark.parametrize("resume", [NEVER, NOTICED, LAST])
def test_losses_in_random_schedules(resume: int) -> None:
    (scenario, *_) = masking.scenarios("direct", "strong_last", ["expert"])
    losses = Losses(scenario, "udma")
    for after in range(5, losses.calls[1], 29):
        for seed in range(3):
            v = losses.random(1, after, resume, seed)
            assert v.right, v.line()


@pytest.mark.parametrize("stage", ["dispatch agreement", "combine agreement"])
def test_a_round_that_ends_without_agreement_is_caught(stage: str) -> None:
    """One rank does not wait for one other's word: a loss at the wrong step then leaves two ranks with different masks,
    or one that can never be met again."""
    (scenario, *_) = masking.scenarios("direct", "strong_signal", ["rank"])
    caught = 0
    for rank, number in Losses(scenario, "udma").calls_in(stage)[:2]:
        losses = Losses(scenario, "udma")
        losses.leave_out(rank, number)
        for victim in range(scenario.ranks):
            if victim != rank:
                runs = (losses.run(victim, after) for after in range(1, losses.calls[victim] + 1))
                caught += any(not v.right for v in runs)
    assert caught


def test_without_a_loss_the_agreement_is_right_in_every_schedule() -> None:
    for schedule, completion in PROTOCOLS:
        scenario = replace(next(iter(ep.small(schedule, completion))), on_peer_loss="mask")
        v = ep.check(scenario, "udma", max_seconds=20)
        assert (v.right, v.exhaustive) == (True, True), v.line()
