# SPDX-License-Identifier: Apache-2.0
"""The examples of the README and of docs/coming_from_deepep.md run as printed, alone and on ranks; the two commands exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def block(page: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


@pytest.fixture
def example(tmp_path: Path) -> Path:
    path = tmp_path / "example.py"
    path.write_text(block("README.md"))
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


IN_ONE_GO = """
    wanted = torch.zeros(16, 64)
    for j in range(2):
        rows = torch.stack([row @ experts[e] for row, e in zip(x, topk_idx[:, j].tolist())])
        wanted += topk_weights[:, j : j + 1] * rows.float()
    torch.testing.assert_close(y.float(), wanted, rtol=2e-2, atol=2e-2)
"""


def test_the_torch_layer_runs_alone_and_on_ranks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "layer.py"
    path.write_text(block("docs/coming_from_deepep.md") + IN_ONE_GO)
    done = python(str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "torch.Size([16, 64]) torch.bfloat16"
    path.write_text(block("docs/coming_from_deepep.md"))
    done = python("-m", "hal.cli", "run", "-n", "4", str(path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([16, 64]) torch.bfloat16") == 4
