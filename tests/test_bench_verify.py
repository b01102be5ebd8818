# SPDX-License-Identifier: Apache-2.0
"""The `#wrong` column can count: every field that a dispatch or combine can get wrong is seen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from hal.bench.inputs import Inputs, inputs, routing
from hal.bench.sample import Sample, combined
from hal.bench.verify import wrong_combine, wrong_dispatch
from hal.config import WorkloadConfig
from hal.traffic import Traffic, row_matrix, traffic

WORK = WorkloadConfig(tokens=6, hidden=16, num_experts=4, top_k=2, dtype="float8_e4m3fn", scale_block=8)


def received(sources: list[Inputs], rank: int, layout: str) -> SimpleNamespace:
    """What rank ``rank`` of two must get, written out row by row, with one row of padding at the end."""
    rows = []
    for expert in (0, 1) if layout == "expert" else (None,):
        for source in sources:
            for token in range(len(source.x)):
                local = [int(e) - 2 * rank if e // 2 == rank else -1 for e in source.idx[token]]
                weights = [w if e >= 0 else 0.0 for w, e in zip(source.weights[token], local, strict=True)]
                if expert is None and max(local) >= 0:
                    rows.append((source.x[token], source.scales[token], local, weights))
                elif expert is not None and expert in local:
                    rows.append((source.x[token], source.scales[token], expert, weights[local.index(expert)]))
    blank = -1 if layout == "expert" else [-1, -1]
    x, scales, ids, shares = zip(*rows, strict=True)
    return SimpleNamespace(
        x=np.stack([*x, np.zeros_like(x[0])]),
        scales=np.stack([*scales, np.zeros_like(scales[0])]),
        topk_idx=np.array([*ids, blank], np.int32),
        topk_weights=np.array([*shares, np.zeros_like(shares[0])], np.float32),
    )


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_every_wrong_element_of_a_dispatch_is_counted(layout: str, dtype: str) -> None:
    sources = [inputs(replace(WORK, dtype=dtype), rank, 6) for rank in range(2)]
    out = received(sources, 1, layout)
    assert wrong_dispatch(out, sources, 1, 4, layout) == 0
    for field, index in (("x", (0, 3)), ("x", (-1, 0)), ("scales", (1, 1)), ("topk_weights", (0, ...))):
        broken = SimpleNamespace(**{name: np.array(value) for name, value in vars(out).items()})
        getattr(broken, field)[index] += 1
        assert wrong_dispatch(broken, sources, 1, 4, layout) > 0, field
    swapped = SimpleNamespace(**{name: value[[1, 0, *range(2, len(value))]] for name, value in vars(out).items()})
    assert wrong_dispatch(swapped, sources, 1, 4, layout) > 0
    short = SimpleNamespace(**{name: value[1:] for name, value in vars(out).items()})
    assert wrong_dispatch(short, sources, 1, 4, layout) > 0


@pytest.mark.parametrize(("layout", "times"), [("rank", [2, 1, 1]), ("expert", [2, 2, 1])])
def test_every_wrong_element_of_a_combine_is_counted(layout: str, times: list[int]) -> None:
    x = np.array([[1.0, -2.0], [0.5, 3.0], [7.0, 0.25]], ml_dtypes.bfloat16)
    mine = Inputs(x, None, np.array([[0, 3], [0, 1], [-1, 2]]), np.ones((3, 2), np.float32))
    y = (x.astype(np.float32) * np.array(times)[:, None]).astype(x.dtype)
    of = {"rank": 0, "ranks": 2, "nodes": 1, "num_experts": 4, "layout": layout}
    assert wrong_combine(y, mine, **of) == 0
    y[2, 1] += 1
    assert wrong_combine(y, mine, **of) == 1


def test_traffic_counts_rows_as_they_travel() -> None:
    idx = [np.array([[0, 1], [0, 3]]), np.array([[2, 3], [-1, 0], [-1, -1]])]
    assert row_matrix(idx, 4, "rank").tolist() == [[2, 1], [1, 1]]
    assert row_matrix(idx, 4, "expert").tolist() == [[3, 1], [1, 2]]
    assert traffic(row_matrix(idx, 4, "expert"), 0, 10) == Traffic(logical=40, link=10, local=30)


def test_skew_makes_experts_popular() -> None:
    def largest_share(skew: float) -> float:
        counts = np.bincount(routing(WorkloadConfig(num_experts=32, top_k=4, skew=skew), 0, 500).ravel(), minlength=32)
        return float(counts.max() / counts.mean())

    assert largest_share(0.0) < 1.5
    assert largest_share(1.5) > 3


def test_a_row_is_the_slowest_rank_of_each_iteration() -> None:
    def sample(seconds: list[float], link: int, wrong: int) -> Sample:
        return Sample(4, 10, "bfloat16", Traffic(100 + link, link, 100), np.array(seconds), wrong)

    row = combined([sample([1, 5, 3], 50, 0), sample([2, 1, 4], 70, 3)])
    assert (row.minimum, row.median, row.wrong) == (2, 4, 3)
    assert (row.algbw, row.busbw) == (170 / 4, 70 / 4)
