# SPDX-License-Identifier: Apache-2.0
"""Rank processes, one a GPU, that run test bodies one after the other; starting them takes seconds, so they stay."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import secrets
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE, TESTS = str(Path(__file__).parent), str(Path(__file__).parents[1])


class Ranks:
    """``run(body, *args)`` calls ``bodies.<body>(comm, *args)`` on every rank and returns their results. ``transport``: None
    on GPUs, or one that emulates them."""

    def __init__(self, number: int = 2, *, timeout: float = 10.0, nodes: int = 1, transport: str | None = None) -> None:
        self.number, self._timeout, self._nodes, self._transport = number, timeout, nodes, transport
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, body: str, *args: Any, seconds: float = 100.0, module: str = "bodies") -> list[Any]:
        if not self._processes:
            self._start()
        for pipe in self._pipes:
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
            except EOFError:
                answers.append(("died", "the process ended"))
        return answers

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        token = secrets.token_hex(16)
        for rank in range(self.number):
            mine, theirs = context.Pipe()
            place = (rank, self.number, token, self._timeout, self._nodes, self._transport)
            process = context.Process(target=_serve, args=(theirs, place), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(mine)

    def close(self) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []


def _serve(pipe: Any, place: tuple[int, int, str, float, int, str | None]) -> None:
    rank, number, token, timeout, nodes, transport = place
    sys.path[:0] = [HERE, TESTS]
    try:
        import torch

        import hal
        from hal.bootstrap import Run

        if transport is None:
            torch.cuda.set_device(rank)
        config = hal.HalConfig("cuda", transport, hal.TopologyConfig(nodes), timeout=timeout)
        comm = hal.connect(config, run=Run(rank, number, token, "tests"))
    except BaseException:
        pipe.recv()
        pipe.send(("error", traceback.format_exc()))
        return
    serve(pipe, comm)


def serve(pipe: Any, comm: Any) -> None:
    """Run the bodies that are asked for, until None is."""
    while (asked := pipe.recv()) is not None:
        module, body, args = asked
        try:
            answer = ("ok", getattr(importlib.import_module(module), body)(comm, *args))
        except BaseException:
            answer = ("error", traceback.format_exc())
        pipe.send(answer)
    comm.close()
