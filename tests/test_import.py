# SPDX-License-Identifier: Apache-2.0
"""`import hal` is light, and every public name exists, is typed and says what it is."""

import ast
import importlib
import inspect
import json
import subprocess
import sys

import pytest

import hal

HEAVY = ("torch", "jax", "cupy", "hydra", "omegaconf", "numpy", "ml_dtypes", "hal_host", "hal_cuda", "hal_ascend")
# Times the import alone: interpreter start and site packages are the machine's, not hal's. Processor time: a busy machine
# may run something else meanwhile.
LOOK = f"""
import time, sys, json
start = time.process_time()
import hal
seconds = time.process_time() - start
loaded = sorted(name for name in sys.modules if name.split(".")[0] in {HEAVY!r})
print(json.dumps([seconds, loaded]))
"""


def test_import_is_light_and_fast():
    seen = [
        json.loads(subprocess.run([sys.executable, "-c", LOOK], capture_output=True, check=True, text=True).stdout)
        for _ in range(5)
    ]
    assert [loaded for _, loaded in seen] == [[]] * 5
    assert min(seconds for seconds, _ in seen) < 0.150


@pytest.mark.parametrize("name", [n for n in hal.__all__ if n != "__version__"])
def test_public_name_exists_and_has_a_docstring(name):
    value = getattr(hal, name)
    assert inspect.getdoc(value), f"hal.{name} has no docstring"
    if inspect.isclass(value) and value.__module__.startswith("hal"):
        for member, function in vars(value).items():
            if not member.startswith("_") and (inspect.isfunction(function) or isinstance(function, property)):
                assert inspect.getdoc(function), f"hal.{name}.{member} has no docstring"


def test_type_checkers_see_what_the_interpreter_gives():
    tree = ast.parse(inspect.getsource(hal))
    told = {
        alias.asname: node.module
        for block in ast.walk(tree)
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told == hal._HOME_OF


def test_dir_and_unknown_names():
    assert set(hal.__all__) <= set(dir(hal))
    with pytest.raises(AttributeError, match=r"no attribute 'conect'; it has .*connect"):
        hal.conect  # noqa: B018


def test_torchs_part_is_found_by_name():
    pytest.importorskip("torch", reason="torch is not installed: pip install 'moe-hal[torch]'")
    assert importlib.import_module("hal.torch") is hal.torch
