# SPDX-License-Identifier: Apache-2.0
"""Failing schedules found, shrunk, and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hal.checker import diagram
from hal.checker.engine import native, profile_dict, program_dict
from hal.checker.program import Program
from hal.errors import ContractError
from hal.ordering import OrderingProfile

_WHOLE = 40
"""Runs of at most so many lines are drawn whole."""


@dataclass(frozen=True)
class Picture:
    schedule: str
    failure: str
    text: str
    svg: str


def litmus_failure(program: Program, under: OrderingProfile) -> Picture:
    """The shortest schedule in which the program's bad outcome (or a hang) is reached."""
    engine = native()
    subject = engine.LitmusSubject(program_dict(program), profile_dict(under))
    found = engine.explore_all(subject, 1_000_000, 60.0, True)
    if not found["kind"]:
        raise ContractError(f"{program.name} has no bad outcome under {under.name} to draw")
    schedule = engine.shrink(subject, found["schedule"], found["kind"])
    return draw(subject, schedule, program.ranks)


def draw(subject: Any, schedule: str, ranks: int) -> Picture:
    """One run of a subject under a schedule."""
    try:
        run = native().run(subject, schedule, True)
    except ValueError as error:
        raise ContractError(f"'{schedule}' is no schedule: {error}") from None
    failure = f"{run['kind']}: {run['failure']}" if run["kind"] else ""
    words = schedule.split()
    held = words[1:] if words[:1] == ["hold"] else []
    lines = diagram.marks(run["events"])
    if len(lines) > _WHOLE:
        lines = diagram.focus(lines, held)
    return Picture(
        schedule, failure, diagram.text(lines, ranks, held, failure), diagram.svg(lines, ranks, held, failure)
    )
