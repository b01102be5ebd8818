# SPDX-License-Identifier: Apache-2.0
"""Start N ranks of a program on this machine: hal run -n 4 script.py arguments…

Each rank is a process with the variables that hal.connect() reads. A word that ends in .py runs under this Python;
anything else is run as a program. The exit status is that of the first rank that failed; it ends the others, unless
--keep-going says that they can do without it (on_peer_loss=mask).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from hal.errors import ContractError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", "--ranks", type=int, required=True, help="ranks to start")
    parser.add_argument("--nodes", type=int, default=1, help="lay the ranks out as this many hosts (default 1)")
    parser.add_argument("--keep-going", action="store_true", help="a rank that fails does not end the others")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py or a program, and its arguments")


def run(args: argparse.Namespace) -> int:
    if not args.program:
        raise ContractError("say what to run: hal run -n 4 script.py")
    if args.ranks < 1 or args.nodes < 1 or args.ranks % args.nodes:
        raise ContractError(
            f"{args.ranks} ranks cannot be laid out as {args.nodes} equal nodes; --nodes must divide -n"
        )
    program = Path(args.program[0])
    if program.suffix == ".py":
        if not program.is_file():
            raise ContractError(f"no such script: {program}")
        argv = [sys.executable, *args.program]
    elif shutil.which(args.program[0]) is None:
        raise ContractError(f"no such program: {args.program[0]}")
    else:
        argv = args.program
    from hal.launch import run as launch

    return launch(args.ranks, argv, nodes=args.nodes, keep_going=args.keep_going)
