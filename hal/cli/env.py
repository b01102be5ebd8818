# SPDX-License-Identifier: Apache-2.0
"""Print the versions that a bug report needs."""

from __future__ import annotations

import argparse
import json

from hal.versions import show_versions, versions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON; null = not installed")


def run(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps(versions(), indent=2))
    else:
        show_versions()
    return 0
