# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu_suite.py: its limits and its record; and the same suite rehearsed on emulated GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu_suite  # noqa: E402
from gpu_suite import Machine, Part, Step, Suite  # noqa: E402


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(2, 2, False, tmp_path)


def python(code: str, **options: Any) -> Step:
    return Step([sys.executable, "-c", code], **options)


def part(name: str, *steps: Step, seconds: float = 60.0, why_not: str = "") -> Part:
    def listed(machine: Machine) -> Iterator[Step]:
        yield from steps

    return Part(name, seconds, listed, lambda machine: why_not)


def run(machine: Machine, out: Path, *parts: Part, budget: float = 600.0) -> tuple[bool, dict[str, Any]]:
    suite = Suite(machine, out, budget)
    well = suite.run(parts)
    return well, json.loads(suite.json.read_text())


def test_a_part_over_its_time_is_ended_with_all_that_it_started_and_the_rest_goes_on(
    machine: Machine, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    # A shell, which starts at once also on a busy machine.
    hangs = Step(["sh", "-c", f"echo began; while :; do : > {alive}; sleep 0.1; done & sleep 600"])
    well, record = run(
        machine,
        tmp_path / "out",
        part("hangs", hangs, python("print('never')"), seconds=5.0),
        part("goes on", python("print('fine')")),
        budget=65.0,
    )
    assert not well
    first, second = record["parts"]
    assert [first["status"], second["status"]] == ["over its time", "passed"]
    assert len(first["steps"]) == 1
    assert first["steps"][0]["last_lines"] == ["began"]
    alive.unlink()
    time.sleep(1.0)
    assert not alive.exists(), "what the part started is still running"


def test_time_left_over_goes_to_the_next_part_and_none_is_made_up(machine: Machine, tmp_path: Path) -> None:
    _, record = run(
        machine,
        tmp_path / "out",
        part("quick", python(""), seconds=50.0),
        part("next", python(""), seconds=50.0),
        budget=100.0,
    )
    quick, following = record["parts"]
    assert quick["limit"] == 50.0
    assert 50.0 < following["limit"] <= 100.1 - quick["seconds"]
    _, record = run(machine, tmp_path / "none", part("too late", python("")), budget=1.0)
    assert (record["parts"][0]["status"], record["parts"][0]["why"]) == ("skipped", "no time was left for it")


def test_failures_are_kept_with_their_last_lines_and_steps_that_are_not_needed_go_on(
    machine: Machine, tmp_path: Path
) -> None:
    fails = "print('why'); raise SystemExit(3)"

    def breaks(machine: Machine) -> Iterator[Step]:
        raise FileNotFoundError("no such tool")
        yield

    well, record = run(
        machine,
        tmp_path / "out",
        part("needed", python(fails), python("")),
        part("not needed", python(fails, needed=False), python("")),
        Part("cannot be set up", 10.0, breaks),
        part("not here", python(""), why_not="no GPU here"),
    )
    assert not well
    needed, loose, broken, skipped = record["parts"]
    assert [len(needed["steps"]), len(loose["steps"])] == [1, 2]
    assert needed["steps"][0]["exit_status"] == 3
    assert needed["steps"][0]["last_lines"] == ["why"]
    assert loose["status"] == "failed"
    assert broken["steps"][0]["why"] == "FileNotFoundError: no such tool"
    assert (skipped["status"], skipped["why"]) == ("skipped", "no GPU here")


def test_the_record_is_there_while_a_part_runs(machine: Machine, tmp_path: Path) -> None:
    out = tmp_path / "out"
    look = (
        f"import json, pathlib; (file,) = pathlib.Path({str(out)!r}).glob('*.json'); "
        "print(len(json.loads(file.read_text())['parts']))"
    )
    seen: list[str] = []
    read = Step([sys.executable, "-c", look], read=lambda log: seen.append(log.strip()) or {})
    well, _ = run(machine, out, part("first", python("")), part("second", read))
    assert well
    assert seen == ["1"]


LOG = """
tests/a.py::test_one[rank-{'hidden': 8}] PASSED                    [ 10%]
tests/a.py::test_two SKIPPED (cuda/lsa: 4 ranks, 2 devices here)   [ 20%]
tests/a.py::test_three FAILED                                      [ 30%]
tests/a.py::test_four SKIPPED (cuda/lsa: 4 ranks, 2 devices here)  [ 40%]
tests/a.py::test_five XFAIL (its reason)                           [ 50%]
tests/a.py::test_six
"""


def test_what_pytest_printed_is_read_also_when_it_was_ended() -> None:
    read = gpu_suite.read_pytest(LOG)
    assert (read["passed"], read["failed"], read["skipped"], read["xfail"]) == (1, 1, 2, 1)
    assert read["failures"] == ["tests/a.py::test_three"]
    assert read["skipped_because"] == {"cuda/lsa: 4 ranks, 2 devices here": 2}


def test_pytest_runs_without_its_plug_ins(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_suite.importlib.util, "find_spec", lambda name: None)
    command = gpu_suite.pytest(machine, "tests/cuda/test_oracle.py", "-k", "bfloat16-rank-direct")
    # As on a machine that lacks them: pytest is told not to load them.
    command += ["-p", "no:timeout", "-p", "no:xdist"]
    told = subprocess.run(
        command, cwd=ROOT, env=gpu_suite.environment(), capture_output=True, text=True, check=False, timeout=100
    )
    assert told.returncode == 0, told.stdout[-2000:] + told.stderr[-2000:]
    assert gpu_suite.read_pytest(told.stdout)["passed"] == 1


def test_sanitizer_summaries_are_added_up() -> None:
    log = "========= ERROR SUMMARY: 0 errors\nrounds passed\n========= ERROR SUMMARY: 2 errors\n"
    assert gpu_suite.read_sanitizer(log) == {"processes": 2, "errors": 2, "finished": True}
    assert gpu_suite.read_sanitizer("========= RACECHECK SUMMARY: 1 hazard displayed")["errors"] == 1


@pytest.mark.parametrize(
    ("ranks", "gpus", "rehearse", "wanted"),
    [
        (2, 2, False, [(2, 1), (2, 2)]),
        (4, 4, False, [(2, 2)]),
        (8, 8, False, [(2, 4), (4, 2)]),
        (1, 1, False, []),
        (2, 0, True, [(2, 1)]),
        (8, 0, True, [(2, 4), (4, 2)]),
    ],
)
def test_hosts_are_laid_out_where_the_ranks_suffice(
    ranks: int, gpus: int, rehearse: bool, wanted: list[tuple[int, int]], tmp_path: Path
) -> None:
    assert list(gpu_suite.layouts(Machine(ranks, gpus, rehearse, tmp_path))) == wanted


def test_the_parts_limits_leave_room_in_ten_minutes() -> None:
    assert sum(part.seconds for part in gpu_suite.PARTS if part.usual) <= 570


@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_what_the_benchmark_expects_is_what_the_reference_says(layout: str, nodes: int) -> None:
    torch = pytest.importorskip("torch")
    from cuda_expert_parallel import expected_sum

    from hal import reference
    from hal.arrays import as_buffer, as_numpy
    from hal.config import ExpertParallelSpec, TopologyConfig

    def numpy(tensor: Any) -> Any:
        return as_numpy(as_buffer(tensor)).copy()

    schedule = "hierarchical" if nodes > 1 else "direct"
    spec = ExpertParallelSpec(16, 5, 32, 20, "bfloat16", "bfloat16", 0, layout, 1, schedule)
    generator = torch.Generator().manual_seed(1)
    x = [torch.randn(20, 32, generator=generator).bfloat16() for _ in range(4)]
    idx = [torch.rand(20, 16, generator=generator).topk(5, dim=1).indices for _ in range(4)]
    weights = [torch.rand(20, 5, generator=generator) for _ in range(4)]
    rows, handle = reference.dispatch(spec, *([numpy(a) for a in arrays] for arrays in (x, idx, weights)), None)
    given = {"weighted": layout == "expert", "topology": TopologyConfig(nodes)}
    sums = reference.combine([row.x for row in rows], handle, **given)
    for rank in range(4):
        used = weights[rank] if layout == "expert" else None
        mine = expected_sum(torch, x[rank], idx[rank], used, ranks=4, local_experts=4, nodes=nodes, home=rank)
        assert numpy(mine).tobytes() == np.ascontiguousarray(sums[rank]).tobytes()


@pytest.mark.timeout(600)
def test_the_suite_rehearsed_on_emulated_gpus(tmp_path: Path) -> None:
    """Every script of the suite on two emulated GPUs, so that the first run on real ones is not lost to a misspelt word."""
    pytest.importorskip("torch")
    parts = ["build", "tests", "benchmark", "hosts", "litmus", "software-nic", "contract", "racecheck"]
    words = ["--out", str(tmp_path), "--rehearse", "--ranks", "2", "--parts", ",".join(parts)]
    told = subprocess.run(
        [sys.executable, "benchmarks/gpu_suite.py", *words],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=590,
    )  # fmt: skip
    assert told.returncode == 0, told.stdout[-6000:] + told.stderr[-2000:]
    (file,) = tmp_path.glob("*-rehearsal.json")
    record = json.loads(file.read_text())
    assert [(part["part"], part["status"]) for part in record["parts"]] == [
        (name, "skipped" if name in ("software-nic", "racecheck") else "passed") for name in parts
    ]
    steps = {part["part"]: part.get("steps", []) for part in record["parts"]}
    rows = [row for step in steps["benchmark"] + steps["hosts"] for row in step["rows"]]
    assert {(row["hosts"], row["layout"], row["dtype"]) for row in rows} == {
        (hosts, layout, dtype)
        for hosts in (1, 2) for layout in ("rank", "expert") for dtype in ("bfloat16", "float8_e4m3fn")
    }  # fmt: skip
    assert [row["wrong"] for row in rows] == [0] * len(rows)
    assert all("no time" in row["note"] for row in rows)
    assert [step["on"] for step in steps["litmus"]] == ["lsa", "gin-weak"]
    assert steps["contract"][0]["passed"] >= 3
    assert str(ROOT) not in json.dumps(steps["hosts"]), "a result names no path of this machine"
    assert "mp-flag" in told.stdout


def shaped(ranks: int, tokens: int, **changes: Any) -> dict[str, Any]:
    row = {
        "case": "pair",
        "ranks": ranks,
        "hosts": 1,
        "tokens": tokens,
        "dtype": "bfloat16",
        "layout": "rank",
        "skew": 0.0,
    }
    times = {
        "pair_us": {"median": 2.0 * tokens},
        "dispatch_us": {"median": 1.0 * tokens},
        "link_GBs": 300.0,
        "wrong": 0,
    }
    return {**row, **times, **changes}


def recorded(ranks: int, *rows: dict[str, Any]) -> dict[str, Any]:
    step = {"command": "x", "status": "passed", "shape": {}, "rows": list(rows)}
    head = {
        "what": "w",
        "machine": f"{ranks} x GPU",
        "date": "2026-01-01 00:00:00 UTC",
        "commit": "c",
        "driver": "",
        "nccl": 0,
    }
    return {
        **head,
        "ranks": ranks,
        "parts": [{"part": "benchmark", "status": "passed", "seconds": 1.0, "steps": [step]}],
    }


def test_numbers_of_gpus_are_drawn_side_by_side_and_made_up_times_are_not(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from plot_gpu_suite import draw, series

    records = [
        recorded(2, shaped(2, 128), shaped(2, 4096), shaped(2, 128, note="emulated: no time at all")),
        recorded(8, shaped(8, 128), shaped(8, 128, dtype="float8_e4m3fn"), shaped(8, 128, skew=2.0)),
    ]
    found = series(records, "rank", "pair", "pair_us", 0.0)
    assert found == {(2, "bfloat16"): [(128, 256.0), (4096, 8192.0)], (8, "bfloat16"): [(128, 256.0)],
                     (8, "float8_e4m3fn"): [(128, 256.0)]}  # fmt: skip
    assert draw(records, tmp_path / "ep.svg") == 3 * 4
    assert "EP8 bfloat16, skewed" in (tmp_path / "ep.svg").read_text()


def test_the_table_shows_shapes_and_what_went_wrong() -> None:
    record = recorded(
        2, shaped(2, 4096, wrong=3), {"case": "all-gather", "ranks": 2, "tokens": 128, "us": {"median": 9.0}}
    )
    record["parts"].append({"part": "litmus", "status": "failed", "seconds": 2.0, "steps": [{
        "on": "gin", "status": "failed", "last_lines": ["the model forbids"], "programs": [
            {"program": "mp-flag", "profile": "gin", "outcomes": {"1:r0=0": 3, "1:r0=1": 7}, "bad_seen": 3,
             "bad_allowed": True, "forbidden": []},
            {"program": "two-submitters", "not_run": "reason"}]}]})  # fmt: skip
    record["parts"].append({"part": "memcheck", "status": "skipped", "why": "compute-sanitizer is not on the PATH"})
    text = gpu_suite.table(record)
    assert "8192.0     300      3" in text
    assert "all-gather" in text
    assert "mp-flag" in text
    assert "seen 3 of 10" in text
    assert "failed: the model forbids" in text
    assert "compute-sanitizer is not on the PATH" in text
