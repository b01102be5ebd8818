# SPDX-License-Identifier: Apache-2.0
"""The seam between the interface and a device family.

A *backend* owns a device family: its arrays, its streams, its kernels. A *transport* moves bytes for a backend. Both are
found by entry point (``hal.backends``, ``hal.transports``), are cheap to enumerate, and load nothing until used. Built-in
ones register exactly as a stranger's would.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from hal.arrays import Buffer
    from hal.bootstrap import Bootstrap
    from hal.config import ExpertParallelSpec, HalConfig
    from hal.ordering import Order, OrderingProfile, QuietScope, SignalOp


@dataclass(frozen=True)
class Probe:
    """What a cheap look says: usable or not, why not, and how to mend it. Loads no driver."""

    usable: bool
    reason: str = ""
    fix: str = ""


@dataclass(frozen=True)
class BackendSpec:
    """A backend by name. ``probe`` is cheap; ``load`` imports the rest and returns a :class:`Backend`."""

    name: str
    probe: Callable[[], Probe]
    load: Callable[[], Backend]
    default_transport: str
    description: str = ""


@dataclass(frozen=True)
class TransportSpec:
    """A transport by name, for the backends it names. ``load`` returns a factory called by the backend."""

    name: str
    backends: tuple[str, ...]
    probe: Callable[[], Probe]
    load: Callable[[], Callable[[HalConfig, Bootstrap], Any]]
    description: str = ""
    brings_device: bool = False
    """It emulates the backend's device, so it is usable where the backend's own probe says no."""


class Backend(Protocol):
    """A loaded backend. Loading it needs no device; connecting does.

    It may have ``buffer_parts`` (spec with its defaults filled in, ranks, nodes, transport), which gives the
    :class:`hal.sizing.Part` that ``buffer_bytes`` of such an ExpertParallel consists of, for ``hal size``; and
    ``check_kernels`` (spec, ranks, nodes, seeds, rounds, mutation), which runs its kernels on an emulated device, one
    schedule for each seed, and gives ``runs``, ``steps`` and ``findings`` (``seed``, ``text``), for ``hal check NAME``.
    """

    name: str

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Session:
        """Join the run as this rank; collective. ``bootstrap`` has rank, world size and small collective exchanges."""


class Session(Protocol):
    """One rank's connection: symmetric memory, queues and the four ordering words. All offsets are bytes."""

    rank: int
    world_size: int
    queues: int
    profile: OrderingProfile

    def allocate(self, nbytes: int) -> int:
        """Collective. Symmetric memory of the same size on every rank, zeroed; returns its id."""

    def view(self, window: int) -> Buffer:
        """This rank's part of a window."""

    def free(self, window: int) -> None: ...

    def put(self, window: int, dst_offset: int, src: Buffer, peer: int, queue: int, order: Order) -> None: ...

    def signal(self, slot: int, peer: int, value: int, op: SignalOp, queue: int, order: Order) -> None: ...

    def read_signal(self, slot: int) -> int: ...

    def wait(self, slot: int, at_least: int, timeout: float, source: int | None) -> int: ...

    def quiet(self, queue: int, peer: int | None, scope: QuietScope) -> None: ...

    def barrier(self, ranks: Sequence[int], complete: bool, timeout: float) -> None: ...

    def expert_parallel(self, spec: ExpertParallelSpec) -> Engine:
        """The dispatch and combine engine for one ExpertParallel; collective."""

    def abort(self, reason: str) -> None:
        """Tell the peers at once that this rank failed, and why. ``close`` is still called afterwards."""

    def close(self) -> None:
        """Idempotent; never blocks on a dead peer."""


@dataclass(frozen=True)
class Received:
    """What an engine's dispatch gives (docs/contract.md, section 1). ``state`` is the engine's own part of the handle."""

    x: Buffer
    scales: Buffer | None
    topk_idx: Buffer
    topk_weights: Buffer
    tokens_per_expert: Buffer
    expert_offsets: Buffer | None
    state: Any


class Engine(Protocol):
    """Dispatch and combine of one ExpertParallel on one rank. Inputs were validated by hal/expert_parallel.py.

    The halves: ``*_send`` returns once this rank's rows are on their way and their sources may change; ``*_recv`` waits
    for the peers' rows. ``stream`` is the caller's stream as an integer on devices that have streams, else None.

    An engine that can do both halves in one go (one kernel on a device) may have ``dispatch`` and ``combine`` besides,
    which take what the halves take (``combine``: x, state, topk_weights, weighted, bias, stream) and give what the second
    half gives; blocking calls then use them. One that combines faster from memory of its own choice may have
    ``expert_output`` (state, an array to allocate like, stream), which gives it as a buffer [N, hidden].
    """

    buffer_bytes: int
    """Symmetric memory for each rank, as printed by ``hal size``."""
    device: str
    """Where inputs must be and results are: ``cpu``, ``cuda:0``, ``npu:0``. Others are refused before anything is sent."""

    def dispatch_send(
        self,
        x: Buffer,
        topk_idx: Buffer | None,
        topk_weights: Buffer | None,
        scales: Buffer | None,
        state: Any | None,
        stream: int | None,
    ) -> Any: ...

    def dispatch_recv(self, pending: Any, stream: int | None) -> Received: ...

    def combine_send(
        self, x: Buffer, state: Any, topk_weights: Buffer | None, weighted: bool, stream: int | None
    ) -> Any: ...

    def combine_recv(self, pending: Any, bias: Sequence[Buffer], stream: int | None) -> tuple[Buffer, Buffer | None]:
        """(y [T, H], topk_weights [T, k] if they were sent)."""

    def close(self) -> None: ...
