# SPDX-License-Identifier: Apache-2.0
"""``transport=aclshmem``: one rank's session on an Ascend NPU. Never run on an NPU (docs/ascend.md says what to run first).

The library does the work; this file gives it memory, streams and time limits. ``platform`` is what torch_npu supplies.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from hal.arrays import Buffer
from hal.errors import ContractError, HalError, PeerTimeout
from hal.ordering import Order, QuietScope, SignalOp, profile
from hal_ascend.barrier import meet
from hal_ascend.library import Library

if TYPE_CHECKING:
    from hal.backend import Engine
    from hal.bootstrap import Bootstrap
    from hal.config import ExpertParallelSpec, HalConfig

SLOT_BYTES = 512
STAGING_BYTES = 4 << 20
UNIQUE_ID_BYTES = 512
PUT, SIGNAL_SET, SIGNAL_ADD, QUIET, WAIT = range(5)
"""kernels_ascend/kernels/primitives_args.h."""


class Platform(Protocol):
    """Tensors and streams of the device."""

    device: int

    def empty(self, shape: tuple[int, ...], dtype: str) -> Buffer: ...

    def view(self, address: int, nbytes: int, owner: Any) -> Buffer: ...

    def stream(self) -> int | None: ...


class TorchNpu:
    """torch_npu; imported here and nowhere else, since it breaks ``import torch`` where CANN is missing."""

    def __init__(self, rank: int) -> None:
        torch: Any = importlib.import_module("torch")
        importlib.import_module("torch_npu")  # adds torch.npu
        self._torch = torch
        self.device = int(os.environ.get("LOCAL_RANK") or rank % max(1, torch.npu.device_count()))
        torch.npu.set_device(self.device)

    def empty(self, shape: tuple[int, ...], dtype: str) -> Buffer:
        tensor = self._torch.empty(shape, dtype=getattr(self._torch, dtype), device=f"npu:{self.device}")
        return Buffer(tensor.data_ptr(), shape, dtype, f"npu:{self.device}", tensor)

    def view(self, address: int, nbytes: int, owner: Any) -> Buffer:
        return Buffer(address, (nbytes,), "uint8", f"npu:{self.device}", owner)

    def stream(self) -> int | None:
        return int(self._torch.npu.current_stream(self.device).npu_stream)


def _positive(name: str, default: int) -> int:
    """A number from the environment."""
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ContractError(f"{name} is {text!r}; give a number of at least 1")
    return int(text)


class Memory:
    """A symmetric allocation; views of it hold it."""

    def __init__(self, library: Library, nbytes: int) -> None:
        self._library, self.nbytes = library, nbytes
        address = ctypes.c_uint64()
        library.call("allocate", nbytes, ctypes.byref(address))
        self.address = address.value

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self._library.call("free", self.address)


class AclshmemSession:
    """One rank's connection (hal/backend.py). One thread drives it; one session for each process."""

    def __init__(
        self, config: HalConfig, bootstrap: Bootstrap, library: Library | None = None, platform: Platform | None = None
    ) -> None:
        """Collective. The unique id is rank 0's; the number of QPs is set before initialisation, equal on all ranks."""
        self.config, self._bootstrap = config, bootstrap
        self.rank, self.world_size, self.queues = bootstrap.rank, bootstrap.world_size, config.queues
        self.profile = profile("udma")
        self.library = library or Library()
        self.platform: Platform = platform or TorchNpu(self.rank)
        self.cores, heap = _positive("HAL_ASCEND_CORES", 8), _positive("HAL_ASCEND_HEAP_BYTES", 4 << 30)
        bootstrap.agree("Ascend session", {"cores": self.cores, "heap bytes": heap, "queues": self.queues})
        uid = ctypes.create_string_buffer(UNIQUE_ID_BYTES)
        if self.rank == 0:
            self.library.call("unique_id", uid, UNIQUE_ID_BYTES)
        given = bytes.fromhex(bootstrap.all_gather(uid.raw.hex() if self.rank == 0 else "", "aclshmem id")[0])
        self.library.call(
            "init", self.platform.device, self.rank, self.world_size, given, len(given), heap, self.queues,
            config.timeout, seconds=config.timeout,
        )  # fmt: skip
        self._failed = self._closed = False
        self._windows: dict[int, Memory] = {}
        self._next = self._staged = 0
        self._slots = self.allocate((config.signal_slots + self.world_size) * SLOT_BYTES)
        self._staging = self.allocate(STAGING_BYTES)
        self._barriers = [0] * self.world_size

    # --- symmetric memory ------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> int:
        self._require_usable()
        sizes = self._bootstrap.all_gather(nbytes, "window")
        if any(size != nbytes for size in sizes):
            listed = ", ".join(f"rank {rank}: {size}" for rank, size in enumerate(sizes))
            raise ContractError(f"a window has the same size on every rank, not {listed} bytes")
        self._next += 1
        self._windows[self._next] = Memory(self.library, nbytes)
        # A window is zeroed before any peer may write to it (rule 59).
        self._bootstrap.barrier()
        return self._next

    def address(self, window: int) -> int:
        return self._windows[window].address

    def memory(self, window: int) -> Memory:
        return self._windows[window]

    def view(self, window: int) -> Buffer:
        memory = self._windows[window]
        return self.platform.view(memory.address, memory.nbytes, memory)

    def free(self, window: int) -> None:
        del self._windows[window]

    # --- the ordering words ----------------------------------------------------------------------------------------

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None:
        target = self.address(window) + dst_offset
        for begin in range(0, src.nbytes, STAGING_BYTES // 2):
            nbytes = min(STAGING_BYTES // 2, src.nbytes - begin)
            last = begin + nbytes == src.nbytes
            piece = Order.RELAXED if order is Order.STRONG and not last else order
            staged = self._stage(src.ptr + begin, nbytes, src.device != "cpu")
            self._primitive(PUT, target + begin, staged, nbytes, peer, queue, piece)

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None:
        word = ctypes.c_uint64(value)
        staged = self._stage(ctypes.addressof(word), 8, False)
        kind = SIGNAL_ADD if op is SignalOp.ADD else SIGNAL_SET
        self._primitive(kind, self._slot(slot), staged, 8, peer, queue, order, value)

    def read_signal(self, slot: int) -> int:
        return self._primitive(WAIT, self._slot(slot))

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int:
        """The device's own wait has no limit, so the kernel's loop has one."""
        start = time.monotonic()
        seen = self._primitive(WAIT, self._slot(slot), at_least=at_least, timeout=timeout)
        if seen >= at_least:
            return seen
        self._failed = True
        rank = self.rank if source is None else source
        raise PeerTimeout(rank, "wait", expected=at_least, seen=seen, seconds=time.monotonic() - start)

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None:
        self._primitive(QUIET, 0, peer=-1 if peer is None else peer, queue=queue)

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None:
        if complete:
            for queue in range(self.queues):
                self.quiet(queue, None, QuietScope.REMOTE)
        meet(self, ranks, self._barriers, self.config.signal_slots, timeout)

    # --- the rest --------------------------------------------------------------------------------------------------

    def expert_parallel(self, spec: ExpertParallelSpec) -> Engine:
        self._require_usable()
        from hal_ascend.npu_engine import NpuEngine

        engine: Engine = NpuEngine(self, spec)
        return engine

    def mark_failed(self) -> None:
        self._failed = True

    def abort(self, reason: str) -> None:
        """Peers learn of it through their own time limits: aclshmem has no way to tell them."""
        self._failed = True

    def close(self) -> None:
        """Finalisation is collective, so after a failure the library is left to the process's end (rule 68)."""
        if self._closed:
            return
        self._closed = True
        if self._failed:
            return
        self._windows.clear()
        self.library.call("finalize")

    def _require_usable(self) -> None:
        if getattr(self, "_closed", False) or getattr(self, "_failed", False):
            raise HalError("this communicator was closed or met a PeerTimeout, and can only be closed; connect again")

    def _slot(self, slot: int) -> int:
        return self.address(self._slots) + slot * SLOT_BYTES

    def _primitive(
        self, kind: int, dst: int, src: int = 0, nbytes: int = 0, peer: int = -1, queue: int = 0,
        order: Order = Order.NONE, value: int = 0, at_least: int = 0, timeout: float | None = None,
    ) -> int:  # fmt: skip
        self._require_usable()
        seen = ctypes.c_uint64()
        limit = self.config.timeout if timeout is None else timeout
        self.library.call(
            "primitive", kind, dst, src, nbytes, peer, queue, int(order), value, at_least, limit, ctypes.byref(seen),
            self.platform.stream(), seconds=limit,
        )  # fmt: skip
        return seen.value

    def _stage(self, address: int, nbytes: int, on_device: bool) -> int:
        aligned = -(-nbytes // 64) * 64
        if self._staged + aligned > STAGING_BYTES:
            for queue in range(self.queues):
                self.quiet(queue, None, QuietScope.SOURCE)
            self._staged = 0
        target = self.address(self._staging) + self._staged
        self._staged += aligned
        if on_device:
            self._primitive(PUT, target, address, nbytes, self.rank)  # a copy on the device itself
        else:
            self.library.call("write", target, address, nbytes)
        return target
