# SPDX-License-Identifier: Apache-2.0
"""Arrays over a leased slot. For torch they are made here by DLPack, which is quicker than an array interface and ends
the lease when the last tensor is gone; other kinds are made by hal.arrays and refer to the lease."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from hal.arrays import Buffer
from hal.config import QUANTISED_DTYPES
from hal_cuda.native import Library
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
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.argtypes, _capsule.restype = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p), ctypes.py_object


def view(
    library: Library, ptr: int, shape: tuple[int, ...], dtype: str, device: str, lease: Lease, torch: Any
) -> Buffer:
    """``torch`` is the module if the caller's arrays are tensors, else None."""
    index = int(device.partition(":")[2] or 0)
    owner = lease if torch is None else tensor_view(library, ptr, shape, dtype, device, index, lease, torch)
    return Buffer(ptr, shape, dtype, device, owner)


def tensor_view(
    library: Library,
    ptr: int,
    shape: tuple[int, ...],
    dtype: str,
    device: str,
    index: int,
    lease: Lease,
    torch: Any,
) -> Any:
    """A tensor over leased memory of ``device``, which is number ``index`` of its kind."""
    if 0 in shape:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)
    code, bits = _CODES[dtype]
    dims = len(shape)
    managed = library.dlpack(ptr, index, code, bits, dims, shape[0], shape[1] if dims == 2 else 1, lease.count)
    tensor = torch._C._from_dlpack(_capsule(managed, b"dltensor", None))
    return tensor.view(getattr(torch, dtype)) if bits == 8 else tensor


def torch_of(like: Any) -> Any:
    """The torch module if ``like`` is a tensor, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and isinstance(like, torch.Tensor) else None
