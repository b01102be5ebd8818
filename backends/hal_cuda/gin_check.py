# SPDX-License-Identifier: Apache-2.0
"""GIN's promises tried out on the ranks of a session (kernels_cuda/src/gin_check.cu): what must hold, and what may not."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint64
from dataclasses import dataclass

from hal.errors import ContractError
from hal_cuda import native
from hal_cuda.gin_session import GinSession

HOLD = (
    "strong word", "strong signal", "bundled strong", "bundled weak", "complete barrier", "quiet then flag",
    "source after flush",
)  # fmt: skip
"""Checks that must find nothing wrong, whatever the network does within its promises."""
MAY_FAIL = (
    "flag", "flush then flag", "weak after", "weak bundled with the last", "other queue", "bare barrier",
    "source at once",
)  # fmt: skip
"""Checks of what nothing promises: a network that uses its freedom shows wrong words here."""


@dataclass(frozen=True)
class Outcome:
    """8-byte words of rows, on this rank."""

    bad: int
    checked: int


def check(
    session: GinSession, name: str, rounds: int = 4, rows: int = 4, row_bytes: int = 2048, queue: int = 0
) -> Outcome:
    """Collective. ``rounds`` times every rank puts ``rows`` rows to every rank of other domains, and looks at what it got
    as soon as check ``name``, one of :data:`HOLD` and :data:`MAY_FAIL`, says that it may. PeerTimeout as any wait."""
    kinds = [*HOLD, *MAY_FAIL]
    if name not in kinds:
        raise ContractError(f"no check {name!r}; choose one of: {', '.join(kinds)}")
    library, device = session.library, session.device
    args = native.GinCheckArgs(
        kind=kinds.index(name), rounds=rounds, rows=rows, queue=queue, threads=64, row_bytes=row_bytes
    )
    args.before = session.signalled.get(queue, 0)
    memory = session.memory(library.gin_check_bytes(byref(session.gin), byref(args)))
    args.window, args.base = memory.record.handle, memory.ptr
    results = int(library.value("malloc", c_uint64, device, 16, session.stream))
    host = (c_uint64 * 2)()
    library.memset(device, results, 0, 16, session.stream)
    args.bad, args.checked = results, results + 8
    try:
        session.run_check(args)
        library.copy(device, ctypes.addressof(host), results, 16, session.stream)
        library.stream_sync(device, session.stream)
    finally:
        library.raw_free(device, results, session.stream)
    if name == "strong signal":
        session.signalled[queue] = args.before + rounds
    session.barrier(range(session.world_size), True, session.config.timeout)  # nobody still writes there
    session.retire(memory)
    return Outcome(int(host[0]), int(host[1]))
