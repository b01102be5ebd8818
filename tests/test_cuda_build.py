# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile, without a GPU, wherever nvcc is; and what surrounds the compilation."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hal_cuda import SPEC, build, nccl
from hal_cuda import probe as hal_cuda_probe
from hal_cuda.layout import layout, payload_bytes
from hal_cuda.native import (
    CombineArgs,
    DispatchArgs,
    Ep,
    Error,
    Gin,
    GinCheckArgs,
    GinNeeds,
    GinProperties,
    Litmus,
    LitmusOp,
    Op,
    Properties,
    Python,
    SlotView,
)
from hal_cuda.slots import Slots
from hal_cuda.tuning import Rates, combine_estimate, dispatch_estimate, fraction_sent, tuning

from hal.config import ExpertParallelSpec
from hal.errors import BackendUnavailable, CapacityError

ROOT = Path(__file__).resolve().parents[1]
WARNINGS_END = ("-Werror", "all-warnings", "-Xcompiler", "-Werror")


def included(file: Path) -> set[str]:
    """What a source includes, by itself and by what stands beside it."""
    found = set(re.findall(r"#include [<\"](.+)[>\"]", file.read_text()))
    return found.union(*(included(file.parent / name) for name in found if (file.parent / name).exists()))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_source_compiles(tmp_path):
    compiler, sources = build.nvcc(), build.sources()
    if compiler is None:
        pytest.skip("nvcc is not installed")
    assert sources is not None
    headers = [
        found.include for found in nccl.installed() if found.include is not None and found.version >= nccl.MINIMUM
    ]
    files = sorted((sources / "src").glob("*.cu"))
    if not headers:  # GIN's device code is NCCL's
        files = [file for file in files if "nccl.h" not in included(file)]
    places = ["-I", str(sources / "include"), *(part for path in headers[:1] for part in ("-isystem", str(path)))]
    for file in files:
        command = [
            compiler,
            *build.FLAGS,
            *WARNINGS_END,
            "-gencode=arch=compute_90,code=sm_90",
            *places,
            "-c",
            str(file),
        ]
        told = subprocess.run([*command, "-o", str(tmp_path / "o.o")], capture_output=True, text=True, check=False)
        assert told.returncode == 0, f"{file.name}: {told.stderr[-3000:]}"


def test_every_kernel_says_how_many_threads_it_is_started_with():
    """Without __launch_bounds__ the compiler may give a thread so many registers that the launch fails on a GPU; on the
    emulation there are none to run out of."""
    kernels = bounded = 0
    for path in sorted((ROOT / "kernels_cuda" / "src").glob("*.cu*")):
        text = re.sub(r"//.*", "", path.read_text())
        kernels += text.count("__global__")
        bounded += len(re.findall(r"__global__ void\s+__launch_bounds__\(", text))
    assert bounded == kernels > 8


def test_structures_are_those_of_the_header(tmp_path):
    """Sizes as a C compiler sees them."""
    names = {
        "ep": Ep, "dispatch_args": DispatchArgs, "combine_args": CombineArgs, "error": Error, "op": Op, "gin": Gin,
        "gin_needs": GinNeeds, "gin_properties": GinProperties, "gin_check_args": GinCheckArgs, "properties": Properties,
        "litmus_op": LitmusOp, "litmus": Litmus, "view": SlotView, "python": Python,
    }  # fmt: skip
    text = '#include "hal_cuda.h"\n#include <stdio.h>\nint main(void) {\n'
    text += "".join(f'printf("%zu\\n", sizeof(hal_cuda_{name}));\n' for name in names) + "return 0; }\n"
    (tmp_path / "sizes.c").write_text(text)
    include = ROOT / "kernels_cuda" / "include"
    made = ["cc", "-I", str(include), str(tmp_path / "sizes.c"), "-o", str(tmp_path / "sizes")]
    subprocess.run(made, check=True, capture_output=True)
    told = subprocess.run([str(tmp_path / "sizes")], check=True, capture_output=True, text=True).stdout.split()
    import ctypes

    assert [int(size) for size in told] == [ctypes.sizeof(kind) for kind in names.values()]


def test_probe_says_what_is_missing():
    probe = SPEC.probe()
    assert probe.usable or (probe.reason and probe.fix)


def test_without_a_gpu_the_fix_names_backend_and_transport(monkeypatch):
    """A transport alone would be looked for on the default backend."""
    monkeypatch.setattr(hal_cuda_probe, "present", lambda: 0)
    assert "backend=host, or backend=cuda transport=gin_emulated" in SPEC.probe().fix


@pytest.mark.parametrize("module", ["hal_cuda.build", "hal_cuda.software_nic"])
def test_help_of_the_modules_that_compile_compiles_nothing(module, capsys, monkeypatch):
    found = importlib.import_module(module)
    monkeypatch.setattr(found, "library", lambda *_: pytest.fail("it compiles"))
    with pytest.raises(SystemExit) as stop:
        found.main(["--help"])
    assert stop.value.code == 0
    assert f"usage: python -m {module}" in capsys.readouterr().out


def test_compiling_without_nccl_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setattr(build, "installed", list)
    assert build.main([]) == 1
    err = capsys.readouterr().err
    assert "NCCL is not installed" in err
    assert "pip install 'moe-hal[cuda13]'" in err


@pytest.fixture
def one_gpu(tmp_path, monkeypatch):
    """A machine with a GPU, NCCL and an nvcc, as far as the probe looks."""
    found = nccl.Nccl((2, 30, 7), tmp_path / "libnccl.so.2", tmp_path, "nvidia-nccl-cu13")
    monkeypatch.setattr(hal_cuda_probe, "present", lambda: 1)
    monkeypatch.setattr(hal_cuda_probe, "gpus", lambda: 1)
    monkeypatch.setattr(nccl, "installed", lambda: [found])
    monkeypatch.setattr(build, "nvcc", lambda: "/opt/cuda/bin/nvcc")
    monkeypatch.setattr(build, "toolkit", lambda compiler: (13, 0))
    monkeypatch.setattr(build, "ready", lambda use: None)
    _driver(monkeypatch, (580, 95, 5))
    return found


def _driver(monkeypatch, version):
    for module in (build, hal_cuda_probe):
        monkeypatch.setattr(module, "driver_version", lambda: version)


def test_a_machine_with_everything_is_usable(one_gpu):
    assert SPEC.probe().usable


@pytest.mark.parametrize(
    ("origin", "release", "driver", "reason", "fix"),
    [
        ("nvidia-nccl-cu13", (13, 0), (570, 86, 15), "driver 570.86.15 runs programs for CUDA 12", "moe-hal[cuda12]"),
        ("nvidia-nccl-cu12", (13, 0), (570, 86, 15), "CUDA 13.0, whose programs driver 570.86.15", "set CUDA_HOME"),
        ("nvidia-nccl-cu12", (11, 8), (580, 95, 5), "CUDA 11.8, and NCCL's device API needs 12.2", "set CUDA_HOME"),
        ("nvidia-nccl-cu12", (12, 8), (570, 86, 15), None, None),
        ("nvidia-nccl-cu12", (13, 0), (), None, None),
    ],
)
def test_cuda_12_and_13_that_do_not_fit_are_said_in_words(origin, release, driver, reason, fix, one_gpu, monkeypatch):
    monkeypatch.setattr(nccl, "installed", lambda: [replace(one_gpu, origin=origin)])
    monkeypatch.setattr(build, "toolkit", lambda compiler: release)
    _driver(monkeypatch, driver)
    probe = SPEC.probe()
    assert probe.usable == (reason is None)
    if reason is not None:
        assert reason in probe.reason
        assert fix in probe.fix


@pytest.mark.parametrize(
    ("says", "fix"),
    [
        ("nvcc fatal   : Unsupported gpu architecture 'compute_121'", "HAL_CUDA_ARCH=9.0"),
        ("error: #error -- unsupported GNU version! gcc versions later than 13 are not supported!", "-ccbin g++-12"),
        ("device.cuh(3): error: expected a ;", "see the message"),
    ],
)
def test_what_nvcc_says_comes_with_a_fix(says, fix, one_gpu, tmp_path, monkeypatch):
    compiler = tmp_path / "nvcc"
    compiler.write_text(f"#!/bin/sh\necho {shlex.quote(says)} >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "nvcc", lambda: str(compiler))
    monkeypatch.setenv("HAL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(BackendUnavailable) as error:
        build.library(one_gpu)
    assert says in str(error.value)
    assert fix in str(error.value)
    assert [path.suffix for path in (tmp_path / "cache" / "hal" / "cuda").iterdir()] == [".lock"]  # nothing half-made


def test_the_release_is_read_from_nvcc(tmp_path):
    compiler = tmp_path / "nvcc"
    compiler.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.8, V12.8.93'\n")
    compiler.chmod(0o755)
    assert build.toolkit(str(compiler)) == (12, 8)
    assert build.toolkit("/no/such/nvcc") == (0, 0)


def test_one_slot_is_little_more_than_its_rows():
    spec = ExpertParallelSpec(256, 8, 7168, 8192, combine_dtype="bfloat16", num_buffers=1)
    for push in (False, True):
        place = layout(spec, 2, push)
        assert place.slot_count == 2  # one to receive in, one for combine
        assert place.total <= 1.05 * 2 * payload_bytes(spec, 2)


@pytest.mark.parametrize("by_expert", [False, True])
def test_places_do_not_overlap(by_expert):
    spec = ExpertParallelSpec(
        64, 6, 512, 100, "float8_e4m3fn", "bfloat16", 4, "expert" if by_expert else "rank", 16 if by_expert else 1
    )
    place = layout(spec, 4, push=not by_expert)
    parts = [
        0,
        place.slot_scales,
        place.slot_idx,
        place.slot_weights,
        place.slot_counts,
        place.slot_offsets,
        place.slot_meta,
    ]
    assert parts == sorted(parts)
    assert place.slot_meta < place.slot_bytes
    words = [
        place.header,
        place.arrive,
        place.dispatch_flags,
        place.ready,
        place.done,
        place.combine_flags,
        place.slots,
    ]
    assert words == sorted(set(words))


class _Counted:
    """Stands for the library's lease counters."""

    def leases(self, count):
        import ctypes

        self.memory = (ctypes.c_int64 * count)()
        return ctypes.cast(self.memory, ctypes.POINTER(ctypes.c_int64))


def test_views_leave_slots_for_the_dispatches_that_may_be_in_flight():
    for num_buffers, views in ((1, 0), (2, 1), (3, 1), (4, 1)):
        slots = Slots(_Counted(), num_buffers)
        held = []
        for _ in range(6):  # results are held while they may be; what is copied out is let go
            lease, offer = slots.for_dispatch(None, False)
            assert offer == -1
            slots.launched(offer)
            if slots.may_view(lease, False):
                held.append(lease)
            del lease
        assert len(held) == views
        flights = []
        while slots.in_flight < slots.flight_limit:
            flights.append(slots.for_dispatch(None, False)[0])
            slots.in_flight += 1
        assert len({lease.slot for lease in held + flights}) == len(held + flights)
        assert slots.scratch(None, False).slot == num_buffers  # combine has its own


def test_an_experts_output_is_in_combines_slot():
    slots = Slots(_Counted(), 1)
    output = slots.for_output(None, False)
    assert output is not None
    assert output.slot == slots.combine_slot
    assert slots.for_output(None, False) is None
    assert slots.scratch(None, False, over_output=True).slot == output.slot
    with pytest.raises(CapacityError, match="expert_output is held"):
        slots.scratch(None, False)
    output.ended = True
    assert slots.scratch(None, False).slot == slots.combine_slot


def test_an_offered_slot_is_nobody_elses():
    slots = Slots(_Counted(), 3, ahead=True)
    offered, order = -1, []
    for turn in range(9):
        lease, offer = slots.for_dispatch(None, False)
        assert offered in (-1, lease.slot)
        slots.launched(offer)
        order.append(lease.slot)
        assert offer != lease.slot
        held = lease if turn % 3 == 0 else None  # noqa: F841 (holds a slot for a while)
        offered = offer
        del lease
    assert len(set(order)) > 1
    keep = [slots.for_dispatch(None, True)[0] for _ in range(2)]  # a graph's do not use up what was offered
    assert offered not in {lease.slot for lease in keep}
    last, _ = slots.for_dispatch(None, True)
    assert last.slot == offered
    del last, keep
    again, _ = slots.for_dispatch(None, False)
    assert again.slot == offered
    assert not slots.may_view(again, False)


def test_no_view_is_given_on_an_offered_slot_that_a_graph_uses():
    slots = Slots(_Counted(), 2, ahead=True)
    before, offer = slots.for_dispatch(None, False)
    slots.launched(offer)
    del before
    first, _ = slots.for_dispatch(None, True)
    assert slots.may_view(first, True)
    second, _ = slots.for_dispatch(None, True)
    assert second.slot == offer
    assert not slots.may_view(second, True)  # the next dispatch outside the graph gets that slot


def test_a_lost_slot_is_told_with_its_holder():
    slots = Slots(_Counted(), 1)
    lease, _ = slots.for_dispatch(None, False)
    with pytest.raises(CapacityError, match=r"slot 0: an array, or a dispatch that is not received"):
        slots.for_dispatch(None, False)
    cycle = [lease]
    cycle.append(cycle)  # as a traceback and its frames are
    del lease, cycle
    assert slots.for_dispatch(None, False)[0].slot == 0


def test_a_graphs_slot_is_not_lent_outside():
    slots = Slots(_Counted(), 3)
    inside, _ = slots.for_dispatch(None, True)
    assert slots.may_view(inside, True)
    used = inside.slot
    del inside
    outside, _ = slots.for_dispatch(None, False)
    assert slots.may_view(outside, False)
    assert outside.slot != used


def test_estimates():
    rank = ExpertParallelSpec(256, 8, 7168, 4096, combine_dtype="bfloat16")
    rates = Rates()
    assert fraction_sent(8, 2) == pytest.approx(1 - 2**-8)
    estimate = dispatch_estimate(rank, 2, 4096, 14336, rates)
    assert estimate.link_seconds == pytest.approx(58.5e6 / 362e9, rel=0.01)
    assert 16 <= estimate.blocks_for_link <= 20  # measured: 20 reach the link, 16 nearly
    assert estimate.seconds(8, rates) > 1.5 * estimate.link_seconds  # measured: twice
    assert combine_estimate(rank, 2, 4096, 14336, False, rates).link_seconds > estimate.link_seconds
    for blocks, measured in ((8, 375.0), (12, 258.7), (16, 200.9), (20, 184.1), (48, 183.7)):
        # docs/performance_cuda.md: 22 us besides, for routing, headers and signals.
        assert estimate.seconds(blocks, rates) * 1e6 + 22 == pytest.approx(measured, rel=0.05)
    reads = combine_estimate(rank, 2, 4096, 14336, False, rates)
    for blocks, measured in ((8, 630.2), (16, 335.3), (24, 238.7), (32, 193.0), (48, 184.3)):
        assert reads.seconds(blocks, rates) * 1e6 + 8 == pytest.approx(measured, rel=0.08)
    assert tuning(rank, 2, True, 16).dispatch_blocks <= 16
