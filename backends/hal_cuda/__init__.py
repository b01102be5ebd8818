# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: NCCL's symmetric windows over NVLink, with native dispatch and combine kernels (docs/cuda.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hal.backend import Backend, BackendSpec, HostPlan, TransportSpec
from hal_cuda.probe import probe, probe_emulator


def _load() -> Backend:
    from hal_cuda.backend import CudaBackend

    return CudaBackend()


def _plan_hosts(hosts: int, ranks: int, transport: str | None) -> HostPlan | None:
    """Over transport lsa, nodes are of the schedule's arithmetic alone, within one NVLink domain (docs/cuda.md)."""
    if transport == "lsa":
        return None
    from hal_cuda.software_nic import plan

    return plan(hosts, ranks)


def _load_nccl() -> Callable[..., Any]:
    from hal_cuda.backend import connect_nccl

    return connect_nccl


def _load_emulated() -> Callable[..., Any]:
    from hal_cuda.emulated import connect_emulated

    return connect_emulated


SPEC = BackendSpec(
    "cuda",
    probe,
    _load,
    "lsa",
    "NVIDIA GPUs, through NCCL's device API: NVLink within a domain, GIN between them",
    plan_hosts=_plan_hosts,
)
LSA = TransportSpec("lsa", ("cuda",), probe, _load_nccl, "loads and stores over NVLink (NCCL's LSA team)")
GIN = TransportSpec(
    "gin", ("cuda",), probe, _load_nccl, "NVLink within a domain, NCCL's GIN (RDMA from kernels) between domains"
)
GIN_EMULATED = TransportSpec(
    "gin_emulated",
    ("cuda",),
    probe_emulator,
    _load_emulated,
    "the CUDA kernels on emulated GPUs, on CPUs of one machine",
    brings_device=True,
)
