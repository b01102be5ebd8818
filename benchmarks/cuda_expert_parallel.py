# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on GPUs, timed by graph replay (docs/performance_cuda.md says how and why).

    python benchmarks/cuda_expert_parallel.py --part large,small,eager,baseline,sweep [--out results.json]
    python benchmarks/cuda_expert_parallel.py --part suite --ranks 8
    python benchmarks/cuda_expert_parallel.py --part hosts --ranks 4 --hosts 2

Starts one process for each rank, by default one for each GPU. Every figure is the maximum over ranks of a replay's time
for one operation; min, median and p99 are over replays. "link" counts the bytes that leave a GPU, "logical" those of all
received rows; "wrong" counts rows of the combined result that are not the contract's, bit for bit. Results are written
as they come.

With ``--hosts`` ranks are on make-believe hosts joined by the software NIC: results are checked there, and times say
nothing about a network. ``--transport gin_emulated`` runs the same on CPUs, which times nothing at all.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
INPUT_SETS = 4
"""x is taken from so many arrays in turn, which together exceed the 60 MB L2 from 2048 tokens on: cold L2."""
EMULATED = "gin_emulated"
NETWORK_NOTE = "over the software NIC: not a network's time"


def main() -> int:
    options = arguments()
    if "HAL_RANK" in os.environ:
        run_rank(options)
        return 0
    from hal import launch
    from hal.hosts import arrange

    ranks = options.ranks or default_ranks()
    layout = arrange(options.hosts, ranks, "cuda", options.transport or None)
    print("\n".join(f"# {line}" for line in layout.describe()), flush=True)
    command = [sys.executable, *sys.argv, "--ranks", str(ranks)]
    options_of_ranks = {"nodes": options.hosts, "environment": layout.environment, "prefix": False}
    return launch.run(ranks, command, timeout=options.limit, **options_of_ranks)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="large,small,eager,baseline,sweep", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", default="", help="JSON file")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each GPU")
    parser.add_argument("--hosts", type=int, default=1, help="make-believe hosts, joined by the software NIC")
    parser.add_argument("--transport", default="", help=f"default: the backend's choice; {EMULATED}: on CPUs")
    parser.add_argument("--tokens", default="128,4096,8192", help="of the parts suite and hosts")
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--limit", type=float, default=550.0, help="seconds for the whole run")
    return parser.parse_args()


def default_ranks() -> int:
    from hal_cuda.probe import gpus

    return max(gpus(), 1)


class Bench:
    """One rank's end."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch

        import hal

        self.torch, self.options = torch, options
        self.emulated, self.several_hosts = options.transport == EMULATED, options.hosts > 1
        rank, ranks = int(os.environ["HAL_RANK"]), options.ranks
        if not self.emulated:
            torch.cuda.set_device(rank % torch.cuda.device_count())
        # In one NVLink domain each rank is a node of its own, so that schedule hierarchical sums by rank there.
        nodes = options.hosts if self.several_hosts or self.emulated else ranks
        self.comm = hal.connect(
            backend="cuda",
            transport=options.transport or ("gin" if self.several_hosts else None),
            timeout=120.0 if self.emulated else 20.0,  # CPUs are shared with whatever runs there
            topology=hal.TopologyConfig(nodes),
        )
        self.ranks, self.nodes = ranks, nodes
        self.device = torch.device("cpu") if self.emulated else torch.device("cuda", torch.cuda.current_device())
        self.rows: list[dict[str, Any]] = []
        self.started = time.monotonic()
        self.record: dict[str, Any] = {}
        self.stream = None if self.emulated else torch.cuda.Stream()
        # A graph would keep the host out of the replays; the software NIC's copies are the host's work.
        self.replay = self._replay_calls if self.emulated or self.several_hosts else self._replay_graph

    # --- times ---------------------------------------------------------------------------------------------------

    def _replay_graph(self, body: Callable[[int], Any], count: int) -> dict[str, float]:
        """``count`` operations in one graph; microseconds for each operation, over replays."""
        torch, replays = self.torch, self.options.replays
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
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 4)]
        self.comm.barrier()
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(20_000_000)
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
        torch.cuda.synchronize()
        own = [a.elapsed_time(b) * 1e3 / count for a, b in itertools.pairwise(marks[3:])]
        del graph
        return self.over_ranks(own)

    def _replay_calls(self, body: Callable[[int], Any], count: int) -> dict[str, float]:
        """The same by the host's clock, call after call."""
        own = []
        for replay in range(self.options.replays + 1):
            self.comm.barrier()
            start = time.perf_counter()
            for i in range(count):
                body(i)
            if not self.emulated:
                self.torch.cuda.synchronize()
            if replay:  # the first one warms up
                own.append((time.perf_counter() - start) * 1e6 / count)
        return self.over_ranks(own)

    def over_ranks(self, own: list[float]) -> dict[str, float]:
        everybody = self.comm._bootstrap.all_gather(own, "timing")
        times = sorted(map(max, zip(*everybody, strict=True)))
        return {"min": round(times[0], 2), "median": round(statistics.median(times), 2), "p99": round(times[-1], 2)}

    def total(self, value: int) -> int:
        return sum(self.comm._bootstrap.all_gather(value, "count"))

    def most(self, value: float) -> float:
        return max(self.comm._bootstrap.all_gather(value, "count"))

    # --- results -------------------------------------------------------------------------------------------------

    def note(self, **row: Any) -> None:
        """One result: printed and written at once, so that a run that is ended keeps what it had."""
        self.rows.append(row)
        if self.comm.rank == 0:
            print(" ".join(f"{k}={v:.1f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True)
            if self.options.out:
                write(self)

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

    @contextmanager
    def layer(self, pull: bool | None = None, **settings: Any) -> Iterator[Any]:
        """An ExpertParallel of the benchmark's shape. ``pull``: whether combine reads its rows, whatever the size."""
        import hal_cuda.engine as engine_module

        from hal.config import QUANTISED_DTYPES

        before = engine_module.PULL_TOKENS
        if pull is not None:
            engine_module.PULL_TOKENS = 1 << 30 if pull else 0
        options = self.options
        shape = {"num_experts": options.experts, "top_k": options.top_k, "hidden": options.hidden}
        scale_dim = max(options.hidden // 128, 1) if settings.get("dtype") in QUANTISED_DTYPES else 0
        try:
            ep = self.comm.expert_parallel(**shape, scale_dim=scale_dim, **settings)
        finally:
            engine_module.PULL_TOKENS = before
        try:
            yield ep
        finally:
            ep.close()

    def pair(
        self,
        tokens: int,
        dtype: str,
        layout: str,
        *,
        tuning: dict[str, int] | None = None,
        parts: bool = True,
        skew: float = 0.0,
        schedule: str = "direct",
        pull: bool | None = None,
        label: str = "",
    ) -> None:
        """One shape: dispatch, combine, and the pair, after one round whose result is checked."""
        weighted = layout == "expert"
        settings = {"max_tokens": tokens, "dtype": dtype, "layout": layout, "schedule": schedule}
        with self.layer(pull, num_buffers=3, **settings) as ep:
            engine = ep._engine
            if tuning:
                engine.tune(**tuning)
            sets = self.inputs(ep.spec, tokens, skew)

            def arguments(i: int) -> dict[str, Any]:
                x, idx, weights, scales = sets[i % INPUT_SETS]
                return {"x": x, "topk_idx": idx, "topk_weights": weights, "scales": scales}

            def dispatch(i: int) -> Any:
                return ep.dispatch(**arguments(i))

            def combine(out: Any) -> Any:
                return ep.combine(ep.expert_output(out.handle, out.x), out.handle, weighted=weighted)

            received, wrong = self.check(ep, arguments(0))
            row: dict[str, Any] = {
                "case": label or ("pair" if schedule == "direct" else schedule),
                "ranks": self.ranks,
                "hosts": self.options.hosts,
                "tokens": tokens,
                "dtype": dtype,
                "layout": layout,
                "skew": skew,
                "received": received,
                "wrong": wrong,
                **self.shapes_of_launches(engine, tokens),
            }
            count = (10 if tokens <= 1024 else 4) if self.replay == self._replay_graph else 2
            row["pair_us"] = self.replay(lambda i: combine(dispatch(i)), count)
            if parts:
                row["dispatch_us"] = self.replay(dispatch, count)
            link = int(self.most(self.sent_elsewhere(sets[0][1]) * engine.place.row_bytes))
            row["link_bytes"], row["logical_bytes"] = link, received * engine.place.row_bytes
            if parts and not self.emulated:
                row["link_GBs"] = link / row["dispatch_us"]["median"] / 1e3
            if self.emulated or self.several_hosts:
                row["note"] = "emulated: no time at all" if self.emulated else NETWORK_NOTE
            self.note(**row)

    def shapes_of_launches(self, engine: Any, tokens: int) -> dict[str, Any]:
        if self.several_hosts:
            return {}
        return {
            "combine": "push" if engine._push else "pull",
            "dispatch_sms": engine._dispatch_shape(tokens)[0],
            "combine_sms": engine._combine_shape(tokens)[0],
        }

    def check(self, ep: Any, given: dict[str, Any]) -> tuple[int, int]:
        """(rows received here, rows of all ranks' results that differ from the contract in any bit).

        The experts give back what they got, so what a token's sum must be follows from its own row.
        """
        torch, spec, weighted = self.torch, ep.spec, ep.spec.layout == "expert"
        out = ep.dispatch(**given)
        combined = getattr(torch, spec.combine_dtype or spec.dtype)
        y = ep.combine(out.x.to(combined), out.handle, weighted=weighted)
        want = expected_sum(
            torch,
            given["x"].to(combined),
            given["topk_idx"],
            given["topk_weights"] if weighted else None,
            ranks=self.ranks,
            local_experts=spec.num_experts // self.ranks,
            nodes=self.nodes if spec.schedule == "hierarchical" else 1,
            home=self.comm.rank,
        )
        bits = torch.int16 if y.element_size() == 2 else torch.int32
        wrong = int((y.view(bits) != want.view(bits)).any(1).sum()) if len(y) else 0
        received = len(out.x)
        del out, y
        return received, self.total(wrong)

    def sent_elsewhere(self, idx: Any) -> int:
        """Rows that leave this rank's GPU: one for each token and other rank."""
        owners = idx // (self.options.experts // self.ranks)
        return sum(int((owners == rank).any(1).sum()) for rank in range(self.ranks) if rank != self.comm.rank)

    def eager(self, tokens: int) -> None:
        """Wall time of a pair from Python, with and without the count exchange and its host wait. So many in a row; between
        them the host waits for the GPU and the other ranks."""
        torch = self.torch
        with self.layer(max_tokens=tokens) as ep:
            sets = self.inputs(ep.spec, tokens)
            handle = ep.dispatch(*sets[0][:3]).handle
            for cached, count in itertools.product((True, False), (10, 200)):
                times = []
                for _ in range(600 // count):
                    torch.cuda.synchronize()
                    self.comm.barrier()
                    start = time.perf_counter()
                    for i in range(count):
                        x, idx, weights, _ = sets[i % INPUT_SETS]
                        given = (x, None, weights, None, handle) if cached else (x, idx, weights, None, None)
                        out = ep.dispatch(*given[:3], handle=given[4])
                        y = ep.combine(out.x, out.handle)
                        del out, y
                    torch.cuda.synchronize()
                    times.append((time.perf_counter() - start) * 1e6 / count)
                self.note(
                    case="eager pair, wall",
                    ranks=self.ranks,
                    tokens=tokens,
                    cached=cached,
                    in_a_row=count,
                    pair_us=self.over_ranks(times),
                )

    def baseline(self, tokens: int) -> None:
        """All-gather of every token and reduce-scatter of every answer, by torch and its NCCL."""
        torch, hidden = self.torch, self.options.hidden
        import torch.distributed as dist

        if not dist.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
            dist.init_process_group("nccl", rank=self.comm.rank, world_size=self.ranks, device_id=self.device)
        x = torch.randn(tokens, hidden, device=self.device).to(torch.bfloat16)
        everything = torch.empty(self.ranks * tokens, hidden, device=self.device, dtype=torch.bfloat16)
        y = torch.empty_like(x)
        dist.all_gather_into_tensor(everything, x)
        dist.reduce_scatter_tensor(y, everything)
        torch.cuda.synchronize()
        for name, body in {
            "all-gather": lambda i: dist.all_gather_into_tensor(everything, x),
            "reduce-scatter": lambda i: dist.reduce_scatter_tensor(y, everything),
        }.items():
            self.note(case=name, ranks=self.ranks, tokens=tokens, dtype="bfloat16", us=self.replay(body, 4))


def expected_sum(
    torch: Any,
    x: Any,
    idx: Any,
    weights: Any | None,
    *,
    ranks: int,
    local_experts: int,
    nodes: int,
    home: int,
) -> Any:
    """What combine must give when every expert gives back the row that it got (docs/contract.md, section 2).

    ``x`` [T, hidden] of the combined type, ``idx`` [T, k], ``weights`` [T, k] or None (layout rank: one row for each
    rank). ``nodes`` above 1: each sums its own rows, and what crosses to another node is rounded.
    """
    rows, owners, per_node = x.float(), idx // local_experts, ranks // nodes
    y = torch.zeros_like(rows)
    for node in range(nodes):
        part = torch.zeros_like(rows) if nodes > 1 else y
        if weights is None:
            for rank in range(node * per_node, (node + 1) * per_node):
                part += rows * (owners == rank).any(1, keepdim=True)
        else:
            for j in range(idx.shape[1]):
                here = (owners[:, j] // per_node == node) if nodes > 1 else torch.ones_like(owners[:, j]).bool()
                # Two operations, so that nothing is fused: each product and each sum is rounded.
                part += (rows * weights[:, j : j + 1]) * here[:, None]
        if nodes > 1:
            y += part if node == home // per_node else part.to(x.dtype).float()
    return y.to(x.dtype)


# --- parts -----------------------------------------------------------------------------------------------------------


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
        bench.pair(4096, "bfloat16", "expert", schedule="hierarchical", tuning=tuning, label="sums by rank")
    bench.pair(4096, "float8_e4m3fn", "expert", schedule="hierarchical", label="sums by rank")


def small(bench: Bench) -> None:
    for tokens in (1, 8, 16, 32, 64, 128, 256):
        bench.pair(tokens, "bfloat16", "rank")
    bench.pair(128, "float8_e4m3fn", "rank")
    bench.pair(128, "bfloat16", "expert")
    for tokens, layout in ((1, "rank"), (128, "rank"), (128, "expert")):
        bench.pair(tokens, "bfloat16", layout, schedule="latency")


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
        for blocks in (12, 16, 20, 24, 32, 48, 64):
            pull_with(bench, tokens, "bfloat16", blocks)
    for tokens in (4096, 8192):
        pull_with(bench, tokens, "float8_e4m3fn", 64)


def targets(bench: Bench) -> None:
    """The shapes of docs/performance_cuda.md's table that the parts suite, small and eager lack."""
    for blocks in (24, 48):
        pull_with(bench, 4096, "bfloat16", blocks)
    pull_with(bench, 4096, "float8_e4m3fn", 48)
    for blocks in (16, 20, 28, 32):
        tuning = {"push_blocks": blocks}
        bench.pair(4096, "bfloat16", "rank", tuning=tuning, pull=False, parts=False, label=f"push, {blocks} first")


def pull_with(bench: Bench, tokens: int, dtype: str, blocks: int) -> None:
    tuning = {"combine_blocks": blocks}
    bench.pair(tokens, dtype, "rank", tuning=tuning, pull=True, parts=False, label=f"pull, {blocks} SMs")


def eager(bench: Bench) -> None:
    bench.eager(128)
    bench.eager(1)


def baseline(bench: Bench) -> None:
    for tokens in (128, 4096, 8192):
        bench.baseline(tokens)


def suite(bench: Bench) -> None:
    """What every number of GPUs is compared by: sizes × types × layouts × balanced and skewed."""
    schedules = {"rank": ("direct",), "expert": ("direct", "hierarchical") if bench.nodes > 1 else ("direct",)}
    for tokens, layout, dtype, skew in itertools.product(
        map(int, bench.options.tokens.split(",")), schedules, ("bfloat16", "float8_e4m3fn"), (0.0, 2.0)
    ):
        for schedule in schedules[layout]:
            bench.pair(tokens, dtype, layout, skew=skew, schedule=schedule)


def hosts(bench: Bench) -> None:
    """Across make-believe hosts."""
    for tokens, layout, dtype in itertools.product(
        map(int, bench.options.tokens.split(",")), ("rank", "expert"), ("bfloat16", "float8_e4m3fn")
    ):
        bench.pair(tokens, dtype, layout, schedule="hierarchical")
    bench.pair(int(bench.options.tokens.split(",")[0]), "bfloat16", "rank", skew=2.0, schedule="hierarchical")
    bench.pair(int(bench.options.tokens.split(",")[0]), "bfloat16", "rank", schedule="direct")


PARTS = {
    "large": large,
    "expert": expert,
    "small": small,
    "sweep": sweep,
    "pull": pull,
    "targets": targets,
    "eager": eager,
    "baseline": baseline,
    "suite": suite,
    "hosts": hosts,
}


def run_rank(options: argparse.Namespace) -> None:
    bench = Bench(options)
    for part in options.part.split(","):
        PARTS[part](bench)
    bench.comm.close()
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
    if any(row.get("wrong") for row in bench.rows):
        sys.exit("some results are wrong: see 'wrong' above")


def write(bench: Bench) -> None:
    from hal_cuda.facts import of_session, record_of, write

    options, ranks = bench.options, bench.ranks
    if not bench.record:  # once: asking the driver takes longer than many a result
        on = f"{ranks} ranks on {options.hosts} host{'s' * (options.hosts > 1)}"
        bench.record = record_of(
            f"dispatch and combine, {on}" + (", emulated on CPUs" if bench.emulated else ""),
            of_session(bench.comm._session),
            0 if bench.emulated else min(ranks, bench.torch.cuda.device_count()),
            "python benchmarks/cuda_expert_parallel.py " + " ".join(sys.argv[1:]),
            shape={
                "hidden": options.hidden,
                "experts": options.experts,
                "top_k": options.top_k,
                "ranks": ranks,
                "hosts": options.hosts,
            },
        )
    seconds = round(time.monotonic() - bench.started, 1)
    write(Path(options.out), {**bench.record, "seconds": seconds, "rows": bench.rows})


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    sys.exit(main())
