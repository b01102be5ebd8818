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


UNSUPPORTED: list[Entry] = []
"""Settings that the target refuses with a ContractError; test_refused.py checks that it does."""

EXPECTED_FAILURE: list[Entry] = []
"""Tests that ought to pass and do not yet (strict: passing is a failure)."""


def find(table: list[Entry], target: str, test: str, case: Any) -> Entry | None:
    return next((entry for entry in table if entry.covers(target, test, case)), None)
