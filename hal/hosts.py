# SPDX-License-Identifier: Apache-2.0
"""Hosts × ranks on one machine: what ``--hosts H -n N`` means for each backend, decided before any rank starts.

The number of hosts is ``topology.nodes``, for every backend and command. Where the ranks' own settings are not enough (GPUs,
whose NCCL must be told that one machine is several), the backend plans the rest (:attr:`hal.backend.BackendSpec.plan_hosts`).
"""

from __future__ import annotations

from dataclasses import dataclass

from hal.backend import HostPlan
from hal.config import Settings, check_layout
from hal.registry import get_backend, get_transport


@dataclass(frozen=True)
class Hosts:
    """``ranks`` laid out on ``hosts`` equal hosts of this machine."""

    hosts: int
    ranks: int
    backend: str | None = None
    transport: str | None = None
    plan: HostPlan | None = None
    """What the backend does beside ``topology.nodes``; None: nothing."""

    def environment(self, rank: int) -> dict[str, str]:
        """What :func:`hal.launch.run` adds to the variables of one rank."""
        told = {"HAL_BACKEND": self.backend, "HAL_TRANSPORT": self.transport}
        planned = self.plan.environment(rank) if self.plan is not None else {}
        return {name: value for name, value in told.items() if value is not None} | dict(planned)

    def describe(self) -> list[str]:
        """Lines for the person who started the run; none when nothing beside the settings was done."""
        return self.plan.describe().splitlines() if self.plan is not None else []


def arrange(hosts: int, ranks: int, backend: str | None = None, transport: str | None = None) -> Hosts:
    """Check a layout, and prepare what its backend needs (a plug-in is built here, once).

    Without ``backend`` the program that is started decides, and its ranks are only told the number of hosts. Raises
    ContractError for a layout, name or variable that cannot work, BackendUnavailable when the backend is not usable here.
    """
    check_layout(ranks, hosts)
    if backend is None:
        return Hosts(hosts, ranks)
    spec = get_backend(backend, transport)
    emulated = transport is not None and get_transport(transport, backend).brings_device
    plan = None
    if hosts > 1 and spec.plan_hosts is not None and not emulated:
        plan = spec.plan_hosts(hosts, ranks, transport)
    return Hosts(hosts, ranks, backend, transport, plan)


def arranged(settings: Settings) -> Hosts:
    """:func:`arrange` for what a command was told."""
    return arrange(settings.topology.nodes, settings.ranks, settings.backend.name, settings.transport.name)
