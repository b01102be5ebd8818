# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine of one ExpertParallel: the host's engine (leases, outputs) around the Ascend C kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal_host._engine import buffer_parts as window_sizes
from hal_host.engine import HostEngine, shape_of

from hal.sizing import Part, window_parts
from hal_ascend import _engine

if TYPE_CHECKING:
    from hal.config import ExpertParallelSpec
    from hal_ascend.session import EmulatedAscendSession

SIGNAL_STRIDE = 512
"""Bytes between signal slots: two publishers never share a line of the L2 cache."""
ELEMENTS = {"bfloat16": 0, "float16": 1, "float32": 2}


def ascend_shape(spec: ExpertParallelSpec, ranks: int, nodes: int) -> Any:
    """The settings as the kernels take them."""
    shape = shape_of(spec, ranks, nodes)
    shape.signal_stride = SIGNAL_STRIDE
    return shape


def memory_bytes(shape: Any) -> int:
    """Symmetric memory: the window that all backends share, and the registered staging behind it."""
    return int(_engine.window_bytes(shape) + _engine.staging_bytes(shape))


def buffer_parts(spec: ExpertParallelSpec, ranks: int, nodes: int) -> list[Part]:
    """What :func:`memory_bytes` consists of."""
    shape = ascend_shape(spec, ranks, nodes)
    depth = "num_buffers x " if spec.completion == "strong_signal_no_cqe" else ""
    staging = f"sources, {depth}(max_tokens x (row + scales + 8 B x top_k) + most rows that can arrive x combined row)"
    return [*window_parts(window_sizes(shape), SIGNAL_STRIDE), Part("staging", _engine.staging_bytes(shape), staging)]


class AscendEngine(HostEngine):
    """The Ascend kernels' :class:`hal.backend.Engine`, here on the emulated device, whose memory the host can read."""

    def __init__(self, session: EmulatedAscendSession, spec: ExpertParallelSpec) -> None:
        """Collective. CapacityError if a full round does not fit the send rings (completion strong_signal_no_cqe)."""
        shape = ascend_shape(spec, session.world_size, session.config.topology.nodes)
        _engine.require_ring(shape, session.options.sq_depth)
        self._session: Any = session
        self._window = session.allocate(memory_bytes(shape))
        base = session.address(self._window)
        timeout = session.config.timeout if spec.timeout is None else spec.timeout
        kernels = _engine.Kernels(
            session.device, shape, session.rank, ELEMENTS[spec.combined_dtype], base, timeout, session.options.cores
        )
        self._assemble(kernels, spec, shape, base, session.view(self._window).owner)

    @classmethod
    def over_kernels(cls, kernels: Any, spec: ExpertParallelSpec, shape: Any, base: int, keep: Any) -> AscendEngine:
        """An engine over kernels whose window at ``base`` the caller owns; ``keep`` holds it alive."""
        self = cls.__new__(cls)
        self._session, self._window = None, None
        self._assemble(kernels, spec, shape, base, keep)
        return self

    def _assemble(self, kernels: Any, spec: ExpertParallelSpec, shape: Any, base: int, keep: Any) -> None:
        self.spec = spec
        self.buffer_bytes = memory_bytes(shape)
        self._kernels, self._fabric, self._base = kernels, keep, base
        self._local_experts = spec.num_experts // shape.ranks
        self._free = list(range(spec.num_buffers - 1, -1, -1))
        self._in_flight, self._flight_limit = 0, max(1, spec.num_buffers - 1)
        self._copies_sources = False  # the kernels stage every source in registered memory

    def _combine_round(
        self, x: int, state: Any, topk_weights: int, returns_weights: bool, weighted: bool, kept: bool
    ) -> Any:
        # Rows are staged in registered memory whether ``x`` is ``kept`` or not: no peer can read anything else.
        return self._kernels.combine_send(x, state, topk_weights, returns_weights, weighted)

    @property
    def traffic(self) -> dict[str, int]:
        """Software counters of what this rank's kernels sent: bytes of data, flags and signals; rows; signals."""
        return dict(self._kernels.traffic)
