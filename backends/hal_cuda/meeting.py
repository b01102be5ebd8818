# SPDX-License-Identifier: Apache-2.0
"""What the hosts of one view's ranks tell one another, over shared memory (hal_host.views): while they make the view's
session, and at the end of each of its rounds. Ranks of other views hear nothing of it, and a later view ends every wait."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hal_host._engine import Members, ShmFabric
from hal_host.session import HostSession

from hal.bootstrap import Bootstrap, pack, unpack
from hal.errors import CapacityError, PeerTimeout
from hal.ordering import Order, SignalOp

if TYPE_CHECKING:
    from hal_host.shm import Shm

_LINE = 64
_MESSAGE_BYTES = 4096


class Words:
    """Words and messages in the window of a view. Ranks are those of the run; each writes a line of its own."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def agreed(self, rank: int) -> int:
        """Rounds of the view that ``rank`` holds; a rank's own word: that have ended there."""
        return rank * _LINE

    def begun(self) -> int:
        """A rank's own: how many launches it has begun to give its GPU."""
        return self._ranks * _LINE

    def in_vain(self) -> int:
        """A rank's own: how many launches it had begun when it last waited for others in vain."""
        return (self._ranks + 1) * _LINE

    def met(self, rank: int) -> int:
        """Exchanges of :class:`Meeting` for which ``rank`` has left its message."""
        return (self._ranks + 2 + rank) * _LINE

    def message(self, number: int, rank: int) -> int:
        """Two in turn: who leaves message n + 2 has everybody's n + 1, and nobody leaves that before it has read all n."""
        first = (2 * self._ranks + 2) * _LINE
        return first + (number % 2 * self._ranks + rank) * _MESSAGE_BYTES

    @property
    def total(self) -> int:
        return self.message(1, self._ranks - 1) + _MESSAGE_BYTES


class Meeting(Bootstrap):
    """:class:`hal.bootstrap.Bootstrap` of the ranks of one view, numbered from 0. PeerTimeout has these numbers, too."""

    def __init__(self, session: HostSession, parent: Bootstrap, window: int, members: Members, timeout: float) -> None:
        self.ranks: Sequence[int] = [r for r in range(session.world_size) if not members.lost >> r & 1]
        self.rank, self.world_size = self.ranks.index(session.rank), len(self.ranks)
        self.timeout, self.run = timeout, parent.run
        self._session, self._window, self._members = session, window, members
        self._transport: Shm = session.transport  # type: ignore[assignment]  # hal_host.views.Views has it from shared memory
        self._memory: Any = self._transport.memory(window)
        self._words = Words(session.world_size)
        self._met = 0

    def all_gather(self, value: Any, what: str = "all_gather", timeout: float | None = None) -> list[Any]:
        data = json.dumps(pack(value)).encode()
        if len(data) + 4 > _MESSAGE_BYTES:
            raise CapacityError(f"bytes told in '{what}'", len(data) + 4, _MESSAGE_BYTES, "this is a defect of HAL")
        self._met += 1
        number, me = self._met, self._session.rank
        message = len(data).to_bytes(4, "little") + data
        for peer in self.ranks:
            at = self._words.message(number, me)
            self._transport.put(self._window, 0, peer, at, memoryview(message), Order.RELAXED)
            self._transport.signal(self._window, 0, peer, self._words.met(me), number, SignalOp.SET, Order.STRONG)
        fabric = ShmFabric(self._transport, self._window, self.timeout if timeout is None else timeout, self._members)
        return [self._read(fabric, peer, number, what) for peer in self.ranks]

    def close(self, reason: str | None = None) -> None:
        """Nothing is kept open."""

    def _read(self, fabric: ShmFabric, peer: int, number: int, what: str) -> Any:
        try:
            fabric.wait(self._words.met(peer), number, peer, what)
        except PeerTimeout as error:
            raise self._in_own_numbers(error) from None
        at = self._words.message(number, peer)
        view = memoryview(self._memory)
        length = int.from_bytes(view[at : at + 4], "little")
        return unpack(json.loads(bytes(view[at + 4 : at + 4 + length])))

    def _in_own_numbers(self, error: PeerTimeout) -> PeerTimeout:
        return PeerTimeout(
            self.ranks.index(error.rank), error.stage, expected=error.expected, seen=error.seen, seconds=error.seconds,
            reason=error.reason,
        )  # fmt: skip


class Ends:
    """The end of each round of a view (kernels_host/ep/agreement.hpp says the same for the host's kernels), and how far each
    rank has come."""

    def __init__(self, session: HostSession, window: int, members: Members, timeout: float) -> None:
        self._transport: Shm = session.transport  # type: ignore[assignment]
        self._fabric = ShmFabric(self._transport, window, timeout, members)
        self._window, self._rank, self._words = window, session.rank, Words(session.world_size)
        self._others = [p for p in range(session.world_size) if p != self._rank and not members.lost >> p & 1]
        self._said = self._begun = 0

    def begin(self) -> int:
        """This rank gives its GPU the next launch of the view. Returns how many it has now begun."""
        self._begun += 1
        self._fabric.signal(self._rank, self._words.begun(), self._begun)
        return self._begun

    def say(self) -> None:
        """This rank holds the round's rows, and its own are with the others."""
        self._said += 1
        for peer in self._others:
            self._fabric.signal(peer, self._words.agreed(self._rank), self._said)

    def await_all(self) -> None:
        """Until all have said so, or the time limit."""
        for peer in self._others:
            self._fabric.wait(self._words.agreed(peer), self._said, peer, "end of the round")

    def end(self) -> None:
        """The round that was said last has ended here, and so may end for the others, also if this rank is gone by then."""
        self._fabric.signal(self._rank, self._words.agreed(self._rank), self._said)

    # --- whose fault it is that a round does not end ---------------------------------------------------------------

    def say_in_vain(self) -> None:
        """This rank runs, and waits for others in vain: in a launch, or for the end of a round. Until it begins the next."""
        self._fabric.signal(self._rank, self._words.in_vain(), self._begun)

    def silent(self, rounds: int, launch: int) -> dict[int, bool]:
        """The other ranks that have not begun launch ``launch``, or do not hold ``rounds`` rounds of the view, and do not say
        that they wait in vain themselves; whether each has begun the launch."""
        silent = {}
        for peer in self._others:
            begun = self._transport.peer_word(self._window, peer, self._words.begun())
            in_vain = self._transport.peer_word(self._window, peer, self._words.in_vain())
            if (begun < launch or self._held_by(peer) < rounds) and not begun == in_vain > 0:
                silent[peer] = begun >= launch
        return silent

    def all_hold(self) -> bool:
        """All have said that they hold the round that this rank said last."""
        return all(self._held_by(peer) >= self._said for peer in self._others)

    @property
    def said(self) -> int:
        """Rounds of the view that this rank holds."""
        return self._said

    def _held_by(self, peer: int) -> int:
        return self._transport.peer_word(self._window, self._rank, self._words.agreed(peer))
