# SPDX-License-Identifier: Apache-2.0
"""Arrays over a leased slot. For torch they are made here by DLPack, which is quicker than an array interface and ends
the lease when the last tensor is gone; other kinds are made by hal.arrays and refer to the lease."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

from hal.arrays import Buffer
from hal.config import QUANTISED_DTYPES, ExpertParallelSpec
from hal_cuda import native
from hal_cuda.layout import Layout
from hal_cuda.slots import Lease

# DLPack's type codes: int 0, uint 1, float 2, bfloat 4. Quantised rows travel as bytes.
_CODES = {
    "bfloat16": (4, 16),
    "float16": (2, 16),
    "float32": (2, 32),
    "int32": (0, 32),
    "int64": (0, 64),
    **dict.fromkeys(QUANTISED_DTYPES, (1, 8)),
}
RECEIVED = -1
"""As a part's rows: as many as the dispatch received."""


@dataclass(frozen=True, slots=True)
class Part:
    """One array of a slot: [rows, *columns] from ``offset``."""

    offset: int
    rows: int
    columns: tuple[int, ...]
    dtype: str

    def shape(self, received: int) -> tuple[int, ...]:
        return (received if self.rows == RECEIVED else self.rows, *self.columns)


class Views:
    """What lies in a slot, as arrays on ``device``: all parts at once, since each call into a library costs time."""

    def __init__(self, library: native.Library, device: str, parts: Sequence[Part | None]) -> None:
        """``parts``: None for what a spec has not, and then in the results."""
        self._parts, self._library, self._device = parts, library, device
        self._index = int(device.partition(":")[2] or 0)
        self._records = (native.SlotView * len(parts))()
        for record, part in zip(self._records, parts, strict=True):
            if part is not None:
                record.offset, record.rows = part.offset, part.rows
                record.columns = part.columns[0] if part.columns else 1
                (record.code, record.bits), record.dims = _CODES[part.dtype], 1 + len(part.columns)
        first = parts[0].dtype if parts[0] is not None else ""
        self._quantised = first if first in QUANTISED_DTYPES else ""  # no other part is
        self._described = addressof(self._records), len(parts)
        self._python: Any = None
        self._calls = 0

    def buffers(self, base: int, received: int, lease: Lease, torch: Any) -> list[Any]:
        """Of the slot at ``base``; None where there is no part. ``torch``: the module if the caller's arrays are tensors,
        else None."""
        owners = self.tensors(base, received, lease, torch) if torch and received else [lease] * len(self._parts)
        return [
            None if part is None else Buffer(base + part.offset, part.shape(received), part.dtype, self._device, owner)
            for part, owner in zip(self._parts, owners, strict=True)
        ]

    def tensors(self, base: int, received: int, lease: Lease, torch: Any) -> tuple[Any, ...]:
        """Of torch; with at least one row, since arrays without rows view nothing."""
        if self._python is None:
            self._python = native.python(torch._C._from_dlpack)
            self._calls = addressof(self._python)
        tensors: tuple[Any, ...] = self._library.tensors(
            self._calls, *self._described, base, received, self._index, lease.count
        )
        if self._quantised:
            return (tensors[0].view(getattr(torch, self._quantised)), *tensors[1:])
        return tensors


def received_views(library: native.Library, device: str, spec: ExpertParallelSpec, world: int, place: Layout) -> Views:
    """The arrays of hal.backend.Received and hal.Dispatched, in their order."""
    local, expert = spec.num_experts // world, spec.layout == "expert"
    words = () if expert else (spec.top_k,)
    parts = (
        Part(0, RECEIVED, (spec.hidden,), spec.dtype),
        Part(place.slot_scales, RECEIVED, (spec.scale_dim,), "float32") if spec.scale_dim else None,
        Part(place.slot_idx, RECEIVED, words, "int32"),
        Part(place.slot_weights, RECEIVED, words, "float32"),
        Part(place.slot_counts, local, (), "int32"),
        Part(place.slot_offsets, local + 1, (), "int64") if expert else None,
    )
    return Views(library, device, parts)


def torch_of(like: Any) -> Any:
    """The torch module if ``like`` is a tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(like, torch.Tensor) else None
