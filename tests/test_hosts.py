# SPDX-License-Identifier: Apache-2.0
"""Hosts × ranks on one machine, from the command line to each rank's variables. No GPU is needed: backend cuda is told
that it is usable, its plan is the real one, and the ranks only print what they were given."""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import hal_cuda
import pytest

from hal import launch
from hal.backend import Probe
from hal.bootstrap import current_run
from hal.cli import add_layout, add_overrides, layout_overrides, main
from hal.compose import load_config
from hal.errors import BackendUnavailable, ContractError
from hal.hosts import arrange, arranged

PRINT = """
import json, os
names = ("HAL_RANK", "HAL_NODES", "HAL_BACKEND", "HAL_TRANSPORT", "NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "NCCL_NET_PLUGIN")
print(json.dumps({name: os.environ.get(name) for name in names}))
"""


@pytest.fixture
def two_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs, as far as planning looks; returns the plug-in that stands ready."""
    from hal_cuda import software_nic

    plug_in = tmp_path / "libnccl-net-hal-swnic.so"
    plug_in.touch()
    for name in ("NCCL_HOSTID", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HAL_SWNIC_LIBRARY", str(plug_in))
    monkeypatch.setattr(hal_cuda, "SPEC", replace(hal_cuda.SPEC, probe=lambda: Probe(True)))
    monkeypatch.setattr(software_nic, "visible_gpus", lambda environ: ("0", "1"))
    return plug_in


def ranks_of(out: str) -> list[dict[str, Any]]:
    """What the ranks printed, in rank order."""
    told = [json.loads(line.partition("] ")[2]) for line in out.splitlines() if line.startswith("[rank ")]
    return sorted(told, key=lambda one: int(one["HAL_RANK"]))


# --- one way to say it ----------------------------------------------------------------------------------------------


def words(*arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    add_layout(parser)
    add_overrides(parser)
    return layout_overrides(parser.parse_intermixed_args(arguments))


def test_options_are_the_settings() -> None:
    assert words("--hosts", "2", "-n", "6") == ["ranks=6", "topology.nodes=2"] == words("--nodes", "2", "--ranks", "6")
    assert words("workload=small", "-n", "2") == ["workload=small", "ranks=2"]
    by_option, by_setting = load_config(words("--hosts", "2", "-n", "6")), load_config(["ranks=6", "topology.nodes=2"])
    assert by_option == by_setting
    assert (arranged(by_option).hosts, arranged(by_option).ranks) == (2, 6)


def test_sizes_say_what_demo_would_need(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for layout in (["--hosts", "2", "-n", "4"], ["topology.nodes=2", "ranks=4"]):
        assert main(["size", "--json", "schedule=hierarchical", *layout]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert any(part["name"] == "rail" and part["nbytes"] for part in told[0]["parts"])


# --- backend cuda ---------------------------------------------------------------------------------------------------


def test_run_sets_what_nccl_needs_and_says_so(
    two_gpus: Path, tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINT)
    assert main(["run", "--backend", "cuda", "--hosts", "2", "-n", "4", str(script)]) == 0
    out, err = (text.decode() for text in capfdbinary.readouterr())
    ranks = ranks_of(out)
    assert [rank["NCCL_HOSTID"] for rank in ranks] == ["hal-host-0", "hal-host-0", "hal-host-1", "hal-host-1"]
    assert [rank["CUDA_VISIBLE_DEVICES"] for rank in ranks] == ["0,1", "0,1", "1,0", "1,0"]
    assert {rank["NCCL_NET_PLUGIN"] for rank in ranks} == {str(two_gpus)}
    assert {(rank["HAL_NODES"], rank["HAL_BACKEND"]) for rank in ranks} == {("2", "cuda")}
    assert "# 2 hosts x 2 ranks on 2 GPUs, joined by the software NIC" in err
    assert "NCCL_HOSTID" in err
    assert "say nothing about a network" in err


def test_bench_header_says_that_the_hosts_are_make_believe(two_gpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The ranks then fail, since there is no GPU; the header comes first."""
    main(["bench", "put", "--sizes", "8", "backend=cuda", "--hosts", "2", "-n", "2"])
    out = capsys.readouterr().out
    assert "# 2 hosts x 1 ranks on 2 GPUs, joined by the software NIC" in out
    assert "#   note: times measured over the software NIC say nothing about a network" in out


@pytest.mark.parametrize(
    ("hosts", "transport", "planned"), [(1, None, False), (2, None, True), (2, "lsa", False), (4, None, True)]
)
def test_nodes_of_one_nvlink_domain_need_no_plan(
    hosts: int, transport: str | None, planned: bool, two_gpus: Path
) -> None:
    if transport is None:
        assert (arrange(hosts, 4, "cuda").plan is not None) == planned
    else:
        assert hal_cuda.SPEC.plan_hosts is not None
        assert (hal_cuda.SPEC.plan_hosts(hosts, 4, transport) is not None) == planned


def test_a_variable_that_contradicts_is_refused_before_anything_starts(
    two_gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    (tmp_path / "script.py").write_text("print('started')")
    for command in (
        ["run", "--backend", "cuda", "--hosts", "2", "-n", "2", str(tmp_path / "script.py")],
        ["demo", "backend=cuda", "--hosts", "2", "-n", "2"],
    ):
        assert main(command) == 2
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert "CUDA_DEVICE_MAX_CONNECTIONS=1 does not work here" in err
        assert "unset it, or set 8" in err


def test_without_a_gpu_it_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    unusable = replace(hal_cuda.SPEC, probe=lambda: Probe(False, "no NVIDIA GPU on this machine", "use backend=host"))
    monkeypatch.setattr(hal_cuda, "SPEC", unusable)
    assert main(["run", "--backend", "cuda", "--hosts", "2", "-n", "2", sys.executable, "-c", "print('started')"]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "no NVIDIA GPU on this machine" in err
    assert "use backend=host" in err


def test_a_plug_in_that_cannot_be_built_is_said_in_words(
    two_gpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HAL_SWNIC_LIBRARY")
    monkeypatch.setenv("HAL_CACHE", str(tmp_path))
    broken = tmp_path / "broken-compiler"
    broken.write_text("#!/bin/sh\necho 'endpoint.cpp:1: no such header' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(BackendUnavailable, match=r"does not compile: endpoint.cpp:1: no such header; .*g\+\+ 11"):
        arrange(2, 2, "cuda")


# --- other backends ---------------------------------------------------------------------------------------------------


def test_emulated_devices_need_the_setting_only() -> None:
    assert arrange(2, 4, "host").plan is None
    assert arrange(2, 4, "ascend", "udma_emulated").plan is None
    assert arrange(2, 4).describe() == []


@pytest.mark.parametrize(("hosts", "ranks"), [(3, 4), (0, 2), (1, 0), (4, 2)])
def test_layouts_that_make_no_sense_are_refused(hosts: int, ranks: int) -> None:
    with pytest.raises(ContractError, match=f"{ranks} ranks cannot be laid out on {hosts} equal nodes; "):
        arrange(hosts, ranks)


def test_ranks_are_told_the_launchers_backend(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """A program that names no backend gets the launcher's; one that does keeps its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import hal\nfor given in ({}, {'backend': 'host'}, {'transport': 'shm'}):\n"
        "    with hal.connect(**given) as comm:\n"
        "        print(comm.config.backend, comm.config.transport, comm.team('rail').size, flush=True)\n"
    )
    launched = ["run", "--backend", "ascend", "--transport", "udma_emulated", "--hosts", "2", "-n", "2", str(script)]
    assert main(launched) == 0
    lines = capfdbinary.readouterr().out.decode().splitlines()
    for rank in range(2):
        mine = [line.partition("] ")[2] for line in lines if line.startswith(f"[rank {rank}]")]
        assert mine == ["ascend udma_emulated 2", "host None 2", "host shm 2"]


def test_torchrun_knows_no_default_backend() -> None:
    run = current_run({"RANK": "0", "WORLD_SIZE": "1", "HAL_BACKEND": "cuda"})
    assert (run.backend, run.transport) == (None, None)


def test_launch_gives_each_rank_its_own_variables() -> None:
    """The launcher's own variables are not to be changed that way."""

    def own(rank: int) -> dict[str, str]:
        return {"MINE": f"for {rank}", "HAL_RANK": "7"}

    output = io.BytesIO()
    code = "import os; print(os.environ['MINE'], os.environ['HAL_RANK'])"
    assert launch.run(3, [sys.executable, "-c", code], environment=own, timeout=60, output=output) == 0
    assert sorted(output.getvalue().decode().splitlines()) == [f"[rank {rank}] for {rank} {rank}" for rank in range(3)]
