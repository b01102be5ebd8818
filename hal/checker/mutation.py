# SPDX-License-Identifier: Apache-2.0
"""Mutation score of the shipped protocols: each primitive that a rank executes is weakened, removed or shifted by one in
turn, and the checker must notice. What it does not notice is shown to make no difference, or is a gap.

A mutant is *killed* by wrong data, a hang, an exception, a source changed too early, or a race. It is *redundant* when in
every scenario of its protocol the exhaustive search and the happens-before pass find nothing: at these sizes, the
primitive can be weakened so. Redundant classes carry the reason (:data:`REASONS`); one without a reason is a *survivor*.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from hal.checker import ep
from hal.checker.engine import native
from hal.ordering import Order, profile

KINDS = ("weaken", "remove", "to_source", "value_up", "value_down", "offset_up", "other_queue")
"""The values of hal::checker::Mutation::Kind."""

JUDGES = ("udma", "openshmem")
"""Mutants are judged under the weakest native profiles: one tells NONE apart, the other has a quiet of its own for
sources."""


@dataclass(frozen=True)
class MutantClass:
    """Mutants that a reader would call the same: one primitive's kind, its role and the change made to it."""

    protocol: str
    primitive: str
    role: str
    change: str


def changes(call: dict[str, Any]) -> list[str]:
    """What can be done to one call."""
    order = Order(call["order"])
    if call["primitive"] == "put":
        return [*(["weaken"] if order is not Order.NONE else []), "remove", "offset_up", "other_queue"]
    if call["primitive"] == "signal":
        weaken = ["weaken"] if order is Order.STRONG else []
        return [*weaken, "remove", "value_up", "value_down", "offset_up", "other_queue"]
    if call["primitive"] == "wait":
        return ["remove", "value_up", "value_down", "offset_up"]
    return ["remove", *(["to_source"] if call["remote"] else [])]


def suite(schedule: str, completion: str) -> list[ep.Scenario]:
    """Scenarios in which every primitive of a protocol matters: rows on both queues, empty peers, slots reused, combines
    without a dispatch between them, weights carried back in some rounds' neighbours."""
    hierarchical = schedule == "hierarchical"
    ranks, nodes = (4, 2) if hierarchical else (3, 1)
    base = ep.Scenario(
        ranks=ranks, nodes=nodes, tokens=(6, *(5,) * (ranks - 1)), schedule=schedule, completion=completion, rounds=3
    )
    return [
        base,
        replace(base, tokens=(2, *(3,) * (ranks - 1)), rounds=4, in_flight=2, weights_back=True, spread=2),
        replace(base, tokens=(2, *(4,) * (ranks - 1)), rounds=2, combines=2, reuse_handle=True),
        replace(base, tokens=(3,) * ranks, rounds=1, combines=4, halves=True),
        replace(base, layout="expert", tokens=(4, *(2,) * (ranks - 1)), rounds=3),
    ]


def _role(layout: Any, call: dict[str, Any]) -> str:
    """What the call is for: the part of the window that it touches, or the stage that it waits in."""
    if call["primitive"] == "wait":
        return str(call["stage"])
    if call["primitive"] == "quiet":
        return "quiet remote" if call["remote"] else "quiet source"
    return str(layout(call["offset"]))


def _regions(scenario: ep.Scenario) -> Any:
    """Offset -> name of the window's part (hal/include/hal/buffer_layout.hpp)."""
    from hal_host import _engine

    bounds: list[tuple[int, str]] = []
    end = 0
    for name, size in cast(Any, _engine).buffer_parts(scenario.native()["shape"]):
        end += size
        bounds.append((end, name))

    def region(offset: int) -> str:
        return next((name for limit, name in bounds if offset < limit), "end")

    return region


@dataclass(frozen=True)
class Result:
    killed: Counter[MutantClass]
    redundant: Counter[MutantClass]
    by: dict[MutantClass, Counter[str]]
    open: Counter[MutantClass]
    """Not decided within the time for one mutant."""


def run(schedules: Sequence[str] = ep.SCHEDULES, completions: Sequence[str] = ep.COMPLETIONS, rank: int = 0) -> Result:
    """Mutate every call of ``rank`` (all ranks run the same program) in every protocol."""
    result = Result(Counter(), Counter(), defaultdict(Counter), Counter())
    for schedule, completion in ep.protocols(schedules, completions):
        for scenario in suite(schedule, completion):
            for kind, how in _mutants(scenario, rank):
                if how == "":
                    result.redundant[kind] += 1
                elif how == "open":
                    result.open[kind] += 1
                else:
                    result.killed[kind] += 1
                    result.by[kind][how] += 1
    return result


PLACES = 3
"""Calls of one class that are mutated in one scenario: the first, the last, and others evenly between."""


def _mutants(scenario: ep.Scenario, rank: int) -> Iterator[tuple[MutantClass, str]]:
    judges = [ep.subject(scenario, profile(name)) for name in JUDGES]
    region = _regions(scenario)
    protocol = f"{scenario.schedule}/{scenario.completion}"
    places: dict[MutantClass, list[int]] = defaultdict(list)
    for call in native().run(judges[0], "eager")["calls"]:
        if call["thread"] == rank:
            for change in changes(call):
                places[MutantClass(protocol, call["primitive"], _role(region, call), change)].append(call["number"])
    for kind, numbers in places.items():
        for number in _spread(numbers):
            for judge in judges:
                judge.set_mutation(KINDS.index(kind.change), rank, number)
            yield kind, next((how for how in map(killed_by, judges) if how), "")


def _spread(numbers: Sequence[int]) -> list[int]:
    last = len(numbers) - 1
    return sorted({numbers[round(i * last / (PLACES - 1))] for i in range(PLACES)})


def killed_by(what: Any) -> str:
    """What notices the mutant: a failure's kind, ``race``, or nothing (proved in this scenario); ``open`` if undecided."""
    races = native().find_races(what, 1)
    if races["kind"]:
        return str(races["kind"])
    if races["races"]:
        return "race"
    found = ep.every_schedule(what, 2000, 3.0, exact_runs=20)
    return str(found["kind"]) or ("" if found["exhaustive"] else "open")
