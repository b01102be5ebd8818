# SPDX-License-Identifier: Apache-2.0
"""Backends and transports by name, found by entry point; nothing is imported until it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, TypeVar

from hal.backend import BackendSpec, Probe, TransportSpec
from hal.errors import BackendUnavailable, ContractError

BACKENDS, TRANSPORTS = "hal.backends", "hal.transports"

_Spec = TypeVar("_Spec", BackendSpec, TransportSpec)


def backends() -> dict[str, BackendSpec]:
    """Every registered backend, usable or not. One whose package fails to import has a probe that says so."""
    specs = {}
    for name, entry in _entries(BACKENDS).items():
        try:
            specs[name] = _import(entry, BackendSpec)
        except BackendUnavailable as error:
            specs[name] = BackendSpec(name, _broken(error), _unloadable(error), "", "")
    return specs


def transports(backend: str | None = None) -> dict[str, TransportSpec]:
    """Every registered transport (of ``backend``, if given), usable or not."""
    specs = {}
    for name, entry in _entries(TRANSPORTS).items():
        try:
            specs[name] = _import(entry, TransportSpec)
        except BackendUnavailable as error:
            specs[name] = TransportSpec(name, (), _broken(error), _unloadable(error), "")
    return {name: spec for name, spec in specs.items() if backend is None or backend in spec.backends}


def known_backend(name: str) -> BackendSpec:
    """A registered backend, usable here or not, for what needs no device. ContractError for an unknown name."""
    return _import(_find(BACKENDS, "backend", name), BackendSpec)


def get_backend(name: str, transport: str | None = None) -> BackendSpec:
    """A usable backend, or one whose device ``transport`` emulates. ContractError for an unknown name,
    BackendUnavailable (reason and fix) for an unusable one."""
    spec = known_backend(name)
    if transport is None or not get_transport(transport, name).brings_device:
        _require_usable(name, spec.probe())
    return spec


def get_transport(name: str, backend: str) -> TransportSpec:
    """A usable transport of ``backend``; errors as in :func:`get_backend`."""
    spec = known_transport(name, backend)
    _require_usable(name, spec.probe())
    return spec


def known_transport(name: str, backend: str) -> TransportSpec:
    """A registered transport of ``backend``, usable here or not. ContractError for a name that is unknown or serves others."""
    spec = _import(_find(TRANSPORTS, "transport", name), TransportSpec)
    if backend not in spec.backends:
        known = ", ".join(transports(backend)) or "none"
        raise ContractError(
            f"transport '{name}' serves {', '.join(spec.backends)}, not backend '{backend}': add "
            f"{' or '.join(f'backend={served}' for served in spec.backends)}, or choose a transport of '{backend}': {known}"
        )
    return spec


def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in sorted(entry_points(group=group), key=lambda e: e.name)}


def _find(group: str, kind: str, name: str) -> EntryPoint:
    known = _entries(group)
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean '{close[0]}'?" if close else ""
        raise ContractError(f"unknown {kind} '{name}'; known: {', '.join(known) or 'none'}{hint}")
    return known[name]


def _import(entry: EntryPoint, kind: type[_Spec]) -> _Spec:
    try:
        spec = entry.load()
    except Exception as error:
        fix = "repair or uninstall the package that registers it"
        raise BackendUnavailable(entry.name, f"importing {entry.value} failed: {error!r}", fix) from error
    if not isinstance(spec, kind):
        fix = "point the entry point at the spec"
        raise BackendUnavailable(entry.name, f"{entry.value} is a {type(spec).__name__}, not a {kind.__name__}", fix)
    return spec


def _require_usable(name: str, probe: Probe) -> None:
    if not probe.usable:
        raise BackendUnavailable(name, probe.reason, probe.fix)


def _broken(error: BackendUnavailable) -> Callable[[], Probe]:
    return lambda: Probe(False, error.reason, error.fix)


def _unloadable(error: BackendUnavailable) -> Callable[[], Any]:
    def load() -> NoReturn:
        raise error

    return load
