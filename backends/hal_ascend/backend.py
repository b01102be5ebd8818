# SPDX-License-Identifier: Apache-2.0
"""The loaded Ascend backend: a session over the transport that the settings name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hal.registry import get_transport

if TYPE_CHECKING:
    from hal.backend import Session
    from hal.bootstrap import Bootstrap
    from hal.config import HalConfig


class AscendBackend:
    """:class:`hal.backend.Backend`."""

    name = "ascend"

    def connect(self, config: HalConfig, bootstrap: Bootstrap) -> Session:
        session: Session = get_transport(config.transport or "aclshmem", "ascend").load()(config, bootstrap)
        return session
