# SPDX-License-Identifier: Apache-2.0
"""Errors keep their text and their numbers on the way to another process."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from hal.errors import BackendUnavailable, CapacityError, ContractError, HalError, PeerTimeout, RankMasked

ERRORS = [
    HalError("text"),
    ContractError("text"),
    BackendUnavailable("abacus", "it has no beads", "thread some"),
    CapacityError("tokens", 5, 4, "split the batch"),
    RankMasked(1, 2),
    PeerTimeout(3, "dispatch rows", queue=1, expected=8, seen=7, seconds=2.5, reason="its process died"),
]


@pytest.mark.parametrize("way", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_the_same_after_a_copy(error, way):
    again = way(error)
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize(
    ("reason", "helps"),
    [("no answer", True), ("rank 2 missing of 4", True), ("its process died", False), ("failed with KeyError: 1", False),
     ("closed its communicator", False), ("gave up on this rank: closed its communicator", False)],
)  # fmt: skip
def test_a_longer_time_limit_is_advised_where_it_could_help(reason, helps):
    text = str(PeerTimeout(1, "barrier", reason=reason))
    assert "look at rank 1's output" in text
    assert ("raise `timeout`" in text) == helps


@pytest.mark.parametrize(
    ("rank", "queue", "reason", "text"),
    [(1, None, "rank 1 missing of 2", "rank 1 missing of 2 in stage 's' after 0.000 s: "),
     (1, None, "ranks 1, 2 missing of 3", "ranks 1, 2 missing of 3 in stage 's' after"),
     (1, None, "rank 10 is lost", "rank 1: rank 10 is lost in stage 's' after"),
     (1, 0, "no answer", "rank 1: no answer in stage 's' on queue 0 after")],
)  # fmt: skip
def test_a_rank_is_named_once_and_a_queue_where_there_is_one(rank, queue, reason, text):
    assert str(PeerTimeout(rank, "s", queue=queue, reason=reason)).startswith(text)


def fail(number):
    raise ERRORS[number]


def test_an_error_of_a_worker_process_reaches_the_one_that_waits():
    """An error that cannot be pickled back ends the pool instead, with words about the pool."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(PeerTimeout) as found:
        pool.submit(fail, -1).result()
    assert (found.value.rank, found.value.stage) == (3, "dispatch rows")
