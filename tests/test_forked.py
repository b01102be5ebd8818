# SPDX-License-Identifier: Apache-2.0
"""A forked child has a copy of its parent's communicator. It is told so, and however it ends, the parent's run goes on."""

from __future__ import annotations

import pytest

BODY = """
import gc, os, sys
import numpy as np
import hal

comm = hal.connect(timeout=120)
ep = comm.expert_parallel(num_experts=4, top_k=2, hidden=16, max_tokens=4, dtype="float32")
x, idx = np.ones((4, 16), np.float32), np.array([[0, 3]] * 4)

def step():
    out = ep.dispatch(x, idx)
    return float(ep.combine(out.x, out.handle).sum())

def child():
    global comm, ep
    {child}

before = step()
if comm.rank == 0:
    process = os.fork()
    if process == 0:
        child()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(process, 0)
comm.barrier()
other = comm.expert_parallel(num_experts=4, top_k=2, hidden=16, max_tokens=4, dtype="float32")  # asks rank 0's server
print("went on" if step() == before else "differs", flush=True)
comm.close()
"""


@pytest.mark.parametrize(
    "child",
    [
        "sys.exit(0)",
        "raise SystemExit('a failure')",
        "comm.close()",
        "comm.close(ValueError('a failure'))",
        "comm = ep = None; gc.collect()",
        "ep.close()",
        "[thing.__exit__(ValueError, ValueError('no'), None) for thing in (ep, comm)]",
    ],
)
def test_a_childs_end_says_nothing_of_its_parent(run_ranks, child):
    outcome = run_ranks(2, BODY.replace("{child}", child))
    assert [outcome.text(rank).splitlines()[-1] for rank in (0, 1)] == ["went on"] * 2
    assert outcome.status == 0


@pytest.mark.parametrize("call", ["step()", "comm.barrier()", "comm.window(8)"])
def test_a_child_that_uses_it_is_told_whose_it_is(run_ranks, call):
    child = f"try:\n        {call}\n    except hal.HalError as error:\n        print(error)"
    outcome = run_ranks(2, BODY.replace("{child}", child))
    said, *rest = outcome.text(0).splitlines()
    assert "the process which forked this one; fork before connecting" in said
    assert (rest, outcome.text(1), outcome.status) == (["went on"], "went on", 0)
