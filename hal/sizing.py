# SPDX-License-Identifier: Apache-2.0
"""The symmetric buffer of an ExpertParallel in words. The numbers come from the kernels' own formula
(``hal/include/hal/buffer_layout.hpp``), never from a second one here."""

from __future__ import annotations

from dataclasses import dataclass

from hal._validate import complete_spec
from hal.config import ExpertParallelSpec


@dataclass(frozen=True)
class Part:
    """A named stretch of the window."""

    name: str
    nbytes: int
    formula: str


def buffer_parts(spec: ExpertParallelSpec, ranks: int, nodes: int) -> list[Part]:
    """The window's parts in order; their bytes add up to ``ExpertParallel.buffer_bytes``, the same on every rank.

    Raises ContractError for settings that an ExpertParallel would refuse.
    """
    from hal_host import _engine
    from hal_host.engine import shape_of

    complete = complete_spec(spec, ranks, timeout=1.0)
    parts = _engine.buffer_parts(shape_of(complete, ranks, nodes))
    return [Part(name, nbytes, _FORMULAS.get(name, "")) for name, nbytes in parts]


_FORMULAS = {
    "signals": "8-byte slots, signal stride apart: 1 to 2 x ranks for each step of a round",
    "headers": "2 rounds x ranks x 4 B x rows to each destination (schedules with a count exchange)",
    "counts": "num_buffers x ranks x 4 B x (1 + groups) (schedule latency)",
    "receive": "num_buffers x most rows that can arrive x (row + scales + 8 B x top_k)",
    "rail": "num_buffers x (nodes - 1) x max_tokens x (row + scales + 8 B x top_k) (hierarchical)",
    "gather": "num_buffers x (nodes - 1) x rows of a node for one home x combined row (hierarchical)",
    "home": "num_buffers x most rows that come back to one rank x combined row",
}
