# SPDX-License-Identifier: Apache-2.0
"""Seeded tokens and routings: every rank can make every other rank's, so every rank can check what it received."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.arrays import NUMPY_DTYPES, rounded
from hal.config import WorkloadConfig


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens. ``x`` [T, H], ``scales`` [T, S] or None, ``idx`` and ``weights`` [T, k]."""

    x: NDArray[Any]
    scales: NDArray[np.float32] | None
    idx: NDArray[np.int64]
    weights: NDArray[np.float32]


def routing(work: WorkloadConfig, rank: int, tokens: int) -> NDArray[np.int64]:
    """Top-k experts of each token, drawn without replacement; ``work.skew`` makes some popular, the same on all ranks."""
    popularity = -work.skew * np.log1p(np.random.default_rng([work.seed, 1]).permutation(work.num_experts))
    noise = np.random.default_rng([work.seed, 2, rank, tokens]).gumbel(size=(tokens, work.num_experts))
    order = np.argsort(-(popularity + noise), axis=1, kind="stable")
    return order[:, : work.top_k].astype(np.int64)


def as_rows(normal: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Standard normal values as rows of ``dtype``, spread over the range where that is an integer type."""
    spread = np.iinfo(dtype).max / 3 if NUMPY_DTYPES[dtype].kind in "iu" else 1
    return rounded(normal.astype(np.float32) * np.float32(spread), dtype)


def inputs(work: WorkloadConfig, rank: int, tokens: int) -> Inputs:
    """What ``rank`` dispatches."""
    random = np.random.default_rng([work.seed, 3, rank, tokens])
    x = as_rows(random.standard_normal((tokens, work.hidden), np.float32), work.dtype)
    scales = random.random((tokens, work.scale_dim), np.float32) if work.scale_dim else None
    return Inputs(x, scales, routing(work, rank, tokens), random.random((tokens, work.top_k), np.float32))
