# SPDX-License-Identifier: Apache-2.0
"""The software NIC's engine under faults: ranks as processes, driven as NCCL drives the plug-in, checked by a thread that
reads each rank's memory while it changes (kernels_cuda/software_nic/tests/torture.cpp)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from software_nic import WAITS, build, environment, torture, torture_until_seen

REORDER = "reorder=150us,split=256"


def expected_checks(ranks: int, rounds: int, puts: int, seeds: int = 1) -> int:
    return seeds * ranks * ranks * rounds * puts


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_in_order_without_faults(ranks: int) -> None:
    result = torture(f"ranks={ranks}", "rounds=4")
    assert result["broken"] == 0
    assert result["finished"] == ranks
    assert result["checked"] == expected_checks(ranks, 4, 12)


@pytest.mark.slow
@pytest.mark.timeout(600)  # about 20 s where nobody else computes
def test_200_seeds_of_reordering_keep_the_strong_signal() -> None:
    result = torture("rounds=4", "puts=8", "seeds=200", FAULTS=REORDER, SEED="1000")
    assert result["broken"] == 0, result
    assert result["checked"] == expected_checks(2, 4, 8, 200)
    # What the contract allows must really have happened, or the test has shown nothing.
    assert result["overtook"] > 0, "no put overtook an earlier one"
    assert result["passed_signal"] > 0, "no later put passed a strong signal"
    assert result["torn"] > 0, "no put was seen half-way"


def test_reordering_among_three_ranks_with_a_bundled_strong_signal() -> None:
    options = ("ranks=3", "signal=bundled", "seeds=10")
    result = torture_until_seen("overtook", options=options, faults="reorder={}us,split=256")
    assert result["checked"] == expected_checks(3, 6, 12, 10)


def test_early_signals_are_caught() -> None:
    """The control: a NIC that signals before its data. If this passes unnoticed, the tests above prove nothing."""
    # A busy machine may not run the checker within those 100 ms; then it looks again.
    broken = []
    while len(broken) < 3 and 20 not in broken:
        result = torture("rounds=4", "puts=8", "seeds=20", FAULTS=f"{REORDER},delay=100ms,early_signal")
        broken.append(result["seeds_broken"])
    assert 20 in broken


def test_weak_signal_covers_its_own_put_and_no_other() -> None:
    options = ("signal=weak", "seeds=10")
    result = torture_until_seen("weak_passed", options=options, faults="reorder={}us,split=256")
    assert result["checked"] == expected_checks(2, 6, 14, 10)


def test_signal_on_ordinary_memory_may_pass_data_and_on_strict_memory_not() -> None:
    """Real NICs with relaxed ordering do this; windows need NCCL_WIN_STRICT_ORDERING for VA signals."""
    faults = "reorder={}us,va_unordered"
    assert any(torture("signal=va", "seeds=5", FAULTS=faults.format(wait))["broken"] > 0 for wait in WAITS)
    strict = torture("signal=va_strict", "seeds=5", FAULTS=faults.format(300))
    assert strict["broken"] == 0
    assert strict["checked"] == expected_checks(2, 6, 12, 5)


def test_a_weak_signal_on_a_window_follows_the_put_that_nccl_split_it_from() -> None:
    """NCCL's proxy posts a put and its signal on a window's word as two operations; a weak one covers that put."""
    result = torture("signal=va_weak", "puts=1", "seeds=10", FAULTS="reorder=300us")
    assert result["broken"] == 0
    assert result["checked"] == expected_checks(2, 6, 1, 10)


@pytest.mark.parametrize(
    "faults",
    [
        "reorder=1ms,source_early,read=500us",
        "reorder=1ms,source_early,complete=200us",
        "delay=300us,jitter=300us,publish=200us",
        "credits=1,reorder=100us",
        "rate=2M,ops=4000",
        "0>1/1: stall=100ms@5; reorder=100us",
    ],
)
@pytest.mark.parametrize("signal_mode", ["rmw", "auto"])
def test_holds_never_break_order_or_lose_anything(faults: str, signal_mode: str) -> None:
    """Sources are overwritten as soon as their request is done, so a source read too late shows as wrong data."""
    result = torture("seeds=3", FAULTS=faults, SIGNAL=signal_mode)
    assert result["broken"] == 0
    assert result["unfinished"] == result["failed_requests"] == 0
    assert result["checked"] == expected_checks(2, 6, 12, 3)


def test_killed_peer_is_noticed_at_once_and_named() -> None:
    # The others still have operations for it under way when it dies.
    result = torture("ranks=3", "rounds=40", FAULTS="1>*: kill=@20; 0>1: stall=forever@30; 2>1: stall=forever@30")
    assert result["killed"] == 1
    assert result["finished"] == 2
    assert result["noticed"] == 2, "both others must see their operations fail"
    assert result["noticed_after_us"] < 10_000_000, "the ranks' own patience is 20 s"
    assert len(re.findall(r"rank [02]: rank 1 \(pid \d+\) has died", result["log"])) == 2
    assert result["broken"] == 0


def test_survivors_go_on_when_a_lost_peer_is_dropped() -> None:
    result = torture("ranks=3", "rounds=40", FAULTS="1>*: kill=@20", PEER_LOSS="drop")
    assert result["finished"] == 2
    assert result["failed_requests"] == result["unfinished"] == 0
    # Ranks 0 and 2 have everything of each other and of themselves, whatever came of rank 1.
    assert result["checked"] >= 2 * 2 * 40 * 12
    assert result["broken"] == 0


def test_failed_operation_ends_its_flow_and_no_other() -> None:
    result = torture(FAULTS="1>0/0: error=@5")
    assert "flow 1>0 queue 0: operation 5 fails" in result["log"]
    posted_on_queue_0 = 3 * (12 + 1 + 2)
    assert result["failed_requests"] == posted_on_queue_0 - 5
    assert result["unfinished"] == result["broken"] == 0


def test_lost_operation_stops_its_flow_and_the_watchdog_says_so() -> None:
    result = torture("seconds=4", FAULTS="1>0/0: drop=@5", WATCHDOG="1.5")
    assert result["broken"] == 0
    assert result["unfinished"] == 4, "the lost put and the three strong signals after it"
    assert "watchdog: rank 1 of 2 has made no progress for 1.5" in result["log"]
    assert re.search(r"flow 1>0 queue 0: posted 45, delivered 44, published 0 of 3 signals", result["log"])
    assert "region 2: " in result["log"]
    assert "faults='1>0/0: drop=@5'" in result["log"], "the dump must carry what a replay needs"


def test_stall_for_ever_is_bounded_at_close() -> None:
    started = time.monotonic()
    result = torture("seconds=1", FAULTS="0>1: stall=forever@3")
    assert result["finished"] == 2
    assert result["unfinished"] > 0
    assert time.monotonic() - started < 60


def test_statistics_count_what_was_done(tmp_path: Path) -> None:
    stats = tmp_path / "stats.jsonl"
    result = torture(FAULTS="split=32", STATS=str(stats))
    assert result["broken"] == 0
    lines = sorted((json.loads(line) for line in stats.read_text().splitlines()), key=lambda line: line["rank"])
    assert [line["rank"] for line in lines] == [0, 1]
    for line in lines:
        assert line["puts"] == 2 * 6 * 14
        assert line["gets"] >= 1
        assert line["signals"] == 2 * 6
        assert line["ended"] == line["puts"] + line["gets"] + 2 * 6
        assert line["failed"] == line["signals_orphaned"] == 0
        assert line["pieces"] > line["puts"] * 8, "about 1 KiB each, cut in pieces of 32 bytes"


def test_the_same_seed_gives_the_same_plan_and_another_seed_another(tmp_path: Path) -> None:
    def pieces(seed: str) -> list[int]:
        stats = tmp_path / f"{seed}-{time.monotonic_ns()}.jsonl"
        torture(FAULTS="split=512", STATS=str(stats), SEED=seed)
        return [json.loads(line)["pieces"] for line in sorted(stats.read_text().splitlines())]

    assert pieces("7") == pieces("7")
    assert pieces("7") != pieces("8")


def test_nothing_is_left_behind_after_sigkill() -> None:
    """Every rank is killed in the middle of a stalled run: no socket name, shared memory or process remains."""
    with subprocess.Popen(
        [str(build() / "swnic_torture"), "seconds=120"],
        env=environment(FAULTS="stall=forever"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as parent:
        ranks: list[int] = []
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")

        def started() -> bool:
            ranks[:] = map(int, children.read_text().split())
            return len(ranks) == 2

        _wait_until(started)
        time.sleep(0.3)  # connected by now, and stalled
        for pid in [*ranks, parent.pid]:
            os.kill(pid, signal.SIGKILL)
    _wait_until(lambda: not any(_alive(pid) for pid in ranks))
    # The kernel closes the sockets of a killed process a moment later.
    _wait_until(lambda: not any(f"hal-swnic-{pid}-" in Path("/proc/net/unix").read_text() for pid in ranks))
    assert not [path for path in Path("/dev/shm").iterdir() if "hal" in path.name]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("setting", "value", "said"),
    [
        ("FAULTS", "reoder=5us", "'reoder=5us': no such fault"),
        ("FAULTS", "delay=5", "is no time"),
        ("FAULTS", "1-0: delay=5us", "selects no flow"),
        ("FAULTS", "drop=5", "as @K"),
        ("FAULTS", "5>5: credits=x", "is no whole number"),
        ("QUEUE_DEPTH", "100", "a power of two from 32 to 4096"),
        ("COPY", "fast", "one of auto, peer, stage"),
        ("SIGNAL", "loud", "one of auto, rmw"),
        ("TIMEOUT", "0", "a number from"),
        ("DEVICE", "gpu", "one of cuda, host"),
    ],
)
def test_wrong_setting_is_refused_by_name_before_anything_is_connected(setting: str, value: str, said: str) -> None:
    result = torture("ranks=1", **{setting: value})
    assert result["crashed"] == 1
    assert f"HAL_SWNIC_{setting}" in result["log"]
    assert said in result["log"]
