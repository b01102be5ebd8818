# SPDX-License-Identifier: Apache-2.0
"""Kernels written against kernels_cuda/src/gin.cuh, on emulated network cards: what GIN promises holds under every seed,
and what it does not promise is really seen to fail (kernels_cuda/src/gin_check.cu runs the same on GPUs)."""

from __future__ import annotations

from typing import Any

import pytest
from hal_cuda import gin_check
from hal_cuda.gin_check import HOLD, MAY_FAIL, Outcome

import hal
from hal.errors import ContractError, PeerTimeout

SEEDS = range(1, 5)
WORDS = 3 * 4 * 2048 // 8  # rounds, rows, words of a row: from each rank of other domains


def outcomes(names: tuple[str, ...], ranks: int = 2, nodes: int = 2, **sizes: int) -> list[dict[str, Outcome]]:
    """Each rank's outcome of each check."""

    def body(comm: hal.Communicator) -> dict[str, Outcome]:
        session: Any = comm._session
        return {name: gin_check.check(session, name, rounds=3, **sizes) for name in names}

    topology = {"nodes": nodes}
    return hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", topology=topology, timeout=60.0)


@pytest.mark.parametrize("signals", ["auto", "weak"])
@pytest.mark.parametrize("seed", SEEDS)
def test_promises_hold(seed: int, signals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_SEED", str(seed))
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", signals)
    for told in outcomes(HOLD):
        assert told == dict.fromkeys(HOLD, Outcome(0, WORDS))


def test_promises_hold_between_two_domains_of_two_and_on_the_other_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    for told in outcomes(HOLD, ranks=4):
        assert told == dict.fromkeys(HOLD, Outcome(0, 2 * WORDS))
    for told in outcomes(HOLD, ranks=3, nodes=3, queue=1):
        assert told == dict.fromkeys(HOLD, Outcome(0, 2 * WORDS))


@pytest.mark.parametrize("signals", ["auto", "weak"])
def test_outcomes_that_nothing_forbids_are_seen(signals: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that never used its freedom would let wrong kernels pass."""
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", signals)
    # Without strong signals a put's own signal is a quiet and a signal, which covers everything.
    names = tuple(name for name in MAY_FAIL if signals == "auto" or name != "weak bundled with the last")
    bad = dict.fromkeys(names, 0)
    for seed in range(1, 11):
        monkeypatch.setenv("HAL_SWNIC_SEED", str(seed))
        # Slower each time: a busy machine may look later than a quick network needs to deliver everything.
        reorder, hold = 125 << seed, 20 << seed
        faults = f"reorder={reorder}us,split=1K,publish={hold}us,source_early,read={hold}us,complete={hold // 2}us"
        monkeypatch.setenv("HAL_SWNIC_FAULTS", faults)
        unseen = tuple(name for name in names if bad[name] == 0)
        if not unseen:
            break
        for told in outcomes(unseen, rows=6):
            for name, outcome in told.items():
                bad[name] += outcome.bad
    assert all(bad.values()), bad


def test_a_card_without_faults_delivers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "")
    for told in outcomes(("flag", "weak after")):
        assert {outcome.bad for outcome in told.values()} == {0}


@pytest.mark.parametrize("name", ["strong word", "strong signal", "bundled strong", "complete barrier"])
def test_signals_before_their_data_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "delay=5ms,early_signal")
    assert sum(told[name].bad for told in outcomes((name,))) > 0


def test_more_posts_than_a_queue_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After kRoom posts the kernel makes sure that the earlier ones have left; if they do not, it says so in time."""
    rows = 300
    for told in outcomes(("strong word", "source after flush"), rows=rows, row_bytes=64):
        assert {outcome.bad for outcome in told.values()} == {0}
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "0>1/0: stall=forever")

    def body(comm: hal.Communicator) -> tuple[Any, ...]:
        session: Any = comm._session
        try:
            gin_check.check(session, "strong word", rounds=1, rows=rows, row_bytes=64)
        except PeerTimeout as error:
            return error.rank, error.queue, error.stage, error.seen
        return ()

    settings: dict[str, Any] = {"backend": "cuda", "transport": "gin_emulated", "topology": {"nodes": 2}}
    assert hal.spawn(2, body, timeout=1.5, **settings)[0][:3] == (1, 0, "arrival at the peer")


def test_checks_are_known_by_name() -> None:
    with pytest.raises(ContractError, match="strong word"):
        outcomes(("everything",))
