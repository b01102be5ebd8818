# SPDX-License-Identifier: Apache-2.0
"""The settings that the suite runs: every pair of values of any two settings meets in at least one case."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from hal.config import QUANTISED_DTYPES

VALUES: dict[str, tuple[Any, ...]] = {
    "schedule": ("direct", "hierarchical", "latency"),
    "layout": ("rank", "expert"),
    "completion": ("strong_signal", "strong_signal_no_cqe", "strong_last", "flag_in_block"),
    "dtype": ("bfloat16", "float32", "float16", *QUANTISED_DTYPES),
    "shape": ((2, 1), (1, 1), (3, 1), (4, 2), (4, 1), (6, 3)),  # ranks, nodes
    "alignment": (1, 4, 16),
    "top_k": (3, 1, 8),
    "num_buffers": (2, 1, 4),
    "hidden": (32, 16, 272),
}
MAX_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """One ExpertParallel's settings and the ranks to run it on."""

    schedule: str
    layout: str
    completion: str
    dtype: str
    shape: tuple[int, int]
    alignment: int
    top_k: int
    num_buffers: int
    hidden: int

    @property
    def ranks(self) -> int:
        return self.shape[0]

    @property
    def nodes(self) -> int:
        return self.shape[1]

    @property
    def num_experts(self) -> int:
        """Two a rank, and at least as many as a token names."""
        return self.ranks * max(2, -(-self.top_k // self.ranks))

    @property
    def scale_dim(self) -> int:
        return self.hidden // 16 if self.dtype in QUANTISED_DTYPES else 0

    @property
    def combine_dtype(self) -> str:
        return "bfloat16" if self.dtype in QUANTISED_DTYPES else self.dtype

    @property
    def settings(self) -> dict[str, Any]:
        """Arguments of ``comm.expert_parallel``."""
        names = (
            "schedule",
            "layout",
            "completion",
            "dtype",
            "alignment",
            "top_k",
            "num_buffers",
            "hidden",
            "num_experts",
        )
        return {**{n: getattr(self, n) for n in names}, "scale_dim": self.scale_dim, "max_tokens": MAX_TOKENS}

    def __str__(self) -> str:
        parts = [self.schedule, self.layout, self.completion, self.dtype, f"r{self.ranks}n{self.nodes}"]
        return "-".join([*parts, f"a{self.alignment}", f"k{self.top_k}", f"b{self.num_buffers}", f"h{self.hidden}"])


def possible(chosen: dict[str, Any]) -> bool:
    """Whether a partial choice breaks no rule between two settings."""
    return chosen.get("layout") != "rank" or chosen.get("alignment", 1) == 1


def pairwise() -> list[Case]:
    """A small set of cases in which every possible pair of values meets. Greedy and deterministic."""
    names = list(VALUES)
    missing = {
        ((a, va), (b, vb))
        for a, b in itertools.combinations(names, 2)
        for va, vb in itertools.product(VALUES[a], VALUES[b])
        if possible({a: va, b: vb})
    }
    cases: list[Case] = []
    while missing:
        chosen: dict[str, Any] = dict(min(missing, key=repr))
        for name in names:
            if name not in chosen:
                fits = [value for value in VALUES[name] if possible({**chosen, name: value})]
                chosen[name] = max(fits, key=lambda value: len(_pairs({**chosen, name: value}, names) & missing))
        missing -= _pairs(chosen, names)
        cases.append(Case(**chosen))
    return cases


def _pairs(chosen: dict[str, Any], names: list[str]) -> set[Any]:
    return set(itertools.combinations([(name, chosen[name]) for name in names if name in chosen], 2))


CASES = pairwise()
PLAIN = Case("direct", "rank", "strong_signal", "float32", (2, 1), 1, 3, 2, 32)
"""For promises that have nothing to do with the settings."""
