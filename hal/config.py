# SPDX-License-Identifier: Apache-2.0
"""Settings as frozen dataclasses. Every Hydra group of ``configs/hal`` fills one of them; hal/compose.py loads them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hal.errors import ContractError

QUANTISED_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""Rows of these are dispatched and never summed: they may carry scales, and they carry no gradient."""

PEER_LOSS = ("error", "mask")

LONGEST_SECONDS = 1_000_000
"""Of any time limit; the system's own clocks and waits count in smaller words than a float."""


def combined_dtype(dtype: str, combine_dtype: str | None) -> str:
    """Of combined rows: ``combine_dtype``, else the dispatched rows' own, or bfloat16 where these are quantised."""
    return combine_dtype or ("bfloat16" if dtype in QUANTISED_DTYPES else dtype)


def config_directory() -> Path:
    """The folder on Hydra's search path: inside the package when installed, in the source tree when editable."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def as_integer(value: Any) -> int | None:
    """``value`` as an int, if it is an integer of any library (NumPy's come out of every routing table), else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def as_seconds(value: Any) -> float | None:
    """``value`` as a time limit, if it is a number above 0 and at most :data:`LONGEST_SECONDS`, else None."""
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        return None
    seconds = float(value)
    return seconds if 0 < seconds <= LONGEST_SECONDS else None  # NaN is neither.


def _at_least(config: Any, **minimum: float) -> None:
    """Refuse a field below its minimum, by its name. A minimum that is an int asks for an integer."""
    for name, least in minimum.items():
        value = getattr(config, name)
        if isinstance(least, int) and (number := as_integer(value)) is not None:
            object.__setattr__(config, name, value := number)
        elif isinstance(least, int) or isinstance(value, bool) or not isinstance(value, int | float):
            kind = "an integer" if isinstance(least, int) else "a number"
            raise ContractError(f"{type(config).__name__}.{name} is {value!r}; it must be {kind}")
        if not value >= least:  # NaN too.
            raise ContractError(f"{type(config).__name__}.{name} is {value}; it must be at least {least:g}")


def _positive_timeout(config: Any) -> None:
    if as_seconds(config.timeout) is None:
        raise ContractError(
            f"{type(config).__name__}.timeout is {config.timeout!r}; it must be above 0 seconds, and at most "
            f"{LONGEST_SECONDS}"
        )


def _one_of(config: Any, name: str, known: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in known:
        raise ContractError(f"{type(config).__name__}.{name} is {value!r}; choose one of: {', '.join(known)}")


def check_layout(ranks: int, nodes: int) -> None:
    """Refuse ranks that cannot be laid out as ``nodes`` equal groups, with the choices there are."""
    if ranks < 1 or nodes < 1:
        raise ContractError(f"{ranks} ranks cannot be laid out on {nodes} equal nodes; at least 1 of each is needed")
    if ranks % nodes:
        choices = ", ".join(str(count) for count in range(1, ranks + 1) if ranks % count == 0)
        raise ContractError(
            f"{ranks} ranks cannot be laid out on {nodes} equal nodes; nodes (--hosts) may be {choices}"
        )


@dataclass(frozen=True)
class TopologyConfig:
    """How ranks are laid out: ``nodes`` equal groups of consecutive ranks. A node is one scale-up (LSA) domain: a host,
    and what the commands' ``--hosts`` sets."""

    nodes: int = 1

    def __post_init__(self) -> None:
        _at_least(self, nodes=1)


@dataclass(frozen=True)
class HalConfig:
    """What :func:`hal.connect` needs. Must be equal on all ranks; compared when they connect."""

    backend: str = "host"
    transport: str | None = None
    """None = the backend's default."""
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    queues: int = 2
    """Queues to each peer: GIN contexts, UDMA QPs."""
    signal_slots: int = 1024
    """Signal slots on each rank for the communicator's own signal and wait."""
    timeout: float = 30.0
    """Seconds; bounds every wait."""

    def __post_init__(self) -> None:
        if not isinstance(self.backend, str) or not isinstance(self.transport, str | None):
            raise ContractError(
                f"HalConfig.backend is {self.backend!r} and transport {self.transport!r}; give names (`hal backends`)"
            )
        _at_least(self, queues=1, signal_slots=1)
        _positive_timeout(self)


@dataclass(frozen=True)
class ExpertParallelSpec:
    """One ExpertParallel's settings. Must be equal on all ranks; compared when it is made."""

    num_experts: int
    top_k: int
    hidden: int
    max_tokens: int
    dtype: str = "bfloat16"
    """Of dispatched rows: bfloat16, float16, float32, or one of :data:`QUANTISED_DTYPES`."""
    combine_dtype: str | None = None
    """Of combined rows; None = ``dtype``, or bfloat16 when that is quantised."""
    scale_dim: int = 0
    """float32 scales for each row; quantised rows only."""
    layout: str = "rank"
    alignment: int = 1
    """Layout expert: each group's start is a multiple of this many rows."""
    schedule: str = "direct"
    completion: str = "strong_signal"
    num_buffers: int = 2
    """Receive slots (docs/contract.md, Lifetime)."""
    timeout: float | None = None
    """Seconds; None = the communicator's."""
    on_peer_loss: str = "error"
    """error: a lost rank ends every call with PeerTimeout. mask: the others go on without it (docs/contract.md, section 6)."""

    @property
    def combined_dtype(self) -> str:
        """Of combined rows; see :func:`combined_dtype`."""
        return combined_dtype(self.dtype, self.combine_dtype)


@dataclass(frozen=True)
class BackendConfig:
    """Group ``backend``: a name of entry-point group ``hal.backends``."""

    name: str = "host"


@dataclass(frozen=True)
class TransportConfig:
    """Group ``transport``: a name of entry-point group ``hal.transports``; None = the backend's default."""

    name: str | None = None


@dataclass(frozen=True)
class ScheduleConfig:
    """Group ``schedule``: how rows travel, and over how many receive slots."""

    name: str = "direct"
    num_buffers: int = 2


@dataclass(frozen=True)
class CompletionConfig:
    """Group ``completion``: how a receiver knows that rows have arrived."""

    name: str = "strong_signal"


@dataclass(frozen=True)
class WorkloadConfig:
    """Group ``workload``: sizes and routing of what the commands run."""

    tokens: int = 64
    """On each rank in each call; also ``max_tokens``."""
    hidden: int = 256
    num_experts: int = 16
    top_k: int = 4
    dtype: str = "bfloat16"
    combine_dtype: str | None = None
    scale_block: int = 0
    """Quantised rows: elements that share one scale; 0 = no scales."""
    skew: float = 0.0
    """Expert at place ``i`` of a seeded shuffle is chosen with probability ~ 1 / (i + 1) ** skew; 0 = uniform."""
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(self, tokens=0, hidden=1, num_experts=1, top_k=1, scale_block=0, skew=0.0, seed=0)
        if self.top_k > self.num_experts:
            raise ContractError(f"WorkloadConfig.top_k is {self.top_k}, but there are {self.num_experts} experts")
        if self.scale_block and self.hidden % self.scale_block:
            raise ContractError(
                f"WorkloadConfig.scale_block is {self.scale_block}; it must divide hidden, which is {self.hidden}"
            )

    @property
    def combined_dtype(self) -> str:
        """Of combined rows; see :func:`combined_dtype`."""
        return combined_dtype(self.dtype, self.combine_dtype)

    @property
    def scale_dim(self) -> int:
        """float32 scales for each row; quantised rows only."""
        return self.hidden // self.scale_block if self.scale_block and self.dtype in QUANTISED_DTYPES else 0


@dataclass(frozen=True)
class CheckerConfig:
    """Group ``checker``: how the ordering checker searches, and where it stops."""

    search: str = "exhaustive"
    """exhaustive, delay, pct or happens_before."""
    limit: int = 20_000_000
    """Transitions after which a search stops and says that it was not exhaustive."""
    delays: int = 2
    """delay: departures from first-in first-out delivery; pct: priority change points."""
    runs: int = 1
    """pct and happens_before: executions."""
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of(self, "search", ("exhaustive", "delay", "pct", "happens_before"))
        _at_least(self, limit=1, delays=0, runs=1, seed=0)


@dataclass(frozen=True)
class Settings:
    """Everything :func:`hal.load_config` composes. :func:`hal.connect` takes it whole and uses :attr:`connection`."""

    backend: BackendConfig = field(default_factory=BackendConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    topology: TopologyConfig = field(default_factory=TopologyConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    completion: CompletionConfig = field(default_factory=CompletionConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    checker: CheckerConfig = field(default_factory=CheckerConfig)
    layout: str = "rank"
    """rank or expert (docs/contract.md, section 1)."""
    alignment: int = 1
    ranks: int = 4
    """Of commands that start their own ranks."""
    queues: int = 2
    signal_slots: int = 1024
    timeout: float = 30.0
    on_peer_loss: str = "error"
    """error or mask (docs/contract.md, section 6)."""

    def __post_init__(self) -> None:
        _one_of(self, "layout", ("rank", "expert"))
        _one_of(self, "on_peer_loss", PEER_LOSS)
        _at_least(self, ranks=1, alignment=1, queues=1, signal_slots=1)
        _positive_timeout(self)

    @property
    def connection(self) -> HalConfig:
        """The part that :func:`hal.connect` needs."""
        return HalConfig(
            backend=self.backend.name,
            transport=self.transport.name,
            topology=self.topology,
            queues=self.queues,
            signal_slots=self.signal_slots,
            timeout=self.timeout,
        )

    @property
    def expert_parallel(self) -> ExpertParallelSpec:
        """The part that :meth:`hal.Communicator.expert_parallel` needs, for this workload."""
        work = self.workload
        return ExpertParallelSpec(
            num_experts=work.num_experts,
            top_k=work.top_k,
            hidden=work.hidden,
            max_tokens=work.tokens,
            dtype=work.dtype,
            combine_dtype=work.combine_dtype,
            scale_dim=work.scale_dim,
            layout=self.layout,
            alignment=self.alignment,
            schedule=self.schedule.name,
            completion=self.completion.name,
            num_buffers=self.schedule.num_buffers,
            on_peer_loss=self.on_peer_loss,
        )


def connection_config(config: object) -> HalConfig:
    """What :func:`hal.connect` was given, as a :class:`HalConfig`: that, :class:`Settings`, or a mapping.

    A mapping (OmegaConf's included) has the keys of HalConfig, or the shape of the composed groups (``{"backend": {"name":
    "cuda"}, "workload": …}``), so that a user's Hydra application passes its own ``cfg.hal``. Keys of :class:`Settings`
    that connecting does not need are passed over; any other key is refused.
    """
    if isinstance(config, HalConfig):
        return config
    if isinstance(config, Settings):
        return config.connection
    if not isinstance(config, Mapping):
        raise ContractError(
            f"config is a {type(config).__name__}; give a HalConfig, hal.load_config([...]), or a mapping of its keys"
        )
    known = {item.name for item in fields(HalConfig)}
    _check_keys("", config, known | {item.name for item in fields(Settings)}, known)
    given = {key: config[key] for key in config if key in known}
    for group in ("backend", "transport"):
        if isinstance(given.get(group), Mapping):
            _check_keys(f"{group}.", given[group], {"name"}, {"name"})
            given[group] = given[group].get("name", getattr(HalConfig, group))
    if isinstance(given.get("topology"), Mapping):
        keys = {item.name for item in fields(TopologyConfig)}
        _check_keys("topology.", given["topology"], keys, keys)
        given["topology"] = TopologyConfig(**given["topology"])
    return HalConfig(**given)


def _check_keys(prefix: str, given: Mapping[str, Any], accepted: set[str], named: set[str]) -> None:
    for key in given:
        if key not in accepted:
            raise ContractError(f"unknown setting '{prefix}{key}'; known: {', '.join(sorted(named))}")
