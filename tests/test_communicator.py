# SPDX-License-Identifier: Apache-2.0
"""The communicator's words on real ranks: threads of one process and processes of their own."""

from __future__ import annotations

import array
import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hal
from hal.bootstrap import Run
from hal.errors import CapacityError, ContractError, HalError
from hal.ordering import Order, QuietScope, SignalOp

TIMEOUT = 60.0


def spawn(n: int, fn: Callable[..., Any], **settings: Any) -> list[Any]:
    return hal.spawn(n, fn, **{"timeout": TIMEOUT, **settings})


# --- puts, signals, waits --------------------------------------------------------------------------------------------


RING = """
import sys
import numpy as np
import hal

def ring(comm, rounds=300, words=512):
    \"\"\"Each round: data to the right by relaxed puts, a strong signal, and an acknowledgement to the left.\"\"\"
    window, queue = comm.window(words * 8), comm.queue(0)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    torn = 0
    for generation in range(1, rounds + 1):
        data = np.full(words, comm.rank << 32 | generation, np.int64)
        half = words // 2
        queue.put(window, half * 8, data[half:], right)
        queue.put(window, 0, data[:half], right)
        queue.signal(0, right)
        comm.wait(0, generation, source=left)
        torn += int((window.array.view(np.int64) != (left << 32 | generation)).sum())
        queue.signal(1, left, generation, op="set")
        comm.wait(1, generation, source=right)
    return torn
"""


@pytest.mark.parametrize("n", [1, 2, 4, 7])
def test_a_strong_signal_covers_earlier_puts_between_threads(n):
    space: dict[str, Any] = {}
    exec(RING, space)
    assert spawn(n, space["ring"]) == [0] * n


@pytest.mark.parametrize("n", [2, 5])
def test_a_strong_signal_covers_earlier_puts_between_processes(run_ranks, n):
    script = RING + f"with hal.connect(timeout={TIMEOUT}) as comm:\n    print('torn', ring(comm))\n"
    outcome = run_ranks(n, script)
    assert (outcome.status, outcome.lines) == (0, {r: ["torn 0"] for r in range(n)})


def test_an_eight_byte_strong_put_serves_as_a_flag():
    def body(comm: hal.Communicator) -> int:
        window, queue, stale = comm.window(4096 + 64), comm.queue(0), 0
        flag = window.array[4096:4104].view(np.uint64)
        for generation in range(1, 200):
            if comm.rank == 0:
                queue.put(window, 0, np.full(512, generation, np.uint64), 1)
                queue.put(window, 4096, np.array([generation], np.uint64), 1, order="strong")
                comm.wait(0, generation, source=1)
            else:
                while flag[0] != generation:
                    comm.read_signal(0)  # an acquire load orders the payload after the flag
                stale += int((window.array[:4096].view(np.uint64) != generation).sum())
                queue.signal(0, 0)
        return stale

    assert spawn(2, body) == [0, 0]


def test_a_bundled_signal_covers_its_put():
    def body(comm: hal.Communicator) -> bool:
        window, queue = comm.window(8), comm.queue(1)
        peer = 1 - comm.rank
        for signal in [(5, 1), (5, 1, "add"), (5, 3, "set", Order.RELAXED)]:
            queue.put(window, 0, b"%08d" % signal[1], peer, Order.RELAXED, signal)
        comm.wait(5, 3, source=peer)
        return window.array.tobytes() == b"00000003"

    assert spawn(2, body) == [True, True]


def test_signals_are_64_bit_and_adds_accumulate():
    def body(comm: hal.Communicator) -> tuple[int, int]:
        queue = comm.queue(0)
        for peer in range(comm.world_size):
            for _ in range(100):
                queue.signal(7, peer, (1 << 32) + 1)
        seen = comm.wait(7, 100 * comm.world_size * ((1 << 32) + 1))
        comm.barrier()
        queue.signal(8, comm.rank, (1 << 64) - 1, op=SignalOp.SET)
        assert comm.wait(8, (1 << 64) - 1) == (1 << 64) - 1
        queue.signal(8, comm.rank, 2)  # wraps, as an unsigned word does
        return seen, comm.read_signal(8)

    assert spawn(3, body) == [(300 * ((1 << 32) + 1), 1)] * 3


def test_every_slot_and_queue_is_its_own():
    def body(comm: hal.Communicator) -> list[int]:
        for slot in range(comm.config.signal_slots):
            comm.queue(slot % 3).signal(slot, 1 - comm.rank, slot + 1)
        comm.barrier()
        return [comm.read_signal(slot) for slot in range(comm.config.signal_slots)]

    assert spawn(2, body, queues=3, signal_slots=40) == [list(range(1, 41))] * 2


def test_quiet_and_complete_barrier_make_puts_readable():
    def body(comm: hal.Communicator) -> list[int]:
        window, seen = comm.window(comm.world_size), []
        for generation in range(50):
            for peer in range(comm.world_size):
                comm.queue(peer % 2).put(window, comm.rank, bytes([generation]), peer, Order.NONE)
            comm.queue(0).quiet()
            comm.queue(1).quiet(peer=0, scope="source")
            comm.queue(1).quiet(scope=QuietScope.REMOTE)
            comm.barrier()
            seen += [int(v) for v in window.array if v != generation]
            comm.barrier(complete=False)
        return seen

    assert spawn(4, body) == [[]] * 4


def test_windows_are_zeroed_symmetric_and_outlive_free_while_referred_to():
    def body(comm: hal.Communicator) -> tuple[int, bytes]:
        first, second = comm.window(100), comm.window(3 << 20)
        comm.queue().put(second, (3 << 20) - 4, b"last", 1 - comm.rank)
        comm.barrier()
        kept = second.array
        assert kept.nbytes == 3 << 20
        assert not first.array.any()
        second.free()
        second.free()
        with pytest.raises(ContractError, match="freed"):
            _ = second.array
        comm.close()
        return int(kept[:-4].sum()), kept[-4:].tobytes()

    assert spawn(2, body) == [(0, b"last")] * 2


@pytest.mark.parametrize(
    "source",
    [b"12345678", bytearray(b"12345678"), memoryview(b"12345678"), array.array("b", b"12345678"),
     np.frombuffer(b"12345678", np.float32)],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_sources_of_every_kind(source):
    with hal.connect() as comm:
        window = comm.window(16)
        comm.queue().put(window, 4, source, 0)
        comm.queue().put(window, 0, b"", 0, order="strong")
        assert window.array.tobytes() == b"\0\0\0\x0012345678\0\0\0\0"


def test_a_wait_lets_other_threads_run():
    with hal.connect(timeout=TIMEOUT) as comm:
        threading.Timer(0.1, lambda: comm.queue().signal(0, 0)).start()
        assert comm.wait(0, 1) == 1


def test_two_communicators_side_by_side(run_ranks):
    script = (
        "import hal\nwith hal.connect() as a, hal.connect(queues=3) as b:\n    for comm in (b, a):\n"
        "        comm.queue(0).signal(0, 1 - comm.rank, comm.config.queues)\n"
        "    print(a.wait(0, 1), b.wait(0, 1))\nwith hal.connect() as again:\n    again.barrier()\n"
    )
    outcome = run_ranks(2, script)
    assert (outcome.status, outcome.lines) == (0, {0: ["2 3"], 1: ["2 3"]})


# --- teams -----------------------------------------------------------------------------------------------------------


def test_teams_of_two_nodes():
    def body(comm: hal.Communicator) -> Any:
        teams = [comm.team(name) for name in ("world", "lsa", "rail")]
        for team in [*teams, *reversed(teams)]:
            comm.barrier(team)
        comm.barrier("rail")
        return [(team.ranks, team.rank, team.size) for team in teams]

    results = spawn(6, body, topology={"nodes": 2})
    for rank, (world, lsa, rail) in enumerate(results):
        node, local = divmod(rank, 3)
        assert world == ((0, 1, 2, 3, 4, 5), rank, 6)
        assert lsa == (tuple(range(node * 3, node * 3 + 3)), local, 3)
        assert rail == ((local, local + 3), node, 2)


def test_a_team_barrier_waits_for_its_members_only():
    def body(comm: hal.Communicator) -> int:
        if comm.team("lsa").ranks == (0, 1):
            comm.barrier("lsa")  # the other node has not called anything
            comm.queue().signal(0, 2 + comm.rank)
        else:
            comm.wait(0, 1, source=comm.rank - 2)
        return comm.team("lsa").rank

    assert spawn(4, body, topology={"nodes": 2}) == [0, 1, 0, 1]


def test_the_launcher_says_how_many_nodes(run_ranks):
    script = "import hal\nwith hal.connect() as comm:\n    print(comm.team('rail').ranks)\n"
    outcome = run_ranks(4, script, nodes=2)
    assert outcome.lines == {0: ["(0, 2)"], 1: ["(1, 3)"], 2: ["(0, 2)"], 3: ["(1, 3)"]}


def test_nodes_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ContractError, match="3 ranks cannot be laid out on 2 equal nodes"):
        spawn(3, lambda comm: None, topology={"nodes": 2})


def test_a_program_that_nothing_started_is_told_how_to_start_its_ranks(monkeypatch):
    for name in ("HAL_RANK", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ContractError, match=r"1 ranks .* on 2 equal nodes.*`hal run -n RANKS script.py`.* multiple of 2"):
        hal.connect(topology={"nodes": 2})


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_of_every_kind():
    omegaconf = pytest.importorskip("omegaconf")
    for cfg in (
        hal.HalConfig(queues=3),
        {"queues": 3},
        omegaconf.OmegaConf.create({"queues": 3, "topology": {"nodes": 1}}),
    ):
        with hal.connect(cfg, timeout=3) as comm:
            assert (comm.config.queues, comm.config.timeout, comm.rank, comm.world_size) == (3, 3.0, 0, 1)
            assert comm.queue(2).index == 2
            assert comm.profile.name == "shm"


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"queue": 2}, "unknown setting 'queue'; known: .*queues"),
        ({"topology": {"node": 2}}, "unknown setting 'topology.node'; known: nodes"),
        ({"topology": 2}, "topology must be a TopologyConfig or a mapping"),
        ({"topology": {"nodes": 0}}, "TopologyConfig.nodes is 0; it must be at least 1"),
        ({"queues": 0}, "HalConfig.queues is 0; it must be at least 1"),
        ({"signal_slots": 1.5}, "HalConfig.signal_slots is 1.5; it must be an integer"),
        ({"timeout": 0}, "HalConfig.timeout is 0; it must be above 0 seconds"),
        ({"timeout": math.inf}, "HalConfig.timeout is inf; it must be above 0 seconds, and at most 1000000"),
        ({"timeout": 1e300}, "timeout is 1e.300; .* at most 1000000"),
        ({"timeout": "3"}, "timeout is '3'"),
        ({"backend": 3}, "HalConfig.backend is 3 .* give names"),
        ({"transport": ["shm"]}, r"transport \['shm'\]; give names"),
        ({"backend": "hots"}, r"unknown backend 'hots'; known: .*host.*; did you mean 'host'\?"),
        ({"transport": "smh"}, r"unknown transport 'smh'; known: .*shm.*; did you mean 'shm'\?"),
    ],
)
@pytest.mark.parametrize("how", ["mapping", "keywords"])
def test_settings_that_make_no_sense(settings, text, how):
    with pytest.raises(ContractError, match=text):
        hal.connect(settings) if how == "mapping" else hal.connect(**settings)


def test_settings_that_differ_between_ranks(run_ranks):
    script = (
        "import os, hal\ntry:\n    hal.connect(queues=2 + int(os.environ['HAL_RANK']) // 2, timeout=60)\n"
        "except hal.ContractError as error:\n    print(error)\n"
    )
    outcome = run_ranks(3, script)
    for rank in range(3):
        assert outcome.text(rank) == "HalConfig must be equal on all ranks: rank 2 has queues=3 where rank 0 has 2"


# --- refused before anything is sent ---------------------------------------------------------------------------------

REFUSALS: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "peer": (lambda c, w, q: q.put(w, 0, b"x", 1), ContractError, "peer must be a rank, 0 to 0, not 1"),
    "negative peer": (lambda c, w, q: q.signal(0, -1), ContractError, "peer must be a rank, 0 to 0, not -1"),
    "quiet peer": (lambda c, w, q: q.quiet(peer=3), ContractError, "peer must be a rank, 0 to 0, not 3"),
    "wait source": (lambda c, w, q: c.wait(0, 1, source=9), ContractError, "peer must be a rank, 0 to 0, not 9"),
    "queue": (lambda c, w, q: c.queue(2), ContractError, "queue must be 0 to 1, not 2"),
    "too long": (
        lambda c, w, q: q.put(w, 30, b"xyz", 0),
        ContractError,
        "put of 3 bytes at offset 30 ends at 33, outside a window of 32 bytes",
    ),
    "offset": (lambda c, w, q: q.put(w, -1, b"x", 0), ContractError, "put of 1 bytes at offset -1"),
    "order": (
        lambda c, w, q: q.put(w, 0, b"x", 0, order="strongest"),
        ContractError,
        "order must be Order or one of 'none', 'relaxed', 'strong', not 'strongest'",
    ),
    "op": (lambda c, w, q: q.signal(0, 0, op="xor"), ContractError, "op must be SignalOp or one of 'add', 'set'"),
    "scope": (
        lambda c, w, q: q.quiet(scope="all"),
        ContractError,
        "scope must be QuietScope or one of 'source', 'remote'",
    ),
    "value": (lambda c, w, q: q.signal(0, 0, 1 << 64), ContractError, "value must be an integer from 0 to 2"),
    "at_least": (lambda c, w, q: c.wait(0, -1), ContractError, "at_least must be an integer from 0 to 2"),
    "timeout": (lambda c, w, q: c.wait(0, 1, timeout=-2), ContractError, "positive number of seconds, not -2"),
    "slot": (lambda c, w, q: q.signal(-1, 0), ContractError, "slot must be a number from 0 to 7, not -1"),
    "slots": (lambda c, w, q: c.wait(8, 1), CapacityError, "signal slot 8: needed 9, given 8; raise `signal_slots`"),
    "bundle": (lambda c, w, q: q.put(w, 0, b"x", 0, signal=(1,)), ContractError, r"signal must be \(slot, value"),
    "bundled slot": (lambda c, w, q: q.put(w, 0, b"x", 0, signal=(9, 1)), CapacityError, "signal slot 9"),
    "bundled order": (lambda c, w, q: q.put(w, 0, b"x", 0, signal=(1, 1, "add", "odd")), ContractError, "signal order"),
    "no bytes": (lambda c, w, q: c.window(0), ContractError, "a window needs at least 1 byte, not 0"),
    "too many bytes": (lambda c, w, q: c.window(1 << 60), CapacityError, f"needed {1 << 60}, given"),
    "team": (lambda c, w, q: c.team("node"), ContractError, "team must be one of world, lsa, rail, not 'node'"),
    "peer's kind": (lambda c, w, q: q.put(w, 0, b"x", "0"), ContractError, "peer must be a rank, 0 to 0, not '0'"),
    "queue's kind": (lambda c, w, q: c.queue(1.5), ContractError, "queue must be 0 to 1, not 1.5"),
    "offset's kind": (lambda c, w, q: q.put(w, 1.0, b"x", 0), ContractError, "dst_offset must be an integer.*not 1.0"),
    "window's kind": (lambda c, w, q: q.put(3, 0, b"x", 0), ContractError, "window is 3: pass what"),
    "bytes' kind": (lambda c, w, q: c.window(True), ContractError, "a window needs at least 1 byte, not True"),
    "team's kind": (lambda c, w, q: c.barrier(["world"]), ContractError, "team must be one of world, lsa, rail"),
    "longest timeout": (lambda c, w, q: c.wait(0, 1, timeout=1e10), ContractError, "not 10000000000.0; at most 1000000"),
    "spec's kind": (lambda c, w, q: c.expert_parallel({"top_k": 1}), ContractError, r"spec is a dict.*\*\*spec"),
    "not contiguous": (lambda c, w, q: q.put(w, 0, np.zeros(8, np.int16)[::2], 0), ContractError, "contiguous"),
}


@pytest.mark.parametrize(("call", "error", "text"), REFUSALS.values(), ids=REFUSALS.keys())
def test_bad_calls_are_refused_and_leave_everything_usable(call, error, text):
    with hal.connect(signal_slots=8) as comm:
        window, queue = comm.window(32), comm.queue(0)
        with pytest.raises(error, match=text):
            call(comm, window, queue)
        assert not window.array.any()
        assert [comm.read_signal(slot) for slot in range(8)] == [0] * 8
        queue.put(window, 0, b"fine", 0, signal=(0, 1))
        assert comm.wait(0, 1) == 1


def test_numbers_of_any_integer_type_serve():
    """Ranks, slots and offsets come out of NumPy tables as often as out of range()."""
    one = np.int64(1)
    with hal.connect(queues=one + 1, signal_slots=np.int32(4), timeout=np.float32(30)) as comm:
        assert (type(comm.config.queues), type(comm.config.signal_slots)) == (int, int)
        window, queue = comm.window(np.uint16(16)), comm.queue(one)
        queue.put(window, np.int64(8), b"x", np.int32(0), signal=(one, np.uint64(5)))
        queue.signal(one, one - 1, one)
        assert comm.wait(np.uint8(1), np.int64(6), source=one - 1) == comm.read_signal(one) == 6
        queue.quiet(peer=one - 1)
        assert window.array[8] == ord("x")


def test_the_number_of_ranks_may_be_of_any_integer_type():
    assert spawn(np.int64(2), lambda comm: comm.world_size) == [2, 2]
    for wrong in (0, "2", 1.5, True):
        with pytest.raises(ContractError, match="spawn needs at least one rank, not"):
            spawn(wrong, lambda comm: None)


def test_what_states_no_place_is_refused():
    with pytest.raises(ContractError, match="rank 0 of two; ranks are 0 to size - 1"):
        Run(0, "two")
    with pytest.raises(ContractError, match=r"run is 3: pass a hal\.bootstrap\.Run"):
        hal.connect(run=3)


def test_window_sizes_that_differ_are_refused_on_every_rank():
    def body(comm: hal.Communicator) -> str:
        with pytest.raises(ContractError) as refused:
            comm.window(64 + comm.rank)
        comm.barrier()
        assert comm.window(64).nbytes == 64
        return str(refused.value)

    expected = "a window has the same size on every rank, not rank 0: 64, rank 1: 65 bytes"
    assert spawn(2, body) == [expected] * 2


def test_a_window_of_another_communicator_is_refused():
    with hal.connect() as one, hal.connect() as other, pytest.raises(ContractError, match="another communicator"):
        one.queue().put(other.window(8), 0, b"x", 0)


def test_a_closed_communicator_says_so():
    with hal.connect() as comm:
        window, queue = comm.window(8), comm.queue()
    comm.close()
    for call in (comm.barrier, lambda: queue.put(window, 0, b"x", 0), lambda: comm.window(8), lambda: comm.wait(0, 0)):
        with pytest.raises(HalError, match="closed; connect again"):
            call()
    assert repr(comm) == "<hal.Communicator rank 0 of 1, backend host, closed>"


def test_spawn_returns_in_rank_order_and_passes_arguments():
    assert hal.spawn(4, lambda comm, a, b: (comm.rank, a, b), 1, "x") == [(r, 1, "x") for r in range(4)]
    with pytest.raises(ContractError, match="at least one rank, not 0"):
        hal.spawn(0, lambda comm: None)
