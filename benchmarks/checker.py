# SPDX-License-Identifier: Apache-2.0
"""The ordering checker's own speed: ``python benchmarks/checker.py [--json FILE] [--ranks 64] [--tokens 256]``.

Transitions a second of processor time of the exhaustive litmus search (one thread); the time to exhaust dispatch +
combine of 3 ranks x 2 tokens under every profile; the one-run happens-before verdict at many ranks, with its peak memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import resource
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from hal.checker import ep, litmus
from hal.checker.program import Program, ProgramBuilder
from hal.ordering import PROFILES


def fan_in(puts: int) -> Program:
    """Two ranks put ``puts`` words each to a third, then signal it: as many orders as a litmus search meets."""
    b = ProgramBuilder("fan-in", data=2 * puts, sig=2)
    for rank in range(2):
        for i in range(puts):
            b.rank(rank).put(b.at("data", i + rank * puts), 2, 1)
        b.rank(rank).signal(b.at("sig", rank), 2)
    for rank in range(2):
        b.rank(2).wait(b.at("sig", rank), 1)
    for i in range(2 * puts):
        b.rank(2).read(f"r{i}", b.at("data", i))
    return b.build("2:r0 == 0")


def search_speed() -> list[dict[str, Any]]:
    rows = []
    for puts, sleep_sets in ((6, False), (6, True), (8, False), (8, True)):
        v = litmus.run(fan_in(puts), "udma", sleep_sets=sleep_sets)
        rows.append(
            {
                "program": f"fan-in of 2 x {puts} puts",
                "sleep_sets": sleep_sets,
                "states": v.states,
                "transitions": v.transitions,
                "cpu_seconds": v.cpu_seconds,
                "million_transitions_per_cpu_s": v.transitions / v.cpu_seconds / 1e6,
                "exhaustive": v.exhaustive,
            }
        )
    return rows


def exhaustion() -> dict[str, Any]:
    start, runs, right = time.monotonic(), 0, True
    for schedule, completion in ep.protocols():
        scenario = next(iter(ep.small(schedule, completion)))
        for name in PROFILES:
            v = ep.check(scenario, name)
            runs, right = runs + v.runs, right and v.right and v.exhaustive
    return {"verdicts": len(list(ep.protocols())) * len(PROFILES), "runs": runs, "all_right_and_exhaustive": right,
            "seconds": time.monotonic() - start}  # fmt: skip


def one_run(ranks: int, tokens: int) -> dict[str, Any]:
    start = time.monotonic()
    v = ep.check(ep.large("direct", "strong_signal", ranks, tokens), "udma", search="races")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"ranks": ranks, "tokens": tokens, "events": v.steps, "right": v.right, "pass_seconds": v.seconds,
            "seconds": time.monotonic() - start, "peak_bytes": peak}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} VM",
        "load_before": round(os.getloadavg()[0], 1),
        "command": "python " + shlex.join(sys.argv),
        "litmus_search": search_speed(),
        "exhaustion_3_ranks_2_tokens": exhaustion(),
        "happens_before": one_run(options.ranks, options.tokens),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
