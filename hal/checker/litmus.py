# SPDX-License-Identifier: Apache-2.0
"""The litmus library, and the verdict of a program under a profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path

from hal.checker.engine import native, profile_dict, program_dict
from hal.checker.parser import parse
from hal.checker.program import Program
from hal.errors import ContractError
from hal.ordering import PROFILES, OrderingProfile, profile

MAX_STATES = 20_000_000
MAX_SECONDS = 60.0


@dataclass(frozen=True)
class Verdict:
    """What the search found. ``code`` is the table's letter; docs/checker.md says what each proves.

    A: the bad outcome is allowed. F: forbidden (every delivery order was tried). -: the profile does not have a word
    the program is about. E: the profile refuses the program. ?: the search hit its limit first. ``!``: legal under the
    profile, undefined by the contract.
    """

    program: Program
    profile: OrderingProfile
    code: str
    reason: str
    outcomes: tuple[tuple[int, ...], ...] = ()
    """Registers (``program.registers``), then memory rank by rank, then 1 for a deadlock."""
    schedule: tuple[int, ...] = ()
    states: int = 0
    transitions: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    exhaustive: bool = True
    warnings: tuple[str, ...] = field(default=())

    @property
    def expected(self) -> str | None:
        return self.program.expect.get(self.profile.name)

    @property
    def agrees(self) -> bool:
        return self.code == self.expected

    @property
    def bound(self) -> str:
        """How far the search came; every claim is about this program and this profile only."""
        done = "exhaustive" if self.exhaustive else "not exhaustive"
        return f"{done}: {self.states} states, {self.transitions} transitions, {self.seconds:.3f} s"


@cache
def library() -> dict[str, Program]:
    """The programs that HAL ships, by name."""
    folder = resources.files("hal.checker") / "programs"
    texts = {f.name: f.read_text(encoding="utf-8") for f in folder.iterdir() if f.name.endswith(".litmus")}
    programs = [parse(texts[name], name) for name in sorted(texts)]
    return {p.name: p for p in programs}


def load(name: str) -> Program:
    """A program of the library, or of a file (a path that ends in ``.litmus``)."""
    if name.endswith(".litmus"):
        path = Path(name)
        if not path.is_file():
            raise ContractError(f"no file '{name}'; give a path to a .litmus file, or a name from `hal litmus list`")
        try:
            return parse(path.read_text(encoding="utf-8"), name)
        except UnicodeDecodeError as error:
            raise ContractError(f"{name} is no text: {error}") from None
    programs = library()
    if name not in programs:
        raise ContractError(f"unknown litmus program '{name}'; known: {', '.join(programs)}")
    return programs[name]


def run(
    program: Program,
    under: OrderingProfile | str,
    *,
    max_states: int = MAX_STATES,
    max_seconds: float = MAX_SECONDS,
    sleep_sets: bool = True,
) -> Verdict:
    """Explore ``program`` under a profile and give the verdict."""
    prof = profile(under) if isinstance(under, str) else under
    found = native().litmus_search(program_dict(program), profile_dict(prof), max_states, max_seconds, sleep_sets)
    code, reason = _code(program, prof, found)
    warnings = tuple(found["warnings"])
    return Verdict(
        program,
        prof,
        code + ("!" if warnings and code in "AF" else ""),
        reason,
        tuple(sorted(tuple(o) for o in found["outcomes"])),
        tuple(found["schedule"]),
        found["states"],
        found["transitions"],
        found["seconds"],
        found["cpu_seconds"],
        found["exhaustive"],
        warnings,
    )


def _code(program: Program, prof: OrderingProfile, found: dict[str, object]) -> tuple[str, str]:
    if found["contract_error"]:
        return "E", f"{prof.name} refuses this program: {found['contract_error']}"
    outcome = "allowed" if found["bad"] else "forbidden"
    for word in program.needs:
        how = prof.promoted.get(word) or prof.built.get(word)
        if how:
            verb = "acts as" if word in prof.promoted else "is built by HAL:"
            return "-", f"{prof.name} has no {word} of its own; it {verb} {how}; so run, the bad outcome is {outcome}"
    if found["bad"]:
        return "A", f"bad outcome allowed: {program.bad}"
    if not found["exhaustive"]:
        return "?", "not exhaustive: the search hit its limit before it saw every state"
    if found["deadlock"]:
        return "D", "some schedule never ends, and the program does not name that as its bad outcome"
    return "F", "bad outcome forbidden in every delivery order"


def table(programs: Sequence[Program], profiles: Sequence[str] = tuple(PROFILES)) -> list[Verdict]:
    """Every program under every profile."""
    return [run(p, name) for p in programs for name in profiles]


def is_robust(program: Program, under: OrderingProfile | str) -> bool:
    """Whether the profile adds no outcome to those of ``sc``."""
    return set(run(program, under).outcomes) <= set(run(program, "sc").outcomes)
