# SPDX-License-Identifier: Apache-2.0
"""Programs and profiles in the form of the C++ explorer (kernels_host/checker)."""

from __future__ import annotations

from typing import Any, cast

from hal.checker.program import Barrier, Condition, Instruction, Place, Program, Put, Quiet, Read, Signal, Wait, Write
from hal.ordering import OrderingProfile, QuietScope, Scope

# The values of hal::checker::Do and ConditionOp::Kind.
_DO = {n: i for i, n in enumerate(("put", "signal", "wait", "quiet", "write", "read", "arrive", "pass"))}
_CONDITION = {
    n: i
    for i, n in enumerate(("number", "register", "memory", "deadlock", "==", "!=", "<", "<=", ">", ">=", "and", "or"))
}


def native() -> Any:
    """The C++ module; imported when first needed, so that ``import hal`` stays light."""
    from hal_host import _engine  # type: ignore[attr-defined,unused-ignore]

    return cast(Any, _engine).checker


def profile_dict(p: OrderingProfile) -> dict[str, Any]:
    return {
        "name": p.name,
        "precedes": [(int(a), int(e), int(o)) for a, e, o in p.precedes],
        "origin_scope": p.scope is Scope.ORIGIN,
        "at_issue": p.at_issue,
        "source_read_at_issue": p.source_read_at_issue,
        "quiet_source_is_remote": p.quiet_source_is_remote,
        "none_is_relaxed": "put.none" in p.promoted,
        "weak_is_strong": p.promoted.get("signal.weak") == "signal.strong",
        "bundled_is_strong": p.promoted.get("signal.bundled") == "signal.strong",
        "build_strong_put": "put.strong" in p.built,
        "build_strong_signal": "signal.strong" in p.built,
        "one_submitter": p.limits.one_submitter,
        "max_put_bytes": p.limits.max_put_bytes or 0,
    }


def program_dict(program: Program) -> dict[str, Any]:
    registers = {key: i for i, key in enumerate(program.registers)}
    code: list[dict[str, Any]] = []
    for number, thread in enumerate(program.threads):
        for instruction in thread.body:
            base = {"rank": thread.rank, "thread": number, "text": f"rank {thread.rank}: {instruction}"}
            code += [{**base, **part} for part in _parts(program, registers, thread.rank, instruction)]
    return {
        "ranks": program.ranks,
        "words": program.words,
        "registers": len(registers),
        "threads": len(program.threads),
        "barrier_threads": sum(any(isinstance(i, Barrier) for i in t.body) for t in program.threads),
        "code": code,
        "bad": _postfix(program, registers, program.bad),
    }


def _value(registers: dict[tuple[int, str], int], rank: int, value: int | str | None) -> dict[str, Any]:
    if isinstance(value, str):
        return {"value_register": registers[(rank, value)]}
    return {"value": value or 0}


def _parts(
    program: Program, registers: dict[tuple[int, str], int], rank: int, instruction: Instruction
) -> list[dict[str, Any]]:
    """One instruction, or for a barrier its quiet, arrival and passage."""

    def at(place: Place) -> int:
        return program.offset(place)

    match instruction:
        case Put(dst, peer, value, source, queue, order, own):
            part: dict[str, Any] = {
                "what": _DO["put"], "peer": peer, "queue": queue, "order": int(order), "dst": at(dst),
                "count": dst.count,
                **_value(registers, rank, value),
            }  # fmt: skip
            if source is not None:
                part["src"] = at(source)
            if own is not None:
                part |= {"slot": at(own.slot), "signal_value": own.value, "signal_op": int(own.op),
                         "signal_order": int(own.order)}  # fmt: skip
            return [part]
        case Signal(slot, peer, value, op, queue, order):
            return [{
                "what": _DO["signal"], "peer": peer, "queue": queue, "order": int(order), "slot": at(slot),
                "signal_value": value, "signal_op": int(op), "signal_order": int(order),
            }]  # fmt: skip
        case Wait(slot, at_least):
            return [{"what": _DO["wait"], "dst": at(slot), "at_least": at_least}]
        case Quiet(scope, quiet_queue, quiet_peer):
            return [{
                "what": _DO["quiet"], "remote": scope is QuietScope.REMOTE,
                "queue": -1 if quiet_queue is None else quiet_queue, "peer": -1 if quiet_peer is None else quiet_peer,
            }]  # fmt: skip
        case Barrier(complete):
            first = [{"what": _DO["quiet"], "remote": True}] if complete else []
            return [*first, {"what": _DO["arrive"]}, {"what": _DO["pass"]}]
        case Write(dst, value):
            return [{"what": _DO["write"], "dst": at(dst), **_value(registers, rank, value)}]
        case Read(register, source):
            return [{"what": _DO["read"], "dst": at(source), "reg": registers[(rank, register)]}]


def _postfix(program: Program, registers: dict[tuple[int, str], int], condition: Condition) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for side in (condition.left, condition.right):
        if isinstance(side, Condition):
            out += _postfix(program, registers, side)
        elif side is not None:
            value = {
                "number": side.value,
                "register": registers.get((side.rank, side.name), 0),
                "memory": 0,
                "deadlock": 0,
            }[side.kind]
            if side.kind == "memory":
                value = side.rank * program.words + program.offset(Place(side.name, side.index))
            out.append((_CONDITION[side.kind], value))
    if condition.right is not None:
        out.append((_CONDITION[condition.op], 0))
    return out
