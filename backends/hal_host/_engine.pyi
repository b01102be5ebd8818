# SPDX-License-Identifier: Apache-2.0
# Types of the compiled module (kernels_host/). Each part describes what it binds.
from collections.abc import Sequence
from typing import Any

# --- kernels_host/transport ---

class Transport:
    def __init__(self, rank: int, world_size: int, queues: int) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def queues(self) -> int: ...
    @property
    def failed(self) -> bool: ...
    def set_failed(self) -> None: ...
    def put(self, window: int, queue: int, peer: int, dst_offset: int, src: Any, order: int) -> None: ...
    def signal(self, window: int, queue: int, peer: int, slot_offset: int, value: int, op: int, order: int) -> None: ...
    def wait(
        self, window: int, slot_offset: int, at_least: int, source: int, queue: int, stage: str, timeout: float
    ) -> int: ...
    def quiet(self, queue: int, peer: int, scope: int) -> None: ...

class ShmSegment:
    @staticmethod
    def create(nbytes: int) -> int: ...

class ShmTransport(Transport):
    def __init__(self, rank: int, world_size: int, queues: int, links: Sequence[int]) -> None: ...
    def map(self, fds: Sequence[int], nbytes: int) -> int: ...
    def unmap(self, window: int) -> None: ...
    def segment(self, window: int) -> ShmSegment: ...
    def find_fault(self, source: int) -> tuple[int, str] | None: ...
    def publish_closed(self) -> None: ...
    def publish_failed(self, fault_rank: int, reason: str) -> None: ...

class ShmFabric:
    def __init__(self, transport: ShmTransport, window: int, timeout: float) -> None: ...
    @property
    def size(self) -> int: ...

class AnyFabric:
    def __init__(self, transport: Transport, window: int, timeout: float) -> None: ...
    @property
    def size(self) -> int: ...

def memory(ptr: int, nbytes: int, readonly: bool) -> memoryview: ...

# --- kernels_host/ep ---

class Layout:
    __members__: dict[str, Layout]

class Schedule:
    __members__: dict[str, Schedule]

class Completion:
    __members__: dict[str, Completion]

class Element:
    __members__: dict[str, Element]

class EpShape:
    ranks: int
    nodes: int
    num_experts: int
    top_k: int
    max_tokens: int
    alignment: int
    num_buffers: int
    scale_dim: int
    row_bytes: int
    combine_row_bytes: int
    signal_stride: int
    layout: Layout
    schedule: Schedule
    completion: Completion

def buffer_parts(shape: EpShape) -> list[tuple[str, int]]: ...

class State:
    @property
    def tokens(self) -> int: ...
    @property
    def rows(self) -> int: ...

class DispatchRound:
    @property
    def slot(self) -> int: ...
    @property
    def state(self) -> State: ...

class CombineRound:
    @property
    def state(self) -> State: ...

class ThreadWorld:
    timeout: float
    def __init__(self, ranks: int, queues: int, nbytes: int, timeout: float, lazy: bool) -> None: ...

class ThreadFabric:
    def __init__(self, world: ThreadWorld, rank: int) -> None: ...
    @property
    def size(self) -> int: ...

class _Kernels:
    # Addresses are integers, 0 = not given.
    def dispatch_send(
        self,
        slot: int,
        x: int,
        tokens: int,
        topk_idx: int,
        idx_is_int64: bool,
        topk_weights: int,
        scales: int,
        reused: State | None,
    ) -> DispatchRound: ...
    def rows(self, round: DispatchRound) -> int: ...
    def received_x(self, round: DispatchRound) -> int: ...
    def dispatch_recv(
        self,
        round: DispatchRound,
        scales: int,
        topk_idx: int,
        topk_weights: int,
        tokens_per_expert: int,
        expert_offsets: int,
    ) -> None: ...
    def combine_send(
        self, x: int, state: State, topk_weights: int, returns_weights: bool, weighted: bool, kept: bool
    ) -> CombineRound: ...
    def combine_recv(self, round: CombineRound, bias0: int, bias1: int, y: int, topk_weights: int) -> None: ...

class ShmKernels(_Kernels):
    def __init__(self, fabric: ShmFabric, shape: EpShape, combine_element: Element) -> None: ...

class AnyKernels(_Kernels):
    def __init__(self, fabric: AnyFabric, shape: EpShape, combine_element: Element) -> None: ...

class ThreadKernels(_Kernels):
    def __init__(self, fabric: ThreadFabric, shape: EpShape, combine_element: Element) -> None: ...

def window_address(fabric: ShmFabric | AnyFabric | ThreadFabric) -> int: ...

# --- what the other parts bind and do not describe here ---

def __getattr__(name: str) -> Any: ...
