# SPDX-License-Identifier: Apache-2.0
"""Litmus programs of the ordering contract: list them, run them in the model or on a real transport.

hal litmus list
hal litmus profiles udma
hal litmus run --all
hal litmus run two-queues --profile gin --diagram
hal litmus run mine.litmus --profile udma --svg out.svg
hal litmus run two-queues --backend host -n 1000
hal litmus run --all --backend ascend --transport udma_emulated -n 100
hal litmus run --all --backend cuda --transport gin_emulated --hosts 2 -n 200 --seed 7
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from hal.cli import at_least, output_file
from hal.errors import ContractError

_ON_TRANSPORT = ("transport", "n", "hosts", "seed", "json")
_IN_MODEL = ("profile", "diagram", "svg", "markdown", "max_states")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "profiles", "run", "show"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs (or .litmus files); profiles for `profiles`")
    parser.add_argument("--all", action="store_true", help="run: every program of the library")
    parser.add_argument("--profile", action="append", help="run: only this profile (may be repeated)")
    parser.add_argument("--backend", help="run: on this backend's transport instead of in the model")
    parser.add_argument("--transport", help="with --backend: this transport of it")
    parser.add_argument("-n", type=int, help="with --backend: how often (default 1000)")
    parser.add_argument("--hosts", type=int, metavar="H", help="with --backend: ranks on H equal hosts")
    parser.add_argument("--seed", type=at_least(0), help="with --backend: of the pauses between instructions")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="with --backend: write outcomes and verdicts")
    parser.add_argument("--diagram", action="store_true", help="run: draw the schedule of an allowed bad outcome")
    parser.add_argument("--svg", type=output_file, help="run: draw it into this file")
    parser.add_argument("--markdown", action="store_true", help="run: the verdicts as a table for docs/portability.md")
    parser.add_argument("--max-states", type=at_least(1), help="run: stop a search after so many states")


def run(args: argparse.Namespace) -> int:
    from hal.checker import litmus

    _check_options(args)
    if args.action == "list":
        return _list(litmus.library())
    if args.action == "profiles":
        return _profiles(args.names)
    if args.all and args.names:
        raise ContractError("give either --all or names")
    programs = list(litmus.library().values()) if args.all else [litmus.load(name) for name in args.names]
    if not programs:
        raise ContractError(f"hal litmus {args.action} needs names or --all; `hal litmus list` shows the names")
    if args.action == "show":
        print("\n".join(p.text() for p in programs), end="")
        return 0
    if args.backend:
        return _on_transport(programs, args, skip=args.all)
    return _in_model(programs, args)


def _check_options(args: argparse.Namespace) -> None:
    """An option that would do nothing is refused, so that nobody takes the answer for another question's."""
    if args.action == "list" and args.names:
        raise ContractError(f"hal litmus list takes no names; say hal litmus show {' '.join(args.names)}")
    unused: tuple[str, ...]
    if args.action == "run":
        unused = _IN_MODEL if args.backend else _ON_TRANSPORT
        fix = "leave --backend out, or this" if args.backend else "add --backend NAME, or leave it out"
    else:
        unused, fix = _ON_TRANSPORT + _IN_MODEL, "leave it out"
    for name in unused:
        if getattr(args, name) not in (None, False):
            option = "-n" if name == "n" else "--" + name.replace("_", "-")
            raise ContractError(f"{option} means nothing to hal litmus {args.action} like this: {fix}")


def _list(programs: dict[str, Any]) -> int:
    longest = max(map(len, programs))
    for p in programs.values():
        print(f"{p.name:<{longest}}  {p.about}")
        if p.trap:
            print(f"{'':<{longest}}  trap: {p.trap}" + (f" (mended by {p.mended_by})" if p.mended_by else ""))
    return 0


def _profiles(names: Sequence[str]) -> int:
    from hal.ordering import PROFILES, profile

    print("\n\n".join(profile(name).describe() for name in names or PROFILES))
    return 0


def _in_model(programs: Sequence[Any], args: argparse.Namespace) -> int:
    from hal.checker import litmus
    from hal.ordering import PROFILES, profile

    profiles = [profile(name).name for name in args.profile or PROFILES]
    if args.markdown:
        return _markdown(programs, profiles)
    limit = args.max_states or litmus.MAX_STATES
    started = time.monotonic()
    longest = max(len(p.name) for p in programs)
    print(
        f"# A allowed, F forbidden, - not expressible, E refused, ! undefined by the contract; {len(programs)} programs"
    )
    print(f"{'# program':<{longest}}  " + " ".join(f"{name:>9}" for name in profiles))
    wrong, states, transitions = [], 0, 0
    for program in programs:
        verdicts = [litmus.run(program, name, max_states=limit) for name in profiles]
        states += sum(v.states for v in verdicts)
        transitions += sum(v.transitions for v in verdicts)
        cells = [v.code if v.agrees or v.expected is None else f"{v.code}({v.expected})" for v in verdicts]
        print(f"{program.name:<{longest}}  " + " ".join(f"{c:>9}" for c in cells))
        wrong += [v for v in verdicts if (v.expected is not None and not v.agrees) or v.code in "?D"]
        if len(programs) == 1:
            for v in verdicts:
                print(f"  {v.profile.name}: {v.reason} [{v.bound}]")
                for warning in v.warnings:
                    print(f"  warning: {warning}")
        _draw(verdicts, args)
    seconds = time.monotonic() - started
    print(
        f"# {states} states, {transitions} transitions, {seconds:.2f} s; differences from the expectation: {len(wrong)}"
    )
    for v in wrong:
        print(f"{v.program.name} under {v.profile.name}: {v.code}, expected {v.expected}; {v.reason} [{v.bound}]")
    return 1 if wrong else 0


def _markdown(programs: Sequence[Any], profiles: Sequence[str]) -> int:
    from hal.checker import litmus

    print(f"| program | {' | '.join(profiles)} |\n|---|{'---|' * len(profiles)}")
    for program in programs:
        print(f"| `{program.name}` | {' | '.join(litmus.run(program, name).code for name in profiles)} |")
    return 0


def _draw(verdicts: Sequence[Any], args: argparse.Namespace) -> None:
    if not (args.diagram or args.svg):
        return
    from hal.checker.pictures import litmus_failure

    for v in verdicts:
        if not v.code.startswith("A"):
            continue
        picture = litmus_failure(v.program, v.profile)
        if args.diagram:
            print(f"\n{v.program.name} under {v.profile.name}, schedule: {picture.schedule}\n{picture.text}\n")
        if args.svg:
            args.svg.write_text(picture.svg, encoding="utf-8")
        return


def _on_transport(programs: Sequence[Any], args: argparse.Namespace, skip: bool) -> int:
    from hal.checker import on_transport
    from hal.checker.diagram import histogram

    status, records = 0, []
    settings = {"transport": args.transport} if args.transport else {}
    n, hosts = 1000 if args.n is None else args.n, 1 if args.hosts is None else args.hosts
    on = f" on {hosts} hosts" if hosts > 1 else ""
    runs = on_transport.run_all(programs, args.backend, n, hosts=hosts, seed=args.seed or 0, **settings)
    for result in runs:
        name = result.program.name
        if isinstance(result, on_transport.NotRun):
            if not skip:
                raise ContractError(f"{name} cannot run on a real transport: {result.why}")
            print(f"{name}: not run: {result.why}")
            records.append({"program": name, "not_run": result.why})
            continue
        where = f"{args.transport or args.backend} ({result.profile.name}){on}"
        print(f"{name} on {where}, {n} times, {result.seconds:.2f} s")
        print(histogram(result.counts, result.forbidden))
        print(f"  {result.verdict}", flush=True)
        records.append(_record(result))
        if result.forbidden:
            status = 1
            print(f"the model of {result.profile.name} forbids: {'; '.join(result.forbidden)}", file=sys.stderr)
        if args.json:
            args.json.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return status


def _record(result: Any) -> dict[str, Any]:
    return {
        "program": result.program.name,
        "profile": result.profile.name,
        "outcomes": result.counts,
        "forbidden": list(result.forbidden),
        "bad_seen": result.bad,
        "bad_allowed": result.allowed,
        "seconds": round(result.seconds, 3),
    }
