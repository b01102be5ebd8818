# SPDX-License-Identifier: Apache-2.0
"""The end of a run of emulated engines as a space-time diagram."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hal.checker import diagram
from hal.checker.pictures import Picture

_LINES = 40
"""Of the diagram: the last ones, and those around the most overtaken operation."""
_ODR = {0: "NO", 5: "RO", 6: "SO"}


def picture(events: Sequence[dict[str, Any]], ranks: int, seed: int, failure: str) -> Picture:
    """``events``: the last steps of all engines (_engine.World.recent). ``*`` marks the operation that most others of its
    PE, given later, have overtaken."""
    marks = [_mark(event) for event in events]
    held = [entity] if (entity := _most_overtaken(events)) else []
    lines = diagram.focus(marks, held) if len(marks) > _LINES else marks
    return Picture(
        f"seed {seed}", failure, *(draw(lines, ranks, held, failure) for draw in (diagram.text, diagram.svg))
    )


def _entity(event: dict[str, Any]) -> str:
    return f"{event['pe']}.{event['operation']}"


def _mark(event: dict[str, Any]) -> diagram.Mark:
    entity, pe, target = _entity(event), event["pe"], event["target"]
    if event["what"] == "take":
        word = "notify" if event["notifies"] else "write"
        order = _ODR.get(event["odr"], str(event["odr"]))
        return diagram.Mark(pe, f"{word} {entity} {order} {event['bytes']} B to {target} q{event['qp']}", entity)
    if event["what"] == "land":
        piece = f" {event['landed']}/{event['pieces']}" if event["pieces"] > 1 else ""
        return diagram.Mark(target, f"{entity} lands{piece}", entity, from_rank=pe)
    return diagram.Mark(pe, f"{entity} completion entry")


def _most_overtaken(events: Sequence[dict[str, Any]]) -> str:
    """The operation that the most operations of its PE passed, which were taken after it; empty if none was passed."""
    taken: dict[str, int] = {}
    last: dict[str, int] = {}
    for at, event in enumerate(events):
        if event["what"] == "take":
            taken[_entity(event)] = at
        elif event["what"] == "land":
            last[_entity(event)] = at
    passed = {
        one: sum(
            taken[one] < taken[other] and last[other] < at
            for other in taken
            if other in last and other.partition(".")[0] == one.partition(".")[0]
        )
        for one, at in last.items()
        if one in taken
    }
    most = max(passed, key=passed.__getitem__, default="")
    return most if most and passed[most] else ""
