# SPDX-License-Identifier: Apache-2.0
"""List backends and transports, and whether each works here. `hal doctor` says how to mend one."""

from __future__ import annotations

import argparse

from hal.inventory import inventory
from hal.report import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    del parser  # No options.


def run(args: argparse.Namespace) -> int:
    del args
    rows = [
        (item.name, item.kind, "usable" if item.usable else "no", ", ".join(item.serves) or "-", item.description)
        for item in inventory()
    ]
    print(table(("name", "kind", "here", "works with", "what"), rows, left=5))
    return 0
