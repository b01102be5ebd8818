# SPDX-License-Identifier: Apache-2.0
"""Rank processes, one a GPU, that run test bodies one after the other; starting them takes seconds, so they stay."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import secrets
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE, TESTS = str(Path(__file__).parent), str(Path(__file__).parents[1])


class Ranks:
    """``run(body, *args)`` calls ``bodies.<body>(comm, *args)`` on every rank and returns their results. ``transport``: None
    on GPUs of one NVLink domain, or another. ``variables``: each rank's environment, besides this process's."""

    def __init__(
        self,
        number: int = 2,
        *,
        timeout: float = 10.0,
        nodes: int = 1,
        transport: str | None = None,
        variables: Sequence[Mapping[str, str]] = (),
    ) -> None:
        self.number = number
        self._config = (nodes, transport, timeout)
        self._variables = [dict(own) for own in variables] or [{}] * number
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, body: str, *args: Any, seconds: float = 100.0, module: str = "bodies") -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # what it died of is its answer
                pipe.send((module, body, args))
        answers = self._answers(time.monotonic() + seconds)
        failed = [f"rank {rank}:\n{answer[1]}" for rank, answer in enumerate(answers) if answer[0] != "ok"]
        if failed:
            self.close()
            raise AssertionError("\n".join(failed))
        return [answer[1] for answer in answers]

    def _answers(self, deadline: float) -> list[tuple[str, Any]]:
        answers: list[tuple[str, Any]] = []
        for pipe in self._pipes:
            try:
                ready = pipe.poll(max(deadline - time.monotonic(), 0.1))
                answers.append(pipe.recv() if ready else ("hung", "no answer in time"))
            except (EOFError, OSError):
                answers.append(("died", "the process ended"))
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        token = secrets.token_hex(16)
        for rank, variables in enumerate(self._variables):
            mine, theirs = context.Pipe()
            place = (rank, self.number, token, *self._config, variables)
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
            process.start()
            theirs.close()  # so that a process that ends ends its pipe
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Any, place: tuple[int, int, str, int, str | None, float, dict[str, str]]) -> None:
    rank, number, token, nodes, transport, timeout, variables = place
    os.environ.update(variables)  # before anything loads CUDA or NCCL
    sys.path[:0] = [HERE, TESTS]
    try:
        import torch

        import hal
        from hal.bootstrap import Run

        if transport in (None, "gin"):
            torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks of make-believe hosts may share one
        config = hal.HalConfig("cuda", transport, hal.TopologyConfig(nodes), timeout=timeout)
        comm = hal.connect(config, run=Run(rank, number, token, "tests"))
    except BaseException:
        pipe.recv()
        pipe.send(("error", traceback.format_exc()))
        return
    while (asked := pipe.recv()) is not None:
        module, body, args = asked
        try:
            answer = ("ok", getattr(importlib.import_module(module), body)(comm, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)
    comm.close()
