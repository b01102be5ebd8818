# SPDX-License-Identifier: Apache-2.0
"""Arrays of any framework as plain buffers, and back, without importing a framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Buffer:
    """C-contiguous memory with a shape. ``owner`` keeps it alive; dtype names are NumPy's and ml_dtypes'."""

    ptr: int
    shape: tuple[int, ...]
    dtype: str
    device: str
    """``cpu``, ``cuda:0``, ``npu:0``."""
    owner: Any = None
    readonly: bool = False
