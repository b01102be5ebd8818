# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on GPUs, timed by graph replay (docs/performance_cuda.md says how and why).

    python benchmarks/cuda_expert_parallel.py --part large,small,eager,baseline,sweep [--out results.json]

Starts one process for each of two GPUs. Every figure is the maximum over ranks of a replay's time for one operation;
min, median and p99 are over replays. "link" counts the bytes that leave a GPU, "logical" those of all received rows.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RANKS, HIDDEN, EXPERTS, TOP_K = 2, 7168, 256, 8
INPUT_SETS = 4
"""x is taken from so many arrays in turn, which together exceed the 60 MB L2 from 2048 tokens on: cold L2."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="large,small,eager,baseline,sweep")
    parser.add_argument("--out", default="")
    parser.add_argument("--replays", type=int, default=20)
    options = parser.parse_args()
    if "HAL_RANK" in os.environ:
        run_rank(options)
        return 0
    sys.path.insert(0, str(ROOT))
    from hal import launch

    return launch.run(RANKS, [sys.executable, *sys.argv], prefix=False, timeout=550)


class Bench:
    """One rank's end."""

    def __init__(self, replays: int) -> None:
        import torch

        import hal

        self.torch, self.replays = torch, replays
        torch.cuda.set_device(int(os.environ["HAL_RANK"]))
        self.comm = hal.connect(backend="cuda", timeout=20.0, topology=hal.TopologyConfig(RANKS))
        self.device = torch.device("cuda", self.comm.rank)
        self.rows: list[dict[str, Any]] = []
        self.stream = torch.cuda.Stream()

    def gather(self, value: float) -> float:
        """The maximum over ranks."""
        return max(self.comm._bootstrap.all_gather(value, "timing"))

    def inputs(self, spec: Any, tokens: int, skew: float = 0.0) -> list[tuple[Any, ...]]:
        torch = self.torch
        generator = torch.Generator(device=self.device).manual_seed(17 + self.comm.rank)
        sets = []
        for _ in range(INPUT_SETS):
            x = torch.randn(tokens, spec.hidden, device=self.device, generator=generator).to(getattr(torch, spec.dtype))
            score = torch.rand(tokens, spec.num_experts, device=self.device, generator=generator)
            score = score - skew * torch.arange(spec.num_experts, device=self.device) / spec.num_experts
            idx = score.topk(spec.top_k, dim=1).indices.contiguous()
            weights = torch.rand(tokens, spec.top_k, device=self.device, generator=generator)
            scales = (
                torch.rand(tokens, spec.scale_dim, device=self.device, generator=generator) if spec.scale_dim else None
            )
            sets.append((x, idx, weights, scales))
        return sets

    def replay(self, body: Callable[[int], None], count: int) -> dict[str, float]:
        """``count`` operations in one graph; microseconds for each operation, over replays."""
        torch = self.torch
        with torch.cuda.stream(self.stream):
            body(0)
            body(1)
        torch.cuda.synchronize()
        self.comm.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            for i in range(count):
                body(i)
        # Replays follow one another without the host in between, behind a spin that brings the clocks up.
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(self.replays + 4)]
        self.comm.barrier()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
        torch.cuda.synchronize()
        own = [a.elapsed_time(b) * 1e3 / count for a, b in itertools.pairwise(marks[3:])]
        everybody = self.comm._bootstrap.all_gather(own, "timing")
        times = sorted(map(max, zip(*everybody, strict=True)))
        del graph
        return {"min": times[0], "median": statistics.median(times), "p99": times[-1]}

    def note(self, **row: Any) -> None:
        self.rows.append(row)
        if self.comm.rank == 0:
            print(" ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)

    def pair(
        self,
        tokens: int,
        dtype: str,
        layout: str,
        *,
        tuning: dict[str, int] | None = None,
        parts: bool = True,
        skew: float = 0.0,
        by_rank: bool = False,
        pull: bool | None = None,
        label: str = "",
    ) -> None:
        """One shape: dispatch, combine, and the pair."""
        import hal_cuda.engine as engine_module

        from hal.config import QUANTISED_DTYPES

        quantised = dtype in QUANTISED_DTYPES
        before = engine_module.PULL_TOKENS
        if pull is not None:
            engine_module.PULL_TOKENS = 1 << 30 if pull else 0
        ep = self.comm.expert_parallel(
            num_experts=EXPERTS,
            top_k=TOP_K,
            hidden=HIDDEN,
            max_tokens=tokens,
            dtype=dtype,
            layout=layout,
            scale_dim=HIDDEN // 128 if quantised else 0,
            num_buffers=3,
            schedule="hierarchical" if by_rank else "direct",
        )
        engine_module.PULL_TOKENS = before
        engine = ep._engine
        if tuning:
            engine.tuning = replace(engine.tuning, **tuning)
        sets = self.inputs(ep.spec, tokens, skew)

        def arguments(i: int) -> dict[str, Any]:
            x, idx, weights, scales = sets[i % INPUT_SETS]
            return {"x": x, "topk_idx": idx, "topk_weights": weights, "scales": scales}

        warm = ep.dispatch(**arguments(0))
        received = len(warm.x)
        del warm
        weighted = layout == "expert"

        def dispatch(i: int) -> Any:
            return ep.dispatch(**arguments(i))

        def combine(out: Any) -> Any:
            return ep.combine(ep.expert_output(out.handle, out.x), out.handle, weighted=weighted)

        count = 10 if tokens <= 1024 else 4
        row: dict[str, Any] = {
            "case": label or "pair",
            "tokens": tokens,
            "dtype": dtype,
            "layout": layout,
            "received": received,
            "combine": "push" if engine._push else "pull",
            "dispatch_sms": engine._dispatch_shape(tokens)[0],
            "combine_sms": engine._combine_shape(tokens)[0],
        }
        row["pair_us"] = self.replay(lambda i: combine(dispatch(i)), count)
        if parts:
            row["dispatch_us"] = self.replay(dispatch, count)
        link = self.sent_elsewhere(sets[0][1]) * engine.place.row_bytes
        row["link_bytes"], row["logical_bytes"] = link, received * engine.place.row_bytes
        if parts:
            row["link_GBs"] = link / row["dispatch_us"]["median"] / 1e3
        row = {k: ({n: round(t, 2) for n, t in v.items()} if isinstance(v, dict) else v) for k, v in row.items()}
        self.note(**row)
        ep.close()

    def sent_elsewhere(self, idx: Any) -> int:
        other = 1 - self.comm.rank
        return int(((idx // (EXPERTS // RANKS)) == other).any(1).sum())

    def eager(self, tokens: int) -> None:
        """Wall time of a pair from Python, with and without the count exchange and its host wait."""
        torch = self.torch
        ep = self.comm.expert_parallel(num_experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, max_tokens=tokens)
        sets = self.inputs(ep.spec, tokens)
        handle = ep.dispatch(*sets[0][:3]).handle
        for cached in (True, False):
            times = []
            for _ in range(60):
                torch.cuda.synchronize()
                self.comm.barrier()
                start = time.perf_counter()
                for i in range(10):
                    x, idx, weights, _ = sets[i % INPUT_SETS]
                    out = (
                        ep.dispatch(x, topk_weights=weights, handle=handle) if cached else ep.dispatch(x, idx, weights)
                    )
                    y = ep.combine(out.x, out.handle)
                    del out, y
                torch.cuda.synchronize()
                times.append(self.gather((time.perf_counter() - start) * 1e5))
            times.sort()
            self.note(
                case="eager pair, wall",
                tokens=tokens,
                cached=cached,
                min_us=times[0],
                median_us=statistics.median(times),
                p99_us=times[-1],
            )
        ep.close()

    def baseline(self, tokens: int) -> None:
        """All-gather of every token and reduce-scatter of every answer, by torch and its NCCL."""
        torch = self.torch
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
            dist.init_process_group("nccl", rank=self.comm.rank, world_size=RANKS, device_id=self.device)
        x = torch.randn(tokens, HIDDEN, device=self.device).to(torch.bfloat16)
        everything = torch.empty(RANKS * tokens, HIDDEN, device=self.device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        dist.all_gather_into_tensor(everything, x)
        dist.reduce_scatter_tensor(y, everything)
        torch.cuda.synchronize()
        for name, body in {
            "all-gather": lambda i: dist.all_gather_into_tensor(everything, x),
            "reduce-scatter": lambda i: dist.reduce_scatter_tensor(y, everything),
        }.items():
            got = {k: round(v, 2) for k, v in self.replay(body, 4).items()}
            self.note(case=name, tokens=tokens, dtype="bfloat16", us=got)


def run_rank(options: argparse.Namespace) -> None:
    bench = Bench(options.replays)
    start = time.monotonic()
    for part in options.part.split(","):
        PARTS[part](bench)
    if bench.comm.rank == 0 and options.out:
        write(bench, options, time.monotonic() - start)
    bench.comm.close()


def large(bench: Bench) -> None:
    for tokens in (512, 1024, 2048, 4096, 8192):
        bench.pair(tokens, "bfloat16", "rank")
    for tokens in (4096, 8192):
        bench.pair(tokens, "float8_e4m3fn", "rank")
    bench.pair(4096, "bfloat16", "rank", skew=2.0, label="skewed")


def expert(bench: Bench) -> None:
    bench.pair(4096, "bfloat16", "expert")
    for blocks in (64, 96, 132):
        tuning = {"dispatch_blocks": blocks, "combine_blocks": blocks, "push_blocks": blocks // 2}
        bench.pair(4096, "bfloat16", "expert", by_rank=True, tuning=tuning, label="sums by rank")
    bench.pair(4096, "float8_e4m3fn", "expert", by_rank=True, label="sums by rank")


def small(bench: Bench) -> None:
    for tokens in (1, 8, 16, 32, 64, 128, 256):
        bench.pair(tokens, "bfloat16", "rank")
    bench.pair(128, "float8_e4m3fn", "rank")
    bench.pair(128, "bfloat16", "expert")


def sweep(bench: Bench) -> None:
    for blocks in (8, 12, 16, 20, 24, 32, 48, 64, 96, 132):
        tuning = {"dispatch_blocks": blocks, "combine_blocks": blocks, "push_blocks": min(20, max(blocks // 2, 4))}
        bench.pair(4096, "bfloat16", "rank", tuning=tuning, pull=False, label="sweep, push")
    for blocks in (8, 16, 24, 32, 48, 64, 132):
        tuning = {"dispatch_blocks": blocks, "combine_blocks": blocks}
        bench.pair(4096, "bfloat16", "rank", tuning=tuning, pull=True, label="sweep, pull")


def pull(bench: Bench) -> None:
    """Combine by reading what the experts wrote into ep.expert_output."""
    for tokens in (1024, 2048, 4096, 8192):
        for blocks in (24, 48, 64):
            bench.pair(
                tokens, "bfloat16", "rank", tuning={"combine_blocks": blocks}, pull=True, parts=False, label="pull"
            )
    for tokens in (4096, 8192):
        tuning = {"combine_blocks": 64}
        bench.pair(tokens, "float8_e4m3fn", "rank", tuning=tuning, pull=True, parts=False, label="pull")


def eager(bench: Bench) -> None:
    bench.eager(128)
    bench.eager(1)


def baseline(bench: Bench) -> None:
    for tokens in (128, 4096, 8192):
        bench.baseline(tokens)


PARTS = {
    "large": large,
    "expert": expert,
    "small": small,
    "sweep": sweep,
    "pull": pull,
    "eager": eager,
    "baseline": baseline,
}


def write(bench: Bench, options: argparse.Namespace, seconds: float) -> None:
    from hal_cuda.facts import of_session, write_record

    write_record(
        Path(options.out),
        "dispatch and combine, two GPUs",
        of_session(bench.comm._session),
        RANKS,
        "python benchmarks/cuda_expert_parallel.py " + " ".join(sys.argv[1:]),
        shape={"hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "ranks": RANKS},
        seconds=round(seconds, 1),
        rows=bench.rows,
    )


if __name__ == "__main__":
    sys.exit(main())
