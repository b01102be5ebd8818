# SPDX-License-Identifier: Apache-2.0
"""Starting ranks: as processes (``hal run``) or as threads of this one (``hal.spawn``)."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, TypeVar

from hal.bootstrap import Run
from hal.communicator import Communicator, connect
from hal.config import HalConfig, as_integer, check_layout
from hal.errors import ContractError, PeerTimeout

GRACE_SECONDS = 3.0
"""After the first rank failed, how long the others may take to report it themselves."""
TERM_SECONDS = 1.0
"""Between SIGTERM and SIGKILL."""

__all__ = ["connect", "run", "spawn"]

_T = TypeVar("_T")
# What each process runs first: the kernel's promise to kill it with the launcher (PR_SET_PDEATHSIG survives exec). A
# preexec_fn would do it by forking this process, which may have threads that hold locks.
_DIE_WITH_LAUNCHER = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as error:
    print(f"cannot start {sys.argv[2]}: {error.strerror}", file=sys.stderr)
    os._exit(127)
"""


# --- processes -----------------------------------------------------------------------------------------------------


def run(
    n: int,
    argv: Sequence[str],
    *,
    nodes: int = 1,
    environment: Callable[[int], Mapping[str, str]] | None = None,
    timeout: float | None = None,
    keep_going: bool = False,
    prefix: bool = True,
    output: IO[bytes] | None = None,
) -> int:
    """Start ``argv`` as ``n`` ranks on this machine and wait for them; ``hal run -n N script.py``.

    ``environment(rank)`` is what a rank gets beside this process's variables. With ``prefix`` every line of output starts
    with ``[rank r]``. SIGINT and SIGTERM are forwarded. When one rank fails, the others get a grace to report it, then are
    ended, or with ``keep_going`` run to their own end (``on_peer_loss="mask"``); none outlives this process, whatever way
    that ends. ``timeout`` (seconds) bounds the whole run. Returns 0, or the first failure's exit status (128 + signal
    number; 124 at the time limit).
    """
    check_layout(n, nodes)
    if not argv or isinstance(argv, str):
        raise ContractError(f"nothing to run: give a command as a list of words, not {argv!r}")
    with _Ranks(output or sys.stdout.buffer) as ranks:
        ranks.start(n, list(argv), nodes, environment or (lambda rank: {}), prefix)
        return ranks.wait(timeout, keep_going)


@dataclass
class _Stream:
    """One rank's output, cut into lines."""

    rank: int
    pipe: IO[bytes]
    partial: bytearray = field(default_factory=bytearray)


class _Ranks:
    """The processes of a run."""

    def __init__(self, output: IO[bytes]) -> None:
        self._output = output
        self._processes: list[subprocess.Popen[bytes]] = []
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Any] = {}
        self._forwarded: int | None = None

    def __enter__(self) -> _Ranks:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self._end(TERM_SECONDS)
        self._drain(0.2)
        for key in list(self._selector.get_map().values()):
            self._finish(key.data)
        self._selector.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def start(
        self, n: int, argv: list[str], nodes: int, environment: Callable[[int], Mapping[str, str]], prefix: bool
    ) -> None:
        shared = {"HAL_WORLD_SIZE": str(n), "HAL_NODES": str(nodes), "HAL_TOKEN": secrets.token_hex(32)}
        leash = [sys.executable, "-I", "-S", "-c", _DIE_WITH_LAUNCHER, str(os.getpid())]
        for rank in range(n):
            process = subprocess.Popen(
                [*leash, *argv],
                env={**os.environ, **environment(rank), **shared, "HAL_RANK": str(rank), "PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if prefix else None,
                stderr=subprocess.STDOUT if prefix else None,
                start_new_session=True,  # so that its own children can be ended with it
            )
            self._processes.append(process)
            if process.stdout is not None:
                os.set_blocking(process.stdout.fileno(), False)
                self._selector.register(process.stdout, selectors.EVENT_READ, _Stream(rank, process.stdout))

    def wait(self, timeout: float | None, keep_going: bool) -> int:
        """Until all ended, or one failed and the grace is over (never with ``keep_going``)."""
        deadline = None if timeout is None else time.monotonic() + timeout
        status, grace_ends = 0, None
        while True:
            self._pump(0.02)
            codes = [process.poll() for process in self._processes]
            now = time.monotonic()
            if status == 0 and (failed := [code for code in codes if code]):
                status, grace_ends = _status(failed[0]), None if keep_going else now + GRACE_SECONDS
            if all(code is not None for code in codes):
                self._drain(0.2)
                return status
            if grace_ends is not None and now >= grace_ends:
                return status
            if deadline is not None and now >= deadline:
                waiting = [rank for rank, code in enumerate(codes) if code is None]
                self._write(f"hal run: time limit of {timeout} s is up; still running: ranks {waiting}\n".encode())
                return 124

    def _pump(self, seconds: float) -> bool:
        """Pass on what the ranks print. False if there was nothing."""
        if not self._selector.get_map():
            time.sleep(seconds)
            return False
        ready = self._selector.select(seconds)
        for key, _ in ready:
            stream: _Stream = key.data
            data = stream.pipe.read(1 << 16)
            if data:
                stream.partial += data
                *lines, rest = stream.partial.split(b"\n")
                stream.partial = bytearray(rest)
                self._print(stream.rank, lines)
            elif data == b"":
                self._finish(stream)
        return bool(ready)

    def _finish(self, stream: _Stream) -> None:
        self._print(stream.rank, [stream.partial] if stream.partial else [])
        self._selector.unregister(stream.pipe)
        stream.pipe.close()

    def _drain(self, seconds: float) -> None:
        """A rank's last words; its own background children may hold the pipe open for longer.

        The last look begins after the time is up: it takes as much as a pipe holds, so what an ended rank wrote is passed
        on also where this process was not run meanwhile.
        """
        deadline, late = time.monotonic() + seconds, False
        while self._selector.get_map() and not late:
            late = time.monotonic() >= deadline
            self._pump(0.02)

    def _print(self, rank: int, lines: Sequence[bytes | bytearray]) -> None:
        for line in lines:
            self._write(b"[rank %d] %b\n" % (rank, bytes(line)))

    def _write(self, data: bytes) -> None:
        self._output.write(data)
        self._output.flush()

    def _forward(self, number: int, frame: object) -> None:
        """The first signal goes to the ranks as it is; a second one ends them."""
        repeated, self._forwarded = self._forwarded is not None, number
        self._signal(signal.SIGKILL if repeated else number)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.returncode is None:
                _kill_group(process.pid, number)

    def _end(self, patience: float) -> None:
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + patience
        while any(p.poll() is None for p in self._processes) and time.monotonic() < deadline:
            self._pump(0.02)
        for process in self._processes:
            _kill_group(process.pid, signal.SIGKILL)  # also what an ended rank left behind
            process.wait()


def _kill_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _status(code: int) -> int:
    return code if code > 0 else 128 - code


# --- threads -------------------------------------------------------------------------------------------------------


def spawn(
    n: int,
    fn: Callable[..., _T],
    *args: Any,
    config: HalConfig | Mapping[str, Any] | None = None,
    **settings: Any,
) -> list[_T]:
    """Run ``fn(comm, *args)`` on ``n`` ranks that are threads of this process; returns their results in rank order.

    ``config`` and ``settings`` are as for :func:`hal.connect`. When a rank raises, the others are told at once; the
    exception that came first is raised again here, with a note that names its rank.
    """
    count = as_integer(n)
    if count is None or count < 1:
        raise ContractError(f"spawn needs at least one rank, not {n!r}")
    token = secrets.token_hex(32)
    ranks = [_RankThread(Run(r, count, token, "hal.spawn"), fn, args, config, settings) for r in range(count)]
    for rank in ranks:
        rank.start()
    try:
        _join(ranks)
    except BaseException as error:  # Ctrl-C: no rank may be left in a wait, nor in native code when the process ends
        for rank in ranks:
            rank.abort(error)
        give_up = time.monotonic() + GRACE_SECONDS
        for rank in ranks:
            rank.join(max(0.0, give_up - time.monotonic()))
        raise
    failed = [rank for rank in ranks if rank.error is not None]
    if failed:
        raise _first(failed, count)
    return [rank.result for rank in ranks]


class _RankThread(threading.Thread):
    """One rank of :func:`spawn`."""

    def __init__(self, run: Run, fn: Callable[..., Any], args: Sequence[Any], config: Any, settings: Any) -> None:
        super().__init__(name=f"hal-rank-{run.rank}", daemon=True)
        self.place, self._fn, self._given, self._config, self._settings = run, fn, args, config, settings
        self.result: Any = None
        self.error: BaseException | None = None
        self.failed_at = 0.0
        self._communicator: Communicator | None = None

    def run(self) -> None:
        try:
            with self._connect() as self._communicator:
                try:
                    self.result = self._fn(self._communicator, *self._given)
                except BaseException:
                    self.failed_at = time.monotonic()  # closing tells the others, who may be gone before it ends
                    raise
        except BaseException as error:
            self.failed_at = self.failed_at or time.monotonic()
            self.error = error

    def abort(self, error: BaseException) -> None:
        if self._communicator is not None:
            self._communicator._session.abort(f"{type(error).__name__} in the process that spawned the ranks")

    def _connect(self) -> Communicator:
        return connect(self._config, run=self.place, **self._settings)


def _join(ranks: Sequence[_RankThread]) -> None:
    """Until all ended; or, after a failure, until the others had the time to notice."""
    give_up = None
    while alive := [rank for rank in ranks if rank.is_alive()]:
        alive[0].join(0.05)
        failed = [rank for rank in ranks if rank.error is not None]
        if failed and give_up is None:
            give_up = time.monotonic() + GRACE_SECONDS
        if give_up is not None and time.monotonic() > give_up:
            stuck = ", ".join(str(rank.place.rank) for rank in ranks if rank.is_alive())
            error = _first(failed, len(ranks))
            error.add_note(f"ranks still running in the caller's own code, left behind: {stuck}")
            raise error


def _first(failed: Sequence[_RankThread], n: int) -> BaseException:
    """The failure that caused the others: a PeerTimeout is mostly a consequence."""
    causes = [rank for rank in failed if not isinstance(rank.error, PeerTimeout)] or list(failed)
    first = min(causes, key=lambda rank: rank.failed_at)
    assert first.error is not None
    first.error.add_note(f"raised on rank {first.place.rank} of {n}")
    return first.error
