# SPDX-License-Identifier: Apache-2.0
"""Settings as frozen dataclasses. Every Hydra group of ``configs/`` fills one of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TopologyConfig:
    """How ranks are laid out: ``nodes`` equal groups of consecutive ranks. A node is one scale-up (LSA) domain."""

    nodes: int = 1


@dataclass(frozen=True)
class HalConfig:
    """What :func:`hal.connect` needs. Must be equal on all ranks; compared when they connect."""

    backend: str = "host"
    transport: str | None = None
    """None = the backend's default."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    queues: int = 2
    """Queues to each peer: GIN contexts, UDMA QPs."""
    signal_slots: int = 1024
    """Signal slots on each rank for the communicator's own signal and wait."""
    timeout: float = 30.0
    """Seconds; bounds every wait."""


@dataclass(frozen=True)
class ExpertParallelSpec:
    """One ExpertParallel's settings. Must be equal on all ranks; compared when it is made."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: str = "bfloat16"
    """Of dispatched rows: bfloat16, float16, float32, float8_e4m3fn, float8_e5m2."""
    combine_dtype: str | None = None
    """Of combined rows; None = ``dtype``, or bfloat16 when that is an fp8 type."""
    scale_dim: int = 0
    """float32 scales for each row; fp8 only."""
    layout: str = "rank"
    alignment: int = 1
    """Layout expert: each group's start is a multiple of this many rows."""
    schedule: str = "direct"
    completion: str = "strong_signal"
    num_buffers: int = 2
    """Receive slots (docs/contract.md, Lifetime)."""
    timeout: float | None = None
    """Seconds; None = the communicator's."""
