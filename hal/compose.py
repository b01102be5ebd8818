# SPDX-License-Identifier: Apache-2.0
"""Settings from Hydra's groups and overrides. Hydra is imported on first use, never by ``import hal``."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from hal.config import Settings, config_directory
from hal.errors import ContractError

_ROOT = "default"
_PLUGINS = (
    "backend",
    "transport",
)  # Groups whose names other packages may add, by entry point hal.backends, hal.transports.
_hydra_lock = threading.Lock()  # Hydra's state is global to the process, and ranks may be threads.


def load_config(overrides: Sequence[str] = ()) -> Settings:
    """Compose settings: ``load_config(["backend=cuda", "workload=v3_decode", "topology.nodes=2"])``.

    Works inside a running Hydra application and leaves its state alone. Raises :class:`~hal.errors.ContractError` for an
    unknown group, choice or key (naming the right ones) and for a value of the wrong type.
    """
    if isinstance(overrides, str) or not all(isinstance(item, str) for item in overrides):
        raise ContractError(f'overrides is {overrides!r}: give a list of strings, for example ["workload=v3_decode"]')
    return _validated(_compose([_installed_plugin(item) for item in overrides]))


def load_sweep(overrides: Sequence[str]) -> list[tuple[list[str], Settings]]:
    """Hydra's multirun: every combination of ``key=a,b`` choices, each with the swept overrides that made it."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    fixed: list[str] = []
    swept: list[list[str]] = []
    try:
        for parsed in OverridesParser.create().parse_overrides(list(overrides)):
            if parsed.is_sweep_override():
                key = parsed.get_key_element()
                swept.append([f"{key}={value}" for value in parsed.sweep_string_iterator()])
            else:
                fixed.append(str(parsed.input_line))
    except HydraException as error:
        raise _explained(error) from error
    return [(list(chosen), load_config([*fixed, *chosen])) for chosen in itertools.product(*swept)]


def _compose(overrides: list[str]) -> Any:
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    with _hydra_lock, _own_hydra():
        try:
            _check_choices(overrides)
            with initialize_config_dir(str(config_directory() / "hal"), job_name="hal", version_base="1.3"):
                return compose(_ROOT, overrides=overrides)
        except (HydraException, ValueError) as error:
            raise _explained(error) from error


def _check_choices(overrides: list[str]) -> None:
    """A group takes the name of a choice; what Hydra says of anything else names neither."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    for parsed in OverridesParser.create().parse_overrides(overrides):
        key = parsed.get_key_element()
        if not key:
            raise ContractError(f"{parsed.input_line}: write key=value, for example workload=v3_decode")
        if is_dataclass(get_type_hints(Settings).get(key)) and not parsed.is_delete() and not parsed.is_sweep_override():
            value = parsed.value()
            if not isinstance(value, str):
                kind: Any = get_type_hints(Settings)[key]
                known = ", ".join(f"{key}.{item.name}" for item in fields(kind))
                raise ContractError(
                    f"{parsed.input_line}: {key} takes a choice, one of: {', '.join(_choices(key))}; its fields are {known}"
                )


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Set aside the state of a Hydra application that may be running, and give it back."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.version import VersionBase

    running, base = GlobalHydra.instance(), VersionBase.instance()
    hydra, version = running.hydra, base.version_base
    running.hydra = None
    try:
        yield
    finally:
        running.hydra, base.version_base = hydra, version
        GlobalHydra.set_instance(running)


def _validated(values: Any) -> Settings:
    """Values merged into the dataclasses: unknown keys and wrong types are refused, missing ones take the default."""
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

    schema = OmegaConf.structured(Settings)
    for node in (schema, *(schema[key] for key in schema)):
        if isinstance(node, DictConfig):
            OmegaConf.set_readonly(node, False)  # Frozen dataclasses make read-only nodes, which refuse a merge.
    try:
        merged = OmegaConf.merge(schema, values)
        settings = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise _unknown_key(str(error.full_key)) from error
    except OmegaConfBaseException as error:
        raise ContractError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, Settings)
    return settings


def _installed_plugin(override: str) -> str:
    """``backend=NAME`` for a backend or transport that another package registered: it needs no file in ``configs/hal``."""
    group, _, name = override.partition("=")
    if group not in _PLUGINS or (config_directory() / "hal" / group / f"{name}.yaml").is_file():
        return override
    return f"{group}.name={name}" if name in entry_points(group=f"hal.{group}s").names else override


def _explained(error: Exception) -> ContractError:
    """Hydra's error in one line that names the right choices."""
    from hydra.errors import MissingConfigException, OverrideParseException

    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        return ContractError(f"{group}={name}: no such choice; choose one of: {', '.join(_choices(group))}")
    if isinstance(error, OverrideParseException):
        return ContractError(
            f"cannot read override '{error.override}'; write key=value, for example workload=v3_decode"
        )
    if key := re.match(r"Could not (?:override|delete from config)[^']*'([^']+)'", str(error)):
        return _unknown_key(key.group(1))
    if "Ambiguous value" in str(error):
        return ContractError(f"{str(error).splitlines()[0]}: a list of values is a sweep, which needs `hal bench -m`")
    return ContractError(" ".join(str(error).split()))


def _unknown_key(full_key: str) -> ContractError:
    parent, _, _ = full_key.rpartition(".")
    kind: Any = Settings
    for part in filter(None, parent.split(".")):
        kind = get_type_hints(kind).get(part)
        if not is_dataclass(kind):
            return ContractError(f"unknown setting '{full_key}': '{parent}' has no keys")
    known = ", ".join(item.name for item in fields(kind))
    return ContractError(f"unknown setting '{full_key}'; {parent or 'the top level'} has: {known}")


def _choices(group: str) -> list[str]:
    names = {path.stem for path in (config_directory() / "hal" / group).glob("*.yaml")}
    if group in _PLUGINS:
        names |= entry_points(group=f"hal.{group}s").names
    return sorted(names)
