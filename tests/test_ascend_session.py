# SPDX-License-Identifier: Apache-2.0
"""``backend=ascend transport=udma_emulated`` as a session: the words, windows and limits of its own. What every backend
promises is in tests/contract."""

from __future__ import annotations

import ast
import ctypes
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hal_ascend.session import EmulatorOptions

import hal
from hal.errors import CapacityError, ContractError

CONFIG = hal.HalConfig("ascend", "udma_emulated", timeout=60.0)


def test_puts_larger_than_the_staging_and_from_symmetric_memory() -> None:
    def body(comm: hal.Communicator) -> None:
        window, queue = comm.window(12 << 20), comm.queue(1)
        peer = 1 - comm.rank
        data = np.random.default_rng(comm.rank).integers(0, 255, 5 << 20, np.uint8)
        queue.put(window, 0, data, peer, order="strong", signal=(0, 1, "add"))
        comm.wait(0, 1)
        assert (window.array[: 5 << 20] == np.random.default_rng(peer).integers(0, 255, 5 << 20, np.uint8)).all()
        comm.barrier()
        queue.put(window, 6 << 20, window.array[: 5 << 20], peer)  # back, from where it lies
        queue.quiet()
        comm.barrier()
        assert (window.array[6 << 20 : 11 << 20] == data).all()

    hal.spawn(2, body, config=CONFIG)


def test_every_order_and_signal_op() -> None:
    def body(comm: hal.Communicator) -> None:
        window, peer = comm.window(4096), (comm.rank + 1) % comm.world_size
        for n, order in enumerate(("none", "relaxed", "strong")):
            queue = comm.queue(n % 2)
            queue.put(window, 64 * n, np.full(64, n + 1, np.uint8), peer, order=order)
            queue.quiet(scope="remote")
            queue.signal(n, peer, 5, "set")
            queue.signal(n, peer, 2, "add")
            assert comm.wait(n, 7) == 7
            assert (window.array[64 * n : 64 * n + 64] == n + 1).all()
        comm.queue(0).signal(9, comm.rank, 3, "add")  # to itself
        assert comm.wait(9, 3) == comm.read_signal(9) == 3
        comm.barrier()

    hal.spawn(3, body, config=CONFIG)


def test_counters_tell_what_the_engine_did() -> None:
    def body(comm: hal.Communicator) -> dict[str, int]:
        window, before = comm.window(64), comm._session.counters
        comm.queue(0).put(window, 0, np.zeros(64, np.uint8), 1 - comm.rank)
        comm.queue(0).quiet()
        after = comm._session.counters
        comm.barrier()
        return {name: after[name] - before[name] for name in after}

    for counted in hal.spawn(2, body, config=CONFIG):
        assert counted == {"wqes": 1, "cqes": 1, "doorbells": 1, "quiets": 1, "bytes": 64}


def test_a_shape_that_never_fits_the_ring_is_refused_when_it_is_made() -> None:
    def body(comm: hal.Communicator) -> None:
        with pytest.raises(CapacityError, match="lower max_tokens"):
            comm.expert_parallel(
                num_experts=4, top_k=2, hidden=64, max_tokens=8192, layout="expert", completion="strong_signal_no_cqe"
            )

    hal.spawn(2, body, config=CONFIG)


def test_more_queues_than_udma_has_are_refused() -> None:
    with pytest.raises(ContractError, match="30 to each peer at most"):
        hal.connect(CONFIG, queues=31)


def test_ranks_as_processes(tmp_path: Path) -> None:
    script = tmp_path / "layer.py"
    script.write_text("""
import hal, numpy as np
with hal.connect(backend="ascend", transport="udma_emulated") as comm:
    ep = comm.expert_parallel(num_experts=4, top_k=2, hidden=64, max_tokens=8, dtype="float32")
    x = np.full((5, 64), comm.rank + 1, np.float32)
    idx = np.tile(np.array([0, 3]), (5, 1))
    out = ep.dispatch(x, idx)
    y = ep.combine(out.x, out.handle)
    assert (y == 2 * (comm.rank + 1)).all()
    ep.close()
""")
    command = [sys.executable, "-m", "hal.cli", "run", "-n", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


NPU_CALLS = {"device_count": 0, "set_device": 1, "current_stream": 1}
"""What hal_ascend calls of ``torch.npu``, with the number of arguments given."""


def test_no_operator_of_torch_npu_is_called() -> None:
    """It supplies tensors and streams only; none of its operators (``npu_moe_*``) is called, so no schema can drift."""
    import hal_ascend

    sources = "".join(path.read_text() for path in Path(hal_ascend.__file__).parent.glob("*.py"))
    assert not re.findall(r"torch_npu\.\w+|torch\.ops\.npu", sources)
    assert set(re.findall(r"torch\.npu\.(\w+)", sources)) == set(NPU_CALLS)


def test_the_functions_of_torch_npu_take_what_we_give() -> None:
    """Read from its sources, since importing it without CANN fails. In an environment of its own:
    ``pip install --no-deps --target DIR torch_npu``, then ``TORCH_DEVICE_BACKEND_AUTOLOAD=0 PYTHONPATH=DIR pytest`` this."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        pytest.skip("torch_npu is not installed: with it, and without CANN, `import torch` fails")
    package = Path(spec.origin).parent / "npu"
    trees = [ast.parse((package / name).read_text()) for name in ("__init__.py", "utils.py", "streams.py")]
    functions = {node.name: node.args for tree in trees for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name, given in NPU_CALLS.items():
        most = len(functions[name].args)
        assert most - len(functions[name].defaults) <= given <= most, name
    used = {node.attr for node in ast.walk(trees[2]) if isinstance(node, ast.Attribute)}
    assert "npu_stream" in used


def test_a_signals_value_is_kept_until_it_is_copied() -> None:
    """Memory that is free when the value is copied is soon somebody else's, another rank thread's say: signals of 0 came of
    that, one in some thousands. So whoever asks for the copy must hold the value."""

    def body(comm: hal.Communicator) -> None:
        session: Any = comm._session
        copy, held = session._stage, []

        def stage(address: int, nbytes: int) -> int:
            values = [v for v in sys._getframe(1).f_locals.values() if isinstance(v, ctypes.c_uint64)]
            held.append(address in map(ctypes.addressof, values))
            return int(copy(address, nbytes))

        session._stage = stage
        comm.queue(0).signal(3, 1 - comm.rank, 5)
        assert comm.wait(3, 5) == 5
        assert held == [True]

    hal.spawn(2, body, config=CONFIG)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("HAL_UDMA_CORES", "two", "^HAL_UDMA_CORES is 'two'; give an integer$"),
        ("HAL_UDMA_CORES", "0", "^HAL_UDMA_CORES is 0; give at least 1$"),
        ("HAL_UDMA_SQ_DEPTH", "300", "^HAL_UDMA_SQ_DEPTH is 300; give a power of two of at least 256$"),
    ],
)
def test_a_variable_that_makes_no_sense_is_named_alone(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, text: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ContractError, match=text):
        EmulatorOptions.from_environment()
