# SPDX-License-Identifier: Apache-2.0
"""The shipped kernels under the checker: right under every profile, and a broken one is caught, shrunk and drawn."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import pytest

from hal.checker import ep, faults, mutation
from hal.checker.engine import native
from hal.checker.pictures import draw
from hal.errors import ContractError
from hal.ordering import PROFILES

pytest.importorskip("hal_host._engine", reason="the C++ engine is not built")

PROTOCOLS = list(ep.protocols())
WEAKEST = ("udma", "srd")
PATIENCE = 240.0
"""Seconds; a search takes one or two where nobody else computes, and may take many times that on a busy machine."""


@pytest.mark.parametrize(("schedule", "completion"), PROTOCOLS)
def test_every_protocol_is_right_in_every_schedule(schedule: str, completion: str) -> None:
    for layout in ep.LAYOUTS:
        for scenario in ep.small(schedule, completion, layout):
            for profile in WEAKEST:
                v = ep.check(scenario, profile, max_seconds=PATIENCE)
                assert v.right, f"{v.line()}: {v.failure} {v.schedule}"
                assert v.exhaustive, v.line()


@pytest.mark.parametrize("profile", PROFILES)
def test_three_ranks_two_tokens_are_exhausted_within_a_minute(profile: str) -> None:
    start = time.process_time()  # on a core of its own
    for schedule, completion in PROTOCOLS:
        v = ep.check(next(iter(ep.small(schedule, completion))), profile, max_seconds=PATIENCE)
        assert (v.right, v.exhaustive) == (True, True), v.line()
    assert time.process_time() - start < 60


@pytest.mark.parametrize("completion", ep.COMPLETIONS)
def test_delayed_and_random_schedules_agree(completion: str) -> None:
    scenario = next(iter(ep.small("direct", completion)))
    delays = ep.check(scenario, "udma", search="delays", delays=1)
    assert (delays.right, delays.exhaustive) == (True, True)
    chance = ep.check(scenario, "udma", search="random", max_runs=50, max_seconds=PATIENCE)
    assert (chance.right, chance.exhaustive) == (True, False)


@pytest.mark.parametrize(
    ("completion", "mutant", "kinds"),
    [
        ("strong_signal", ("signal", 2, "weaken"), {"wrong data", "race"}),
        ("strong_last", ("quiet", 1, "remove"), {"wrong data", "race"}),
        ("flag_in_block", ("signal", 2, "weaken"), {"wrong data", "race"}),
        ("strong_signal", ("signal", 2, "remove"), {"hang"}),
        ("strong_signal_no_cqe", ("wait", 1, "remove"), {"wrong data", "race", "source changed", "contract"}),
    ],
)
def test_a_broken_kernel_is_caught(completion: str, mutant: tuple[str, int, str], kinds: set[str]) -> None:
    primitive, order, change = mutant
    scenario = replace(next(iter(ep.small("direct", completion))), tokens=(6, 5, 5))
    subject = ep.subject(scenario, PROFILES["udma"])
    calls = native().run(subject, "eager")["calls"]
    caught = set()
    for call in calls:
        if call["thread"] == 0 and call["primitive"] == primitive and call["order"] == order:
            subject.set_mutation(mutation.KINDS.index(change), 0, call["number"])
            caught.add(mutation.killed_by(subject))
    assert caught & kinds, caught


def test_who_weakens_the_last_strong_signal_sees_the_shrunk_schedule_and_the_diagram() -> None:
    scenario = next(iter(ep.small("direct", "strong_signal")))
    subject = ep.subject(scenario, PROFILES["udma"])
    calls = native().run(subject, "eager")["calls"]
    rows = [c for c in calls if c["thread"] == 0 and c["primitive"] == "signal" and c["queue"] == 0]
    shown = 0
    for call in rows:
        subject.set_mutation(mutation.KINDS.index("weaken"), 0, call["number"])
        v = ep.check(scenario, "udma", on=subject, max_seconds=30)
        if v.kind != "wrong data":
            continue
        shown += 1
        assert v.schedule.startswith("hold ")
        assert len(v.schedule.split()) <= 3, "one or two deliveries explain it"
        picture = draw(subject, v.schedule, scenario.ranks)
        assert "=> wrong data" in picture.text
        assert "<svg" in picture.svg
    assert shown


def test_races_name_both_operations_ranks_queues_and_bytes() -> None:
    scenario = next(iter(ep.small("direct", "strong_signal")))
    subject = ep.subject(scenario, PROFILES["udma"])
    calls = native().run(subject, "eager")["calls"]
    texts = []
    for call in calls:
        if call["thread"] == 0 and call["primitive"] == "signal":
            subject.set_mutation(mutation.KINDS.index("weaken"), 0, call["number"])
            texts += [r["text"] for r in native().find_races(subject)["races"]]
    assert any("put 0." in t and "rank 0 to 1" in t and "queue 0" in t and "race on bytes" in t for t in texts), texts


@pytest.mark.parametrize("completion", ep.COMPLETIONS)
def test_faults_end_with_the_right_result_or_a_timeout(completion: str) -> None:
    scenario = replace(next(iter(ep.small("direct", completion))), rounds=1)
    verdicts = list(faults.check(scenario, "udma"))
    wrong = [v.line() for v in verdicts if not v.right]
    assert not wrong, wrong[:5]
    outcomes = {v.outcome.split(" on ")[0] for v in verdicts}
    assert outcomes == {"right result", "PeerTimeout"}


def test_sixteen_ranks_by_the_happens_before_pass_and_by_random_schedules() -> None:
    scenario = ep.large("direct", "strong_last", 16, 16)
    assert ep.check(scenario, "udma", search="races").right
    assert ep.check(replace(scenario, tokens=(2,) * 16), "udma", search="random", max_runs=3, max_seconds=PATIENCE).right


def test_a_limit_on_memory_stops_a_verdict_and_is_said() -> None:
    scenario = ep.large("direct", "flag_in_block", 16, 64)
    whole = ep.check(scenario, "srd", search="races")
    assert "stopped" not in whole.bound
    v = ep.check(scenario, "srd", search="races", max_memory=20 << 20)
    assert (v.right, v.exhaustive) == (True, False)
    assert re.search(r"\d+ events; the run stopped there at the limit of 20971520 bytes, its results are not", v.bound)
    assert v.steps < whole.steps
    # The run as a whole, and a pass that may keep less.
    short = ep.check(scenario, "srd", search="races", max_memory=4 << 20, on=ep.subject(scenario, PROFILES["srd"]))
    assert re.search(r"the pass stopped at event \d+ at the limit of 4194304 bytes", short.bound), short.bound
    assert short.steps < whole.steps


@pytest.mark.parametrize("search", ["all", "random"])
def test_the_searches_keep_to_the_limit_too(search: str) -> None:
    v = ep.check(ep.large("direct", "strong_signal", 8, 16), "udma", search=search, max_runs=2, max_memory=1 << 18)
    assert not v.exhaustive
    assert "stopped by the limit on memory" in v.bound


def test_a_weak_signals_profile_at_many_ranks_takes_memory_in_proportion_to_the_run() -> None:
    """One clock for each wait and one entry for each weak signal, kept for ever, once took gigabytes here."""
    assert ep.check(
        ep.large("direct", "flag_in_block", 32, 32), "srd", search="races", max_memory=256 << 20
    ).bound.endswith("events")


def test_a_timeout_that_leads_elsewhere_is_wrong() -> None:
    stopped = {(rank, 2) for rank in range(4)}
    assert faults.misled({0: 2, 1: 0, 3: 1}, stopped) == "", "rank 3 waits for 1, which waits for 0, which names 2"
    assert "rank 1 leads to rank 3" in faults.misled({0: 2, 1: 3}, stopped), "rank 3 did not wait for anything"
    assert "rank 0 leads to rank 0" in faults.misled({0: 1, 1: 0}, stopped), "the two wait for each other"
    assert faults.misled({}, stopped) == ""


def test_pieces_of_a_put_are_delivered_one_by_one() -> None:
    scenario = replace(next(iter(ep.small("direct", "strong_signal"))), piece_bytes=8)
    whole = native().run(ep.subject(replace(scenario, piece_bytes=0), PROFILES["udma"]), "eager")["steps"]
    assert native().run(ep.subject(scenario, PROFILES["udma"]), "eager")["steps"] > whole


def test_a_search_that_hits_its_limit_says_so() -> None:
    scenario = replace(next(iter(ep.small("direct", "strong_signal"))), rounds=3, reuse_handle=True, combines=3)
    v = ep.check(scenario, "udma", max_runs=2)
    assert not v.exhaustive
    assert "not exhaustive" in v.line()


def test_bad_input_lists_what_there_is() -> None:
    with pytest.raises(ContractError, match=r"unknown schedule 'ring'; known: direct, hierarchical, latency"):
        list(ep.protocols(["ring"]))
    with pytest.raises(ContractError, match=r"unknown search 'deep'"):
        ep.check(ep.Scenario(), "udma", search="deep")
    with pytest.raises(ContractError, match=r"tokens are given for 2 ranks and there are 3"):
        ep.check(ep.Scenario(tokens=(1, 1)), "udma")
