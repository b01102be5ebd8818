# SPDX-License-Identifier: Apache-2.0
"""The short way from torch tensors to a launch and back, for calls in which nothing is to be refused or converted.

Each function returns None when it is not sure; the general way (hal/expert_parallel.py) then does the work or says what
is wrong. What a call costs the host is what an eager call of few tokens costs, so tests bound the Python calls here
(tests/test_cuda_quick.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hal.arrays import ITEMSIZE
from hal.expert_parallel import Dispatched, Handle
from hal_cuda import native

if TYPE_CHECKING:
    from hal.expert_parallel import ExpertParallel
    from hal_cuda.engine import CudaEngine

_WHOLE = native.SEND | native.RECV


class Quick:
    """For one ExpertParallel, once torch is loaded."""

    def __init__(self, engine: CudaEngine, ep: ExpertParallel) -> None:
        torch = sys.modules["torch"]
        spec = ep.spec
        combined = spec.combine_dtype or spec.dtype
        self._engine, self._ep, self._torch = engine, ep, torch
        self._device = torch.device(engine.device)
        self._index = self._device.index
        self._dtype, self._combined = getattr(torch, spec.dtype), getattr(torch, combined)
        self._hidden, self._k, self._most, self._scales = spec.hidden, spec.top_k, spec.max_tokens, spec.scale_dim
        self._row_bytes = spec.hidden * ITEMSIZE[combined]
        self._by_expert = spec.layout == "expert"
        self._tensor, self._strided = torch.Tensor, torch.strided
        self._float, self._int64, self._int32 = torch.float32, torch.int64, torch.int32
        self._stream: Callable[[int | None], int | None] = _no_stream
        if self._device.type == "cuda":
            self._stream = torch._C._cuda_getCurrentRawStream

    def _rows(self, tensor: Any, dtype: Any, columns: int) -> int:
        """Of a tensor [rows, columns] that a launch takes as it is; -1 for anything else."""
        if (
            type(tensor) is self._tensor
            and tensor.dtype is dtype
            and tensor.device == self._device
            and not tensor.requires_grad
            and tensor.layout is self._strided
            and tensor.is_contiguous()
        ):
            shape = tensor.shape
            if len(shape) == 2 and shape[1] == columns:
                return int(shape[0])
        return -1

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, scales: Any, handle: Handle | None
    ) -> Dispatched | None:
        tokens = self._rows(x, self._dtype, self._hidden)
        if not 0 < tokens <= self._most:
            return None
        state, wide, ids, weights, factors = None, False, 0, 0, 0
        if handle is None:
            wide = getattr(topk_idx, "dtype", None) is self._int64
            if self._rows(topk_idx, self._int64 if wide else self._int32, self._k) != tokens:
                return None
            ids = topk_idx.data_ptr()
        else:
            if (
                topk_idx is not None
                or type(handle) is not Handle
                or handle._ep is not self._ep
                or handle._tokens != tokens
            ):
                return None
            state = handle._state
        if topk_weights is not None:
            if self._rows(topk_weights, self._float, self._k) != tokens:
                return None
            weights = topk_weights.data_ptr()
        if scales is not None:
            if not self._scales or self._rows(scales, self._float, self._scales) != tokens:
                return None
            factors = scales.data_ptr()
        elif self._scales:
            return None
        engine, stream = self._engine, self._stream(self._index)
        engine.admit()
        pending = engine.launch_dispatch(x, tokens, x.data_ptr(), ids, weights, factors, wide, state, stream, _WHOLE)
        tensors = engine.received_tensors(pending, stream, self._torch)
        if tensors is None:
            return self._ep._dispatched(engine.received(pending, stream), "torch", tokens)
        new = pending.state
        if handle is None or new is not state:
            shape = (new.rows,) if self._by_expert else (new.rows, self._k)
            handle = Handle(self._ep, new, tokens, new.rows, shape)
        x, scales, topk_idx, topk_weights, counts, offsets = tensors
        return Dispatched(x, scales, topk_idx, topk_weights, counts, offsets, handle)

    def combine(self, x: Any, handle: Handle, weighted: bool) -> Any:
        if type(handle) is not Handle or handle._ep is not self._ep or (weighted and not self._by_expert):
            return None
        rows, tokens = handle._rows, handle._tokens
        if not rows or not tokens or self._rows(x, self._combined, self._hidden) != rows:
            return None
        stream = self._stream(self._index)
        y = x.new_empty(tokens, self._hidden)
        nbytes = rows * self._row_bytes
        self._engine.combine_rows(x.data_ptr(), nbytes, handle._state, bool(weighted), y.data_ptr(), stream)
        return y


def _no_stream(index: int | None) -> None:
    """Of devices without streams of torch's."""
