# SPDX-License-Identifier: Apache-2.0
"""Runs of several ranks, for any test."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from hal import launch


@dataclass
class Outcome:
    """What a run of processes left: exit status, each rank's lines, wall time in seconds."""

    status: int
    lines: dict[int, list[str]]
    seconds: float

    def text(self, rank: int) -> str:
        return "\n".join(self.lines.get(rank, []))


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., Outcome]:
    """``run_ranks(n, script)`` runs a Python script as ``n`` processes, as ``hal run`` does."""

    def run(
        n: int, script: str, *arguments: str, nodes: int = 1, timeout: float = 60.0, keep_going: bool = False
    ) -> Outcome:
        path = tmp_path / "script.py"
        path.write_text(script)
        output, start = io.BytesIO(), time.monotonic()
        argv = [sys.executable, str(path), *arguments]
        status = launch.run(n, argv, nodes=nodes, timeout=timeout, keep_going=keep_going, output=output)
        lines: dict[int, list[str]] = {}
        for rank, line in re.findall(r"^\[rank (\d+)\] (.*)$", output.getvalue().decode(), re.MULTILINE):
            lines.setdefault(int(rank), []).append(line)
        return Outcome(status, lines, time.monotonic() - start)

    return run
