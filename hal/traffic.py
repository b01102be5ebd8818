# SPDX-License-Identifier: Apache-2.0
"""How many rows a routing sends from each rank to each: what tables count as logical, link and local bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def row_matrix(topk_idx: Sequence[NDArray[np.generic]], num_experts: int, layout: str) -> NDArray[np.int64]:
    """[source, target] rows of one dispatch. ``topk_idx``: [T, k] global ids of each source rank, -1 = none.

    Layout rank sends one row for each token and target rank, layout expert one for each token and expert.
    """
    ranks = len(topk_idx)
    local = num_experts // ranks
    sent = np.zeros((ranks, ranks), np.int64)
    for source, idx in enumerate(topk_idx):
        owner = np.where(idx.astype(np.int64) >= 0, idx.astype(np.int64) // local, -1)
        for target in range(ranks):
            hits = (owner == target).sum(axis=1)
            sent[source, target] = hits.sum() if layout == "expert" else (hits > 0).sum()
    return sent


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in one operation; the larger of its two directions."""

    logical: int
    """All rows of the rank, its own included."""
    link: int
    """Rows from or to other ranks."""
    local: int
    """Rows that stay on the rank."""


def traffic(sent: NDArray[np.int64], rank: int, row_bytes: int) -> Traffic:
    """One rank's bytes for a row matrix; the same for dispatch and for the combine that returns its rows."""
    local = int(sent[rank, rank])
    most = max(int(sent[rank].sum()), int(sent[:, rank].sum()))
    return Traffic(most * row_bytes, (most - local) * row_bytes, local * row_bytes)
