# SPDX-License-Identifier: Apache-2.0
"""``transport=udma_emulated``: one rank's emulated UDMA device, whose symmetric heap is shared-memory windows.

Every word of hal/backend.py's Session is a launch of the kernel that a real device would run
(kernels_ascend/kernels/primitives.h); sources outside of symmetric memory are staged in it first, as UDMA needs.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from hal_host.shm import Shm

from hal.arrays import Buffer
from hal.errors import ContractError, HalError
from hal.ordering import Order, QuietScope, SignalOp, profile
from hal_ascend import _engine
from hal_ascend.barrier import meet

if TYPE_CHECKING:
    from hal.backend import Engine
    from hal.bootstrap import Bootstrap
    from hal.config import ExpertParallelSpec, HalConfig

SLOT_BYTES = 512
"""Between signal slots: two publishers never share a line of the L2 cache."""
LEAST_RING = 256
"""Blocks of a send ring: a submit batch of 128 and those that stay spare fit."""
STAGING_BYTES = 4 << 20
MOST_QUEUES = 30
"""Of 32 queue pairs to each peer, two are kept for hand-written descriptors."""


@dataclass(frozen=True)
class EmulatorOptions:
    """What the emulated device looks like, from ``HAL_UDMA_*`` variables; equal on all ranks."""

    cores: int = 2
    """Vector cores for each kernel."""
    sq_depth: int = 8192
    """64-byte blocks in a send ring (32768 on Ascend950), a power of two."""
    cq_depth: int = 8192

    def __post_init__(self) -> None:
        if self.cores < 1:
            raise ContractError(f"HAL_UDMA_CORES is {self.cores}; give at least 1")
        for name, depth, least in (("SQ", self.sq_depth, LEAST_RING), ("CQ", self.cq_depth, 16)):
            if depth < least or depth & (depth - 1):
                raise ContractError(f"HAL_UDMA_{name}_DEPTH is {depth}; give a power of two of at least {least}")

    @staticmethod
    def from_environment() -> EmulatorOptions:
        fields = {"cores": "HAL_UDMA_CORES", "sq_depth": "HAL_UDMA_SQ_DEPTH", "cq_depth": "HAL_UDMA_CQ_DEPTH"}
        given: dict[str, int] = {}
        for field, name in fields.items():
            try:
                given |= {field: int(os.environ[name])} if name in os.environ else {}
            except ValueError:
                raise ContractError(f"{name} is {os.environ[name]!r}; give an integer") from None
        return EmulatorOptions(**given)


class EmulatedAscendSession:
    """One rank's connection (hal/backend.py). One thread drives it."""

    def __init__(self, config: HalConfig, bootstrap: Bootstrap) -> None:
        """Collective."""
        if config.queues > MOST_QUEUES:
            raise ContractError(f"queues is {config.queues}; UDMA gives {MOST_QUEUES} to each peer at most")
        self.config, self.options = config, EmulatorOptions.from_environment()
        self.rank, self.world_size, self.queues = bootstrap.rank, bootstrap.world_size, config.queues
        self.profile = profile("udma")
        self.transport = Shm(config, bootstrap)
        try:
            options = self.options
            self.device = _engine.EmulatedSession(self.transport, self.queues, options.sq_depth, options.cq_depth)
            self._addresses: dict[int, int] = {}
            self._slots = self.allocate((config.signal_slots + self.world_size) * SLOT_BYTES)
            self._staging = self.allocate(STAGING_BYTES)
        except BaseException:
            self.transport.close()
            raise
        self._staged = 0
        self._barriers = [0] * self.world_size

    # --- symmetric memory ------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self._require_usable()
        window = self.transport.allocate(nbytes)
        self._addresses[window] = self.device.attach(window)
        return window

    def address(self, window: int) -> int:
        """Where this rank's part of a window lies."""
        return self._addresses[window]

    def view(self, window: int) -> Buffer:
        memory: Any = self.transport.memory(window)
        owner = np.frombuffer(memory, np.uint8)
        return Buffer(owner.ctypes.data, owner.shape, "uint8", "cpu", owner)

    def free(self, window: int) -> None:
        self.device.detach(window)
        del self._addresses[window]
        self.transport.free(window)

    # --- the ordering words ----------------------------------------------------------------------------------------

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None:
        self._require_usable()
        for begin, nbytes, address in self._registered(src):
            last = begin + nbytes == src.nbytes
            piece = Order.RELAXED if order is Order.STRONG and not last else order
            self.device.put(self._addresses[window] + dst_offset + begin, address, nbytes, peer, queue, int(piece))

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None:
        self._require_usable()
        kept = ctypes.c_uint64(value)  # by its name until it is copied: addressof holds no reference
        word = self._stage(ctypes.addressof(kept), 8)
        self.device.signal(self._slot(slot), word, peer, value, int(op), queue, int(order))

    def read_signal(self, slot: int) -> int:
        return self.wait(slot, 0, self.config.timeout, None)

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int:
        self._require_usable()
        return int(self.device.wait(self._slot(slot), at_least, -1 if source is None else source, timeout))

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        """UDMA has no smaller quiet than remote arrival, so both scopes are one."""
        self._require_usable()
        self.device.quiet(queue, -1 if peer is None else peer)

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        """``complete`` is a quiet of each queue."""
        self._require_usable()
        if complete:
            for queue in range(self.queues):
                self.device.quiet(queue, -1)
        meet(self, ranks, self._barriers, self.config.signal_slots, timeout)

    # --- the rest --------------------------------------------------------------------------------------------------

    def expert_parallel(self, spec: ExpertParallelSpec) -> Engine:
        self._require_usable()
        from hal_ascend.engine import AscendEngine

        engine: Engine = AscendEngine(self, spec)
        return engine

    @property
    def counters(self) -> dict[str, int]:
        """What the emulated engine did: wqes, cqes, doorbells, quiets, bytes."""
        return dict(self.device.counters)

    def abort(self, reason: str) -> None:
        self.transport.abort(reason)

    def close(self) -> None:
        self.transport.close()

    def _require_usable(self) -> None:
        if self.transport.failed:
            raise HalError("this communicator was closed or met a PeerTimeout, and can only be closed; connect again")

    def _slot(self, slot: int) -> int:
        return self._addresses[self._slots] + slot * SLOT_BYTES

    def _registered(self, src: Buffer) -> Iterator[tuple[int, int, int]]:
        """(begin, bytes, address) of pieces of ``src`` in symmetric memory, each to be put before the next is asked for."""
        if self._is_symmetric(src):
            yield 0, src.nbytes, src.ptr
            return
        for begin in range(0, src.nbytes, STAGING_BYTES // 2):
            nbytes = min(STAGING_BYTES // 2, src.nbytes - begin)
            yield begin, nbytes, self._stage(src.ptr + begin, nbytes)

    def _is_symmetric(self, src: Buffer) -> bool:
        return any(
            base <= src.ptr and src.ptr + src.nbytes <= base + self.view(window).nbytes
            for window, base in self._addresses.items()
        )

    def _stage(self, address: int, nbytes: int) -> int:
        """A copy that stays until every queue is quiet, which happens when the staging area is full."""
        aligned = -(-nbytes // 64) * 64
        if self._staged + aligned > STAGING_BYTES:
            for queue in range(self.queues):
                self.device.quiet(queue, -1)
            self._staged = 0
        target = self._addresses[self._staging] + self._staged
        ctypes.memmove(target, address, nbytes)
        self._staged += aligned
        return target


__all__: list[Any] = ["EmulatedAscendSession", "EmulatorOptions"]
