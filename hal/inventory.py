# SPDX-License-Identifier: Apache-2.0
"""Every registered backend and transport with what its probe says. Loads no driver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from hal.backend import Examination, Probe, Problem
from hal.registry import backends, transports


@dataclass(frozen=True)
class Entry:
    """One backend or transport. ``reason`` and ``fix`` are empty when it is usable."""

    name: str
    kind: str
    """``backend`` or ``transport``."""
    serves: tuple[str, ...]
    """A backend's transports, the default first; a transport's backends."""
    description: str
    usable: bool
    reason: str
    fix: str

    def as_dict(self) -> dict[str, Any]:
        """The stable keys of ``hal doctor --json``."""
        return {**asdict(self), "serves": list(self.serves)}


def inventory() -> list[Entry]:
    """Backends, then transports, each by name."""
    entries = []
    for name, backend in sorted(backends().items()):
        others = sorted(item for item, spec in transports().items() if name in spec.backends)
        serves = tuple(sorted(others, key=lambda item: item != backend.default_transport))
        entries.append(_entry(name, "backend", serves, backend.description, backend.probe))
    for name, transport in sorted(transports().items()):
        entries.append(_entry(name, "transport", transport.backends, transport.description, transport.probe))
    return entries


def examinations() -> dict[str, Examination]:
    """What each backend that looks at the machine found, by its name."""
    found = {}
    for name, backend in sorted(backends().items()):
        if backend.examine is None:
            continue
        try:
            examination = backend.examine()
        except Exception as error:  # As for probes.
            text = f"its look at the machine failed: {type(error).__name__}: {error}"
            examination = Examination((), (Problem(text, "mend or remove that package"),), {})
        if examination is not None:
            found[name] = examination
    return found


def _entry(name: str, kind: str, serves: tuple[str, ...], description: str, probe: Callable[[], Probe]) -> Entry:
    try:
        found = probe()
    except Exception as error:  # Another package's probe must not hide the other backends.
        found = Probe(False, f"its probe failed: {type(error).__name__}: {error}", "mend or remove that package")
    return Entry(name, kind, serves, description, found.usable, found.reason, found.fix)
