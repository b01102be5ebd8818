# SPDX-License-Identifier: Apache-2.0
"""Rules 18, 19 and 52 to 69 of docs/ascend.md: what the receiver may conclude, and what the protocols do about it.

A rule that is about the kernels is tested on the kernels, in a deterministic world.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from ascend_ranks import WorldRanks
from hal_ascend import _engine
from hal_ascend.engine import SIGNAL_STRIDE, ascend_shape
from hal_ascend.session import SLOT_BYTES
from kernel_ranks import dispatch_all, dispatch_send, random_tokens, round_trip
from udma_helpers import DATA, FLAG, SOURCE, WORD, Rig, hangs
from udma_mutations import DEFECTS, judge

import hal
from hal.config import ExpertParallelSpec
from hal.errors import CapacityError, HalError, PeerTimeout

ROOT = Path(__file__).resolve().parents[1]
SPEC = ExpertParallelSpec(num_experts=4, top_k=2, hidden=32, max_tokens=16)


def both(tokens: int) -> tuple[ExpertParallelSpec, object]:
    """Every token goes to both ranks, so each sends ``tokens`` rows to the other."""
    spec = replace(SPEC, max_tokens=max(tokens, 1), completion="strong_signal_no_cqe")
    made = random_tokens(np.random.default_rng(1), spec, [tokens, tokens], none=0.0)
    made.topk_idx = [np.tile(np.array([0, 2], np.int64), (tokens, 1)) for _ in range(2)]
    return spec, made


def caught(name: str) -> bool:
    return judge(next(d for d in DEFECTS if d.name == name)).is_caught


def test_rule_18_a_round_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    spec, tokens = both(16)
    with WorldRanks(spec, 2, sq_depth=32) as world:
        for rank in range(2):
            with pytest.raises(CapacityError, match="needed 27, given 21"):
                world.each(lambda r: dispatch_send(world, r, tokens))
            assert world.world.queue(rank, 1 - rank, 2)["head"] == 0
            assert world.world.counters(rank)["wqes"] == 0


def test_rule_19_room_is_kept_for_the_signals_still_to_come() -> None:
    """12 rows are 18 blocks on QP 0 and its signal the 19th: admitted, and the signal found its place."""
    spec, tokens = both(12)
    with WorldRanks(spec, 2, sq_depth=32) as world:
        dispatch_all(world, tokens)
        assert [world.world.queue(0, 1, qp)["head"] for qp in (2, 3)] == [19, 7]


def test_rule_52_a_receiver_waits_for_this_source_s_flag() -> None:
    assert caught("wait_on_wrong_slot")


def test_rule_53_a_changed_payload_word_is_no_proof() -> None:
    rig = Rig(chunk_bytes=64, seed=3)
    rig.put(0, 7, nbytes=512)
    rig.take_all()
    rig.step("land 1")
    assert rig.row(0, 512) == [0, 7], "some word changed, others did not"


def test_rule_54_a_poll_that_does_not_invalidate_never_sees_the_flag() -> None:
    rig = Rig()
    assert rig.cores[1].load64(FLAG) == 0
    rig.signal(1)
    with hangs():
        rig.cores[1].wait_until(FLAG, 1, invalidate=False)
    rig.cores[1].wait_until(FLAG, 1)


def test_rule_55_payload_behind_the_flag_must_not_come_from_the_cache() -> None:
    rig = Rig()
    receiver = rig.cores[1]
    assert receiver.load64(DATA + 64) == 0  # cached before it landed
    rig.put(0, 1)
    rig.put(1, 2)
    rig.signal(1)
    receiver.wait_until(FLAG, 1)
    assert (receiver.load64(DATA), receiver.load64(DATA + 64)) == (0x0101010101010101, 0)
    receiver.flush(DATA + 64)
    assert receiver.load64(DATA + 64) == 0x0202020202020202


def compiles(source: str) -> subprocess.CompletedProcess[str]:
    folders = ("kernels_ascend", "kernels_ascend/host_shim", "kernels_host", "hal/include")
    include = [f"-I{ROOT / folder}" for folder in folders]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-Wno-attributes", *include, "-"]
    return subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=False)


def test_rule_27_illegal_configurations_do_not_compile() -> None:
    body = """
#include "shmem.h"
inline constexpr aclshmemx_udma_op_config_t kConfig{%s};
void f(aclshmemx_submit_state_t* s) {
    (void)s;
    aclshmemx_udma_qp_put_nbi<std::uint8_t, PIPE_MTE3, kConfig>(nullptr, nullptr, nullptr, 1, 1, 0, 0%s);
}
"""
    defer, submit = ", aclshmemx_defer_t{s}", ", aclshmemx_submit_t{s}"
    for config, action, legal in (
        ("0, 0, 0, 5", defer, True), ("1, 0, 0, 5", defer, False), ("1, 0, 0, 6", submit, True),
        ("0, 0, 0, 5", submit, False), ("1, 0, 0, 6", "", True), ("0, 0, 0, 6", "", False), ("1, 1, 0, 5", "", False),
    ):  # fmt: skip
        done = compiles(body % (config, action))
        assert (done.returncode == 0) == legal, done.stderr
        assert legal or "static assertion failed" in done.stderr


def test_rule_56_four_sizes_that_are_not_one() -> None:
    """8 bytes are sent, slots lie 512 apart, a descriptor is 64 and the scratch of a batch 8192."""
    done = compiles(
        """
#include "kernels/raw_wqe.h"
using namespace hal;
static_assert(sizeof(std::uint64_t) == 8 && ascend::kSlotStride == 512);
static_assert(HAL_UDMA_SQE_BYTES + HAL_UDMA_SGE_BYTES == 64 && 128 * 64 == 8192);
constexpr int kSlotOfPublisher3Queue1 = 3 * 2 + 1;
static_assert(kSlotOfPublisher3Queue1 * ascend::kSlotStride == 3584);
"""
    )
    assert done.returncode == 0, done.stderr
    assert SLOT_BYTES == SIGNAL_STRIDE == 512
    shape = ascend_shape(SPEC, 2, 1)
    assert shape.signal_stride == 512


def test_rule_57_empty_queues_and_empty_ranks_signal_all_the_same() -> None:
    rng = np.random.default_rng(1)
    for completion in ("strong_signal", "strong_last", "strong_signal_no_cqe", "flag_in_block"):
        with WorldRanks(replace(SPEC, completion=completion), 2) as world:
            for counts in ([0, 0], [5, 0], [1, 0], [0, 16]):
                round_trip(world, rng, counts)
    assert caught("drop_empty_signal")


def test_rule_58_a_signal_s_source_stays_until_quiet() -> None:
    rig = Rig()
    rig.signal(1)
    rig.take_all()
    rig.set_word(0, WORD, 9)
    rig.world.settle()
    assert rig.word(1, FLAG) == 9
    assert any("rule 48" in text for text in rig.world.warnings)


def test_rule_59_a_slot_zeroed_late_loses_the_signal() -> None:
    """Hence windows come zeroed from a collective, and slots are never zeroed again."""
    rig = Rig()
    rig.signal(1)
    rig.world.settle()
    rig.set_word(1, FLAG, 0)
    with hangs():
        rig.cores[1].wait_until(FLAG, 1)


def test_rule_60_signals_count_generations() -> None:
    rig = Rig()
    for generation in (1, 2):
        rig.signal(generation)
        rig.cores[1].wait_until(FLAG, generation)
    with hangs():
        rig.cores[1].wait_until(FLAG, 3)
    assert caught("constant_one")


def test_rule_61_a_signal_by_another_engine_waits_for_quiet_of_every_qp() -> None:
    rig = Rig()
    rig.put(0, 1, qp=0)
    rig.put(1, 2, qp=1)
    rig.cores[0].quiet(1, 0)
    assert (rig.row(0), rig.row(1)) == ([1], [0]), "a signal now would be too early"
    rig.cores[0].quiet(1, 1)
    assert rig.row(1) == [2]
    assert caught("signal_before_quiet")


@pytest.mark.parametrize(("index", "covered"), [(1, True), (2, False)])
def test_rule_62_the_last_written_descriptor_is_the_one_before_the_head(index: int, covered: bool) -> None:
    rig = Rig()
    core = rig.cores[0]
    for row in (0, 1):
        rig.fill(0, SOURCE + row * 64, 64, row + 1)
        core.store_wqe(DATA + row * 64, SOURCE + row * 64, 64, pe=1)
    core.or_order(1, 0, index, odr=6, cqe=True, clear=True)
    core.flush_wqes(1, 0, 0, 3)
    core.ring(1, 0, 2)
    rig.take_all()
    rig.step("land 1" if covered else "land 2")
    if covered:
        rig.step("land 2")
    assert rig.can("report") == covered


def test_rule_63_results_do_not_depend_on_which_row_takes_which_qp() -> None:
    """Three rows of four go to QP 0 by their place in route order, and one queue gives the same bits."""
    spec = replace(SPEC, completion="strong_last", num_experts=2, top_k=1)
    for queues in (1, 2):
        with WorldRanks(spec, 2, queues=queues) as world:
            round_trip(world, np.random.default_rng(2), [16, 16])
    tokens = random_tokens(np.random.default_rng(1), spec, [16, 16], none=0.0)
    tokens.topk_idx = [np.full((16, 1), 1 - rank, np.int64) for rank in range(2)]
    with WorldRanks(spec, 2) as world:
        dispatch_all(world, tokens)
        # QP 0: 12 rows of two requests, a header and its ready word; QP 1: 4 rows.
        assert [world.world.queue(0, 1, qp)["head"] for qp in (0, 1)] == [26, 8]


def test_rule_64_the_ring_is_reclaimed_behind_the_exit_barrier() -> None:
    spec, tokens = both(12)
    with WorldRanks(spec, 2, sq_depth=32) as world:
        for _ in range(6):  # far more than one ring holds
            dispatch_all(world, tokens)
        state = world.world.queue(0, 1, 2)
        assert (state["head"], state["tail"]) == (6 * 19, 6 * 19)
        assert state["cqe_cnt"] == 0
    assert caught("early_reclaim")


def test_rule_65_quiet_comes_after_the_inbound_waits_and_not_after_each_put() -> None:
    quiets = []
    for tokens in (1, 16):
        with WorldRanks(SPEC, 2) as world:
            dispatch_all(world, random_tokens(np.random.default_rng(1), SPEC, [tokens, tokens], none=0.0))
            quiets.append(world.world.counters(0)["quiets"])
    assert quiets[0] == quiets[1] == 4  # two QPs, once before sources are staged anew and once after the waits


def test_rule_66_every_tile_of_a_row_is_there_before_the_signal() -> None:
    """A row of 40 000 bytes takes two tiles of scratch and many chunks of sums."""
    with WorldRanks(replace(SPEC, hidden=20_000, max_tokens=3), 2, chunk_bytes=4096, seed=3) as world:
        round_trip(world, np.random.default_rng(1), [3, 2])


def test_rule_67_waits_are_bounded_and_say_where() -> None:
    with WorldRanks(SPEC, 2) as world:
        tokens = random_tokens(np.random.default_rng(1), SPEC, [4, 4])

        def work(rank: int) -> None:
            if rank == 0:
                dispatch_send(world, rank, tokens)

        with pytest.raises(PeerTimeout, match="rank 1: no answer in stage 'dispatch ready' on queue 0"):
            world.each(work)
    rig = Rig(sq_depth=16)
    for n in range(6):
        rig.cores[0].store_wqe(DATA + n * 64, SOURCE, 64, pe=1)
    with pytest.raises(_engine.Fault, match=r"queue to PE 1, QP 0 \(head 6, tail 0, cqe_cnt 0, cq_tail 0\)"):
        rig.put(7, 1)


def test_rule_68_nothing_is_usable_after_the_end() -> None:
    def body(comm: hal.Communicator) -> None:
        window, queue = comm.window(64), comm.queue(0)
        comm.close()
        with pytest.raises(HalError, match="closed"):
            queue.put(window, 0, np.zeros(8, np.uint8), 0)
        with pytest.raises(HalError):
            comm._session.quiet(0, None, hal.QuietScope.REMOTE)

    hal.spawn(2, body, config=hal.HalConfig("ascend", "udma_emulated"))


def test_rule_69_counters_count_what_software_sent() -> None:
    """Data, flags and signals are summed by the kernels; link headers and retries are nobody's here."""
    spec, tokens = both(8)
    with WorldRanks(replace(spec, completion="flag_in_block"), 2) as world:
        dispatch_all(world, tokens)
        sent = world.engines[0].traffic
    record = 32 * 2 + 16  # row and meta
    assert sent == {"data_bytes": 8 * 480, "flag_bytes": 8 * 32, "signal_bytes": 8, "rows": 8, "signals": 1}
    assert record <= 480


def test_every_rule_has_a_test() -> None:
    names = "".join(path.read_text() for path in Path(__file__).parent.glob("test_udma_*rules.py"))
    tested = {int(n) for n in re.findall(r"def test_rule_(\d\d)_", names)}
    assert tested == set(range(1, 70))
