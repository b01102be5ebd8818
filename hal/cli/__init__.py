# SPDX-License-Identifier: Apache-2.0
"""The ``hal`` command.

A command is one module of this package with ``add_arguments(parser)`` and ``run(args) -> int`` (the exit status), and one
line in :data:`COMMANDS`. Only the module of the command that was asked for is imported. Settings are Hydra overrides
(``key=value``) behind the options; see :mod:`hal.compose`.

Exit status: 0 done; 1 the work failed or its check did; 2 the user asked for something that cannot be done, with one line
on stderr. ``HAL_DEBUG=1`` shows the traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from hal.errors import BackendUnavailable, CapacityError, ContractError, HalError

COMMANDS = {
    "demo": "run a mixture-of-experts layer stack over a text, and check it",
    "run": "start N ranks of a program on this machine",
    "bench": "measure dispatch, combine, put or signal, and check the results",
    "litmus": "run litmus programs of the ordering contract, in the model or on a transport",
    "check": "check the shipped kernels against the ordering contract",
    "size": "explain the symmetric memory that a workload needs",
    "doctor": "say which backends and transports work here, and how to mend the others",
    "backends": "list backends and transports",
    "env": "print the versions that a bug report needs",
}


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, and exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} ({self.prog} --help shows what there is)\n")


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that takes an integer not below ``least``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no integer: give at least {least}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value}: give at least {least}")
        return value

    return read


def positive(text: str) -> float:
    """The type of an option that takes a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}': give a number above 0")
    return value


def output_file(text: str) -> Path:
    """The type of an option that names a file to write: refused before the work that fills it, not after."""
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write '{text}': give the name of a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"cannot write {path}: {path.parent} is not a folder")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}: permission denied")
    return path


def add_layout(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    """How many ranks on how many hosts; one pair of options for every command that starts or sizes ranks."""
    parser.add_argument(
        "-n", "--ranks", type=int, required=required, metavar="N", help="ranks on this machine (ranks=N)"
    )
    parser.add_argument(
        "--hosts", "--nodes", type=int, metavar="H", help="lay them out as H equal hosts (topology.nodes=H; default 1)"
    )


def layout_overrides(args: argparse.Namespace) -> list[str]:
    """The overrides, with ``-n`` and ``--hosts`` as the settings that they stand for."""
    words = list(args.overrides)
    for option, value, setting in (("-n", args.ranks, "ranks"), ("--hosts", args.hosts, "topology.nodes")):
        group = setting.partition(".")[0]
        same = [word for word in words if word.lstrip("+").partition("=")[0] in (setting, group)]
        if value is not None and same:
            raise ContractError(f"{option} {value} and {same[0]} say the same thing; give one of them")
        if value is not None:
            words.append(f"{setting}={value}")
    return words


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """The trailing ``key=value`` arguments."""
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings, for example workload=v3_decode topology.nodes=2"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``hal COMMAND …`` and return its exit status."""
    _prepare_output()
    return _guarded(list(sys.argv[1:] if argv is None else argv))


def _prepare_output() -> None:
    """A terminal without UTF-8 gets escapes in place of what it cannot show; a closed stream swallows what it is told."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (as long as the process)
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _command(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_usage())
        return 0 if words else 2
    if words[0] == "--version":
        from hal import __version__

        print(f"hal {__version__}")
        return 0
    if words[0] not in COMMANDS:
        print(f"hal: no command '{words[0]}'; there are: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return _run(words[0], words[1:])


def _guarded(words: list[str]) -> int:
    """Run one command; a mistake of the user is one line, not a traceback."""
    name = words[0] if words else ""
    try:
        try:
            return _command(words)
        finally:
            sys.stdout.flush()  # here, where a reader that went away is no error
    except (ContractError, CapacityError, BackendUnavailable) as error:
        return _complain(name, error, 2)
    except HalError as error:
        return _complain(name, error, 1)
    except BrokenPipeError:  # `hal … | head`
        _mute()
        return 1
    except OSError as error:  # a full disk, no more descriptors, …
        _mute()
        return _complain(name, error, 1)
    except KeyboardInterrupt:
        return 130


def _run(name: str, words: list[str]) -> int:
    module = importlib.import_module(f"hal.cli.{name}")
    parser = _Parser(prog=f"hal {name}", description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    module.add_arguments(parser)
    takes_rest = any(action.nargs == argparse.REMAINDER for action in parser._actions)
    # Intermixed: `hal bench dispatch workload=small --json out.json layout=expert` reads as a person means it.
    args = parser.parse_args(words) if takes_rest else parser.parse_intermixed_args(words)
    status: int = module.run(args)
    return status


def _mute() -> None:
    """What is left in the buffer cannot be written at the end of the process either."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def _complain(name: str, error: Exception, status: int) -> int:
    if os.environ.get("HAL_DEBUG") == "1":
        raise error
    print(f"hal {name}: {' '.join(str(error).split())}", file=sys.stderr)
    return status


def _usage() -> str:
    lines = ["usage: hal COMMAND [options] [key=value …]", ""]
    lines += [f"  {name:<9} {text}" for name, text in COMMANDS.items()]
    lines += ["", "hal COMMAND --help says more. Settings: docs/configuration.md."]
    return "\n".join(lines)
