# SPDX-License-Identifier: Apache-2.0
"""The ordering contract's words, and what each transport promises about them (docs/contract.md).

The scope of every promise is one origin rank, one target rank (peer) and one queue. Nothing is promised across queues
or peers.
"""

from __future__ import annotations

import enum


class Order(enum.IntEnum):
    """How an operation is ordered against the others of its (peer, queue)."""

    NONE = 0
    """Outside every later guarantee except ``quiet``."""
    RELAXED = 1
    """May pass and be passed by other relaxed operations; covered by a later strong one."""
    STRONG = 2
    """Takes effect only after every earlier relaxed or strong operation of this (peer, queue) has completed at the
    target. A later relaxed operation may still pass it."""


class SignalOp(enum.IntEnum):
    """What a signal does to its 8-byte slot."""

    ADD = 0
    SET = 1


class QuietScope(enum.IntEnum):
    """What ``quiet`` waits for."""

    SOURCE = 0
    """This rank's earlier operations no longer read their sources."""
    REMOTE = 1
    """They are complete and visible at the target (not: consumed by it)."""
