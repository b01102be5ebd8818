# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs through NCCL's device API."""

from hal.backend import BackendSpec
from hal_cuda.probe import _load, _probe

SPEC = BackendSpec(
    name="cuda", probe=_probe, load=_load, default_transport="nccl", description="NVIDIA GPUs, NCCL's device API"
)
