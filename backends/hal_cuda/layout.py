# SPDX-License-Identifier: Apache-2.0
"""Where everything lies in the window of one ExpertParallel; the one formula for its size.

::

    headers | arrival counters | row flags | combine's words | slot 0 | slot 1 | …

A slot holds one dispatch's received rows, scales, ids, weights and row sources. The last slot is combine's: rows pushed by
peers, this rank's rows when they lie outside the window, or the experts' output. Schedule latency has in every slot what the
sources say of their rows; the place of the headers then has the offers. Over several hosts::

    headers | their out- and inboxes | words | combine's words | rings of cells, by channel | slot 0 | slot 1 | …
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hal.arrays import ITEMSIZE
from hal.config import ExpertParallelSpec
from hal.sizing import Part
from hal_cuda.crossing import Crossing

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
    # Several hosts; else 0.
    outbox: int = 0
    inbox: int = 0
    headers_came: int = 0
    raised: int = 0
    sending: int = 0
    received: int = 0
    combine_sending: int = 0
    combine_received: int = 0
    cell_bytes: int = 0
    combine_cell_bytes: int = 0
    record_bytes: int = 0


def layout(spec: ExpertParallelSpec, world: int, push: bool, crossing: Crossing | None = None) -> Layout:
    """The window of ``spec``, whose defaults are filled in, on ``world`` ranks; with ``crossing``, of several hosts."""
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
    record = aligned((1 + 3 * k + spec.scale_dim) * 4, 16)
    if crossing is not None:
        # Direct: what a row of another host brings besides its payload.
        received = meta + aligned(0 if crossing.hierarchical else crossing.peers * spec.max_tokens * record)
    else:
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
    if crossing is not None:
        before = _over_hosts(spec, world, crossing, row_bytes, combine_row_bytes, record)
    else:
        before = _on_one_host(spec, world)
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
        slot_count=slot_count(spec),
        total=before["slots"] + slot_count(spec) * slot_bytes,
        **before,
    )


def slot_count(spec: ExpertParallelSpec) -> int:
    """Receive slots, and combine's."""
    return spec.num_buffers + 1


def _on_one_host(spec: ExpertParallelSpec, world: int) -> dict[str, int]:
    sources = world * spec.max_tokens
    header = 0
    arrive = header + aligned(world * (1 + world + spec.num_experts) * 8)
    dispatch_flags = arrive + aligned(world * _LINE)
    ready = dispatch_flags + aligned(sources * 4)
    done = ready + aligned(2 * world * 2 * _LINE)
    combine_flags = done + aligned(world * _LINE)
    slots = aligned(combine_flags + sources * 4, 4096)
    return {
        "header": header,
        "arrive": arrive,
        "dispatch_flags": dispatch_flags,
        "ready": ready,
        "done": done,
        "combine_flags": combine_flags,
        "slots": slots,
    }


def _over_hosts(
    spec: ExpertParallelSpec, world: int, over: Crossing, row_bytes: int, combine_row_bytes: int, record: int
) -> dict[str, int]:
    words = 8 * (1 + world + spec.num_experts + over.hosts)
    rings = over.peers * over.channels
    cell = aligned(row_bytes + record, 128)
    combine_cell = aligned(combine_row_bytes + 4 * spec.top_k, 128)
    sizes = {
        "header": 2 * world * words,
        "outbox": 2 * words,
        "inbox": 2 * over.hosts * words,
        "headers_came": over.hosts * _LINE,
        "arrive": over.local * _LINE,
        "raised": 4 * rings * _LINE,
        "ready": 2 * over.local * 2 * _LINE,
        "done": over.local * _LINE,
        "sending": rings * over.cells * cell,
        # Direct has no ring there: rows go to their final places.
        "received": rings * over.cells * cell if over.hierarchical else 0,
        "combine_sending": rings * over.cells * combine_cell,
        "combine_received": rings * over.cells * combine_cell,
    }
    at: dict[str, int] = {}
    end = 0
    for name, nbytes in sizes.items():
        at[name] = end
        end += aligned(nbytes)
    at["slots"] = aligned(end, 4096)
    return {
        **at,
        "dispatch_flags": 0,
        "combine_flags": 0,
        "cell_bytes": cell,
        "combine_cell_bytes": combine_cell,
        "record_bytes": record,
    }


def buffer_parts(spec: ExpertParallelSpec, world: int, push: bool, crossing: Crossing | None = None) -> list[Part]:
    """What :attr:`Layout.total` consists of."""
    place = layout(spec, world, push, crossing)
    if crossing is not None:
        return _parts_over_hosts(spec, place, crossing)
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


def _parts_over_hosts(spec: ExpertParallelSpec, place: Layout, over: Crossing) -> list[Part]:
    channels = f"{over.peers} peers x {over.channels} channels x {over.cells} cells"
    words = "8 B x (1 + ranks + num_experts + hosts)"
    received = f"most rows x (row + scales + 8 B{' x top_k' if spec.layout == 'rank' else ''})"
    if not over.hierarchical:
        received += " + peers x max_tokens x (12 B x top_k + scales + 4 B)"
    return [
        Part("headers", place.outbox - place.header, f"2 x ranks x {words}"),
        Part("mailboxes", place.headers_came - place.outbox, f"2 x (1 + hosts) x {words}"),
        Part(
            "words", place.sending - place.headers_came, "64 B x (hosts + 6 x ranks of a host + 4 x peers x channels)"
        ),
        Part("sending", place.received - place.sending, f"{channels} x (row + scales + 12 B x top_k + 4 B)"),
        Part("received", place.combine_sending - place.received, f"{channels} x the same (schedule hierarchical)"),
        Part(
            "combine sending",
            place.combine_received - place.combine_sending,
            f"{channels} x (combined row + 4 B x top_k)",
        ),
        Part("combine received", place.slots - place.combine_received, f"{channels} x the same"),
        Part(
            "slots", place.total - place.slots, f"num_buffers x max({received}, most rows x combined row and weights)"
        ),
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


def dirty_bytes(spec: ExpertParallelSpec, world: int) -> int:
    """This rank's own words of which rows of the receive slots may hold data (kernels_cuda/src/dirty.cuh)."""
    runs = 1
    if spec.schedule == "latency":
        runs = 1 + (spec.num_experts if spec.layout == "expert" else world)
    return spec.num_buffers * runs * 16


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
    lists: int
    total: int


def handle_layout(
    spec: ExpertParallelSpec, world: int, place: Layout, tokens: int, crossing: Crossing | None = None
) -> HandleLayout:
    """Of a dispatch of ``tokens`` tokens."""
    entries, local, sources = tokens * spec.top_k, spec.num_experts // world, world * spec.max_tokens
    by_expert = spec.layout == "expert"
    source_words = 0
    if place.push:
        source_words = sources * (2 * spec.top_k + 1) if by_expert else place.slot_rows
    count_words = world + 3 + (spec.num_experts if by_expert and spec.schedule == "latency" else 0)
    list_words = 0
    if crossing is not None:
        source_words = 4 + crossing.peers * spec.max_tokens * (1 + 3 * spec.top_k)
        list_words = (spec.num_experts if by_expert else world) + crossing.peers * (2 + tokens)
    sizes = (
        (entries if by_expert or crossing is not None else tokens * world) * 4,
        entries * 4,
        entries * 4 if by_expert else 0,
        source_words * 4,
        count_words * 4,
        local * 4,
        (local + 1) * 8 if by_expert else 0,
        list_words * 4,
    )
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + aligned(size, 64))
    return HandleLayout(*offsets)


def payload_bytes(spec: ExpertParallelSpec, world: int) -> int:
    """The rows of one slot alone, for comparison with :attr:`Layout.total`."""
    return slot_rows(spec, world) * math.prod((spec.hidden, ITEMSIZE[spec.dtype]))
