#!/usr/bin/env python3
"""Run a command of linumpy: "linum resample" is "linum-resample", with the same arguments.

linum COMMAND --help describes a command. In bash and in zsh (after `autoload bashcompinit && bashcompinit`),
eval "$(linum --completion)" completes commands, options and paths.
"""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import linumpy_scripts
from linumpy import cli

_PREFIX = "linum_"


def _commands() -> dict[str, str]:
    """Return the module of each command: the modules beside this one whose names begin with ``linum_``."""
    names = (module.name for module in pkgutil.iter_modules(linumpy_scripts.__path__))
    return {
        name.removeprefix(_PREFIX).replace("_", "-"): f"{linumpy_scripts.__name__}.{name}"
        for name in names
        if name.startswith(_PREFIX)
    }


def _table(commands: dict[str, str]) -> str:
    """Return a table with a line for each command: its name, and the first line of its module."""
    width = max(map(len, commands)) + 2
    first_lines = ((importlib.import_module(module).__doc__ or "").partition("\n")[0] for module in commands.values())
    rows = (f"  {name:<{width}}{line}\n" for name, line in zip(commands, first_lines, strict=True))
    return "commands:\n" + "".join(rows)


def _completion(commands: dict[str, str]) -> str:
    """Return a script for bash that completes commands and their options; all other words are paths."""
    options = {}
    for name, module in commands.items():
        # A command whose options belong to its subcommands has no parser of its own.
        main = importlib.import_module(module).main
        actions = main.parser()._actions if isinstance(main, cli.Command) else []
        options[name] = " ".join(option for action in actions for option in action.option_strings)
    cases = "".join(f'        linum-{name}) options="{words}" ;;\n' for name, words in options.items())
    programs = " ".join(f"linum-{name}" for name in options)
    return f"""_linum() {{
    local program="${{COMP_WORDS[0]##*/}}" word="${{COMP_WORDS[COMP_CWORD]}}" options=""
    if [[ $program == linum ]]; then
        if ((COMP_CWORD == 1)); then
            COMPREPLY=($(compgen -W "{" ".join(options)} --help --version --completion" -- "$word"))
            return
        fi
        program="linum-${{COMP_WORDS[1]}}"
    fi
    case $program in
{cases}    esac
    if [[ $word == -* ]]; then COMPREPLY=($(compgen -W "$options" -- "$word")); else COMPREPLY=(); fi
}}
complete -o default -F _linum linum {programs}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; the exit code is that of the command."""
    words, commands = sys.argv[1:] if arguments is None else list(arguments), _commands()
    if words == ["--completion"]:
        print(_completion(commands), end="")
        return 0
    # The parser of the command takes the arguments after its name. Only the help needs the modules of all commands.
    epilog = _table(commands) if words[:1] in (["-h"], ["--help"]) else ""
    usage = "linum [-h] [--version] [--completion] COMMAND ..."
    parser = cli.Parser("linum", usage=usage, description=__doc__, epilog=epilog)
    parser.add_argument("command", choices=commands, metavar="COMMAND", help="One of those below.")
    code: int = importlib.import_module(commands[parser.parse_args(words[:1]).command]).main(words[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
