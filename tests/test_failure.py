# SPDX-License-Identifier: Apache-2.0
"""Ranks that crash, stall, leave or are killed: the others are told which one, in time, and nothing is left behind."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import hal
from hal import launch
from hal.errors import ContractError, HalError, PeerTimeout

LIMIT = 60.0
"""Seconds; the communicator's time limit where a failure must be noticed long before it."""
AT_ONCE = 15.0
"""Seconds; generous for a loaded machine (it takes milliseconds), and far below LIMIT."""
SOON = 3.0
"""Seconds; the time limit where it must be met. A busy machine may not run a process for as long."""

REPORT = f"""
import os, pathlib, signal, sys, time
import hal
from hal.errors import HalError, PeerTimeout

def mark(what):
    pathlib.Path(__file__).with_name(f"{{what}}-{{os.environ['HAL_RANK']}}").touch()

def until(what, *ranks):
    # Ranks meet by files where the words of a communicator are what is tested.
    while not all(pathlib.Path(__file__).with_name(f"{{what}}-{{r}}").exists() for r in ranks):
        time.sleep(0.01)

def report(call, *arguments, **keywords):
    start = time.monotonic()
    try:
        call(*arguments, **keywords)
        print("no error")
    except PeerTimeout as error:
        seconds = time.monotonic() - start
        print(f"PeerTimeout rank={{error.rank}} stage={{error.stage}} after={{seconds:.2f}} {{error.reason}}")
    mark("reported")

def settled():
    # Every rank is past the barrier below, so that none can report its failure in there.
    comm.wait(9, comm.world_size)

comm = hal.connect(timeout={LIMIT})
rank, queue = comm.rank, comm.queue()
comm.barrier()
for peer in range(comm.world_size):
    queue.signal(9, peer)
"""


def faults(outcome: Any, ranks: tuple[int, ...]) -> dict[int, tuple[int, str, float, str]]:
    """Rank at fault, stage, seconds and reason, as each of ``ranks`` reported them."""
    found = {}
    for rank in ranks:
        match = re.search(r"PeerTimeout rank=(-?\d+) stage=(\S+) after=(\S+) (.*)", outcome.text(rank))
        assert match, (rank, outcome)
        found[rank] = int(match[1]), match[2], float(match[3]), match[4]
    return found


# --- one rank ends, the others wait in a barrier ---------------------------------------------------------------------

ENDINGS = {
    "exception": ("raise ValueError('bad row')", 1, "its process died|failed with ValueError: bad row"),
    "exception in with": ("with comm: raise ValueError('bad row')", 1, "failed with ValueError: bad row"),
    "sys.exit": ("with comm: sys.exit(5)", 5, "failed with SystemExit: 5"),
    "os._exit": ("os._exit(7)", 7, "its process died"),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "its process died"),
    "SIGSEGV": ("os.kill(os.getpid(), signal.SIGSEGV)", 128 + 11, "its process died"),
    "closes": ("comm.close()", 0, "closed its communicator"),
    "ends": ("sys.exit()", 0, "closed its communicator"),
}


@pytest.mark.parametrize(("ending", "status", "reason"), ENDINGS.values(), ids=ENDINGS.keys())
def test_a_rank_that_ends_is_named_at_once(run_ranks, ending, status, reason):
    outcome = run_ranks(
        4, f"{REPORT}\nif rank == 2:\n    settled()\n    {ending}\nelse:\n    report(comm.barrier)\n    comm.close()\n"
    )
    assert outcome.status == status
    for rank, (fault, stage, seconds, text) in faults(outcome, (0, 1, 3)).items():
        assert (fault, stage) == (2, "barrier"), rank
        assert seconds < AT_ONCE
        assert re.search(reason, text), text


def test_a_rank_that_stalls_is_named_when_the_time_is_up(run_ranks):
    body = f"if rank == 1:\n    until('reported', 0, 2)\nelse:\n    report(comm.barrier, timeout={SOON})\n"
    found = faults(run_ranks(3, f"{REPORT}\n{body}"), (0, 2))
    for fault, _, seconds, text in found.values():
        assert fault == 1
        assert seconds < AT_ONCE
        assert text.startswith("no answer")
    # Whose time was up first ended the other's wait too, which may have begun later.
    assert max(seconds for _, _, seconds, _ in found.values()) >= SOON


def test_a_stopped_process_is_named_when_the_time_is_up(run_ranks, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    body = (
        "if rank == 1:\n    settled()\n    os.kill(os.getpid(), signal.SIGSTOP)\nelse:\n"
        f"    report(comm.barrier, timeout={SOON})\n    until('reported', 0, 2)\n    comm.close()\n    os._exit(3)\n"
    )
    outcome = run_ranks(3, f"{REPORT}\n{body}")
    assert {fault for fault, *_ in faults(outcome, (0, 2)).values()} == {1}
    assert outcome.status == 3


def test_the_root_of_a_chain_of_waits_is_named_not_the_relay(run_ranks):
    """Rank 0 waits for 1, which waits for 2, which waits for 3, which stalls; rank 0's time is up first."""
    body = (
        "if rank == 3:\n    until('reported', 0, 1, 2)\nelif rank == 0:\n    until('waits', 1, 2)\n"
        f"    report(comm.wait, 0, 1, source=1, timeout={SOON})\n"
        "else:\n    mark('waits')\n    report(comm.wait, 0, 1, source=rank + 1)\n"
    )
    outcome = run_ranks(4, f"{REPORT}\n{body}")
    found = faults(outcome, (0, 1, 2))
    assert {rank: fault for rank, (fault, *_) in found.items()} == {0: 3, 1: 3, 2: 3}
    assert "rank 1 waits for rank 2 in stage 'wait', rank 2 waits for rank 3 in stage 'wait'" in found[0][3]


def test_a_wait_for_a_live_relay_ends_when_the_rank_behind_it_dies(run_ranks):
    body = (
        "if rank == 2:\n    settled()\n    time.sleep(0.3)\n    os._exit(1)\nreport(comm.wait, 0, 1, source=rank + 1)\n"
        "comm.close()\n"
    )
    outcome = run_ranks(3, f"{REPORT}\n{body}")
    for fault, _, seconds, _ in faults(outcome, (0, 1)).values():
        assert fault == 2
        assert seconds < AT_ONCE


def test_a_relay_that_closes_normally_passes_the_blame_on(run_ranks):
    """Rank 2 leaves; rank 1 fails by that; rank 0, which waits for rank 1 only, must hear of rank 2."""
    body = (
        "if rank == 2:\n    settled()\n    comm.close()\n    until('reported', 0, 1)\nelse:\n"
        "    report(comm.wait, 0, 1, source=rank + 1)\n    comm.close()\n"
    )
    outcome = run_ranks(3, f"{REPORT}\n{body}")
    found = faults(outcome, (0, 1))
    assert {rank: fault for rank, (fault, *_) in found.items()} == {0: 2, 1: 2}
    # Nobody was found out by the time limit, and rank 2 did leave: a stuck rank 2 would end in the same blame.
    assert outcome.status == 0, outcome
    assert all(seconds < AT_ONCE and text == "closed its communicator" for *_, seconds, text in found.values()), outcome


def test_waits_in_a_ring_say_so(run_ranks):
    script = f"{REPORT}\nreport(comm.wait, 0, 1, source=(rank + 1) % 3, timeout={SOON})\n"
    found = faults(run_ranks(3, script), (0, 1, 2))
    assert any("the ranks wait for each other" in text for *_, text in found.values())


def test_a_wait_without_a_source_names_those_that_do_not_wait(run_ranks):
    body = f"if rank == 1:\n    until('reported', 0, 2)\nelse:\n    report(comm.wait, 0, 1, timeout={SOON})\n"
    found = faults(run_ranks(3, f"{REPORT}\n{body}"), (0, 2))
    assert {fault for fault, *_ in found.values()} == {1}


def test_what_a_rank_signalled_before_it_left_still_arrives(run_ranks):
    body = (
        "if rank == 0:\n    settled()\n    queue.signal(0, 1)\n    comm.close()\nelse:\n    time.sleep(0.5)\n"
        "    print('got', comm.wait(0, 1, source=0))\n"
    )
    assert run_ranks(2, f"{REPORT}\n{body}").text(1) == "got 1"


@pytest.mark.parametrize("stage", ["window", "connect"])
def test_a_rank_that_dies_before_a_collective_call(run_ranks, stage):
    if stage == "window":
        script = f"{REPORT}\nif rank == 1:\n    settled()\n    os._exit(1)\nreport(comm.window, 64)\n"
    else:
        definitions = REPORT.partition("comm = ")[0]
        script = (
            f"{definitions}\nif os.environ['HAL_RANK'] == '1':\n    os._exit(1)\n"
            f"mark('here')\nuntil('here', 0, 2)\nreport(hal.connect, timeout={SOON})\nuntil('reported', 0, 2)\n"
        )
    found = faults(run_ranks(3, script), (0, 2))
    assert {(fault, at) for fault, at, *_ in found.values()} == {(1, "window" if stage == "window" else "rendezvous")}


@pytest.mark.parametrize("dying", [0, 1])
@pytest.mark.parametrize("call", ["comm.barrier", "comm.window, 8"])
def test_a_forked_helper_does_not_hide_a_death(run_ranks, dying, call):
    body = (
        f"if rank == {dying}:\n    settled()\n    if os.fork() == 0:\n        time.sleep({LIMIT})\n        os._exit(0)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        f"report({call})\n"
    )
    (fault, _, seconds, _) = faults(run_ranks(2, f"{REPORT}\n{body}"), (1 - dying,))[1 - dying]
    assert fault == dying
    assert seconds < AT_ONCE


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_after_a_peer_timeout_only_close_is_left():
    over = threading.Event()

    def body(comm: hal.Communicator) -> float:
        queue, window = comm.queue(), comm.window(8)
        if comm.rank == 1:
            assert over.wait(LIMIT)
            return 0.0
        with pytest.raises(PeerTimeout) as timeout:
            comm.wait(3, 5, timeout=0.2, source=1)
        error = timeout.value
        assert (error.rank, error.stage, error.expected, error.seen) == (1, "wait", 5, 0)
        assert 0.2 <= error.seconds < AT_ONCE
        calls = [comm.barrier, lambda: queue.signal(0, 0), lambda: queue.put(window, 0, b"x", 0), queue.quiet]
        calls += [lambda: comm.window(8), lambda: comm.wait(0, 0), lambda: comm.read_signal(0)]
        for call in calls:
            with pytest.raises(HalError, match="only be closed") as refused:
                call()
            assert not isinstance(refused.value, PeerTimeout)
        start = time.monotonic()
        comm.close()
        over.set()
        return time.monotonic() - start

    assert max(hal.spawn(2, body, timeout=LIMIT)) < AT_ONCE


def test_the_rank_that_was_given_up_hears_who_gave_up():
    given_up, heard = threading.Event(), threading.Event()

    def body(comm: hal.Communicator) -> None:
        if comm.rank == 1:
            assert given_up.wait(LIMIT)
            with pytest.raises(PeerTimeout, match="rank 0: gave up on this rank"):
                comm.wait(0, 1)
            heard.set()
        else:
            with pytest.raises(PeerTimeout):
                comm.wait(0, 1, timeout=0.2)
            given_up.set()
            assert heard.wait(LIMIT)

    hal.spawn(2, body, timeout=LIMIT)


# --- threads ---------------------------------------------------------------------------------------------------------


def test_spawn_raises_the_cause_and_names_its_rank():
    heard = []

    def body(comm: hal.Communicator) -> None:
        if comm.rank == 2:
            raise KeyError("expert")
        try:
            comm.wait(0, 1, source=0)
        except PeerTimeout as error:
            heard.append((error.rank, error.seconds < AT_ONCE))
            raise

    with pytest.raises(KeyError, match="expert") as raised:
        hal.spawn(4, body, timeout=LIMIT)
    assert raised.value.__notes__ == ["raised on rank 2 of 4"]
    assert heard == [(2, True)] * 3


def test_spawn_raises_what_came_first_also_when_that_rank_is_slow_to_leave(monkeypatch):
    """The others hear of a failure while the rank that failed still closes, and may end before it."""
    close = hal.Communicator.close

    def slowly(comm, error=None):
        close(comm, error)
        if comm.rank == 1:
            time.sleep(0.5)

    def body(comm):
        if comm.rank == 1:
            raise PeerTimeout(7, "a stage")
        comm.barrier()

    monkeypatch.setattr(hal.Communicator, "close", slowly)
    with pytest.raises(PeerTimeout) as told:
        hal.spawn(2, body, timeout=LIMIT)
    assert told.value.rank == 7


def test_spawn_does_not_wait_for_a_rank_that_never_returns(monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    over = threading.Event()

    def body(comm: hal.Communicator) -> None:
        if comm.rank == 0:
            assert over.wait(LIMIT)
        raise ValueError("first")

    with pytest.raises(ValueError, match="first") as raised:
        hal.spawn(2, body, timeout=LIMIT)
    over.set()
    assert any("left behind: 0" in note for note in raised.value.__notes__)


def test_an_interrupted_spawn_leaves_no_rank_in_native_code(monkeypatch):
    """A process that ends while one of its threads comes back from there is aborted by the C++ runtime."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", LIMIT)
    waiting = threading.Barrier(3)

    def body(comm: hal.Communicator) -> None:
        waiting.wait(LIMIT)
        comm.wait(0, 1, source=0)

    def interrupted(ranks: object) -> None:
        waiting.wait(LIMIT)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "_join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hal.spawn(2, body, timeout=LIMIT)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("hal-rank-")]


# --- the launcher ----------------------------------------------------------------------------------------------------


def processes(marker: str) -> dict[int, str]:
    """Those with ``marker`` in their command line: process id and command."""
    found = {}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if marker.encode() in process.read_bytes() and int(process.parent.name) != os.getpid():
                found[int(process.parent.name)] = process.read_bytes().replace(b"\0", b" ").decode()
    return found


def sockets(pids: Iterable[int]) -> set[str]:
    """The named Unix sockets that these processes hold open, as lines of /proc/net/unix."""
    held = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                held |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    return {line for line in Path("/proc/net/unix").read_text().splitlines() if "@" in line and line.split()[6] in held}


def until_nothing_is_left(marker: str, held: Iterable[str] = ()) -> None:
    """No such process, none of the sockets ``held`` once, and no file of HAL's in shared memory."""

    def left_behind() -> list[str]:
        open_now = Path("/proc/net/unix").read_text().splitlines()
        files = [str(path) for path in Path("/dev/shm").iterdir() if "hal" in path.name]
        return [*processes(marker).values(), *set(held).intersection(open_now), *files]

    deadline = time.monotonic() + AT_ONCE
    while (found := left_behind()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not found


def launcher(tmp_path: Path, body: str, n: int = 3) -> subprocess.Popen[str]:
    """``hal run`` in a process of its own; its output is what the ranks print."""
    script = tmp_path / "member.py"
    script.write_text(f"{REPORT}\nprint('ready', flush=True)\n{body}")
    code = (
        "import sys; from hal import launch; launch.GRACE_SECONDS = 60\n"
        f"sys.exit(launch.run({n}, [sys.executable, {str(script)!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert process.stdout is not None
    for _ in range(n):
        assert "ready" in process.stdout.readline()
    return process


@pytest.mark.parametrize("where", ["computing", "waiting"])
def test_nothing_survives_a_killed_launcher(tmp_path, where):
    body = f"time.sleep({LIMIT})" if where == "computing" else "comm.wait(0, 1, source=0)"
    with launcher(tmp_path, body) as process:
        running = processes(str(tmp_path))
        held = sockets(running)
        assert len(running) == 4
        assert any("@hal-" in line for line in held), "rank 0 listens for the others"
        process.kill()
        until_nothing_is_left(str(tmp_path), held)
    assert [p.name for p in tmp_path.iterdir()] == ["member.py"]


def test_an_interrupt_reaches_the_ranks_in_a_wait(tmp_path):
    body = "with comm:\n    comm.wait(0, 1, source=0)"
    with launcher(tmp_path, body) as process:
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=LIMIT)
    assert time.monotonic() - start < LIMIT / 2
    ends = re.findall(
        r"^\[rank (\d)\] (KeyboardInterrupt|hal.errors.PeerTimeout: .*KeyboardInterrupt)", output, re.MULTILINE
    )
    assert sorted(rank for rank, _ in ends) == ["0", "1", "2"]
    assert any(how == "KeyboardInterrupt" for _, how in ends)
    assert process.returncode == 128 + signal.SIGINT
    until_nothing_is_left(str(tmp_path))


def test_a_terminated_launcher_ends_its_ranks(tmp_path):
    with launcher(tmp_path, f"time.sleep({LIMIT})") as process:
        process.terminate()
        process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + signal.SIGTERM
    until_nothing_is_left(str(tmp_path))


def test_a_failed_rank_ends_the_others_after_a_grace(run_ranks, monkeypatch):
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    outcome = run_ranks(3, f"{REPORT}\nif rank == 1:\n    os._exit(9)\ntime.sleep({2 * LIMIT})\n")
    assert outcome.status == 9
    assert outcome.seconds < 2 * LIMIT


def test_a_run_over_its_time_limit_is_ended(run_ranks, tmp_path):
    outcome = run_ranks(2, f"import time\ntime.sleep({2 * LIMIT})\n", timeout=0.5)
    assert outcome.status == 124
    assert outcome.seconds < 2 * LIMIT
    until_nothing_is_left(str(tmp_path))


def test_what_a_rank_started_ends_with_it(run_ranks):
    seconds = f"{300 + os.getpid() / 1e7:.7f}"  # tells this test's processes from those of a run beside it
    script = f"import subprocess, sys\nsubprocess.Popen(['sleep', {seconds!r}])\nsys.exit(4)\n"
    assert run_ranks(2, script).status == 4
    until_nothing_is_left(f"sleep\0{seconds}")


def test_last_words_are_passed_on_by_a_launcher_that_was_not_run_for_long(monkeypatch):
    """Its time to wait for output is up before its first look; a background process of the rank still holds the pipe."""
    output, clock = io.BytesIO(), itertools.count(step=10.0)
    script = "import subprocess\nsubprocess.Popen(['sleep', '300'])\nprint('last words')\nprint('no newline', end='')\n"
    with launch._Ranks(output) as ranks:
        ranks.start(1, [sys.executable, "-c", script], 1, lambda rank: {}, prefix=True)
        ranks._processes[0].wait(LIMIT)
        monkeypatch.setattr(launch, "time", types.SimpleNamespace(monotonic=lambda: next(clock), sleep=time.sleep))
        ranks._drain(0.2)
        assert output.getvalue() == b"[rank 0] last words\n"
    assert output.getvalue() == b"[rank 0] last words\n[rank 0] no newline\n"


def test_output_is_passed_on_whole(run_ranks):
    outcome = run_ranks(2, "import sys\nprint('a' * 100000)\nsys.stderr.write('no newline')\n")
    assert outcome.lines == {r: ["a" * 100000, "no newline"] for r in range(2)}


@pytest.mark.parametrize(("n", "nodes"), [(0, 1), (3, 2), (2, 0)])
def test_a_layout_that_makes_no_sense_is_refused(n, nodes):
    with pytest.raises(ContractError, match=f"{n} ranks cannot be laid out on {nodes} equal nodes"):
        launch.run(n, ["true"], nodes=nodes)
