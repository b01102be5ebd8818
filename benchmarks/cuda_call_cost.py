# SPDX-License-Identifier: Apache-2.0
"""What a pair of dispatch and combine costs the host in Python, on CPUs and without a GPU:

    python benchmarks/cuda_call_cost.py [--tokens 128] [--calls]
    python benchmarks/cuda_call_cost.py --beside "OTHER_PYTHON OTHER/benchmarks/cuda_call_cost.py" [--out FILE.json]

Session, engine and arrays are those of emulated GPUs (transport=gin_emulated), of one rank, but launches return at once: no
row moves. So these are not times of GPUs: the driver's launches, torch's allocator for GPUs and waits are missing. Times are
of the calling thread's CPU, which a busy machine disturbs less. ``--beside`` runs another checkout's in turn with this one's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from ctypes import CDLL, c_int
from pathlib import Path
from typing import Any

import torch
from hal_cuda import facts, native

import hal

STAND_IN = """
#include "hal_cuda.h"
int stand_in_dispatch(const hal_cuda_ep* ep, const hal_cuda_dispatch_args* a, uint64_t stream) {
    if (a->host_word) *(uint64_t*)a->host_word = (uint64_t)a->sequence << 32 | (uint64_t)a->tokens;
    return 0;
}
int stand_in_combine(const hal_cuda_ep* ep, const hal_cuda_combine_args* a, uint64_t stream) { return 0; }
int stand_in_stream_capturing(int device, uint64_t stream, int* capturing) { return *capturing = 0; }
int stand_in_stream_order(int device, uint64_t earlier, uint64_t later) { return 0; }
"""
ROOT = Path(__file__).resolve().parents[1]
STREAMS = {"default": 0, "other": 0x1000}
ROUNDS, PAIRS, TURNS = 200, 50, 7


def stand_in(library: native.Library) -> None:
    """Launches that return at once; the row count is there when they do."""
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "stand_in.c"), Path(folder, "stand_in.so")
        source.write_text(STAND_IN)
        include = f"-I{ROOT / 'kernels_cuda' / 'include'}"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", include, str(source), "-o", str(built)], check=True)
        loaded = CDLL(str(built))
    for name in ("dispatch", "combine", "stream_capturing", "stream_order"):
        function = getattr(loaded, f"stand_in_{name}")
        function.argtypes, function.restype = getattr(library, f"raw_{name}").argtypes, c_int
        setattr(library, f"raw_{name}", function)


def on_stream(ep: Any, stream: int) -> None:
    """Calls of ``ep`` launch on a stream, as those of real GPUs do; these exist nowhere."""
    ep._quick()._stream = {None: stream}.get


def pairs(ep: hal.ExpertParallel, tokens: int) -> dict[str, Callable[[], None]]:
    """The forms of an eager pair, as a layer calls them."""
    spec = ep.spec
    x = torch.zeros(tokens, spec.hidden, dtype=torch.bfloat16)
    idx = torch.rand(tokens, spec.num_experts).topk(spec.top_k).indices
    weights = torch.rand(tokens, spec.top_k)
    handle = ep.dispatch(x, idx, weights).handle

    def cached() -> None:
        out = ep.dispatch(x, None, weights, handle=handle)
        ep.combine(out.x, out.handle)

    def counted() -> None:
        out = ep.dispatch(x, idx, weights)
        ep.combine(out.x, out.handle)

    return {"cached handle": cached, "count exchange": counted}


def calls(pair: Callable[[], None]) -> tuple[Counter[str], Counter[str]]:
    """The functions that a pair calls: Python's, and C's that the interpreter sees as such (so not those of ctypes)."""
    python: Counter[str] = Counter()
    c: Counter[str] = Counter()

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is not pair.__code__:  # type: ignore[attr-defined]
            python[frame.f_code.co_name] += 1
        elif event == "c_call" and argument is not sys.setprofile:
            c[argument.__name__] += 1

    pair()
    sys.setprofile(note)
    try:
        pair()
    finally:
        sys.setprofile(None)
    return python, c


def measure(pair: Callable[[], None]) -> list[float]:
    """Microseconds a pair, of each round."""
    times = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(PAIRS):
            pair()
        times.append((time.thread_time() - start) / PAIRS * 1e6)
    return times


def body(comm: hal.Communicator, tokens: int, name_calls: bool) -> list[dict[str, Any]]:
    rows = []
    for layout in ("rank", "expert"):
        settings = {"num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens": tokens, "layout": layout}
        with comm.expert_parallel(**settings) as ep:
            for stream, number in STREAMS.items():
                on_stream(ep, number)
                for form, pair in pairs(ep, tokens).items():
                    python, c = calls(pair)
                    times = measure(pair)
                    row = {"layout": layout, "form": form, "stream": stream}
                    row |= {"python_calls": python.total(), "c_calls": c.total()}
                    row |= {"min_us": round(min(times), 2), "median_us": round(statistics.median(times), 2)}
                    rows.append(row | ({"python": python, "c": c} if name_calls else {}))
    return rows


def output(command: list[str]) -> list[dict[str, Any]]:
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in told.stdout.splitlines()]


def middle(runs: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Of each row, the median over the runs."""
    return [
        rows[0] | {name: statistics.median(row[name] for row in rows) for name in ("min_us", "median_us")}
        for rows in zip(*runs, strict=True)
    ]


def beside(other: list[str], tokens: int) -> dict[str, Any]:
    """Both in turn; and a table."""
    own = [sys.executable, __file__, "--tokens", str(tokens)]
    runs = [(output([*other, "--tokens", str(tokens)]), output(own)) for _ in range(TURNS)]
    before, after = (middle(list(some)) for some in zip(*runs, strict=True))
    print(f"{'layout, form, stream':36} {'calls':>10} {'us':>14} {'ratio':>6}")
    for old, new in zip(before, after, strict=True):
        what = ", ".join(new[name] for name in ("layout", "form", "stream"))
        new["ratio"] = round(new["median_us"] / old["median_us"], 3)
        called = f"{old['python_calls']} → {new['python_calls']}"
        print(f"{what:36} {called:>10} {old['median_us']:6.1f} → {new['median_us']:5.1f} {new['ratio']:6.2f}")
    return {"before": before, "after": after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--calls", action="store_true", help="name the functions called")
    parser.add_argument("--beside", help="another checkout's interpreter and its copy of this file")
    parser.add_argument("--out", type=Path, help="keep what --beside found")
    options = parser.parse_args()
    if not options.beside:
        torch.set_num_threads(1)
        stand_in(native.load_emulated())
        connect = {"backend": "cuda", "transport": "gin_emulated"}
        for row in hal.spawn(1, body, options.tokens, options.calls, **connect)[0]:
            print(json.dumps(row))
        return
    other = shlex.split(options.beside)
    asked = [other[0], "-c", "from hal_cuda.facts import commit; print(commit())"]
    record = {
        "what": "Python's part of an eager pair, on a CPU with launches that return at once; not of GPUs",
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "commit": facts.commit(),
        "commit_before": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip(),
        "machine": f"{os.cpu_count()}-core {platform.machine()} VM",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
        "shape": {"hidden": 7168, "experts": 256, "top_k": 8, "ranks": 1, "tokens": options.tokens},
        "turns": TURNS,
        **beside(other, options.tokens),
    }
    if options.out is not None:
        facts.write(options.out, record)


if __name__ == "__main__":
    main()
