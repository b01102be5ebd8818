# SPDX-License-Identifier: Apache-2.0
"""Every test of this folder that takes ``target`` runs on every target, and one that takes ``case`` in every case."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tables
from cases import CASES, PLAIN
from targets import all_targets


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", help="backend, or backend/transport, for the contract suite (default: all)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "target" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--target", default=None)
    targets = [t for t in all_targets() if wanted in (None, t.backend, str(t))]
    if "case" not in metafunc.fixturenames:
        params = [pytest.param(t, marks=_marks(metafunc, t, PLAIN)) for t in targets]
        metafunc.parametrize("target", params, ids=[str(t) for t in targets])
        return
    cases = getattr(metafunc.function, "cases", CASES)
    only = getattr(metafunc.function, "only", lambda case: True)
    pairs = [(t, case) for t in targets for case in (cases if not t.reason else cases[:1]) if only(case)]
    marks = [pytest.param(t, case, marks=_marks(metafunc, t, case), id=f"{t}-{case}") for t, case in pairs]
    metafunc.parametrize(("target", "case"), marks)


def _marks(metafunc, target, case):
    """Skips and expected failures, each with its reason."""
    test = metafunc.function.__name__
    marks = [getattr(pytest.mark, target.backend)] if not target.on_cpu and target.backend in ("cuda", "ascend") else []
    if target.reason:
        return [*marks, pytest.mark.skip(reason=f"{target}: {target.reason}")]
    if case.ranks > target.ranks:
        return [*marks, pytest.mark.skip(reason=f"{target}: {case.ranks} ranks, {target.ranks} devices here")]
    unsupported = tables.find(tables.UNSUPPORTED, str(target), test, case)
    if unsupported is not None:
        return [*marks, pytest.mark.skip(reason=f"{target}: unsupported: {unsupported.reason}")]
    failing = tables.find(tables.EXPECTED_FAILURE, str(target), test, case)
    if failing is not None:
        return [*marks, pytest.mark.xfail(reason=failing.reason, strict=True)]
    return marks
