# SPDX-License-Identifier: Apache-2.0
"""Dispatch and combine as a user calls them: inputs checked, any framework's arrays in, the same kind out.

docs/contract.md states what they promise; the work itself is the backend's :class:`hal.backend.Engine`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from hal import _validate
from hal.arrays import NUMPY_DTYPES, Buffer, as_buffer, current_stream, kind_of, to_kind
from hal.errors import ContractError

if TYPE_CHECKING:
    from types import TracebackType

    from hal.backend import Received, Session
    from hal.bootstrap import Bootstrap
    from hal.communicator import Communicator
    from hal.config import ExpertParallelSpec

T = TypeVar("T")


class _Driver:
    """Lets one thread at a time into an engine, and refuses the second: ranks match operations by their order, which two
    threads do not keep. The wait that would follow elsewhere names an innocent rank."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ContractError(
                "another thread is inside a call of this ExpertParallel: let one thread of a rank drive it (dispatch_async "
                "and combine_async run beside it), or give each thread an ExpertParallel of its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Handle:
    """The routing of one dispatch, which combine and later dispatches follow. Opaque; used any number of times."""

    __slots__ = ("_ep", "_rows", "_state", "_tokens", "_weights_shape")

    def __init__(self, ep: ExpertParallel, state: Any, tokens: int, rows: int, weights_shape: tuple[int, ...]) -> None:
        self._ep, self._state, self._tokens, self._rows, self._weights_shape = ep, state, tokens, rows, weights_shape

    def __repr__(self) -> str:
        return f"<hal.Handle: {self._tokens} tokens sent, {self._rows} rows received>"


@dataclass(frozen=True, slots=True, eq=False)
class Dispatched:
    """What dispatch gives; shapes as in docs/contract.md, section 1. ``N`` rows were received.

    The arrays are of the kind of dispatch's ``x``. They may be views of symmetric memory, which stays as it is for as
    long as any of them is referred to.
    """

    x: Any
    """[N, hidden]."""
    scales: Any
    """[N, scale_dim] float32, or None."""
    topk_idx: Any
    """int32 local expert ids, -1 for none: [N, top_k] (layout rank) or [N] (layout expert)."""
    topk_weights: Any
    """float32 of the same shape, 0 where ``topk_idx`` is -1."""
    tokens_per_expert: Any
    """[local experts] int32, actual counts, without padding."""
    expert_offsets: Any
    """[local experts + 1] int64, each group's aligned start; the last is N. None in layout rank."""
    handle: Handle
    masked_ranks: tuple[int, ...] = ()
    """Ranks that this dispatch went without (``on_peer_loss="mask"``), the same on all others; none of the rows is theirs."""


class Pending:
    """A send half whose receive half is still to come. Opaque; used once."""

    __slots__ = ("_ep", "_handle", "_kind", "_operation", "_sent", "_stream", "_tokens")

    def __init__(self, ep: ExpertParallel, operation: str, sent: Any, call: _Call) -> None:
        self._ep, self._operation, self._sent = ep, operation, sent
        self._kind, self._tokens, self._stream, self._handle = call.kind, call.tokens, call.stream, call.handle


class Event(Generic[T]):
    """An operation on its way (``dispatch_async``, ``combine_async``)."""

    __slots__ = ("_future",)

    def __init__(self, future: Future[T]) -> None:
        self._future = future

    def done(self) -> bool:
        """Whether :meth:`result` would return, or raise, at once."""
        return self._future.done()

    def wait(self) -> None:
        """Block until done, each wait inside bounded by the timeout; raise what the operation raised."""
        self._future.result()

    def result(self) -> T:
        """:meth:`wait`, then what the blocking call would have returned."""
        return self._future.result()


@dataclass(slots=True)
class _Call:
    """One validated call, as buffers."""

    kind: str
    stream: int | None
    x: Buffer
    tokens: int
    topk_idx: Buffer | None = None
    topk_weights: Buffer | None = None
    scales: Buffer | None = None
    handle: Handle | None = None
    weighted: bool = False
    bias: Sequence[Buffer] = ()


class ExpertParallel:
    """Dispatch and combine of one MoE layer shape over all ranks; made by ``comm.expert_parallel(...)``, collective.

    Every call but ``close`` is collective: all ranks make the same calls in the same order, with any number of tokens
    each, zero included. One thread of a rank drives it. Refused input leaves nothing sent and everything usable.
    """

    def __init__(
        self,
        session: Session,
        bootstrap: Bootstrap,
        spec: ExpertParallelSpec,
        *,
        timeout: float,
        communicator: Communicator | None = None,
    ) -> None:
        """``timeout`` (seconds) is the communicator's, for a ``spec`` that states none. ``communicator`` is kept alive.

        Raises ContractError, on every rank, if any rank's settings break a rule or differ from another's.
        """
        self.spec = _agree(bootstrap, spec, session.world_size, timeout)
        """The settings, with every default filled in."""
        self.rank, self.world_size = session.rank, session.world_size
        if self.spec.on_peer_loss == "mask":
            _require_masking(session)
        self._engine = session.expert_parallel(self.spec)
        self._device = self._engine.device
        self._worker: ThreadPoolExecutor | None = None
        self._tail: Future[Any] | None = None
        self._communicator, self._closed = communicator, False
        self._driver = _Driver()
        self._shortcut: Any = None

    # --- what a user asks --------------------------------------------------------------------------------------

    @property
    def expert_range(self) -> range:
        """The global ids of this rank's experts; local id ``i`` is ``expert_range[i]``."""
        local = self.spec.num_experts // self.world_size
        return range(self.rank * local, (self.rank + 1) * local)

    @property
    def device(self) -> str:
        """Where its arrays are, and those given to it must be: ``cpu``, ``cuda:0``, ``npu:1``."""
        return self._device

    @property
    def buffer_bytes(self) -> int:
        """Symmetric memory on each rank, in bytes; ``hal size`` explains it."""
        return self._engine.buffer_bytes

    @property
    def masked_ranks(self) -> tuple[int, ...]:
        """The ranks, ascending, that the last call which ended went without; with ``on_peer_loss="error"`` always none."""
        return getattr(self._engine, "masked_ranks", ())

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        handle: Handle | None = None,
    ) -> Dispatched:
        """Send every token to the ranks of its experts, and receive the tokens for this rank's experts.

        ``x`` [tokens, hidden] of the spec's dtype, or ``(x, scales)``; ``topk_idx`` [tokens, top_k] int32 or int64,
        global ids, -1 = no expert; ``topk_weights`` [tokens, top_k] float32, omitted = all ones; ``scales`` [tokens,
        scale_dim] float32. With ``handle`` the routing is the handle's, on every rank, and ``topk_idx`` is omitted.

        On return the inputs may change. Raises ContractError or CapacityError before anything is sent (ids in device
        memory are checked by the device's kernels), PeerTimeout if a peer stays away.
        """
        if self._tail is None and (quick := self._quick()) is not None:
            out: Dispatched | None = quick.dispatch(x, topk_idx, topk_weights, scales, handle)
            if out is not None:
                return out
        call = self._check_dispatch(x, topk_idx, topk_weights, scales, handle)
        self._await_tail()
        return self._dispatch_whole(call)

    def combine(
        self, x: Any, handle: Handle, *, weighted: bool = False, topk_weights: Any = None, bias: Any = None
    ) -> Any:
        """Sum the experts' rows at each token's home rank, in float32 and in a fixed order.

        ``x`` [N, hidden] of the spec's ``combine_dtype``, rows placed as the handle's dispatch placed them.
        ``weighted`` (layout expert) multiplies each row by the weight given to that dispatch. ``bias``: one or two
        arrays [tokens, hidden] of the same dtype, added last.

        Returns y [tokens, hidden] in the order of the dispatched tokens. With ``topk_weights`` (shape as dispatch gave
        them) these are carried home unchanged: returns ``(y, topk_weights [tokens, top_k])``. Raises as dispatch does.
        """
        if bias is None and topk_weights is None and self._tail is None and (quick := self._quick()) is not None:
            y = quick.combine(x, handle, weighted)
            if y is not None:
                return y
        call = self._check_combine(x, handle, weighted, topk_weights, bias)
        self._await_tail()
        return self._combine_whole(call)

    def expert_output(self, handle: Handle, like: Any) -> Any:
        """[N, hidden] of ``combine_dtype`` for the experts to write their rows into, of the kind of ``like``, an array on
        this device. Given to :meth:`combine` whole it may save a copy, and must then not be written again before the next
        dispatch. Not cleared."""
        self._check_open()
        self._check_handle(handle)
        given, like = like, self._buffer("like", like)
        kind = kind_of(given)
        make = getattr(self._engine, "expert_output", None)
        if make is not None:
            return to_kind(make(handle._state, like.owner, current_stream(like, kind)), kind)
        dtype = NUMPY_DTYPES[self.spec.combine_dtype or self.spec.dtype]
        return to_kind(as_buffer(np.empty((handle._rows, self.spec.hidden), dtype)), kind)

    # --- halves: send now, compute something else, receive later -------------------------------------------------

    def dispatch_send(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        handle: Handle | None = None,
    ) -> Pending:
        """The first half of :meth:`dispatch`: this rank's rows are on their way. On return the inputs may change."""
        call = self._check_dispatch(x, topk_idx, topk_weights, scales, handle)
        self._await_tail()
        return self._send_dispatch(call)

    def dispatch_recv(self, pending: Pending) -> Dispatched:
        """The second half: wait for the peers' rows."""
        self._check_pending(pending, "dispatch")
        self._await_tail()
        return self._receive_dispatch(pending)

    def combine_send(self, x: Any, handle: Handle, *, weighted: bool = False, topk_weights: Any = None) -> Pending:
        """The first half of :meth:`combine`. On return ``x`` and ``topk_weights`` may change."""
        call = self._check_combine(x, handle, weighted, topk_weights, None)
        self._await_tail()
        return self._send_combine(call)

    def combine_recv(self, pending: Pending, *, bias: Any = None) -> Any:
        """The second half: wait for the experts' rows and sum them."""
        self._check_pending(pending, "combine")
        biases = self._check_bias(bias, pending._tokens)
        self._await_tail()
        return self._receive_combine(pending, biases)

    # --- events: the whole operation beside the caller's own work ------------------------------------------------

    def dispatch_async(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        scales: Any = None,
        handle: Handle | None = None,
    ) -> Event[Dispatched]:
        """:meth:`dispatch` as an event. The input is checked now, and must not change until the event is done.

        Operations of one ExpertParallel run in the order of their calls, the blocking ones included.
        """
        call = self._check_dispatch(x, topk_idx, topk_weights, scales, handle)
        return self._later(lambda: self._dispatch_whole(call))

    def combine_async(
        self, x: Any, handle: Handle, *, weighted: bool = False, topk_weights: Any = None, bias: Any = None
    ) -> Event[Any]:
        """:meth:`combine` as an event, as :meth:`dispatch_async`."""
        call = self._check_combine(x, handle, weighted, topk_weights, bias)
        return self._later(lambda: self._combine_whole(call))

    # --- end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give the symmetric memory back; idempotent. Arrays that dispatch returned stay valid."""
        if self._closed:
            return
        self._closed = True
        self._shortcut = None
        if self._worker is not None:
            self._worker.shutdown(wait=True)
        self._engine.close()

    def __enter__(self) -> ExpertParallel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        spec = self.spec
        return (
            f"<hal.ExpertParallel rank {self.rank}/{self.world_size}: {spec.num_experts} experts, top {spec.top_k}, "
            f"hidden {spec.hidden}, {spec.dtype}, layout {spec.layout}, schedule {spec.schedule}>"
        )

    # --- input to buffers ----------------------------------------------------------------------------------------

    def _check_dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, scales: Any, handle: Handle | None) -> _Call:
        self._check_open()
        spec = self.spec
        if type(x) is tuple:
            if len(x) != 2 or scales is not None:
                raise ContractError(f"x is a tuple of {len(x)}: pass (x, scales), and scales only once")
            x, scales = x
        given, x = x, self._buffer("x", x)
        kind = kind_of(given)
        _validate.check_dtype("x", x, spec.dtype, "dtype")
        call = _Call(kind, current_stream(x, kind), x, _validate.check_tokens(spec, x), handle=handle)
        if handle is None:
            if topk_idx is None:
                raise ContractError("topk_idx is missing: pass [tokens, top_k] expert ids, or a handle to reuse")
            call.topk_idx = self._buffer("topk_idx", topk_idx)
            _validate.check_routing(spec, call.topk_idx, call.tokens)
        else:
            self._check_reuse(handle, topk_idx, call.tokens)
        if topk_weights is not None:
            call.topk_weights = self._buffer("topk_weights", topk_weights)
            shape = (call.tokens, spec.top_k)
            _validate.check_weights("topk_weights", call.topk_weights, shape, "[tokens, top_k]")
        if scales is not None:
            call.scales = self._buffer("scales", scales)
        _validate.check_scales(spec, call.scales, call.tokens)
        return call

    def _check_combine(self, x: Any, handle: Handle, weighted: bool, topk_weights: Any, bias: Any) -> _Call:
        self._check_open()
        self._check_handle(handle)
        spec = self.spec
        if weighted and spec.layout == "rank":
            raise ContractError(
                "weighted=True with layout='rank', where a row already sums several experts: let the experts apply "
                "out.topk_weights, or use layout='expert'"
            )
        given, x = x, self._buffer("x", x)
        kind = kind_of(given)
        _validate.check_dtype("x", x, spec.combine_dtype or spec.dtype, "combine_dtype")
        _validate.check_shape("x", x, (handle._rows, spec.hidden), "[rows the handle's dispatch received, hidden]")
        call = _Call(kind, current_stream(x, kind), x, handle._tokens, handle=handle, weighted=bool(weighted))
        if topk_weights is not None:
            call.topk_weights = self._buffer("topk_weights", topk_weights)
            meaning = "the shape of the dispatch's topk_weights"
            _validate.check_weights("topk_weights", call.topk_weights, handle._weights_shape, meaning)
        call.bias = self._check_bias(bias, handle._tokens)
        return call

    def _check_bias(self, bias: Any, tokens: int) -> Sequence[Buffer]:
        if bias is None:
            return ()
        given = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
        if len(given) > _validate.MAX_BIASES:
            raise ContractError(f"{len(given)} bias arrays: at most {_validate.MAX_BIASES}, add some of them first")
        buffers = [self._buffer("bias", array) for array in given]
        for buffer in buffers:
            _validate.check_dtype("bias", buffer, self.spec.combine_dtype or self.spec.dtype)
            _validate.check_shape("bias", buffer, (tokens, self.spec.hidden), "[tokens of the dispatch, hidden]")
        return buffers

    def _check_reuse(self, handle: Handle, topk_idx: Any, tokens: int) -> None:
        self._check_handle(handle)
        if topk_idx is not None:
            raise ContractError("topk_idx and a handle were both given: the handle is the routing, leave topk_idx out")
        if tokens != handle._tokens:
            raise ContractError(f"x has {tokens} tokens, but the handle's dispatch had {handle._tokens}: pass as many")

    def _check_handle(self, handle: Handle) -> None:
        if not isinstance(handle, Handle):
            raise ContractError(f"handle is a {type(handle).__name__}: pass the .handle of an earlier dispatch")
        if handle._ep is not self:
            raise ContractError(f"{handle!r} belongs to {handle._ep!r}, not to {self!r}: use it there")

    def _check_pending(self, pending: Pending, operation: str) -> None:
        self._check_open()
        if not isinstance(pending, Pending) or pending._ep is not self or pending._operation != operation:
            raise ContractError(f"{operation}_recv takes what {operation}_send of the same ExpertParallel returned")
        if pending._sent is None:
            raise ContractError(f"this {operation} was received already: each {operation}_send has one recv")

    def _check_open(self) -> None:
        if self._closed:
            raise ContractError("this ExpertParallel is closed: make another with comm.expert_parallel(...)")
        if self._communicator is not None and self._communicator.closed:
            raise ContractError(f"the communicator of this ExpertParallel {self._communicator._why_closed}")

    def _buffer(self, name: str, array: Any) -> Buffer:
        try:
            buffer = as_buffer(array)
        except ContractError as error:
            raise ContractError(f"{name}: {error}") from None
        _validate.check_device(name, buffer, self._device)
        return buffer

    # --- buffers to the engine and back --------------------------------------------------------------------------

    def _send_dispatch(self, call: _Call) -> Pending:
        state = call.handle._state if call.handle is not None else None
        with self._driver:
            sent = self._engine.dispatch_send(call.x, call.topk_idx, call.topk_weights, call.scales, state, call.stream)
        return Pending(self, "dispatch", sent, call)

    def _receive_dispatch(self, pending: Pending) -> Dispatched:
        with self._driver:
            # Used up even if the receive fails: what a peer has sent cannot be awaited twice.
            sent, pending._sent = pending._sent, None
            got = self._engine.dispatch_recv(sent, pending._stream)
        return self._dispatched(got, pending._kind, pending._tokens)

    def _dispatch_whole(self, call: _Call) -> Dispatched:
        """Both halves; in one go where the engine can, which on devices saves a launch."""
        whole = getattr(self._engine, "dispatch", None)
        if whole is None:
            return self._receive_dispatch(self._send_dispatch(call))
        state = call.handle._state if call.handle is not None else None
        with self._driver:
            got = whole(call.x, call.topk_idx, call.topk_weights, call.scales, state, call.stream)
        return self._dispatched(got, call.kind, call.tokens)

    def _dispatched(self, got: Received, kind: str, tokens: int) -> Dispatched:
        return Dispatched(
            to_kind(got.x, kind),
            None if got.scales is None else to_kind(got.scales, kind),
            to_kind(got.topk_idx, kind),
            to_kind(got.topk_weights, kind),
            to_kind(got.tokens_per_expert, kind),
            None if got.expert_offsets is None else to_kind(got.expert_offsets, kind),
            Handle(self, got.state, tokens, got.x.shape[0], got.topk_weights.shape),
            got.masked_ranks,
        )

    def _send_combine(self, call: _Call) -> Pending:
        assert call.handle is not None
        with self._driver:
            sent = self._engine.combine_send(call.x, call.handle._state, call.topk_weights, call.weighted, call.stream)
        return Pending(self, "combine", sent, call)

    def _receive_combine(self, pending: Pending, bias: Sequence[Buffer]) -> Any:
        with self._driver:
            sent, pending._sent = pending._sent, None
            y, topk_weights = self._engine.combine_recv(sent, bias, pending._stream)
        return self._combined(y, topk_weights, pending._kind)

    def _combine_whole(self, call: _Call) -> Any:
        whole = getattr(self._engine, "combine", None)
        if whole is None:
            return self._receive_combine(self._send_combine(call), call.bias)
        assert call.handle is not None
        state = call.handle._state
        with self._driver:
            y, topk_weights = whole(call.x, state, call.topk_weights, call.weighted, call.bias, call.stream)
        return self._combined(y, topk_weights, call.kind)

    @staticmethod
    def _combined(y: Buffer, topk_weights: Buffer | None, kind: str) -> Any:
        if topk_weights is None:
            return to_kind(y, kind)
        return to_kind(y, kind), to_kind(topk_weights, kind)

    def _quick(self) -> Any:
        """The engine's short way for its framework's arrays, if it has one; it returns None for what it does not do."""
        if self._closed or (self._communicator is not None and self._communicator.closed):
            return None
        if self._shortcut is None:
            make = getattr(self._engine, "quick", None)
            self._shortcut = make(self) if make is not None else None
        return self._shortcut

    # --- one operation at a time ---------------------------------------------------------------------------------

    def _later(self, operation: Callable[[], T]) -> Event[T]:
        # One worker, first in first out: peers match operations by their order, and one thread drives an engine.
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix=f"hal-ep-{self.rank}")
        future = self._worker.submit(operation)
        self._tail = future
        return Event(future)

    def _await_tail(self) -> None:
        """Let the events before a blocking call end first; their errors are theirs to report."""
        if self._tail is not None:
            wait([self._tail])
            self._tail = None


def _require_masking(session: Session) -> None:
    reason = getattr(session, "why_not_mask", "its backend has no kernels for it")
    if reason:
        raise ContractError(
            f"on_peer_loss='mask' cannot be had here: {reason}; use on_peer_loss='error', or backend='host' with "
            "transport='shm'"
        )


def _agree(bootstrap: Bootstrap, spec: ExpertParallelSpec, world_size: int, timeout: float) -> ExpertParallelSpec:
    """The completed settings, equal on all ranks. A rank that refuses its own still answers, so that nobody waits."""
    completed, refusal = None, ""
    try:
        completed = _validate.complete_spec(spec, world_size, timeout)
    except ContractError as error:
        refusal = str(error)
    refusals = bootstrap.all_gather(refusal, "ExpertParallelSpec refused")
    if completed is None:
        raise ContractError(refusal)
    for rank, theirs in enumerate(refusals):
        if theirs:
            raise ContractError(f"rank {rank} refused its settings: {theirs}")
    bootstrap.agree("ExpertParallelSpec", asdict(completed))
    return completed
