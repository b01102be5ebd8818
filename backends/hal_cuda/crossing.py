# SPDX-License-Identifier: Apache-2.0
"""How rows of one ExpertParallel reach other hosts: peers, channels and rings, equal on all ranks (docs/cuda.md)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from hal.config import ExpertParallelSpec
from hal.errors import ContractError

CHANNELS = "HAL_CUDA_CHANNELS"
"""``CxS``: channels to each peer and cells of each channel's rings, the same on all ranks; default: :func:`crossing`."""
_MOST_CHANNELS, _TOKENS_PER_CHANNEL, _CELLS = 16, 32, 8
_MOST_WARPS = 384
"""Warps that a launch gives to channels and their like at most: 24 blocks of 16."""


@dataclass(frozen=True)
class Crossing:
    """``hosts`` equal NVLink domains of ``local`` consecutive ranks. Peers are the ranks that GIN takes this rank to: of its
    rail on each other host (hierarchical), or all ranks of other hosts."""

    hosts: int
    local: int
    hierarchical: bool
    channels: int
    """To each peer, each served by one warp at either end."""
    cells: int
    """Of a channel's ring, at both ends."""

    @property
    def peers(self) -> int:
        return (self.hosts - 1) * (1 if self.hierarchical else self.local)

    @property
    def batch(self) -> int:
        """Cells that are posted together, and given back together."""
        return self.cells // 2

    @property
    def warps(self) -> int:
        """Fewest warps of a launch: dispatch has one at each end of each channel, combine one to send on each channel and
        one to sum for each channel number; and one more for rows that stay on this host."""
        ends = 2 if self.hierarchical else 1
        return max(ends * self.peers * self.channels, self.peers * self.channels + self.channels) + 1

    def shape(self, blocks: int, threads: int) -> tuple[int, int]:
        """Blocks and threads of a launch that would like as many as given: at least :attr:`warps`, 16 in a block at most."""
        blocks = max(blocks, -(-self.warps // 16))
        return blocks, max(threads, 32 * -(-self.warps // blocks))


def crossing(spec: ExpertParallelSpec, ranks: int, hosts: int) -> Crossing:
    """Of ``spec``, whose defaults are filled in, on ``hosts`` > 1 hosts. ContractError where they cannot be equal.

    More channels move more rows at once, up to what the most tokens can keep busy; a ring holds at least two of a
    token's cells.
    """
    if ranks % hosts:
        raise ContractError(f"{ranks} ranks cannot be laid out on {hosts} equal hosts; choose a divisor of the ranks")
    hierarchical = spec.schedule == "hierarchical"
    local = ranks // hosts
    peers = (hosts - 1) * (1 if hierarchical else local)
    ends = 2 if hierarchical else 1
    channels = min(_MOST_CHANNELS, -(-spec.max_tokens // _TOKENS_PER_CHANNEL), (_MOST_WARPS - 1) // (ends * peers + 1))
    # Combine, schedule direct and layout expert: a token's rows of one peer are at home together before they are summed.
    together = 1 if hierarchical or spec.layout == "rank" else min(spec.top_k, spec.num_experts // ranks)
    wanted = os.environ.get(CHANNELS, "")
    if not wanted:
        return Crossing(hosts, local, hierarchical, max(channels, 1), max(_CELLS, 2 * together))
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", wanted)
    if match is None or int(match[2]) < 2:
        raise ContractError(f"{CHANNELS}={wanted!r}: give channels x cells, as in 4x8, with 2 cells at least")
    return Crossing(hosts, local, hierarchical, int(match[1]), max(int(match[2]), 2 * together))
