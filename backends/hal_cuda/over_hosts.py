# SPDX-License-Identifier: Apache-2.0
"""What an engine over several hosts has besides: its description for the kernels, and memory of its own."""

from __future__ import annotations

from contextlib import suppress
from ctypes import addressof, c_uint64
from typing import TYPE_CHECKING, Any

from hal.config import ExpertParallelSpec
from hal.errors import ContractError, HalError
from hal.ordering import QuietScope
from hal_cuda import native
from hal_cuda.crossing import Crossing
from hal_cuda.layout import Layout

if TYPE_CHECKING:
    from hal_cuda.session import CudaSession, SymmetricMemory

_CLOSE_SECONDS = 1.0
"""How long a rank waits at close for peers whose last words may still be on their way here."""


class OverHosts:
    """See ``hal_cuda_hosts`` in kernels_cuda/include/hal_cuda.h."""

    def __init__(
        self, session: CudaSession, spec: ExpertParallelSpec, crossing: Crossing, window: SymmetricMemory, place: Layout
    ) -> None:
        self._session = session
        rings, world = crossing.peers * crossing.channels, session.world_size
        counts = 4 * rings * 8
        plan = (2 * world + spec.num_experts + crossing.hosts) * 4
        library, device = session.library, session.device
        total = counts + plan
        self._memory = int(library.value("malloc", c_uint64, device, total, 0))
        library.memset(device, self._memory, 0, total, 0)
        library.stream_sync(device, 0)
        self._record: Any = native.Hosts(
            gin=session.gin,
            window=window.record.handle,
            counts=self._memory,
            plan=self._memory + counts,
            off_outbox=place.outbox,
            off_inbox=place.inbox,
            off_headers_came=place.headers_came,
            off_raised=place.raised,
            off_sending=place.sending,
            off_received=place.received,
            off_combine_sending=place.combine_sending,
            off_combine_received=place.combine_received,
            hierarchical=int(crossing.hierarchical),
            peers=crossing.peers,
            channels=crossing.channels,
            cells=crossing.cells,
            batch=crossing.batch,
            cell_bytes=place.cell_bytes,
            combine_cell_bytes=place.combine_cell_bytes,
            record_bytes=place.record_bytes,
        )
        self.description = addressof(self._record)

    def settle(self) -> None:
        """After this rank's launches have ended, before its window goes: room that this rank gave back, and what peers
        give back to it, may still be on the network."""
        session = self._session
        with suppress(HalError, ContractError):
            for queue in range(session.queues):
                session.quiet(queue, None, QuietScope.REMOTE)
            session._bootstrap.all_gather(None, "closing an ExpertParallel", _CLOSE_SECONDS)

    def free(self) -> None:
        self._session.library.free(self._session.device, self._memory, 0)
