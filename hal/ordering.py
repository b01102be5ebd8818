# SPDX-License-Identifier: Apache-2.0
"""The ordering contract's words, and what each transport promises about them (docs/contract.md).

The scope of every promise is one origin rank, one target rank (peer) and one queue. Nothing is promised across queues
or peers.

A profile is data. Of two operations that one origin has in flight to one (peer, queue) it says which must have taken
effect before the other may; what ``quiet`` and signals cover; which words the transport has and which ones HAL builds;
limits and costs. The checker (docs/checker.md) explores every delivery that a profile does not forbid. Where a vendor's
document says nothing, the profile allows it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hal.errors import ContractError


class Order(enum.IntEnum):
    """How an operation is ordered against the others of its (peer, queue)."""

    NONE = 0
    """Outside every later guarantee except ``quiet``."""
    RELAXED = 1
    """May pass and be passed by other relaxed operations; covered by a later strong one."""
    STRONG = 2
    """Takes effect only after every earlier relaxed or strong operation of this (peer, queue) has completed at the
    target. A later relaxed operation may still pass it."""


class SignalOp(enum.IntEnum):
    """What a signal does to its 8-byte slot."""

    ADD = 0
    SET = 1


class QuietScope(enum.IntEnum):
    """What ``quiet`` waits for."""

    SOURCE = 0
    """This rank's earlier operations no longer read their sources."""
    REMOTE = 1
    """They are complete and visible at the target (not: consumed by it)."""


class Effect(enum.IntEnum):
    """The two effects that an operation can have at its target."""

    PUT = 0
    SIGNAL = 1


class Scope(enum.StrEnum):
    """Which earlier operations of an origin a strong operation covers."""

    QUEUE = "queue"
    """Those of the same (peer, queue): the contract."""
    ORIGIN = "origin"
    """All of the issuing thread, whatever their peer and queue (a cumulative release)."""


class Cost(enum.StrEnum):
    """Cost class of a word, for choosing a completion protocol; never a time."""

    FREE = "free"
    STORE = "store"
    """A store or an atomic of the issuing thread."""
    FENCE = "fence"
    """The issuing thread waits for its own earlier stores."""
    MESSAGE = "message"
    """One more entry on the queue; the issuer does not wait."""
    DRAIN = "drain"
    """The issuer waits until its queue has completed."""
    ROUND_TRIP = "round trip"
    """The issuer waits for an answer of the peer."""


WORDS = (
    "put.none", "put.relaxed", "put.strong", "signal.bundled", "signal.weak", "signal.strong",
    "quiet.source", "quiet.remote", "barrier",
)  # fmt: skip
"""Every word that a profile has natively, or builds, or promotes to a stronger one."""


@dataclass(frozen=True)
class Limits:
    """Sizes a transport refuses to exceed. Bytes and counts; None = no limit below memory."""

    max_put_bytes: int | None = None
    queues_per_peer: int | None = None
    ring_entries: int | None = None
    """Operations in flight on one (peer, queue)."""
    one_submitter: bool = False
    """Only one thread may post on a queue; a second one is a contract error."""
    atomic_bytes: int = 8
    """Aligned pieces of a put that are never seen half written."""


@dataclass(frozen=True)
class Rule:
    """One promise, and the document that makes it."""

    text: str
    source: str


Precedence = frozenset[tuple[Order, Effect, Order]]


@dataclass(frozen=True)
class OrderingProfile:
    """What a transport promises.

    ``precedes`` holds (order of the earlier operation, effect of the later one, order of the later one): the earlier
    operation must be complete at the target before that effect of the later one may happen, both on one (peer, queue).
    A put's own signal always follows its payload.
    """

    name: str
    title: str
    precedes: Precedence
    rules: tuple[Rule, ...]
    scope: Scope = Scope.QUEUE
    at_issue: bool = False
    """Operations take effect when they are issued, one after the other (the model ``sc``)."""
    source_read_at_issue: bool = False
    """The source is read before the call returns; else at any time until the operation is complete."""
    quiet_source_is_remote: bool = False
    """The transport has no smaller quiet than remote completion."""
    promoted: Mapping[str, str] = field(default_factory=dict)
    """Word that the transport does not tell apart: the stronger word that it becomes."""
    built: Mapping[str, str] = field(default_factory=dict)
    """Word that the transport does not have: what HAL does instead."""
    limits: Limits = Limits()
    costs: Mapping[str, Cost] = field(default_factory=dict)

    @property
    def native(self) -> frozenset[str]:
        """Words that the transport has as such."""
        return frozenset(w for w in WORDS if w not in self.promoted and w not in self.built)

    def must_precede(self, earlier: Order, later: Effect, order: Order) -> bool:
        """Whether an earlier operation completes before a later one's effect, on one (peer, queue)."""
        return (self.effective(earlier), later, self.effective(order)) in self.precedes

    def effective(self, order: Order) -> Order:
        """The order after promotion: where NONE is not told apart, it acts as RELAXED."""
        return Order.RELAXED if order is Order.NONE and "put.none" in self.promoted else order

    def signal_order(self, order: Order, bundled: bool) -> Order:
        """The order with which a signal acts: some transports have no weak one."""
        word = "signal.bundled" if bundled else "signal.weak"
        return Order.STRONG if self.promoted.get(word) == "signal.strong" else order

    def describe(self) -> str:
        """The profile as text: the order table, the words, limits and the source of each rule."""
        return "\n".join([f"{self.name}: {self.title}", *_order_table(self), *_word_table(self), *_rule_list(self)])


def _order_table(p: OrderingProfile) -> list[str]:
    if p.at_issue:
        return ["  every operation takes effect where it is issued"]
    later = [(e, o) for e in Effect for o in Order]
    head = "  earlier \\ later  " + "  ".join(f"{e.name.lower()}.{o.name.lower():8}" for e, o in later)
    rows = [
        f"  {a.name.lower():15}  "
        + "  ".join(f"{'first' if p.must_precede(a, e, o) else 'any':{len(e.name) + 9}}" for e, o in later)
        for a in Order
    ]
    scope = "this (peer, queue)" if p.scope is Scope.QUEUE else "the issuing thread, all peers and queues"
    read = "when the operation is issued" if p.source_read_at_issue else "any time before completion"
    return [head, *rows, f"  scope: {scope}; sources are read: {read}"]


def _word_table(p: OrderingProfile) -> list[str]:
    lines = ["  words:"]
    for word in WORDS:
        how = "native"
        if word in p.promoted:
            how = f"acts as {p.promoted[word]}"
        elif word in p.built:
            how = f"built: {p.built[word]}"
        lines.append(f"    {word:15} {p.costs.get(word, Cost.FREE):11} {how}")
    lim = p.limits
    many = "no limit"
    lines.append(
        f"  limits: put {lim.max_put_bytes or many} B, queues per peer {lim.queues_per_peer or many}, "
        f"ring {lim.ring_entries or many}, submitters per queue {1 if lim.one_submitter else 'any'}, "
        f"atomic {lim.atomic_bytes} B"
    )
    return lines


def _rule_list(p: OrderingProfile) -> list[str]:
    return ["  rules:"] + [f"    - {r.text} [{r.source}]" for r in p.rules]


def _precedence(earlier: tuple[Order, ...], *later: tuple[Effect, Order]) -> Precedence:
    return frozenset((a, e, o) for a in earlier for e, o in later)


_COVERED = (Order.RELAXED, Order.STRONG)
_STRONG_ONLY = _precedence(_COVERED, (Effect.PUT, Order.STRONG), (Effect.SIGNAL, Order.STRONG))
_EVERYTHING = _precedence(_COVERED, *((e, o) for e in Effect for o in Order))
_NO_NONE = {"put.none": "put.relaxed"}
_STRONG_BY_QUIET = {
    "put.strong": "quiet(remote) of the (peer, queue), then a relaxed put",
    "signal.strong": "quiet(remote) of the (peer, queue), then a weak signal",
}
_CONTRACT = "docs/contract.md, section Ordering"


def _costs(**words: Cost) -> dict[str, Cost]:
    return {name.replace("_", ".", 1): cost for name, cost in words.items()}


SC = OrderingProfile(
    name="sc",
    title="sequential consistency: every operation takes effect where it is issued (the yardstick)",
    precedes=_EVERYTHING,
    scope=Scope.ORIGIN,
    at_issue=True,
    source_read_at_issue=True,
    promoted=_NO_NONE,
    rules=(Rule("one interleaving of all ranks' operations, each rank's in program order", "Lamport 1979"),),
)

SHM = OrderingProfile(
    name="shm",
    title="host shared memory: memcpy by the issuing thread, release and acquire on signal slots",
    precedes=_STRONG_ONLY,
    scope=Scope.ORIGIN,
    source_read_at_issue=True,
    promoted={**_NO_NONE, "signal.bundled": "signal.strong"},
    costs=_costs(
        put_relaxed=Cost.STORE, put_strong=Cost.FENCE, signal_bundled=Cost.STORE, signal_weak=Cost.STORE,
        signal_strong=Cost.STORE, quiet_remote=Cost.FENCE, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("a put is a plain memcpy: the source is read before the call returns", "C++20 [intro.execution]"),
        Rule("plain stores are unordered for another thread until a release is read by an acquire",
             "C++20 [intro.races] happens-before"),
        Rule("a release covers everything sequenced before it, to any peer and queue, and is cumulative",
             "C++20 [intro.races] inter-thread happens-before"),
        Rule("a later store may be seen before an earlier release store", "C++20 [intro.races]"),
    ),
)  # fmt: skip

LSA = OrderingProfile(
    name="lsa",
    title="NCCL LSA: stores and bulk copies through NVLink pointers",
    precedes=_STRONG_ONLY,
    scope=Scope.ORIGIN,
    promoted={**_NO_NONE, "signal.bundled": "signal.strong"},
    costs=_costs(
        put_relaxed=Cost.STORE, put_strong=Cost.FENCE, signal_bundled=Cost.FENCE, signal_weak=Cost.STORE,
        signal_strong=Cost.FENCE, quiet_source=Cost.FENCE, quiet_remote=Cost.FENCE, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("weak and relaxed stores are unordered for other threads",
             "PTX ISA, Memory Consistency Model, Causality Order"),
        Rule("a release at system scope covers every earlier store of its thread, and what that thread observed, to "
             "any peer: causality order is cumulative",
             "PTX ISA, Memory Consistency Model, Release and Acquire Patterns"),
        Rule("a bulk copy runs in the async proxy: it is covered only after its completion was waited for and a proxy "
             "fence; HAL's strong words do both", "PTX ISA, Memory Consistency Model, Proxies; fence.proxy.async"),
        Rule("a bulk copy reads its source until cp.async.bulk.wait_group.read returns",
             "PTX ISA, cp.async.bulk.wait_group"),
        Rule("a put's own signal is a release after the put, so it covers earlier stores too",
             "PTX ISA, red.release.sys"),
        Rule("a later store is not ordered after an earlier release", "PTX ISA, Memory Consistency Model"),
    ),
)  # fmt: skip
GIN = OrderingProfile(
    name="gin",
    title="NCCL GIN with strong signals (NCCL 2.30.7 and newer)",
    precedes=_STRONG_ONLY,
    promoted={**_NO_NONE, "signal.weak": "signal.strong", "signal.bundled": "signal.strong"},
    built={
        "put.strong": "quiet(remote) of the (peer, queue), then a relaxed put",
        "quiet.remote": "a strong signal on a word of HAL's at the peer, read back until it is there",
    },
    costs=_costs(
        put_relaxed=Cost.MESSAGE, put_strong=Cost.ROUND_TRIP, signal_bundled=Cost.FREE, signal_strong=Cost.MESSAGE,
        quiet_source=Cost.DRAIN, quiet_remote=Cost.ROUND_TRIP, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("puts of one context to one peer are unordered among each other",
             "NCCL User Guide, Device API - GIN, ncclGin::put"),
        Rule("a strong signal becomes visible only after the payloads of all earlier puts of its context to that peer",
             "NCCL User Guide, Device API - GIN, signals"),
        Rule("flush means that sources may be reused, not that data arrived",
             "NCCL User Guide, Device API - GIN, ncclGin::flush"),
        Rule("nothing is promised between contexts; only a barrier over all contexts fences them",
             "NCCL User Guide, Device API - GIN, ncclGinAllContexts"),
        Rule("signals on a user window need a window registered with strict ordering",
             "NCCL issue 2210; NCCL_WIN_STRICT_ORDERING"),
    ),
)  # fmt: skip

GIN_WEAK = OrderingProfile(
    name="gin-weak",
    title="NCCL GIN with weak signals only",
    precedes=_STRONG_ONLY,
    promoted=_NO_NONE,
    built={
        **_STRONG_BY_QUIET,
        "quiet.remote": "a bundled signal with each put, counted at the peer, and the count read back",
    },
    costs=_costs(
        put_relaxed=Cost.MESSAGE, put_strong=Cost.ROUND_TRIP, signal_bundled=Cost.FREE, signal_weak=Cost.MESSAGE,
        signal_strong=Cost.ROUND_TRIP, quiet_source=Cost.DRAIN, quiet_remote=Cost.ROUND_TRIP, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("a weak signal follows its own put only; weak signals do not accumulate",
             "NCCL User Guide, Device API - GIN, weak signals"),
        Rule("flush means that sources may be reused, not that data arrived",
             "NCCL User Guide, Device API - GIN, ncclGin::flush"),
    ),
)  # fmt: skip

UDMA = OrderingProfile(
    name="udma",
    title="Ascend UDMA queue pairs (aclshmem)",
    precedes=_STRONG_ONLY,
    quiet_source_is_remote=True,
    promoted={"quiet.source": "quiet.remote"},
    limits=Limits(max_put_bytes=256 << 20, queues_per_peer=32, ring_entries=32768, one_submitter=True),
    costs=_costs(
        put_none=Cost.MESSAGE, put_relaxed=Cost.MESSAGE, put_strong=Cost.MESSAGE, signal_bundled=Cost.FREE,
        signal_weak=Cost.MESSAGE, signal_strong=Cost.MESSAGE, quiet_source=Cost.DRAIN, quiet_remote=Cost.DRAIN,
        barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("relaxed (RO) requests of one queue complete in any order, byte-interleaved",
             "Ascend send-ordering article; UDMA rule 28"),
        Rule("a strong (SO) request starts after every earlier RO and SO of its queue has completed",
             "Ascend send-ordering article; UDMA rule 29"),
        Rule("NO requests are outside that rule: an SO may pass an earlier NO",
             "Ascend send-ordering article; UDMA rule 30"),
        Rule("nothing across queues, targets or sources", "Ascend send-ordering article; UDMA rules 31, 32"),
        Rule("an RO may pass an earlier SO (no text says otherwise: the weaker guarantee)", "inference; UDMA rule 33"),
        Rule("a put returns when it is submitted; the engine reads the source when it executes",
             "aclshmem public header, aclshmemx_udma_qp_put_nbi; UDMA rule 39"),
        Rule("quiet of a queue is arrival at the target, and only of that queue",
             "aclshmem public header, aclshmemx_udma_qp_quiet; UDMA rules 43, 45"),
        Rule("a write with notify raises its signal after its own payload only",
             "aclshmem public header, aclshmemx_udma_qp_put_signal_nbi; UDMA rule 38"),
        Rule("one submitter for each queue; a request moves at most 256 MiB", "Ascend article; UDMA rules 5, 6"),
    ),
)  # fmt: skip

VERBS_RC = OrderingProfile(
    name="verbs-rc",
    title="one InfiniBand reliable connection for each (peer, queue)",
    precedes=_EVERYTHING,
    promoted=_NO_NONE,
    limits=Limits(max_put_bytes=1 << 31),
    costs=_costs(
        put_relaxed=Cost.MESSAGE, put_strong=Cost.MESSAGE, signal_bundled=Cost.MESSAGE, signal_weak=Cost.MESSAGE,
        signal_strong=Cost.MESSAGE, quiet_source=Cost.DRAIN, quiet_remote=Cost.DRAIN, barrier=Cost.ROUND_TRIP,
    ),
    quiet_source_is_remote=True,
    rules=(
        Rule("a responder executes the requests of one connection in the order of their posting",
             "InfiniBand Architecture Specification, volume 1, section 9.5 Transaction Ordering"),
        Rule("a completion of an RDMA write on a reliable connection means that the responder has acknowledged it",
             "InfiniBand Architecture Specification, volume 1, section 9.7.5 Acknowledge Messages"),
        Rule("the source of a request may be changed only after its completion",
             "InfiniBand Architecture Specification, volume 1, section 10.8 Work Request Processing"),
        Rule("nothing across queue pairs", "InfiniBand Architecture Specification, volume 1, section 9.5"),
    ),
)  # fmt: skip

OPENSHMEM = OrderingProfile(
    name="openshmem",
    title="OpenSHMEM 1.5: non-blocking puts, put-with-signal, fence and quiet",
    precedes=_STRONG_ONLY,
    promoted=_NO_NONE,
    costs=_costs(
        put_relaxed=Cost.MESSAGE, put_strong=Cost.FENCE, signal_bundled=Cost.FREE, signal_weak=Cost.MESSAGE,
        signal_strong=Cost.FENCE, quiet_source=Cost.DRAIN, quiet_remote=Cost.ROUND_TRIP, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("puts are unordered without a fence", "OpenSHMEM 1.5, section 9.11 Memory Ordering Routines"),
        Rule("fence orders the puts and atomics before it and after it, for each target PE and context: a strong "
             "word is a fence and the operation",
             "OpenSHMEM 1.5, section 9.11.1 shmem_fence"),
        Rule("quiet completes all earlier operations at their targets", "OpenSHMEM 1.5, section 9.11.2 shmem_quiet"),
        Rule("put-with-signal updates the signal after its own data; it orders no other put",
             "OpenSHMEM 1.5, section 9.8 Signaling Operations"),
        Rule("local completion of a put says nothing of the target", "OpenSHMEM 1.5, section 9.5 Remote Memory Access"),
    ),
)  # fmt: skip

SRD = OrderingProfile(
    name="srd",
    title="AWS scalable reliable datagram (EFA): no order at all",
    precedes=_STRONG_ONLY,
    promoted=_NO_NONE,
    built=_STRONG_BY_QUIET,
    costs=_costs(
        put_relaxed=Cost.MESSAGE, put_strong=Cost.ROUND_TRIP, signal_bundled=Cost.FREE, signal_weak=Cost.MESSAGE,
        signal_strong=Cost.ROUND_TRIP, quiet_source=Cost.DRAIN, quiet_remote=Cost.DRAIN, barrier=Cost.ROUND_TRIP,
    ),
    rules=(
        Rule("packets and messages arrive in any order; the receiver's software restores what order it needs",
             "Shalev et al., A Cloud-Optimized Transport Protocol for Elastic and Scalable HPC, IEEE Micro 2020"),
        Rule("a write's completion means delivery; only send-after-send order is offered, by reassembly",
             "libfabric fi_efa(7), RDM Endpoint capabilities"),
        Rule("immediate data is reported after its own write's payload only", "libfabric fi_rma(3), FI_REMOTE_CQ_DATA"),
    ),
)  # fmt: skip

PROFILES: dict[str, OrderingProfile] = {
    p.name: p for p in (SC, SHM, LSA, GIN, GIN_WEAK, UDMA, VERBS_RC, OPENSHMEM, SRD)
}
"""The known profiles by name. A transport states one of them (``TransportSpec``, ``Session.profile``)."""


def profile(name: str) -> OrderingProfile:
    """The profile of that name. Raises :class:`ContractError` that lists the known ones."""
    try:
        return PROFILES[name]
    except KeyError:
        raise ContractError(f"unknown ordering profile '{name}'; known: {', '.join(PROFILES)}") from None
