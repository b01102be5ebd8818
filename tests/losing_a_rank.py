# SPDX-License-Identifier: Apache-2.0
"""Processes with torch tensors of which one is killed while the others' kernels wait for it; on GPUs, or on emulated ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from masking_rounds import Record, judge, spec_of

TESTS = Path(__file__).parent
SCRIPT = f"""
import os, signal, sys, time
sys.path.insert(0, {str(TESTS)!r})
import torch
import hal
from masking_rounds import Record, round_of, spec_of

folder, layout, schedule, transport, on_gpus = sys.argv[1:]
comm = hal.connect(backend="cuda", transport=transport, timeout=60.0)
device = "cpu"
if on_gpus == "gpus":
    device = f"cuda:{{comm.rank % torch.cuda.device_count()}}"  # make-believe hosts may share GPUs
    torch.cuda.set_device(device)
ep = comm.expert_parallel(spec_of(comm.world_size, layout=layout, schedule=schedule, hidden=512, max_tokens=64))
record, number, after = Record(folder, comm.rank), 0, 0
while after < 6:
    if (comm.rank, number) == (1, 3):
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    got = round_of(ep, number, halves=number % 2 == 1, device=device)
    record.add(got)
    number, after = number + 1, after + bool(got["combine masked"])
comm.barrier()
comm.close()
print("went on")
"""


def lose_a_rank(
    run_ranks: Any, folder: Path, ranks: int, layout: str, schedule: str, *where: str, **hosts: Any
) -> None:
    """``hosts``: ``nodes``, and what each rank's ``environment`` is."""
    settings = {"layout": layout, "schedule": schedule, "hidden": 512, "max_tokens": 64}
    outcome = run_ranks(ranks, SCRIPT, str(folder), layout, schedule, *where, keep_going=True, timeout=150, **hosts)
    assert outcome.status == 128 + 9, outcome
    for rank in range(ranks):
        assert rank == 1 or "went on" in outcome.text(rank), outcome
    masks = judge(spec_of(ranks, **settings), ranks, Record.read(folder))
    assert masks == [((), ())] * 3 + [((1,), (1,))] * 6
