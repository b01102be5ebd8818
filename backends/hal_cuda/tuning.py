# SPDX-License-Identifier: Apache-2.0
"""How many multiprocessors a kernel gets: a bandwidth model, and the measured settings that override it.

The model is that of docs/performance_cuda.md, section "Model": the link bounds the time, and enough multiprocessors are
taken that their loads and stores keep up with it. ``Rates`` are measured; the shapes follow from the routing.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from hal.config import ExpertParallelSpec
from hal.errors import ContractError

SMS = "HAL_CUDA_SMS"
"""Multiprocessors that a dispatch or a combine may take at most; the same on all ranks. The rest is the experts'."""
PUSHING_SMS = 48
"""With fewer a combine by push was slower than one by pull of rows in the window."""


def allowed_sms() -> int | None:
    """By :data:`SMS`; None: no limit."""
    text = os.environ.get(SMS, "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise ContractError(f"{SMS}={text!r}: give a number of multiprocessors, at least 1, or unset it")
    return int(text)


@dataclass(frozen=True)
class Rates:
    """GB/s. Defaults: H200, both directions of NVLink busy (docs/performance_cuda.md)."""

    link: float = 362.0
    """Of one direction, by 16-byte stores."""
    link_read: float = 335.0
    """The same by loads."""
    sm_store: float = 41.0
    """Of one multiprocessor, local and remote together, each row loaded once."""
    sm_load: float = 23.0
    """Of one multiprocessor that sums rows, local and remote together."""


@dataclass(frozen=True)
class Tuning:
    """Blocks (one a multiprocessor) and threads of each kernel. Ranks may differ."""

    dispatch_blocks: int
    combine_blocks: int
    push_blocks: int
    """Of combine_blocks, those that push before they sum."""
    small_threads: int = 256
    threads: int = 512
    push_warps: int = 768
    """Of a dispatch of layout expert, the warps that push rows to other ranks before all else: enough for the link, which is
    each GPU's own, so that their number does not grow with that of the peers."""
    few_blocks: int = 24
    """Up to so many combine_blocks, a combine by pull has rows on their way while it sums (docs/performance_cuda.md)."""


def fraction_sent(top_k: int, ranks: int) -> float:
    """Probability that a token goes to one given rank, for uniform routing."""
    return 1.0 - (1.0 - 1.0 / ranks) ** top_k


@dataclass(frozen=True)
class Estimate:
    """Of one operation on one rank."""

    link_bytes: float
    store_bytes: float
    load_bytes: float
    link_seconds: float
    blocks_for_link: int
    """Fewest multiprocessors whose loads and stores keep up with the link."""

    def seconds(self, blocks: int, rates: Rates) -> float:
        """With ``blocks`` multiprocessors."""
        store = self.store_bytes / (blocks * rates.sm_store * 1e9)
        load = self.load_bytes / (blocks * rates.sm_load * 1e9)
        return max(self.link_seconds, store, load)


def dispatch_estimate(spec: ExpertParallelSpec, ranks: int, tokens: int, row_bytes: int, rates: Rates) -> Estimate:
    """Each token's row crosses once to every other rank that has one of its experts; stores count local copies too."""
    sent = fraction_sent(spec.top_k, ranks)
    link = tokens * row_bytes * sent * (ranks - 1)
    local = tokens * row_bytes * sent
    if spec.layout == "expert":
        copies = spec.top_k * tokens * row_bytes  # every (token, expert) row is stored once, by one side or the other
        stores, loads = link + copies, 2 * tokens * row_bytes + link
    else:
        stores, loads = link + local, tokens * row_bytes
    return _estimate(link, stores, loads, rates.link, rates)


def combine_estimate(
    spec: ExpertParallelSpec, ranks: int, tokens: int, row_bytes: int, push: bool, rates: Rates
) -> Estimate:
    """One row for each token and other rank crosses; the home then reads one row for each rank and writes one."""
    sent = fraction_sent(spec.top_k, ranks)
    link = tokens * row_bytes * sent * (ranks - 1)
    own = tokens * row_bytes * sent
    if spec.layout == "expert":
        own *= spec.top_k / ranks / sent
    if not push:
        return _estimate(link, tokens * row_bytes, own + link, rates.link_read, rates)
    reads = link * (spec.top_k / ranks / sent if spec.layout == "expert" else 1.0)
    return _estimate(link, link + tokens * row_bytes, reads + link + own, rates.link, rates)


def _estimate(link: float, stores: float, loads: float, rate: float, rates: Rates) -> Estimate:
    seconds = link / (rate * 1e9)
    needed = max(stores / rates.sm_store, loads / rates.sm_load) / 1e9
    blocks = math.ceil(needed / seconds) if seconds > 0 else 1
    return Estimate(link, stores, loads, seconds, blocks)


def tuning(spec: ExpertParallelSpec, ranks: int, push: bool, sms: int) -> Tuning:
    """Measured on 2 x H200. Never more blocks than the multiprocessors that may be taken, since blocks wait for one another."""
    by_expert = spec.layout == "expert"
    combine = min((132 if by_expert else 48) if push else 64, sms)
    return Tuning(
        dispatch_blocks=min(132 if by_expert else 20, sms),
        combine_blocks=combine,
        push_blocks=min(64 if by_expert else 24, max(combine // 2, 1)),
    )
