# SPDX-License-Identifier: Apache-2.0
"""How ranks find each other: who this process is, the meeting, and small collective exchanges for the layers above.

Independent of any transport: the same exchanges carry window sizes, settings to compare, or an NCCL unique id.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hal import __version__
from hal.config import as_integer
from hal.errors import ContractError, HalError, PeerTimeout
from hal.rendezvous import FRAME_LIMIT, Server, decode, encode, peer_uid, private

if TYPE_CHECKING:
    from hal.group import Group

_POLL_SECONDS = 0.005
ANSWER_SECONDS = 5.0
"""Beyond a rank's own time limit, how long rank 0 may take to say who is missing: a busy machine may not run it at once."""


@dataclass(frozen=True)
class Run:
    """Which rank this process (or thread) is, of how many, and the secret that its peers share."""

    rank: int
    world_size: int
    token: str = ""
    launcher: str = "single process"
    nodes: int | None = None
    """Emulated nodes, if the launcher says."""
    backend: str | None = None
    """What :func:`hal.connect` uses when it is told no backend, if the launcher says; ``transport`` goes with it."""
    transport: str | None = None
    group: Group | None = field(default=None, compare=False)
    """That stated this place (hal/group.py): a backend may use what it holds."""

    def __post_init__(self) -> None:
        rank, size = as_integer(self.rank), as_integer(self.world_size)
        if rank is None or size is None or not 0 <= rank < size:
            raise ContractError(f"{self.launcher} says rank {self.rank} of {self.world_size}; ranks are 0 to size - 1")
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "world_size", size)


def current_run(environ: Mapping[str, str] = os.environ) -> Run:
    """This process's place, from the variables of ``hal run``, torchrun or mpirun; else a run of one rank.

    Raises ContractError for variables that make no sense, for a run over several machines, and for tasks of a plain srun.
    """
    if "HAL_RANK" in environ:
        run = Run(
            _integer(environ, "HAL_RANK"),
            _integer(environ, "HAL_WORLD_SIZE"),
            environ.get("HAL_TOKEN", ""),
            "hal run",
            _integer(environ, "HAL_NODES") if "HAL_NODES" in environ else None,
            environ.get("HAL_BACKEND"),
            environ.get("HAL_TRANSPORT"),
        )
        if run.world_size > 1 and not run.token:
            raise ContractError("HAL_RANK is set but HAL_TOKEN is not; start ranks with `hal run -n N script.py`")
        return run
    for launcher, rank, size, local_size, identity in _LAUNCHERS:
        if rank in environ and size in environ:
            run = Run(_integer(environ, rank), _integer(environ, size), launcher=launcher)
            local = _integer(environ, local_size) if local_size in environ else run.world_size
            if local != run.world_size:
                raise ContractError(
                    f"{launcher} started {run.world_size} ranks, {local} of them on this machine; HAL's rendezvous "
                    "joins ranks of one machine, so start all ranks on one, or pass group= with the ranks of each"
                )
            if run.world_size == 1:
                return run
            named = [f"{name}={environ[name]}" for name in identity if name in environ]
            return Run(run.rank, run.world_size, _shared_token(launcher, named), launcher)
    _refuse_plain_srun(environ)
    return Run(0, 1)


def _refuse_plain_srun(environ: Mapping[str, str]) -> None:
    """Each task would be rank 0 of a run of its own. A batch script has these variables too, but belongs to no step."""
    rank, size = environ.get("SLURM_PROCID"), environ.get("SLURM_NTASKS", "1")
    batch_script = rank == "0" and "SLURM_STEP_ID" not in environ
    if rank is not None and size != "1" and not batch_script:
        raise ContractError(
            f"srun started this process as task {rank} of {size}, without variables that say how ranks meet: start them with "
            "torchrun, `hal run -n N script.py` in one task, or srun --mpi=pmi2; or pass run=hal.bootstrap.Run(...)"
        )


# Name, rank, size, size on this machine, and what tells one run from another.
_LAUNCHERS = (
    (
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    ),
    (
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    ("mpirun", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ("PMI_JOBID", "PMI_ID_JOB", "SLURM_JOB_ID", "SLURM_STEP_ID")),
)


def _integer(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except (KeyError, ValueError):
        raise ContractError(f"{name} must be an integer, not {environ.get(name)!r}") from None


def _shared_token(launcher: str, identity: list[str]) -> str:
    """A secret for launchers that hand out none: this user's key applied to what tells the run from others."""
    if not identity:
        parent = os.getppid()  # the launcher, or its daemon on this machine, started every rank
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
        identity = [f"parent={parent}", f"started={started}"]
    text = "\n".join([launcher, *identity])
    return hmac.new(user_key(), text.encode(), hashlib.sha256).hexdigest()


def user_key() -> bytes:
    """This user's random key, made on first use in a private folder (mode 0700, ownership verified)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    folder = Path(runtime if os.path.isdir(runtime) else tempfile.gettempdir()) / f"hal-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    info = folder.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise HalError(f"{folder} is not a private folder of user {os.getuid()}; remove it, or set XDG_RUNTIME_DIR")
    path = folder / "key"
    if not path.exists():
        draft = folder / f"key.{os.getpid()}.{secrets.token_hex(4)}"
        draft.touch(mode=0o600)
        draft.write_bytes(secrets.token_bytes(32))
        with suppress(FileExistsError):  # another rank was first
            os.link(draft, path)
        draft.unlink()
    return path.read_bytes()


_meetings: dict[tuple[str, int], int] = {}


def _next_address(run: Run) -> str:
    """The abstract socket of this rank's next meeting. Ranks connect in the same order, so the numbers agree."""
    number = _meetings.get((run.token, run.rank), 0)
    _meetings[run.token, run.rank] = number + 1
    return address(run.token, number)


def address(token: str, number: int) -> str:
    """An abstract socket name (it starts with a null byte) that only those who know the token can compute."""
    name = hmac.new(token.encode(), f"rendezvous {number}".encode(), hashlib.sha256).hexdigest()
    return f"\0hal-{name[:40]}"


class Bootstrap:
    """This rank's end of the meeting: :meth:`all_gather`, :meth:`barrier`, :meth:`agree`, bounded by ``timeout``."""

    def __init__(self, run: Run, timeout: float) -> None:
        """Collective. PeerTimeout lists the ranks that did not come; ContractError says why this one was refused."""
        self.rank, self.world_size, self.timeout, self.run = run.rank, run.world_size, timeout, run
        self.ranks: Sequence[int] = range(run.world_size)
        """Of the run, those that meet here."""
        self._socket: socket.socket | None = None
        self._server: Server | None = None
        self._received = bytearray()
        self._gathers = 0
        if run.world_size == 1:
            return
        deadline = time.monotonic() + timeout
        self._started = time.monotonic()
        meeting = _next_address(run)
        hello = {"token": run.token, "rank": run.rank, "world_size": run.world_size, "version": __version__}
        try:
            if run.rank == 0:
                self._socket = self._serve(meeting, hello)
            if self._socket is None:
                self._socket = self._reach(meeting, deadline)
                self._send(hello)
            self._reply("ready", None, "rendezvous", deadline)
        except BaseException:
            self.close()
            raise

    def all_gather(self, value: Any, what: str = "all_gather", timeout: float | None = None) -> list[Any]:
        """Every rank's ``value`` (bytes, or what JSON can say), in rank order. ``what`` must agree between ranks."""
        packed = pack(value)
        if self.world_size == 1:
            return [unpack(json.loads(json.dumps(packed)))]  # as a peer would see it
        number, self._gathers = self._gathers, self._gathers + 1
        self._started = time.monotonic()
        self._send({"gather": number, "what": what, "value": packed})
        deadline = self._started + (self.timeout if timeout is None else timeout)
        reply = self._reply("gathered", number, what, deadline)
        return [unpack(packed) for packed in reply["values"]]

    def barrier(self, timeout: float | None = None) -> None:
        """Returns once every rank has called it."""
        self.all_gather(None, "barrier", timeout)

    def agree(self, what: str, settings: Mapping[str, Any]) -> None:
        """Compare settings between ranks. ContractError, the same on all, names each that differs and its values."""
        everybody = [_flatten(s) for s in self.all_gather(settings, what)]
        first = everybody[0]
        differences = [
            f"rank {rank} has {name}={theirs.get(name)!r} where rank 0 has {first.get(name)!r}"
            for rank, theirs in enumerate(everybody)
            for name in sorted(first.keys() | theirs.keys())
            if theirs.get(name) != first.get(name)
        ]
        if differences:
            raise ContractError(f"{what} must be equal on all ranks: " + "; ".join(differences))

    def close(self, reason: str | None = None) -> None:
        """Leave. Idempotent; never waits for a peer. ``reason`` is told to peers that still expect something."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.settimeout(0.0)
                self._socket.send(encode({"bye": reason}))
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.join(ANSWER_SECONDS)
            self._server = None

    def _serve(self, meeting: str, hello: dict[str, Any]) -> socket.socket | None:
        """Become the server. None if somebody already is: then this process learns from it that its rank is taken."""
        listener = private(socket.socket(socket.AF_UNIX))
        try:
            listener.bind(meeting)
        except OSError:
            listener.close()
            return None
        listener.listen(1024)
        mine, servers = socket.socketpair()
        self._server = Server(listener, servers, self.world_size, hello)
        self._server.start()
        return private(mine)

    def _reach(self, meeting: str, deadline: float) -> socket.socket:
        while True:
            connection = private(socket.socket(socket.AF_UNIX))
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection.connect(meeting)
            except OSError:
                connection.close()
                if time.monotonic() >= deadline:
                    raise self._timeout(0, "rendezvous", 0, "rank 0 is missing") from None
                time.sleep(_POLL_SECONDS)
                continue
            if peer_uid(connection) == os.getuid():
                return connection
            uid = peer_uid(connection)
            connection.close()
            raise ContractError(f"the rendezvous of this run was taken by user {uid}; start the run again")

    def _send(self, message: dict[str, Any]) -> None:
        if self._socket is None:
            raise HalError("this rank has left its run; connect again")
        self._socket.settimeout(self.timeout)
        with suppress(OSError):  # a lost connection is reported by the read that follows
            self._socket.sendall(encode(message))

    def _reply(self, kind: str, number: int | None, stage: str, deadline: float) -> dict[str, Any]:
        """The server's answer; at the deadline, its word on who is missing."""
        message = self._receive(deadline)
        if message is None:
            self._send({"who": number})
            message = self._receive(time.monotonic() + ANSWER_SECONDS)
        if message is None:
            raise self._timeout(0, stage, 0, "rank 0 does not answer")
        if "refused" in message:
            raise ContractError(f"refused by rank 0: {message['refused']}")
        if "mismatch" in message:
            raise ContractError(message["mismatch"])
        if "fault" in message:
            raise self._timeout(message["fault"], stage, message["present"], message["reason"])
        if kind not in message or (number is not None and message[kind] != number):
            raise HalError(f"unexpected answer in stage '{stage}': {sorted(message)}")
        return message

    def _receive(self, deadline: float) -> dict[str, Any] | None:
        """The next frame, or None at the deadline; rank 0's end of file is an answer too."""
        assert self._socket is not None
        while (message := decode(self._received, FRAME_LIMIT)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._socket.settimeout(left)
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except OSError:
                data = b""
            if not data:
                return {"fault": 0, "present": 0, "reason": "its process died or closed its communicator"}
            self._received += data
        return message

    def _timeout(self, rank: int, stage: str, present: int, reason: str) -> PeerTimeout:
        seconds = time.monotonic() - self._started
        return PeerTimeout(rank, stage, expected=self.world_size, seen=present, seconds=seconds, reason=reason)


def pack(value: Any) -> dict[str, Any]:
    """``value`` (bytes, or what JSON can say) as JSON can say it."""
    return {"b": base64.b64encode(value).decode()} if isinstance(value, bytes) else {"j": value}


def unpack(packed: dict[str, Any]) -> Any:
    return base64.b64decode(packed["b"]) if "b" in packed else packed["j"]


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
