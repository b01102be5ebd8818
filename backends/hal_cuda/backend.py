# SPDX-License-Identifier: Apache-2.0
"""Joining a run by the transport that the settings name; ``lsa`` is one GPU for each rank and one NCCL communicator."""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING, Any

from hal.backend import Session
from hal.bootstrap import Bootstrap
from hal.config import ExpertParallelSpec, HalConfig
from hal.errors import BackendUnavailable, HalError
from hal.registry import get_transport
from hal.sizing import Part
from hal_cuda import adopt, native
from hal_cuda.gin_session import Gin, GinSession
from hal_cuda.session import CudaSession, create_communicator

if TYPE_CHECKING:
    from hal.checker.program import Program
    from hal.checker.rounds import Report

_log = logging.getLogger("hal.cuda")


class CudaBackend:
    """See :class:`hal.backend.Backend`."""

    name = "cuda"
    completions = ("strong_signal",)

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Session:
        """Collective. Transport unset: ``lsa`` if one NVLink domain spans the run, else ``gin``."""
        if config.transport is None:
            return connect_nccl(config, bootstrap)
        session: Session = get_transport(config.transport, "cuda").load()(config, bootstrap)
        return session

    def why_not_play(self, program: Program) -> str:
        """See :class:`hal.backend.Backend`."""
        from hal_cuda.litmus import why_not_play

        return why_not_play(program)

    def check_kernels(self, spec: ExpertParallelSpec, ranks: int, nodes: int, **options: Any) -> Report:
        """See :class:`hal.backend.Backend`."""
        from hal_cuda.check import check

        return check(spec, ranks, nodes, **options)

    def buffer_parts(self, spec: ExpertParallelSpec, ranks: int, nodes: int, transport: str | None) -> list[Part]:
        """See :func:`hal.sizing.buffer_parts`. Nodes are hosts where the transport reaches others; with the default transport
        where nothing else fits the schedule."""
        from hal_cuda.crossing import crossing
        from hal_cuda.engine import pushes
        from hal_cuda.layout import buffer_parts

        sums_by_host = spec.schedule == "hierarchical" and 1 < nodes < ranks
        if nodes > 1 and (transport in ("gin", "gin_emulated") or (transport is None and sums_by_host)):
            return buffer_parts(spec, ranks, False, crossing(spec, ranks, nodes))
        return buffer_parts(spec, ranks, pushes(spec, ranks, nodes))


_SHARED_GPU = "Multiple Ranks are using the same GPU"
"""In what NCCL says of it."""


def connect_nccl(config: HalConfig, bootstrap: Bootstrap) -> CudaSession:
    """Collective. Rank r uses GPU r of those that are visible, or the only one (then they must differ); with a torch
    process group the GPU that this is bound to, or that torch works on."""
    library = native.load()
    devices = int(library.value("device_count", c_int))
    if devices < 1:
        raise BackendUnavailable("cuda", "the driver shows no GPU", "see nvidia-smi")
    wanted = adopt.device_of(bootstrap)
    device = bootstrap.rank % devices if wanted is None else wanted
    try:
        comm = _communicator(library, bootstrap, device)
    except HalError as error:
        if _SHARED_GPU not in str(error):
            raise
        raise HalError(
            f"{bootstrap.world_size} ranks, but a host of theirs has fewer GPUs than ranks (this one sees {devices}): start a "
            f"rank for each GPU, or lay the ranks out on make-believe hosts, which may share GPUs (hal run --backend cuda "
            f"--hosts H -n {bootstrap.world_size} ...); {error}"
        ) from None
    properties = native.Properties()
    library.comm_properties(comm, ctypes.byref(properties))
    if (properties.world, properties.rank) != (bootstrap.world_size, bootstrap.rank):
        library.comm_destroy(comm, 0)
        raise HalError(
            f"the NCCL communicator has rank {properties.rank} of {properties.world} where the process group has rank "
            f"{bootstrap.rank} of {bootstrap.world_size}"
        )
    one_domain = properties.lsa_size == bootstrap.world_size
    try:
        if config.transport == "lsa" and not one_domain:
            raise HalError(
                f"{bootstrap.world_size} ranks, but only {properties.lsa_size} of them reach each other over NVLink: use "
                f"transport=gin, or run within one NVLink domain; {gin_in_words(properties)}"
            )
        if one_domain and config.transport != "gin":
            return CudaSession(library, comm, properties, config, bootstrap)
        gin = Gin(library, comm, config, bootstrap)
        return GinSession(library, comm, properties, config, bootstrap, gin)
    except HalError:
        library.raw_comm_destroy(comm, 0)
        raise


def _communicator(library: native.Library, bootstrap: Bootstrap, device: int) -> int:
    """Collective. A communicator over all ranks: the process group's own where that can be, which stays the group's; else
    one of HAL's, made over the run's exchanges."""
    pointer, reason = adopt.communicator_of(bootstrap, library, device)
    if pointer:
        _log.info("rank %d: NCCL communicator adopted from the process group", bootstrap.rank)
        return int(library.value("comm_adopt", c_void_p, pointer, device))
    if reason:
        _log.info("NCCL communicator of HAL's own, since the process group's cannot be adopted: %s", reason)
    return create_communicator(library, bootstrap, device)


def gin_in_words(properties: native.Properties) -> str:
    """What NCCL can do beyond NVLink here."""
    if properties.gin_type:
        return f"NCCL has GIN here, of type {native.GIN_TYPES.get(properties.gin_type, properties.gin_type)}"
    if properties.rail_type:
        kind = native.GIN_TYPES.get(properties.rail_type, properties.rail_type)
        return f"NCCL has GIN here, of type {kind}, on the rails only"
    return "NCCL has no GIN here (no RDMA NIC), so nothing leaves the NVLink domain"
