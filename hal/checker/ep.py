# SPDX-License-Identifier: Apache-2.0
"""The shipped dispatch and combine kernels under the checker: scenarios, searches, verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hal.checker.engine import native, profile_dict
from hal.config import ExpertParallelSpec
from hal.errors import ContractError
from hal.ordering import PROFILES, OrderingProfile, profile

SCHEDULES = ("direct", "hierarchical", "latency")
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
LAYOUTS = ("rank", "expert")


@dataclass(frozen=True)
class Scenario:
    """What every rank does: ``rounds`` dispatches of float32 rows, each with ``combines`` combines."""

    ranks: int = 3
    tokens: tuple[int, ...] = (2, 2, 2)
    """Of each rank."""
    schedule: str = "direct"
    completion: str = "strong_signal"
    layout: str = "rank"
    nodes: int = 1
    top_k: int = 2
    hidden: int = 4
    rounds: int = 2
    in_flight: int = 1
    """Dispatches before the first combine."""
    combines: int = 1
    halves: bool = False
    """A combine is received only when the next was sent."""
    reuse_handle: bool = False
    weights_back: bool = False
    queues: int = 2
    piece_bytes: int = 0
    """Puts are delivered in pieces of at most this many bytes, in any order; 0 = whole."""
    spread: int = 3
    """Distance between a token's experts."""
    on_peer_loss: str = "error"
    """mask: rounds end by agreement (hal/checker/masking.py has ranks that are lost)."""

    @property
    def spec(self) -> ExpertParallelSpec:
        most = max(1, *self.tokens)
        # Schedule latency starts a group after ranks * max_tokens rows, which must be a multiple of the alignment.
        aligned = self.layout == "expert" and (self.schedule != "latency" or self.ranks * most % 2 == 0)
        return ExpertParallelSpec(
            num_experts=2 * self.ranks,
            top_k=self.top_k,
            hidden=self.hidden,
            max_tokens=most,
            dtype="float32",
            layout=self.layout,
            alignment=2 if aligned else 1,
            schedule=self.schedule,
            completion=self.completion,
            on_peer_loss=self.on_peer_loss,
        )

    def topk_idx(self, rank: int) -> list[int]:
        """Global expert ids of a rank's tokens, row by row."""
        experts = 2 * self.ranks
        return [
            (rank * 7 + t * 5 + j * self.spread) % experts for t in range(self.tokens[rank]) for j in range(self.top_k)
        ]

    def describe(self) -> str:
        parts = [
            f"{self.schedule}/{self.completion}",
            f"{self.ranks} ranks",
            f"tokens {'+'.join(map(str, self.tokens))}"
            if len(set(self.tokens)) > 1
            else f"{self.tokens[0]} tokens each",
        ]
        parts += [f"{self.nodes} nodes"] if self.nodes > 1 else []
        parts += [f"{self.rounds} rounds, layout {self.layout}"]
        parts += [f"{self.in_flight} dispatches in flight"] if self.in_flight > 1 else []
        parts += [f"{self.combines} combines each"] if self.combines > 1 else []
        parts += ["halves overlapped"] if self.halves else []
        parts += ["lost ranks masked"] if self.on_peer_loss == "mask" else []
        parts += ["handle reused"] if self.reuse_handle else []
        parts += ["weights carried back"] if self.weights_back else []
        parts += [f"pieces of {self.piece_bytes} B"] if self.piece_bytes else []
        return ", ".join(parts)

    def native(self) -> dict[str, Any]:
        from hal_host.engine import shape_of

        return {
            "shape": shape_of(self.spec, self.ranks, self.nodes),
            "queues": self.queues,
            "rounds": self.rounds,
            "in_flight": self.in_flight,
            "combines": self.combines,
            "halves": self.halves,
            "reuse_handle": self.reuse_handle,
            "weights_back": self.weights_back,
            "tokens": list(self.tokens),
            "topk_idx": [self.topk_idx(r) for r in range(self.ranks)],
            "piece_bytes": self.piece_bytes,
        }


@dataclass(frozen=True)
class EpVerdict:
    """What a search of one scenario under one profile found."""

    scenario: Scenario
    profile: OrderingProfile
    kind: str
    """Empty = right; else hang, wrong data, source changed, exception, contract or race."""
    failure: str
    bound: str
    exhaustive: bool
    runs: int
    steps: int
    seconds: float
    schedule: str = ""
    """A replayable schedule of the failure, shrunk."""
    races: tuple[str, ...] = field(default=())

    @property
    def right(self) -> bool:
        return not self.kind

    def line(self) -> str:
        state = "ok" if self.right else self.kind.upper()
        done = "exhaustive" if self.exhaustive else "not exhaustive"
        return (
            f"{state:5} {self.profile.name:9} {self.scenario.describe()}: {self.runs} runs, {self.steps} steps, "
            f"{self.seconds:.2f} s, {done} ({self.bound})"
        )


MAX_MEMORY = 2 << 30
"""Bytes that one search may keep: half for the run, half for what the happens-before pass remembers of it."""


def subject(scenario: Scenario, under: OrderingProfile, max_memory: int = MAX_MEMORY) -> Any:
    """The kernels as a subject of the C++ searches."""
    if len(scenario.tokens) != scenario.ranks:
        raise ContractError(f"tokens are given for {len(scenario.tokens)} ranks and there are {scenario.ranks}")
    return native().EpSubject(scenario.native(), profile_dict(under), max_memory // 2)


def check(
    scenario: Scenario,
    under: OrderingProfile | str,
    *,
    search: str = "all",
    max_seconds: float = 60.0,
    max_runs: int = 1_000_000,
    seed: int = 0,
    delays: int = 1,
    depth: int = 3,
    max_memory: int = MAX_MEMORY,
    on: Any = None,
) -> EpVerdict:
    """Search ``scenario`` under a profile.

    ``search``: ``all`` (every schedule up to the order of independent steps), ``delays`` (at most ``delays`` entities
    held back), ``random`` (``max_runs`` random priority schedules), ``races`` (one run and its happens-before pass).
    ``all`` and ``races`` also report races. A run that would keep more than ``max_memory`` bytes is stopped, and the
    verdict's bound says where. ``on``: a prepared subject (with faults or a mutation).
    """
    prof = profile(under) if isinstance(under, str) else under
    native_ = native()
    what = subject(scenario, prof, max_memory) if on is None else on
    if search == "races":
        return _races(scenario, prof, what, max_memory)
    if search == "all":
        found = every_schedule(what, max_runs, max_seconds)
    elif search == "delays":
        found = native_.explore_delays(what, delays, max_runs, max_seconds, True)
    elif search == "random":
        found = native_.explore_random(what, seed, max_runs, depth, max_seconds, True)
    else:
        raise ContractError(f"unknown search '{search}'; known: all, delays, random, races")
    schedule = native_.shrink(what, found["schedule"], found["kind"]) if found["kind"] else ""
    if found["kind"] and schedule:
        again = native_.run(what, schedule)
        if again["kind"] == found["kind"]:
            found["failure"] = again["failure"]
    verdict = EpVerdict(
        scenario, prof, found["kind"], found["failure"], found["bound"], found["exhaustive"], found["runs"],
        found["total_steps"], found["seconds"], schedule,
    )  # fmt: skip
    if verdict.right and search == "all":
        return _with_races(verdict, _races(scenario, prof, what, max_memory))
    return verdict


_EXACT_RUNS = 100


def every_schedule(what: Any, max_runs: int, max_seconds: float, exact_runs: int = _EXACT_RUNS) -> dict[str, Any]:
    """The exhaustive search. Where a rank can run ahead, a wait may return this round's value or any later one, which
    multiplies the schedules; then they are searched with waits that return the least value that satisfies them, and what
    later values do is left to the schedules with one entity delayed."""
    engine = native()
    found: dict[str, Any] = engine.explore_all(what, min(exact_runs, max_runs), max_seconds, True)
    if found["kind"] or found["exhaustive"] or max_runs <= exact_runs:
        return found
    what.set_least_waits(True)
    least: dict[str, Any] = engine.explore_all(what, max_runs, max_seconds, True)
    what.set_least_waits(False)
    for key in ("runs", "total_steps", "seconds"):
        least[key] += found[key]
    least["bound"] += ", waits return the least value that satisfies them"
    return least


def _with_races(verdict: EpVerdict, races: EpVerdict) -> EpVerdict:
    if not races.right:
        return replace(verdict, kind=races.kind, failure=races.failure, races=races.races)
    if _STOPPED in races.bound:
        return replace(verdict, exhaustive=False, bound=f"{verdict.bound}; {races.bound}")
    return verdict


_STOPPED = "stopped"


def _races(scenario: Scenario, prof: OrderingProfile, what: Any, max_memory: int) -> EpVerdict:
    what.set_track(False)  # a single run needs no step numbers
    found = native().find_races(what, max_bytes=max_memory // 2)
    what.set_track(True)
    texts = tuple(r["text"] for r in found["races"])
    kind = "race" if texts else found["kind"]
    failure = texts[0] if texts else found["failure"]
    bound = f"happens-before over one run, {found['events']} events"
    if found["stopped"]:
        bound += f"; the run {_STOPPED} there at the limit of {max_memory} bytes, its results are not judged"
    if found["judged"] < found["events"]:
        bound += f"; the pass {_STOPPED} at event {found['judged']} at the limit of {max_memory} bytes"
    if not found["settled"]:
        bound += f"; {_STOPPED} after {found['passes']} passes, each found one more signal that a wait could have taken"
    return EpVerdict(
        scenario,
        prof,
        kind,
        failure,
        bound,
        False,
        1,
        found["judged"],
        found["seconds"],
        "eager" if kind else "",
        texts,
    )


def small(schedule: str, completion: str, layout: str = "rank") -> Iterator[Scenario]:
    """The scenarios of ``hal check ep --all`` for one protocol: the plain one, and one for each way to reuse memory."""
    nodes, ranks = (2, 4) if schedule == "hierarchical" else (1, 3)
    base = Scenario(
        ranks=ranks, tokens=(2,) * ranks, schedule=schedule, completion=completion, layout=layout, nodes=nodes
    )
    yield base
    yield replace(base, tokens=(0, *(3,) * (ranks - 1)), rounds=4, spread=2)
    yield replace(base, tokens=(5, *(1,) * (ranks - 1)), top_k=1, rounds=3, piece_bytes=8)
    yield replace(base, rounds=4, in_flight=2, weights_back=True)
    yield replace(base, rounds=2, reuse_handle=True, combines=2)
    yield replace(base, rounds=1, combines=4, halves=True)
    yield replace(base, rounds=3, on_peer_loss="mask")
    if schedule != "hierarchical":
        yield replace(base, ranks=2, tokens=(6, 3), rounds=3, combines=2)


def protocols(
    schedules: Sequence[str] = SCHEDULES, completions: Sequence[str] = COMPLETIONS
) -> Iterator[tuple[str, str]]:
    """Every (schedule, completion) pair."""
    for known, given, what in ((SCHEDULES, schedules, "schedule"), (COMPLETIONS, completions, "completion")):
        for name in given:
            if name not in known:
                raise ContractError(f"unknown {what} '{name}'; known: {', '.join(known)}")
    return ((s, c) for s in schedules for c in completions)


def large(schedule: str, completion: str, ranks: int, tokens: int, *, rounds: int = 1) -> Scenario:
    """A scenario for one-run verdicts."""
    nodes = max(2, ranks // 8) if schedule == "hierarchical" else 1
    return Scenario(
        ranks=ranks,
        tokens=(tokens,) * ranks,
        schedule=schedule,
        completion=completion,
        nodes=nodes,
        top_k=8,
        rounds=rounds,
    )


def check_all(
    schedules: Sequence[str] = SCHEDULES,
    completions: Sequence[str] = COMPLETIONS,
    profiles: Sequence[str] = tuple(PROFILES),
    *,
    layouts: Sequence[str] = LAYOUTS,
    max_seconds: float = 10.0,
) -> Iterator[EpVerdict]:
    """Every protocol, layout, small scenario and profile, exhaustively (each search bounded by ``max_seconds``)."""
    for schedule, completion in protocols(schedules, completions):
        for layout in layouts:
            for scenario in small(schedule, completion, layout):
                for name in profiles:
                    yield check(scenario, name, max_seconds=max_seconds)
