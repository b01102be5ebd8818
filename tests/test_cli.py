# SPDX-License-Identifier: Apache-2.0
"""The `hal` command as a user meets it: what it prints, its exit status, and one line for each mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hal.cli import COMMANDS, main


def hal(*words: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hal.cli", *words],
        cwd=cwd,
        env={**os.environ, **environ},
        text=True,
        capture_output=True,
        check=False,
    )


def ok(*words: str, cwd: Path | None = None) -> str:
    done = hal(*words, cwd=cwd)
    assert done.returncode == 0, f"{words}: status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line on stderr, for a mistake that no rank is needed to see."""
    try:
        status = main(words)
    except SystemExit as stop:  # argparse's own
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.count("\n") == 1, err
    return err


def test_usage_lists_every_command() -> None:
    done = hal()
    assert done.returncode == 2
    assert all(f"  {name} " in done.stdout for name in COMMANDS)
    assert ok("--help") == done.stdout
    assert ok("--version").startswith("hal ")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([name, "--help"])
    assert stop.value.code == 0
    assert f"usage: hal {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["dmeo"], ["no command 'dmeo'", "demo", "bench"]),
        (["demo", "--colour"], ["--colour", "--help"]),
        (["demo", "workload=huge"], ["workload=huge", "small", "v3_decode"]),
        (["demo", "--text", "/nonexistent/text"], ["/nonexistent/text", "No such file"]),
        (["demo", "--routing", "/nonexistent.npz"], ["/nonexistent.npz"]),
        (["demo", "--layers", "0"], ["--layers is 0"]),
        (["run", "-n", "2"], ["say what to run"]),
        (["run", "-n", "3", "--hosts", "2", "x.py"], ["3 ranks", "2 equal nodes", "1, 3"]),
        (["run", "-n", "0", "--hosts", "1", "x.py"], ["0 ranks", "at least 1"]),
        (["run", "-n", "2", "--transport", "shm", "x.py"], ["--transport shm", "--backend"]),
        (["run", "-n", "2", "--backend", "cudda", "--hosts", "2", "true"], ["cudda", "cuda"]),
        (["run", "-n", "2", "--backend", "ascend", "--transport", "shm", "true"], ["shm", "ascend"]),
        (["demo", "--hosts", "3"], ["4 ranks", "3 equal nodes", "1, 2, 4"]),
        (["demo", "--hosts", "2", "topology.nodes=4"], ["--hosts 2", "topology.nodes=4", "one of them"]),
        (["bench", "put", "--hosts", "2", "topology=four_nodes"], ["--hosts 2", "topology=four_nodes"]),
        (["size", "-n", "2", "ranks=4"], ["-n 2", "ranks=4"]),
        (["bench", "put", "-n", "3", "--hosts", "2"], ["3 ranks", "2 equal nodes"]),
        (["run", "-n", "2", "nonexistent.py"], ["no such script: nonexistent.py"]),
        (["run", "-n", "2", "nonexistent-program"], ["no such program: nonexistent-program"]),
        (["run", "script.py"], ["-n/--ranks"]),
        (["bench", "gather"], ["gather", "dispatch", "signal"]),
        (["bench", "dispatch", "--sizes", "1,many"], ["1,many", "1,16,128"]),
        (["bench", "dispatch", "--sizes", "65"], ["65 tokens", "workload.tokens=64"]),
        (["bench", "put", "--sizes", "0"], ["0", "at least 1"]),
        (["bench", "put", "--iterations", "0"], ["--iterations is 0"]),
        (["bench", "put", "--json", "/nonexistent/x.json"], ["/nonexistent is not a folder"]),
        (["bench", "dispatch", "workload=small,skewed"], ["-m"]),
        (["doctor", "--require", "abacus"], ["abacus", "host"]),
        (["size", "ranks=4", "topology.nodes=3"], ["4 ranks", "3 equal nodes"]),
        (["size", "ranks=5"], ["16", "5"]),
        (["size", "backend=cuda", "completion=strong_last"], ["strong_last", "UDMA queues"]),
        (["size", "backend=cudda"], ["backend=cudda", "cuda"]),
        (["size", "backend=host", "transport=lsa"], ["lsa", "serves cuda", "shm"]),
        (["size", "topology=2"], ["topology takes a choice", "two_nodes", "topology.nodes"]),
        (["size", "timeout=inf"], ["timeout", "1000000"]),
        (["run", "-n", "2", "--", "nonexistent.py"], ["no such script: nonexistent.py"]),
        (["bench", "put", "--json", "/"], ["cannot write '/'", "name of a file"]),
        (["bench", "put", "--json", ""], ["cannot write ''", "name of a file"]),
        (["bench", "completion", "-m", "workload=small,skewed"], ["leave -m out"]),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, *words)
    for part in expected:
        assert part in line


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode_gets_escapes(encoding: str) -> None:
    done = hal("--help", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"[key=value \u2026]" in done.stdout
    assert r"size ranks=\u2026" in hal("size", "size ranks=…", PYTHONIOENCODING=encoding).stderr


@pytest.mark.parametrize("words", [["--help"], ["env"], ["run", "-n", "1", "echo", "hello"]])
@pytest.mark.parametrize(("into", "status"), [("| (exec <&-; true)", 1), (">/dev/full", 1), (">&-", 0)])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_takes_is_no_traceback(words: list[str], into: str, status: int, unbuffered: str) -> None:
    command = f"set -o pipefail; {sys.executable} -m hal.cli {' '.join(words)} {into}"
    done = subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        text=True,
        capture_output=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    if into.startswith("|"):  # the reader may be gone before or after what a pipe holds
        assert done.returncode in (0, status)
    else:
        assert done.returncode == status
    if into == ">/dev/full":
        assert done.stderr.count("\n") == 1
        assert "No space left on device" in done.stderr


def test_an_interrupted_command_ends_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hal.cli", "bench", "dispatch", "--iterations", "100000000", "--sizes", "4", "-n", "2"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as process:
        started = time.monotonic()
        while len(members := ranks_under(tmp_path)) < 2 or not all(map(has_connected, members)):
            assert process.poll() is None
            assert time.monotonic() < started + 240
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT
    assert "Traceback" not in out + err
    assert err == ""
    assert not list(tmp_path.iterdir())


def ranks_under(folder: Path) -> list[int]:
    """Processes that a command started as its ranks, by the folder that they were given."""
    found = []
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = line.read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if b"hal.cli.ranks" in words and any(word.startswith(bytes(folder)) for word in words):
            found.append(int(line.parent.name))
    return found


def has_connected(process: int) -> bool:
    """Whether it maps symmetric memory."""
    try:
        return "memfd" in Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return False


def test_run_takes_the_usual_separator(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert ok("run", "-n", "1", "--", "script.py", "--", "x", cwd=tmp_path) == "[rank 0] ['--', 'x']\n"


def test_hal_debug_shows_the_traceback() -> None:
    done = hal("demo", "workload=huge", HAL_DEBUG="1")
    assert "Traceback" in done.stderr
    assert "ContractError" in done.stderr


def test_a_rank_that_refuses_is_reported_once() -> None:
    done = hal("demo", "ranks=3")  # 16 experts
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "16" in done.stderr
    assert "Traceback" not in done.stdout


def test_an_unusable_backend_says_why_and_how_to_mend_it() -> None:
    done = hal("demo", "backend=ascend")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/dev/davinci0" in done.stderr
    assert "install" in done.stderr


# --- what is here -------------------------------------------------------------------------------------------------


def test_a_transport_of_another_backend_says_which_to_add(capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(capsys, "demo", "transport=gin_emulated")
    assert "serves cuda, not backend 'host': add backend=cuda, or choose a transport of 'host': shm" in err


def test_doctor_names_every_backend_and_transport() -> None:
    text = ok("doctor")
    for line in ("ok  backend host", "no  backend ascend", "ok  transport shm"):
        assert line in text
    assert text.count("why") == text.count("fix") == text.count("no  ")


def test_doctor_as_json_has_stable_keys() -> None:
    report = json.loads(ok("doctor", "--json", "--require", "host"))
    assert set(report) == {"versions", "entries", "machine", "required"}
    assert report["required"] == {"host": True}
    keys = {"name", "kind", "serves", "description", "usable", "reason", "fix"}
    assert all(set(entry) == keys for entry in report["entries"])
    host = next(entry for entry in report["entries"] if entry["name"] == "host")
    assert host["usable"]
    assert host["serves"][0] == "shm"
    assert all(entry["usable"] or (entry["reason"] and entry["fix"]) for entry in report["entries"])


def test_doctor_requires() -> None:
    done = hal("doctor", "--require", "ascend", "--require", "host")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "required, but not usable: backend ascend"


def test_a_broken_plug_in_does_not_hide_the_others(tmp_path: Path) -> None:
    info = tmp_path / "broken-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hal.backends]\nbroken = broken_plug_in:SPEC\nbad_probe = bad_probe_plug_in:SPEC\n"
    )
    (tmp_path / "bad_probe_plug_in.py").write_text(
        "from hal.backend import BackendSpec\n"
        "def probe(): raise OSError('no such bus')\n"
        "SPEC = BackendSpec('bad_probe', probe, None, 'shm')\n"
    )
    done = hal("doctor", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "no  backend broken" in done.stdout
    assert "broken_plug_in" in done.stdout
    assert "its probe failed: OSError: no such bus" in done.stdout
    assert "ok  backend host" in done.stdout


def test_backends_is_a_table() -> None:
    lines = ok("backends").splitlines()
    assert lines[0].split() == ["name", "kind", "here", "works", "with", "what"]
    assert any(line.split()[:4] == ["host", "backend", "usable", "shm"] for line in lines)


def test_env_names_the_versions() -> None:
    import numpy as np

    assert json.loads(ok("env", "--json"))["numpy"] == np.__version__
    assert f"numpy              {np.__version__}" in ok("env")


# --- size -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "backend", [[], ["backend=ascend", "transport=udma_emulated"], ["backend=cuda", "transport=gin_emulated"]]
)
def test_size_is_what_an_expert_parallel_allocates(backend: list[str]) -> None:
    import hal as package

    words = [
        *backend,
        "schedule=hierarchical",
        "topology.nodes=2",
        "layout=expert",
        "alignment=8",
        "workload.hidden=64",
    ]
    told = json.loads(ok("size", "--json", *words))
    assert told["total"] == sum(part["nbytes"] for part in told["parts"])
    assert all(part["formula"] for part in told["parts"])
    settings = package.load_config(words)

    def allocated(comm: package.Communicator) -> int:
        with comm.expert_parallel(settings.expert_parallel) as ep:
            return ep.buffer_bytes

    assert package.spawn(settings.ranks, allocated, config=settings.connection) == [told["total"]] * settings.ranks


def test_size_needs_no_device() -> None:
    from hal_cuda.layout import layout

    import hal as package
    from hal._validate import complete_spec

    for words in (["workload=v3_decode"], ["workload=v3_prefill", "layout=expert"]):
        told = json.loads(ok("size", "--json", "backend=cuda", "ranks=8", *words))
        assert told["total"] == sum(part["nbytes"] for part in told["parts"])
        spec = complete_spec(package.load_config(words).expert_parallel, 8, 1.0)
        push = spec.layout == "rank" and spec.max_tokens > 512
        assert told["total"] == layout(spec, 8, push).total
    assert "staging" in ok("size", "backend=ascend", "workload=v3_decode", "ranks=8")


def test_size_explains_each_part() -> None:
    text = ok("size", "workload=v3_decode", "ranks=8")
    assert "row 7168 x float8_e4m3fn = 7168 B, scales 224 B, combined row 7168 x bfloat16 = 14336 B" in text
    assert "receive" in text
    assert "num_buffers x most rows that can arrive" in text
    assert "total" in text


# --- run ------------------------------------------------------------------------------------------------------------


def test_run_starts_ranks_and_passes_arguments(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, hal\nwith hal.connect() as comm:\n"
        "    print(comm.rank, comm.world_size, comm.team('lsa').size, sys.argv[1:], flush=True)\n    comm.barrier()\n"
    )
    lines = sorted(ok("run", "-n", "2", "--hosts", "2", "script.py", "--flag", "word", cwd=tmp_path).splitlines())
    assert lines == [f"[rank {rank}] {rank} 2 1 ['--flag', 'word']" for rank in range(2)]


def test_run_returns_the_failing_ranks_status(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import os, sys; sys.exit(7 if os.environ['HAL_RANK'] == '1' else 0)\n")
    assert hal("run", "-n", "2", "script.py", cwd=tmp_path).returncode == 7


# --- bench ----------------------------------------------------------------------------------------------------------

QUICK = ("--iterations", "3", "--warmup", "1")


def numbers(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
@pytest.mark.parametrize(
    "extra", [["layout=rank"], ["layout=expert", "alignment=4", "schedule=hierarchical", "topology.nodes=2"]]
)
def test_bench_of_rows_is_checked_and_counted(operation: str, extra: list[str]) -> None:
    text = ok("bench", operation, *QUICK, "--sizes", "0,5,64", "ranks=2", *extra)
    assert "# tokens" in text
    rows = numbers(text)
    assert [row[0] for row in rows] == ["0", "5", "64"]
    for row in rows:
        logical, link, local, wrong = int(row[1]), int(row[10]), int(row[11]), int(row[9])
        assert wrong == 0
        assert logical == link + local or logical <= link + local  # Each is the largest over ranks.
        assert logical % 512 == 0  # Rows of 256 bfloat16.


def test_bench_sweeps_and_writes_json_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs moe-hal[plot]")
    text = ok(
        "bench", "dispatch", "-m", *QUICK, "--sizes", "4", "ranks=1,2", "workload=small",
        "--json", "out.json", "--plot", "out.png", cwd=tmp_path,
    )  # fmt: skip
    assert [line for line in text.splitlines() if line.startswith("# hal bench")] == [
        "# hal bench dispatch ranks=1",
        "# hal bench dispatch ranks=2",
    ]
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [run["settings"]["ranks"] for run in runs] == [1, 2]
    assert runs[0]["rows"][0]["traffic"]["link"] == 0  # One rank: every row is local.
    assert runs[1]["rows"][0]["traffic"]["link"] > 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_bench_plot_without_matplotlib_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else real(name, *rest)
    )
    assert "moe-hal[plot]" in refused(capsys, "bench", "put", "--plot", "x.png")


def test_bench_put_and_signal() -> None:
    rows = numbers(ok("bench", "put", *QUICK, "--sizes", "1,4096", "ranks=2"))
    assert [(row[0], row[8]) for row in rows] == [("1", "0"), ("4096", "0")]
    rows = numbers(ok("bench", "signal", *QUICK, "ranks=3"))
    assert [(row[0], row[8]) for row in rows] == [("8", "0")]


def test_bench_signal_needs_two_ranks() -> None:
    done = hal("bench", "signal", *QUICK, "ranks=1")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "ranks=2" in done.stderr
