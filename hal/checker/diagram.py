# SPDX-License-Identifier: Apache-2.0
"""A run as a space-time diagram: one column for each rank, time downwards; as text and as SVG."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_WIDTH = 30
_ROW = 22
_LANE = 230


@dataclass(frozen=True)
class Mark:
    """One line of the diagram: what happens at ``rank``, and for a delivery from which rank and line it comes."""

    rank: int
    text: str
    entity: str = ""
    issued_at: int = -1
    from_rank: int = -1


def marks(events: Sequence[dict[str, Any]]) -> list[Mark]:
    """The log's events in the order of the run, deliveries linked to their issue."""
    out: list[Mark] = []
    issued: dict[str, tuple[int, int]] = {}
    for e in events:
        what, rank = e["what"], e["rank"]
        if what == "issue":
            word = "signal" if e["is_signal"] else "put"
            order = e["name"].split("(")[1].split(",")[0]
            issued[e["entity"]] = (len(out), rank)
            out.append(Mark(rank, f"{word} {e['entity']} {order} to {e['peer']} q{e['queue']}", e["entity"]))
        elif what == "deliver":
            line, origin = issued.get(e["entity"], (-1, rank))
            word = "raises" if e["is_signal"] else "writes"
            out.append(Mark(e["peer"], f"{e['entity']} {word} [{e['begin']}..{e['end']})", e["entity"], line, origin))
        elif what == "source_read":
            out.append(Mark(rank, f"{e['entity']} source is read", e["entity"]))
        elif what == "wait":
            out.append(Mark(rank, f"wait [{e['begin']}] >= {e['value']} {e['stage']}".rstrip()))
        elif what in ("read", "write"):
            out.append(Mark(rank, f"{what} [{e['begin']}..{e['end']})"))
        elif what == "quiet":
            out.append(Mark(rank, f"quiet {'remote' if e['value'] else 'source'}"))
        elif what in ("arrive", "pass"):
            out.append(Mark(rank, f"barrier: {what}"))
    return out


def operation_of(entity: str) -> str:
    """``0.3`` of the entity ``0.3w``; a thread's entity has no operation."""
    match = re.match(r"\d+\.\d+", entity)
    return match.group() if match else ""


def focus(all_marks: Sequence[Mark], entities: Sequence[str], around: int = 6) -> list[Mark]:
    """The lines around the entities that a failing schedule holds back, and the end of the run."""
    named = {operation_of(e) for e in entities}
    keep: set[int] = set(range(max(0, len(all_marks) - 2 * around), len(all_marks)))
    for i, mark in enumerate(all_marks):
        if mark.entity and mark.entity in named:
            keep |= set(range(max(0, i - around), min(len(all_marks), i + around + 1)))
    return [m for i, m in enumerate(all_marks) if i in keep]


def text(lines: Sequence[Mark], ranks: int, held: Sequence[str] = (), failure: str = "") -> str:
    """Columns for the terminal. ``*`` marks a delivery that the schedule held back."""
    late_ones = {operation_of(h) for h in held}
    head = "".join(f"rank {r}".ljust(_WIDTH) for r in range(ranks)).rstrip()
    out = [head, "".join(("-" * (_WIDTH - 2)).ljust(_WIDTH) for _ in range(ranks)).rstrip()]
    for mark in lines:
        star = "*" if bool(mark.entity) and mark.entity in late_ones else " "
        arrow = f" <- {mark.from_rank}" if mark.from_rank not in (-1, mark.rank) else ""
        cell = f"{star}{mark.text}{arrow}"
        out.append((" " * (_WIDTH * mark.rank) + cell).rstrip())
    if failure:
        out += ["", f"=> {failure}"]
    return "\n".join(out)


def svg(lines: Sequence[Mark], ranks: int, held: Sequence[str] = (), failure: str = "") -> str:
    """The same as a stand-alone SVG: lanes for ranks, an arrow for each delivery."""
    late_ones = {operation_of(h) for h in held}
    where = {id(m): i for i, m in enumerate(lines)}
    issue = {m.entity: i for i, m in enumerate(lines) if m.entity and m.from_rank == -1 and "source" not in m.text}
    height = 70 + _ROW * len(lines) + (30 if failure else 0)
    width = _LANE * ranks + 40

    def x(rank: int) -> int:
        return 30 + _LANE * rank

    def y(line: int) -> int:
        return 60 + _ROW * line

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" font-size="11">',
        '<defs><marker id="a" markerWidth="8" markerHeight="8" refX="7" refY="3" orient="auto">'
        '<path d="M0,0 L7,3 L0,6 z"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for r in range(ranks):
        out.append(f'<text x="{x(r)}" y="24" font-weight="bold">rank {r}</text>')
        out.append(f'<line x1="{x(r)}" y1="34" x2="{x(r)}" y2="{y(len(lines))}" stroke="#bbb"/>')
    for mark in lines:
        i = where[id(mark)]
        late = bool(mark.entity) and mark.entity in late_ones
        color = "#c00" if late else "#222"
        if mark.from_rank != -1 and mark.entity in issue:
            j = issue[mark.entity]
            out.append(
                f'<line x1="{x(mark.from_rank)}" y1="{y(j)}" x2="{x(mark.rank)}" y2="{y(i)}" stroke="{color}" '
                'stroke-width="1" marker-end="url(#a)"/>'
            )
        out.append(f'<circle cx="{x(mark.rank)}" cy="{y(i)}" r="3" fill="{color}"/>')
        out.append(f'<text x="{x(mark.rank) + 8}" y="{y(i) + 4}" fill="{color}">{escape(mark.text)}</text>')
    if failure:
        out.append(f'<text x="30" y="{y(len(lines)) + 24}" fill="#c00">{escape(failure)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def histogram(counts: dict[str, int], forbidden: Sequence[str] = (), width: int = 40) -> str:
    """Outcome, count and a bar, most frequent first; ``!`` marks what the model forbids."""
    if not counts:
        return "(no outcome)"
    longest, most = max(map(len, counts)), max(counts.values())
    lines = []
    for outcome, n in sorted(counts.items(), key=lambda item: -item[1]):
        bar = "#" * max(1, round(width * n / most))
        lines.append(f"{'!' if outcome in forbidden else ' '} {outcome:<{longest}} {n:8d} {bar}")
    return "\n".join(lines)
