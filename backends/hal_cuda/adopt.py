# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicator that a torch process group already has, in place of one more of HAL's own.

It can be adopted only where torch and HAL use the very same loaded NCCL: a communicator means nothing to another copy,
even of the same version. torch's pointer is private to it and keyed by the current device, hence the care here.
"""

from __future__ import annotations

import sys
from typing import Any

from hal.bootstrap import Bootstrap
from hal.group import TorchGroup
from hal_cuda import native


def device_of(bootstrap: Bootstrap) -> int | None:
    """The GPU that this rank's torch process group is bound to, else the one torch works on; None: no say."""
    group = bootstrap.run.group
    if not isinstance(group, TorchGroup):
        return None
    bound = getattr(group.process_group, "bound_device_id", None)
    if bound is not None and bound.type == "cuda" and bound.index is not None:
        return int(bound.index)
    cuda = sys.modules["torch"].cuda
    return int(cuda.current_device()) if cuda.is_initialized() else None


def communicator_of(bootstrap: Bootstrap, library: native.Library, device: int) -> tuple[int, str]:
    """Collective. The process group's ``ncclComm_t`` for ``device``; or 0, and why every rank is to make HAL's own (empty:
    there is no torch process group)."""
    group = bootstrap.run.group
    if not isinstance(group, TorchGroup):
        return 0, ""
    pointer, reason = _pointer(group, library, device)
    for rank, theirs in enumerate(bootstrap.all_gather(reason, "NCCL communicator of the process group")):
        if theirs:
            return 0, f"rank {rank}: {theirs}"
    return pointer, ""


def _pointer(group: TorchGroup, library: native.Library, device: int) -> tuple[int, str]:
    torch = sys.modules["torch"]
    if not library.nccl_was_open:
        return 0, f"torch uses another NCCL than {library.nccl_path}"
    backend: Any
    try:
        backend = group.process_group._get_backend(torch.device("cuda", device))
    except RuntimeError:
        return 0, f"the process group has no backend for GPU {device}"
    get = getattr(backend, "_comm_ptr", None)
    if get is None:
        return 0, f"this torch's {type(backend).__name__} does not tell its NCCL communicator"
    with torch.cuda.device(device):
        pointer = int(get() or 0)
    if pointer == 0:
        return 0, (
            "the process group has no NCCL communicator yet (pass device_id to init_process_group, or run one collective "
            "first)"
        )
    return pointer, ""
