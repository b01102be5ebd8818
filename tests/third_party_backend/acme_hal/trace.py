# SPDX-License-Identifier: Apache-2.0
"""A backend that wraps another and records what is called."""

from __future__ import annotations

from typing import Any

from hal.backend import Session
from hal.bootstrap import Bootstrap
from hal.config import HalConfig
from hal.registry import get_backend

calls: list[str] = []


class TraceBackend:
    name = "acme-trace"

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Any:
        return TraceSession(get_backend("host").load().connect(config, bootstrap))


class TraceSession:
    def __init__(self, inner: Session) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._inner, name)
        if not callable(attribute):
            return attribute

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return attribute(*args, **kwargs)

        return call
