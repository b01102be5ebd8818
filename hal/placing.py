# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays where a backend wants them, and its arrays as NumPy ones: for tools that make and check their data on CPUs."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hal.arrays import as_buffer, as_numpy, to_kind


def placed(array: NDArray[Any] | None, device: str) -> Any:
    """``array`` for an ExpertParallel on ``device``: itself on ``"cpu"``, else a torch tensor there, of the same type."""
    if array is None or device == "cpu":
        return array
    return to_kind(as_buffer(np.ascontiguousarray(array)), "torch").to(device)


def fetched(array: Any) -> Any:
    """What a backend gave, as a NumPy array; a copy if it is on a device. Waits for the device."""
    if array is None:
        return None
    return as_numpy(as_buffer(array.cpu() if hasattr(array, "cpu") else array))


def settle(device: str) -> None:
    """Until all that was given to ``device`` is done."""
    if device != "cpu":
        getattr(sys.modules["torch"], device.partition(":")[0]).synchronize()
