# SPDX-License-Identifier: Apache-2.0
"""Sessions of two emulated NVLink domains: the ordering words over NVLink and GIN, on CPUs, with the card's adversary."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gin_bodies as bodies
import pytest

import hal
from hal.errors import ContractError, HalError, PeerTimeout

TIMEOUT = 60.0


def run(body: Callable[..., Any], *arguments: Any, ranks: int = 4, nodes: int = 2, **settings: Any) -> list[Any]:
    """``body`` on every rank of ``nodes`` emulated domains."""
    known = {"timeout": TIMEOUT, "signal_slots": 16, **settings}
    return hal.spawn(
        ranks, body, *arguments, backend="cuda", transport="gin_emulated", topology={"nodes": nodes}, **known
    )


@pytest.fixture(params=["strong", "weak"])
def signals(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Cards with strong signals, and cards without."""
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", "auto" if request.param == "strong" else "weak")
    return str(request.param)


SAME = [
    (bodies.ring, 0),
    (bodies.strong_put_is_a_flag, 0),
    (bodies.bundled_signal, True),
    (bodies.every_slot_and_queue, [4 * (slot + 1) for slot in range(12)]),
    (bodies.quiet_and_complete_barrier, []),
    (bodies.sources_in_a_window, 0),
    (bodies.team_barriers, []),
    (bodies.signals_add_set_and_wrap, (40 * ((1 << 32) + 1), 1, [1000, 1001, 1002, 1003])),
]


@pytest.mark.parametrize(("body", "expected"), SAME, ids=[body.__name__ for body, _ in SAME])
def test_words(body: Callable[..., Any], expected: Any, signals: str) -> None:
    assert run(body) == [expected] * 4


def test_signals_before_their_data_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a card that breaks the contract on purpose. If nobody noticed, the tests above would prove nothing."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "delay=20ms,early_signal")
    assert sum(run(bodies.ring, 2, ranks=2)) > 0


LARGE = "reorder=250us,split=64K,publish=40us,source_early,read=40us"
"""The default, but for pieces that suit megabytes."""


def test_puts_longer_than_the_outbox_and_more_than_a_queue_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_SWNIC_FAULTS", LARGE)
    assert run(bodies.large_puts, ranks=2) == [True, True]


def test_domains_of_three_and_hosts_of_one() -> None:
    assert run(bodies.ring, ranks=6) == [0] * 6
    assert run(bodies.ring, ranks=3, nodes=3) == [0] * 3


def test_processes(run_ranks: Callable[..., Any]) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(bodies.__file__).rpartition('/')[0]!r})\nimport hal, gin_bodies\n"
        f"with hal.connect(backend='cuda', transport='gin_emulated', timeout={TIMEOUT}) as comm:\n"
        "    print('torn', gin_bodies.ring(comm, rounds=4))\n"
    )
    outcome = run_ranks(4, script, nodes=2, timeout=2 * TIMEOUT)
    assert (outcome.status, outcome.lines) == (0, {rank: ["torn 0"] for rank in range(4)})


def test_the_program_that_checks_gpus(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What check_on_gpus.py runs on GPUs, here on emulated ones."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", LARGE)
    source = Path(bodies.__file__)
    script = (
        f"import runpy, sys\nsys.argv[1:] = ['gin_emulated']\nrunpy.run_path({str(source)!r}, run_name='__main__')\n"
    )
    outcome = run_ranks(2, script, nodes=2, timeout=2 * TIMEOUT)
    assert outcome.status == 0, outcome.lines
    for rank in range(2):
        told = json.loads(outcome.text(rank))
        assert (told["rank"], told["profile"], told["wrong"]) == (rank, "gin", [])
        assert {bad for bad, _ in told["hold"].values()} == {0}
        assert all(checked > 0 for _, checked in [*told["hold"].values(), *told["may_fail"].values()])


def test_the_profile_is_the_cards(signals: str) -> None:
    def body(comm: hal.Communicator) -> Any:
        return comm.profile.name, comm._session.capabilities

    name, capabilities = run(body)[0]
    assert name == ("gin" if signals == "strong" else "gin-weak")
    assert capabilities.strong_signals == (signals == "strong")
    assert (capabilities.gin_type, capabilities.connection) == ("emulated", "full")
    assert (capabilities.queues, capabilities.lsa_size, capabilities.rail_size) == (2, 2, 2)
    assert capabilities.va_signals
    assert capabilities.traffic_class is None


def test_settings_of_gin_are_read_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HAL_CUDA_GIN_TRAFFIC_CLASS", "3")
    assert run(lambda comm: comm._session.capabilities.traffic_class, ranks=2) == [3, 3]
    monkeypatch.setenv("HAL_CUDA_GIN_TRAFFIC_CLASS", "high")
    with pytest.raises(ContractError, match="must be a number"):
        run(lambda comm: None, ranks=2)
    monkeypatch.delenv("HAL_CUDA_GIN_TRAFFIC_CLASS")
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", "loud")
    with pytest.raises(ContractError, match="auto, weak"):
        run(lambda comm: None, ranks=2)


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [("SEED", "x", "an integer"), ("BLOCKS", "few", "an integer"), ("ADVERSARY", "yes", "0 or 1"),
     ("ONE_DOMAIN", "yes", "0 or 1"), ("THREADS", "33", "a multiple of 32"), ("GIN", "foo", "full, rail or none"),
     ("LIMIT", "foo", "seconds above 0"), ("LIMIT", "0", "seconds above 0"), ("LIMIT", "nan", "seconds above 0")],
)  # fmt: skip
def test_a_wrong_variable_of_the_emulator_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, fix: str
) -> None:
    monkeypatch.setenv(f"HAL_CUDA_EMULATOR_{name}", value)
    with pytest.raises(ContractError, match=f"HAL_CUDA_EMULATOR_{name}='{value}': give {fix}"):
        run(lambda comm: None, ranks=2)


@pytest.mark.parametrize("name", ["FAULTS", "SEED"])
def test_a_wrong_variable_of_the_network_is_refused_without_advice_on_transports(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(f"HAL_SWNIC_{name}", "foo")
    with pytest.raises(ContractError, match=f"HAL_SWNIC_{name}.*foo") as refused:
        run(lambda comm: None, ranks=2)
    assert "lsa" not in str(refused.value)


def test_one_domain_needs_no_card(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HAL_CUDA_EMULATOR_GIN", "none")
    assert run(lambda comm: comm.profile.name, ranks=2, nodes=1) == ["lsa", "lsa"]


CARDS = """
import sys
sys.path.insert(0, {here!r})
import hal, gin_bodies
from hal.errors import BackendUnavailable, ContractError
{body}
"""


def card(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str, body: str) -> Any:
    """Four processes with another kind of card: the library reads it once for each process."""
    monkeypatch.setenv("HAL_CUDA_EMULATOR_GIN", kind)
    here = str(bodies.__file__).rpartition("/")[0]
    return run_ranks(4, CARDS.format(here=here, body=body), nodes=2, timeout=2 * TIMEOUT)


def test_without_a_card_the_reason_is_given(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    body = (
        "try:\n    hal.connect(backend='cuda', transport='gin_emulated')\n"
        "except BackendUnavailable as error:\n    print(error)\n"
    )
    outcome = card(run_ranks, monkeypatch, "none", body)
    assert outcome.status == 0
    for rank in range(4):
        assert "no network card" in outcome.text(rank)
        assert "nothing leaves the NVLink domain" in outcome.text(rank)


def test_rail_connections(run_ranks: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the same rail are reached, a barrier of all goes over the rails, and others are refused with the way."""
    body = (
        f"with hal.connect(backend='cuda', transport='gin_emulated', timeout={TIMEOUT}) as comm:\n"
        "    window, n = comm.window(64), comm.world_size\n"
        "    print(comm._session.capabilities.connection)\n"
        "    for call in (lambda p: comm.queue(0).put(window, 0, b'8 bytes.', p), lambda p: comm.queue(0).signal(1, p),\n"
        "                 lambda p: comm.queue(0).quiet(p)):\n"
        "        try:\n            call((comm.rank + n // 2) % n ^ 1)\n"
        "        except ContractError as error:\n            print('refused' if 'rail' in str(error) else error)\n"
        "    print(gin_bodies.strong_put_is_a_flag(comm))\n"
        "    for generation in range(1, 4):\n"
        "        comm.queue(1).put(window, 0, bytes([generation] * 64), gin_bodies.across(comm))\n"
        "        comm.barrier()\n"
        "        print(set(gin_bodies.host(window)) == {generation})\n"
        "        comm.barrier()\n"
    )
    outcome = card(run_ranks, monkeypatch, "rail", body)
    expected = ["rail", "refused", "refused", "refused", "0", "True", "True", "True"]
    assert (outcome.status, outcome.lines) == (0, dict.fromkeys(range(4), expected))


# --- bounded waits ---------------------------------------------------------------------------------------------------


def test_a_signal_that_never_comes_is_named() -> None:
    told = run(bodies.missing_peer)[0]
    assert told == (2, "wait", 7, 0)


def test_a_stalled_flow_ends_each_wait_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue 1 from rank 0 to rank 1 stands still: flush and quiet on it end in time and say whose, queue 0 goes on."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "0>1/1: stall=forever")

    def body(comm: hal.Communicator, scope: str, done: threading.Event) -> Any:
        window = comm.window(64)
        comm.queue(0).put(window, 0, b"queue 0.", 1 - comm.rank)
        comm.queue(0).quiet()
        if comm.rank == 1:
            done.wait(TIMEOUT)  # alive, and not closed
            return None
        comm.queue(1).put(window, 8, b"queue 1.", 1)
        try:
            comm.queue(1).quiet(scope=scope)
        except PeerTimeout as error:
            return error.rank, error.queue, error.stage, error.expected, error.seen, "no answer" in str(error)
        finally:
            done.set()
        return "no timeout"

    for scope, stage in (("source", "sources read by the network"), ("remote", "arrival at the peer")):
        assert run(body, scope, threading.Event(), ranks=2, timeout=1.5)[0] == (1, 1, stage, 1, 0, True)


def test_a_rank_that_fails_ends_the_waits_of_other_domains() -> None:
    """Rank 3 raises; the others wait for it with a long limit and are told at once, over the network too."""

    def body(comm: hal.Communicator) -> Any:
        comm.barrier()
        if comm.rank == 3:
            raise ValueError("rank 3 gives up")
        comm.wait(0, 1, timeout=TIMEOUT, source=3)

    with pytest.raises((HalError, ValueError)) as caught:
        run(body)
    assert "rank 3" in str(caught.value)


def test_what_a_rank_owes_is_delivered_although_another_one_has_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that closes settles what it owes. When the quiet for that gave up because of one peer that had closed, words for
    the others were lost, and these waited for a rank that had gone."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "delay=100ms")

    def body(comm: hal.Communicator) -> int:
        if comm.rank == 2:
            return comm.wait(1, 1, source=1)
        if comm.rank == 1:
            deadline = time.monotonic() + TIMEOUT
            while 0 not in comm._session.watch.closed:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            comm.queue(0).signal(1, 2, 1)
        return 1  # closes

    assert run(body, ranks=3, nodes=3) == [1, 1, 1]
