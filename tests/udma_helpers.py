# SPDX-License-Identifier: Apache-2.0
"""A small world of emulated PEs, driven one library call or one engine step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hal_ascend import _engine

HEAP = 1 << 20
DATA, FLAG, SOURCE, WORD = 0, 64 * 1024, 128 * 1024, 192 * 1024
"""Heap offsets: where rows land, where flags land, where rows are read, where flag values are read."""


class Rig:
    """``pes`` emulated PEs with script-driven cores; rings of ``sq_depth`` blocks."""

    def __init__(self, pes: int = 2, sq_depth: int = 64, **options: Any) -> None:
        options.setdefault("cq_depth", sq_depth)
        self.world = _engine.World(pes, HEAP, sq_depth=sq_depth, **options)
        self.cores = [self.world.core(pe) for pe in range(pes)]

    def bytes(self, pe: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.world.heap(pe), np.uint8)

    def words(self, pe: int) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.world.heap(pe), np.uint64)

    def word(self, pe: int, offset: int) -> int:
        return int(self.words(pe)[offset // 8])

    def set_word(self, pe: int, offset: int, value: int) -> None:
        self.words(pe)[offset // 8] = value

    def fill(self, pe: int, offset: int, nbytes: int, value: int) -> None:
        self.bytes(pe)[offset : offset + nbytes] = value

    def put(self, row: int, value: int, *, nbytes: int = 64, **post: Any) -> None:
        """Row ``row`` of PE 0 filled with ``value`` to the same row of the peer."""
        at = row * nbytes
        self.fill(0, SOURCE + at, nbytes, value)
        post.setdefault("pe", 1)
        post.setdefault("order", "relax")
        self.cores[0].post("put", DATA + at, SOURCE + at, nbytes, **post)

    def signal(self, value: int = 1, *, slot: int = 0, **post: Any) -> None:
        at = slot * 512
        self.set_word(0, WORD + at, value)
        post.setdefault("pe", 1)
        post.setdefault("order", "strong")
        self.cores[0].post("put", FLAG + at, WORD + at, 8, **post)

    def row(self, row: int, nbytes: int = 64, pe: int = 1) -> list[int]:
        return sorted(set(self.bytes(pe)[DATA + row * nbytes : DATA + (row + 1) * nbytes].tolist()))

    def step(self, *parts: str) -> str:
        """Takes the first enabled step whose text has all parts."""
        enabled = self.world.enabled()
        for i, text in enumerate(enabled):
            if all(part in text for part in parts):
                self.world.take(i)
                return str(text)
        raise AssertionError(f"no step with {parts} in {enabled}")

    def can(self, *parts: str) -> bool:
        return any(all(part in text for part in parts) for text in self.world.enabled())

    def take_all(self, qp: int = 0) -> None:
        """The engine takes every descriptor that the doorbell covers on this QP."""
        while self.can(f"QP {qp} take"):
            self.step(f"QP {qp} take")


@contextlib.contextmanager
def faults(rule: int) -> Iterator[None]:
    """The emulator must object, naming this rule."""
    with pytest.raises(_engine.Fault) as caught:
        yield
    assert caught.value.rule == rule, str(caught.value)


@contextlib.contextmanager
def hangs() -> Iterator[None]:
    with pytest.raises(_engine.Hang):
        yield
