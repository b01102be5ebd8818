# SPDX-License-Identifier: Apache-2.0
"""An engine that goes on without a lost rank (``on_peer_loss="mask"``; docs/contract.md, section 6).

Time is cut into views. Within one, ranks work over one window as :class:`HostEngine` does, and end each round together
(kernels_host/ep/agreement.hpp). A wait that fails ends the view: the ranks decide who is left, meet in a new window that
no lost rank reaches, tell each other how many rounds have ended, and repeat what had not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from hal.arrays import Buffer
from hal.backend import Received
from hal.errors import PeerTimeout
from hal_host import _engine
from hal_host._engine import Members
from hal_host.engine import HostEngine, buffer_bytes, copy_of, shape_of
from hal_host.session import ranks_of

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_host.session import HostSession
    from hal_host.shm import Shm

_T = TypeVar("_T")
_log = logging.getLogger("hal")


@dataclass(eq=False)
class _Operation:
    """A dispatch or combine that has not ended: how to send it again, and where it was sent."""

    send: Callable[[HostEngine], Any]
    engine: HostEngine | None = None
    sent: Any = None


class MaskingEngine:
    """See :class:`hal.backend.Engine`. ``dispatch`` and ``combine`` repeat from the caller's arrays; the halves let these
    change in between, so they work on copies."""

    device = "cpu"

    def __init__(self, session: HostSession, spec: ExpertParallelSpec) -> None:
        """Collective: the first view's window is allocated on every rank."""
        self.spec, self._session = spec, session
        self._transport: Shm = session.transport  # type: ignore[assignment]  # HostSession.why_not_mask said so
        self.buffer_bytes = buffer_bytes(spec, session.world_size, session.config.topology.nodes, Members())
        self._first_window = session.allocate(self.buffer_bytes)
        self._window: int | None = self._first_window
        self.masked_ranks: tuple[int, ...] = ()
        # Rounds that have ended here, in all, and before the view began; all ranks receive them in the same order.
        self._ended = self._ended_before = 0
        self._operations: list[_Operation] = []
        self._enter(self._first_window, Members())

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
        if self._window is not None:
            self._session.free(self._window)
            self._window = None

    # --- rounds over views -----------------------------------------------------------------------------------------

    def _begin(self, send: Callable[[HostEngine], Any]) -> _Operation:
        operation = _Operation(send)
        self._operations.append(operation)
        try:
            while True:
                try:
                    self._send_all()
                    return operation
                except PeerTimeout as error:
                    self._renew(error)
        except BaseException:
            self._operations.remove(operation)
            raise

    def _end(
        self,
        operation: _Operation,
        make_room: Callable[[HostEngine], _T],
        receive: Callable[[HostEngine, _T], None],
    ) -> tuple[HostEngine, _T]:
        """Receive an operation; in which view's engine, and the results."""
        while True:
            engine, members, room = None, self._members, None
            try:
                self._send_all()
                engine, members = self._engine, self._members
                room = make_room(engine)
                receive(engine, room)
                self._ended += 1
            except PeerTimeout as error:
                # Where it has ended on another rank, every rank had said that it holds the round, and this one said so only
                # after all its rows were here; what it went on to write is whole, since nothing but waits can fail.
                if engine is not None and room is not None and self._has_ended_elsewhere():
                    engine._kernels.end_round()
                    self._ended += 1
                elif (ended := self._renew(error)) > self._ended and engine is not None and room is not None:
                    self._ended = ended
                else:
                    continue
            except BaseException:
                self._operations.remove(operation)
                raise
            self._operations.remove(operation)
            self.masked_ranks = ranks_of(members.lost)
            return engine, room

    def _send_all(self) -> None:
        """Everything in flight is on its way in the newest view, in the order of its calls."""
        if self._transport.newest_view().view > self._members.view:
            self._renew(None)
        for operation in self._operations:
            if operation.engine is not self._engine:
                operation.sent = None  # a slot of an earlier view
                operation.sent = operation.send(self._engine)
                operation.engine = self._engine

    def _renew(self, error: PeerTimeout | None) -> int:
        """Go on in a new view. Returns how many rounds have ended on any rank. Raises what it was given if nobody is to
        blame, RankMasked if the others left this rank out."""
        tried, suspect, ended = self._members, -1 if error is None else error.rank, self._ended
        while True:
            members = self._transport.leave_out(tried.view, suspect)
            if members.view == tried.view:
                assert error is not None
                raise error
            self._tell(members, members.lost & ~tried.lost)
            ended = max(ended, self._ended_on(members.lost & ~tried.lost))
            nbytes = buffer_bytes(self.spec, self._session.world_size, self._session.config.topology.nodes, members)
            try:
                window, ended = self._transport.renew(self._first_window, members, nbytes, ended, self._timeout)
                break
            except PeerTimeout as again:
                tried, suspect, error = members, again.rank, again
        if self._window is not None:
            self._session.free(self._window)
        self._ended_before = ended
        self._enter(window, members)
        return ended

    def _has_ended_elsewhere(self) -> bool:
        """Whether the round that this rank is in has ended on another. To be asked before this rank leaves the view: from
        then on it has told the others how far it got. Without it, those that still wait would need one that is done, and
        perhaps idle for long, to meet them in a new view."""
        here = self._ended - self._ended_before
        absent = self._members.lost | 1 << self._session.rank
        return any(self._word(rank) > here for rank in range(self._session.world_size) if not absent >> rank & 1)

    def _word(self, rank: int) -> int:
        """How many rounds of this view have ended on a rank."""
        assert self._window is not None
        return self._transport.peer_word(self._window, rank, _engine.agreed_word(self._shape, rank))

    def _ended_on(self, lost: int) -> int:
        """The most rounds that have ended on a rank that is gone for good, whose results may have been used. To be asked
        once for each rank, when it is left out: one that is only slow may end a round that the others repeat by now."""
        most = 0
        for rank in ranks_of(lost):
            if self._transport.has_ended(rank):
                most = max(most, self._ended_before + self._word(rank))
        return most

    def _enter(self, window: int, members: Members) -> None:
        nodes, ranks = self._session.config.topology.nodes, self._session.world_size
        fabric = self._session.fabric(window, self.spec.timeout, members)
        self._window, self._members = window, members
        self._shape = _engine.shape_in_view(shape_of(self.spec, ranks, nodes), members)
        self._engine = HostEngine.over_fabric(fabric, self.spec, nodes, ranks, members)

    @property
    def _timeout(self) -> float:
        return self._session.config.timeout if self.spec.timeout is None else self.spec.timeout

    def _tell(self, members: Members, newly: int) -> None:
        silent = f"which did not answer for {self._timeout:g} s"
        for rank in ranks_of(newly):
            why = "which has ended" if self._transport.has_ended(rank) else silent
            _log.warning("rank %d goes on without rank %d, %s (view %d)", self._session.rank, rank, why, members.view)
