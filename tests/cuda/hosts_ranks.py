# SPDX-License-Identifier: Apache-2.0
"""Rank processes on make-believe hosts of this machine: GPUs joined by the software NIC (docs/software_nic.md). Starting them
takes many seconds, so they stay for what follows, unless something failed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from ranks import serve

TESTS = str(Path(__file__).parents[1])
KEPT = 2
"""Runs that stay at most: each process has a context on its GPU."""


def run(
    body: str,
    hosts: int,
    ranks: int,
    *args: Any,
    seconds: float = 120.0,
    module: str = "hosts_rounds",
    transport: str = "gin",
    **environment: str,
) -> list[Any]:
    """``<module>.<body>(comm, *args)`` on every rank; the results in rank order. ``environment``: more variables.
    ``transport``: gin_emulated needs no GPU."""
    what = (hosts, ranks, transport, *sorted(environment.items()))
    started = _kept.pop(what, None)
    if started is None:
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept))).close()
        started = _Ranks(hosts, ranks, transport, environment)
    answers = started.answers((module, body, args), seconds)
    failed = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(answers) if kind != "ok"]
    if failed:
        started.close()
        raise AssertionError("\n".join(map(str, failed)))
    _kept[what] = started
    return [answer for _, answer in answers]


def close() -> None:
    """End all that stayed."""
    while _kept:
        _kept.popitem()[1].close()


class _Ranks:
    def __init__(self, hosts: int, ranks: int, transport: str, environment: dict[str, str]) -> None:
        variables = [dict(environment) for _ in range(ranks)]
        if transport == "gin":
            from hal_cuda import software_nic

            plan = software_nic.plan(hosts, ranks)
            variables = [{**plan.environment(rank), **environment} for rank in range(ranks)]
        context, token = multiprocessing.get_context("spawn"), secrets.token_hex(16)
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            mine, theirs = context.Pipe()
            place = (rank, ranks, hosts, token, transport, variables[rank])
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()  # so that a process that ends ends its pipe
            self.pipes.append(mine)
            self.processes.append(process)

    def answers(self, asked: tuple[str, str, tuple[Any, ...]], seconds: float) -> list[tuple[str, Any]]:
        deadline, told = time.monotonic() + seconds, []
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # what it died of is its answer
                pipe.send(asked)
        for pipe in self.pipes:
            try:
                ready = pipe.poll(max(deadline - time.monotonic(), 0.1))
                told.append(pipe.recv() if ready else ("hung", "no answer in time"))
            except (EOFError, OSError):
                told.append(("died", "the process ended"))
        return told

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()


_kept: dict[tuple[Any, ...], _Ranks] = {}


def _serve(pipe: Any, place: tuple[int, int, int, str, str, dict[str, str]]) -> None:
    rank, ranks, hosts, token, transport, environment = place
    os.environ.update(environment)  # before anything loads CUDA or NCCL
    sys.path.insert(0, TESTS)
    try:
        import torch

        import hal
        from hal.bootstrap import Run

        if transport == "gin":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        config = hal.HalConfig("cuda", transport, hal.TopologyConfig(hosts), timeout=20.0)
        comm = hal.connect(config, run=Run(rank, ranks, token, "tests"))
    except BaseException:
        pipe.recv()
        pipe.send(("error", traceback.format_exc()))
        return
    serve(pipe, comm)
