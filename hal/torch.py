# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine for torch's autograd.

Each is the other's gradient: the backward of dispatch combines the rows' gradients with the same handle (and carries
the weights' gradients home beside them), the backward of combine dispatches the output's gradient with the same handle.

Both passes are collective, so all ranks must run the same backward operations: ``x`` (and ``topk_weights``) require a
gradient on every rank or on none, and every rank's loss uses what dispatch and combine gave, also when that is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.function import once_differentiable

from hal.config import QUANTISED_DTYPES
from hal.errors import ContractError
from hal.expert_parallel import Dispatched, Handle

if TYPE_CHECKING:
    from hal.expert_parallel import ExpertParallel

__all__ = ["combine", "dispatch"]


class _TrainingHandle(Handle):
    """A handle that also has the received weights, through which a weighted combine reaches the router."""

    __slots__ = ("received_weights",)

    def __init__(self, plain: Handle, received_weights: torch.Tensor) -> None:
        for name in Handle.__slots__:
            setattr(self, name, getattr(plain, name))
        self.received_weights = received_weights


def dispatch(
    ep: ExpertParallel,
    x: torch.Tensor,
    topk_idx: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    *,
    handle: Handle | None = None,
) -> Dispatched:
    """:meth:`ExpertParallel.dispatch` whose ``x`` and ``topk_weights`` carry gradients.

    ``x`` [tokens, hidden]; ``topk_idx`` [tokens, top_k]; ``topk_weights`` [tokens, top_k] float32. Its gradient is in
    ``x``'s dtype, summed in float32 as combine sums. Quantised rows have no gradient: ContractError if ``x`` requires one.
    """
    _require_gradient_dtype(ep, x)
    rows, weights, out = _Dispatch.apply(ep, x, topk_weights, (topk_idx, handle))  # type: ignore[no-untyped-call]
    return Dispatched(
        rows,
        out.scales,
        out.topk_idx,
        weights,
        out.tokens_per_expert,
        out.expert_offsets,
        _TrainingHandle(out.handle, weights),
        out.masked_ranks,
    )


def combine(
    ep: ExpertParallel,
    x: torch.Tensor,
    handle: Handle,
    *,
    weighted: bool = False,
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
) -> torch.Tensor:
    """:meth:`ExpertParallel.combine` with gradients for ``x``, each bias and, if ``weighted``, the dispatched weights.

    ``x`` [N, hidden]; returns [tokens, hidden]. ``weighted`` needs a handle from :func:`dispatch` of this module. The
    weights' gradient travels with that of the dispatched rows and costs no further exchange.
    """
    _require_gradient_dtype(ep, x)
    if weighted and not isinstance(handle, _TrainingHandle):
        raise ContractError("a weighted combine needs the weights that were received: use hal.torch.dispatch's handle")
    weights = handle.received_weights if weighted and isinstance(handle, _TrainingHandle) else None
    biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    # The handle's own part only: a graph node that refers to the received weights would refer to itself.
    plain = handle if not isinstance(handle, _TrainingHandle) else _plain(handle)
    y: torch.Tensor = _Combine.apply(ep, x, weights, plain, *biases)  # type: ignore[no-untyped-call]
    return y


def _plain(handle: Handle) -> Handle:
    plain = Handle.__new__(Handle)
    for name in Handle.__slots__:
        setattr(plain, name, getattr(handle, name))
    return plain


def _require_gradient_dtype(ep: ExpertParallel, x: torch.Tensor) -> None:
    if ep.spec.dtype in QUANTISED_DTYPES and x.requires_grad and torch.is_grad_enabled():
        raise ContractError(
            f"gradients cannot travel as {ep.spec.dtype} rows: train through an ExpertParallel of bfloat16, float16 or "
            "float32, or pass x.detach()"
        )


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ep: ExpertParallel,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        routing: tuple[torch.Tensor | None, Handle | None],
    ) -> tuple[torch.Tensor, torch.Tensor, Dispatched]:
        topk_idx, handle = routing
        out = ep.dispatch(x, topk_idx, topk_weights, handle=handle)
        ctx.ep, ctx.handle, ctx.dtype = ep, out.handle, x.dtype
        return out.x, out.topk_weights, out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor, _: None) -> tuple[Any, ...]:
        combine_dtype = getattr(torch, ctx.ep.spec.combine_dtype)
        rows = rows.to(combine_dtype).contiguous()
        if not ctx.needs_input_grad[2]:
            return None, ctx.ep.combine(rows, ctx.handle).to(ctx.dtype), None, None
        x, home = ctx.ep.combine(rows, ctx.handle, topk_weights=weights.contiguous())
        return None, x.to(ctx.dtype), home, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, ep: ExpertParallel, x: torch.Tensor, weights: torch.Tensor | None, handle: Handle, *bias: torch.Tensor
    ) -> torch.Tensor:
        ctx.ep, ctx.handle = ep, handle
        if weights is not None:
            ctx.save_for_backward(x, weights)
        else:
            ctx.row_dtype = x.dtype
        y: torch.Tensor = ep.combine(x, handle, weighted=weights is not None, bias=bias or None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, y: torch.Tensor) -> tuple[Any, ...]:
        dispatched = y.to(getattr(torch, ctx.ep.spec.dtype)).contiguous()
        rows = ctx.ep.dispatch(dispatched, handle=ctx.handle).x
        biases = (y,) * (len(ctx.needs_input_grad) - 4)
        if not ctx.saved_tensors:
            return None, rows.to(ctx.row_dtype), None, None, *biases
        x, weights = ctx.saved_tensors
        rows = rows.float()
        of_weights = (rows * x.float()).sum(dim=-1)
        return None, (rows * weights[:, None]).to(x.dtype), of_weights, None, *biases
