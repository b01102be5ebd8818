# SPDX-License-Identifier: Apache-2.0
"""Faults under the shipped kernels: the protocol ends with the right result or with the right exception, never with wrong
data, never without end."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from hal.checker import ep
from hal.checker.engine import native
from hal.ordering import OrderingProfile, profile


@dataclass(frozen=True)
class FaultVerdict:
    fault: str
    scenario: ep.Scenario
    profile: OrderingProfile
    right: bool
    outcome: str
    """``right result``, ``PeerTimeout on ranks …``, or what went wrong."""

    def line(self) -> str:
        state = "ok" if self.right else "WRONG"
        return f"{state:5} {self.profile.name:9} {self.scenario.describe()}: {self.fault}: {self.outcome}"


def misled(names: Mapping[int, int], guilty: Collection[tuple[int, int]]) -> str:
    """Whose PeerTimeout does not lead to the fault; empty if all do.

    ``names``: the rank that each timed-out rank names (-1 = none). ``guilty``: pairs (waiting, named) that point at the
    fault. A rank may wait for one that itself waits: then the named rank's own PeerTimeout must lead on.
    """
    for first in names:
        at, seen = first, set[int]()
        while at in names and at not in seen and (at, names[at]) not in guilty:
            seen.add(at)
            at = names[at]
        if at not in names or at in seen:
            return f"the PeerTimeout of rank {first} leads to rank {at}, not to the fault; named: {dict(names)}"
    return ""


def check(scenario: ep.Scenario, under: OrderingProfile | str) -> Iterator[FaultVerdict]:
    """Every fault at every operation (or rank, or queue) of the scenario, one at a time."""
    prof = profile(under) if isinstance(under, str) else under
    what = ep.subject(scenario, prof)
    engine = native()
    base = engine.run(what, "eager", True)
    operations = [e for e in base["events"] if e["what"] == "issue" and e["peer"] != e["rank"]]

    def judged(
        fault: str, schedule: str, must_end: bool, guilty: frozenset[tuple[int, int]] | None = None
    ) -> FaultVerdict:
        r = engine.run(what, schedule)
        if r["kind"]:
            return FaultVerdict(fault, scenario, prof, False, f"{r['kind']}: {r['failure']}")
        names: dict[int, int] = r["timed_out"]
        late = sorted(names)
        if late and must_end:
            return FaultVerdict(fault, scenario, prof, False, f"PeerTimeout on ranks {late} without a lost operation")
        astray = misled(names, guilty) if guilty is not None else ""
        if astray:
            return FaultVerdict(fault, scenario, prof, False, astray)
        outcome = f"PeerTimeout on ranks {', '.join(map(str, late))}" if late else "right result"
        return FaultVerdict(fault, scenario, prof, True, outcome)

    # A slow queue and a slow rank delay; nothing is lost, so the result must be right.
    queues = sorted({(e["rank"], e["peer"], e["queue"]) for e in operations})
    for rank, peer, queue in queues:
        held = [e["entity"] for e in operations if (e["rank"], e["peer"], e["queue"]) == (rank, peer, queue)]
        schedule = "hold " + " ".join(f"{entity}{unit}" for entity in held for unit in ("s", "w"))
        yield judged(f"slow queue {queue} from rank {rank} to {peer}", schedule, True)
    for rank in range(scenario.ranks):
        yield judged(f"slow rank {rank}", f"hold {rank}", True)
    # Rings of one and two entries, and credit that comes back late.
    for entries in (1, 2):
        what.set_faults({"ring_entries": entries})
        yield judged(f"ring of {entries}", "eager", True)
        yield judged(
            f"ring of {entries}, credit starved", "hold " + " ".join(e["entity"] + "w" for e in operations), True
        )
    # A rank that stops, at each of its calls (one in three, the last included).
    for rank in range(scenario.ranks):
        steps = sum(e["rank"] == rank and e["what"] in ("read", "write", "wait", "quiet") for e in base["events"])
        for after in range(1, steps, 3):
            what.set_faults({"stalled": (rank, after)})
            guilty = frozenset((waiting, rank) for waiting in range(scenario.ranks))
            yield judged(f"rank {rank} stops after call {after}", "eager", False, guilty)
    for name in ("lost", "lost_completion", "error_completion"):
        for e in operations:
            thread, number = map(int, e["entity"].split("."))
            what.set_faults({name: (thread, number)})
            # The target misses what the origin sent, or the origin waits for what the target never acknowledged.
            link = frozenset({(e["peer"], e["rank"]), (e["rank"], e["peer"]), (e["rank"], -1)})
            yield judged(f"{name.replace('_', ' ')} of {e['name']}", "eager", False, link)
    what.set_faults({})
