# SPDX-License-Identifier: Apache-2.0
"""``hal bench completion`` on the emulated engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EMULATED = ("backend=ascend", "transport=udma_emulated")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hal.cli", "bench", "completion", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_counts_equal_the_formulas_for_rows_of_1_to_7168_elements(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    done = bench(*EMULATED, "ranks=2", "workload.tokens=16", "--sizes", "1,240,7168", "--json", str(file))
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 12
    by = {(row["completion"], row["elements"]): row for row in rows}
    for elements in (1, 240, 7168):
        flags, strong = by["flag_in_block", elements], by["strong_signal", elements]
        record = strong["record"]
        assert strong["data"] == strong["rows"] * record
        assert flags["data"] + flags["flags"] == flags["rows"] * 512 * -(-record // 480)
        assert flags["flags"] * 15 == flags["data"]
        assert strong["flags"] == 0
        assert (
            by["strong_signal_no_cqe", elements]["completions"]
            < strong["completions"]
            > by["strong_last", elements]["completions"]
        )
        assert flags["memory"] > strong["memory"]
    assert "formula" in done.stdout


def test_a_transport_that_does_not_count_is_refused() -> None:
    done = bench()
    assert done.returncode == 2
    assert "does not count its requests" in done.stderr
