# SPDX-License-Identifier: Apache-2.0
"""The loaded Ascend backend: a session over the transport that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hal.errors import BackendUnavailable
from hal.registry import get_transport
from hal_ascend.probe import probe_emulator

if TYPE_CHECKING:
    from hal.backend import Session
    from hal.bootstrap import Bootstrap
    from hal.checker.rounds import Report
    from hal.config import ExpertParallelSpec, HalConfig
    from hal.sizing import Part


class AscendBackend:
    """:class:`hal.backend.Backend`."""

    name = "ascend"

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Session:
        session: Session = get_transport(config.transport or "aclshmem", "ascend").load()(config, bootstrap)
        return session

    def buffer_parts(self, spec: ExpertParallelSpec, ranks: int, nodes: int, transport: str | None) -> list[Part]:
        """See :func:`hal.sizing.buffer_parts`; the same on the emulator and on an NPU."""
        _require_engine()
        from hal_ascend.engine import buffer_parts

        return buffer_parts(spec, ranks, nodes)

    def check_kernels(self, spec: ExpertParallelSpec, ranks: int, nodes: int, **options: Any) -> Report:
        """:func:`hal_ascend.check.check`."""
        _require_engine()
        from hal_ascend.check import check

        return check(spec, ranks, nodes, **options)


def _require_engine() -> None:
    """What runs on CPUs here needs the extension module."""
    probe = probe_emulator()
    if not probe.usable:
        raise BackendUnavailable("ascend", probe.reason, probe.fix)
