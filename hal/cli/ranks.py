# SPDX-License-Identifier: Apache-2.0
"""A command's own ranks: processes on this machine that run one function each and hand back its result.

Processes, not threads: a rank of a real run is a process, and the times that ``demo`` and ``bench`` print must not hide
one interpreter's lock. Work and results travel as files in a private folder (mode 0700).
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from hal.config import Settings
from hal.errors import BackendUnavailable, CapacityError, ContractError, HalError, PeerTimeout
from hal.hosts import Hosts, arranged

_WORK = "work.pkl"


def run_ranks(settings: Settings, function: str, payload: object, hosts: Hosts | None = None) -> list[Any]:
    """``function`` (``module:name``) as ``name(comm, settings, payload)`` on ``settings.ranks`` ranks; results by rank.
    ``hosts``: their layout, when the caller has shown it already.

    With ``on_peer_loss=mask`` a rank that was killed has None. Raises ContractError when a rank refused what the user
    asked for, HalError when one failed otherwise.
    """
    from hal.launch import run as launch

    hosts = arranged(settings) if hosts is None else hosts
    with tempfile.TemporaryDirectory(prefix="hal-") as name:
        folder = Path(name)
        (folder / _WORK).write_bytes(pickle.dumps((settings, function, payload)))
        argv = [sys.executable, "-m", "hal.cli.ranks", name]
        goes_on = settings.on_peer_loss == "mask"
        status = launch(hosts.ranks, argv, nodes=hosts.hosts, environment=hosts.environment, keep_going=goes_on)
        results = [folder / f"result-{rank}.pkl" for rank in range(settings.ranks)]
        killed = goes_on and status == 128 + signal.SIGKILL and any(path.exists() for path in results)
        _raise_failure(folder, 0 if killed else status)
        return [pickle.loads(path.read_bytes()) if path.exists() or not killed else None for path in results]


def _raise_failure(folder: Path, status: int) -> None:
    if any(folder.glob("interrupted-*")):
        raise KeyboardInterrupt
    failures = [json.loads(path.read_text()) for path in sorted(folder.glob("failure-*.json"))]
    # A rank that waited for another in vain is not the cause.
    failures.sort(key=lambda failure: failure["waited"])
    if failures:
        cause = failures[0]
        raise (ContractError if cause["refused"] else HalError)(cause["text"])
    if status != 0:
        raise HalError(f"a rank ended with status {status}; its output is above")


def _share_processors() -> None:
    """Before NumPy loads: the ranks' matrix libraries together use this machine's processors once, not once for each."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("HAL_WORLD_SIZE", "1"))))
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, threads)


def _rank_main(folder: Path) -> int:
    """One rank. Its error becomes a file, so that the parent can say it once."""
    import hal

    _share_processors()
    settings, function, payload = pickle.loads((folder / _WORK).read_bytes())
    module, _, name = function.partition(":")
    rank = "unknown"
    try:
        with hal.connect(settings.connection) as comm:
            rank = str(comm.rank)
            result = getattr(importlib.import_module(module), name)(comm, settings, payload)
            (folder / f"result-{rank}.pkl").write_bytes(pickle.dumps(result))
    except KeyboardInterrupt:  # the parent's Ctrl-C, forwarded: it says so once, with its exit status
        (folder / f"interrupted-{rank}").touch()
        return 128 + signal.SIGINT
    except HalError as error:
        failure = {
            "text": str(error),
            "refused": isinstance(error, ContractError | CapacityError | BackendUnavailable),
            "waited": isinstance(error, PeerTimeout),
        }
        (folder / f"failure-{rank}.json").write_text(json.dumps(failure))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_rank_main(Path(sys.argv[1])))
