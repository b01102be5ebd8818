# SPDX-License-Identifier: Apache-2.0
"""Dispatch + combine on the host backend against gloo's all_to_all_single with index operations, and against plain memcpy
of the same bytes, in one run:

    python benchmarks/host_vs_gloo.py [--ranks 4] [--tokens 512] [--hidden 2048] [--json FILE] [--markdown FILE]

Every rank is a process. The three take turns in each iteration, so that a change of the machine's load meets them all.
An iteration's time is from the first rank's start to the last rank's end. Bytes are payload rows written by all ranks,
local ones included.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hal

NAMES = ("hal", "gloo", "memcpy")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"ranks": 4, "tokens": 512, "hidden": 2048, "top-k": 8, "experts": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--iterations", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser.parse_args()


class Gloo:
    """What one writes with torch.distributed today: count exchange, gathered rows, all_to_all_single, index_add."""

    def __init__(self, args: argparse.Namespace, rank: int, store: Path) -> None:
        import torch
        import torch.distributed as dist

        self.torch, self.dist, self.args = torch, dist, args
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)

    def pair(self, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        torch, dist, ranks = self.torch, self.dist, self.args.ranks
        owners = topk_idx // (self.args.experts // ranks)
        hit = torch.zeros((len(x), ranks), dtype=torch.bool).scatter_(1, owners, True)
        token_of = hit.t().nonzero(as_tuple=True)[1]
        sent = hit.sum(0)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        to, frm = sent.tolist(), received.tolist()
        out = self.exchange(x.index_select(0, token_of), to, frm)
        self.exchange(topk_idx.index_select(0, token_of), to, frm)
        self.exchange(topk_weights.index_select(0, token_of), to, frm)
        back = self.exchange(out, frm, to)
        y = torch.zeros(x.shape, dtype=torch.float32).index_add_(0, token_of, back.float())
        return y.to(x.dtype)

    def exchange(self, rows: Any, to: list[int], frm: list[int]) -> Any:
        received = rows.new_empty((sum(frm), rows.shape[1]))
        self.dist.all_to_all_single(received.view(self.torch.uint8), rows.view(self.torch.uint8), frm, to)
        return received


class Memcpy:
    """Each rank copies as many bytes as it sends in dispatch and in combine, in one piece, to memory that all share."""

    def __init__(self, nbytes: int, folder: Path, rank: int) -> None:
        path = folder / f"memcpy{rank}"
        path.write_bytes(b"\0" * max(2 * nbytes, 1))
        with path.open("r+b") as file:
            self.target = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)[: 2 * nbytes]
        self.source = np.ones(2 * nbytes, np.uint8)

    def pair(self) -> None:
        np.copyto(self.target, self.source)


def rank_main(args: argparse.Namespace) -> None:
    import torch

    folder = Path(os.environ["HAL_BENCH_DIR"])
    with hal.connect(backend="host") as comm:
        rng = np.random.default_rng(comm.rank)
        x = torch.from_numpy(rng.standard_normal((args.tokens, args.hidden)).astype(np.float32)).bfloat16()
        topk_idx = torch.from_numpy(np.stack([rng.permutation(args.experts)[: args.top_k] for _ in range(args.tokens)]))
        weights = torch.from_numpy(rng.random((args.tokens, args.top_k)).astype(np.float32))
        ep = comm.expert_parallel(
            num_experts=args.experts, top_k=args.top_k, hidden=args.hidden, max_tokens=args.tokens, dtype="bfloat16"
        )
        gloo = Gloo(args, comm.rank, folder / "store")
        row_bytes = 2 * args.hidden
        owners = topk_idx // (args.experts // args.ranks)
        rows = sum(len(set(row)) for row in owners.tolist())
        memcpy = Memcpy(rows * row_bytes, folder, comm.rank)

        def hal_pair() -> Any:
            out = ep.dispatch(x, topk_idx, weights)
            return ep.combine(out.x, out.handle)

        runs: dict[str, Callable[[], Any]] = {
            "hal": hal_pair,
            "gloo": lambda: gloo.pair(x, topk_idx, weights),
            "memcpy": memcpy.pair,
        }
        assert torch.equal(runs["hal"](), runs["gloo"]()), "the two ways disagree"
        times = measure(comm, runs, args)
        every = gather(gloo, (rows, times))
        if comm.rank == 0:
            spans = np.array([t for _, t in every])
            seconds = spans[..., 1].max(axis=0) - spans[..., 0].min(axis=0)
            report(args, sum(r for r, _ in every) * row_bytes * 2, seconds)
        gloo.dist.destroy_process_group()


def gather(gloo: Gloo, value: Any) -> list[Any]:
    every: list[Any] = [None] * gloo.args.ranks
    gloo.dist.all_gather_object(every, value)
    return every


def measure(comm: Any, runs: dict[str, Callable[[], Any]], args: argparse.Namespace) -> list[list[tuple[float, float]]]:
    """[names][iterations] (start, end) on this rank, by the clock that all processes share."""
    times: list[list[tuple[float, float]]] = [[] for _ in NAMES]
    for iteration in range(args.warmup + args.iterations):
        for name, kept in zip(NAMES, times, strict=True):
            comm.barrier()
            start = time.perf_counter()
            runs[name]()
            if iteration >= args.warmup:
                kept.append((start, time.perf_counter()))
    return times


def report(args: argparse.Namespace, nbytes: int, seconds: Any) -> None:
    """``seconds`` [names, iterations], ``nbytes`` of payload a pair over all ranks."""
    median = {name: float(np.median(s)) for name, s in zip(NAMES, seconds, strict=True)}
    rows = [
        {
            "name": name,
            "min_ms": float(np.min(s)) * 1e3,
            "median_ms": median[name] * 1e3,
            "p99_ms": float(np.percentile(s, 99)) * 1e3,
            "GB_per_s": nbytes / median[name] / 1e9,
        }
        for name, s in zip(NAMES, seconds, strict=True)
    ]
    result = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{os.cpu_count()}-core {platform.machine().replace('_', '-')} VM",
        "load_before": float(os.environ["HAL_BENCH_LOAD"]),
        "command": "python benchmarks/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "settings": {k: getattr(args, k) for k in ("ranks", "tokens", "hidden", "top_k", "experts", "iterations")},
        "payload_bytes": nbytes,
        "rows": rows,
        "times_gloo": median["gloo"] / median["hal"],
        "share_of_memcpy": median["memcpy"] / median["hal"],
    }
    text = markdown(result)
    print(text)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(text)


def markdown(result: dict[str, Any]) -> str:
    s = result["settings"]
    lines = [
        f"# Dispatch + combine on the host: {s['ranks']} ranks, {s['tokens']} tokens, hidden {s['hidden']}, "
        f"top-{s['top_k']} of {s['experts']}, bf16, layout rank",
        "",
        f"{result['date']}, {result['machine']} (load average before the run: {result['load_before']}), "
        f"`{result['command']}`. First start to last end of each "
        f"iteration; {result['payload_bytes'] / 1e6:.1f} MB of rows a pair over all ranks, local rows included.",
        "",
        "| | min ms | median ms | p99 ms | GB/s at the median |",
        "|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        lines.append(
            f"| {r['name']} | {r['min_ms']:.2f} | {r['median_ms']:.2f} | {r['p99_ms']:.2f} | {r['GB_per_s']:.2f} |"
        )
    lines += [
        "",
        f"{result['times_gloo']:.2f} x the speed of gloo; {result['share_of_memcpy']:.0%} of plain memcpy.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    args = arguments()
    if "HAL_RANK" in os.environ:
        rank_main(args)
        return 0
    from hal.launch import run

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        os.environ["HAL_BENCH_DIR"] = folder
        os.environ["HAL_BENCH_LOAD"] = f"{os.getloadavg()[0]:.1f}"  # what else the machine was busy with
        return run(args.ranks, [sys.executable, *sys.argv], prefix=False)


if __name__ == "__main__":
    raise SystemExit(main())
