# SPDX-License-Identifier: Apache-2.0
"""An engine that goes on without a lost rank (``on_peer_loss="mask"``; docs/contract.md, section 6).

Each view (views.py) is a :class:`HostEngine` over a window of its own, whose kernels end every round together
(kernels_host/ep/agreement.hpp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal.arrays import Buffer
from hal.backend import Received
from hal_host import _engine
from hal_host._engine import Members
from hal_host.engine import HostEngine, buffer_bytes, copy_of, shape_of
from hal_host.views import Operation, Views

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_host.session import HostSession

_Operation = Operation[HostEngine]


class MaskingEngine(Views[HostEngine]):
    """See :class:`hal.backend.Engine`. ``dispatch`` and ``combine`` repeat from the caller's arrays; the halves let these
    change in between, so they work on copies."""

    device = "cpu"

    def __init__(self, session: HostSession, spec: ExpertParallelSpec) -> None:
        """Collective: the first view's window is allocated on every rank."""
        super().__init__(session, spec)
        self.buffer_bytes = self._window_bytes(Members())

    # --- calls -----------------------------------------------------------------------------------------------------

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Any | None,
        stream: int | None,
    ) -> _Operation:
        kept = copy_of(x)
        ids, weights, factors = (None if a is None else copy_of(a) for a in (topk_idx, topk_weights, scales))
        return self._begin(lambda engine: engine.dispatch_send(kept, ids, weights, factors, state, stream))

    def dispatch(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Any | None,
        stream: int | None,
    ) -> Received:
        """Both halves."""
        operation = self._begin(lambda engine: engine.dispatch_send(x, topk_idx, topk_weights, scales, state, stream))
        return self.dispatch_recv(operation, stream)

    def dispatch_recv(self, operation: _Operation, stream: int | None) -> Received:
        def receive(engine: HostEngine, room: Any) -> None:
            engine._receive_dispatch(operation.sent, room)

        engine, planes = self._end(operation, lambda engine: engine._planes(operation.sent), receive)
        return replace(engine._hand_out(operation.sent, planes), masked_ranks=self.masked_ranks)

    def combine_send(
        self, x: Buffer, state: Any, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> _Operation:
        kept, weights = copy_of(x), None if topk_weights is None else copy_of(topk_weights)
        return self._begin(lambda engine: engine.combine_send(kept, state, weights, weighted, stream))

    def combine(
        self,
        x: Buffer,
        state: Any,
        topk_weights: Buffer | None,
        weighted: bool,
        bias: Sequence[Buffer],
        stream: int | None,
    ) -> tuple[Buffer, Buffer | None]:
        """Both halves."""
        operation = self._begin(lambda engine: engine._combine_send(x, state, topk_weights, weighted, kept=True))
        return self.combine_recv(operation, bias, stream)

    def combine_recv(
        self, operation: _Operation, bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        def receive(engine: HostEngine, room: Any) -> None:
            engine._receive_combine(operation.sent, bias, *room)

        _, sums = self._end(operation, lambda engine: engine._sums(operation.sent), receive)
        y, weights = sums
        return y, weights

    def close(self) -> None:
        """Views stay valid: a lease keeps its window mapped."""
        self._free_window()

    # --- views -----------------------------------------------------------------------------------------------------

    def _window_bytes(self, members: Members) -> int:
        return buffer_bytes(self.spec, self._session.world_size, self._session.config.topology.nodes, members)

    def _open(self, window: int, members: Members) -> HostEngine:
        nodes, ranks = self._session.config.topology.nodes, self._session.world_size
        fabric = self._session.fabric(window, self.spec.timeout, members)
        self._shape = _engine.shape_in_view(shape_of(self.spec, ranks, nodes), members)
        return HostEngine.over_fabric(fabric, self.spec, nodes, ranks, members)

    def _word_offset(self, rank: int) -> int:
        return int(_engine.agreed_word(self._shape, rank))

    def _end_round(self, engine: HostEngine) -> None:
        engine._kernels.end_round()
