# SPDX-License-Identifier: Apache-2.0
"""The README's example runs as printed, alone and on ranks, and its two commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def example(tmp_path: Path) -> Path:
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(block)
    return path


def python(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], text=True, capture_output=True, check=False)


def test_the_example_runs_alone(example: Path) -> None:
    done = python(str(example))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "(16,", "64)", str(2.0 * 16 * 64)]


def test_the_example_runs_on_four_ranks(example: Path) -> None:
    done = python("-m", "hal.cli", "run", "-n", "4", str(example))
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[2] for line in done.stdout.splitlines()) == ["0", "1", "2", "3"]
    # Each token's two experts are on two ranks: two rows, doubled.
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {str(4.0 * 16 * 64)}


def test_the_commands_come_first() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (commands,) = re.findall(r"```\n(make .*?)```", readme, re.DOTALL)
    targets = [line.split()[1] for line in commands.splitlines()]
    assert targets == ["demo", "test"]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
