# SPDX-License-Identifier: Apache-2.0
"""Arrays of tools on a backend's device. "cpu:0" stands for an accelerator: a device of torch's other than the host's name."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hal
from hal.arrays import as_buffer
from hal.bench.collective import run_rank as bench_rank
from hal.bench.primitives import _content
from hal.bench.sample import Plan
from hal.compose import load_config
from hal.demo.model import Model
from hal.demo.rank import Job, run_rank
from hal.expert_parallel import ExpertParallel
from hal.placing import fetched, placed, settle

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", [np.float32, np.int64, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_there_and_back(dtype: Any) -> None:
    array = np.arange(12).reshape(3, 4).astype(dtype)
    assert placed(array, "cpu") is array
    there = placed(array, "cpu:0")
    assert isinstance(there, torch.Tensor)
    assert fetched(there).dtype == array.dtype
    assert fetched(there).tobytes() == array.tobytes()
    assert placed(None, "cpu:0") is fetched(None) is None


def test_settling_waits_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(npu=SimpleNamespace(synchronize=lambda: asked.append(1))))
    settle("cpu")
    assert not asked
    settle("npu:3")
    assert asked == [1]


def test_a_window_of_a_device_is_read_as_a_tensor() -> None:
    content = torch.arange(5, dtype=torch.uint8)
    window = SimpleNamespace(buffer=replace(as_buffer(content), device="cpu:0"))
    assert _content(window).tolist() == [0, 1, 2, 3, 4]


@pytest.fixture
def on_tensors(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    """Every ExpertParallel says that its arrays must be torch tensors; what it is given."""
    kinds: list[type] = []
    dispatch = ExpertParallel.dispatch

    def seen(self: ExpertParallel, x: Any, *arguments: Any, **options: Any) -> Any:
        kinds.append(type(x))
        return dispatch(self, x, *arguments, **options)

    monkeypatch.setattr(ExpertParallel, "device", property(lambda self: "cpu:0"))
    monkeypatch.setattr(ExpertParallel, "dispatch", seen)
    monkeypatch.setattr(torch, "cpu", SimpleNamespace(synchronize=lambda: None))
    return kinds


@pytest.mark.parametrize("layout", ["rank", "expert"])
def test_the_demo_and_the_benchmark_work_on_tensors(on_tensors: list[type], layout: str) -> None:
    settings = load_config([f"layout={layout}", "ranks=2", "workload.num_experts=8", "workload.hidden=64"])
    ids = np.arange(20)
    job = Job(Model(settings.workload, 2), ids, None)
    for operation in ("dispatch", "combine"):
        plan = Plan(operation, (4,), 1, 1, False)
        samples = hal.spawn(2, lambda comm, plan=plan: bench_rank(comm, settings, plan), config=settings.connection)
        assert [sample.wrong for one in samples for sample in one] == [0, 0]
    first = hal.spawn(2, lambda comm: run_rank(comm, settings, job), config=settings.connection)
    assert set(on_tensors) == {torch.Tensor}
    on_tensors.clear()
    with pytest.MonkeyPatch.context() as usual:
        usual.setattr(ExpertParallel, "device", property(lambda self: self._device))
        again = hal.spawn(2, lambda comm: run_rank(comm, settings, job), config=settings.connection)
    assert set(on_tensors) == {np.ndarray}
    for one, other in zip(first, again, strict=True):
        assert [layer.y.tobytes() for layer in one] == [layer.y.tobytes() for layer in other]
