# SPDX-License-Identifier: Apache-2.0
"""A stranger's backend and transport, installed from a package outside the tree (tests/third_party_backend)."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hal import registry
from hal.errors import BackendUnavailable, ContractError


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where the package is installed, as pip installs any other."""
    work = tmp_path_factory.mktemp("third_party")
    source = shutil.copytree(Path(__file__).parent / "third_party_backend", work / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    environment = {"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "HOME": str(work)}
    subprocess.run([*command, "--target", str(work / "site"), str(source)], check=True, env=environment)
    return work / "site"


@pytest.fixture
def third_party(installed, monkeypatch):
    """The package is importable here, and in processes started from here."""
    monkeypatch.syspath_prepend(str(installed))
    monkeypatch.setenv("PYTHONPATH", str(installed))


def test_built_in_ones_are_listed_like_any_other():
    assert {"host", "cuda", "ascend"} <= set(registry.backends())
    assert "shm" in registry.transports("host")
    assert "shm" not in registry.transports("cuda")
    assert registry.get_backend("host").probe().usable


def test_listing_loads_no_engine_and_no_driver():
    code = (
        "import sys; from hal import registry; registry.backends(); registry.transports()\n"
        "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'cupy', 'jax', 'hydra'})"
        " + [m for m in sys.modules if m == 'hal_host._engine'])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.usefixtures("third_party")
def test_a_strangers_names_are_known_and_bad_ones_say_why():
    probes = {name: spec.probe() for name, spec in registry.backends().items()}
    assert probes["acme-trace"].usable
    assert "No module named 'acme_hal.no_such_module'" in probes["acme-broken"].reason
    with pytest.raises(BackendUnavailable, match=r"acme-absent.*no Acme card found; plug one in"):
        registry.get_backend("acme-absent")
    with pytest.raises(BackendUnavailable, match=r"acme-broken.*no_such_module.*repair or uninstall"):
        registry.get_backend("acme-broken")
    with pytest.raises(BackendUnavailable, match="is a int, not a BackendSpec"):
        registry.get_backend("acme-wrong")
    with pytest.raises(ContractError, match=r"unknown backend 'acme'; known: .*acme-trace.*host"):
        registry.get_backend("acme")
    with pytest.raises(ContractError, match="transport 'acme-socket' serves host, not backend 'cuda': add backend=host, or "):
        registry.get_transport("acme-socket", "cuda")


WORDS = """
import numpy as np
import hal

def words(comm, rounds=30, words=64):
    window, q0, q1 = comm.window(words * 8), comm.queue(0), comm.queue(1)
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    bad = 0
    for generation in range(1, rounds + 1):
        data = np.full(words, comm.rank << 32 | generation, np.int64)
        q0.put(window, 0, data, right)
        q0.signal(0, right)
        comm.wait(0, generation, source=left)
        bad += int((window.array.view(np.int64) != (left << 32 | generation)).sum())
        q1.signal(1, left, generation, op="set")
        comm.wait(1, generation, source=right)
    q1.put(window, 0, b"\\0" * 8, right, signal=(2, 7))
    comm.wait(2, 7, source=left)
    q0.quiet(), q1.quiet(right, "source")
    comm.barrier()
    comm.barrier("lsa", complete=False)
    return bad, comm.profile.name
"""


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize("settings", ["backend='acme-trace'", "transport='acme-socket'"])
def test_the_words_work_on_a_strangers_backend_and_transport(run_ranks, settings):
    script = f"{WORDS}\nwith hal.connect({settings}, timeout=60) as comm:\n    print(words(comm))\n"
    if "trace" in settings:
        script += "from acme_hal.trace import calls\nassert calls.count('wait') == 61, calls\n"
    outcome = run_ranks(3, script)
    name = "shm" if "trace" in settings else "verbs-rc"
    assert (outcome.status, outcome.lines) == (0, {r: [f"(0, '{name}')"] for r in range(3)})


EXPERTS = """
import numpy as np
import hal
from hal import reference

def experts(comm):
    spec = dict(num_experts=2 * comm.world_size, top_k=2, hidden=32, max_tokens=8, dtype="float32", layout="expert")
    rng = np.random.default_rng(comm.rank)
    results = []
    ep = comm.expert_parallel(**spec)
    for tokens in (5, 0, 8):
        x = rng.standard_normal((tokens, 32), np.float32)
        topk = np.argsort(rng.random((tokens, spec["num_experts"])), axis=1)[:, :2].astype(np.int64)
        out = ep.dispatch(x, topk, np.ones((tokens, 2), np.float32))
        y = ep.combine(out.x * 2, out.handle)
        results.append([out.x.tobytes(), out.tokens_per_expert.tolist(), y.tobytes(), bool((y == 4 * x).all())])
    return results

def both(comm_shm, comm_other):
    return experts(comm_shm) == experts(comm_other), experts(comm_other)[2][3]
"""


@pytest.mark.usefixtures("third_party")
def test_the_compiled_kernels_run_on_a_transport_written_in_python(run_ranks):
    script = (
        f"{EXPERTS}\nwith hal.connect(timeout=60) as shm, hal.connect(transport='acme-socket', timeout=60) as other:\n"
        "    print(both(shm, other))\n"
    )
    outcome = run_ranks(3, script)
    assert (outcome.status, outcome.lines) == (0, {r: ["(True, True)"] for r in range(3)})


@pytest.mark.usefixtures("third_party")
def test_a_death_is_named_over_a_transport_written_in_python(run_ranks):
    script = (
        "import os, pathlib, time, hal\ncomm = hal.connect(transport='acme-socket', timeout=60)\ncomm.barrier()\n"
        "comm.queue().signal(9, 1)\n"
        "if comm.rank == 1:\n    comm.wait(9, 3)\n    os._exit(0)\n"
        "try:\n    comm.barrier()\nexcept hal.PeerTimeout as error:\n    print(error.rank, error.seconds < 15)\n"
        "try:\n    comm.barrier()\nexcept hal.HalError as error:\n    print('only be closed' in str(error))\n"
        "mark = pathlib.Path(__file__).with_name\nmark(f'done-{comm.rank}').touch()\n"
        "while not (mark('done-0').exists() and mark('done-2').exists()):\n    time.sleep(0.01)\n"
    )
    outcome = run_ranks(3, script)
    assert {rank: outcome.lines[rank] for rank in (0, 2)} == {0: ["1 True", "True"], 2: ["1 True", "True"]}


@pytest.mark.usefixtures("third_party")
def test_a_transport_that_lacks_a_word_says_which(run_ranks):
    script = (
        "from hal_host.transport import Transport\nfrom hal_host._engine import AnyFabric\nimport hal\n"
        "class Half(Transport):\n    def memory(self, window):\n        return bytearray(64)\n"
        "half = Half(0, 1, 1)\nassert AnyFabric(half, 0, 1.0).size == 64\n"
        "try:\n    Transport.quiet(half, 0, -1, 1)\nexcept hal.ContractError as error:\n    print(error)\n"
    )
    assert run_ranks(1, script).text(0) == "this transport does not override Transport.quiet"
