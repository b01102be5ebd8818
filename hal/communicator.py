# SPDX-License-Identifier: Apache-2.0
"""The communicator: ranks, teams, symmetric windows, queues and the ordering words (docs/contract.md, section 4)."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from hal.arrays import Buffer, as_buffer, as_numpy
from hal.bootstrap import Bootstrap, Run, current_run
from hal.config import (
    LONGEST_SECONDS,
    ExpertParallelSpec,
    HalConfig,
    Settings,
    TopologyConfig,
    as_integer,
    as_seconds,
    check_layout,
    connection_config,
)
from hal.errors import CapacityError, ContractError, HalError, PeerTimeout
from hal.group import as_group, place_in
from hal.ordering import Order, QuietScope, SignalOp
from hal.registry import get_backend

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from hal.backend import Session
    from hal.expert_parallel import ExpertParallel
    from hal.ordering import OrderingProfile

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Word = TypeVar("_Word", Order, SignalOp, QuietScope)
_U64 = 1 << 64


def connect(
    cfg: HalConfig | Settings | Mapping[str, Any] | None = None,
    *,
    run: Run | None = None,
    group: Any = None,
    **settings: Any,
) -> Communicator:
    """Join the run that started this process, and return its communicator; a process on its own is a run of one rank.

    ``cfg`` is a :class:`~hal.config.HalConfig`, what :func:`hal.load_config` gives, or a mapping with HalConfig's
    fields (an OmegaConf config too, composed groups included); ``settings`` are fields that override it. Told no backend,
    ranks of ``hal run --backend NAME`` use that one. ``run`` states this rank's place where no launcher's variables do;
    ``group`` takes it from a ``torch.distributed`` process group (or a :class:`hal.group.Group`) whose members all call
    this, whatever started them. Collective: every rank calls it with equal settings.

    Raises ContractError for settings that make no sense or differ between ranks, BackendUnavailable with the reason and
    the fix, PeerTimeout that lists the ranks that did not come.
    """
    if group is not None and run is not None:
        raise ContractError("run and group both state this rank's place: pass one of them")
    if run is not None and not isinstance(run, Run):
        raise ContractError(f"run is {run!r}: pass a hal.bootstrap.Run")
    place = run or (current_run() if group is None else None)
    if cfg is None and place is not None and place.backend is not None and not {"backend", "transport"} & settings.keys():
        settings |= {"backend": place.backend, "transport": place.transport}
    config = _config(cfg, settings)
    backend_spec = get_backend(config.backend, config.transport)
    if place is None:
        place = place_in(as_group(group), config.timeout)
    if place.nodes is not None and config.topology == TopologyConfig():
        config = replace(config, topology=TopologyConfig(place.nodes))
    bootstrap = Bootstrap(place, config.timeout)
    try:
        bootstrap.agree("HalConfig", asdict(config))
        _check_topology(config, place)
        return Communicator(config, bootstrap, backend_spec.load().connect(config, bootstrap))
    except BaseException as error:
        bootstrap.close(_reason(error))
        raise


@dataclass(frozen=True)
class Team:
    """Some of the ranks, and this rank's place among them."""

    name: str
    ranks: tuple[int, ...]
    """World ranks, ascending."""
    rank: int
    """This rank's index in ``ranks``."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class Window:
    """Symmetric memory: ``nbytes`` zeroed bytes on every rank, which peers write with ``Queue.put``."""

    def __init__(self, communicator: Communicator, identity: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._communicator, self._identity = communicator, identity
        self._freed = False

    @property
    def buffer(self) -> Buffer:
        """This rank's part as a :class:`~hal.arrays.Buffer`; stays valid while somebody holds it."""
        return self._communicator._call(self._communicator._session.view, self._require())

    @property
    def array(self) -> NDArray[Any]:
        """This rank's part as a NumPy array of ``nbytes`` uint8; ``array.view(dtype)`` for others. CPU only."""
        buffer = self.buffer
        if buffer.device != "cpu":
            raise ContractError(f"this window is on {buffer.device}: use `hal.to_kind(window.buffer, like)`")
        return as_numpy(buffer)

    def free(self) -> None:
        """Give the memory back. Idempotent; arrays handed out stay valid. Put a barrier before it: a peer's late put
        into a freed window reaches nobody."""
        if not self._freed:
            self._freed = True
            self._communicator._call(self._communicator._session.free, self._identity)

    def _require(self) -> int:
        if self._freed:
            raise ContractError("this window was freed; make another with `comm.window(nbytes)`")
        return self._identity


class Queue:
    """Operations to any peer; order is promised within one (peer, queue) only. A GIN context, a UDMA QP."""

    def __init__(self, communicator: Communicator, index: int) -> None:
        self.index = index
        self._communicator = communicator

    def put(
        self,
        window: Window,
        dst_offset: int,
        src: Any,
        peer: int,
        order: Order | str = Order.RELAXED,
        signal: tuple[Any, ...] | None = None,
    ) -> None:
        """Write ``src`` (an array, bytes-like, anything with DLPack) to ``peer``'s part of ``window``, ``dst_offset``
        bytes from its start. ``src`` must not change until ``quiet("source")``.

        ``signal = (slot, value[, op[, order]])`` follows the put: op ``"add"``, order ``STRONG`` unless given; with
        ``RELAXED`` it covers this put only.
        """
        comm = self._communicator
        peer = comm._check_peer(peer)
        buffer = as_buffer(src)
        if not isinstance(window, Window):
            raise ContractError(f"window is {window!r}: pass what `comm.window(nbytes)` returned")
        if window._communicator is not comm:
            raise ContractError("this window belongs to another communicator")
        identity = window._require()
        offset = as_integer(dst_offset)
        if offset is None:
            raise ContractError(f"dst_offset must be an integer, in bytes, not {dst_offset!r}")
        if offset < 0 or offset + buffer.nbytes > window.nbytes:
            raise ContractError(
                f"put of {buffer.nbytes} bytes at offset {offset} ends at {offset + buffer.nbytes}, outside a "
                f"window of {window.nbytes} bytes"
            )
        strength = _word(Order, order, "order")
        follow = _bundled(comm, signal) if signal is not None else None
        comm._call(comm._session.put, identity, offset, buffer, peer, self.index, strength)
        if follow is not None:
            slot, value, op = follow
            # A signal of its own must be strong to cover the put, on every transport.
            comm._call(comm._session.signal, slot, peer, value, op, self.index, Order.STRONG)

    def signal(
        self,
        slot: int,
        peer: int,
        value: int = 1,
        op: SignalOp | str = SignalOp.ADD,
        order: Order | str = Order.STRONG,
    ) -> None:
        """Add ``value`` to, or set, ``peer``'s 64-bit signal ``slot``; strong: after earlier ones on this queue."""
        comm = self._communicator
        peer, slot, value = comm._check_peer(peer), comm._check_slot(slot), _check_u64("value", value)
        arguments = (slot, peer, value, _word(SignalOp, op, "op"), self.index, _word(Order, order, "order"))
        comm._call(comm._session.signal, *arguments)

    def quiet(self, peer: int | None = None, scope: QuietScope | str = QuietScope.REMOTE) -> None:
        """``"source"``: earlier operations (to ``peer``, or all) no longer read their sources. ``"remote"``: they are
        complete and visible at the target; not that it has consumed them."""
        comm = self._communicator
        if peer is not None:
            peer = comm._check_peer(peer)
        comm._call(comm._session.quiet, self.index, peer, _word(QuietScope, scope, "scope"))


class Communicator:
    """One rank's end of a run; made by :func:`connect`. A context manager: leaving it by an exception tells the peers.

    After a PeerTimeout it can only be closed.
    """

    def __init__(self, config: HalConfig, bootstrap: Bootstrap, session: Session) -> None:
        self.config = config
        self.rank, self.world_size = session.rank, session.world_size
        self._bootstrap, self._session = bootstrap, session
        self._closed = False
        self._why_closed = "is closed; connect again"
        self._failure: PeerTimeout | None = None
        self._finalizer = weakref.finalize(self, _leave, session, bootstrap)
        _open.add(self)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    @property
    def profile(self) -> OrderingProfile:
        """What the transport promises natively (hal/ordering.py)."""
        return self._session.profile

    def team(self, name: str = "world") -> Team:
        """``"world"``: all ranks. ``"lsa"``: those of this node. ``"rail"``: those with my local index on all nodes."""
        per_node = self.world_size // self.config.topology.nodes
        node, local = divmod(self.rank, per_node)
        members = {
            "world": (range(self.world_size), self.rank),
            "lsa": (range(node * per_node, (node + 1) * per_node), local),
            "rail": (range(local, self.world_size, per_node), node),
        }
        if not isinstance(name, str) or name not in members:
            raise ContractError(f"team must be one of {', '.join(members)}, not {name!r}")
        ranks, index = members[name]
        return Team(name, tuple(ranks), index)

    def window(self, nbytes: int) -> Window:
        """Collective. Symmetric memory of ``nbytes`` bytes, the same on every rank, zeroed."""
        size = as_integer(nbytes)
        if size is None or size < 1:
            raise ContractError(f"a window needs at least 1 byte, not {nbytes!r}")
        return Window(self, self._call(self._session.allocate, size), size)

    def queue(self, index: int = 0) -> Queue:
        """Queue ``index`` of ``config.queues``."""
        number = as_integer(index)
        if number is None or not 0 <= number < self._session.queues:
            raise ContractError(
                f"queue must be 0 to {self._session.queues - 1}, not {index!r}; more by `queues` in the settings"
            )
        return Queue(self, number)

    def wait(self, slot: int, at_least: int, timeout: float | None = None, source: int | None = None) -> int:
        """Acquire: returns this rank's ``slot`` once it is ``>= at_least`` (unsigned 64-bit); what the awaited strong
        signals cover is readable then. ``source``, the rank expected to signal, makes PeerTimeout name the right one.
        ``timeout`` in seconds; default the communicator's."""
        slot, at_least = self._check_slot(slot), _check_u64("at_least", at_least)
        if source is not None:
            source = self._check_peer(source)
        return self._call(self._session.wait, slot, at_least, self._timeout(timeout), source)

    def read_signal(self, slot: int) -> int:
        """The value of this rank's ``slot`` now (acquire)."""
        return self._call(self._session.read_signal, self._check_slot(slot))

    def barrier(self, team: Team | str | None = None, complete: bool = True, timeout: float | None = None) -> None:
        """Every member of ``team`` (default world) has arrived; with ``complete`` each first completed its own earlier
        operations on all queues. With ``complete=False`` it orders nothing."""
        members = team if isinstance(team, Team) else self.team("world" if team is None else team)
        self._call(self._session.barrier, members.ranks, complete, self._timeout(timeout))

    def expert_parallel(self, spec: ExpertParallelSpec | None = None, **settings: Any) -> ExpertParallel:
        """Collective. Dispatch and combine for one MoE layer shape; ``settings`` are fields of ExpertParallelSpec."""
        from hal.expert_parallel import ExpertParallel

        _check_names(ExpertParallelSpec, settings)
        if spec is not None and not isinstance(spec, ExpertParallelSpec):
            raise ContractError(
                f"spec is a {type(spec).__name__}; give a hal.ExpertParallelSpec, or its fields as keywords (**spec)"
            )
        try:
            wanted = replace(spec, **settings) if spec else ExpertParallelSpec(**settings)
        except TypeError as error:
            raise ContractError(f"ExpertParallel: {error}".replace("ExpertParallelSpec.__init__() ", "")) from None
        timeout = self.config.timeout
        return self._call(ExpertParallel, self._session, self._bootstrap, wanted, timeout=timeout, communicator=self)

    def close(self, error: BaseException | None = None) -> None:
        """Leave. Idempotent; never waits for a peer. With ``error`` the peers are told at once that this one failed."""
        if self._closed:
            return
        self._closed = True
        if isinstance(error, SystemExit) and not error.code:
            error = None
        if error is not None and self._failure is None:
            self._session.abort(_reason(error))
        self._finalizer.detach()
        self._session.close()
        self._bootstrap.close(_reason(error) if error else None)

    def _disown(self) -> None:
        """In a forked child: the communicator is the parent's, so whatever ends here, also this process, says nothing of it."""
        self._closed = True
        self._why_closed = "is that of the process which forked this one; fork before connecting, or connect here"
        self._finalizer.detach()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(error)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "failed" if self._failure else "open"
        return f"<hal.Communicator rank {self.rank} of {self.world_size}, backend {self.config.backend}, {state}>"

    def _call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call into the session; remembers a PeerTimeout, after which only ``close`` is left."""
        if self._closed:
            raise HalError(f"this communicator {self._why_closed}")
        if self._failure is not None:
            raise HalError(f"this communicator can only be closed, since it met a PeerTimeout: {self._failure}")
        try:
            return function(*args, **kwargs)
        except PeerTimeout as error:
            if not getattr(self._session, "masking", False):  # else the others may be well without that rank
                self._failure = error
            raise

    def _check_peer(self, peer: int) -> int:
        rank = as_integer(peer)
        if rank is None or not 0 <= rank < self.world_size:
            raise ContractError(f"peer must be a rank, 0 to {self.world_size - 1}, not {peer!r}")
        return rank

    def _check_slot(self, slot: int) -> int:
        number = as_integer(slot)
        if number is None or number < 0:
            raise ContractError(f"slot must be a number from 0 to {self.config.signal_slots - 1}, not {slot!r}")
        if number >= self.config.signal_slots:
            fix = "raise `signal_slots` in the settings, on all ranks"
            raise CapacityError(f"signal slot {number}", number + 1, self.config.signal_slots, fix)
        return number

    def _timeout(self, seconds: float | None) -> float:
        return self.config.timeout if seconds is None else _seconds(seconds)


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def _disown_all() -> None:
    for communicator in list(_open):
        communicator._disown()


os.register_at_fork(after_in_child=_disown_all)


def _leave(session: Session, bootstrap: Bootstrap) -> None:
    """A communicator that nobody closed: at the end of a script that is no failure, unless an exception ended it."""
    error = getattr(sys, "last_value", None)
    if error is not None:
        session.abort(_reason(error))
    session.close()
    bootstrap.close(_reason(error) if error is not None else None)


def _reason(error: BaseException) -> str:
    return f"failed with {type(error).__name__}: {error}"[:200]


def _bundled(comm: Communicator, signal: tuple[Any, ...]) -> tuple[int, int, SignalOp]:
    """A put's signal, checked before the put is sent."""
    if not isinstance(signal, tuple) or not 2 <= len(signal) <= 4:
        raise ContractError(f"signal must be (slot, value[, op[, order]]), not {signal!r}")
    defaults: tuple[Any, ...] = (SignalOp.ADD, Order.STRONG)
    slot, value, op, order = signal + defaults[len(signal) - 2 :]
    slot, value = comm._check_slot(slot), _check_u64("signal value", value)
    _word(Order, order, "signal order")
    return slot, value, _word(SignalOp, op, "signal op")


def _word(kind: type[_Word], value: _Word | str | int, what: str) -> _Word:
    """A member, or its name in any case."""
    if isinstance(value, kind):
        return value
    if isinstance(value, str) and value.upper() in kind.__members__:
        return kind[value.upper()]
    names = ", ".join(f"'{name.lower()}'" for name in kind.__members__)
    raise ContractError(f"{what} must be {kind.__name__} or one of {names}, not {value!r}")


def _check_u64(what: str, value: int) -> int:
    number = as_integer(value)
    if number is None or not 0 <= number < _U64:
        raise ContractError(f"{what} must be an integer from 0 to 2**64 - 1, not {value!r}")
    return number


def _seconds(value: Any) -> float:
    seconds = as_seconds(value)
    if seconds is None:
        raise ContractError(f"timeout must be a positive number of seconds, not {value!r}; at most {LONGEST_SECONDS}")
    return seconds


def _config(cfg: HalConfig | Settings | Mapping[str, Any] | None, settings: Mapping[str, Any]) -> HalConfig:
    """The settings as a checked dataclass."""
    base = HalConfig() if cfg is None else connection_config(cfg)
    _check_names(HalConfig, settings)
    config = connection_config({field.name: getattr(base, field.name) for field in fields(HalConfig)} | dict(settings))
    if not isinstance(config.topology, TopologyConfig):
        raise ContractError(f"topology must be a TopologyConfig or a mapping, not {config.topology!r}")
    return replace(config, timeout=_seconds(config.timeout))


def _check_names(kind: Any, given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(kind)]
    for name in given:
        if name not in known:
            raise ContractError(f"unknown setting '{name}'; known: {', '.join(known)}")


def _check_topology(config: HalConfig, place: Run) -> None:
    nodes = config.topology.nodes
    try:
        check_layout(place.world_size, nodes)
    except ContractError as error:
        if place.world_size > 1 or place.launcher != Run.launcher:
            raise
        # The likely cause: nothing started the other ranks.
        raise ContractError(
            f"{error}; or start it with `hal run -n RANKS script.py`, RANKS a multiple of {nodes}"
        ) from None
