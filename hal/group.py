# SPDX-License-Identifier: Apache-2.0
"""Joining by a group of processes that a framework made: it states the ranks and carries the secret by which they meet.

Whatever started the processes, ``hal.connect(group=...)`` then works as it does under ``hal run``: after one exchange over
the group the ranks meet by hal/bootstrap.py, which notices a process that dies. The framework is not imported here.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hal import __version__
from hal.bootstrap import Run
from hal.errors import ContractError, HalError, PeerTimeout
from hal.rendezvous import names


@runtime_checkable
class Group(Protocol):
    """What ``hal.connect(group=...)`` asks of a group. A ``torch.distributed`` process group is taken as it is."""

    rank: int
    world_size: int

    def all_gather(self, value: str, timeout: float) -> list[str]:
        """Every rank's ``value`` in rank order. PeerTimeout after ``timeout`` seconds, naming who is missing."""


class TorchGroup:
    """A ``torch.distributed`` process group. Exchanges go through its store, not through collectives: they wait no longer
    than asked, need no device, and leave the group as it was, also when they fail."""

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank, self.world_size = int(process_group.rank()), int(process_group.size())
        self._store = _store_of(process_group)
        if self._store is None:
            raise ContractError(
                f"{process_group!r} has no store, by which HAL's ranks would meet: use a gloo or NCCL group"
            )

    def all_gather(self, value: str, timeout: float) -> list[str]:
        start = time.monotonic()
        try:
            number = self._store.add(f"hal/exchanges/{self.rank}", 1)
            keys = [f"hal/exchange/{number}/{rank}" for rank in range(self.world_size)]
            self._store.set(keys[self.rank], value)
        except RuntimeError as error:
            raise HalError(f"the process group's store does not answer: {error}") from error
        for key in keys:
            try:
                self._store.wait([key], timedelta(seconds=max(start + timeout - time.monotonic(), 0.001)))
            except RuntimeError as error:
                raise self._missing(keys, time.monotonic() - start, error) from error
        return [self._store.get(key).decode() for key in keys]

    def _missing(self, keys: list[str], seconds: float, error: Exception) -> HalError:
        try:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        except RuntimeError:
            return HalError(f"the process group's store does not answer: {error}")
        reason = f"{names(missing)} missing of {self.world_size}" if missing else "rank 0 is too slow"
        seen = self.world_size - len(missing)
        fault = missing[0] if missing else 0
        return PeerTimeout(fault, "process group", expected=self.world_size, seen=seen, seconds=seconds, reason=reason)


def as_group(given: Any) -> Group:
    """``given`` as a :class:`Group`; ContractError says what can be given."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and isinstance(given, distributed.ProcessGroup):
        return TorchGroup(given)
    if isinstance(given, Group):
        return given
    raise ContractError(
        f"group is {given!r}: pass a torch.distributed process group that this process is a member of "
        "(torch.distributed.group.WORLD for the default one), or an object with rank, world_size and all_gather "
        "(hal.group.Group)"
    )


def place_in(group: Group, timeout: float) -> Run:
    """This rank's place in a run of the group's ranks; collective over the group.

    ContractError if they are not on one machine, of one user and of one HAL; PeerTimeout if some do not come in
    ``timeout`` seconds.
    """
    offer = {"version": __version__, "token": secrets.token_hex(32), "user": os.getuid(), **_machine()}
    offers = [json.loads(text) for text in group.all_gather(json.dumps(offer), timeout)]
    for name, what, fix in (
        ("version", "HAL", "install one version everywhere"),
        (
            "machine",
            "hosts",
            "HAL's ranks meet on one machine (and in one network namespace): give a group of its ranks",
        ),
        ("user", "users", "start all ranks as one user"),
    ):
        _require_equal(
            [o[name] for o in offers], [o.get("host" if name == "machine" else name) for o in offers], what, fix
        )
    return Run(group.rank, group.world_size, offers[0]["token"], "a process group", group=group)


def _require_equal(values: list[Any], shown: list[Any], what: str, fix: str) -> None:
    if len(set(values)) == 1:
        return
    sets: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        sets.setdefault(value, []).append(rank)
    listed = "; ".join(f"{names(ranks)}: {shown[ranks[0]]}" for ranks in sets.values())
    raise ContractError(f"the group's ranks are of {len(sets)} {what} ({listed}): {fix}")


def _machine() -> dict[str, str]:
    """What two processes share if they can meet by an abstract Unix socket: a kernel and a network namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"machine": f"{boot} {os.stat('/proc/self/ns/net').st_ino}", "host": socket.gethostname()}


def _store_of(process_group: Any) -> Any:
    """The store by which the group's members met."""
    getter = getattr(process_group, "get_group_store", None)
    if getter is None:  # torch before 2.5
        getter = getattr(sys.modules["torch"].distributed.distributed_c10d, "_get_process_group_store", None)
        return getter(process_group) if getter is not None else None
    return getter()
