# SPDX-License-Identifier: Apache-2.0
"""Runs of several ranks, for any test."""

from __future__ import annotations

import io
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hal import launch

# An example that takes a millisecond takes seconds where the machine runs something else meanwhile.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, then those with many: no process shall be left with a long file at the end. (xdist's
    own order, by number alone, is switched off in the Makefile.)"""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))


@dataclass
class Outcome:
    """What a run of processes left: exit status, each rank's lines, wall time in seconds."""

    status: int
    lines: dict[int, list[str]]
    seconds: float

    def text(self, rank: int) -> str:
        return "\n".join(self.lines.get(rank, []))


@pytest.fixture(autouse=True)
def patient_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, what the other ranks say of the first failure may come long after it."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 60.0)


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., Outcome]:
    """``run_ranks(n, script)`` runs a Python script as ``n`` processes, as ``hal run`` does."""

    def run(
        n: int,
        script: str,
        *arguments: str,
        nodes: int = 1,
        timeout: float = 240.0,
        keep_going: bool = False,
        environment: Callable[[int], dict[str, str]] | None = None,
    ) -> Outcome:
        path = tmp_path / "script.py"
        path.write_text(script)
        output, start = io.BytesIO(), time.monotonic()
        argv = [sys.executable, str(path), *arguments]
        more = {"keep_going": keep_going, "output": output, "environment": environment}
        status = launch.run(n, argv, nodes=nodes, timeout=timeout, **more)
        lines: dict[int, list[str]] = {}
        for rank, line in re.findall(r"^\[rank (\d+)\] (.*)$", output.getvalue().decode(), re.MULTILINE):
            lines.setdefault(int(rank), []).append(line)
        return Outcome(status, lines, time.monotonic() - start)

    return run
