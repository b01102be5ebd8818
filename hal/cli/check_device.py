# SPDX-License-Identifier: Apache-2.0
"""``hal check BACKEND``: a backend's own kernels on its emulated device, under seeded adversarial deliveries."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from typing import Any

from hal._validate import COMPLETIONS, LAYOUTS, complete_spec
from hal.config import ExpertParallelSpec
from hal.errors import ContractError, HalError
from hal.registry import backends, known_backend

SCHEDULES = {"direct": (2, 1), "latency": (2, 1), "hierarchical": (4, 2)}
"""Ranks and nodes that each schedule is tried with."""
TOKENS = 6


def run(args: argparse.Namespace) -> int:
    backend, check = _checker(args)
    protocols = list(_protocols(args, backend))
    seeds, mutant = range(args.seed, args.seed + args.seeds), args.mutation != "none"
    started, bad, runs, steps = time.monotonic(), 0, 0, 0
    for spec, ranks, nodes in protocols:
        began = time.monotonic()
        report = check(spec, ranks, nodes, seeds=seeds, rounds=args.rounds, mutation=args.mutation)
        _print(args, spec, ranks, report, time.monotonic() - began)
        bad, runs, steps = bad + bool(report.findings), runs + report.runs, steps + report.steps
    print(
        f"# {len(protocols)} protocols, {bad} {'caught the defect' if mutant else 'failed'}; {runs} runs, {steps} steps, "
        f"{time.monotonic() - started:.1f} s; bound: a seeded adversarial search, not exhaustive: seeds {seeds[0]} … "
        f"{seeds[-1]}, at most {args.tokens or TOKENS} tokens of each rank"
    )
    if mutant and not bad:
        print(
            f"{args.mutation} is not noticed: no protocol here needs what it breaks, or no run of this size comes to it"
        )
    return 1 if bad else 0


def _print(args: argparse.Namespace, spec: ExpertParallelSpec, ranks: int, report: Any, seconds: float) -> None:
    words = ("-", "caught") if args.mutation != "none" else ("ok", "FAILED")
    print(
        f"{words[bool(report.findings)]:7}{spec.schedule + '/' + spec.completion:<34} {spec.layout:<7} {ranks} ranks, "
        f"{len(report.findings)} of {report.runs} seeds bad, {report.steps} steps, {seconds:.1f} s",
        flush=True,
    )
    for finding in report.findings[:1]:
        print(f"  seed {finding.seed}: {' '.join(finding.text.split())}")
        print(f"  replay with: {_replay(args, spec, ranks, finding)}")
        if finding.picture is not None:
            print("\n".join(f"  {line}".rstrip() for line in finding.picture.text.splitlines()))
            if args.svg:
                args.svg.write_text(finding.picture.svg, encoding="utf-8")


def _checker(args: argparse.Namespace) -> tuple[Any, Callable[..., Any]]:
    """The backend and its ``check_kernels`` (hal/backend.py)."""
    if args.what not in backends():
        raise ContractError(
            f"'{args.what}' is nothing to check: say ep, mutation, or a backend ({', '.join(checkable())})"
        )
    if args.profile or args.faults or args.losses or args.out or args.mutant or args.replay or args.search != "all":
        raise ContractError(
            f"hal check {args.what} takes --schedule, --completion, --layout, --ranks, --tokens, --rounds, --seed, --seeds "
            "--mutation and --svg: its device's own rules stand in for a profile, and a seed for a replay"
        )
    backend = known_backend(args.what).load()
    check: Callable[..., Any] | None = getattr(backend, "check_kernels", None)
    if check is None:
        raise ContractError(
            f"backend '{args.what}' has no emulated device to run its kernels on ({', '.join(checkable())} have); "
            "hal check ep checks the protocols"
        )
    return backend, check


def checkable() -> list[str]:
    """Backends with kernels that can be checked here; one that cannot even be loaded is none."""
    found = []
    for name, spec in backends().items():
        with suppress(HalError, ImportError):
            if hasattr(spec.load(), "check_kernels"):
                found.append(name)
    return found


def _protocols(args: argparse.Namespace, backend: Any) -> Iterator[tuple[ExpertParallelSpec, int, int]]:
    """Each schedule × completion × layout, with ranks and nodes."""
    if not args.all and not (args.schedule or args.completion or args.layout or args.mutation != "none"):
        raise ContractError("say what to check: --all, or --schedule, --completion, --layout, --mutation")
    schedules = args.schedule or (("direct",) if args.mutation != "none" and not args.all else tuple(SCHEDULES))
    layouts = args.layout or (LAYOUTS if args.all else LAYOUTS[:1])
    completions = args.completion or getattr(backend, "completions", COMPLETIONS)
    for schedule, completion, layout in product(schedules, completions, layouts):
        least, nodes = SCHEDULES.get(schedule, (2, 1))
        ranks = args.ranks or least
        if ranks < 2 or ranks % nodes:
            raise ContractError(f"--ranks {ranks} with schedule {schedule}: give a multiple of {nodes}, 2 at least")
        spec = ExpertParallelSpec(
            2 * ranks, 2, 64, args.tokens or TOKENS, layout=layout, schedule=schedule, completion=completion, num_buffers=4
        )  # fmt: skip
        yield complete_spec(spec, ranks, timeout=1.0), ranks, nodes


def _replay(args: argparse.Namespace, spec: ExpertParallelSpec, ranks: int, finding: Any) -> str:
    mutation = f" --mutation {args.mutation}" if args.mutation != "none" else ""
    return (
        f"hal check {args.what} --schedule {spec.schedule} --completion {spec.completion} --layout {spec.layout} "
        f"--ranks {ranks} --tokens {spec.max_tokens} --rounds {args.rounds} --seed {finding.seed} --seeds 1{mutation}"
    )
