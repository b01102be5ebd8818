# SPDX-License-Identifier: Apache-2.0
"""What an ExpertParallel refuses (docs/contract.md, section 3): each rule once, with its numbers and its fix."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.arrays import ITEMSIZE, Buffer, as_numpy, dtype_name
from hal.config import (
    LONGEST_SECONDS,
    PEER_LOSS,
    QUANTISED_DTYPES,
    ExpertParallelSpec,
    as_integer,
    as_seconds,
    combined_dtype,
)
from hal.errors import CapacityError, ContractError

COMBINE_DTYPES = ("bfloat16", "float16", "float32")
DISPATCH_DTYPES = (*COMBINE_DTYPES, *QUANTISED_DTYPES)
LAYOUTS = ("rank", "expert")
SCHEDULES = ("direct", "hierarchical", "latency")
COMPLETIONS = ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block")
MAX_BIASES = 2
_ROW_BYTES = 16
"""A row's bytes are a multiple of this, so that every backend can move it in its widest units."""
_MOST = (1 << 31) - 1
"""Kernels count tokens, experts and a row's bytes in 32 bits."""

# --- settings ------------------------------------------------------------------------------------------------------


def complete_spec(spec: ExpertParallelSpec, world_size: int, timeout: float) -> ExpertParallelSpec:
    """``spec`` with every default filled in and every number a Python int; ContractError if it breaks a rule."""
    counts = {
        name: _integer(name, getattr(spec, name), least)
        for name, least in (
            ("num_experts", 1),
            ("top_k", 1),
            ("hidden", 1),
            ("max_tokens", 1),
            ("scale_dim", 0),
            ("alignment", 1),
            ("num_buffers", 1),
        )
    }
    dtype = _dtype("dtype", spec.dtype, DISPATCH_DTYPES)
    combine = combined_dtype(dtype, spec.combine_dtype)
    spec = replace(
        spec,
        **counts,
        dtype=dtype,
        combine_dtype=_dtype("combine_dtype", combine, COMBINE_DTYPES),
        layout=_choice("layout", spec.layout, LAYOUTS),
        schedule=_choice("schedule", spec.schedule, SCHEDULES),
        completion=_choice("completion", spec.completion, COMPLETIONS),
        on_peer_loss=_choice("on_peer_loss", spec.on_peer_loss, PEER_LOSS),
        timeout=_time_limit(timeout if spec.timeout is None else spec.timeout),
    )
    _check_experts(spec, world_size)
    _check_rows(spec)
    _check_alignment(spec, world_size)
    return spec


def _time_limit(value: Any) -> float:
    seconds = as_seconds(value)
    if seconds is None:
        raise ContractError(
            f"timeout={value!r} seconds: every wait is bounded, give a number above 0, at most {LONGEST_SECONDS}"
        )
    return seconds


def _integer(name: str, value: Any, least: int) -> int:
    number = as_integer(value)
    if number is None:
        raise ContractError(f"{name}={value!r} is no integer: give a number of at least {least}")
    if number < least:
        raise ContractError(f"{name}={number}: give at least {least}")
    if number > _MOST:
        raise ContractError(f"{name}={number}: give at most {_MOST}")
    return number


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in allowed:
        raise ContractError(f"{name}={value!r} is not one of {', '.join(allowed)}")
    return value


def _dtype(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """Of a type that HAL does not have, too, the answer names those that serve here."""
    with suppress(ContractError):
        value = dtype_name(value)
    return _choice(name, value, allowed)


def _check_experts(spec: ExpertParallelSpec, world_size: int) -> None:
    if spec.num_experts % world_size:
        more = -(-spec.num_experts // world_size) * world_size
        raise ContractError(
            f"num_experts={spec.num_experts} is not divisible by the {world_size} ranks: use {more} (the router never "
            f"names the {more - spec.num_experts} added), or another number of ranks"
        )
    if spec.top_k > spec.num_experts:
        raise ContractError(
            f"top_k={spec.top_k} is more than num_experts={spec.num_experts}, and a token names no expert twice: "
            f"give at most {spec.num_experts}"
        )


def _check_rows(spec: ExpertParallelSpec) -> None:
    for name, dtype in (("dtype", spec.dtype), ("combine_dtype", spec.combine_dtype or spec.dtype)):
        step = _ROW_BYTES // ITEMSIZE[dtype]
        if spec.hidden % step:
            raise ContractError(
                f"hidden={spec.hidden} with {name}={dtype} gives rows of {spec.hidden * ITEMSIZE[dtype]} bytes, not a "
                f"multiple of {_ROW_BYTES}: pad hidden to {-(-spec.hidden // step) * step}"
            )
        if spec.hidden * ITEMSIZE[dtype] > _MOST:
            raise ContractError(
                f"hidden={spec.hidden} with {name}={dtype} gives rows of {spec.hidden * ITEMSIZE[dtype]} bytes: give at "
                f"most {_MOST // _ROW_BYTES * step}"
            )
    if spec.scale_dim and spec.dtype not in QUANTISED_DTYPES:
        raise ContractError(
            f"scale_dim={spec.scale_dim} with dtype={spec.dtype}: scales go with {', '.join(QUANTISED_DTYPES)} only, "
            "leave scale_dim at 0"
        )


def _check_alignment(spec: ExpertParallelSpec, world_size: int) -> None:
    if spec.alignment > 1 and spec.layout != "expert":
        raise ContractError(f"alignment={spec.alignment} with layout='rank', which has no groups: use layout='expert'")
    group = world_size * spec.max_tokens
    if spec.schedule == "latency" and group % spec.alignment:
        fit = spec.max_tokens + next(
            more for more in range(1, spec.alignment + 1) if world_size * (spec.max_tokens + more) % spec.alignment == 0
        )
        raise ContractError(
            f"schedule='latency' gives each expert world_size * max_tokens = {group} rows, not a multiple of "
            f"alignment={spec.alignment}: use max_tokens={fit}"
        )


# --- arrays --------------------------------------------------------------------------------------------------------


def check_dtype(name: str, array: Buffer, expected: str, setting: str = "") -> None:
    if array.dtype != expected:
        possible = {"dtype": DISPATCH_DTYPES, "combine_dtype": COMBINE_DTYPES}.get(setting, ())
        fix = f", or make the ExpertParallel with {setting}={array.dtype!r}" if array.dtype in possible else ""
        raise ContractError(f"{name} is {array.dtype}, expected {expected}: cast it{fix}")


def check_shape(name: str, array: Buffer, expected: tuple[int, ...], meaning: str) -> None:
    if array.shape != expected:
        raise ContractError(f"{name} has shape {array.shape}, expected {expected} = {meaning}")


def check_device(name: str, array: Buffer, device: str) -> None:
    if array.device != device:
        raise ContractError(f"{name} is on {array.device}, but this communicator works on {device}: move it there")


def check_tokens(spec: ExpertParallelSpec, x: Buffer) -> int:
    """The number of tokens of a dispatch."""
    if len(x.shape) != 2 or x.shape[1] != spec.hidden:
        raise ContractError(f"x has shape {x.shape}, expected [tokens, hidden] with hidden={spec.hidden}")
    tokens = x.shape[0]
    if tokens > spec.max_tokens:
        raise CapacityError(
            "tokens of one rank in one dispatch",
            needed=tokens,
            given=spec.max_tokens,
            fix=f"split the batch, or make the ExpertParallel with max_tokens={tokens}",
        )
    return tokens


def check_routing(spec: ExpertParallelSpec, topk_idx: Buffer, tokens: int) -> None:
    """Shape and type anywhere; ids and duplicates where the CPU can look (device kernels check their own)."""
    if topk_idx.dtype not in ("int32", "int64"):
        raise ContractError(f"topk_idx is {topk_idx.dtype}, expected int32 or int64: cast it")
    check_shape("topk_idx", topk_idx, (tokens, spec.top_k), "[tokens, top_k]")
    if topk_idx.device != "cpu" or tokens == 0:
        return
    owner = topk_idx.owner
    ids = owner if type(owner) is np.ndarray else as_numpy(topk_idx)
    if tokens * spec.top_k <= 256:
        _check_few(spec, ids)
    else:
        _check_many(spec, ids)


def _check_few(spec: ExpertParallelSpec, ids: NDArray[Any]) -> None:
    """Plain Python: for one token, a single NumPy call costs more than the whole check."""
    for token, row in enumerate(ids.tolist()):
        named = set()
        for expert in row:
            if expert != -1:
                if not 0 <= expert < spec.num_experts or expert in named:
                    _refuse_row(spec, token, row)
                named.add(expert)


def _check_many(spec: ExpertParallelSpec, ids: NDArray[Any]) -> None:
    wrong = (ids < -1) | (ids >= spec.num_experts)
    if wrong.any():
        token = int(wrong.any(axis=1).argmax())
        _refuse_row(spec, token, ids[token].tolist())
    ordered = np.sort(ids, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != -1)
    if twice.any():
        token = int(twice.any(axis=1).argmax())
        _refuse_row(spec, token, ids[token].tolist())


def _refuse_row(spec: ExpertParallelSpec, token: int, row: list[int]) -> None:
    for position, expert in enumerate(row):
        if not -1 <= expert < spec.num_experts:
            raise ContractError(
                f"topk_idx[{token}, {position}] is {expert}, but expert ids are 0 … {spec.num_experts - 1}, or -1 for "
                "no expert: these are global ids, so check the router, or num_experts"
            )
        if expert != -1 and expert in row[:position]:
            raise ContractError(
                f"token {token} names expert {expert} twice (positions {row.index(expert)} and {position}): merge them "
                "and add their weights, or set one to -1"
            )


def check_weights(name: str, weights: Buffer, shape: tuple[int, ...], meaning: str) -> None:
    check_dtype(name, weights, "float32")
    check_shape(name, weights, shape, meaning)


def check_scales(spec: ExpertParallelSpec, scales: Buffer | None, tokens: int) -> None:
    if scales is None:
        if spec.scale_dim:
            raise ContractError(
                f"scales are missing: this ExpertParallel was made with scale_dim={spec.scale_dim}, so pass scales "
                f"[{tokens}, {spec.scale_dim}] float32, or make it with scale_dim=0"
            )
        return
    if not spec.scale_dim:
        raise ContractError(
            f"unexpected scales of shape {scales.shape}: this ExpertParallel was made with scale_dim=0, "
            f"leave them out, or make it with scale_dim and a dtype of {', '.join(QUANTISED_DTYPES)}"
        )
    check_dtype("scales", scales, "float32")
    check_shape("scales", scales, (tokens, spec.scale_dim), "[tokens, scale_dim]")
