# SPDX-License-Identifier: Apache-2.0
"""Results measured on GPUs: how they are filed, drawn and quoted."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
from hal_cuda.facts import write_record

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "results" / "2026-11-30-cuda-expert-parallel.json"
SUITE = RECORD.with_name("2026-11-30-231341-gpu-suite.json")


@pytest.fixture(scope="module")
def plot_cuda():
    spec = importlib.util.spec_from_file_location("plot_cuda", ROOT / "benchmarks" / "plot_cuda.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_record_says_where_it_is_from(tmp_path, monkeypatch):
    monkeypatch.setenv("HAL_COMMIT", "abc")
    path = tmp_path / "new" / "record.json"
    write_record(path, "a test", {"gpu": "H0", "nccl": 23007}, 2, "make", passed=3)
    record = json.loads(path.read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", record.pop("date"))
    record.pop("driver")
    assert record == {
        "what": "a test",
        "machine": "2 x H0",
        "nccl": 23007,
        "commit": "abc",
        "command": "make",
        "passed": 3,
    }


def test_the_page_quotes_what_was_recorded():
    """The table of times in docs/performance_cuda.md, plain rows; where a shape was measured twice, the later time."""
    record = json.loads(SUITE.read_text())
    (part,) = (part for part in record["parts"] if part["part"] == "benchmark")
    rows = part["steps"][0]["rows"]
    assert all(row.get("wrong", 0) == 0 for row in rows)
    plain = [row for row in rows if (row.get("layout"), row.get("dtype"), row.get("skew")) == ("rank", "bfloat16", 0.0)]
    columns = [
        {row["tokens"]: row["dispatch_us"]["median"] for row in plain if row["case"] == "pair"},
        {row["tokens"]: row["pair_us"]["median"] for row in plain if row["case"] == "pair"},
        {row["tokens"]: row["pair_us"]["median"] for row in plain if row["case"] == "pull, 48 SMs"},
    ]
    there, back = (
        {row["tokens"]: row["us"]["median"] for row in rows if row["case"] == case}
        for case in ("all-gather", "reduce-scatter")
    )
    columns.append({tokens: there[tokens] + back[tokens] for tokens in there})
    page = (ROOT / "docs" / "performance_cuda.md").read_text()
    assert SUITE.name in page
    assert record["commit"] in page
    table = page.partition("| tokens | dispatch |")[2].partition("\n\n")[0]
    quoted = re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]*) ?\| ([\d.]*) ?\|$", table, re.MULTILINE)
    assert [int(row[0]) for row in quoted] == [1, 8, 32, 128, 256, 4096, 8192]
    for tokens, *cells in quoted:
        for column, cell in zip(columns, cells, strict=True):
            if cell:
                assert column[int(tokens)] == pytest.approx(float(cell), abs=0.051), (tokens, cell)


def test_the_page_quotes_what_an_eager_pair_costs_in_python():
    record = json.loads((RECORD.parent / "2026-11-30-cuda-call-cost.json").read_text())
    page = (ROOT / "docs" / "performance_cuda.md").read_text()
    wanted = [
        f"| {new['layout']} | {new['form']} | {old['python_calls']} | {new['python_calls']} "
        f"| {old['median_us']:.1f} | {new['median_us']:.1f} | {new['ratio']:.2f} |"
        for old, new in zip(record["before"], record["after"], strict=True)
        if new["stream"] == "default"
    ]
    assert len(wanted) == 4
    assert "\n".join(wanted) in page
    assert record["commit"] in page
    assert record["commit_before"] in page


def test_the_picture_is_the_record_s(plot_cuda, tmp_path):
    pytest.importorskip("matplotlib")
    plot_cuda.draw(json.loads(RECORD.read_text()), tmp_path / "drawn.svg")
    drawn, kept = (tmp_path / "drawn.svg").read_text(), RECORD.with_suffix(".svg").read_text()
    for label in ("dispatch + combine", "model of pull", "2 x NVIDIA H200", "float8_e4m3fn"):
        assert label in drawn
        assert label in kept
