# SPDX-License-Identifier: Apache-2.0
"""Start N ranks of a program on this machine: hal run -n 4 [--hosts 2] [--backend cuda] script.py arguments…

Each rank is a process with the variables that hal.connect() reads. A word that ends in .py runs under this Python;
anything else is run as a program. The exit status is that of the first rank that failed; it ends the others, unless
--keep-going says that they can do without it (on_peer_loss=mask). --backend is what hal.connect() uses when the program
names none; with --hosts it also prepares what that backend needs to take one machine for several hosts (backend cuda:
NCCL's software NIC), and says what it set.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from hal.cli import add_layout
from hal.config import check_layout
from hal.errors import ContractError
from hal.hosts import arrange


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layout(parser, required=True)
    parser.add_argument("--backend", metavar="NAME", help="for hal.connect() without one, and for --hosts")
    parser.add_argument("--transport", metavar="NAME", help="with --backend: this transport of it")
    parser.add_argument("--keep-going", action="store_true", help="a rank that fails does not end the others")
    parser.add_argument("program", nargs=argparse.REMAINDER, help="script.py or a program, and its arguments")


def run(args: argparse.Namespace) -> int:
    if args.program[:1] == ["--"]:  # "what follows is the program", as other launchers have it
        del args.program[0]
    if not args.program:
        raise ContractError("say what to run: hal run -n 4 script.py")
    if args.transport is not None and args.backend is None:
        raise ContractError(f"--transport {args.transport} needs the backend that it serves; add --backend NAME")
    hosts = 1 if args.hosts is None else args.hosts
    check_layout(args.ranks, hosts)
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

    layout = arrange(hosts, args.ranks, args.backend, args.transport)
    for line in layout.describe():
        print(f"# {line}", file=sys.stderr)
    return launch(args.ranks, argv, nodes=hosts, environment=layout.environment, keep_going=args.keep_going)
