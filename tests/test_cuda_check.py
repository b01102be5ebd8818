# SPDX-License-Identifier: Apache-2.0
"""hal_cuda.check: the shipped CUDA kernels hold on every seed of the emulated GPUs' adversary, and planted defects do not."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

pytest.importorskip("hal_cuda.check")

from hal_cuda.check import check
from hal_cuda.emulated import MUTATIONS

from hal.cli import main
from hal.config import ExpertParallelSpec
from hal.errors import ContractError

SPEC = ExpertParallelSpec(num_experts=8, top_k=2, hidden=64, max_tokens=12, num_buffers=4)
"""More tokens than the emulated warps: combine has rows on their way ahead of its sums."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize(("schedule", "nodes"), [("direct", 1), ("latency", 1), ("hierarchical", 2), ("direct", 2)])
def test_the_shipped_kernels_hold(schedule: str, nodes: int, layout: str) -> None:
    spec = replace(SPEC, schedule=schedule, layout=layout)
    report = check(spec, 4 if nodes > 1 else 2, nodes, seeds=range(4))
    assert report.findings == ()
    assert (report.runs, report.nodes) == (4, nodes)
    assert report.steps >= 4 * 2 * 14


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name != "none"])
def test_a_planted_defect_is_found(mutation: str) -> None:
    # Two are nearly always enough; which rank a busy machine runs first is not the seed's.
    batches = (check(SPEC, seeds=range(first, first + 2), mutation=mutation).findings for first in range(0, 64, 2))
    findings = next(filter(None, batches), ())
    assert findings, f"{mutation}: no seed notices it"
    assert check(SPEC, seeds=[finding.seed for finding in findings[:2]]).findings == (), "the defect is gone"


def test_quantised_rows_and_their_scales_hold() -> None:
    spec = replace(SPEC, dtype="float8_e4m3fn", scale_dim=4, combine_dtype="bfloat16", layout="expert")
    assert check(spec, seeds=range(2)).findings == ()


def test_settings_are_as_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_SEED", "99")
    monkeypatch.delenv("HAL_CUDA_COMBINE", raising=False)
    check(SPEC, seeds=[1], rounds=0)
    assert os.environ["HAL_SWNIC_SEED"] == "99"
    assert "HAL_CUDA_COMBINE" not in os.environ


def test_what_is_unknown_or_not_done_is_refused() -> None:
    with pytest.raises(ContractError, match="unknown mutation 'typo'; known: none, fence_does_nothing"):
        check(SPEC, mutation="typo")
    with pytest.raises(ContractError, match="belongs to UDMA queues"):
        check(replace(SPEC, completion="strong_last"), seeds=[0])


# --- hal check cuda ---------------------------------------------------------------------------------------------------


def test_every_protocol_in_one_table_that_says_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cuda", "--all", "--seeds", "1", "--rounds", "1"]) == 0
    out = capsys.readouterr().out
    assert sum(line.startswith("ok ") for line in out.splitlines()) == 3 * 2
    assert "# 6 protocols, 0 failed; 6 runs" in out
    assert "seeded adversarial search, not exhaustive: seeds 0 … 0" in out


def test_a_finding_says_its_seed_and_how_to_see_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "cuda", "--mutation", "barrier_without_order", "--seeds", "4"]) == 1
    out = capsys.readouterr().out
    assert "caught direct/strong_signal" in out
    assert "replay with: hal check cuda --schedule direct --completion strong_signal --layout rank" in out
    assert "--mutation barrier_without_order" in out
