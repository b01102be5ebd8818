# SPDX-License-Identifier: Apache-2.0
"""What the demo reads: a text as token ids, or a saved routing."""

from __future__ import annotations

import re
import zipfile
import zlib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hal.errors import ContractError

VOCABULARY = 1 << 16


def read_text(path: Path | None) -> tuple[str, str]:
    """(name, text) of a file, or of the licence that this package ships."""
    if path is None:
        return _licence()
    try:
        return str(path), path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ContractError(f"cannot read {path}: {error.strerror}") from error


def tokenize(text: str) -> tuple[list[str], NDArray[np.int64]]:
    """Words and punctuation marks, and a stable id below :data:`VOCABULARY` for each."""
    words = re.findall(r"\w+|[^\w\s]", text)
    return words, np.array([zlib.crc32(word.lower().encode()) % VOCABULARY for word in words], np.int64)


def read_routing(path: Path, num_experts: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """``topk_idx`` [N, k] and ``topk_weights`` [N, k] float32 of a ``.npz``; missing weights are all ones."""
    try:
        with path.open("rb") as file:
            saved = np.load(file, allow_pickle=False)
            if not isinstance(saved, np.lib.npyio.NpzFile):
                raise ContractError(f"{path} is one array, as .npy: save it with np.savez, as topk_idx [N, k]")
            with saved:
                arrays = {name: saved[name] for name in saved.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, ContractError):
            raise
        raise ContractError(f"cannot read {path} as .npz: {error}") from error
    if "topk_idx" not in arrays:
        raise ContractError(
            f"{path} has {sorted(arrays)}; it must have topk_idx [N, k], and may have topk_weights [N, k]"
        )
    idx = arrays["topk_idx"]
    weights = arrays.get("topk_weights", np.ones(idx.shape, np.float32))
    if idx.ndim != 2 or idx.dtype.kind not in "iu" or 0 in idx.shape:
        raise ContractError(
            f"{path}: topk_idx is {idx.dtype} {list(idx.shape)}; it must be integers [N, k], N and k above 0"
        )
    if weights.shape != idx.shape or weights.dtype.kind != "f":
        raise ContractError(
            f"{path}: topk_weights is {weights.dtype} {list(weights.shape)}; it must be floats {list(idx.shape)}"
        )
    if not np.isfinite(weights).all():
        raise ContractError(f"{path}: topk_weights has values that are not finite, so no result could be compared")
    if idx.min() < -1 or idx.max() >= num_experts:
        raise ContractError(
            f"{path}: topk_idx spans {idx.min()} … {idx.max()}, but there are {num_experts} experts (ids 0 … "
            f"{num_experts - 1}, -1 = none); set workload.num_experts"
        )
    return idx.astype(np.int64), weights.astype(np.float32)


def _licence() -> tuple[str, str]:
    try:
        text = distribution("moe-hal").read_text("licenses/LICENSE")
    except PackageNotFoundError:
        text = None
    if text is None:  # A source tree that was not installed.
        text = (Path(__file__).resolve().parents[2] / "LICENSE").read_text(encoding="utf-8")
    return "LICENSE of moe-hal", text
