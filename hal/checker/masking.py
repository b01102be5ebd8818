# SPDX-License-Identifier: Apache-2.0
"""Ranks that stop at every step of the shipped kernels under ``on_peer_loss="mask"``: the others go on with right results,
in a round all with the same mask, and never without end; one that goes on later hears that it is masked."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from hal import reference
from hal.checker import ep
from hal.checker.engine import native, profile_dict
from hal.checker.mutation import KINDS
from hal.config import TopologyConfig
from hal.ordering import OrderingProfile, profile

NEVER, NOTICED, LAST = range(3)
"""When a stopped rank goes on: never, when the others' time was up, when the others have ended."""
_RESUMES = ("", ", and goes on while they agree", ", and goes on when they have ended")
_HEADER = struct.Struct("<qqq")


@dataclass(frozen=True)
class LossVerdict:
    """What became of one run in which ranks stopped."""

    scenario: ep.Scenario
    profile: OrderingProfile
    fault: str
    wrong: str
    """Empty = right."""
    masked: tuple[int, ...] = ()
    """By the end."""

    @property
    def right(self) -> bool:
        return not self.wrong

    def line(self) -> str:
        state = "ok" if self.right else "WRONG"
        return f"{state:5} {self.profile.name:9} {self.scenario.describe()}: {self.fault}: {self.wrong or self.masked}"


class Losses:
    """One scenario under one profile, run again and again with other ranks stopped at other steps."""

    def __init__(self, scenario: ep.Scenario, under: OrderingProfile | str) -> None:
        self.scenario = replace(scenario, on_peer_loss="mask")
        self.profile = profile(under) if isinstance(under, str) else under
        self._subject = native().MaskingSubject(self.scenario.native(), profile_dict(self.profile))
        self._expected = cache(self._compute)
        native().run(self._subject, "eager")
        self.calls = [int(self._subject.calls(rank)) for rank in range(scenario.ranks)]
        """Calls of each rank when nobody stops."""

    def calls_in(self, stage: str) -> list[tuple[int, int]]:
        """(rank, number) of the waits of a stage, for :meth:`leave_out`."""
        self._subject.set_faults({})
        self._subject.set_track(True)
        calls = native().run(self._subject, "eager")["calls"]
        self._subject.set_track(False)
        return [(call["thread"], call["number"]) for call in calls if call["stage"] == stage]

    def leave_out(self, rank: int, number: int) -> None:
        """From now on that call of that rank does nothing: a broken protocol, for tests of this check."""
        self._subject.set_mutation(KINDS.index("remove"), rank, number)

    def run(
        self, rank: int, after: int, resume: int = NEVER, second: tuple[int, int] | None = None, idle: bool = False
    ) -> LossVerdict:
        """``rank`` stops after its call number ``after``; so does ``second`` (rank, call), if given. With ``idle`` ranks that
        have made all their calls stay there, answer nobody, and must not be masked for it."""
        faults: dict[str, Any] = {"stalled": (rank, after), "resume": resume, "idle_at_end": idle}
        fault = f"rank {rank} stops after call {after}" + (", the others stay idle when they are done" if idle else "")
        victims = {rank}
        if second is not None:
            faults["stalled_too"] = second
            victims.add(second[0])
            fault += f", rank {second[0]} after call {second[1]}"
        self._subject.set_faults(faults)
        ran = native().run(self._subject, "eager")
        masked: tuple[int, ...] = ()
        try:
            masked = self._judge(ran, victims, resume)
            wrong = ""
        except _Wrong as error:
            wrong = str(error)
        return LossVerdict(self.scenario, self.profile, fault + _RESUMES[resume], wrong, masked)

    def random(self, rank: int, after: int, resume: int, seed: int) -> LossVerdict:
        """One random schedule."""
        self._subject.set_faults({"stalled": (rank, after), "resume": resume})
        found = native().explore_random(self._subject, seed, 1, 3, 60.0, True)
        fault = f"rank {rank} stops after call {after}{_RESUMES[resume]}, random schedule {seed}"
        if found["kind"]:
            return LossVerdict(self.scenario, self.profile, fault, f"{found['kind']}: {found['failure']}")
        try:
            return LossVerdict(
                self.scenario, self.profile, fault, "", self._judge({"kind": "", "timed_out": {}}, {rank}, resume)
            )
        except _Wrong as error:
            return LossVerdict(self.scenario, self.profile, fault, str(error))

    def _judge(self, ran: dict[str, Any], victims: set[int], resume: int) -> tuple[int, ...]:
        if ran["kind"]:
            raise _Wrong(f"{ran['kind']}: {ran['failure']}")
        if ran["timed_out"]:
            raise _Wrong(f"PeerTimeout on ranks {sorted(ran['timed_out'])}")
        ends = [self._subject.end(rank) for rank in range(self.scenario.ranks)]
        for rank, end in enumerate(ends):
            allowed = {"went on"} if rank not in victims else {"went on", "stopped" if resume == NEVER else "masked"}
            if end not in allowed:
                raise _Wrong(f"rank {rank} {end}")
        masks: dict[tuple[int, int], int] = {}
        last = 0
        for rank in range(self.scenario.ranks):
            for kind, number, mask in self._read(rank):
                # A rank that died is bound by what it ended; one that is only slow may end one call on its own.
                if rank in victims and resume != NEVER:
                    continue
                if masks.setdefault((kind, number), mask) != mask:
                    raise _Wrong(
                        f"rank {rank} has mask {mask:b} in {_NAMES[kind]} {number}, others {masks[kind, number]:b}"
                    )
                last |= mask
        if last & ~sum(1 << victim for victim in victims):
            raise _Wrong(f"ranks of mask {last:b} were left out, and only {sorted(victims)} stopped")
        if any(len({k for k, n in masks if n == number}) != 2 for number in range(self.scenario.rounds)):
            raise _Wrong("not every round ended")
        return tuple(rank for rank in range(self.scenario.ranks) if last >> rank & 1)

    def _read(self, rank: int) -> Iterator[tuple[int, int, int]]:
        """(kind, round, mask) of each call that ended on a rank, its bytes held against the reference."""
        data, at = self._subject.output(rank), 0
        dispatched: dict[int, int] = {}
        while at < len(data):
            kind, number, mask = _HEADER.unpack_from(data, at)
            at += _HEADER.size
            dispatched.setdefault(number, mask)
            want = self._expected(number, dispatched[number], mask)[kind][rank]
            if data[at : at + len(want)] != want:
                raise _Wrong(f"rank {rank}: wrong data in {_NAMES[kind]} {number} with mask {mask:b}")
            at += len(want)
            yield kind, number, mask

    def _compute(self, number: int, at_dispatch: int, at_combine: int) -> tuple[list[bytes], list[bytes]]:
        """The bytes that each rank's dispatch and combine of a round give under these masks."""
        scenario, spec = self.scenario, self.scenario.spec
        masked, later = (tuple(r for r in range(scenario.ranks) if m >> r & 1) for m in (at_dispatch, at_combine))
        x, idx, weights = zip(*(self._input(rank, number) for rank in range(scenario.ranks)), strict=True)
        want, handle = reference.dispatch(spec, x, idx, weights, masked=masked)
        rows = [out.x.astype(np.float32) * np.float32(rank + 2) for rank, out in enumerate(want)]
        sums = reference.combine(rows, handle, topology=TopologyConfig(scenario.nodes), masked=later)
        planes = [(out.x, out.topk_idx, out.topk_weights, out.tokens_per_expert) for out in want]
        return [b"".join(plane.tobytes() for plane in each) for each in planes], [np.asarray(y).tobytes() for y in sums]

    def _input(self, rank: int, number: int) -> tuple[Any, Any, Any]:
        """As kernels_host/checker/masking_subject.cpp makes it."""
        scenario = self.scenario
        tokens, k, experts = scenario.tokens[rank], scenario.top_k, 2 * scenario.ranks
        x = np.float32(1 + number * 1000 + rank * 100) + np.arange(tokens * scenario.hidden, dtype=np.float32)
        weights = np.float32(0.5) + np.arange(tokens * k, dtype=np.float32) + np.float32(number + rank)
        idx = (np.array(scenario.topk_idx(rank), np.int64) + number) % experts
        return x.reshape(tokens, -1), idx.reshape(tokens, k), weights.reshape(tokens, k)


_NAMES = ("dispatch", "combine")


class _Wrong(Exception):
    pass


def scenarios(schedule: str, completion: str, layouts: Sequence[str] = ep.LAYOUTS) -> Iterator[ep.Scenario]:
    """For each layout: two rounds one after the other, and two dispatches in flight."""
    for layout in layouts:
        base = replace(next(iter(ep.small(schedule, completion, layout))), on_peer_loss="mask")
        yield base
        yield replace(base, in_flight=2, tokens=(1,) * base.ranks)


def check(scenario: ep.Scenario, under: OrderingProfile | str, *, every: int = 1) -> Iterator[LossVerdict]:
    """Each rank stops after each of its calls (one in ``every``), for good, for a while, and with another rank's end."""
    losses = Losses(scenario, under)
    for rank in range(scenario.ranks):
        for after in range(1, losses.calls[rank] + 1, every):
            for resume in (NEVER, NOTICED, LAST):
                yield losses.run(rank, after, resume)
            yield losses.run(rank, after, idle=True)
            other = (rank + 1 + after % (scenario.ranks - 1)) % scenario.ranks
            yield losses.run(rank, after, NEVER, (other, 1 + after * 7 % (losses.calls[other] + 20)))
