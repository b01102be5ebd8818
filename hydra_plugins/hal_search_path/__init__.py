# SPDX-License-Identifier: Apache-2.0
"""Puts HAL's configuration groups on Hydra's search path, so that any Hydra app can say ``defaults: [/hal/backend: cuda]``."""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hal.config import config_directory


class HalSearchPath(SearchPathPlugin):
    """Appended, so that an app's own files win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="hal", path=f"file://{config_directory()}")
