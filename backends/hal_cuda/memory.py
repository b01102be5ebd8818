# SPDX-License-Identifier: Apache-2.0
"""Device memory for results: from the caller's framework, so that its allocator keeps its books, else our own pool."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from ctypes import c_uint64
from typing import Any

from hal.arrays import ITEMSIZE, Buffer
from hal_cuda.native import Library


class Pooled:
    """Memory from the driver's stream-ordered pool, given back with its last reference."""

    def __init__(self, library: Library, device: int, nbytes: int, stream: int) -> None:
        self._library, self._device, self._stream = library, device, stream
        self.ptr = int(library.value("malloc", c_uint64, device, nbytes, stream))

    def __del__(self) -> None:
        if getattr(self, "ptr", 0):
            self._library.raw_free(self._device, self.ptr, self._stream)


class Allocator:
    """Memory on one device (``name`` as arrays have it) for arrays of the caller's kind."""

    def __init__(self, library: Library, device: int, name: str) -> None:
        self._library, self._device, self._name = library, device, name
        self._makers: dict[type, Callable[[tuple[int, ...], str, int], tuple[int, Any]]] = {}
        self._torch_models: dict[str, Any] = {}

    def empty(self, like: Any, shape: tuple[int, ...], dtype: str, stream: int) -> Buffer:
        """Uninitialised memory, allocated as the owner of ``like`` would, on ``stream``, its framework's current one."""
        ptr, owner = self.memory(like, shape, dtype, stream)
        return Buffer(ptr, shape, dtype, self._name, owner)

    def memory(self, like: Any, shape: tuple[int, ...], dtype: str, stream: int) -> tuple[int, Any]:
        """The same as an address, and what keeps it."""
        make = self._makers.get(type(like))
        if make is None:
            make = self._makers[type(like)] = self._maker(like)
        return make(shape, dtype, stream)

    def _maker(self, like: Any) -> Callable[[tuple[int, ...], str, int], tuple[int, Any]]:
        torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
        if torch is not None and isinstance(like, torch.Tensor):
            return self._torch
        if cupy is not None and isinstance(like, getattr(cupy, "ndarray", ())):
            return self._cupy
        return self._pooled

    def _torch(self, shape: tuple[int, ...], dtype: str, stream: int) -> tuple[int, Any]:
        model = self._torch_models.get(dtype)
        if model is None:
            torch = sys.modules["torch"]
            model = self._torch_models[dtype] = torch.empty(0, dtype=getattr(torch, dtype), device=self._name)
        # Half the time of torch.empty, which reads a type and a device, and a tuple more slowly than numbers.
        tensor = model.new_empty(*shape)
        return tensor.data_ptr(), tensor

    def _cupy(self, shape: tuple[int, ...], dtype: str, stream: int) -> tuple[int, Any]:
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(self._device):
            memory = cupy.cuda.alloc(max(math.prod(shape) * ITEMSIZE[dtype], 1))
        return memory.ptr, memory

    def _pooled(self, shape: tuple[int, ...], dtype: str, stream: int) -> tuple[int, Any]:
        memory = Pooled(self._library, self._device, max(math.prod(shape) * ITEMSIZE[dtype], 1), stream)
        return memory.ptr, memory
