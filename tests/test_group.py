# SPDX-License-Identifier: Apache-2.0
"""hal.connect(group=...): ranks that a framework's group brings together, whatever started them."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

import hal
from hal.errors import ContractError, HalError, PeerTimeout
from hal.group import Group

TIMEOUT = 20.0


class Table:
    """Where the members of a :class:`Member` group leave their values."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.values = world_size, dict[tuple[int, int], str]()
        self.changed = threading.Condition()


class Member:
    """A group that is no framework's: threads with a table between them. ``altered`` changes what this rank offers."""

    def __init__(self, table: Table, rank: int, **altered: Any) -> None:
        self.rank, self.world_size = rank, table.world_size
        self._table, self._altered, self._exchanges = table, altered, 0

    def all_gather(self, value: str, timeout: float) -> list[str]:
        number, table = self._exchanges, self._table
        self._exchanges += 1
        keys = [(number, rank) for rank in range(self.world_size)]
        with table.changed:
            table.values[number, self.rank] = json.dumps(json.loads(value) | self._altered)
            table.changed.notify_all()
            if not table.changed.wait_for(lambda: all(key in table.values for key in keys), timeout):
                missing = next(rank for number, rank in keys if (number, rank) not in table.values)
                raise PeerTimeout(missing, "table", seconds=timeout)
            return [table.values[key] for key in keys]


def on_members(groups: list[Any], body: Callable[[Any], Any]) -> list[Any]:
    """``body(group)`` in a thread for each; what it returned or raised."""
    results: list[Any] = [None] * len(groups)

    def run(index: int) -> None:
        try:
            results[index] = body(groups[index])
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def members(world_size: int, altered: dict[int, dict[str, Any]] | None = None) -> list[Member]:
    table = Table(world_size)
    return [Member(table, rank, **(altered or {}).get(rank, {})) for rank in range(world_size)]


def test_any_group_that_can_exchange_joins_its_ranks():
    def body(group: Group) -> tuple[int, int, int]:
        with hal.connect(group=group, timeout=TIMEOUT) as comm:
            comm.queue().signal(0, (comm.rank + 1) % comm.world_size, 5 + comm.rank)
            seen = comm.wait(0, 1)
            comm.barrier()
            return comm.rank, comm.world_size, seen

    groups = members(3)
    assert isinstance(groups[0], Group)
    for _ in range(2):  # the same group may join more than once
        assert on_members(groups, body) == [(0, 3, 7), (1, 3, 5), (2, 3, 6)]


@pytest.mark.parametrize(
    ("altered", "words"),
    [
        ({"machine": "elsewhere", "host": "node-7"}, r"of 2 hosts \(ranks 0, 2: .*; rank 1: node-7\).*one machine"),
        ({"user": -5}, r"of 2 users \(ranks 0, 2: \d+; rank 1: -5\)"),
        ({"version": "9.9"}, r"of 2 HAL \(ranks 0, 2: .*; rank 1: 9\.9\): install one version"),
    ],
    ids=["machine", "user", "version"],
)
def test_ranks_that_cannot_meet_are_told_why_on_every_rank(altered, words):
    start = time.monotonic()
    for error in on_members(members(3, {1: altered}), lambda group: hal.connect(group=group, timeout=TIMEOUT)):
        assert isinstance(error, ContractError)
        with pytest.raises(ContractError, match=words):
            raise error
    assert time.monotonic() - start < TIMEOUT / 2  # nobody waited for a meeting that could not be


def test_a_member_that_does_not_come_is_named():
    groups = members(2)
    with pytest.raises(PeerTimeout) as error:
        hal.connect(group=groups[0], timeout=0.3)
    assert error.value.rank == 1


def test_what_is_no_group_is_refused():
    for wrong in (-100, object(), "world"):  # -100: what torch gives a process that is not a member
        with pytest.raises(ContractError, match=r"torch\.distributed process group that this process is a member of"):
            hal.connect(group=wrong)
    with pytest.raises(ContractError, match="run and group"):
        hal.connect(group=members(1)[0], run=hal.bootstrap.Run(0, 1))


TORCH = """
import os, sys
place = int(os.environ["HAL_RANK"]), int(os.environ["HAL_WORLD_SIZE"])
for name in list(os.environ):  # as if another launcher had started this process
    if name.startswith("HAL_"):
        del os.environ[name]

import torch
import torch.distributed as dist
import hal
from hal.errors import PeerTimeout

rank, size = place
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)

def round_trip(comm):
    ep = comm.expert_parallel(num_experts=2 * comm.world_size, top_k=2, hidden=16, max_tokens=4, dtype="float32")
    x = torch.full((3, 16), 1.0 + comm.rank)
    idx = torch.tensor([[0, 2 * comm.world_size - 1]] * 3)
    out = ep.dispatch(x, idx)
    y = ep.combine(out.x, out.handle)
    assert torch.equal(y, x * (1 if comm.world_size == 1 else 2)), y
    return len(out.x)

with hal.connect(backend="host", group=dist.group.WORLD, timeout=30) as comm:
    assert (comm.rank, comm.world_size) == place
    print("world", round_trip(comm))

some = dist.new_group([0, 2])
if rank != 1:
    for turn in range(2):
        with hal.connect(group=some, timeout=30) as comm:
            assert (comm.rank, comm.world_size) == (rank // 2, 2)
            print("some", round_trip(comm))
else:
    try:
        hal.connect(group=some)
    except hal.ContractError as error:
        print("refused", error)

total = torch.ones(1)
dist.all_reduce(total)  # the group is as it was
print("sum", int(total))

if rank == 0:
    try:
        hal.connect(group=dist.group.WORLD, timeout=1.0)
    except PeerTimeout as error:
        print("missing", error.rank, error.stage, error)
dist.all_reduce(total)
print("sum", int(total))
comm = hal.connect(group=some, timeout=30) if rank != 1 else None
if rank == 2:
    os._exit(7)  # a process that dies is noticed as under hal run
if rank == 0:
    try:
        comm.barrier()
    except PeerTimeout as error:
        print("died", error.rank, error.seconds < 15, error)
dist.destroy_process_group()  # a process that ends with its gloo group sometimes aborts in torch (no HAL needed)
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torch_process_groups(run_ranks, tmp_path):
    outcome = run_ranks(3, TORCH, str(tmp_path / "store"), timeout=120.0)
    text = [outcome.text(rank) for rank in range(3)]
    for rank in range(3):
        assert f"world {9 if rank in (0, 2) else 0}" in text[rank], outcome
        assert "sum 3" in text[rank], outcome
        assert "sum 9" in text[rank], outcome
    assert all(text[rank].count("some 6") == 2 for rank in (0, 2)), outcome
    assert "refused group is" in text[1]
    assert "missing 1 process group" in text[0]
    assert "ranks 1, 2 missing of 3" in text[0]
    assert "died 1 True" in text[0]
    assert outcome.status == 7


def test_a_store_that_is_gone_is_said_to_be_gone():
    torch = pytest.importorskip("torch")
    from hal.group import TorchGroup

    class Gone:
        def add(self, key: str, amount: int) -> int:
            raise RuntimeError("connection was reset")

    class Pg:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def get_group_store(self) -> Any:
            return Gone()

    assert torch.distributed.is_available()
    with pytest.raises(HalError, match="store does not answer: connection was reset"):
        TorchGroup(Pg()).all_gather("x", 1.0)
