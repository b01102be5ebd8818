# SPDX-License-Identifier: Apache-2.0
"""Two implementations of the same delivery rules, and the happens-before pass, held against each other."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hal.checker.engine import native, profile_dict, program_dict
from hal.checker.litmus import is_robust, library, run
from hal.checker.pictures import litmus_failure
from hal.checker.program import Program, ProgramBuilder
from hal.ordering import PROFILES, Order

pytest.importorskip("hal_host._engine", reason="the C++ engine is not built")


def subject(program: Program, profile: str) -> Any:
    return native().LitmusSubject(program_dict(program), profile_dict(PROFILES[profile]))


@pytest.mark.parametrize("name", sorted(library()))
def test_schedule_search_and_state_search_see_the_same_outcomes(name: str) -> None:
    program = library()[name]
    for profile in PROFILES:
        expected = run(program, profile)
        if expected.code == "E":
            continue
        found = native().explore_all(subject(program, profile), 100_000, 30.0, False)
        assert found["exhaustive"]
        assert sorted(map(tuple, found["outcomes"])) == list(expected.outcomes), profile
        assert bool(found["kind"]) == (
            expected.code[0] == "A" or run(program, profile).code == "D" or _bad(program, profile)
        )


def _bad(program: Program, profile: str) -> bool:
    """Of a ``-`` verdict: was the bad outcome reached all the same?"""
    return "allowed" in run(program, profile).reason


@pytest.mark.parametrize("name", ["mp-flag", "two-queues", "source-reuse", "isa2", "empty-peer", "cumulative-count"])
def test_bounded_and_random_searches_find_what_the_exhaustive_one_finds(name: str) -> None:
    program = library()[name]
    s = subject(program, "udma")
    assert native().explore_delays(s, 2, 100_000, 20.0, True)["kind"]
    assert native().explore_random(s, 1, 2000, 3, 20.0, True)["kind"]


@pytest.mark.parametrize("name", ["mp-strong", "two-queues-quiet", "epoch", "target-reuse-ack"])
def test_bounded_and_random_searches_find_nothing_in_mended_programs(name: str) -> None:
    s = subject(library()[name], "udma")
    delays = native().explore_delays(s, 2, 100_000, 20.0, True)
    assert (delays["kind"], delays["exhaustive"]) == ("", True)
    assert "at most 2 of" in delays["bound"]
    chance = native().explore_random(s, 1, 200, 3, 20.0, True)
    assert (chance["kind"], chance["exhaustive"]) == ("", False), "random runs never claim to be exhaustive"


def test_a_failure_is_replayed_and_shrunk_to_one_delayed_delivery() -> None:
    picture = litmus_failure(library()["two-queues"], PROFILES["udma"])
    assert picture.schedule == "hold 0.0w"
    s = subject(library()["two-queues"], "udma")
    assert native().run(s, picture.schedule)["kind"] == "wrong data"
    assert native().run(s, "eager")["kind"] == ""
    assert "rank 0" in picture.text
    assert "*0.0 writes" in picture.text
    assert picture.svg.startswith("<svg")


def test_a_schedule_that_is_none_says_what_was_expected() -> None:
    s = subject(library()["two-queues"], "udma")
    with pytest.raises(ValueError, match="starts with eager, hold or path"):
        native().run(s, "fast 0.0w")
    with pytest.raises(ValueError, match=r"'0.x' is no entity"):
        native().run(s, "hold 0.x")


def test_robustness_is_equality_with_sc() -> None:
    assert is_robust(library()["mp-strong"], "udma")
    assert not is_robust(library()["mp-flag"], "udma")


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Two or three ranks, puts to places of their own, signals, waits, quiets; every read follows its rank's waits."""
    ranks = draw(st.integers(2, 3))
    b = ProgramBuilder("random", data=4, sig=3)
    sent: dict[tuple[int, int], int] = {}
    value = 0
    for rank in range(ranks):
        for _ in range(draw(st.integers(1, 4))):
            peer = draw(st.sampled_from([r for r in range(ranks) if r != rank]))
            queue = draw(st.integers(0, 1))
            what = draw(st.sampled_from(["put", "put", "signal", "signal", "quiet", "relay"]))
            order = draw(st.sampled_from([Order.NONE, Order.RELAXED, Order.STRONG]))
            if what == "put" and value < 4:
                b.rank(rank).put(b.at("data", value), peer, value + 1, queue=queue, order=order)
                value += 1
            elif what == "signal":
                slot = rank
                b.rank(rank).signal(b.at("sig", slot), peer, queue=queue, order=max(order, Order.RELAXED))
                sent[(peer, slot)] = sent.get((peer, slot), 0) + 1
            elif what == "quiet":
                b.rank(rank).quiet(queue=draw(st.sampled_from([None, 0, 1])))
            elif what == "relay" and sent.get((rank, (rank - 1) % ranks)):
                b.rank(rank).wait(b.at("sig", (rank - 1) % ranks), 1)
    for rank in range(ranks):
        for (peer, slot), count in sorted(sent.items()):
            if peer == rank and draw(st.booleans()):
                b.rank(rank).wait(b.at("sig", slot), draw(st.integers(1, count)))
        place = draw(st.integers(0, 3))
        b.rank(rank).read(f"r{rank}", b.at("data", place))
    return b.build("deadlock")


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(), st.sampled_from(["udma", "gin", "gin-weak", "verbs-rc", "openshmem", "lsa", "shm", "srd"]))
def test_one_run_decides_what_all_runs_show(program: Program, profile: str) -> None:
    """Race-free by the happens-before pass exactly if every run gives the same outcome."""
    s = subject(program, profile)
    races = native().find_races(s)
    found = native().explore_all(s, 50_000, 20.0, False)
    if not found["exhaustive"] or any(o[-1] for o in found["outcomes"]):
        return  # deadlocks are the search's to find
    different = len(found["outcomes"]) > 1
    assert bool(races["races"]) == different, (program.text(), profile, [r["text"] for r in races["races"]])
    assert sorted(map(tuple, found["outcomes"])) == list(run(program, profile).outcomes)


@pytest.mark.parametrize("quiet", [True, False])
def test_what_every_signal_proves_is_known_though_none_is_necessary(quiet: bool) -> None:
    """Either of two signals can satisfy the wait; both were sent after the put was complete."""
    b = ProgramBuilder("either", data=1, sig=1)
    b.rank(0).put(b.at("data"), 1, 1)
    if quiet:
        b.rank(0).quiet()
    b.rank(0).signal(b.at("sig"), 1, order=Order.RELAXED).signal(b.at("sig"), 1, order=Order.RELAXED)
    b.rank(1).wait(b.at("sig"), 1).read("r0", b.at("data"))
    races = native().find_races(subject(b.build("1:r0 == 0"), "udma"))["races"]
    assert bool(races) != quiet
