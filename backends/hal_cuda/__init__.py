# SPDX-License-Identifier: Apache-2.0
"""The CUDA backend: NCCL's symmetric windows over NVLink, with native dispatch and combine kernels (docs/cuda.md)."""

from __future__ import annotations

from hal.backend import Backend, BackendSpec
from hal_cuda.probe import probe


def _load() -> Backend:
    from hal_cuda.backend import CudaBackend

    return CudaBackend()


SPEC = BackendSpec(
    "cuda", probe, _load, "lsa", "NVIDIA GPUs, through NCCL's device API: NVLink within a domain, GIN between them"
)
