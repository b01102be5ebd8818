# SPDX-License-Identifier: Apache-2.0
"""Rules 28 to 51 of docs/ascend.md: order codes, completion entries, quiet."""

from __future__ import annotations

import itertools

import pytest
from udma_helpers import DATA, FLAG, SOURCE, WORD, Rig, faults, hangs


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_rule_28_relaxed_requests_land_in_any_order_and_in_pieces(order: tuple[int, ...]) -> None:
    rig = Rig(chunk_bytes=64)
    for row in range(3):
        rig.put(row, row + 1, nbytes=256)
    rig.take_all()
    for row in order:
        rig.step(f"land {row + 1}")  # one piece of each, in this order
    assert [rig.row(row, 256) for row in range(3)] == [[0, row + 1] for row in range(3)], "all are torn"
    for done, row in enumerate(order):
        for _ in range(3):
            rig.step(f"land {row + 1}")
        whole = [n for n in range(3) if rig.row(n, 256) == [n + 1]]
        assert whole == sorted(order[: done + 1])


def test_rule_29_strong_waits_for_every_earlier_relaxed_and_strong() -> None:
    rig = Rig(chunk_bytes=64)
    rig.put(0, 1, nbytes=256)
    rig.put(1, 2, nbytes=256)
    rig.signal(1)
    rig.signal(2, slot=1)
    rig.take_all()
    assert not rig.can("land 3")
    for _ in range(4):
        rig.step("land 2")
    for _ in range(3):
        rig.step("land 1")
    assert not rig.can("land 3"), "one piece of the first row is missing"
    rig.step("land 1")
    assert not rig.can("land 4"), "a strong one waits for an earlier strong one"
    rig.step("land 3")
    rig.step("land 4")
    assert (rig.word(1, FLAG), rig.word(1, FLAG + 512)) == (1, 2)


def test_rule_30_strong_may_pass_an_earlier_no_order_request() -> None:
    rig = Rig()
    rig.put(0, 1, order="no")
    rig.put(1, 2, order="no")
    rig.signal(1)
    rig.take_all()
    rig.step("land 3")
    assert rig.word(1, FLAG) == 1
    assert (rig.row(0), rig.row(1)) == ([0], [0])


def test_rule_31_strong_on_one_qp_says_nothing_of_the_other() -> None:
    rig = Rig()
    rig.put(0, 1, qp=1)
    rig.signal(1, qp=0)
    rig.take_all(0)
    rig.take_all(1)
    rig.step("QP 0 land")
    assert (rig.word(1, FLAG), rig.row(0)) == (1, [0])


def test_rule_32_nothing_holds_across_targets_or_sources() -> None:
    rig = Rig(pes=3)
    rig.put(0, 1, pe=1)
    rig.signal(1, pe=2)
    while rig.can("take"):
        rig.step("take")
    rig.step("-> 2", "land")
    assert (rig.word(2, FLAG), rig.row(0, pe=1)) == (1, [0])


def test_rule_33_a_later_relaxed_request_may_pass_a_strong_one() -> None:
    rig = Rig()
    rig.put(0, 1)
    rig.signal(1)
    rig.put(1, 2)
    rig.take_all()
    rig.step("land 3")
    assert (rig.row(1), rig.word(1, FLAG)) == ([2], 0)


def test_rule_34_the_default_configuration_is_no_order() -> None:
    rig = Rig()
    rig.fill(0, SOURCE, 64, 4)
    rig.cores[0].post("put", DATA, SOURCE, 64, pe=1)  # no order given
    rig.signal(1)
    rig.take_all()
    rig.step("land 2")
    assert (rig.word(1, FLAG), rig.row(0)) == (1, [0])


def test_rule_35_order_completion_and_fence_are_independent() -> None:
    rig = Rig()
    core = rig.cores[0]
    core.store_wqe(DATA, SOURCE, 64, pe=1, odr=5, cqe=True)
    core.store_wqe(FLAG, WORD, 8, pe=1, odr=6, cqe=False)
    core.flush_wqes(1, 0, 0, 2)
    core.ring(1, 0, 2)
    rig.world.settle()
    assert rig.world.counters(0)["cqes"] == 1
    # fence holds back for reads and atomics only: a relaxed put is passed all the same
    rig = Rig()
    rig.put(0, 1)
    rig.put(1, 2, fence=1)
    rig.take_all()
    rig.step("land 2")
    rig = Rig()
    rig.cores[0].post("get", DATA, SOURCE, 64, pe=1, order="relax")
    rig.put(1, 2, fence=1)
    rig.take_all()
    assert not rig.can("land 2")


def test_rule_36_overlapping_unordered_writes_are_reported() -> None:
    rig = Rig()
    rig.put(0, 1)
    rig.put(0, 2)
    rig.take_all()
    assert any("rule 36" in text for text in rig.world.warnings)
    rig = Rig()
    rig.put(0, 1)
    rig.put(1, 2)
    rig.world.settle()
    assert rig.world.warnings == []


def test_rule_37_order_codes_do_nothing_for_a_core_s_cache() -> None:
    """The receiver cached the row before it landed. The strong flag arrives; the cached row is still the old one."""
    rig = Rig()
    receiver = rig.cores[1]
    assert receiver.load64(DATA) == 0
    rig.put(0, 1)
    rig.signal(1)
    rig.world.settle()
    receiver.wait_until(FLAG, 1)
    assert receiver.load64(DATA) == 0
    receiver.flush(DATA)
    assert receiver.load64(DATA) == 0x0101010101010101


def test_rule_38_a_notification_follows_its_own_payload_only() -> None:
    rig = Rig(chunk_bytes=64)
    rig.put(8, 9)
    rig.fill(0, SOURCE, 256, 7)
    rig.cores[0].post("put_signal", DATA, SOURCE, 256, pe=1, order="relax", signal=FLAG, operand=5)
    rig.take_all()
    for _ in range(4):
        rig.step("land 2")
        assert rig.word(1, FLAG) == 0
    rig.step("land 2")
    assert (rig.word(1, FLAG), rig.row(0, 256), rig.row(8)) == (5, [7], [0])


def test_rule_39_the_source_is_read_when_the_request_runs() -> None:
    rig = Rig()
    rig.put(0, 1)
    rig.fill(0, SOURCE, 64, 99)
    rig.world.settle()
    assert rig.row(0) == [99]


def test_rule_40_completion_entries_only_where_asked_with_owner_phase_and_entry_index() -> None:
    """More than two laps of the completion ring, and more than 65536 blocks, so that the 16-bit index goes round."""
    rig = Rig(sq_depth=64, cq_depth=32)
    core = rig.cores[0]
    for n in range(70_000):
        core.post("put", DATA, SOURCE, 8, pe=1, order="relax")
        if n % 8 == 7:
            core.quiet(1)
    core.quiet(1)
    state = rig.world.queue(0, 1, 0)
    assert (state["head"], state["tail"], state["cq_tail"]) == (70_000, 70_000, 70_000)
    batch = core.batch()
    for n in range(20):
        last = n == 19
        rig.put(n, 1, cqe=int(last), action="submit" if last else "defer", batch=batch)
    core.quiet(1)
    state = rig.world.queue(0, 1, 0)
    assert (state["tail"], state["cq_tail"]) == (70_020, 70_001)


@pytest.mark.parametrize("order", ["relax", "strong"])
def test_rule_41_a_completion_of_an_ordered_request_covers_the_earlier_ordered_ones(order: str) -> None:
    rig = Rig()
    core = rig.cores[0]
    core.store_wqe(DATA, SOURCE, 64, pe=1, odr=5)
    core.store_wqe(DATA + 64, SOURCE + 64, 64, pe=1, odr=5 if order == "relax" else 6, cqe=True)
    core.flush_wqes(1, 0, 0, 2)
    core.ring(1, 0, 2)
    rig.take_all()
    if order == "relax":
        rig.step("land 2")
        assert not rig.can("report"), "complete, but an earlier ordered request is not"
    rig.step("land 1")
    if order == "strong":
        rig.step("land 2")
    assert rig.can("report")


@pytest.mark.parametrize("covers", [False, True])
def test_rule_42_a_completion_of_a_no_order_request(covers: bool) -> None:
    """The weaker reading is the default: it proves only its own request. The API's contract is the other mode."""
    rig = Rig(quiet_covers_no=covers)
    rig.put(0, 1, order="no")
    rig.put(1, 2, order="no")
    rig.take_all()
    rig.step("land 2")
    assert rig.can("report 2") == (not covers)


def test_rule_43_quiet_covers_up_to_the_last_request_with_a_completion() -> None:
    rig = Rig()
    core = rig.cores[0]
    rig.put(0, 1)
    core.quiet(1)
    rig.fill(0, SOURCE + 64, 64, 2)
    core.store_wqe(DATA + 64, SOURCE + 64, 64, pe=1, odr=5)
    core.flush_wqes(1, 0, 1, 2)
    core.ring(1, 0, 2)
    core.quiet(1)
    assert (rig.row(0), rig.row(1)) == ([1], [0]), "quiet returned, the request without completion is still on its way"


def test_rule_44_quiet_of_an_unused_queue_returns_at_once() -> None:
    rig = Rig()
    rig.cores[0].quiet(1, 0)
    rig.put(0, 1, qp=0)
    rig.cores[0].quiet(1, 1)
    assert rig.row(0) == [0]


def test_rule_45_quiet_is_per_target_and_qp() -> None:
    rig = Rig(pes=3)
    rig.put(0, 1, pe=1, qp=0)
    rig.put(1, 2, pe=1, qp=1)
    rig.put(2, 3, pe=2, qp=0)
    rig.cores[0].quiet(1, 0)
    assert rig.row(0) == [1]
    state = [rig.world.queue(0, *which) for which in ((1, 1), (2, 0))]
    assert [s["cqe_cnt"] - s["cq_tail"] for s in state] == [1, 1], "the others are still owed a completion"


def test_rule_46_an_error_status_or_a_missing_completion_is_a_failure() -> None:
    rig = Rig()
    rig.world.inject(0, 1, 0, "status")
    rig.put(0, 1)
    with faults(46):
        rig.cores[0].quiet(1)
    rig = Rig()
    rig.world.inject(0, 1, 0, "status")  # of a request without an entry: the next entry says so
    batch = rig.cores[0].batch()
    rig.put(0, 1, cqe=0, action="defer", batch=batch)
    rig.put(1, 2, cqe=1, action="submit", batch=batch)
    rig.signal(1)
    with faults(46):
        rig.cores[0].quiet(1)
    rig.world.settle()
    assert rig.word(1, FLAG) == 0, "no signal behind a failed row"
    rig = Rig()
    rig.world.inject(0, 1, 0, "drop")
    rig.put(0, 1)
    with hangs():
        rig.cores[0].quiet(1)
    rig = Rig()
    rig.cores[0].post("put", (1 << 20) - 32, SOURCE, 64, pe=1, order="relax")  # beyond the target's heap
    with faults(46):
        rig.cores[0].quiet(1)


def test_rule_47_the_completion_doorbell_keeps_the_ring_from_running_over() -> None:
    rig = Rig(sq_depth=64, cq_depth=16)
    core = rig.cores[0]
    with faults(47):
        for n in range(20):
            rig.put(n, 1)
            rig.world.settle()
            assert core.poll(1)  # taken, and the engine is not told
    rig = Rig(sq_depth=64, cq_depth=16)
    for n in range(100):
        rig.put(n, 1)
        rig.cores[0].quiet(1)
    assert rig.world.queue(0, 1, 0)["cq_doorbell"] == 100


def test_rule_48_a_source_changed_before_quiet_is_reported() -> None:
    rig = Rig()
    rig.put(0, 1)
    rig.take_all()
    rig.fill(0, SOURCE, 64, 2)
    rig.world.settle()
    assert any("rule 48" in text for text in rig.world.warnings)
    rig = Rig()
    rig.put(0, 1)
    rig.cores[0].quiet(1)
    rig.fill(0, SOURCE, 64, 2)
    rig.world.settle()
    assert rig.world.warnings == []


def test_rule_49_quiet_proves_arrival_and_not_consumption() -> None:
    rig = Rig()
    for turn in (1, 2):
        rig.put(0, turn)
        rig.signal(turn)
        rig.cores[0].quiet(1)
    rig.cores[1].wait_until(FLAG, 1)
    assert rig.row(0) == [2], "round 1 was overwritten before the receiver read it"


def test_rule_50_local_synchronisation_does_not_drain_the_queue() -> None:
    """What a barrier does on a core (pipes, caches) completes no request."""
    rig = Rig()
    rig.put(0, 1)
    rig.cores[0].flush(DATA)
    assert rig.world.queue(0, 1, 0)["in_flight"] == 0
    assert rig.can("take")
    assert rig.row(0) == [0]


def test_rule_51_hand_polling_steals_the_completions_that_quiet_counts() -> None:
    """A hand-written request with a completion that the library did not count leaves quiet one entry behind."""
    rig = Rig()
    core = rig.cores[0]
    core.store_wqe(DATA, SOURCE, 64, pe=1, cqe=True)
    core.flush_wqes(1, 0, 0, 1)
    core.ring(1, 0, 1)
    rig.fill(0, SOURCE + 64, 64, 8)
    rig.put(1, 8)
    rig.take_all()
    rig.step("land 1")
    rig.step("report 1")
    core.quiet(1)
    assert rig.row(1) == [0], "quiet took the stranger's entry for its own"
