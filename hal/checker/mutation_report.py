# SPDX-License-Identifier: Apache-2.0
"""docs/mutation.md from a mutation run."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from hal.checker.mutation import JUDGES, PLACES, MutantClass, Result

REASONS: dict[tuple[str, str, str, str], str] = {
    (
        "*/strong_signal*",
        "put",
        "*",
        "other_queue",
    ): "each queue ends with its own strong signal, and the receiver waits "
    "for both, so a row may go by either: the 3:1 split is for speed",
    (
        "*/strong_last",
        "put",
        "*",
        "weaken",
    ): "the quiet(remote) of every queue before the step signal covers the rows: with "
    "HAL's quiet the strong last row is a speed-up left out, and needed only where quiet counts completion entries alone",
    ("*/strong_last", "quiet", "quiet source", "remove"): "quiet(remote) of the same queues came before",
    (
        "*",
        "wait",
        "combine credit",
        "value_up",
    ): "waits for one round more than it must: slower; a hang needs every rank to",
    ("*/strong_signal_no_cqe", "wait", "combine credit", "*"): "the exit of an earlier combine has waited for the same "
    "credit already; its own waits are mutated as 'combine exit'",
    (
        "*",
        "wait",
        "*rows",
        "value_down",
    ): "a slot holds whole rounds: no value lies between the round before and this one",
    (
        "*",
        "wait",
        "dispatch ready",
        "value_down",
    ): "a slot holds every second round's word: none lies one below this one",
}
"""(protocol, primitive, role, change), as patterns: why a class that nothing kills makes no difference."""


def reason(kind: MutantClass) -> str:
    """Why a redundant class is redundant; empty if nobody has said."""
    parts = (kind.protocol, kind.primitive, kind.role, kind.change)
    for patterns, text in REASONS.items():
        if all(map(fnmatchcase, parts, patterns)):
            return text
    return ""


def classes(result: Result) -> list[MutantClass]:
    return sorted(
        {*result.killed, *result.redundant, *result.open}, key=lambda k: (k.protocol, k.primitive, k.role, k.change)
    )


def unexplained(result: Result) -> list[MutantClass]:
    """Classes that nothing killed and nobody explained."""
    return [k for k in classes(result) if not result.killed[k] and not reason(k)]


def summary(result: Result) -> str:
    kinds = classes(result)
    killed = sum(bool(result.killed[k]) for k in kinds)
    left = len(unexplained(result))
    mutants = sum((result.killed + result.redundant + result.open).values())
    return (
        f"{mutants} mutants ({sum(result.killed.values())} killed, {sum(result.redundant.values())} redundant where they "
        f"stand, {sum(result.open.values())} undecided) in {len(kinds)} classes: {killed} killed, "
        f"{len(kinds) - killed - left} proved redundant, {left} unexplained"
    )


def markdown(result: Result, seconds: float) -> str:
    """The whole page."""
    lines = [
        "# Mutation score of the shipped protocols",
        "",
        "Written by `hal check mutation --out docs/mutation.md`. Each call of rank 0 that sends or orders (all ranks run "
        f"the same program) is changed in turn, up to {PLACES} places of each class in each scenario, in every schedule and "
        f"completion protocol, and judged under {' and '.join(f'`{j}`' for j in JUDGES)} in the scenarios of "
        "`hal/checker/mutation.py`.",
        "",
        "- *killed*: wrong data, a hang, an exception, a source changed too early, or a race, in some scenario;",
        "- *redundant*: the exhaustive search and the happens-before pass find nothing in any scenario, so at these sizes "
        "the primitive can be weakened so; the reason says why. A call can be redundant in one place (the signal of a "
        "queue without rows) and needed in another: the counts show both.",
        "",
        f"{summary(result)}. {seconds:.0f} s on a 2-core x86-64 VM.",
        "",
        "| protocol | primitive | role | change | killed | by | redundant | why redundant |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(result, k) for k in classes(result)]
    return "\n".join(lines) + "\n"


def _row(result: Result, k: MutantClass) -> str:
    how = ", ".join(f"{name} {n}" for name, n in result.by[k].most_common()) if k in result.by else ""
    left = result.redundant[k] + result.open[k]
    why = ""
    if not result.killed[k]:
        why = reason(k) or "**unexplained**"
    elif left:
        why = _where(k)
    cells: Iterable[object] = (k.protocol, k.primitive, k.role, k.change, result.killed[k] or "", how, left or "", why)
    return "| " + " | ".join(str(c) for c in cells) + " |"


def _where(k: MutantClass) -> str:
    """Why some places of a class that is needed elsewhere do without."""
    if k.primitive == "signal":
        return "places whose queue carried no rows, or the last round's"
    if k.primitive == "wait":
        return "places where another wait covers it, or the value cannot occur"
    if k.primitive == "put":
        return "places that are covered twice, or whose bytes were right already"
    return "places with nothing in flight"
