# SPDX-License-Identifier: Apache-2.0
"""HAL_CUDA_SMS, and the combine by pull for few blocks: rows on their way while it sums. On emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_emulator import Scenario, Skewed, emulator
from hal_cuda.probe import probe_emulator
from hal_cuda.tuning import SMS, allowed_sms, tuning

import hal
from hal import reference
from hal.config import ExpertParallelSpec
from hal.errors import ContractError

if not probe_emulator().usable:
    pytest.skip(probe_emulator().reason, allow_module_level=True)


@pytest.mark.parametrize("few_blocks", [0, 99], ids=["through registers", "through shared memory"])
@pytest.mark.parametrize(
    ("ranks", "settings", "weighted"),
    [
        (2, {"hidden": 64}, False),
        (3, {"hidden": 1040, "num_experts": 6, "top_k": 3, "max_tokens": 20}, False),
        (2, {"layout": "expert", "top_k": 4, "hidden": 1552, "max_tokens": 40}, True),
        (2, {"layout": "expert", "top_k": 3, "max_tokens": 30}, False),
        (33, {"num_experts": 66, "top_k": 6, "hidden": 16, "max_tokens": 12}, False),
    ],
    ids=str,
)
def test_sums_of_more_rows_than_warps(ranks: int, settings: dict[str, Any], weighted: bool, few_blocks: int) -> None:
    """Tokens without experts, pieces of rows, biases, weights that come home, halves; more than 32 ranks. That ``few_blocks``
    decides which way rows take is the next test's."""
    scenario = Scenario("few", ranks=ranks, settings={**settings, "num_buffers": 3})
    spec = scenario.spec
    rng = np.random.default_rng(5)
    x = [rng.standard_normal((spec.max_tokens - r % 3, spec.hidden)).astype(np.float32) for r in range(ranks)]
    idx = [np.argsort(rng.random((len(a), spec.num_experts)), axis=1)[:, : spec.top_k].astype(np.int32) for a in x]
    for ids in idx:
        ids[rng.random(ids.shape) < 0.2] = -1
        ids[1] = -1
    weights = [rng.random(ids.shape).astype(np.float32) for ids in idx]
    bias = [[rng.standard_normal(a.shape).astype(np.float32) for _ in range(2)] for a in x]
    rows, handle = reference.dispatch(spec, x, idx, weights)
    answers = [rng.standard_normal(r.x.shape).astype(np.float32) for r in rows]
    carried = [rng.random(r.topk_weights.shape).astype(np.float32) for r in rows]
    sums = reference.combine(answers, handle, weighted=weighted, bias=bias)
    home = [] if weighted else reference.combine(answers, handle, topk_weights=carried, bias=bias)

    def body(comm: hal.Communicator) -> bool:
        ep, me = comm.expert_parallel(spec), comm.rank
        engine: Any = ep._engine
        engine.tune(few_blocks=few_blocks)
        given = {"weighted": True} if weighted else {}
        for _ in range(2):
            out = ep.dispatch(x[me], idx[me], weights[me])
            y = ep.combine(answers[me], out.handle, bias=bias[me], **given)
            assert y.tobytes() == sums[me].tobytes()
            sent = ep.combine_send(answers[me], out.handle, **given)
            assert ep.combine_recv(sent, bias=bias[me]).tobytes() == sums[me].tobytes()
            if home:
                y, back = ep.combine(answers[me], out.handle, topk_weights=carried[me], bias=bias[me])
                assert y.tobytes() == home[0][me].tobytes()
                assert back.tobytes() == home[1][me].tobytes()
        blocks, threads = engine._combine_shape(len(x[me]))
        return len(x[me]) * -(-4 * spec.hidden // 2048) > blocks * threads // 32

    with emulator(3), pytest.MonkeyPatch.context() as patch:
        patch.setenv("HAL_CUDA_COMBINE", "pull")
        blocks = min(ranks, 3)
        patch.setenv(SMS, str(blocks))
        more = hal.spawn(ranks, body, backend="cuda", transport="gin_emulated", timeout=60.0)
    assert all(more), "rows go through registers where each warp has one unit"


@pytest.mark.parametrize("few_blocks", [0, 99])
def test_only_few_blocks_copy_into_shared_memory(few_blocks: int) -> None:
    """Told by a defect of such copies, which nothing else notices."""
    scenario = Scenario("few", settings={"max_tokens": 30})
    one = Skewed(scenario, 3)

    def body(comm: hal.Communicator) -> bool:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        engine: Any = ep._engine
        engine.tune(few_blocks=few_blocks)
        equal = True
        for _ in range(6):
            out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
            equal &= ep.combine(one.answers[me], out.handle).tobytes() == one.sums[me].tobytes()
        return equal

    with emulator(3, "copies_unawaited"):
        equal = hal.spawn(2, body, backend="cuda", transport="gin_emulated", timeout=60.0)
    assert all(equal) == (few_blocks == 0)


@pytest.mark.parametrize("text", ["0", "-3", "all", "1.5", "٣"])
def test_what_is_no_number_of_multiprocessors_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(SMS, text)
    with pytest.raises(ContractError, match="give a number of multiprocessors, at least 1"):
        hal.spawn(1, lambda comm: comm.expert_parallel(Scenario("one").spec), backend="cuda", transport="gin_emulated")


def test_the_limit_holds_for_every_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SMS, "2")
    assert allowed_sms() == 2
    scenario = Scenario("many", settings={"max_tokens": 600})

    def body(comm: hal.Communicator) -> tuple[bool, set[int]]:
        ep, me = comm.expert_parallel(scenario.spec), comm.rank
        engine: Any = ep._engine
        one = Skewed(scenario, 1)
        out = ep.dispatch(one.x[me], one.idx[me], one.weights[me])
        assert ep.combine(one.answers[me], out.handle).tobytes() == one.sums[me].tobytes()
        shapes = [engine._dispatch_shape(n) for n in (1, 40, 600)] + [engine._combine_shape(n) for n in (1, 40, 600)]
        return engine._push, {blocks for blocks, _ in shapes}

    for pushes, blocks in hal.spawn(2, body, backend="cuda", transport="gin_emulated", timeout=60.0):
        assert not pushes, "few multiprocessors combine by pull"
        assert max(blocks) <= 2


@pytest.mark.parametrize(
    ("layout", "push", "sms", "expected"),
    [
        ("rank", True, 132, (20, 48, 24)),
        ("rank", False, 132, (20, 64, 24)),
        ("rank", False, 16, (16, 16, 8)),
        ("rank", True, 1, (1, 1, 1)),
        ("expert", True, 132, (132, 132, 64)),
        ("expert", True, 24, (24, 24, 12)),
    ],
)
def test_what_a_limit_leaves(layout: str, push: bool, sms: int, expected: tuple[int, int, int]) -> None:
    spec = ExpertParallelSpec(num_experts=8, top_k=2, hidden=64, max_tokens=1024, layout=layout)
    got = tuning(spec, 2, push, sms)
    assert (got.dispatch_blocks, got.combine_blocks, got.push_blocks) == expected
