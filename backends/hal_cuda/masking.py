# SPDX-License-Identifier: Apache-2.0
"""An engine that goes on without a lost rank (``on_peer_loss="mask"``; docs/contract.md, section 6).

Rounds are repeated over views of who is left (hal_host/views.py), each of which is a smaller run (view.py). A call ends on the
host: its launch has ended, and the hosts have told one another that all of theirs have.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hal_host._engine import Members, second_look
from hal_host.running import RunningTime
from hal_host.views import Operation, Views

from hal.arrays import Buffer
from hal.backend import Received
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal_cuda.meeting import Ends, Meeting, Words
from hal_cuda.memory import Allocator
from hal_cuda.patience import Patience
from hal_cuda.view import Routing, View

if TYPE_CHECKING:
    from hal_host.session import HostSession

    from hal.bootstrap import Bootstrap
    from hal.config import ExpertParallelSpec
    from hal_cuda.session import CudaSession

MAKING_SECONDS = 60.0
"""Beyond the time limit, how long NCCL may take to make the communicator of a view; it takes no limit itself."""
MAKING = "a view without lost ranks"
"""The stage in which a view is made."""
POLL_SECONDS = 0.005
"""Between two looks at what other ranks say."""


class CudaMaskingEngine(Views[View]):
    """See :class:`hal.backend.Engine`. Whole calls repeat from the caller's arrays; the halves let these change in between,
    so they work on copies. Each call ends on the host, once all ranks hold its rows."""

    def __init__(
        self, base: CudaSession, agreement: HostSession, bootstrap: Bootstrap, spec: ExpertParallelSpec
    ) -> None:
        """Collective. ``base`` is the communicator's session, ``agreement`` where the hosts agree."""
        self._base, self._bootstrap = base, bootstrap
        self.device = base.device_name
        self._allocator = Allocator(base.library, base.device, base.device_name)
        self._in_flight = 0
        self._stream = base.new_stream()
        self._left: list[View] = []
        self._patience = Patience(f"hal-patience-{base.rank}", self._give_up, self._go_on)
        try:
            super().__init__(agreement, spec)
        except BaseException:
            self._patience.close()
            raise
        self.buffer_bytes = self._engine.engine.buffer_bytes

    # --- calls -----------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Routing | None,
        stream: int | None,
    ) -> Received:
        """Both halves as one kernel."""
        self._admit(stream)
        self._settle(stream)
        operation = self._begin(lambda view: None)

        def run(view: View) -> Received:
            with self._waiting(view, view.ends.begin()):
                return view.dispatch(x, topk_idx, topk_weights, scales, state, stream)

        return self._ended_dispatch(operation, run)

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Routing | None,
        stream: int | None,
    ) -> Operation[View]:
        self._admit(stream)
        kept = self._copy(x, stream)
        ids, weights, factors = (self._copied(array, x, stream) for array in (topk_idx, topk_weights, scales))

        def send(view: View) -> Any:
            number = view.ends.begin()
            with self._waiting(view, number):
                return number, view.dispatch_send(kept, ids, weights, factors, state, stream)

        operation = self._begin(send)
        self._in_flight += 1
        return operation

    def dispatch_recv(self, operation: Operation[View], stream: int | None) -> Received:
        self._in_flight -= 1

        def run(view: View) -> Received:
            number, pending = operation.sent
            with self._waiting(view, number):
                return view.dispatch_recv(pending, stream)

        return self._ended_dispatch(operation, run)

    def _ended_dispatch(self, operation: Operation[View], run: Callable[[View], Received]) -> Received:
        _, got = self._end(operation, run, self._agree)
        return replace(got, masked_ranks=self.masked_ranks)

    def combine(
        self,
        x: Buffer,
        state: Routing,
        topk_weights: Buffer | None,
        weighted: bool,
        bias: Sequence[Buffer],
        stream: int | None,
    ) -> tuple[Buffer, Buffer | None]:
        """Both halves as one kernel."""
        self._refuse_capture(stream)
        self._settle(stream)
        operation = self._begin(lambda view: None)

        def run(view: View) -> tuple[Buffer, Buffer | None]:
            with self._waiting(view, view.ends.begin()):
                return view.combine(x, state, topk_weights, weighted, bias, stream)

        return self._end(operation, run, self._agree)[1]

    def combine_send(
        self, x: Buffer, state: Routing, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> Operation[View]:
        self._refuse_capture(stream)
        kept, weights = self._copy(x, stream), self._copied(topk_weights, x, stream)

        def send(view: View) -> Any:
            number = view.ends.begin()
            with self._waiting(view, number):
                return number, view.combine_send(kept, state, weights, weighted, stream)

        return self._begin(send)

    def combine_recv(
        self, operation: Operation[View], bias: Sequence[Buffer], stream: int | None
    ) -> tuple[Buffer, Buffer | None]:
        def run(view: View) -> tuple[Buffer, Buffer | None]:
            number, pending = operation.sent
            with self._waiting(view, number):
                return view.combine_recv(pending, bias, stream)

        return self._end(operation, run, self._agree)[1]

    def expert_output(self, state: Routing, like: Any, stream: int | None) -> Buffer:
        """Plain memory: a handle may outlive the window of its view."""
        shape = (state.rows, self.spec.hidden)
        return self._allocator.empty(like, shape, self.spec.combined_dtype, self._on(stream))

    def drain(self) -> None:
        """Until this rank's launches have ended."""
        self._engine.engine.drain()

    def close(self) -> None:
        """The view's session ends with the communicator: NCCL wants all ranks for that."""
        self._patience.close()
        self._engine.engine.close()
        self._give_back()

    # --- what is refused -------------------------------------------------------------------------------------------

    def _admit(self, stream: int | None) -> None:
        """As CudaEngine refuses a dispatch: by settings and calls alone, the same before a loss and after it."""
        self._refuse_capture(stream)
        limit = max(1, self.spec.num_buffers - 1)
        if self._in_flight == limit:
            raise CapacityError(
                f"dispatches in flight with num_buffers={self.spec.num_buffers}",
                self._in_flight + 1,
                limit,
                "receive an earlier dispatch first, or raise num_buffers",
            )

    def _refuse_capture(self, stream: int | None) -> None:
        if stream and self._base.library.value("stream_capturing", ctypes.c_int, self._base.device, stream):
            raise ContractError(
                "on_peer_loss='mask' ends each call on the host, which a CUDA graph cannot hold: capture an ExpertParallel "
                "with on_peer_loss='error'"
            )

    # --- waiting ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _waiting(self, view: View, number: int) -> Iterator[None]:
        """Launch ``number`` of the view, for as long as the host may wait for it."""
        try:
            with self._patience.lasting(self._timeout):
                yield
        except PeerTimeout as error:
            blamed = self._to_blame(view, error, rounds=view.ends.said + 1, launch=number)
            assert blamed is not None
            raise blamed from error

    def _agree(self, view: View, _: object) -> None:
        """The end of a round: every rank holds it."""
        view.ends.say()
        try:
            view.ends.await_all()
        except PeerTimeout as error:
            blamed = self._to_blame(view, error, rounds=view.ends.said, answered=view.ends.all_hold)
            if blamed is not None:
                raise blamed from error
        view.ends.end()

    def _to_blame(
        self, view: View, error: PeerTimeout, rounds: int, launch: int = 0, answered: Callable[[], bool] = lambda: False
    ) -> PeerTimeout | None:
        """This rank waited in vain: who keeps round ``rounds`` of the view from ending. None if there is an answer after all.

        A kernel waits for several ranks at once and names one of them, which may itself wait for others, even for this rank.
        So whoever waits in vain says so; a rank that says nothing for the time limit, though it does not hold the round, is to
        blame. One that has not begun ``launch`` was waited for as long before; but it may be at the end of the round before,
        where it says so only after a second look of its own."""
        if self._has_ended(error.rank):
            return error
        view.ends.say_in_vain()
        since: dict[int, float] = {}
        slowest: int | None = None
        running, waited = RunningTime(), 0.0
        while True:
            self._transport.look_for_later_view(self._members, error.stage)
            lost = [rank for rank in view.ranks if rank != self._base.rank and self._has_ended(rank)]
            silent = view.ends.silent(rounds, launch)
            if answered():
                return None
            since = {rank: since.get(rank, waited) for rank in silent}
            for rank, begun in silent.items():
                limit = self._timeout if begun else 2 * second_look(self._timeout)
                if waited - since[rank] >= limit:
                    lost.append(rank)
            if silent:
                slowest = min(silent, key=lambda rank: since[rank])
            elif slowest is not None:  # all wait in vain by now: for the one that found out last
                lost.append(slowest)
            elif waited >= self._timeout:  # the others found out earlier, and have not decided
                return error
            if lost:
                return PeerTimeout(lost[0], error.stage, seconds=error.seconds + waited, reason="no answer")
            time.sleep(POLL_SECONDS)
            waited += running.turn()

    def _give_up(self) -> None:
        self._engine.session.end_waits()

    def _go_on(self) -> None:
        self._engine.session.wait_again()

    def _settle(self, stream: int | None) -> None:
        """What the caller gave its GPU before does not count as waiting for peers."""
        if stream is not None and not self._operations:
            self._base.library.stream_sync(self._base.device, stream)

    # --- views -----------------------------------------------------------------------------------------------------

    def _window_bytes(self, members: Members) -> int:
        return Words(self._base.world_size).total

    def _word_offset(self, rank: int) -> int:
        return Words(self._base.world_size).agreed(rank)

    def _end_round(self, engine: View) -> None:
        engine.ends.end()

    def _has_ended(self, rank: int) -> bool:
        """One that closes says so to kernels that wait before it says so to the hosts."""
        view = self._engine
        told = rank in view.ranks and view.ranks.index(rank) in view.session.watch.closed
        return told or super()._has_ended(rank)

    def _leave(self) -> None:
        view = self._engine
        if view.session in self._base.views:
            self._base.views.remove(view.session)
            view.leave()
            self._left.append(view)
        self._give_back()

    def _give_back(self) -> None:
        """The memory of views that were left, where no array of theirs is referred to."""
        self._left = [view for view in self._left if not view.engine.give_back()]

    def _open(self, window: int, members: Members) -> View:
        """On a thread of its own, since neither NCCL nor a device takes a time limit for what is made here."""
        # Nobody is lost yet in the first, and making it is part of the communicator's set-up.
        timeout = self._timeout if members.view else max(self._timeout, self._session.config.timeout)
        meeting = Meeting(self._session, self._bootstrap, window, members, timeout)
        made: Future[View] = Future()

        def make() -> None:
            try:
                ends = Ends(self._session, window, members, self._timeout)
                view = View(self._base, self.spec, meeting, ends, self._stream)
            except BaseException as error:
                with suppress(InvalidStateError):
                    made.set_exception(error)
                return
            try:
                made.set_result(view)
            except InvalidStateError:  # too late
                view.leave()

        threading.Thread(target=make, name=f"hal-view-{self._base.rank}", daemon=True).start()
        try:
            view = self._await_making(made, meeting, members)
        except BaseException:
            if not made.cancel() and made.exception() is None:
                made.result().leave()
            raise
        self._base.views.append(view.session)
        return view

    def _await_making(self, made: Future[View], meeting: Meeting, members: Members) -> View:
        start = time.monotonic()
        while True:
            try:
                return made.result(0.02)
            except PeerTimeout as error:
                rank = meeting.ranks[error.rank]
                raise PeerTimeout(rank, error.stage, seconds=error.seconds, reason=error.reason) from error
            except HalError as error:
                if isinstance(error, ContractError | CapacityError):
                    raise
                self._await_cause(members, error)
                raise
            except TimeoutError:  # not made yet
                self._transport.look_for_later_view(members, MAKING)
            if time.monotonic() - start > self._timeout + MAKING_SECONDS:
                raise HalError(
                    f"NCCL made no communicator of ranks {list(meeting.ranks)} within {self._timeout + MAKING_SECONDS:g} s; "
                    "NCCL_DEBUG=INFO says where it stays"
                )

    def _await_cause(self, members: Members, error: HalError) -> None:
        """What a member that is lost, or gave up for a later view, does to the library's own exchanges is no PeerTimeout."""
        limit = time.monotonic() + self._timeout
        while time.monotonic() < limit:
            self._transport.look_for_later_view(members, MAKING)
            if fault := self._transport.find_fault(-1, members):
                raise PeerTimeout(fault[0], MAKING, reason=fault[1]) from error
            time.sleep(POLL_SECONDS)

    # --- copies ----------------------------------------------------------------------------------------------------

    def _on(self, stream: int | None) -> int:
        return self._stream if stream is None else stream

    def _copied(self, array: Buffer | None, like: Buffer, stream: int | None) -> Buffer | None:
        return None if array is None else self._copy(array, stream)

    def _copy(self, array: Buffer, stream: int | None) -> Buffer:
        """The halves' own, so that the caller may change its array."""
        on = self._on(stream)
        out = self._allocator.empty(array.owner, array.shape, array.dtype, on)
        if array.nbytes:
            self._base.library.copy(self._base.device, out.ptr, array.ptr, array.nbytes, on)
        if stream is None:
            self._base.library.stream_sync(self._base.device, on)
        return out
