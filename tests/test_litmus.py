# SPDX-License-Identifier: Apache-2.0
"""The litmus table: every program under every profile, against the verdicts of the vendors' documents."""

from __future__ import annotations

import pytest

from hal.checker.litmus import library, load, run
from hal.errors import ContractError
from hal.ordering import PROFILES

PROGRAMS = sorted(library())
# The table of the design, column by column: gin, gin-weak, udma, verbs-rc, openshmem.
COLUMNS = ("gin", "gin-weak", "udma", "verbs-rc", "openshmem")
TABLE = {
    "mp-flag": "A A A F A",
    "mp-none": "- - A - -",
    "mp-strong": "F - F F F",
    "mp-weak": "- A A F A",
    "mp-bundled": "F F F F F",
    "mp-bundled-prior": "F A A F A",
    "two-queues": "A A A A A",
    "two-queues-quiet": "F F F F F",
    "flush-is-not-quiet": "A A - F A",
    "quiet-then-flag": "F F F F F",
    "source-reuse": "A A A A A",
    "source-reuse-quiet": "F F F F F",
    "target-reuse": "A A A A A",
    "stale-one": "A A A A A",
    "epoch": "F F F F F",
    "cumulative-count": "F A A F A",
    "isa2": "A A A A A",
    "relaxed-after-strong": "A A A F A",
    "two-submitters": "F F E F F",
    "overlap": "F! F! F! F! F!",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_profile_gives_the_expected_verdict(name: str) -> None:
    program = library()[name]
    assert set(program.expect) == set(PROFILES)
    verdicts = {p: run(program, p).code for p in PROFILES}
    assert verdicts == dict(program.expect)


@pytest.mark.parametrize("name", TABLE)
def test_the_shipped_expectations_are_the_designs_table(name: str) -> None:
    expect = library()[name].expect
    assert [expect[c] for c in COLUMNS] == TABLE[name].split()


@pytest.mark.parametrize("name", [n for n in PROGRAMS if library()[n].trap])
def test_every_trap_fails_somewhere_and_passes_once_mended(name: str) -> None:
    program = library()[name]
    assert {"A", "E"} & set(program.expect.values())
    mended = library()[program.mended_by]
    assert set(mended.expect.values()) <= {"F", "-"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_sleep_sets_change_no_outcome(name: str) -> None:
    for p in PROFILES:
        with_sets, without = run(library()[name], p), run(library()[name], p, sleep_sets=False)
        assert with_sets.outcomes == without.outcomes
        assert with_sets.code == without.code
        assert with_sets.transitions <= without.transitions


def test_a_verdict_states_its_bound() -> None:
    assert run(load("mp-flag"), "udma").bound.startswith("exhaustive: ")
    short = run(load("cumulative-count-strong"), "udma", max_states=5)
    assert short.code == "?"
    assert short.bound.startswith("not exhaustive: ")


def test_an_unknown_program_lists_the_known_ones() -> None:
    with pytest.raises(ContractError, match=r"unknown litmus program 'mp'; known: .*mp-flag"):
        load("mp")
    with pytest.raises(ContractError, match=r"no file 'nowhere.litmus'"):
        load("nowhere.litmus")
