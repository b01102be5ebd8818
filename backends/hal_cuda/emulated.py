# SPDX-License-Identifier: Apache-2.0
"""``transport=gin_emulated``: the CUDA kernels' own sources on emulated GPUs, on CPUs of one machine (docs/cuda.md).

The session and the engine are those of real GPUs. What differs is here: the library, where arrays live, and how many
blocks and threads a launch has.
"""

from __future__ import annotations

import ctypes
import math
import os
import socket
from collections import Counter
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from typing import TYPE_CHECKING, Any

from hal_host.mesh import close_all, connect_mesh

from hal.config import LONGEST_SECONDS, as_seconds
from hal.errors import ContractError
from hal_cuda import native
from hal_cuda.gin_session import Gin, GinSession
from hal_cuda.session import CudaSession
from hal_cuda.tuning import Tuning

if TYPE_CHECKING:
    from hal.bootstrap import Bootstrap
    from hal.config import ExpertParallelSpec, HalConfig

ONE_DOMAIN = "HAL_CUDA_EMULATOR_ONE_DOMAIN"
"""Set to 1, all ranks are in one NVLink domain, and topology.nodes says how sums are grouped, as on one real domain."""
THREADS = "HAL_CUDA_EMULATOR_THREADS"
"""Threads of a block, a multiple of 32; few, since every one is a fiber."""

SEED, BLOCKS, ADVERSARY, CARDS, LIMIT = (
    f"HAL_CUDA_EMULATOR_{name}" for name in ("SEED", "BLOCKS", "ADVERSARY", "GIN", "LIMIT")
)
"""Read by the library (kernels_cuda/emulation/options.hpp)."""

MUTATIONS = (
    "none",
    "fence_does_nothing",
    "fence_at_gpu_scope",
    "gpu_fence_does_nothing",
    "release_is_relaxed",
    "acquire_is_relaxed",
    "barrier_without_order",
    "copies_unawaited",
)
"""Defects that can be planted below the kernels: emulation::Mutation, in its order (kernels_cuda/emulation/order.hpp)."""


def threads() -> int:
    """What :data:`THREADS` says, or 64."""
    text = os.environ.get(THREADS, "64")
    if not text.isdecimal() or int(text) % 32 or not 64 <= int(text) <= 512:
        raise ContractError(f"{THREADS}={text!r}: give a multiple of 32 from 64 to 512")
    return int(text)


def _check_variables() -> None:
    """Refuse what the library, which reads most of them, would take for 0 or for its default."""
    threads()
    for name in (SEED, BLOCKS):
        try:
            int(os.environ.get(name) or "1", 0)
        except ValueError:
            raise ContractError(f"{name}={os.environ[name]!r}: give an integer") from None
    for name in (ADVERSARY, ONE_DOMAIN):
        if os.environ.get(name, "") not in ("", "0", "1"):
            raise ContractError(f"{name}={os.environ[name]!r}: give 0 or 1")
    if os.environ.get(CARDS, "") not in ("", "full", "rail", "none"):
        raise ContractError(f"{CARDS}={os.environ[CARDS]!r}: give full, rail or none")
    if as_seconds(_number(os.environ.get(LIMIT) or "1")) is None:
        raise ContractError(f"{LIMIT}={os.environ[LIMIT]!r}: give seconds above 0, at most {LONGEST_SECONDS}")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Emulated:
    """What sessions over emulated GPUs have besides. ``links`` are a rank's sockets to the other ranks."""

    properties: Any

    def __init__(self, *joined: Any, links: list[socket.socket | None]) -> None:
        """``joined``: the real session's arguments. ``links`` are closed with it."""
        self._links = links
        super().__init__(*joined, device_name="cpu")  # type: ignore[call-arg]  # the real session's

    def tuning(self, spec: ExpertParallelSpec, push: bool) -> Tuning:
        blocks = self.sms  # type: ignore[attr-defined]  # the real session's
        few = blocks if self.rank % 2 == 0 else 0  # type: ignore[attr-defined]  # both ways of combine in every run
        return Tuning(blocks, blocks, max(blocks - 1, 1), small_threads=threads(), threads=threads(), few_blocks=few)

    def close(self) -> None:
        super().close()  # type: ignore[misc]  # the real session's
        close_all(self._links)


    def _join(self, config: HalConfig, bootstrap: Bootstrap) -> CudaSession:
        session: Any = self
        ranks = bootstrap.ranks
        apart = session.domains_of(ranks) == len(ranks)
        return _join(session.library, config, bootstrap, _domains(ranks, len(session.team)), session.device, apart)


class EmulatedCudaSession(_Emulated, CudaSession):
    """A rank's connection over emulated GPUs of one NVLink domain."""


class EmulatedGinSession(_Emulated, GinSession):
    """The same with several domains, and an emulated network card on each rank."""


def connect_emulated(config: HalConfig, bootstrap: Bootstrap) -> CudaSession:
    """Collective. ``topology.nodes`` equal groups of consecutive ranks are the NVLink domains, or :data:`ONE_DOMAIN`."""
    library = native.load_emulated()
    _check_variables()  # a wrong setting is refused before anything is sent
    domains = 1 if os.environ.get(ONE_DOMAIN) == "1" else config.topology.nodes
    return _join(library, config, bootstrap, domains, device=bootstrap.rank)


def _domains(ranks: Sequence[int], local: int) -> int:
    """As NCCL would have them where ``local`` ranks were on a host: equal teams, as large as those left on each allow."""
    return len(ranks) // math.gcd(*Counter(rank // local for rank in ranks).values())


def _join(
    library: native.Library, config: HalConfig, bootstrap: Bootstrap, domains: int, device: int, apart: bool = False
) -> EmulatedCudaSession | EmulatedGinSession:
    world, rank = bootstrap.world_size, bootstrap.rank
    links = connect_mesh(bootstrap)
    try:
        numbers = (c_int * world)(*(-1 if link is None else link.fileno() for link in links))
        comm = library.value("emulator_create", c_void_p, numbers, world, rank, domains, device, bootstrap.timeout)
        properties = native.Properties()
        library.comm_properties(comm, ctypes.byref(properties))
        joined = (library, comm, properties, config, bootstrap)
        if properties.lsa_size == world:
            return EmulatedCudaSession(*joined, links=links)
        return EmulatedGinSession(*joined, Gin(library, comm, config, bootstrap, apart), links=links)
    except BaseException:
        close_all(links)
        raise
