# SPDX-License-Identifier: Apache-2.0
"""Rank processes on make-believe hosts of this machine: GPUs joined by the software NIC (docs/software_nic.md)."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import secrets
import sys
import traceback
from pathlib import Path
from typing import Any

from hal_cuda import software_nic

TESTS = str(Path(__file__).parents[1])


def run(
    body: str,
    hosts: int,
    ranks: int,
    *args: Any,
    seconds: float = 240.0,
    module: str = "hosts_rounds",
    **environment: str,
) -> list[Any]:
    """``<module>.<body>(comm, *args)`` on every rank; the results in rank order. ``environment``: more variables."""
    plan = software_nic.plan(hosts, ranks)
    context = multiprocessing.get_context("spawn")
    token = secrets.token_hex(16)
    pipes, processes = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe()
        place = (rank, ranks, hosts, token, {**plan.environment(rank), **environment})
        process = context.Process(target=_serve, args=(theirs, place, (module, body), args), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    answers = [pipe.recv() if pipe.poll(seconds) else ("hung", "no answer in time") for pipe in pipes]
    for process in processes:
        process.join(10)
        process.kill()
    failed = [f"rank {rank}:\n{text}" for rank, (kind, text) in enumerate(answers) if kind != "ok"]
    assert not failed, "\n".join(map(str, failed))
    return [answer for _, answer in answers]


def _serve(
    pipe: Any, place: tuple[int, int, int, str, dict[str, str]], named: tuple[str, str], args: tuple[Any, ...]
) -> None:
    module, body = named
    rank, ranks, hosts, token, environment = place
    os.environ.update(environment)  # before anything loads CUDA or NCCL
    sys.path.insert(0, TESTS)
    try:
        import torch

        import hal
        from hal.bootstrap import Run

        torch.cuda.set_device(rank % torch.cuda.device_count())
        config = hal.HalConfig("cuda", "gin", hal.TopologyConfig(hosts), timeout=20.0)
        with hal.connect(config, run=Run(rank, ranks, token, "tests")) as comm:
            pipe.send(("ok", getattr(importlib.import_module(module), body)(comm, *args)))
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
