# SPDX-License-Identifier: Apache-2.0
"""Litmus programs as device code on two GPUs: NVLink stores, and GIN over the software NIC, which reorders and splits."""

from __future__ import annotations

import pytest

from hal.checker import litmus, on_transport

pytestmark = pytest.mark.cuda
FAULTS = "reorder=300us,split=32,source_early,complete=100us,publish=300us"


def played(ranks: int, **settings: object) -> dict[str, on_transport.TransportRun]:
    programs = [p for p in litmus.library().values() if p.ranks <= ranks and not on_transport.unsupported(p, "cuda")]
    told = on_transport.run_all(programs, "cuda", 500, timeout=30.0, **settings)
    return {r.program.name: r for r in told if isinstance(r, on_transport.TransportRun)}


@pytest.mark.timeout(300)
def test_stores_over_nvlink_do_nothing_that_lsa_forbids():
    results = played(2)
    assert len(results) > 30
    for name, result in results.items():
        assert result.profile.name == "lsa"
        assert result.forbidden == (), f"{name}: {result.counts}"


@pytest.mark.cuda(gpus=1)  # make-believe hosts may share one
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signals", ["auto", "weak"])
def test_gin_does_nothing_that_its_profile_forbids_and_what_it_allows_is_seen(monkeypatch, signals):
    monkeypatch.setenv("HAL_SWNIC_FAULTS", FAULTS)
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", signals)
    results = played(4, hosts=2, transport="gin")
    assert len(results) > 30
    for name, result in results.items():
        assert result.profile.name == ("gin" if signals == "auto" else "gin-weak")
        assert result.forbidden == (), f"{name}: {result.counts}"
    for name in ("mp-flag", "two-queues", "torn-row"):
        assert results[name].bad, f"{name}: its bad outcome is allowed and was not seen: {results[name].counts}"
