# SPDX-License-Identifier: Apache-2.0
"""The torch oracle that large results are compared with says what hal/reference.py says. Needs no GPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oracle  # noqa: E402

from hal import reference  # noqa: E402
from hal.arrays import as_buffer, as_numpy  # noqa: E402
from hal.config import ExpertParallelSpec, TopologyConfig  # noqa: E402


def numpy(tensor):
    return as_numpy(as_buffer(tensor)).copy()


@pytest.mark.parametrize("schedule", ["direct", "latency", "hierarchical"])
@pytest.mark.parametrize("layout", ["rank", "expert"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_oracle_is_the_reference(dtype, layout, schedule):
    quantised = dtype != "bfloat16"
    alignment = 4 if layout == "expert" else 1
    spec = ExpertParallelSpec(8, 3, 16, 12, dtype, "bfloat16", 2 if quantised else 0, layout, alignment, schedule)
    batch = oracle.inputs(spec, [12, 7], 5, "cpu")
    rows = [oracle.dispatch(spec, batch, r) for r in range(2)]
    scales = [numpy(s) for s in batch.scales] if quantised else None
    wanted, handle = reference.dispatch(
        spec,
        [numpy(x) for x in batch.x],
        [numpy(i) for i in batch.topk_idx],
        [numpy(w) for w in batch.topk_weights],
        scales,
    )
    for mine, theirs in zip(rows, wanted, strict=True):
        for name in ("x", "scales", "topk_idx", "topk_weights", "tokens_per_expert", "expert_offsets"):
            given, right = getattr(mine, name), getattr(theirs, name)
            assert (given is None) == (right is None), name
            assert given is None or numpy(given).tobytes() == right.tobytes(), name
    answers = oracle.answers(spec, [len(r.x) for r in rows], 6, "cpu")
    weighted = layout == "expert"
    sums = reference.combine([numpy(a) for a in answers], handle, weighted=weighted, topology=TopologyConfig(2))
    carried = [torch.randn(r.topk_weights.shape) for r in rows]
    _, home = reference.combine([numpy(a) for a in answers], handle, topk_weights=[numpy(c) for c in carried])
    for me in range(2):
        y = oracle.combine(spec, batch, rows, answers, me, weighted=weighted, by_rank=schedule == "hierarchical")
        assert numpy(y).tobytes() == np.ascontiguousarray(sums[me]).tobytes()
        assert numpy(oracle.weights_home(spec, batch, rows, carried, me)).tobytes() == home[me].tobytes()
