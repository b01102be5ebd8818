#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the software NIC on real GPUs: an all-to-all of GIN kernels (tests/gin_alltoall.cu) between make-believe hosts, and
HAL's own words and primitives over GIN (tests/gin_bodies.py of the project; its kernels are compiled on first use).

    python kernels_cuda/software_nic/check_on_gpus.py --nccl .venv/lib/python3.11/site-packages/nvidia/nccl

Needs NCCL 2.30.7 (headers and library), nvcc and g++, or both programs built elsewhere (--program, --plugin). Every word
received is verified inside the kernels, under several seeds of reordering; the early-signal control must be caught. Prints
a line for each case and exits 1 if any went wrong. Times are of this emulation, never of a network.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent.parent / "backends")]  # a checkout needs no installation

from hal_cuda import software_nic  # noqa: E402


@dataclass(frozen=True)
class Case:
    """One run: ranks are on ``hosts`` make-believe hosts."""

    name: str
    hosts: int
    ranks: int
    expect: str = "clean"
    """clean: every word right. broken: words must be wrong (the control). loss: rank 1 dies and the others say so."""
    settings: dict[str, str] = field(default_factory=dict)
    words: bool = False
    """HAL's words and primitives in place of the all-to-all; ``broken`` is then meant of promises that must hold."""
    rounds: int = 20
    pieces: int = 16
    nbytes: int = 1 << 18


REORDER = "reorder=200us,split=4K"


def cases(seeds: int) -> list[Case]:
    """In the order of what one learns from them."""
    plain = [
        Case("2x1 plain", 2, 2),
        Case("2x1 8 bytes", 2, 2, pieces=1, nbytes=8),
        Case("2x1 16 MiB", 2, 2, nbytes=16 << 20, rounds=4),
        Case("2x1 staged copies", 2, 2, settings={"COPY": "stage"}),
        Case("2x1 signals read first", 2, 2, settings={"SIGNAL": "rmw"}),
        Case("2x1 credits starved", 2, 2, settings={"QUEUE_DEPTH": "32"}, pieces=256),
        Case("2x2 plain", 2, 4, rounds=10),
    ]
    seeded = [
        Case(
            f"{hosts}x{ranks // hosts} reorder seed {seed}",
            hosts,
            ranks,
            settings={"FAULTS": REORDER, "SEED": str(seed)},
            rounds=rounds,
        )
        for hosts, ranks, rounds in ((2, 2, 20), (2, 4, 6))
        for seed in range(seeds)
    ]
    early = {"FAULTS": "delay=3ms,early_signal"}
    faults = [
        Case("2x1 source early", 2, 2, settings={"FAULTS": "reorder=1ms,source_early,complete=100us"}),
        Case("2x1 early signal (control)", 2, 2, expect="broken", settings=early),
        Case("2x2 early signal (control)", 2, 4, expect="broken", settings=early, rounds=6),
        Case("2x1 rank 1 killed", 2, 2, expect="loss", settings={"FAULTS": "1>*: kill=@60"}),
    ]
    adversary = "reorder=300us,split=4K,publish=100us,source_early,read=100us,complete=50us"
    words = [
        Case(f"{hosts}x{ranks // hosts} words seed {seed}", hosts, ranks, words=True,
             settings={"FAULTS": adversary, "SEED": str(seed)})
        for hosts, ranks in ((2, 2), (2, 4))
        for seed in range(min(seeds, 3))
    ]  # fmt: skip
    words.append(Case("2x1 words early signal (control)", 2, 2, words=True, expect="broken", settings=early))
    return plain + seeded + faults + words


def build_program(nccl: Path, folder: Path) -> Path:
    """Compiles the GIN program for the GPUs here."""
    program = folder / "gin_alltoall"
    libraries = sorted((nccl / "lib").glob("libnccl.so*"))
    if not libraries:
        sys.exit(f"{nccl}/lib has no libnccl.so; give NCCL's folder (with include/ and lib/) as --nccl")
    command = [
        "nvcc",
        "-std=c++17",
        "-O2",
        "-arch=native",
        f"-I{nccl}/include",
        str(HERE / "tests" / "gin_alltoall.cu"),
    ]
    # To the linker itself: nvcc takes no input named libnccl.so.2.
    subprocess.run([*command, "-o", str(program), "-Xlinker", str(libraries[0])], check=True)
    return program


def run(case: Case, program: Path, nccl: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Start the ranks, wait for all (bounded), and gather what they printed."""
    plan = software_nic.plan(case.hosts, case.ranks)
    identity, token = folder / f"id-{time.monotonic_ns()}", secrets.token_hex(32)
    library_path = os.pathsep.join(filter(None, [str(nccl / "lib"), os.environ.get("LD_LIBRARY_PATH")]))
    started = []
    for rank in range(case.ranks):
        settings = {f"HAL_SWNIC_{name}": value for name, value in case.settings.items()}
        # NCCL's own log at level WARN: the NIC reports a dead peer and its watchdog there.
        env = (
            {"NCCL_DEBUG": "WARN"}
            | dict(os.environ)
            | {"LD_LIBRARY_PATH": library_path}
            | settings
            | plan.environment(rank)
        )
        arguments = [program, rank, case.ranks, identity, case.rounds, case.pieces, case.nbytes]
        if case.words:
            arguments = [sys.executable, HERE.parent.parent / "tests" / "gin_bodies.py", "gin"]
            env |= {"HAL_NCCL_HOME": str(nccl), "HAL_RANK": str(rank), "HAL_WORLD_SIZE": str(case.ranks)}
            env |= {"HAL_NODES": str(case.hosts), "HAL_TOKEN": token}
        log = (folder / f"{identity.name}-{rank}.log").open("w+")
        started.append((subprocess.Popen([*map(str, arguments)], env=env, stdout=log, stderr=subprocess.STDOUT), log))
    deadline = time.monotonic() + seconds
    codes, texts = [], []
    for process, log in started:
        try:
            codes.append(process.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            codes.append(124)
        log.seek(0)
        texts.append(log.read())
        log.close()
    results = [json.loads(line) for text in texts for line in text.splitlines() if line.startswith("{")]
    return {"codes": codes, "results": results, "log": "\n".join(texts)}


def verdict(case: Case, outcome: dict[str, Any]) -> str:
    """'ok', or what went wrong."""
    codes, results = outcome["codes"], outcome["results"]
    if case.expect == "loss":
        survivors = [code for rank, code in enumerate(codes) if rank != 1]
        if codes[1] != -9 or any(code in (0, 124) for code in survivors):
            return f"exit statuses {codes}; rank 1 should die and the others notice"
        return "ok" if re.search(r"rank 1 \(pid \d+\) has died", outcome["log"]) else "nobody named rank 1"
    if any(codes) or len(results) != case.ranks:
        return f"exit statuses {codes}, {len(results)} results"
    if case.words:
        return words_verdict(case, results)
    bad = sum(result["bad"] for result in results)
    expected = case.ranks * case.ranks * case.rounds * (case.nbytes // 4)
    if sum(result["checked"] for result in results) != expected:
        return f"{sum(result['checked'] for result in results)} words checked, {expected} expected"
    if case.expect == "broken":
        return "ok" if bad else "signals came before their data and nobody noticed: the checks prove nothing"
    return "ok" if bad == 0 else f"{bad} wrong words"


def words_verdict(case: Case, results: list[dict[str, Any]]) -> str:
    """'ok', or what went wrong, of ranks that ran tests/gin_bodies.py."""
    wrong = sorted({name for result in results for name in result["wrong"]})
    held = {name: sum(result["hold"][name][0] for result in results) for name in results[0]["hold"]}
    broken = wrong + [f"{name}: {bad} wrong words" for name, bad in held.items() if bad]
    if not all(result["hold"][name][1] for result in results for name in held):
        return "some check looked at nothing"
    if case.expect == "broken":
        return "ok" if broken else "signals came before their data and nobody noticed: the checks prove nothing"
    return ", ".join(broken) if broken else "ok"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", type=Path, required=True, help="folder of NCCL 2.30.7 with include/ and lib/")
    parser.add_argument("--program", type=Path, help="gin_alltoall, built elsewhere")
    parser.add_argument("--plugin", type=Path, help="libnccl-net-hal-swnic.so, built elsewhere")
    parser.add_argument("--seeds", type=int, default=8, help="seeds of reordering for each layout (default 8)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=60, help="limit for one case (default 60)")
    parser.add_argument("--output", type=Path, help="write all results here as JSON lines")
    args = parser.parse_args()
    if args.plugin:
        os.environ[software_nic.LIBRARY] = str(args.plugin.resolve())
    failures = 0
    with tempfile.TemporaryDirectory() as scratch:
        program = args.program.resolve() if args.program else build_program(args.nccl.resolve(), Path(scratch))
        print(software_nic.plan(2, 4).describe(), flush=True)
        for case in cases(args.seeds):
            if args.only not in case.name:
                continue
            began = time.monotonic()
            outcome = run(case, program, args.nccl.resolve(), Path(scratch), args.seconds)
            said = verdict(case, outcome)
            slowest = max((result.get("us_per_round", 0.0) for result in outcome["results"]), default=float("nan"))
            print(f"{case.name:32} {said:12} {slowest:10.1f} us/round {time.monotonic() - began:6.1f} s", flush=True)
            if said != "ok":
                failures += 1
                print(outcome["log"][-3000:], flush=True)
            if args.output:
                with args.output.open("a") as file:
                    file.write(json.dumps({"case": case.name, "verdict": said, **outcome}) + "\n")
    print("all cases passed" if failures == 0 else f"{failures} cases failed")
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
