# SPDX-License-Identifier: Apache-2.0
"""Rank processes on make-believe hosts of this machine: GPUs joined by the software NIC (docs/software_nic.md). Starting them
takes many seconds, so they stay for what follows, unless something failed."""

from __future__ import annotations

from typing import Any

from ranks import Ranks

KEPT = 2
"""Runs that stay at most: each process has a context on its GPU."""
_kept: dict[tuple[Any, ...], Ranks] = {}


def run(
    body: str,
    hosts: int,
    ranks: int,
    *args: Any,
    seconds: float = 120.0,
    module: str = "hosts_rounds",
    transport: str = "gin",
    **environment: str,
) -> list[Any]:
    """``<module>.<body>(comm, *args)`` on every rank; the results in rank order. ``environment``: more variables.
    ``transport``: gin_emulated needs no GPU."""
    what = (hosts, ranks, transport, *sorted(environment.items()))
    started = _kept.pop(what, None)
    if started is None:
        while len(_kept) >= KEPT:
            _kept.pop(next(iter(_kept))).close()
        variables = [environment] * ranks
        if transport == "gin":
            from hal_cuda import software_nic

            plan = software_nic.plan(hosts, ranks)
            variables = [{**plan.environment(rank), **environment} for rank in range(ranks)]
        started = Ranks(ranks, timeout=20.0, nodes=hosts, transport=transport, variables=variables)
    answers = started.run(body, *args, seconds=seconds, module=module)
    _kept[what] = started
    return answers


def close() -> None:
    """End all that stayed."""
    while _kept:
        _kept.popitem()[1].close()
