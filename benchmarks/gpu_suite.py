# SPDX-License-Identifier: Apache-2.0
"""Everything that a machine with 1, 2, 4 or 8 NVIDIA GPUs has to say, in one launch of under ten minutes (docs/cuda.md).

    python benchmarks/gpu_suite.py --out RESULTS                 # all parts, on all GPUs
    python benchmarks/gpu_suite.py --out RESULTS --parts build,benchmark
    python benchmarks/gpu_suite.py --out RESULTS --rehearse --ranks 4    # on CPUs, transport gin_emulated, tiny sizes

Builds what is missing, runs the tests marked cuda, the contract suite, the benchmark with one rank for each GPU, the
hierarchical schedule on make-believe hosts, litmus programs with their histograms, the check of the software NIC, and
compute-sanitizer. Each part has a time limit: one that runs over is ended and reported, and the rest goes on. Results are
written as they come to RESULTS/<date>-gpu-suite.json, the parts' output to a .log beside it, and the table printed at the
end to a .txt. What was skipped says why. The exit status is 1 if any part failed or was ended.

Needs Python >= 3.11 with numpy, torch and pytest, nvcc, a C++20 compiler, and NCCL >= 2.30.7 (its wheel, or
HAL_NCCL_HOME). Hydra, pytest-xdist and pytest-timeout are not needed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EMULATED = "gin_emulated"
REORDER = "reorder=300us,split=32,source_early,complete=100us,publish=300us"
LAYOUTS = ((2, 2), (2, 4), (4, 2))
"""Make-believe hosts × ranks on each."""
REHEARSED = ("mp-flag", "mp-strong", "two-queues", "two-submitters")
"""Litmus programs of a rehearsal."""
REHEARSAL = 6
"""Times as long as on GPUs may a part take on CPUs that others use too."""
OVER_HOSTS = ("test_hosts_on_gpus.py", "test_gin.py")
SHARED_BY = 2
"""At most so many ranks on one GPU, where they take turns of about 2 ms."""


@dataclass(frozen=True)
class Machine:
    """Where the suite runs, and how."""

    ranks: int
    gpus: int
    rehearse: bool
    scratch: Path
    python: str = sys.executable

    def script(self, path: str, *words: object) -> list[str]:
        return [self.python, str(ROOT / path), *map(str, words)]

    def module(self, name: str, *words: object) -> list[str]:
        return [self.python, "-m", name, *map(str, words)]

    def result(self, name: str) -> Path:
        """Where a part leaves its own JSON, which becomes part of the suite's."""
        return self.scratch / f"{name}.json"


@dataclass
class Step:
    """One command of a part. ``read`` turns what it left into results, also when it was ended."""

    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    read: Callable[[str], dict[str, Any]] = lambda log: {}
    needed: bool = True
    """Whether its failure fails the part and ends it."""


@dataclass(frozen=True)
class Part:
    """``steps`` run one after the other within ``seconds``, and what earlier parts left of theirs. ``why_not`` says why
    they do not run here; empty: they do."""

    name: str
    seconds: float
    steps: Callable[[Machine], Iterator[Step]]
    why_not: Callable[[Machine], str] = lambda machine: ""
    usual: bool = True
    """Whether it runs when no parts are named: those that do fit into ten minutes."""


# --- parts -----------------------------------------------------------------------------------------------------------


def build(machine: Machine) -> Iterator[Step]:
    """The package, the kernels, and the software NIC."""
    if not installed():
        options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--editable"]
        yield Step(machine.module("pip", "install", *options, ROOT))
    if machine.rehearse:
        yield Step(machine.module("hal.cli", "doctor", "--json"), needed=False)
        return
    yield Step(machine.module("hal_cuda.build"))
    yield Step([machine.python, "-c", "from hal_cuda import software_nic; print(software_nic.library())"])
    yield Step(machine.module("hal.cli", "doctor"), needed=False)


def tests(machine: Machine) -> Iterator[Step]:
    # What test_device_litmus.py plays is a part of its own, with the histograms, and so is what runs over hosts.
    apart = ("test_device_litmus.py", *OVER_HOSTS)
    chosen = (
        ["tests/cuda", f"--ranks={tested(machine)}", *(f"--ignore=tests/cuda/{name}" for name in apart)]
        if not machine.rehearse
        else ["tests/cuda/test_oracle.py", "-k", "bfloat16-rank-direct"]
    )
    yield Step(pytest(machine, *chosen), read=read_pytest)


def tested(machine: Machine) -> int:
    """Ranks of tests/cuda: as many as divide the experts of its tests."""
    return max(ranks for ranks in (2, 4, 8) if ranks <= max(machine.ranks, 2))


def hosts_tests(machine: Machine) -> Iterator[Step]:
    """Over make-believe hosts and the software NIC; up to four ranks on two GPUs."""
    yield Step(pytest(machine, *(f"tests/cuda/{name}" for name in OVER_HOSTS)), read=read_pytest)


def contract(machine: Machine) -> Iterator[Step]:
    target = f"cuda/{EMULATED}" if machine.rehearse else "cuda/lsa"
    chosen = (
        ["-k", "test_int32_ids and (direct-rank-strong_signal-float16-r2n1 or r4n2-a1-k3)"] if machine.rehearse else []
    )
    yield Step(pytest(machine, "tests/contract", "--target", target, *chosen), read=read_pytest)


def benchmark(machine: Machine) -> Iterator[Step]:
    words: list[object] = ["--part", "suite,small,targets,eager,baseline", "--ranks", machine.ranks]
    if machine.rehearse:
        words = ["--part", "suite", "--ranks", machine.ranks, *tiny(machine)]
    out = machine.result("benchmark")
    command = machine.script("benchmarks/cuda_expert_parallel.py", *words, "--out", out)
    yield Step(command, read=lambda log: read_rows(out))


def hosts(machine: Machine) -> Iterator[Step]:
    """Schedule hierarchical, rail and NVLink, wherever the ranks suffice."""
    for count, each in layouts(machine):
        ranks, name = count * each, f"hosts-{count}x{each}"
        shared = ranks > machine.gpus and not machine.rehearse
        words: list[object] = ["--part", "hosts", "--ranks", ranks, "--hosts", count, "--replays", 3 if shared else 10]
        words += tiny(machine) if machine.rehearse else ["--tokens", "128" if shared else "128,4096"]
        out = machine.result(name)
        command = machine.script("benchmarks/cuda_expert_parallel.py", *words, "--out", out)
        yield Step(command, read=lambda log, out=out: read_rows(out), needed=False)


def litmus(machine: Machine) -> Iterator[Step]:
    """Histograms over NVLink, over GIN in order, over GIN that reorders, and without strong signals there."""
    network: list[object] = ["--transport", "gin", "--hosts", 2]
    # (what it is called, how often each program is played, words, variables)
    on: list[tuple[str, int, list[object], dict[str, str]]] = [
        ("lsa", 1000, [], {}),
        ("gin", 200, network, {}),
        ("gin reordered", 200, network, {"HAL_SWNIC_FAULTS": REORDER}),
        ("gin-weak reordered", 200, network, {"HAL_SWNIC_FAULTS": REORDER, "HAL_CUDA_GIN_SIGNALS": "weak"}),
    ]
    if machine.gpus < 2:
        on = on[1:]
    if machine.rehearse:
        emulated: list[object] = ["--transport", EMULATED]
        on = [("lsa", 5, emulated, {}), ("gin-weak", 5, [*emulated, "--hosts", 2], {"HAL_CUDA_GIN_SIGNALS": "weak"})]
    for name, number, words, environment in on:
        names = programs(machine, strong="HAL_CUDA_GIN_SIGNALS" not in environment)
        out = machine.result(f"litmus-{name}")
        command = machine.module(
            "hal.cli", "litmus", "run", *names, "--backend", "cuda", "-n", number, "--json", out, *words
        )
        yield Step(
            command, environment, lambda log, out=out, name=name: {"on": name, "programs": read_json(out)}, False
        )


@cache
def programs(machine: Machine, strong: bool) -> list[str]:
    """Those that a device can play, with a GPU for each rank (on make-believe hosts, two ranks share a single one), over a
    network with ``strong`` signals or without; few in a rehearsal. Asked of a process of its own: this one began
    before the package was built."""
    code = (
        "from hal.checker.litmus import library; from hal.checker.on_transport import unsupported; "
        "from hal_cuda.litmus import why_not_play; "
        f"print(*(p.name for p in library().values() if p.ranks <= {max(machine.gpus, 2)} "
        f"and not unsupported(p, 'cuda') and not why_not_play(p, {strong})))"
    )
    asked = subprocess.run([machine.python, "-c", code], env=environment(), check=True, capture_output=True, text=True)
    names = asked.stdout.split()
    return [name for name in names if name in REHEARSED] if machine.rehearse else names


def software_nic(machine: Machine) -> Iterator[Step]:
    from hal_cuda import nccl

    out = machine.scratch / "nic.jsonl"
    home = nccl.installed()[0].library.parent.parent
    words = ["--nccl", home, "--seeds", 1, "--seconds", 30, "--output", out]
    yield Step(machine.script("kernels_cuda/software_nic/check_on_gpus.py", *words), read=lambda log: read_cases(out))


def memcheck(machine: Machine) -> Iterator[Step]:
    yield sanitizer(machine, "memcheck")


def racecheck(machine: Machine) -> Iterator[Step]:
    yield sanitizer(machine, "racecheck")


def sanitizer(machine: Machine, tool: str) -> Step:
    script = machine.script("tests/cuda/sanitize.py", *(["--emulated"] if machine.rehearse else []))
    if machine.rehearse:
        return Step(script, read=read_sanitizer)
    # NCCL asks the driver for kernels of every GPU that it knows and goes on without those it lacks: no errors of ours.
    options = ["--tool", tool, "--target-processes", "all", "--error-exitcode", "9", "--print-limit", "20"]
    options += ["--report-api-errors", "no"] if tool == "memcheck" else []
    # For a host backtrace it keeps Python's frames, and with them their arrays, which then never give their slots back.
    options += ["--show-backtrace", "device"]
    return Step(["compute-sanitizer", *options, *script], read=read_sanitizer)


def no_gpu(machine: Machine) -> str:
    return "" if machine.gpus else "no GPU here"


def not_in_rehearsal(machine: Machine) -> str:
    return "it is about GPUs; tests/test_software_nic_check.py tests its judgement" if machine.rehearse else ""


def no_sanitizer(machine: Machine) -> str:
    if machine.rehearse:
        return ""  # the script without the tool
    if shutil.which("compute-sanitizer") is None:
        return "compute-sanitizer is not on the PATH"
    return "" if machine.gpus >= 2 else "its rounds take two GPUs"


def no_sanitizer_twice(machine: Machine) -> str:
    return "the same script as memcheck" if machine.rehearse else no_sanitizer(machine)


def no_layout(machine: Machine) -> str:
    return "" if list(layouts(machine)) else f"{machine.ranks} ranks make no hosts of two"


def layouts(machine: Machine) -> Iterator[tuple[int, int]]:
    """Hosts × ranks on each that this machine has ranks for. A GPU takes two ranks where that makes four."""
    most = machine.ranks if machine.rehearse else machine.gpus
    for count, each in ((2, 1), *LAYOUTS) if most == 2 else LAYOUTS:
        ranks = count * each
        if ranks == most or (not machine.rehearse and machine.gpus >= 1 and ranks == 4 == SHARED_BY * machine.gpus):
            yield count, each


PARTS = (
    Part("build", 75, build),
    Part("tests", 210, tests),
    Part("benchmark", 30, benchmark),
    Part("hosts", 50, hosts, no_layout),
    Part("memcheck", 80, memcheck, no_sanitizer),
    Part("litmus", 60, litmus),
    Part("software-nic", 65, software_nic, not_in_rehearsal),
    Part("contract", 215, contract, usual=False),
    Part("racecheck", 110, racecheck, no_sanitizer_twice, usual=False),
    Part("hosts-tests", 290, hosts_tests, not_in_rehearsal, usual=False),
)


def tiny(machine: Machine) -> list[object]:
    return ["--transport", EMULATED, "--tokens", "9", "--hidden", 64, "--experts", 2 * machine.ranks,
            "--top-k", 2, "--replays", 1]  # fmt: skip


# --- what the parts leave --------------------------------------------------------------------------------------------


def pytest(machine: Machine, *words: str) -> list[str]:
    """pytest on this checkout, whatever plug-ins are installed."""
    options = ["-v", "--tb=short", "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout") is None:
        # Without the plug-in its setting is an unknown one, which our strict configuration refuses.
        bare = machine.scratch / "pytest.ini"
        bare.write_text("[pytest]\nmarkers =\n    cuda\n    ascend\n    slow\n    timeout\n")
        options += ["-c", str(bare), "--rootdir", str(ROOT)]
    return machine.module("pytest", *options, *words)


_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \((.*)\))?", re.MULTILINE)


def read_pytest(log: str) -> dict[str, Any]:
    """Counts, failures, and the reasons of what was skipped; from the lines that were printed before a part was ended."""
    found = [(match[1], match[2], match[3] or "") for match in _OUTCOME.finditer(log)]
    counts: dict[str, int] = {}
    skipped: dict[str, int] = {}
    for _, outcome, reason in found:
        counts[outcome.lower()] = counts.get(outcome.lower(), 0) + 1
        if outcome == "SKIPPED":
            skipped[reason] = skipped.get(reason, 0) + 1
    failed = [name for name, outcome, _ in found if outcome in ("FAILED", "ERROR", "XPASS")]
    return {**counts, "failures": failed, "skipped_because": skipped}


def read_json(file: Path) -> Any:
    with suppress(OSError, ValueError):
        return json.loads(file.read_text())
    return None


def read_rows(file: Path) -> dict[str, Any]:
    record = read_json(file) or {}
    return {"shape": record.get("shape"), "command": record.get("command"), "rows": record.get("rows", [])}


def read_cases(file: Path) -> dict[str, Any]:
    with suppress(OSError):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        return {"cases": {line["case"]: line["verdict"] for line in lines}}
    return {"cases": {}}


def read_sanitizer(log: str) -> dict[str, Any]:
    errors = [int(number) for number in re.findall(r"ERROR SUMMARY: (\d+) error", log)]
    hazards = [int(number) for number in re.findall(r"RACECHECK SUMMARY: (\d+) hazard", log)]
    return {
        "processes": len(errors) + len(hazards),
        "errors": sum(errors + hazards),
        "finished": "rounds passed" in log,
    }


# --- running them ----------------------------------------------------------------------------------------------------


class Suite:
    """Runs parts within their limits and keeps the record."""

    def __init__(self, machine: Machine, out: Path, budget: float) -> None:
        from hal_cuda.facts import of_machine, record_of

        facts = of_machine()
        self.machine, self.deadline = machine, time.monotonic() + budget
        stem = time.strftime("%Y-%m-%d-%H%M%S", time.gmtime()) + ("-rehearsal" if machine.rehearse else "-gpu-suite")
        out.mkdir(parents=True, exist_ok=True)
        self.json, self.log, self.text = (out / f"{stem}{end}" for end in (".json", ".log", ".txt"))
        self.began = time.monotonic()
        self.record: dict[str, Any] = record_of(
            "the GPU suite" + (", rehearsed on CPUs: no times, no GPU" if machine.rehearse else ""),
            facts,
            machine.gpus,
            shlex.join(["python", "benchmarks/gpu_suite.py", *sys.argv[1:]]),
            ranks=machine.ranks,
            packages={name: version(name) for name in ("torch", "numpy", "pytest", "cupy-cuda13x", "jax")},
            missing=missing(),
            parts=[],
        )

    def run(self, parts: Sequence[Part]) -> bool:
        """Whether all went well."""
        longer = REHEARSAL if self.machine.rehearse else 1
        spare = max(self.deadline - time.monotonic() - longer * sum(part.seconds for part in parts), 0.0)
        for part in parts:
            left = self.deadline - time.monotonic()
            why = part.why_not(self.machine) or ("" if left > 5 else "no time was left for it")
            print(f"# {part.name}: {why or 'started'}", flush=True)
            entry: dict[str, Any] = {"part": part.name, "status": "skipped", "why": why}
            self.record["parts"].append(entry)
            spare += longer * part.seconds
            if not why:
                entry.update(self._run(part, entry, min(spare, left)))
                spare = max(spare - entry["seconds"], 0.0)
                print(f"# {part.name}: {entry['status']} after {entry['seconds']} s", flush=True)
            self.write()
        return all(entry["status"] in ("passed", "skipped") for entry in self.record["parts"])

    def _run(self, part: Part, entry: dict[str, Any], seconds: float) -> dict[str, Any]:
        began, status = time.monotonic(), "passed"
        deadline = began + seconds
        entry["steps"] = steps = []
        del entry["why"]
        try:
            for step in part.steps(self.machine):
                done = self._step(step, deadline)
                steps.append(done)
                if done["status"] != "passed":
                    status = done["status"] if status == "passed" else status
                    if step.needed or status == "over its time":
                        break
                self.write()
        except Exception as error:  # a part that cannot be set up is a failed part, and the others go on
            steps.append({"status": "failed", "why": f"{type(error).__name__}: {error}"})
            status = "failed"
        return {"status": status, "seconds": round(time.monotonic() - began, 1), "limit": round(seconds, 1)}

    def _step(self, step: Step, deadline: float) -> dict[str, Any]:
        """Run one command in a process group of its own; end the whole group when the time is up."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=environment() | step.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(max(deadline - began, 0.1))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end_group(process)
            output.seek(0)
            log = output.read()
        status = "over its time" if code is None else "passed" if code == 0 else "failed"
        with self.log.open("a") as file:
            words = [f"{name}={value}" for name, value in step.environment.items()] + step.command
            file.write(f"\n==== {shlex.join(words)}\n{log}\n==== {status} ({code}), {time.monotonic() - began:.1f} s\n")
        done = {
            "command": shlex.join([f"{k}={v}" for k, v in step.environment.items()] + relative(step.command)),
            "status": status,
            "exit_status": code,
            "seconds": round(time.monotonic() - began, 1),
            **step.read(log),
        }
        if status != "passed":
            done["last_lines"] = log.splitlines()[-15:]
        return done

    def write(self) -> None:
        from hal_cuda.facts import write

        self.record["seconds"] = round(time.monotonic() - self.began, 1)
        write(self.json, self.record)
        self.text.write_text(table(self.record) + "\n")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """The command and everything that it started; ranks end with the launcher that started them."""
    for number, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 5.0)):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)


def environment() -> dict[str, str]:
    """NVLink multicast stays off: a fault in it takes a host's GPUs down."""
    sources = [] if installed() else [str(ROOT), str(ROOT / "backends")]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *sources]))
    return {
        **os.environ,
        "NCCL_NVLS_ENABLE": "0",
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "250",
        **({"PYTHONPATH": path} if path else {}),
    }


def relative(command: Sequence[str]) -> list[str]:
    """A command as a reader would type it: no path of this machine."""
    return [word.replace(sys.executable, "python").replace(f"{ROOT}{os.sep}", "") for word in command]


def installed() -> bool:
    """Whether HAL is installed with its engine, so that its backends are found by name."""
    from importlib.metadata import entry_points

    named = {entry.name for entry in entry_points(group="hal.backends")}
    return "cuda" in named and importlib.util.find_spec("hal_host._engine") is not None


def missing() -> dict[str, str]:
    """What is not here, and what does not run for it."""
    what = {
        "hydra": "nothing: `hal demo` and `hal bench` would need it, and are not part of the suite",
        "xdist": "nothing: tests run in one process",
        "pytest_timeout": "a hanging test ends its part only with the part's own limit",
        "cupy": "the test of CuPy arrays",
        "jax": "the test of JAX arrays",
        "matplotlib": "plots (benchmarks/plot_gpu_suite.py, anywhere)",
    }
    return {name: cost for name, cost in what.items() if importlib.util.find_spec(name) is None}


def version(name: str) -> str | None:
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as of

    try:
        return of(name)
    except PackageNotFoundError:
        return None


# --- the table -------------------------------------------------------------------------------------------------------


def table(record: dict[str, Any]) -> str:
    """What a reader wants to see: one line for each part, one for each shape, one for each litmus program seen bad."""
    lines = [f"# {record['what']}: {record['machine']}, {record['ranks']} ranks, driver {record['driver'] or '-'}, "
             f"NCCL {record['nccl'] or '-'}, commit {record['commit'] or '-'}, {record['date']}"]  # fmt: skip
    for part in record["parts"]:
        lines.append(f"{part['part']:<14}{part['status']:<14}{part.get('seconds', 0):>7} s  {_summary(part)}")
    shapes = [(step["shape"], row) for step in _steps(record) for row in step.get("rows", []) if "tokens" in row]
    if shapes:
        lines += ["", f"# {'case':<16} {'ranks':>5} {'hosts':>5} {'tokens':>6} {'dtype':<14} {'layout':<7} {'skew':>4} "
                      f"{'dispatch us':>12} {'pair us':>10} {'GB/s':>7} {'#wrong':>6}"]  # fmt: skip
    for _, row in shapes:
        us = {name: (row.get(name) or {}).get("median", float("nan")) for name in ("dispatch_us", "pair_us", "us")}
        whole = us["us"] if "us" in row else us["pair_us"]
        lines.append(
            f"  {row['case']:<16} {row['ranks']:>5} {row.get('hosts', 1):>5} {row['tokens']:>6} "
            f"{row.get('dtype', '-'):<14} {row.get('layout', '-'):<7} {row.get('skew', 0):>4} {us['dispatch_us']:>12.1f} "
            f"{whole:>10.1f} {row.get('link_GBs', float('nan')):>7.0f} {row.get('wrong', '-'):>6}  {row.get('note', '')}"
        )
    return "\n".join([*lines, *_litmus_lines(record)])


def _steps(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for part in record["parts"]:
        yield from part.get("steps", [])


def _summary(part: dict[str, Any]) -> str:
    words = [part["why"]] if part.get("why") else []
    for step in part.get("steps", []):
        words += [f"{step[name]} {name}" for name in ("passed", "failed", "error", "skipped") if step.get(name)]
        words += [f"fails: {name}" for name in step.get("failures", [])[:5]]
        words += [f"{len(step['rows'])} shapes"] if step.get("rows") else []
        if "cases" in step:
            wrong = [name for name, verdict in step["cases"].items() if verdict != "ok"]
            words += [f"{len(step['cases'])} cases", *(f"wrong: {name}" for name in wrong)]
        words += [f"{step['errors']} errors in {step['processes']} processes"] if "errors" in step else []
        words += [step["why"]] if step.get("why") else []
        if step["status"] != "passed":
            words += [f"{step['status']}: {(step.get('last_lines') or [''])[-1][:100]}"]
    return "; ".join(words)


def _litmus_lines(record: dict[str, Any]) -> list[str]:
    out: list[str] = []
    for step in _steps(record):
        for program in step.get("programs") or []:
            if "not_run" in program:
                continue
            total = sum(program["outcomes"].values())
            may = "allowed" if program["bad_allowed"] else "forbidden"
            seen = "?" if program["bad_seen"] is None else program["bad_seen"]
            told = f"; FORBIDDEN: {program['forbidden']}" if program["forbidden"] else ""
            out.append(
                f"  {step['on']:<14} {program['profile']:<9} {program['program']:<42} bad {may:<9} seen {seen} of {total}{told}"
            )
    return ["", "# litmus on the device: the bad outcome, by the model and as seen", *out] if out else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    usual = ",".join(part.name for part in PARTS if part.usual)
    more = ", ".join(part.name for part in PARTS if not part.usual)
    parser.add_argument("--parts", default=usual, help=f"default: %(default)s; there are {more} besides")
    parser.add_argument("--ranks", type=int, default=0, help="default: one for each GPU")
    parser.add_argument(
        "--budget", type=float, default=570.0, help="seconds for everything on GPUs (default %(default)s)"
    )
    parser.add_argument("--rehearse", action="store_true", help=f"on CPUs: transport {EMULATED}, tiny sizes")
    options = parser.parse_args()
    names = options.parts.split(",")
    unknown = sorted(set(names) - {part.name for part in PARTS})
    if unknown:
        parser.error(f"no part {', '.join(unknown)}; parts: {', '.join(part.name for part in PARTS)}")
    from hal_cuda.probe import gpus

    count = 0 if options.rehearse else gpus()
    if not count and not options.rehearse:
        parser.error("no GPU here; --rehearse runs the same on CPUs")
    if options.ranks > count and not options.rehearse:
        parser.error(f"{options.ranks} ranks, {count} GPUs here")
    with tempfile.TemporaryDirectory(prefix="hal-suite-") as scratch:
        machine = Machine(options.ranks or count or 2, count, options.rehearse, Path(scratch))
        suite = Suite(machine, options.out, options.budget * (REHEARSAL if options.rehearse else 1))
        well = suite.run([part for part in PARTS if part.name in names])
        print(suite.text.read_text(), end="")
        print(f"# written: {suite.json}, {suite.log.name}, {suite.text.name}")
    return 0 if well else 1


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "backends")]
    sys.exit(main())
