# SPDX-License-Identifier: Apache-2.0
"""Litmus programs as device code on emulated GPUs: outcomes stay inside the model of the transport's profile, and the bad
outcomes that it allows are really seen. The same programs on GPUs are tests/cuda/test_device_litmus.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from hal.checker import litmus, on_transport
from hal.checker.parser import parse
from hal.checker.program import Program
from hal.cli import main
from hal.errors import ContractError
from hal.ordering import PROFILES

pytest.importorskip("hal_cuda.litmus")

from hal_cuda.litmus import Code, why_not_play

FAULTS = "reorder={0}us,split=32,source_early,complete={1}us,publish={0}us"
HOSTS = {"lsa": 1, "gin": 2, "gin-weak": 2}
PLAYED = [name for name, program in litmus.library().items() if not on_transport.unsupported(program, "cuda")]
SEEN = {
    "lsa": ["mp-flag", "mp-weak", "torn-row", "flush-is-not-quiet", "barrier-is-not-completion", "target-reuse"],
    "gin": ["mp-flag", "torn-row", "flush-is-not-quiet", "relaxed-after-strong", "two-queues", "source-reuse", "isa2",
            "both-planes", "barrier-is-not-completion", "shared-counter", "stale-one"],
    "gin-weak": ["mp-flag", "mp-weak", "torn-row", "two-queues", "source-reuse", "isa2", "barrier-is-not-completion"],
}  # fmt: skip
"""Bad outcomes of data in flight. Others are allowed and never seen, since HAL's words are stronger there than they must be:
a strong signal over GIN releases the thread's stores as well, and a bundled one of gin-weak is strong."""
Runs = Callable[[str], dict[str, on_transport.TransportRun | on_transport.NotRun]]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Every program on a profile's transport, once for all tests."""

    @cache
    def played(profile: str, seed: int = 0) -> dict[str, on_transport.TransportRun | on_transport.NotRun]:
        with pytest.MonkeyPatch.context() as patch:
            adversary(patch, profile, seed)
            programs = [litmus.load(name) for name in PLAYED]
            told = on_transport.run_all(
                programs, "cuda", 40, hosts=HOSTS[profile], seed=seed, transport="gin_emulated", timeout=60.0
            )
            return {result.program.name: result for result in told}

    return played


def adversary(patch: pytest.MonkeyPatch, profile: str, seed: int) -> None:
    # Slower with each seed: a busy machine may look later than a quick network needs to deliver everything.
    patch.setenv("HAL_SWNIC_FAULTS", FAULTS.format(300 * (1 + seed), 100 * (1 + seed)))
    patch.setenv("HAL_SWNIC_SEED", str(seed))
    patch.setenv("HAL_CUDA_GIN_SIGNALS", "weak" if profile == "gin-weak" else "auto")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("profile", HOSTS)
def test_the_device_does_nothing_that_its_profile_forbids(runs: Runs, profile: str) -> None:
    results = runs(profile)
    played = [result for result in results.values() if isinstance(result, on_transport.TransportRun)]
    assert len(played) >= len(PLAYED) - 1
    for result in played:
        assert result.profile.name == profile
        assert sum(result.counts.values()) == 40
        assert result.forbidden == (), f"{result.program.name}: {result.counts}"
        assert result.allowed or not result.bad


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("profile", "name"), [(profile, name) for profile, names in SEEN.items() for name in names])
def test_an_allowed_bad_outcome_is_seen(runs: Runs, profile: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    result = runs(profile)[name]
    assert isinstance(result, on_transport.TransportRun)
    assert result.allowed
    for seed in range(1, 40):
        if result.bad:
            return
        adversary(monkeypatch, profile, seed)
        result = on_transport.run(
            litmus.load(name), "cuda", 100, hosts=HOSTS[profile], seed=seed, transport="gin_emulated", timeout=60.0
        )
        assert result.forbidden == ()
    pytest.fail(f"{name}: its bad outcome is allowed under {profile} and was never seen: {result.counts}")


EARLY = """
litmus early
window data[1] sig[1]
rank 0
  put data[0] = 1 to 1
  signal sig[0] += 1 to 1
rank 1
  wait sig[0] >= 1
  r0 = read data[0]
bad 1:r0 == 0
"""


@pytest.mark.timeout(300)
def test_a_card_that_signals_early_is_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: a network that breaks its promise, which every ordering test must notice."""
    monkeypatch.setenv("HAL_SWNIC_FAULTS", "delay=2ms,early_signal")
    result = on_transport.run(parse(EARLY), "cuda", 20, hosts=2, transport="gin_emulated", timeout=60.0)
    assert result.forbidden == ("1:r0=0",)
    words = ["--backend", "cuda", "--transport", "gin_emulated", "--hosts", "2", "-n", "20"]
    assert main(["litmus", "run", "mp-strong", *words]) == 1
    assert "the model of gin forbids: 1:r0=0" in capsys.readouterr().err


@pytest.mark.timeout(300)
def test_four_ranks_on_two_hosts_go_by_stores_and_by_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 share an NVLink domain, 2 and 3 another; one program uses both ways, and idle ranks fill up."""
    program = parse(
        """
litmus both-ways
window data[2] sig[2]
rank 0
  put data[0] = 1 to 1
  signal sig[0] += 1 to 1
  put data[1] = 1 to 2
  signal sig[1] += 1 to 2
rank 1
  wait sig[0] >= 1
  r0 = read data[0]
rank 2
  wait sig[1] >= 1
  r1 = read data[1]
bad 1:r0 == 0 or 2:r1 == 0
"""
    )
    monkeypatch.setenv("HAL_SWNIC_FAULTS", FAULTS.format(300, 100))
    result = on_transport.run(program, "cuda", 50, hosts=2, transport="gin_emulated", timeout=60.0)
    assert result.counts == {"1:r0=1 2:r1=1": 50}
    assert result.bad == 0


def test_a_wait_in_vain_ends_and_names_the_rank_that_did_not_signal() -> None:
    from hal.errors import PeerTimeout

    program = parse(EARLY.replace("sig[0] >= 1", "sig[0] >= 2"))
    with pytest.raises(PeerTimeout) as told:
        on_transport.run(program, "cuda", 1, transport="gin_emulated", timeout=2.0)
    assert told.value.rank == 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("rank 0 thread a\n signal s[0] = 1 to 1\nrank 0 thread b\n signal s[0] = 2 to 1", "set by several threads"),
        ("rank 0 thread a\n put d[0] = 1 to 1\nrank 0 thread b\n put d[1] = 1 to 1\n quiet remote", "share queue 0"),
    ],
)
def test_what_the_device_cannot_play_says_why(text: str, why: str) -> None:
    program = parse(f"litmus odd\nwindow d[2] s[1]\n{text}\nrank 1\n wait s[0] >= 1\n r0 = read d[0]\nbad 1:r0 == 0")
    assert why in why_not_play(program)
    with pytest.raises(ContractError, match=why):
        on_transport.run(program, "cuda", 1, transport="gin_emulated")


def test_queues_that_threads_share_are_refused_where_a_strong_signal_completes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HAL_CUDA_GIN_SIGNALS", "weak")
    with pytest.raises(ContractError, match="a strong signal completes it"):
        on_transport.run(litmus.load("two-submitters"), "cuda", 1, hosts=2, transport="gin_emulated")


def test_words_are_resolved_by_the_profile() -> None:
    """A weak signal is strong where the profile says that it acts so, and each (thread, queue) has a line of its own."""
    program: Program = litmus.load("mp-weak")
    orders = {name: [op.order for op in Code(program, PROFILES[name]).ops(0)] for name in HOSTS}
    assert orders == {"lsa": [1, 1], "gin": [1, 2], "gin-weak": [1, 1]}
    shared = Code(litmus.load("shared-counter"), PROFILES["gin"])
    wait = next(op for op in shared.ops(1) if op.what == 2)
    assert wait.count == 2
    assert [op.line for op in shared.ops(0) if op.what == 1] == [wait.line, wait.line + 1]
