# SPDX-License-Identifier: Apache-2.0
"""Joining a run: one GPU for each rank, one NCCL communicator over all of them."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING

from hal.backend import Session
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import BackendUnavailable, ContractError, HalError
from hal.sizing import Part
from hal_cuda import native
from hal_cuda.session import CudaSession

if TYPE_CHECKING:
    from hal.checker.program import Program

_UNIQUE_ID_BYTES = 128


class CudaBackend:
    """See :class:`hal.backend.Backend`."""

    name = "cuda"

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Session:
        """Collective. Rank r uses GPU r of those that are visible, or the only one (then they must differ)."""
        if config.transport not in (None, "lsa"):
            raise ContractError(f"transport={config.transport!r}: backend 'cuda' has one transport, 'lsa' (NVLink)")
        library = native.load()
        devices = int(library.value("device_count", c_int))
        if devices < 1:
            raise BackendUnavailable("cuda", "the driver shows no GPU", "see nvidia-smi")
        device = bootstrap.rank % devices
        identity = ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
        if bootstrap.rank == 0:
            library.unique_id(identity)
        identity.raw = bootstrap.all_gather(identity.raw, "NCCL unique id")[0]
        comm = library.value("comm_create", c_void_p, identity, bootstrap.world_size, bootstrap.rank, device)
        properties = native.Properties()
        library.comm_properties(comm, ctypes.byref(properties))
        if properties.lsa_size != bootstrap.world_size:
            library.comm_destroy(comm, 0)
            raise HalError(
                f"{bootstrap.world_size} ranks, but only {properties.lsa_size} of them reach each other over NVLink, and "
                f"{gin(properties)}: run within one NVLink domain"
            )
        return CudaSession(library, comm, properties, config, bootstrap)

    def why_not_play(self, program: Program) -> str:
        """See :class:`hal.backend.Backend`."""
        from hal_cuda.litmus import why_not_play

        return why_not_play(program)

    def buffer_parts(self, spec: ExpertParallelSpec, ranks: int, nodes: int) -> list[Part]:
        """See :func:`hal.sizing.buffer_parts`."""
        from hal_cuda.engine import pushes
        from hal_cuda.layout import buffer_parts

        return buffer_parts(spec, ranks, pushes(spec, ranks, nodes))


def gin(properties: native.Properties) -> str:
    """What NCCL can do beyond NVLink here, in words."""
    kinds = {0: "NCCL has no GIN here (no RDMA NIC), so rail and world operations cannot leave it"}
    return kinds.get(properties.gin_type, f"GIN of type {properties.gin_type} is not used by this backend yet")
