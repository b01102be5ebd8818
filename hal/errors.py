# SPDX-License-Identifier: Apache-2.0
"""Every error HAL raises on purpose. Each text carries the numbers and the way to mend it."""

from __future__ import annotations

from typing import Any


class HalError(Exception):
    """Base of all HAL errors."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Processes hand errors to each other; the default would call the class with the finished text alone.
        return _rebuilt, (type(self), self.args), self.__dict__


def _rebuilt(kind: type[HalError], args: tuple[Any, ...]) -> HalError:
    error = kind.__new__(kind)
    error.args = args
    return error


class BackendUnavailable(HalError):
    """A backend or transport cannot be used here: which one, why, and how to mend it."""

    def __init__(self, name: str, reason: str, fix: str = "") -> None:
        self.name, self.reason, self.fix = name, reason, fix
        super().__init__(f"backend '{name}' cannot be used: {reason}" + (f"; {fix}" if fix else ""))


class ContractError(HalError, ValueError):
    """Input or settings that break the interface's contract; refused before anything is sent."""


class CapacityError(HalError):
    """Something does not fit: what, how much was needed and how much was given."""

    def __init__(self, what: str, needed: int, given: int, fix: str) -> None:
        self.what, self.needed, self.given, self.fix = what, needed, given, fix
        super().__init__(f"{what}: needed {needed}, given {given}; {fix}")


class RankMasked(HalError):
    """The other ranks went on without this one (``on_peer_loss="mask"``): it did not answer in time, or was stopped.

    What it wrote since then reached nobody. It can only close its communicator.
    """

    def __init__(self, rank: int, by: int) -> None:
        self.rank, self.by = rank, by
        super().__init__(
            f"rank {rank} was masked by rank {by}: it did not answer within the time limit, and the other ranks go on "
            f"without it; close this communicator, and raise `timeout` if rank {rank} was only slow"
        )


class PeerTimeout(HalError, TimeoutError):
    """A bounded wait ended: which rank was waited for, where, and what was seen instead.

    ``rank`` is the rank at fault: the end of the chain of waits where the transport can follow it (a relay that is
    itself waiting is not named in place of the rank that stalled). ``queue`` is None where the wait is on none.
    """

    def __init__(
        self,
        rank: int,
        stage: str,
        *,
        queue: int | None = None,
        expected: int = 0,
        seen: int = 0,
        seconds: float = 0.0,
        reason: str = "no answer",
    ) -> None:
        self.rank, self.stage, self.queue = rank, stage, queue
        self.expected, self.seen, self.seconds, self.reason = expected, seen, seconds, reason
        # More time brings back no rank that has ended.
        ended = any(words in reason for words in ("died", "closed its communicator", "failed with"))
        who = "" if reason.startswith((f"rank {rank} ", f"ranks {rank},")) else f"rank {rank}: "
        where = f"in stage '{stage}'" + ("" if queue is None else f" on queue {queue}")
        super().__init__(
            f"{who}{reason} {where} after {seconds:.3f} s: "
            f"expected {expected}, seen {seen}; look at rank {rank}'s output" + ("" if ended else ", or raise `timeout`")
        )
