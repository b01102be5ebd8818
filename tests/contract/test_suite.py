# SPDX-License-Identifier: Apache-2.0
"""The suite's own promises: the cases cover every pair, the tables are about things that exist, and poison bites."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import tables
from cases import CASES, VALUES, possible
from layer import same
from targets import all_targets, poison


def test_every_pair_of_settings_meets_in_a_case():
    for a, b in itertools.combinations(VALUES, 2):
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        wanted = {(x, y) for x, y in itertools.product(VALUES[a], VALUES[b]) if possible({a: x, b: y})}
        assert wanted <= met, f"{a} × {b}: {wanted - met}"


def test_the_tables_name_targets_settings_and_reasons():
    names = [str(target) for target in all_targets()]
    for entry in (*tables.UNSUPPORTED, *tables.EXPECTED_FAILURE):
        assert entry.reason
        assert any(entry.covers(name, entry.test, None) or entry.where for name in names)
        assert set(entry.where) <= set(VALUES)


def test_the_embedded_backend_is_always_usable():
    assert [t.reason for t in all_targets() if t.backend == "host"] == [""]


def test_the_comparison_sees_one_bit():
    wanted = np.zeros((3, 4), np.float32)
    given = wanted.copy()
    same("x", given, wanted)
    given[1, 2] = -0.0
    with pytest.raises(AssertionError, match=r"x differs in rows \[1\] of 3"):
        same("x", given, wanted)
    poison(given)
    with pytest.raises(AssertionError, match=r"rows \[0 1 2\]"):
        same("x", given, wanted)
