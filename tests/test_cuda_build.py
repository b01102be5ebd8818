# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile, without a GPU, wherever nvcc is; and what surrounds the compilation."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hal_cuda import SPEC, build, nccl
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
)
from hal_cuda.sizing import Rates, combine_estimate, dispatch_estimate, fraction_sent, tuning
from hal_cuda.slots import Slots

from hal.config import ExpertParallelSpec

ROOT = Path(__file__).resolve().parents[1]


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
        files = [
            file
            for file in files
            if not {"nccl.h", "gin.cuh"} & set(re.findall(r"#include [<\"](.+)[>\"]", file.read_text()))
        ]
    places = ["-I", str(sources / "include"), *(part for path in headers[:1] for part in ("-isystem", str(path)))]
    for file in files:
        command = [compiler, *build.FLAGS, "-gencode=arch=compute_90,code=sm_90", *places, "-c", str(file)]
        told = subprocess.run([*command, "-o", str(tmp_path / "o.o")], capture_output=True, text=True, check=False)
        assert told.returncode == 0, f"{file.name}: {told.stderr[-3000:]}"


def test_structures_are_those_of_the_header(tmp_path):
    """Sizes as a C compiler sees them."""
    names = {
        "ep": Ep, "dispatch_args": DispatchArgs, "combine_args": CombineArgs, "error": Error, "op": Op, "gin": Gin,
        "gin_needs": GinNeeds, "gin_properties": GinProperties, "gin_check_args": GinCheckArgs, "properties": Properties,
        "litmus_op": LitmusOp, "litmus": Litmus,
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


def test_one_slot_is_little_more_than_its_rows():
    spec = ExpertParallelSpec(256, 8, 7168, 8192, combine_dtype="bfloat16", num_buffers=1)
    for push in (False, True):
        assert layout(spec, 2, push).total <= 1.05 * payload_bytes(spec, 2)


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


def test_the_last_free_slot_is_not_lent():
    slots = Slots(_Counted(), 2)
    first, view = slots.for_dispatch(None, False)
    assert view
    second, view = slots.for_dispatch(None, False)
    assert not view
    assert second.slot != first.slot
    del second
    assert slots.for_output(None, False) is None
    del first
    assert slots.free() == [0, 1]


def test_a_graphs_slot_is_not_lent_outside():
    slots = Slots(_Counted(), 3)
    inside, view = slots.for_dispatch(None, True)
    assert view
    used = inside.slot
    del inside
    outside, view = slots.for_dispatch(None, False)
    assert view
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
