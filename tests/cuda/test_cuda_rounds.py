# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine on GPUs, bit for bit, in every form: layouts, types, schedules, halves, handles, weights."""

from __future__ import annotations

from typing import Any

import pytest

from hal.config import QUANTISED_DTYPES

pytestmark = pytest.mark.cuda

# Tokens of two ranks; further ranks have as many as those, by turns.
SMALL = [[16, 16], [0, 5], [7, 0], [0, 0], [1, 1], [13, 16]]
PUSHED = [[600, 513], [0, 700], [700, 1], [33, 64]]


def settings(**changes: Any) -> dict[str, Any]:
    return {"num_experts": 8, "top_k": 3, "hidden": 64, "max_tokens": 16, "num_buffers": 3, **changes}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("schedule", ["direct", "latency"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_types_and_layouts(ranks, layout, schedule, dtype):
    scales = 4 if dtype in QUANTISED_DTYPES else 0
    ranks.run("rounds", settings(layout=layout, schedule=schedule, dtype=dtype, scale_dim=scales), SMALL, {})


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 8},
        {"hidden": 16, "num_buffers": 1},
        {"hidden": 7168, "num_buffers": 2},
        {"hidden": 2056, "top_k": 1},
        {"num_experts": 2048, "top_k": 32},
        {"num_experts": 2, "top_k": 2},
        {"hidden": 7168, "dtype": "float8_e5m2", "scale_dim": 56},
        {"hidden": 272, "dtype": "float8_e4m3fn", "scale_dim": 17},
        {"hidden": 7168, "combine_dtype": "float32", "dtype": "bfloat16"},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_shapes(ranks, layout, changes):
    ranks.run("rounds", settings(layout=layout, **changes), SMALL, {})


@pytest.mark.parametrize("alignment", [1, 4, 128])
def test_groups_are_aligned_and_padded(ranks, alignment):
    ranks.run("rounds", settings(layout="expert", alignment=alignment), SMALL, {"skew": 3.0})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn"])
def test_pushed_rows(ranks, dtype):
    scales = 4 if dtype in QUANTISED_DTYPES else 0
    ranks.run("rounds", settings(max_tokens=700, num_experts=32, top_k=4, dtype=dtype, scale_dim=scales), PUSHED, {})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_few_multiprocessors(few_sms_ranks, layout, dtype):
    scales = 4 if dtype in QUANTISED_DTYPES else 0
    changes = {"hidden": 2064, "max_tokens": 64, "num_experts": 32, "top_k": 4}
    sizes = [[64, 50], [0, 64], [64, 1]]
    few_sms_ranks.run("rounds", settings(layout=layout, dtype=dtype, scale_dim=scales, **changes), sizes, {})


@pytest.mark.parametrize("max_tokens", [16, 700])
@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_sums_by_rank(summing_ranks, layout, max_tokens):
    sizes = SMALL if max_tokens == 16 else PUSHED
    summing_ranks.run("rounds", settings(layout=layout, schedule="hierarchical", max_tokens=max_tokens), sizes, {})


@pytest.mark.parametrize("skew", [0.0, 2.0])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_large(ranks, dtype, layout, skew):
    scales = 56 if dtype in QUANTISED_DTYPES else 0
    changes = {"num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens": 4096, "num_buffers": 2}
    ranks.run("large", settings(layout=layout, dtype=dtype, scale_dim=scales, **changes), [4096, 3001], {"skew": skew})


def test_large_sums_by_rank(summing_ranks):
    changes = {"num_experts": 256, "top_k": 8, "hidden": 7168, "max_tokens": 4096, "num_buffers": 2}
    summing_ranks.run("large", settings(layout="expert", schedule="hierarchical", **changes), [4096, 3001], {})
