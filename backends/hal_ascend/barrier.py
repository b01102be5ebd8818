# SPDX-License-Identifier: Apache-2.0
"""The barrier of both Ascend sessions, made of their own signals: the library's drains no queue (rule 50)."""

from __future__ import annotations

from collections.abc import Sequence

from hal.backend import Session
from hal.ordering import Order, SignalOp


def meet(session: Session, ranks: Sequence[int], counts: list[int], first_slot: int, timeout: float) -> None:
    """Every rank of ``ranks`` has arrived. ``counts`` [ranks] are kept by the session for each pair of ranks, so barriers
    of different teams may alternate; slot ``first_slot + r`` is rank r's."""
    others = [r for r in ranks if r != session.rank]
    for peer in others:
        session.signal(first_slot + session.rank, peer, counts[peer] + 1, SignalOp.SET, 0, Order.STRONG)
    for peer in others:
        counts[peer] += 1
        session.wait(first_slot + peer, counts[peer], timeout, peer)
