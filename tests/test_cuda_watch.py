# SPDX-License-Identifier: Apache-2.0
"""Who left and how, as hal_cuda/watch.py hears it: by the sockets alone, so no device is needed."""

from __future__ import annotations

import socket
import subprocess
import threading
import time

import pytest
from hal_cuda.native import ABORT_WORDS
from hal_cuda.watch import DIED, Watch


class Told:
    """What a watch told, in order."""

    def __init__(self) -> None:
        self.notices: list[tuple[int | None, frozenset[int]]] = []
        self.changed = threading.Condition()

    def __call__(self, failed: int | None, closed: frozenset[int]) -> None:
        with self.changed:
            self.notices.append((failed, closed))
            self.changed.notify_all()

    def wait(self, count: int) -> list[tuple[int | None, frozenset[int]]]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.notices) >= count, 20), self.notices
            return list(self.notices)


@pytest.fixture
def three():
    """Watches of three ranks in one process, and what each was told."""
    links: list[list[socket.socket | None]] = [[None] * 3 for _ in range(3)]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        links[a][b], links[b][a] = socket.socketpair()
    told = [Told() for _ in range(3)]
    watches = [Watch(rank, links[rank], told[rank]) for rank in range(3)]
    yield watches, told
    for watch in watches:
        watch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hal-watch")]


def test_ranks_that_close_are_no_failure(three):
    watches, told = three
    watches[1].say_closed()
    watches[1].close()
    assert told[0].wait(1) == [(None, frozenset({1}))]
    watches[2].say_closed()
    watches[2].close()
    assert told[0].wait(2)[-1] == (None, frozenset({1, 2}))
    assert watches[0].lost is None


def test_a_rank_that_says_nothing_has_died(three):
    watches, told = three
    watches[2].say_closed()
    watches[1].close()  # as the kernel does to a dead process's sockets
    notices = told[0].wait(2)
    assert notices[-1] == (1, frozenset({2}))
    assert watches[0].lost == (1, DIED)
    assert watches[0].reason(1) == DIED
    assert watches[0].reason(2) is None


def test_the_root_of_a_failure_is_passed_on_and_the_first_stays(three):
    watches, told = three
    watches[1].say_failed(2, "no answer")
    watches[1].say_closed()  # what follows is not heard
    watches[1].close()
    assert told[0].wait(1) == [(2, frozenset())]
    assert watches[0].lost == (2, "no answer")
    told[2].wait(1)
    assert watches[2].lost == (1, "gave up on this rank: no answer")
    watches[2].close()
    assert told[0].wait(2)[-1] == (2, frozenset())
    assert watches[0].lost == (2, "no answer")


def test_a_long_reason_and_a_full_socket_hold_nobody_up(three):
    watches, told = three
    watches[1].say_failed(1, "x" * 100_000)
    told[0].wait(1)
    lost = watches[0].lost
    assert lost is not None
    assert lost[0] == 1
    assert set(lost[1]) == {"x"}


def test_a_killed_process_is_heard_at_once():
    mine, theirs = socket.socketpair()
    told = Told()
    watch = Watch(0, [None, mine], told)
    child = subprocess.Popen(["sleep", "60"], pass_fds=[theirs.fileno()])
    theirs.close()
    assert not told.notices
    start = time.monotonic()
    child.kill()
    told.wait(1)
    assert time.monotonic() - start < 5
    assert watch.lost == (1, DIED)
    child.wait()
    watch.close()


def test_the_words_have_the_header_s_layout():
    assert (
        ABORT_WORDS.pack(5, 1, 1 << 40)
        == (5).to_bytes(4, "little") + (1).to_bytes(4, "little") + bytes(5) + b"\x01\0\0"
    )
