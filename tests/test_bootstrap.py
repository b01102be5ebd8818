# SPDX-License-Identifier: Apache-2.0
"""Who this process is, how ranks meet, and who is turned away."""

from __future__ import annotations

import ast
import inspect
import itertools
import os
import secrets
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hal import bootstrap, launch, rendezvous
from hal.bootstrap import Bootstrap, Run, current_run
from hal.errors import ContractError, HalError, PeerTimeout
from hal.rendezvous import decode, encode

TIMEOUT = 60.0
"""Seconds; only a hang meets it. Where a time limit must be met it is a few seconds, since a busy machine may not run a
thread for as long."""


def together(
    n: int, body: Callable[[Bootstrap], Any], *, timeout: float = TIMEOUT, absent: tuple[int, ...] = ()
) -> Any:
    """``body`` on every rank but the absent; results or exceptions in rank order."""
    token, outcomes = secrets.token_hex(16), [None] * n

    def rank(r: int) -> None:
        try:
            met = Bootstrap(Run(r, n, token), timeout)
            try:
                outcomes[r] = body(met)
            finally:
                met.close()
        except Exception as error:
            outcomes[r] = error

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(n) if r not in absent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT)
        assert not thread.is_alive()
    return outcomes


# --- who am I ------------------------------------------------------------------------------------------------------


def test_no_launcher_is_a_single_rank():
    assert current_run({}) == Run(0, 1)


def test_hal_run_variables():
    run = current_run({"HAL_RANK": "2", "HAL_WORLD_SIZE": "4", "HAL_TOKEN": "t", "HAL_NODES": "2", "RANK": "0"})
    assert (run.rank, run.world_size, run.token, run.nodes) == (2, 4, "t", 2)


TORCHRUN = {
    "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
}  # fmt: skip
OPENMPI = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-1"}


@pytest.mark.parametrize(
    ("rank", "variables"),
    [("RANK", TORCHRUN), ("OMPI_COMM_WORLD_RANK", OPENMPI), ("PMI_RANK", {"PMI_SIZE": "4"})],
    ids=["torchrun", "openmpi", "mpich"],
)
def test_other_launchers_agree_on_a_token(rank, variables, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    runs = [current_run({**variables, rank: str(r)}) for r in range(4)]
    assert [run.rank for run in runs] == [0, 1, 2, 3]
    assert {run.world_size for run in runs} == {4}
    assert len({run.token for run in runs}) == 1
    assert len(runs[0].token) == 64


def test_another_torchrun_job_has_another_token(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one = current_run({**TORCHRUN, "RANK": "0"})
    restarted = current_run({**TORCHRUN, "RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"})
    assert one.token != restarted.token


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"HAL_RANK": "4", "HAL_WORLD_SIZE": "4", "HAL_TOKEN": "t"}, "rank 4 of 4"),
        ({"HAL_RANK": "x", "HAL_WORLD_SIZE": "4"}, "HAL_RANK must be an integer, not 'x'"),
        ({"HAL_RANK": "0"}, "HAL_WORLD_SIZE must be an integer, not None"),
        ({"HAL_RANK": "0", "HAL_WORLD_SIZE": "2"}, "HAL_TOKEN"),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "16"}, "16 ranks, 4 of them on this machine"),
    ],
)
def test_variables_that_make_no_sense(variables, text):
    with pytest.raises(ContractError, match=text):
        current_run(variables)


SRUN = {"SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7"}


def test_tasks_of_a_plain_srun_are_not_each_rank_0_of_1():
    for task in "03":
        with pytest.raises(ContractError, match=rf"task {task} of 4.*torchrun, `hal run -n N.*srun --mpi=pmi2.*run="):
            current_run({**SRUN, "SLURM_PROCID": task})


def test_under_slurm_a_launcher_is_believed_and_one_process_is_one_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    task = {**SRUN, "SLURM_PROCID": "3"}
    assert current_run({**task, "PMI_RANK": "3", "PMI_SIZE": "4"}).rank == 3
    assert current_run({**task, "RANK": "1", **TORCHRUN}).rank == 1
    assert current_run({**task, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) == Run(0, 1)
    batch_script = {"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}
    assert current_run(batch_script) == Run(0, 1)


def test_under_a_plain_srun_a_run_can_be_stated(monkeypatch):
    for name, value in {**SRUN, "SLURM_PROCID": "3"}.items():
        monkeypatch.setenv(name, value)
    with launch.connect(run=Run(0, 1)) as comm:
        assert comm.world_size == 1


def test_user_key_is_private_and_stable(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    key = bootstrap.user_key()
    folder = tmp_path / f"hal-{os.getuid()}"
    assert (len(key), bootstrap.user_key()) == (32, key)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [(f.name, stat.S_IMODE(f.stat().st_mode)) for f in folder.iterdir()] == [("key", 0o600)]


def test_a_folder_that_others_can_enter_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / f"hal-{os.getuid()}").mkdir()
    (tmp_path / f"hal-{os.getuid()}").chmod(0o755)
    with pytest.raises(HalError, match="not a private folder"):
        bootstrap.user_key()


def test_a_link_in_place_of_the_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / f"hal-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HalError, match="not a private folder"):
        bootstrap.user_key()


# --- exchanges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5])
def test_all_gather_is_in_rank_order(n):
    def body(met: Bootstrap) -> Any:
        met.barrier()
        return [met.all_gather({"rank": met.rank, "round": i}) for i in range(3)], met.all_gather(b"\x00%d" % met.rank)

    expected = [[{"rank": r, "round": i} for r in range(n)] for i in range(3)], [b"\x00%d" % r for r in range(n)]
    assert together(n, body) == [expected] * n


def test_large_values_pass():
    blob = os.urandom(1 << 20)
    assert together(3, lambda met: met.all_gather(blob) == [blob] * 3) == [True] * 3


def test_different_collectives_are_named_on_every_rank():
    outcomes = together(3, lambda met: met.all_gather(1, "window" if met.rank else "expert_parallel"))
    for outcome in outcomes:
        assert isinstance(outcome, ContractError)
        assert "rank 0 called 'expert_parallel', rank 1 called 'window'" in str(outcome)


def test_settings_that_differ_are_all_named_with_both_values():
    def body(met: Bootstrap) -> None:
        odd = met.rank == 2
        met.agree("HalConfig", {"queues": 4 if odd else 2, "topology": {"nodes": 3 if odd else 1}, "timeout": 5.0})

    for outcome in together(3, body):
        assert isinstance(outcome, ContractError)
        assert "rank 2 has queues=4 where rank 0 has 2" in str(outcome)
        assert "rank 2 has topology.nodes=3 where rank 0 has 1" in str(outcome)
        assert "timeout" not in str(outcome)


def test_an_answer_that_crossed_the_question_is_not_taken_for_the_next_exchange():
    """A rank whose time was up just before the answer came asks who is missing, of an exchange that has ended."""

    def body(met: Bootstrap) -> Any:
        first = met.all_gather(met.rank)
        if met.rank == 1:
            met._send({"who": None})
            met._send({"who": 0})
        return first, met.all_gather(10 + met.rank)

    assert together(2, body) == [([0, 1], [10, 11])] * 2


# --- absence -------------------------------------------------------------------------------------------------------


def test_ranks_that_never_come_are_listed():
    outcomes = together(5, lambda met: None, timeout=5.0, absent=(2, 4))
    for rank in (0, 1, 3):
        assert isinstance(outcomes[rank], PeerTimeout)
        assert outcomes[rank].rank == 2
        assert (outcomes[rank].expected, outcomes[rank].seen) == (5, 3)
        assert str(outcomes[rank]).startswith("ranks 2, 4 missing of 5 in stage 'rendezvous' after ")


def test_ranks_that_lost_patience_are_not_said_to_be_missing():
    token, outcomes = secrets.token_hex(16), {}

    def rank(r: int, timeout: float) -> None:
        try:
            Bootstrap(Run(r, 4, token), timeout).close()
        except PeerTimeout as error:
            outcomes[r] = error

    # Rank 0 would serve for long; rank 1 gives up well before rank 3 does; rank 2 never comes.
    threads = [threading.Thread(target=rank, args=pair) for pair in ((0, 8.0), (1, 2.0), (3, 5.0))]
    threads[0].start()
    until_served(bootstrap.address(token, 0))
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert sorted(outcomes) == [0, 1, 3]
    for r in (0, 3):
        assert "rank 2 missing of 4" in str(outcomes[r])
        assert (outcomes[r].rank, outcomes[r].seen) == (2, 3)


def test_a_missing_rank_0_is_named():
    outcomes = together(2, lambda met: None, timeout=0.3, absent=(0,))
    assert isinstance(outcomes[1], PeerTimeout)
    assert outcomes[1].rank == 0


def test_a_rank_that_leaves_ends_the_others_exchange_at_once():
    def body(met: Bootstrap) -> float:
        if met.rank == 1:
            time.sleep(0.1)  # the others are mostly in their exchange by now
            return 0.0
        start = time.monotonic()
        with pytest.raises(PeerTimeout, match="rank 1: it closed its communicator"):
            met.all_gather(0)
        return time.monotonic() - start

    assert max(together(3, body)) < TIMEOUT / 4


def test_a_rank_that_stalls_is_named_after_the_time_limit():
    named = threading.Barrier(3)

    def body(met: Bootstrap) -> PeerTimeout | None:
        error = None
        if met.rank != 1:
            with pytest.raises(PeerTimeout) as caught:
                met.all_gather(0, "sizes", timeout=3.0)
            error = caught.value
        named.wait(TIMEOUT)
        return error

    outcomes = together(3, body)
    for rank in (0, 2):
        assert (outcomes[rank].rank, outcomes[rank].stage) == (1, "sizes")
        assert 3.0 <= outcomes[rank].seconds < TIMEOUT / 4


# --- strangers -----------------------------------------------------------------------------------------------------


def until_served(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        while stranger.connect_ex(name):
            time.sleep(0.01)


def knock(name: str, data: bytes) -> dict[str, Any]:
    """What the server answers to a connection that begins with ``data``."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.settimeout(TIMEOUT)
        while stranger.connect_ex(name):
            time.sleep(0.01)
        stranger.sendall(data)
        buffer = bytearray(stranger.recv(4096))
        return decode(buffer, 1 << 20) or {}


@pytest.mark.parametrize("moment", ["before", "after"])
def test_strangers_are_told_why_not_and_disturb_nobody(moment):
    token = secrets.token_hex(16)
    hello = {"token": token, "rank": 1, "world_size": 2, "version": bootstrap.__version__}
    release, results = threading.Event(), {}

    def member(rank: int) -> None:
        met = Bootstrap(Run(rank, 2, token), TIMEOUT)
        results[rank] = met.all_gather(rank)
        release.wait(TIMEOUT)
        results[rank] += met.all_gather(rank)
        met.close()

    members = [threading.Thread(target=member, args=(r,)) for r in range(2)]
    name = bootstrap.address(token, 0)
    members[0].start()
    if moment == "after":
        members[1].start()
        while len(results) < 2:
            time.sleep(0.01)
    with socket.socket(socket.AF_UNIX) as silent:
        while silent.connect_ex(name):
            time.sleep(0.01)
        for data, reason in [
            (encode({**hello, "token": "guess"}), "wrong run token"),
            (encode({**hello, "world_size": 3}), "rank 1 expects 3 ranks, this run has 2"),
            (encode({**hello, "rank": 7}), "there is no rank 7 among 2"),
            (encode({**hello, "rank": 0}), "rank 0 is taken by another process"),
            (encode({**hello, "version": "0.0"}), "rank 1 runs HAL 0.0"),
            (b"GET / HTTP/1.1\r\n\r\n", "not a HAL rank"),
            (os.urandom(2048), "not a HAL rank"),
            (encode({**hello, "rank": [1]}), "rank"),
            (b"\x00\x00\x00\x02[]", "not a HAL rank"),
        ]:
            assert reason in knock(name, data)["refused"]
        if moment == "before":
            members[1].start()
        release.set()
        for thread in members:
            thread.join(TIMEOUT)
    assert results == {0: [0, 1, 0, 1], 1: [0, 1, 0, 1]}


def test_a_second_process_for_rank_0_is_refused():
    def body(met: Bootstrap) -> None:
        if met.rank == 0:
            bootstrap._meetings[met.run.token, 0] = 0
            with pytest.raises(ContractError, match="rank 0 is taken by another process"):
                Bootstrap(met.run, TIMEOUT)
        met.barrier()

    assert together(2, body) == [None, None]


def test_a_rank_is_not_taken_for_silent_by_a_server_that_was_not_run_for_long(monkeypatch):
    """Ten seconds pass between the server's accepting a rank and its next line, longer than a stranger may be silent."""
    calls = itertools.count()
    clock = types.SimpleNamespace(monotonic=lambda: time.monotonic() + (10.0 if next(calls) >= 2 else 0.0))
    monkeypatch.setattr(rendezvous, "time", clock)
    assert together(2, lambda met: met.all_gather(met.rank)) == [[0, 1]] * 2


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to start a process of another user")
def test_another_user_is_refused():
    def body(met: Bootstrap) -> str:
        text = ""
        if met.rank == 0:
            script = (
                "import socket, sys; s = socket.socket(socket.AF_UNIX); s.settimeout(60)\n"
                "s.connect(sys.argv[1].encode().decode('unicode_escape')); print(s.recv(4096)[4:].decode())"
            )
            name = bootstrap.address(met.run.token, 0).replace("\0", "\\0")
            command = ["/usr/bin/env", "python3", "-c", script, name]
            text = subprocess.run(command, user=65534, capture_output=True, text=True, check=True, cwd="/").stdout
        met.barrier()
        return text

    assert "belongs to user 0, not to user 65534" in together(2, body)[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to start a process of another user")
def test_a_meeting_point_that_another_user_took_is_refused():
    token = secrets.token_hex(16)
    script = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX)\n"
        "s.bind(sys.argv[1].encode().decode('unicode_escape')); s.listen(); print(flush=True); sys.stdin.read()"
    )
    name = bootstrap.address(token, 0).replace("\0", "\\0")
    command = ["/usr/bin/env", "python3", "-c", script, name]
    with subprocess.Popen(command, user=65534, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd="/") as squatter:
        assert squatter.stdout is not None
        squatter.stdout.readline()
        with pytest.raises(ContractError, match="taken by user 65534"):
            Bootstrap(Run(1, 2, token), TIMEOUT)
        squatter.communicate()


# --- nothing stale -------------------------------------------------------------------------------------------------


def test_a_killed_run_does_not_block_the_next_of_the_same_name(tmp_path):
    """torchrun's variables repeat from run to run; what a killed one left must not matter."""
    script = tmp_path / "member.py"
    script.write_text(
        "import sys, time\nfrom hal.bootstrap import Bootstrap, current_run\n"
        "met = Bootstrap(current_run(), 60)\nprint(met.all_gather(met.rank), flush=True)\n"
        "time.sleep(300 if sys.argv[1] == 'stay' else 0)\n"
    )
    environment = {
        **os.environ,
        **TORCHRUN,
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "XDG_RUNTIME_DIR": str(tmp_path),
    }

    def start(mode: str) -> list[subprocess.Popen[str]]:
        return [
            subprocess.Popen(
                [sys.executable, str(script), mode],
                env={**environment, "RANK": str(r)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in range(2)
        ]

    for mode in ("stay", "leave"):
        members = start(mode)
        try:
            answers = [member.stdout.readline() for member in members if member.stdout]
            if mode == "leave":
                assert [member.wait(TIMEOUT) for member in members] == [0, 0]
        finally:
            for member in members:
                member.kill()
                member.communicate()
        assert answers == ["[0, 1]\n"] * 2
    assert sorted(p.name for p in Path(tmp_path).iterdir()) == [f"hal-{os.getuid()}", "member.py"]


@pytest.mark.parametrize("kind", [rendezvous.Server, launch._RankThread])
def test_threads_keep_clear_of_their_base_class(kind: type[threading.Thread]) -> None:
    """Python adds private attributes to Thread from release to release, and an attribute of ours would hide them."""
    theirs = set(dir(threading.Thread)) | set(vars(threading.Thread()))
    own = {name for name in vars(kind) if not name.startswith("__")} | set(_assigned(kind))
    assert own & theirs <= {"run", "start", "daemon"}


def _assigned(kind: type[threading.Thread]) -> set[str]:
    text = textwrap.dedent(inspect.getsource(kind))
    return {
        node.attr
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }
