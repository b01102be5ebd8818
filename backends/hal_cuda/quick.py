# SPDX-License-Identifier: Apache-2.0
"""The short way from torch tensors to a launch and back, for calls in which nothing is to be refused or converted.

Each function returns None when it is not sure; the general way (hal/expert_parallel.py) then does the work or says what
is wrong. It takes fewer than a third of that way's Python calls, which is what an eager call of few tokens costs.
"""

from __future__ import annotations

import sys
from ctypes import byref
from typing import TYPE_CHECKING, Any

from hal.expert_parallel import Dispatched, Handle
from hal_cuda import native
from hal_cuda.views import tensor_view

if TYPE_CHECKING:
    from hal.expert_parallel import ExpertParallel
    from hal_cuda.engine import CudaEngine

_WHOLE = native.SEND | native.RECV


class Quick:
    """For one ExpertParallel, once torch is loaded."""

    def __init__(self, engine: CudaEngine, ep: ExpertParallel) -> None:
        torch = sys.modules["torch"]
        spec = ep.spec
        self._engine, self._ep, self._torch = engine, ep, torch
        self._index = int(engine.device.partition(":")[2])
        self._device = torch.device("cuda", self._index)
        self._dtype, self._combine = getattr(torch, spec.dtype), getattr(torch, spec.combine_dtype or spec.dtype)
        self._hidden, self._k, self._most, self._scales = spec.hidden, spec.top_k, spec.max_tokens, spec.scale_dim
        self._layout = spec.layout
        self._stream = torch._C._cuda_getCurrentRawStream
        self._tensor = torch.Tensor
        self._float, self._int64, self._int32 = torch.float32, torch.int64, torch.int32

    def _fits(self, tensor: Any, dtype: Any, rows: int, columns: int) -> bool:
        return bool(
            type(tensor) is self._tensor
            and tensor.dtype is dtype
            and tensor.shape == (rows, columns)
            and tensor.device == self._device
            and tensor.is_contiguous()
            and not tensor.requires_grad
        )

    def dispatch(
        self, x: Any, topk_idx: Any, topk_weights: Any, scales: Any, handle: Handle | None
    ) -> Dispatched | None:
        if type(x) is not self._tensor or x.dim() != 2:
            return None
        tokens = len(x)
        if not self._fits(x, self._dtype, tokens, self._hidden) or not 0 < tokens <= self._most:
            return None
        state, wide = None, False
        if handle is None:
            wide = getattr(topk_idx, "dtype", None) is self._int64
            if not self._fits(topk_idx, self._int64 if wide else self._int32, tokens, self._k):
                return None
        else:
            if (
                topk_idx is not None
                or type(handle) is not Handle
                or handle._ep is not self._ep
                or handle._tokens != tokens
            ):
                return None
            state = handle._state
        if topk_weights is not None and not self._fits(topk_weights, self._float, tokens, self._k):
            return None
        if (scales is not None) != (self._scales > 0):
            return None
        if scales is not None and not self._fits(scales, self._float, tokens, self._scales):
            return None
        engine, stream = self._engine, self._stream(self._index)
        pending = engine.launch_dispatch(
            x,
            tokens,
            (
                x.data_ptr(),
                0 if topk_idx is None else topk_idx.data_ptr(),
                0 if topk_weights is None else topk_weights.data_ptr(),
                0 if scales is None else scales.data_ptr(),
            ),
            wide,
            state,
            stream,
            _WHOLE,
        )
        if not pending.view:
            return self._general(engine.received(pending, stream), tokens)
        engine.settle(pending)
        return self._result(pending, tokens)

    def _result(self, pending: Any, tokens: int) -> Dispatched:
        engine, torch, lease, state = self._engine, self._torch, pending.lease, pending.state
        place, rows, library = engine.place, pending.state.rows, engine.library
        device, index = engine.device, self._index
        base = engine.slot_address(lease.slot)
        expert = self._layout == "expert"
        words = (rows,) if expert else (rows, self._k)

        def part(offset: int, shape: tuple[int, ...], dtype: str) -> Any:
            return tensor_view(library, base + offset, shape, dtype, device, index, lease, torch)

        handle = Handle.__new__(Handle)
        handle._ep, handle._state, handle._tokens, handle._rows, handle._weights_shape = (
            self._ep,
            state,
            tokens,
            rows,
            words,
        )
        return Dispatched(
            part(0, (rows, self._hidden), self._ep.spec.dtype),
            part(place.slot_scales, (rows, self._scales), "float32") if self._scales else None,
            part(place.slot_idx, words, "int32"),
            part(place.slot_weights, words, "float32"),
            part(place.slot_counts, (engine.local_experts,), "int32"),
            part(place.slot_offsets, (engine.local_experts + 1,), "int64") if expert else None,
            handle,
        )

    def _general(self, got: Any, tokens: int) -> Dispatched:
        return self._ep._dispatched(got, "torch", tokens)

    def combine(self, x: Any, handle: Handle, weighted: bool) -> Any:
        if type(handle) is not Handle or handle._ep is not self._ep or (weighted and self._layout == "rank"):
            return None
        if not handle._rows or not handle._tokens or not self._fits(x, self._combine, handle._rows, self._hidden):
            return None
        engine, stream = self._engine, self._stream(self._index)
        y = self._torch.empty((handle._tokens, self._hidden), dtype=self._combine, device=self._device)
        args = engine.name_whole_combine(handle._state, x.data_ptr(), x.numel() * x.itemsize, weighted, stream)
        args.out = y.data_ptr()
        engine.launch_combine(byref(args), stream)
        return y
