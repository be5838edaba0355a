"""A page for each command, made from its parser."""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from linumpy.cli import Command

ROOT = Path(__file__).parents[2]
#: The default at the end of a help text.
_DEFAULT = re.compile(r"\s*\[([^\[\]]*)\]$")


def commands() -> Iterator[Command]:
    """Yield the commands that an installation has, but those that only hand their arguments on to others."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    for target in scripts.values():
        main: Any = importlib.import_module(target.partition(":")[0]).main
        if isinstance(main, Command):
            yield main


def pages() -> dict[str, str]:
    """Return the pages of all commands by their paths on the site."""
    named = sorted(commands(), key=lambda command: command.name)
    return {f"commands/{command.name}.md": page_of(command.parser()) for command in named}


def page_of(parser: argparse.ArgumentParser) -> str:
    """Return the page of a command: what it does, examples, and a table of its arguments."""
    description, _, examples = (parser.description or "").strip().partition("\nFor example:\n")
    summary, _, more = description.partition("\n\n")
    lines = [f"# {parser.prog}", "", _escaped(summary), ""]
    for paragraph in filter(None, more.strip("\n").split("\n\n")):
        is_file = all(line.startswith("  ") for line in paragraph.splitlines())  # such as the example of a table
        lines += ["```text", *(line[2:] for line in paragraph.splitlines()), "```", ""] if is_file else []
        lines += [] if is_file else [_escaped(paragraph), ""]
    if examples:
        lines += ["```bash", *(line.strip() for line in examples.strip().splitlines()), "```", ""]
    lines += ["| argument | meaning | default |", "|---|---|---|"]
    shown = [action for action in parser._actions if action.dest not in ("help", "version")]
    return "\n".join([*lines, *(_row(action, parser) for action in shown), ""])


def _row(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    """Return the row of an argument in the table."""
    formatter = parser._get_formatter()
    text = formatter._expand_help(action) if action.help else ""
    default = _DEFAULT.search(text)
    metavar = action.dest.upper() if action.option_strings else action.dest
    values = "" if action.nargs == 0 else formatter._format_args(action, metavar)
    words = [", ".join(f"`{name}`" for name in action.option_strings), f"`{values}`" if values else ""]
    cells = (" ".join(filter(None, words)).replace("|", "\\|"), _escaped(_DEFAULT.sub("", text)))
    return f"| {' | '.join(cells)} | {_escaped(default[1]) if default else ''} |"


def _escaped(text: str) -> str:
    """Escape what Markdown would take as markup, and set options as code."""
    return re.sub(r"(?<![\w`-])(--?[a-z][a-z-]*)", r"`\1`", re.sub(r"([*_<>|\[\]])", r"\\\1", text))
