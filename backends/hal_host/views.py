# SPDX-License-Identifier: Apache-2.0
"""The rounds of one ExpertParallel over views of who is left (``on_peer_loss="mask"``; docs/contract.md, section 6).

Time is cut into views. Within one, ranks work over memory that only its members reach, and end each round together: nobody
returns from it before all have said that they hold its rows. A wait that fails ends the view: the ranks decide who is left,
meet in a new window that no lost rank reaches, tell each other how many rounds have ended, and repeat what had not.

What a view consists of, and how a round is sent and received in it, is the subclass's: the host's kernels work in the view's
window itself (masking.py); for GPUs it only carries what their hosts tell one another (backends/hal_cuda/masking.py).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hal.errors import PeerTimeout
from hal_host._engine import Members
from hal_host.session import ranks_of

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_host.session import HostSession
    from hal_host.shm import Shm

E = TypeVar("E")
"""What works in one view."""
T = TypeVar("T")
_log = logging.getLogger("hal")


@dataclass(eq=False)
class Operation(Generic[E]):
    """A dispatch or combine that has not ended: how to send it again, and where it was sent."""

    send: Callable[[E], Any]
    engine: E | None = None
    sent: Any = None


class Views(ABC, Generic[E]):
    """One rank's side. ``session`` is over shared memory, and lasts longer."""

    _engine: E

    def __init__(self, session: HostSession, spec: ExpertParallelSpec) -> None:
        """Collective: the first view's window is allocated on every rank."""
        self.spec, self._session = spec, session
        self._transport: Shm = session.transport  # type: ignore[assignment]  # HostSession.why_not_mask said so
        self._first_window = session.allocate(self._window_bytes(Members()))
        self._window: int | None = None
        self.masked_ranks: tuple[int, ...] = ()
        # Rounds that have ended here, in all, and before the view began; all ranks receive them in the same order.
        self._ended = self._ended_before = 0
        self._operations: list[Operation[E]] = []
        self._enter(self._first_window, Members())

    # --- the subclass's --------------------------------------------------------------------------------------------

    @abstractmethod
    def _window_bytes(self, members: Members) -> int:
        """Of the window of a view."""

    @abstractmethod
    def _open(self, window: int, members: Members) -> E:
        """Collective among the members: what works in a view. A rank that is lost meanwhile is a PeerTimeout."""

    def _leave(self) -> None:
        """Nothing more is done in the view that this rank is in. May be called again."""

    @abstractmethod
    def _word_offset(self, rank: int) -> int:
        """Where in the window a rank's word lies that says how many rounds of the view it holds; a rank's own word, how many
        have ended there."""

    @abstractmethod
    def _end_round(self, engine: E) -> None:
        """The round that this rank holds has ended on another rank, so it ends here."""

    def _has_ended(self, rank: int) -> bool:
        """Whether a rank is gone for good, having closed, failed or died."""
        return self._transport.has_ended(rank)

    # --- rounds ----------------------------------------------------------------------------------------------------

    def _begin(self, send: Callable[[E], Any]) -> Operation[E]:
        operation = Operation(send)
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
        operation: Operation[E],
        make_room: Callable[[E], T],
        receive: Callable[[E, T], None],
    ) -> tuple[E, T]:
        """Receive an operation; in which view's engine, and the results. What ``make_room`` gives holds them once ``receive``
        has said to the others that this rank's rows are here."""
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
                    self._end_round(engine)
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

    # --- views -----------------------------------------------------------------------------------------------------

    def _renew(self, error: PeerTimeout | None) -> int:
        """Go on in a new view. Returns how many rounds have ended on any rank. Raises what it was given if nobody is to
        blame, RankMasked if the others left this rank out."""
        tried, suspect, ended = self._members, -1 if error is None else error.rank, self._ended
        self._leave()
        while True:
            members = self._transport.leave_out(tried.view, suspect)
            if members.view == tried.view:
                assert error is not None
                raise error
            self._tell(members, members.lost & ~tried.lost)
            ended = max(ended, self._ended_on(members.lost & ~tried.lost))
            try:
                nbytes = self._window_bytes(members)
                window, ended = self._transport.renew(self._first_window, members, nbytes, ended, self._timeout)
                old = self._window
                self._enter(window, members)
                break
            except PeerTimeout as again:
                tried, suspect, error = members, again.rank, again
        if old is not None:
            self._session.free(old)
        self._ended_before = ended
        return ended

    def _enter(self, window: int, members: Members) -> None:
        try:
            self._engine = self._open(window, members)
        except BaseException:
            self._session.free(window)
            raise
        self._window, self._members = window, members

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
        return self._transport.peer_word(self._window, rank, self._word_offset(rank))

    def _ended_on(self, lost: int) -> int:
        """The most rounds that have ended on a rank that is gone for good, whose results may have been used. To be asked
        once for each rank, when it is left out: one that is only slow may end a round that the others repeat by now."""
        most = 0
        for rank in ranks_of(lost):
            if self._has_ended(rank):
                most = max(most, self._ended_before + self._word(rank))
        return most

    @property
    def _timeout(self) -> float:
        return self._session.config.timeout if self.spec.timeout is None else self.spec.timeout

    def _tell(self, members: Members, newly: int) -> None:
        silent = f"which did not answer for {self._timeout:g} s"
        for rank in ranks_of(newly):
            why = "which has ended" if self._has_ended(rank) else silent
            _log.warning("rank %d goes on without rank %d, %s (view %d)", self._session.rank, rank, why, members.view)

    def _free_window(self) -> None:
        """At the end."""
        if self._window is not None:
            self._session.free(self._window)
            self._window = None
