#!/usr/bin/env python3
"""Run a command of linumpy: "linum resample" is "linum-resample", with the same arguments.

linum COMMAND --help describes a command.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import linumpy_scripts
from linumpy import cli

_PREFIX = "linum_"


def _commands() -> dict[str, str]:
    """Return the module of each subcommand: those beside this one whose names begin with ``linum_``."""
    names = (module.name for module in pkgutil.iter_modules(linumpy_scripts.__path__))
    return {
        name.removeprefix(_PREFIX).replace("_", "-"): f"{linumpy_scripts.__name__}.{name}"
        for name in names
        if name.startswith(_PREFIX)
    }


def _table(commands: dict[str, str]) -> str:
    """Return a line for each command: its name, and the first line of its module."""
    width = max(map(len, commands)) + 2
    first_lines = ((importlib.import_module(module).__doc__ or "").partition("\n")[0] for module in commands.values())
    rows = (f"  {name:<{width}}{line}\n" for name, line in zip(commands, first_lines, strict=True))
    return "commands:\n" + "".join(rows)


def _build_arg_parser(commands: dict[str, str], epilog: str) -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    usage = "linum [-h] [--version] COMMAND ..."
    parser = cli.Parser("linum", usage=usage, description=__doc__, epilog=epilog, formatter_class=form)
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="One of those below.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; the exit code is that of the command."""
    words, commands = sys.argv[1:] if arguments is None else list(arguments), _commands()
    # The command's own parser takes what follows its name. Only the help needs the modules of all commands.
    epilog = _table(commands) if words[:1] in (["-h"], ["--help"]) else ""
    parsed = _build_arg_parser(commands, epilog).parse_args(words[:1])
    code: int = importlib.import_module(commands[parsed.command]).main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
