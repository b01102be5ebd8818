# SPDX-License-Identifier: Apache-2.0
"""Rules 1 to 27 of docs/ascend.md: identity of queues, rings, descriptors, doorbells, defer and submit."""

from __future__ import annotations

import pytest
from hal_ascend import _engine
from udma_helpers import DATA, FLAG, SOURCE, Rig, faults, hangs


def test_rule_01_queues_are_keyed_by_target_and_qp() -> None:
    rig = Rig(pes=3)
    rig.put(0, 7, pe=1, qp=1)
    heads = {(pe, qp): rig.world.queue(0, pe, qp)["head"] for pe in (1, 2) for qp in (0, 1)}
    assert heads == {(1, 0): 0, (1, 1): 1, (2, 0): 0, (2, 1): 0}


def test_rule_02_qp_index_and_count_are_checked() -> None:
    rig = Rig(qp_num=2)
    with faults(2):
        rig.put(0, 1, qp=2)
    for count in (0, 33):
        with faults(2):
            Rig(qp_num=count)


def test_rule_03_no_put_to_oneself() -> None:
    rig = Rig()
    with faults(3):
        rig.put(0, 1, pe=0)


def test_rule_04_equal_pointers_are_not_a_copy_to_oneself() -> None:
    rig = Rig()
    rig.fill(0, DATA, 64, 9)
    rig.cores[0].post("put", DATA, DATA, 64, pe=1, order="relax")
    rig.cores[0].quiet(1)
    assert rig.row(0, pe=1) == [9]
    rig.fill(0, DATA, 64, 5)
    assert rig.row(0, pe=1) == [9]


def test_rule_05_one_submitter_for_each_queue() -> None:
    rig = Rig()
    rig.put(0, 1)
    with faults(5):
        rig.world.core(0, 1).post("put", DATA, SOURCE, 64, pe=1, order="relax")


def test_rule_06_a_request_moves_at_most_256_mib_and_counts_bytes() -> None:
    rig = Rig()
    rig.signal(0x1122334455667788)
    rig.cores[0].quiet(1)
    assert rig.word(1, FLAG) == 0x1122334455667788
    assert rig.word(1, FLAG + 8) == 0
    assert rig.world.counters(0)["bytes"] == 8
    with faults(6):
        rig.cores[0].post("put", DATA, SOURCE, (256 << 20) + 1, pe=1, order="relax")


def test_rule_07_relay_mode_has_no_qp_interface() -> None:
    rig = Rig(direct_mode=False)
    with faults(7):
        rig.put(0, 1)


def test_rule_08_free_running_head_wraps_2_32() -> None:
    rig = Rig(first_index=2**32 - 128, sq_depth=64)
    for n in range(300):
        rig.put(n % 16, n % 251)
        rig.cores[0].quiet(1)
        assert rig.row(n % 16) == [n % 251]
    state = rig.world.queue(0, 1, 0)
    assert state["head"] == state["tail"] == 300 - 128


def test_rule_09_two_block_requests_straddle_the_ring_end() -> None:
    rig = Rig(sq_depth=64)
    for n in range(63):
        rig.put(n % 8, 1)
        rig.cores[0].quiet(1)
    assert rig.world.queue(0, 1, 0)["head"] == 63
    rig.fill(0, SOURCE, 64, 42)
    rig.cores[0].post("put_signal", DATA, SOURCE, 64, pe=1, order="relax", signal=FLAG, operand=77)
    rig.cores[0].quiet(1)
    assert (rig.row(0), rig.word(1, FLAG)) == ([42], 77)
    assert rig.world.queue(0, 1, 0)["head"] == 65
    for n in range(62):
        rig.put(n % 8, 1)
        rig.cores[0].quiet(1)
    rig.cores[0].post("fetch_add", FLAG, pe=1, operand=3, pipe="scalar")
    rig.cores[0].quiet(1)
    assert rig.word(1, FLAG) == 80
    rig.cores[0].post("compare_swap", FLAG, pe=1, compare=80, operand=5, pipe="scalar")
    rig.cores[0].quiet(1)
    assert rig.word(1, FLAG) == 5


def test_rule_10_the_engine_takes_only_what_the_doorbell_covers() -> None:
    rig = Rig()
    core = rig.cores[0]
    for row in range(3):
        rig.fill(0, SOURCE + row * 64, 64, row + 1)
        core.store_wqe(DATA + row * 64, SOURCE + row * 64, 64, pe=1)
    core.flush_wqes(1, 0, 0, 3)
    rig.world.settle()
    assert rig.row(0) == [0]
    core.ring(1, 0, 2)
    rig.world.settle()
    assert [rig.row(i) for i in range(3)] == [[1], [2], [0]]


def test_rule_11_an_ordinary_store_is_not_a_doorbell() -> None:
    rig = Rig()
    core = rig.cores[0]
    rig.fill(0, SOURCE, 64, 3)
    core.store_wqe(DATA, SOURCE, 64, pe=1)
    core.flush_wqes(1, 0, 0, 1)
    core.plain_store_to_doorbell(1, 0, 1)
    rig.world.settle()
    assert rig.row(0) == [0]
    core.ring(1, 0, 1)
    rig.world.settle()
    assert rig.row(0) == [3]
    with faults(11):
        core.device_store(DATA, 1)


def test_rule_12_the_doorbell_proves_nothing_about_arrival() -> None:
    rig = Rig()
    rig.put(0, 6)
    assert rig.world.queue(0, 1, 0)["doorbell"] == 1
    assert rig.row(0) == [0], "rung, and nothing has moved"
    rig.cores[0].quiet(1)
    assert rig.row(0) == [6]


@pytest.mark.parametrize("wrapped", [False, True])
def test_rule_13_descriptors_are_flushed_before_the_doorbell(wrapped: bool) -> None:
    """Unflushed, the engine reads what the ring held before: nothing, or the last lap's descriptor."""
    rig = Rig(sq_depth=16)
    core = rig.cores[0]
    first = 15 if wrapped else 0
    for n in range(first):
        rig.put(n, 200 + n, pipe="scalar")
        core.quiet(1)
    for row in (20, 21):
        rig.fill(0, SOURCE + row * 64, 64, row)
        core.store_wqe(DATA + row * 64, SOURCE + row * 64, 64, pe=1)
    rig.fill(1, DATA, 64 * 22, 0)
    if wrapped:
        core.flush_wqes(1, 0, first, first + 1)  # only the part before the ring's end
        core.ring(1, 0, first + 2)
        rig.world.settle()
        assert rig.row(20) == [20]
        assert rig.row(21) == [0]
        assert rig.row(0) == [200], "the last lap's descriptor ran again"
    else:
        core.ring(1, 0, first + 2)
        with faults(13):
            rig.world.settle()


@pytest.mark.parametrize("defect", [False, True])
def test_rule_14_the_doorbell_waits_for_the_copy_of_the_descriptors(defect: bool) -> None:
    mutation = _engine.Mutation.ring_before_copy if defect else _engine.Mutation.none
    seen = 0
    for seed in range(8):
        rig = Rig(seed=seed, mutation=mutation)
        try:
            rig.put(0, 5)
            rig.world.settle()
        except _engine.Fault as fault:
            seen += fault.rule == 13
    assert (seen > 0) == defect


def test_rule_15_order_bits_are_cleared_before_strong_is_set() -> None:
    rig = Rig()
    core = rig.cores[0]
    core.store_wqe(DATA, SOURCE, 64, pe=1)
    core.or_order(1, 0, 0, odr=6, cqe=True, clear=False)  # 5 | 6 = 7
    core.flush_wqes(1, 0, 0, 1)
    core.ring(1, 0, 1)
    with faults(15):
        rig.world.settle()
    rig = Rig()
    core = rig.cores[0]
    core.store_wqe(DATA, SOURCE, 64, pe=1)
    core.or_order(1, 0, 0, odr=6, cqe=True, clear=True)
    core.flush_wqes(1, 0, 0, 1)
    core.ring(1, 0, 1)
    rig.world.settle()


@pytest.mark.parametrize(("posted", "fits"), [(21, True), (22, False)])
def test_rule_16_ten_blocks_stay_spare(posted: int, fits: bool) -> None:
    """head + 1 - tail + 10 < 32 admits 21 unfinished blocks. The 22nd waits for a completion entry."""
    rig = Rig(sq_depth=32)
    for n in range(posted):
        rig.put(n, 1)
    assert (rig.world.queue(0, 1, 0)["cq_tail"] == 0) == fits


def test_rule_16_overwriting_a_live_descriptor_is_caught() -> None:
    rig = Rig(sq_depth=8)
    core = rig.cores[0]
    with faults(16):
        for n in range(9):  # by hand, without asking for room
            core.store_wqe(DATA + n * 64, SOURCE, 64, pe=1)
            core.flush_wqes(1, 0, n, n + 1)
            core.ring(1, 0, n + 1)


def test_rule_17_waiting_for_room_needs_an_expected_completion() -> None:
    rig = Rig(sq_depth=16)
    core = rig.cores[0]
    for n in range(6):
        core.store_wqe(DATA + n * 64, SOURCE, 64, pe=1)
    core.flush_wqes(1, 0, 0, 6)
    core.ring(1, 0, 6)
    with faults(17):
        rig.put(7, 1)


def test_rule_20_defer_touches_scratch_only() -> None:
    rig = Rig()
    batch = rig.cores[0].batch()
    before = rig.world.queue(0, 1, 0)
    for n in range(5):
        rig.put(n, 1, cqe=0, action="defer", batch=batch)
    assert batch.pending_count == 5
    assert rig.world.queue(0, 1, 0) == before
    assert rig.world.counters(0)["doorbells"] == 0
    assert rig.world.enabled() == []


def test_rule_21_submit_publishes_all_and_expects_one_completion() -> None:
    rig = Rig()
    batch = rig.cores[0].batch()
    for n in range(5):
        rig.put(n, n + 1, cqe=0, action="defer", batch=batch)
    rig.put(5, 6, cqe=1, action="submit", batch=batch)
    state = rig.world.queue(0, 1, 0)
    assert (batch.pending_count, state["head"], state["cqe_cnt"]) == (0, 6, 1)
    rig.cores[0].quiet(1)
    assert [rig.row(n) for n in range(6)] == [[n + 1] for n in range(6)]
    assert rig.world.counters(0)["cqes"] == 1


@pytest.mark.parametrize("change", ["pe", "qp", "kind", "sync_id"])
def test_rule_22_a_batch_does_not_mix(change: str) -> None:
    rig = Rig(pes=3)
    core = rig.cores[0]
    batch = core.batch()
    rig.put(0, 1, cqe=0, action="defer", batch=batch)
    with faults(22):
        kind = "get" if change == "kind" else "put"
        core.post(
            kind, DATA, SOURCE, 64, pe=2 if change == "pe" else 1, qp=int(change == "qp"), order="relax", cqe=0,
            action="defer", batch=batch, sync_id=int(change == "sync_id"),
        )  # fmt: skip


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 256, 257])
def test_rule_23_batches_of_up_to_128_fit_8192_bytes(rows: int) -> None:
    rig = Rig(sq_depth=512)
    batch = rig.cores[0].batch(8192)
    for n in range(rows):
        last = batch.pending_count == 127 or n == rows - 1
        rig.put(n, n % 250 + 1, cqe=int(last), action="submit" if last else "defer", batch=batch)
    assert batch.pending_count == 0
    assert rig.world.queue(0, 1, 0)["cqe_cnt"] == -(-rows // 128)
    rig.cores[0].quiet(1)
    assert [rig.row(n) for n in range(rows)] == [[n % 250 + 1] for n in range(rows)]


def test_rule_23_the_129th_descriptor_does_not_fit() -> None:
    rig = Rig(sq_depth=512)
    batch = rig.cores[0].batch(8192)
    for n in range(128):
        rig.put(n, 1, cqe=0, action="defer", batch=batch)
    with faults(23):
        rig.put(128, 1, cqe=0, action="defer", batch=batch)
    small = Rig(sq_depth=16)
    batch = small.cores[0].batch(8192)
    with faults(23):
        for n in range(16):
            small.put(n, 1, cqe=0, action="defer", batch=batch)


def test_rule_24_a_batch_across_the_ring_end_is_rung_twice() -> None:
    """The engine may run the first part before the second is rung; results do not depend on it."""
    rig = Rig(sq_depth=32)
    for n in range(20):
        rig.put(n, 1)
        rig.cores[0].quiet(1)
    before = rig.world.counters(0)["doorbells"]
    batch = rig.cores[0].batch()
    for n in range(20):
        last = n == 19
        rig.put(n, 50 + n, cqe=int(last), action="submit" if last else "defer", batch=batch)
    assert rig.world.counters(0)["doorbells"] == before + 2
    rig.cores[0].quiet(1)
    assert [rig.row(n) for n in range(20)] == [[50 + n] for n in range(20)]


def test_rule_25_a_submit_boundary_orders_nothing() -> None:
    rig = Rig()
    rig.put(0, 1)
    rig.put(1, 2)
    rig.take_all()
    rig.step("land 2")
    assert (rig.row(0), rig.row(1)) == ([0], [2])


def test_rule_26_nothing_is_left_pending_after_the_last_request() -> None:
    """What stays deferred is never sent: the kernels' channels always close with a submit."""
    rig = Rig()
    batch = rig.cores[0].batch()
    rig.put(0, 1, cqe=0, action="defer", batch=batch)
    rig.cores[0].quiet(1)
    rig.world.settle()
    assert batch.pending_count == 1
    assert rig.row(0) == [0]


@pytest.mark.parametrize(
    ("action", "cqe", "options"),
    [("defer", 1, {}), ("submit", 0, {}), ("immediate", 0, {}), ("immediate", 1, {"se": 1}), ("immediate", 2, {}),
     ("defer", 0, {"pipe": "scalar"})],
)  # fmt: skip
def test_rule_27_illegal_configurations_are_refused(action: str, cqe: int, options: dict[str, int]) -> None:
    rig = Rig()
    with faults(27):
        rig.put(0, 1, cqe=cqe, action=action, batch=rig.cores[0].batch(), **options)


def test_a_wait_that_nothing_ends_is_a_hang() -> None:
    rig = Rig()
    with hangs():
        rig.cores[1].wait_until(FLAG, 1)
