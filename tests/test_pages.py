# SPDX-License-Identifier: Apache-2.0
"""What docs/environment.md and the Makefile list is what the tree has."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("hal", "backends", "kernels_host", "kernels_cuda", "kernels_ascend")
COMPILED = {".cpp", ".hpp", ".h", ".cu", ".cuh"}
_NAME = re.compile(r"""["'](HAL_[A-Z0-9_]*[A-Z0-9])["']""")


def sources(*suffixes: str) -> list[Path]:
    return [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]


def test_every_variable_is_on_the_page() -> None:
    page = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
    read = {
        name
        for path in sources(".py", ".cpp", ".hpp")
        if "tests" not in path.relative_to(ROOT).parts
        for name in _NAME.findall(path.read_text(encoding="utf-8"))
    }
    assert len(read) > 30
    assert sorted(name for name in read if f"`{name}`" not in page) == []
    assert sorted(set(re.findall(r"`(HAL_[A-Z0-9_]+)`", page)) - read) == []


def test_make_builds_again_after_a_change_of_any_source() -> None:
    told = subprocess.run(["make", "-np", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (listed,) = re.findall(r"^CXX_SOURCES := (.*)$", told, re.MULTILINE)
    compiled = {str(path.relative_to(ROOT)) for path in sources(*COMPILED)}
    assert compiled - set(listed.split()) == set()
