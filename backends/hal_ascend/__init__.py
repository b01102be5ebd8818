# SPDX-License-Identifier: Apache-2.0
"""Ascend NPUs through UDMA queue pairs."""

from hal.backend import BackendSpec
from hal_ascend.probe import _load, _probe

SPEC = BackendSpec(
    name="ascend", probe=_probe, load=_load, default_transport="aclshmem", description="Ascend NPUs, UDMA queue pairs"
)
