# SPDX-License-Identifier: Apache-2.0
"""What a target does not do, with the reason. An entry that no longer holds fails the suite, so that it is removed."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """Tests (a name pattern) on a target, for the cases whose settings equal ``where``."""

    target: str
    reason: str
    test: str = "*"
    where: Mapping[str, Any] = field(default_factory=dict)

    def covers(self, target: str, test: str, case: Any) -> bool:
        return (
            fnmatch.fnmatch(target, self.target)
            and fnmatch.fnmatch(test, self.test)
            and all(case is not None and getattr(case, name) == value for name, value in self.where.items())
        )


_UDMA = "completion protocols of UDMA queues: NVLink stores have neither queue pairs nor completion entries"

UNSUPPORTED: list[Entry] = [
    *(
        Entry("cuda/*", _UDMA, where={"completion": completion})
        for completion in ("strong_signal_no_cqe", "strong_last", "flag_in_block")
    ),
]
"""Settings that the target refuses with a ContractError; test_refused.py checks that it does."""

EXPECTED_FAILURE: list[Entry] = [
    Entry(
        "cuda/lsa",
        "a dispatch that reuses a handle does not wait for the GPU, so its rank is told by its next call",
        "test_a_rank_that_reuses_a_handle_while_another_exchanges_counts",
    ),
    *(
        Entry(
            "cuda/*",
            "the only slot is receive slot and combine's scratch, so a combine and a dispatch cannot both be on their way",
            "test_halves_leave_room_for_other_work",
            {"num_buffers": 1, "schedule": schedule},
        )
        for schedule in ("direct", "hierarchical")
    ),
]
"""Tests that ought to pass and do not yet (strict: passing is a failure)."""


def find(table: list[Entry], target: str, test: str, case: Any) -> Entry | None:
    return next((entry for entry in table if entry.covers(target, test, case)), None)
