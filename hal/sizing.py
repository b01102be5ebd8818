# SPDX-License-Identifier: Apache-2.0
"""The symmetric buffer of an ExpertParallel in words. The numbers come from the backend, which has its kernels' own
formula, never from a second one here."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hal._validate import complete_spec
from hal.config import ExpertParallelSpec
from hal.errors import ContractError
from hal.registry import known_backend, known_transport


@dataclass(frozen=True)
class Part:
    """A named stretch of the window."""

    name: str
    nbytes: int
    formula: str


def buffer_parts(
    spec: ExpertParallelSpec, ranks: int, nodes: int, backend: str = "host", transport: str | None = None
) -> list[Part]:
    """The parts of ``backend``'s buffer, in order; their bytes add up to ``ExpertParallel.buffer_bytes`` on every rank.
    ``transport``: None = the backend's default.

    No device is needed. Raises ContractError for settings that an ExpertParallel would refuse.
    """
    complete = complete_spec(spec, ranks, timeout=1.0)
    if transport is not None:
        known_transport(transport, backend)
    parts: Callable[..., list[Part]] | None = getattr(known_backend(backend).load(), "buffer_parts", None)
    if parts is None:
        raise ContractError(
            f"backend '{backend}' does not explain its buffer: make the ExpertParallel and read its buffer_bytes"
        )
    return parts(complete, ranks, nodes, transport)


def window_parts(sizes: Iterable[tuple[str, int]], signal_stride: int) -> list[Part]:
    """The parts of ``hal/include/hal/buffer_layout.hpp`` in words, for the backends whose kernels use it."""
    return [Part(name, nbytes, _FORMULAS[name].format(signal_stride=signal_stride)) for name, nbytes in sizes]


_FORMULAS = {
    "signals": "8-byte slots, {signal_stride} B apart: 1 to 2 x ranks for each step of a round",
    "headers": "2 rounds x ranks x 4 B x rows to each destination (schedules with a count exchange)",
    "counts": "num_buffers x ranks x 4 B x (1 + groups) (schedule latency)",
    "receive": "num_buffers x most rows that can arrive x (row + scales + 8 B x top_k)",
    "rail": "num_buffers x (nodes - 1) x max_tokens x (row + scales + 8 B x top_k) (hierarchical)",
    "gather": "num_buffers x (nodes - 1) x rows of a node for one home x combined row (hierarchical)",
    "home": "num_buffers x most rows that come back to one rank x combined row",
}
