# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: NCCL's symmetric windows over NVLink, with native dispatch and combine kernels (docs/cuda.md)."""

from __future__ import annotations

from hal.backend import Backend, BackendSpec, HostPlan
from hal_cuda.probe import probe


def _load() -> Backend:
    from hal_cuda.backend import CudaBackend

    return CudaBackend()


def _plan_hosts(hosts: int, ranks: int, transport: str | None) -> HostPlan | None:
    """Over transport lsa, nodes are of the schedule's arithmetic alone, within one NVLink domain (docs/cuda.md)."""
    if transport == "lsa":
        return None
    from hal_cuda.software_nic import plan

    return plan(hosts, ranks)


SPEC = BackendSpec(
    "cuda",
    probe,
    _load,
    "lsa",
    "NVIDIA GPUs, through NCCL's device API: NVLink within a domain, GIN between them",
    plan_hosts=_plan_hosts,
)
