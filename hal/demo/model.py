# SPDX-License-Identifier: Apache-2.0
"""The demo's model: seeded embedding, router and experts, in NumPy.

Matrix products run in float64 on inputs of 8 to 24 significant bits and are rounded once. A matrix library may sum in an
order that depends on how many rows it is given; in float64 that shows about 2^-52 apart, far below the place where the
result is rounded, so a rank's part and the whole give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from hal.arrays import NUMPY_DTYPES, rounded
from hal.config import WorkloadConfig

Array: TypeAlias = NDArray[np.generic]

EXPERT_WIDTH = 32  # Inner width of an expert: the demo is about moving rows, not about multiplying.


def finfo(dtype: np.dtype[np.generic]) -> Any:
    """``eps``, ``max``, ``smallest_subnormal`` of any float type."""
    limits: Any = ml_dtypes.finfo
    return limits(dtype)


def largest_of(dtype: np.dtype[Any]) -> float:
    """The largest value of a type, integer or float."""
    return float(np.iinfo(dtype).max if dtype.kind in "iu" else finfo(dtype).max)


@dataclass(frozen=True)
class Model:
    """A stack of mixture-of-experts layers, the same on every rank by its seed."""

    work: WorkloadConfig
    layers: int

    @property
    def stream_dtype(self) -> np.dtype[np.generic]:
        """Type of the residual stream and of combined rows."""
        return NUMPY_DTYPES[self.work.combined_dtype]

    def embed(self, ids: NDArray[np.int64]) -> Array:
        """[N] token ids to [N, H]; the same word is the same row."""
        unique, place = np.unique(ids, return_inverse=True)
        rows = np.zeros((len(unique), self.work.hidden))
        for row, token in zip(rows, unique, strict=True):
            row[:] = self._random("embedding", int(token)).standard_normal(self.work.hidden)
        embedded: Array = rows[place].astype(self.stream_dtype)
        return embedded

    def route(self, layer: int, x: Array) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The top-k experts of each token and their softmax weights. ``workload.skew`` makes some experts popular."""
        work, random = self.work, self._random("router", layer)
        router = random.standard_normal((work.hidden, work.num_experts)) / np.sqrt(work.hidden)
        popularity = -work.skew * np.log1p(random.permutation(work.num_experts))
        logits = x.astype(np.float64) @ router + popularity
        idx = np.argsort(-logits, axis=1, kind="stable")[:, : work.top_k]
        chosen = np.take_along_axis(logits, idx, axis=1)
        weights = np.exp(chosen - chosen[:, :1])
        return idx.astype(np.int64), (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)

    def expert(self, layer: int, expert: int, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        """One expert, [n, H] to [n, H], not yet rounded."""
        hidden, random = self.work.hidden, self._random("expert", layer, expert)
        up = random.standard_normal((hidden, EXPERT_WIDTH), np.float32).astype(np.float64)
        down = random.standard_normal((EXPERT_WIDTH, hidden), np.float32).astype(np.float64)
        inner = rows.astype(np.float64) @ up / np.sqrt(hidden)
        return np.asarray((inner / (1 + np.exp(-inner))) @ down / np.sqrt(EXPERT_WIDTH))

    def to_wire(self, x: Array) -> tuple[Array, NDArray[np.float32] | None]:
        """Rows as dispatch sends them: in ``workload.dtype``, with a scale for each block where that is configured."""
        work = self.work
        if not work.scale_dim:
            return rounded(x, work.dtype), None
        blocks = x.astype(np.float32).reshape(len(x), work.scale_dim, work.scale_block)
        largest = np.float32(largest_of(NUMPY_DTYPES[work.dtype]))
        scales = np.maximum(np.abs(blocks).max(axis=2), np.float32(1e-12)) / largest
        return rounded(blocks / scales[:, :, None], work.dtype).reshape(x.shape), scales

    def from_wire(self, x: Array, scales: NDArray[np.float32] | None) -> NDArray[np.float32]:
        """Rows as an expert reads them."""
        rows = x.astype(np.float32)
        if scales is None:
            return rows
        blocks = rows.reshape(len(rows), self.work.scale_dim, self.work.scale_block) * scales[:, :, None]
        return np.reshape(blocks, rows.shape)

    def next_input(self, x: Array, y: Array) -> Array:
        """Residual sum and root-mean-square norm: the next layer's input."""
        total = x.astype(np.float64) + y.astype(np.float64)
        scale = np.sqrt(np.mean(total * total, axis=1, keepdims=True) + 1e-6)
        normed: Array = (total / scale).astype(self.stream_dtype)
        return normed

    def _random(self, part: str, *place: int) -> np.random.Generator:
        return np.random.default_rng([self.work.seed, *part.encode(), *place])
