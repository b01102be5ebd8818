# SPDX-License-Identifier: Apache-2.0
"""Every defect of the mutation list is noticed, and the same run without it is not blamed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hal_ascend import _engine
from udma_mutations import DEFECTS, Defect, judge, line

PAGE = Path(__file__).resolve().parents[1] / "docs" / "ascend.md"


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: d.name)
def test_the_defect_is_caught_and_the_table_says_how(defect: Defect) -> None:
    verdict = judge(defect)
    assert verdict.healthy == {defect.healthy}
    assert verdict.caught, "no seed noticed"
    head = line(verdict).rpartition(" | ")[0]
    rows = [row for row in PAGE.read_text(encoding="utf-8").splitlines() if row.startswith(head)]
    assert rows, "renew the table: python tests/udma_mutations.py"
    assert any(end in rows[0] for end in verdict.caught), f"{rows[0]} does not name any of {verdict.caught}"


def test_the_list_is_complete() -> None:
    assert {d.name for d in DEFECTS} | {"none"} == set(_engine.Mutation.__members__)
