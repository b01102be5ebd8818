# SPDX-License-Identifier: Apache-2.0
"""Say which backends and transports work here, why the others do not, and how to mend them; for backend cuda also what
joins GPUs of several hosts: RDMA cards, GPUDirect, the kind of GIN that NCCL would use, and what is missing or set wrong.

Exit status 0, or 1 when one that --require names is not usable.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from hal.backend import Examination
from hal.errors import ContractError
from hal.inventory import Entry, examinations, inventory
from hal.versions import versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON: versions, entries, machine, required")
    parser.add_argument(
        "--require", action="append", default=[], metavar="NAME", help="fail unless this backend or transport is usable"
    )


def run(args: argparse.Namespace) -> int:
    entries = inventory()
    known = {item.name for item in entries}
    for name in args.require:
        if name not in known:
            raise ContractError(
                f"--require {name}: no such backend or transport; there are: {', '.join(sorted(known))}"
            )
    missing = [item for item in entries if item.name in args.require and not item.usable]
    if args.json:
        report = {
            "versions": versions(),
            "entries": [item.as_dict() for item in entries],
            "machine": {name: _as_dict(found) for name, found in examinations().items()},
            "required": {name: all(item.name != name for item in missing) for name in args.require},
        }
        print(json.dumps(report, indent=2))
    else:
        for item in entries:
            print(_described(item))
        for name, found in examinations().items():
            print(_examined(name, found))
        for item in missing:
            print(f"required, but not usable: {item.kind} {item.name}")
    return 1 if missing else 0


def _described(item: Entry) -> str:
    head = f"{'ok ' if item.usable else 'no '} {item.kind} {item.name}: {item.description or '-'}"
    if item.usable:
        return head
    lines = [head]
    for label, text in (("why", item.reason), ("fix", item.fix or "not known")):
        lines += [f"      {label if at == 0 else '   '}  {part}" for at, part in enumerate(text.split("; "))]
    return "\n".join(lines)


def _examined(name: str, found: Examination) -> str:
    lines = [f"this machine, for backend {name}:"]
    width = max((len(label) for label, _ in found.facts), default=0)
    lines += [f"      {label:<{width}}  {text}" for label, text in found.facts]
    for problem in found.problems:
        lines += [f"  {'problem' if problem.breaks else 'note':<7}  {problem.text}", f"      fix  {problem.fix}"]
    return "\n".join(lines)


def _as_dict(found: Examination) -> dict[str, Any]:
    problems = [{"text": item.text, "fix": item.fix, "breaks": item.breaks} for item in found.problems]
    return {**found.data, "problems": problems}
