# SPDX-License-Identifier: Apache-2.0
"""Check the shipped dispatch and combine kernels against the ordering contract, on this machine and without hardware.

hal check ep --all
hal check ep --schedule direct --completion strong_last --profile udma
hal check ep --search races --ranks 64 --tokens 256 --profile udma
hal check ep --search random --ranks 16 --tokens 8 --runs 200 --seed 7
hal check ep --faults --profile udma
hal check ep --losses --profile udma
hal check ep --schedule direct --completion strong_signal --break signal:strong:last=weaken --svg broken.svg
hal check ep --replay 'hold 0.7w' --schedule direct --completion strong_signal --profile udma
hal check mutation --out docs/mutation.md
hal check ascend --all
hal check ascend --schedule direct --completion strong_signal --mutation default_no
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from hal.cli import at_least, output_file, positive
from hal.errors import ContractError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", help="ep, mutation, or a backend whose kernels run on an emulated device (ascend, cuda)")
    parser.add_argument("--all", action="store_true", help="every schedule, completion, layout and profile")
    parser.add_argument("--schedule", action="append", help="direct, hierarchical, latency (may be repeated)")
    parser.add_argument("--completion", action="append", help="strong_signal, strong_last, … (may be repeated)")
    parser.add_argument("--profile", action="append", help="an ordering profile (may be repeated)")
    parser.add_argument("--layout", action="append", help="rank, expert")
    parser.add_argument("--search", choices=("all", "delays", "random", "races"), default="all")
    parser.add_argument("--ranks", type=at_least(1), help="how many ranks; ep: with --search races or random")
    parser.add_argument("--tokens", type=at_least(1), help="tokens of each rank; ep: with --ranks (4)")
    parser.add_argument("--rounds", type=at_least(1), default=2, help="rounds; ep: with --ranks")
    parser.add_argument("--runs", type=at_least(1), default=1000, help="random: how many schedules")
    parser.add_argument("--seed", type=at_least(0), default=0, help="random, or a backend: the first seed")
    parser.add_argument("--seeds", type=at_least(1), default=40, help="a backend: how many schedules")
    parser.add_argument(
        "--mutation", metavar="NAME", default="none", help="a backend: plant a defect below its kernels"
    )
    parser.add_argument("--delays", type=at_least(0), default=1, help="delays: how many entities are held back at once")
    parser.add_argument("--max-seconds", type=positive, default=30.0, help="bound of each search")
    parser.add_argument("--max-memory", type=positive, default=2.0, help="GiB that one search may keep before it stops")
    parser.add_argument(
        "--losses",
        action="store_true",
        help="on_peer_loss=mask: ranks that stop at every step, for good or for a while",
    )
    parser.add_argument("--faults", action="store_true", help="lost and late operations, stopped ranks, tiny rings")
    parser.add_argument(
        "--break", dest="mutant", help="PRIMITIVE[:ORDER]:N=CHANGE, for example signal:strong:last=weaken"
    )
    parser.add_argument("--replay", help="run one schedule (as printed with a failure) and draw it")
    parser.add_argument("--svg", type=output_file, help="draw the failing schedule into this file")
    parser.add_argument("--verbose", action="store_true", help="one line for each verdict")
    parser.add_argument("--out", type=output_file, help="mutation: write the table into this file")


def run(args: argparse.Namespace) -> int:
    if args.what not in ("ep", "mutation"):
        from hal.cli import check_device

        return check_device.run(args)
    if args.mutation != "none":
        raise ContractError(f"--mutation {args.mutation} is planted in a backend's device; hal check ep takes --break")
    if args.what == "mutation":
        return _mutation(args)
    if args.faults:
        return _faults(args)
    if args.losses:
        return _losses(args)
    if args.mutant or args.replay:
        return _one(args)
    return _verdicts(args)


def _chosen(args: argparse.Namespace) -> tuple[list[str], list[str], list[str]]:
    from hal.checker import ep
    from hal.ordering import PROFILES, profile

    if not args.all and not (
        args.schedule or args.completion or args.profile or args.ranks or args.faults or args.losses
    ):
        raise ContractError("say what to check: --all, or --schedule, --completion, --profile")
    profiles = [profile(name).name for name in args.profile or PROFILES]
    schedules, completions = list(args.schedule or ep.SCHEDULES), list(args.completion or ep.COMPLETIONS)
    list(ep.protocols(schedules, completions))
    return schedules, completions, profiles


def _verdicts(args: argparse.Namespace) -> int:
    from hal.checker import ep

    schedules, completions, profiles = _chosen(args)
    started = time.monotonic()
    failed = total = runs = steps = 0
    incomplete = 0
    progress = _Progress()
    for schedule, completion in ep.protocols(schedules, completions):
        per: dict[str, list[Any]] = {name: [] for name in profiles}
        for scenario in _scenarios(args, schedule, completion):
            for name in profiles:
                progress.at(f"{name} {scenario.describe()}")
                v = ep.check(
                    scenario, name, search=args.search, max_seconds=args.max_seconds, seed=args.seed, delays=args.delays,
                    max_runs=args.runs if args.search == "random" else 1_000_000,
                    max_memory=int(args.max_memory * 2**30),
                )  # fmt: skip
                per[name].append(v)
                if args.verbose or not v.right or (args.ranks and not v.exhaustive):
                    print(v.line())
                if not v.right:
                    _explain(v, args)
        for name, verdicts in per.items():
            bad = sum(not v.right for v in verdicts)
            part = sum(not v.exhaustive for v in verdicts)
            failed, incomplete, total = failed + bad, incomplete + part, total + len(verdicts)
            runs, steps = runs + sum(v.runs for v in verdicts), steps + sum(v.steps for v in verdicts)
            how = "exhaustive" if not part else f"not exhaustive in {part}"
            seconds = sum(v.seconds for v in verdicts)
            print(
                f"{'ok' if not bad else 'FAILED':7}{schedule}/{completion:<21} {name:<10} {len(verdicts)} scenarios, "
                f"{sum(v.runs for v in verdicts)} runs, {seconds:.2f} s, {how}"
            )
    print(
        f"# {total} verdicts, {failed} failed, {incomplete} not exhaustive; {runs} runs, {steps} steps, "
        f"{time.monotonic() - started:.1f} s; bound: the scenarios of hal/checker/ep.py, every schedule up to the order "
        "of independent steps"
        if args.search == "all"
        else f"# {total} verdicts, {failed} failed; {runs} runs, {steps} steps, {time.monotonic() - started:.1f} s"
    )
    return 1 if failed or (args.search == "all" and incomplete) else 0


class _Progress:
    """What long work is at, on stderr, at most once in five seconds; nothing for short work."""

    def __init__(self) -> None:
        self._started = self._said = time.monotonic()
        self._done = 0

    def at(self, what: str) -> None:
        now = time.monotonic()
        if now - self._said >= 5:
            self._said = now
            print(f"# {self._done} verdicts, {now - self._started:.0f} s; now {what}", file=sys.stderr, flush=True)
        self._done += 1


def _scenarios(args: argparse.Namespace, schedule: str, completion: str) -> list[Any]:
    from hal.checker import ep

    if args.ranks:
        if schedule == "hierarchical" and args.ranks % 2:
            raise ContractError(f"--ranks {args.ranks} with schedule hierarchical: give an even number, for two nodes")
        return [ep.large(schedule, completion, args.ranks, args.tokens or 4, rounds=args.rounds)]
    layouts = args.layout or (ep.LAYOUTS if args.all else ("rank",))
    return [s for layout in layouts for s in ep.small(schedule, completion, layout)]


def _explain(verdict: Any, args: argparse.Namespace) -> None:
    print(f"  {verdict.failure}")
    for race in verdict.races[1:4]:
        print(f"  {race}")
    if verdict.schedule:
        print(f"  replay with: --replay '{verdict.schedule}'")
        if verdict.kind != "race":
            from hal.checker import ep

            _draw(ep.subject(verdict.scenario, verdict.profile), verdict.schedule, verdict.scenario.ranks, args)


def _draw(subject: Any, schedule: str, ranks: int, args: argparse.Namespace) -> str:
    from hal.checker.pictures import draw

    picture = draw(subject, schedule, ranks)
    print(f"schedule: {picture.schedule}\n{picture.text}")
    if args.svg:
        args.svg.write_text(picture.svg, encoding="utf-8")
        print(f"drawn into {args.svg}")
    return picture.failure


def _one(args: argparse.Namespace) -> int:
    """A broken kernel, or one replayed schedule, in the first scenario of a protocol."""
    from hal.checker import ep
    from hal.ordering import profile

    schedule, completion = (args.schedule or ["direct"])[0], (args.completion or ["strong_signal"])[0]
    prof = profile((args.profile or ["udma"])[0])
    scenario = next(iter(ep.small(schedule, completion, (args.layout or ["rank"])[0])))
    subject = ep.subject(scenario, prof)
    numbers, kind = _mutants(subject, args.mutant) if args.mutant else ([], 0)
    if args.replay:
        if numbers:
            subject.set_mutation(kind, 0, numbers[0])
        return 1 if _draw(subject, args.replay, scenario.ranks, args) else 0
    v: ep.EpVerdict | None = None
    for number in numbers:
        subject.set_mutation(kind, 0, number)
        v = ep.check(scenario, prof, search=args.search, max_seconds=args.max_seconds, on=subject)
        print(f"rank 0's call {number}: {args.mutant}\n{v.line()}")
        if not v.right:
            break
    if v is None or v.right:
        print("the mutant is not noticed in this scenario: redundant there (docs/mutation.md)")
        return 0
    print(f"  {v.failure}")
    if v.kind == "race":
        print("\n".join(f"  {r}" for r in v.races[1:4]))
    _draw(subject, v.schedule or "eager", scenario.ranks, args)
    return 1


def _mutants(subject: Any, text: str) -> tuple[list[int], int]:
    """Numbers of rank 0's calls that the text names, and the kind of the change. ``last``: all, from the last backwards."""
    from hal.checker.engine import native
    from hal.checker.mutation import KINDS

    left, _, change = text.partition("=")
    primitive, *rest = left.split(":")
    if change not in KINDS or not rest:
        raise ContractError(f"'{text}' is no mutant: PRIMITIVE[:ORDER]:N=CHANGE with CHANGE one of {', '.join(KINDS)}")
    orders = {"none": 0, "relaxed": 1, "strong": 2}
    own = [c for c in native().run(subject, "eager")["calls"] if c["thread"] == 0]
    made = sorted({f"{c['primitive']}:{word}" for c in own for word, code in orders.items() if code == c["order"]})
    calls = [c for c in own if c["primitive"] == primitive]
    if len(rest) == 2:
        calls = [c for c in calls if c["order"] == orders.get(rest[0], -1)]
    if not calls:
        raise ContractError(f"'{text}': rank 0 makes no such call; PRIMITIVE:ORDER is one of {', '.join(made)}")
    numbers = [c["number"] for c in calls]
    if rest[-1] == "last" and numbers:
        return numbers[::-1], KINDS.index(change)
    try:
        return [dict(enumerate(numbers))[int(rest[-1])]], KINDS.index(change)
    except (KeyError, ValueError):
        raise ContractError(
            f"'{text}': rank 0 makes {len(calls)} such calls; N is 0 … {len(calls) - 1}, or last"
        ) from None


def _faults(args: argparse.Namespace) -> int:
    from hal.checker import ep, faults

    schedules, completions, profiles = _chosen(args)
    wrong = total = 0
    started = time.monotonic()
    progress = _Progress()
    for schedule, completion in ep.protocols(schedules, completions):
        scenario = next(iter(ep.small(schedule, completion)))
        for name in profiles:
            progress.at(f"{name} {scenario.describe()}")
            seen: dict[str, int] = {}
            for v in faults.check(scenario, name):
                total += 1
                wrong += not v.right
                kind = v.outcome if not v.right else v.outcome.split(" on ")[0]
                seen[kind] = seen.get(kind, 0) + 1
                if args.verbose or not v.right:
                    print(v.line())
            print(f"{schedule}/{completion:<21} {name:<10} " + ", ".join(f"{k}: {n}" for k, n in seen.items()))
    print(f"# {total} faults, {wrong} ended wrongly, {time.monotonic() - started:.1f} s")
    return 1 if wrong else 0


def _losses(args: argparse.Namespace) -> int:
    from hal.checker import ep, masking

    schedules, completions, profiles = _chosen(args)
    wrong = total = 0
    started = time.monotonic()
    progress = _Progress()
    for schedule, completion in ep.protocols(schedules, completions):
        for scenario in masking.scenarios(schedule, completion, args.layout or ep.LAYOUTS):
            for name in profiles:
                progress.at(f"{name} {scenario.describe()}")
                bad = runs = 0
                for v in masking.check(scenario, name):
                    runs += 1
                    bad += not v.right
                    if args.verbose or not v.right:
                        print(v.line())
                print(f"{name:<10} {scenario.describe()}: {runs} runs, {bad} ended wrongly")
                total, wrong = total + runs, wrong + bad
    print(f"# {total} runs, {wrong} ended wrongly, {time.monotonic() - started:.1f} s")
    return 1 if wrong else 0


def _mutation(args: argparse.Namespace) -> int:
    from hal.checker import ep, mutation, mutation_report

    started = time.monotonic()
    result = mutation.run(args.schedule or ep.SCHEDULES, args.completion or ep.COMPLETIONS)
    text = mutation_report.markdown(result, time.monotonic() - started)
    if args.out:
        args.out.write_text(text, encoding="utf-8")
        print(f"written to {args.out}")
    else:
        print(text)
    open_ = mutation_report.unexplained(result)
    print(mutation_report.summary(result))
    for kind in open_:
        print(f"not explained: {kind.protocol} {kind.primitive} {kind.role} {kind.change}")
    return 1 if open_ else 0
