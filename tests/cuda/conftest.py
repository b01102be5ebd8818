# SPDX-License-Identifier: Apache-2.0
"""Tests of the CUDA backend on two GPUs, or on --ranks of them; on one, those marked ``cuda(gpus=1)``. Each run leaves a dated
JSON in benchmarks/results/."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hal_cuda import SPEC
from hal_cuda.probe import gpus

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
_outcomes: dict[str, str] = {}
_facts: dict[str, Any] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    help_text = "tests/cuda: ranks within one NVLink domain, a GPU each; 2, 4 or 8, which divide the experts of the tests"
    parser.addoption("--ranks", type=int, default=2, choices=(2, 4, 8), help=help_text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    probe = SPEC.probe()
    for item in items:
        mark = item.get_closest_marker("cuda")
        if mark is None or Path(__file__).parent not in item.path.parents:
            continue
        needed = mark.kwargs.get("gpus", config.getoption("--ranks", default=2))
        if not probe.usable:
            item.add_marker(pytest.mark.skip(reason=f"{probe.reason}; {probe.fix}"))
        elif gpus() < needed:
            item.add_marker(pytest.mark.skip(reason=f"{gpus()} GPU here, this test takes {needed}"))


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks that stay for all tests, and start again after one that failed."""
    from ranks import Ranks

    started = Ranks(request.config.getoption("--ranks"))
    _facts.update(started.run("facts")[0])
    yield started
    started.close()


@pytest.fixture
def summing_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks of which each is a node of its own: schedule hierarchical then sums by rank."""
    from ranks import Ranks

    number = request.config.getoption("--ranks")
    started = Ranks(number, nodes=number)
    yield started
    started.close()


@pytest.fixture(scope="module")
def few_sms_ranks(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Ranks whose launches take two multiprocessors: combine has rows on their way into shared memory."""
    from ranks import Ranks

    number = request.config.getoption("--ranks")
    started = Ranks(number, variables=[{"HAL_CUDA_SMS": "2", "HAL_CUDA_COMBINE": "pull"}] * number)
    yield started
    started.close()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "cuda" in report.keywords:
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not _facts:
        return
    from hal_cuda.facts import write_record

    name = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime())
    write_record(
        RESULTS / f"{name}-cuda-tests.json",
        "tests marked cuda",
        _facts,
        gpus(),
        "pytest " + " ".join(session.config.invocation_params.args),
        passed=sum(outcome == "passed" for outcome in _outcomes.values()),
        failed=sorted(name for name, outcome in _outcomes.items() if outcome == "failed"),
        tests=sorted(_outcomes),
    )
