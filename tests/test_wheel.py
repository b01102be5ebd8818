# SPDX-License-Identifier: Apache-2.0
"""The wheel holds everything an installed HAL needs, and works from there, away from the source tree."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.slow

LOOK = """
import sys
sys.path[:0] = {paths!r}
import hal
from hal.compose import load_config
from hal.config import config_directory
from hal.demo.text import read_text
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
import hal_host
assert hal.__file__.startswith({target!r}), hal.__file__
assert str(config_directory()).startswith({target!r}), config_directory()
assert load_config(["workload=v3_decode"]).workload.hidden == 7168
assert read_text(None)[1].lstrip().startswith("Apache License")
assert "HalSearchPath" in [plugin.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)]
assert hal_host.SPEC.probe().usable, hal_host.SPEC.probe()
with hal.connect(backend="cuda", transport="gin_emulated") as comm:
    assert comm.expert_parallel(num_experts=2, top_k=1, hidden=16, max_tokens=4, dtype="float32").buffer_bytes
print("ok")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    # A build folder of its own: the editable install's must stay as it is. It is kept, so that only changes are compiled.
    settings = ["-C", f"build-dir={ROOT / 'build' / 'wheel-test'}"]
    done = subprocess.run(
        [*command, *settings, str(ROOT)], env={**os.environ, "PATH": path}, text=True, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.timeout(600)
def test_the_wheel_holds_configs_types_plug_in_and_headers(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {f"hal/configs/{path.relative_to(ROOT / 'configs')}" for path in (ROOT / "configs").rglob("*.yaml")}
    headers = {f"hal/{path.relative_to(ROOT / 'hal')}" for path in (ROOT / "hal" / "include").rglob("*.hpp")}
    assert sources
    assert headers
    assert not (sources | headers | {"hal/py.typed", "hydra_plugins/hal_search_path/__init__.py"}) - names
    assert "hydra_plugins/__init__.py" not in names  # The namespace is shared with other distributions.
    assert {"hal_host/__init__.py", "hal_cuda/probe.py", "hal_ascend/probe.py"} <= names
    assert any(name.startswith("hal_host/_engine.") for name in names)
    assert "hal_cuda/lib/libhal_cuda_emulated.so" in names
    assert {f"hal_cuda/kernels/include/{name}" for name in ("hal_cuda.h", "machine.cuh")} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "hal", "hal_host", "hal_cuda", "hal_ascend", "hydra_plugins", next(n for n in names if "dist-info" in n).split("/")[0]
    }  # fmt: skip


@pytest.mark.timeout(600)
def test_the_wheel_works_away_from_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    others = [path for path in sys.path if path.endswith("site-packages")]
    code = LOOK.format(paths=[str(target), *others], target=str(target))
    # -S: without `site`, the editable install of this environment is not seen.
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=tmp_path, text=True, capture_output=True, check=False)
    assert done.stdout == "ok\n", done.stderr
