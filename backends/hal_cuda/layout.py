# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in the window of one ExpertParallel; the one formula for its size.

::

    headers | arrival counters | row flags | combine's words | slot 0 | slot 1 | …

A slot holds one dispatch's received rows, scales, ids, weights and row sources. The last slot is combine's: rows pushed by
peers, this rank's rows when they lie outside the window, or the experts' output. Schedule latency has in every slot what the
sources say of their rows; the place of the headers then has the offers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hal.arrays import ITEMSIZE
from hal.config import ExpertParallelSpec
from hal.sizing import Part

_ALIGN = 256
_LINE = 64
"""Words of different publishers are this far apart."""


def aligned(nbytes: int, to: int = _ALIGN) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes from the window's start; ``slot_*`` from a slot's start."""

    push: bool
    """Combine by pushing rows into the home's scratch slot; else by reading the peers' rows."""
    slot_rows: int
    """Rows of a slot: of the worst case."""
    row_bytes: int
    combine_row_bytes: int
    slot_scales: int
    slot_idx: int
    slot_weights: int
    slot_counts: int
    slot_offsets: int
    slot_meta: int
    slot_back: int
    slot_own: int
    slot_tallies: int
    slot_bytes: int
    header: int
    arrive: int
    dispatch_flags: int
    ready: int
    done: int
    combine_flags: int
    slots: int
    slot_count: int
    total: int


def layout(spec: ExpertParallelSpec, world: int, push: bool) -> Layout:
    """The window of ``spec``, whose defaults are filled in, on ``world`` ranks."""
    k, sources = spec.top_k, world * spec.max_tokens
    rows = slot_rows(spec, world)
    row_bytes = spec.hidden * ITEMSIZE[spec.dtype]
    combine_row_bytes = spec.hidden * ITEMSIZE[spec.combine_dtype or spec.dtype]
    per_row = k if spec.layout == "rank" else 1
    scales = aligned(rows * row_bytes)
    idx = scales + aligned(rows * spec.scale_dim * 4)
    weights = idx + aligned(rows * per_row * 4)
    counts = weights + aligned(rows * per_row * 4)
    offsets = counts + aligned(spec.num_experts // world * 4)
    meta = offsets + aligned((spec.num_experts // world + 1) * 8)
    received = meta + aligned((rows if spec.layout == "rank" else sources * (3 * k + 1)) * 4)
    # Combine's scratch: staged rows of every source (push), or this rank's own rows (pull); then the weights; then (a
    # sum by rank in two halves) this rank's own sums, which stay float32.
    back = aligned((sources if push else rows) * combine_row_bytes)
    own = back + aligned(sources * k * 4 if push else rows * per_row * 4)
    scratch = own + (spec.max_tokens * spec.hidden * 4 if push and spec.layout == "expert" else 0)
    # Beyond what a combine may leave behind: words here count only with their round's stamp.
    tallies = aligned(max(received, scratch))
    tally_words = world * (1 + spec.num_experts // world) + 1 if spec.schedule == "latency" else 0
    slot_bytes = aligned(tallies + tally_words * 8, 4096)

    header = 0
    arrive = header + aligned(world * (1 + world + spec.num_experts) * 8)
    dispatch_flags = arrive + aligned(world * _LINE)
    ready = dispatch_flags + aligned(sources * 4)
    done = ready + aligned(2 * world * 2 * _LINE)
    combine_flags = done + aligned(world * _LINE)
    slots = aligned(combine_flags + sources * 4, 4096)
    return Layout(
        push=push,
        slot_rows=rows,
        row_bytes=row_bytes,
        combine_row_bytes=combine_row_bytes,
        slot_scales=scales,
        slot_idx=idx,
        slot_weights=weights,
        slot_counts=counts,
        slot_offsets=offsets,
        slot_meta=meta,
        slot_back=back,
        slot_own=own,
        slot_tallies=tallies,
        slot_bytes=slot_bytes,
        header=header,
        arrive=arrive,
        dispatch_flags=dispatch_flags,
        ready=ready,
        done=done,
        combine_flags=combine_flags,
        slots=slots,
        slot_count=slot_count(spec),
        total=slots + slot_count(spec) * slot_bytes,
    )


def slot_count(spec: ExpertParallelSpec) -> int:
    """Receive slots, and combine's."""
    return spec.num_buffers + 1


def buffer_parts(spec: ExpertParallelSpec, world: int, push: bool) -> list[Part]:
    """What :attr:`Layout.total` consists of."""
    place = layout(spec, world, push)
    if spec.layout == "rank":
        received = "most rows x (row + scales + 8 B x top_k + 4 B)"
    else:
        received = "most rows x (row + scales + 8 B) + ranks x max_tokens x (12 B x top_k + 4 B)"
    summed = "ranks x max_tokens" if push else "most rows"
    scratch = f"{summed} x combined row and weights" + (" + sums" if push and spec.layout == "expert" else "")
    if spec.schedule == "latency":
        received += " + ranks x 8 B x (1 + local experts)"
    return [
        Part("headers", place.arrive - place.header, "ranks x 8 B x (1 + ranks + num_experts)"),
        Part("arrivals", place.dispatch_flags - place.arrive, "ranks x 64 B"),
        Part("row flags", place.ready - place.dispatch_flags, "ranks x max_tokens x 4 B"),
        Part("combine", place.combine_flags - place.ready, "5 x ranks x 64 B: ready and done words"),
        Part("sum flags", place.slots - place.combine_flags, "ranks x max_tokens x 4 B"),
        Part("slots", place.total - place.slots, f"(num_buffers + 1) x max({received}, {scratch})"),
    ]


def slot_rows(spec: ExpertParallelSpec, world: int) -> int:
    """Rows that one rank may receive."""
    sources, local = world * spec.max_tokens, spec.num_experts // world
    if spec.layout == "rank":
        return sources
    if spec.schedule == "latency":
        return local * sources
    used = sources * min(spec.top_k, local)
    return min(used + local * (spec.alignment - 1), local * aligned(sources, spec.alignment))


@dataclass(frozen=True)
class HandleLayout:
    """What a handle keeps, in one piece of this rank's own memory; offsets in bytes."""

    pos: int
    idx: int
    weights: int
    source: int
    counts: int
    expert_counts: int
    expert_offsets: int
    total: int


def handle_layout(spec: ExpertParallelSpec, world: int, place: Layout, tokens: int) -> HandleLayout:
    """Of a dispatch of ``tokens`` tokens."""
    entries, local, sources = tokens * spec.top_k, spec.num_experts // world, world * spec.max_tokens
    by_expert = spec.layout == "expert"
    source_words = 0
    if place.push:
        source_words = sources * (2 * spec.top_k + 1) if by_expert else place.slot_rows
    count_words = world + 3 + (spec.num_experts if by_expert and spec.schedule == "latency" else 0)
    sizes = (
        (entries if by_expert else tokens * world) * 4,
        entries * 4,
        entries * 4 if by_expert else 0,
        source_words * 4,
        count_words * 4,
        local * 4,
        (local + 1) * 8 if by_expert else 0,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size, 64))
    return HandleLayout(*offsets)


def payload_bytes(spec: ExpertParallelSpec, world: int) -> int:
    """The rows of one slot alone, for comparison with :attr:`Layout.total`."""
    return slot_rows(spec, world) * math.prod((spec.hidden, ITEMSIZE[spec.dtype]))
