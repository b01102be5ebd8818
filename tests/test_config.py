# SPDX-License-Identifier: Apache-2.0
"""Settings: what Hydra composes, what is refused and in which words, and HAL inside a user's own Hydra application."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, asdict, fields
from pathlib import Path
from typing import Any

import pytest

from hal.compose import load_config, load_sweep
from hal.config import HalConfig, Settings, TopologyConfig, config_directory, connection_config
from hal.errors import ContractError

GROUPS = ("backend", "transport", "topology", "schedule", "completion", "workload", "checker")


def choices() -> Iterator[tuple[str, str]]:
    for group in GROUPS:
        for path in sorted((config_directory() / "hal" / group).glob("*.yaml")):
            yield group, path.stem


def run_python(code: str, *argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=cwd, text=True, capture_output=True, check=False
    )


def test_the_defaults_of_files_and_dataclasses_agree() -> None:
    assert load_config() == Settings()


@pytest.mark.parametrize(("group", "choice"), list(choices()))
def test_every_choice_sets_every_key_of_its_dataclass(group: str, choice: str) -> None:
    """A key missing from a file could not be overridden on the command line, nor read there."""
    from omegaconf import OmegaConf

    values = OmegaConf.load(config_directory() / "hal" / group / f"{choice}.yaml")
    settings = load_config([f"{group}={choice}"])
    assert set(values) == {item.name for item in fields(getattr(settings, group))}
    assert asdict(getattr(settings, group)) == dict(values)


def test_overrides_reach_the_connection_and_the_expert_parallel_spec() -> None:
    settings = load_config(
        ["backend=cuda", "transport=shm", "topology=two_nodes", "workload=v3_decode", "schedule=latency", "queues=3",
         "completion=strong_last", "layout=expert", "alignment=16", "timeout=2"]
    )  # fmt: skip
    assert settings.connection == HalConfig("cuda", "shm", TopologyConfig(2), queues=3, timeout=2.0)
    spec = settings.expert_parallel
    assert (spec.num_experts, spec.top_k, spec.hidden, spec.max_tokens) == (256, 8, 7168, 128)
    assert (spec.dtype, spec.combine_dtype, spec.scale_dim) == ("float8_e4m3fn", "bfloat16", 56)
    assert (spec.layout, spec.alignment, spec.schedule, spec.completion) == ("expert", 16, "latency", "strong_last")


def test_settings_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        load_config().queues = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("backend=cudda", ["backend=cudda", "ascend, cuda, host"]),
        ("workload=v3", ["workload=v3", "small", "skewed", "v3_prefill", "v3_decode"]),
        ("bakend=cuda", ["'bakend'", "backend", "transport", "timeout"]),
        ("topology.node=2", ["'topology.node'", "topology has: nodes"]),
        ("+colour=red", ["'colour'", "the top level has"]),
        ("queues=two", ["queues", "two", "Integer"]),
        ("queues=0", ["queues is 0", "at least 1"]),
        ("timeout=-1", ["timeout is -1", "above 0"]),
        ("timeout=nan", ["timeout is nan"]),
        ("layout=row", ["layout is 'row'", "rank, expert"]),
        ("workload.top_k=17", ["top_k is 17", "16 experts"]),
        ("workload.scale_block=7", ["scale_block is 7", "256"]),
        ("checker.search=luck", ["'luck'", "exhaustive, delay, pct, happens_before"]),
        ("backend", ["'backend'", "key=value"]),
        ("workload=small,skewed", ["small,skewed", "-m"]),
        ("backend=null", ["backend takes a choice", "ascend, cuda, host", "backend.name"]),
    ],
)
def test_a_wrong_override_is_refused_in_one_line_that_names_the_right_ones(override: str, expected: list[str]) -> None:
    with pytest.raises(ContractError) as caught:
        load_config([override])
    text = str(caught.value)
    assert "\n" not in text
    for part in expected:
        assert part in text


@pytest.mark.parametrize("wrong", ["workload=small", ["workload=small", 3]])
def test_overrides_are_a_list_of_strings(wrong: Any) -> None:
    with pytest.raises(ContractError, match="give a list of strings"):
        load_config(wrong)


@pytest.mark.parametrize("wrong", ["topology=2", "backend=null", "workload={tokens: 4}", "=3"])
def test_a_group_takes_the_name_of_a_choice(wrong: str) -> None:
    with pytest.raises(ContractError) as refused:
        load_config([wrong])
    assert wrong in str(refused.value)
    assert "Config group override" not in str(refused.value)


def test_a_sweep_is_every_combination() -> None:
    runs = load_sweep(["workload=small,v3_decode", "topology.nodes=range(1,3)", "queues=3"])
    assert [chosen for chosen, _ in runs] == [
        ["workload=small", "topology.nodes=1"],
        ["workload=small", "topology.nodes=2"],
        ["workload=v3_decode", "topology.nodes=1"],
        ["workload=v3_decode", "topology.nodes=2"],
    ]
    assert {settings.queues for _, settings in runs} == {3}
    assert runs[3][1].workload.hidden == 7168


def test_a_sweep_over_nothing_is_one_run_and_a_wrong_one_is_refused() -> None:
    assert load_sweep([]) == [([], Settings())]
    with pytest.raises(ContractError, match="choose one of"):
        load_sweep(["workload=small,huge"])
    with pytest.raises(ContractError, match="key=value"):
        load_sweep(["workload"])


def test_connection_config_takes_every_form() -> None:
    from omegaconf import OmegaConf

    expected = HalConfig("cuda", queues=4)
    assert connection_config(expected) is expected
    assert connection_config(load_config(["backend=cuda", "queues=4"])) == expected
    assert connection_config({"backend": "cuda", "queues": 4}) == expected
    assert connection_config(OmegaConf.create({"backend": {"name": "cuda"}, "queues": 4})) == expected
    assert connection_config({"topology": {"nodes": 2}}) == HalConfig(topology=TopologyConfig(2))
    with pytest.raises(ContractError, match=r"unknown setting 'queue'.*queues"):
        connection_config({"queue": 4})
    assert connection_config({"backend": {"name": "cuda"}, "workload": {"tokens": 3}}) == HalConfig("cuda")
    with pytest.raises(ContractError, match=r"topology.node'; known: nodes"):
        connection_config({"topology": {"node": 4}})
    with pytest.raises(ContractError, match=r"backend.nome'; known: name"):
        connection_config({"backend": {"nome": "cuda"}})
    with pytest.raises(ContractError, match="queues is 'two'; it must be an integer"):
        connection_config({"queues": "two"})
    with pytest.raises(ContractError, match="list"):
        connection_config([1])


def test_a_backend_of_another_package_needs_no_file(tmp_path: Path) -> None:
    """An entry point is enough for ``backend=NAME``."""
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hal.backends]\nabacus = stranger:SPEC\n")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from hal.compose import load_config\n"
        "print(load_config(['backend=abacus']).connection.backend)\n"
        "try: load_config(['backend=abacu'])\n"
        "except ValueError as error: print(error)\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "abacus"
    assert "abacus, ascend, cuda, host" in done.stdout


APP = """
import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import getbase
from hal.compose import load_config
from hal.config import connection_config

@hydra.main(config_path="conf", config_name="app", version_base="1.2")
def main(cfg):
    before = (GlobalHydra.instance().hydra, getbase(), HydraConfig.get().job.name)
    print(connection_config(cfg.hal))
    print(load_config(["workload=v3_decode"]).workload.tokens, cfg.model)
    assert (GlobalHydra.instance().hydra, getbase(), HydraConfig.get().job.name) == before

main()
"""


@pytest.fixture
def app(tmp_path: Path) -> Path:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text(
        "defaults:\n  - /hal/backend: cuda\n  - /hal/topology: two_nodes\n  - _self_\nmodel: mine\nhydra:\n  run:\n    dir: .\n"
    )
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


def run_app(app: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "app.py", *argv], cwd=app, text=True, capture_output=True, check=False
    )


def test_a_users_own_hydra_application_reaches_the_groups(app: Path) -> None:
    done = run_app(app)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(HalConfig("cuda", topology=TopologyConfig(2))), "128 mine"]


def test_a_users_own_hydra_application_overrides_the_groups(app: Path) -> None:
    done = run_app(app, "hal/backend=host", "hal.topology.nodes=4", "+hal/transport=shm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(HalConfig("host", "shm", TopologyConfig(4)))
    wrong = run_app(app, "hal/backend=cudda")
    assert wrong.returncode != 0
    assert "Available options in 'hal/backend'" in wrong.stderr


def test_a_users_application_can_take_every_default(app: Path) -> None:
    (app / "conf" / "app.yaml").write_text(
        "defaults:\n  - /hal: default\n  - override /hal/workload: skewed\n  - _self_\n"
        "model: mine\nhydra:\n  run:\n    dir: .\n"
    )
    done = run_app(app)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == str(HalConfig())


def test_a_users_application_connects_with_its_own_config(app: Path) -> None:
    (app / "conf" / "app.yaml").write_text("defaults:\n  - /hal: default\n  - _self_\nhydra:\n  run:\n    dir: .\n")
    (app / "app.py").write_text(
        "import hal, hydra\n"
        "@hydra.main(config_path='conf', config_name='app', version_base='1.3')\n"
        "def main(cfg):\n"
        "    with hal.connect(cfg.hal, timeout=5) as comm:\n"
        "        print(comm.world_size, comm.config.backend, comm.config.timeout)\n"
        "main()\n"
    )
    done = run_app(app)
    assert done.stdout == "1 host 5.0\n", done.stderr


def test_importing_hal_and_its_settings_loads_no_hydra() -> None:
    code = "import sys, hal, hal.compose, hal.config; print({'hydra', 'omegaconf'} & set(sys.modules))"
    done = run_python(code)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
