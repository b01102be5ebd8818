# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels on emulated GPUs beyond the contract suite: planted defects, processes, sums by rank, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_emulator import (
    DEFECTS,
    EQUAL,
    EXPERT,
    MUTATIONS,
    PUSH,
    RANK,
    SEEDS,
    Defect,
    Round,
    Scenario,
    emulator,
    judge,
    line,
    run,
)
from hal_cuda.probe import probe_emulator

import hal
from hal import reference
from hal.cli import main
from hal.errors import ContractError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "cuda.md"

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)


# --- planted defects ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.name}-{d.scenario.name}")
def test_the_defect_is_caught_and_the_page_says_where(defect: Defect) -> None:
    verdict = judge(defect)
    assert verdict.healthy == {EQUAL}
    assert verdict.caught is not None, "no seed noticed"
    assert line(defect) in PAGE.read_text(encoding="utf-8").splitlines()


def test_the_list_is_complete() -> None:
    assert {d.name for d in DEFECTS} | {"none"} == set(MUTATIONS)
    header = (ROOT / "kernels_cuda" / "emulation" / "order.hpp").read_text(encoding="utf-8")
    names = header.partition("enum class Mutation")[2].partition("{")[2].partition("count,")[0]
    assert [text.strip(" ,") for row in names.splitlines() if (text := row.partition("//")[0]).strip()] == list(
        MUTATIONS
    )


@pytest.mark.parametrize("scenario", [RANK, PUSH, EXPERT], ids=lambda s: s.name)
def test_without_the_adversary_missing_fences_do_not_show(scenario: Scenario) -> None:
    """What the defects are caught by is the adversary, and nothing else."""
    rounds = [Round(scenario, number) for number in range(scenario.rounds)]
    with emulator(1, "fence_does_nothing", adversary=False):
        assert run(scenario, rounds) == EQUAL


# --- shapes that the contract suite has not ------------------------------------------------------------------------------


BODY = """
import sys
sys.path.insert(0, {tests!r})
import hal
from cuda_emulator import EXPERT, RANK, Round
with hal.connect(backend="cuda", transport="gin_emulated", timeout=60.0) as comm:
    me = comm.rank
    for scenario in (RANK, EXPERT):
        ep = comm.expert_parallel(scenario.spec)
        for number in range(3):
            one = Round(scenario, number)
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            assert out.x.tobytes() == one.rows[me].x.tobytes()
            assert ep.combine(one.answers[me], out.handle).tobytes() == one.sums[me].tobytes()
    comm.barrier()
    print("equal", me, flush=True)
"""


@pytest.mark.parametrize(("blocks", "threads"), [(1, 64), (5, 96)])
def test_processes_with_other_numbers_of_blocks_and_threads(tmp_path: Path, blocks: int, threads: int) -> None:
    """Options are read once, so each shape has processes of its own."""
    script = tmp_path / "rounds.py"
    script.write_text(BODY.format(tests=str(ROOT / "tests")))
    options = {"HAL_CUDA_EMULATOR_BLOCKS": str(blocks), "HAL_CUDA_EMULATOR_THREADS": str(threads)}
    command = [sys.executable, "-m", "hal.cli", "run", "-n", "2", str(script)]
    told = subprocess.run(
        command, capture_output=True, text=True, timeout=110, check=False, env={**os.environ, **options}
    )
    assert told.returncode == 0, told.stderr
    assert sorted(row.rpartition("equal ")[2] for row in told.stdout.splitlines() if "equal" in row) == ["0", "1"]


def test_more_tokens_than_each_block_scans_alone() -> None:
    """Above 1024 tokens the blocks exchange what they found, through a grid barrier."""
    for layout in ("rank", "expert"):
        scenario = Scenario("many", rounds=1, settings={"layout": layout, "max_tokens": 1100, "hidden": 16})
        assert run(scenario, [Round(scenario, 3)]) == EQUAL


# --- several NVLink domains --------------------------------------------------------------------------------------------


def test_ranks_of_two_domains_connect_and_reach_their_own_domain() -> None:
    def body(comm: hal.Communicator) -> str:
        window, me = comm.window(256), comm.rank
        neighbour = me ^ 1
        queue = comm.queue()
        queue.put(window, 8 * me, np.array([me + 1], np.int64), neighbour)
        queue.signal(3, neighbour, 1)
        comm.wait(3, at_least=1, source=neighbour)
        assert window.array.view(np.int64)[neighbour] == neighbour + 1
        session: Any = comm._session
        with pytest.raises(ContractError) as told:  # no address leads there: what goes there goes by GIN
            session.control.at((me + 2) % 4, 0)
        return str(told.value)

    config = hal.HalConfig("cuda", "gin_emulated", hal.TopologyConfig(2), timeout=20.0)
    for rank, text in enumerate(hal.spawn(4, body, config=config)):
        assert f"rank {(rank + 2) % 4} is in another NVLink domain" in text


def test_sums_by_rank_within_one_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedule hierarchical with each rank a node: a rank sums its own rows of a token before they cross the link."""
    monkeypatch.setenv("HAL_CUDA_EMULATOR_ONE_DOMAIN", "1")
    spec = Scenario("sums", settings={"layout": "expert", "schedule": "hierarchical", "top_k": 3}).spec
    rng = np.random.default_rng(2)
    x = [rng.standard_normal((n, spec.hidden)).astype(np.float32) for n in (12, 5)]
    idx = [np.argsort(rng.random((len(a), spec.num_experts)), axis=1)[:, :3].astype(np.int32) for a in x]
    rows, handle = reference.dispatch(spec, x, idx)
    answers = [rng.standard_normal(r.x.shape).astype(np.float32) for r in rows]
    sums = reference.combine(answers, handle, weighted=True, topology=hal.TopologyConfig(2))

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(spec), comm.rank
        for _ in range(3):
            out = ep.dispatch(x[me], idx[me])
            assert out.x.tobytes() == rows[me].x.tobytes()
            assert ep.combine(answers[me], out.handle, weighted=True).tobytes() == sums[me].tobytes()
            sent = ep.combine_send(answers[me], out.handle, weighted=True)
            assert ep.combine_recv(sent).tobytes() == sums[me].tobytes()

    hal.spawn(2, body, config=hal.HalConfig("cuda", "gin_emulated", hal.TopologyConfig(2), timeout=20.0))


@pytest.mark.parametrize("ranks", [1, 2])
def test_halves_of_a_combine_by_push_know_where_own_rows_came_from(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    """A block keeps the source tokens of rows that other blocks of its own GPU stored in the same launch."""
    monkeypatch.setenv("HAL_CUDA_COMBINE", "push")
    scenario = Scenario("halves", ranks=ranks, settings={"max_tokens": 40, "num_experts": 2})
    rounds = [Round(scenario, number) for number in range(3)]

    def body(comm: hal.Communicator) -> None:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        for one in rounds:
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            sent = ep.combine_send(one.answers[me], out.handle)
            assert ep.combine_recv(sent).tobytes() == one.sums[me].tobytes()

    for seed in range(12):
        with emulator(seed):
            hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", timeout=5.0)


@pytest.mark.parametrize("tokens", [20, 60, 100, 120, 140, 160])
def test_early_loads_see_a_window_however_many_others_there_are(tokens: int) -> None:
    """Of other layers, say, or of a run that failed before in this process."""
    scenario = Scenario("crowd", rounds=4, settings={"layout": "expert", "schedule": "latency"})
    rounds = [Round(scenario, number) for number in range(scenario.rounds)]
    other = replace(scenario.spec, max_tokens=tokens)

    def body(comm: hal.Communicator) -> bool:
        before = comm.expert_parallel(other)
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        after, equal = comm.expert_parallel(other), True
        for one in rounds:
            equal &= ep.dispatch(one.x[me], one.idx[me]).x.tobytes() == one.rows[me].x.tobytes()
        return equal and before.spec == after.spec

    def ends(seed: int) -> bool:
        with emulator(seed, "acquire_is_relaxed"):
            return all(hal.spawn(2, body, backend="cuda", transport="gin_emulated", timeout=20.0))

    assert not all(ends(seed) for seed in SEEDS)


def test_the_demo_runs_on_emulated_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["backend=cuda", "transport=gin_emulated", "ranks=2", "workload.tokens=24", "workload.hidden=32"]
    assert main(["demo", *settings, "timeout=60"]) == 0
    assert "backend cuda, transport gin_emulated" in capsys.readouterr().out
