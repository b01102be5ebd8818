# SPDX-License-Identifier: Apache-2.0
"""What differs between the ranks' results and the dense one, in words that lead to the place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hal.demo.dense import DenseLayer
from hal.demo.model import Array


def differences(layer: int, parts: Sequence[Array], dense: DenseLayer, words: Sequence[str]) -> list[str]:
    """One line for each rank whose [T, H] part is not what the dense layer says; empty = all equal."""
    found, start = [], 0
    for rank, part in enumerate(parts):
        stop = start + len(part)
        found += _bits(f"layer {layer}, rank {rank}", part, dense.bits[start:stop], words[start:stop])
        found += _closeness(f"layer {layer}, rank {rank}", part, dense, slice(start, stop))
        start = stop
    if start != len(dense.bits):
        found.append(f"layer {layer}: the ranks gave {start} tokens, the text has {len(dense.bits)}")
    return found


def worst_share_of_bound(parts: Sequence[Array], dense: DenseLayer) -> float:
    """The largest distance from the float64 result as a share of what the roundings allow; at most 1 is right."""
    error = np.abs(np.concatenate(parts).astype(np.float64) - dense.exact)
    return float((error / dense.bound).max(initial=0.0))


def _bits(where: str, part: Array, expected: Array, words: Sequence[str]) -> list[str]:
    wrong = _raw(part) != _raw(expected)
    if not wrong.any():
        return []
    token, column = (int(index[0]) for index in np.nonzero(wrong))
    return [
        f"{where}: {int(wrong.sum())} of {wrong.size} elements differ in {int(wrong.any(axis=1).sum())} tokens; first in "
        f"token {token} ({words[token]!r}), column {column}: got {part[token, column]}, expected {expected[token, column]}"
    ]


def _closeness(where: str, part: Array, dense: DenseLayer, rows: slice) -> list[str]:
    error = np.abs(part.astype(np.float64) - dense.exact[rows])
    wrong = ~(error <= dense.bound[rows])  # NaN is wrong too.
    if not wrong.any():
        return []
    token, column = (int(index[0]) for index in np.nonzero(wrong))
    return [
        f"{where}: {int(wrong.sum())} elements are farther from the float64 result than rounding explains; first in token "
        f"{token}, column {column}: off by {error[token, column]:.3g}, allowed {dense.bound[rows][token, column]:.3g}"
    ]


def _raw(array: Array) -> NDArray[np.generic]:
    """Bits, so that -0.0 and 0.0 differ and NaN equals itself."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
