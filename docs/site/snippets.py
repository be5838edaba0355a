"""Snippets of the documentation's pages, run as they stand: by the tests, and for the pictures of the gallery.

A page's Python snippets share their names, and its bash snippets, which are `linum-*` commands, run between them. A
line ``<!-- not run: REASON -->`` above a snippet, which readers do not see, leaves it out.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Why a snippet is not run.
REASONS = ("minutes", "needs SLURM", "the network", "without torch", "without monai")
_FENCE = re.compile(r"^(?:<!-- not run: (?P<reason>.*?) -->\n)?```(?P<language>.*)\n(?P<code>(?:.*\n)*?)```$", re.M)


@dataclass(frozen=True)
class Snippet:
    """A snippet of a page.

    Attributes
    ----------
    name : str
        Page and line, for messages.
    language : str
        ``"python"``, ``"bash"``, or another one, which is not run.
    code : str
        Its lines.
    reason : str or None
        Why it is not run, one of `REASONS`; those without a package are run where it is there.
    """

    name: str
    language: str
    code: str
    reason: str | None


def snippets(page: Path) -> Iterator[Snippet]:
    """Find the snippets of a page."""
    text = page.read_text(encoding="utf-8")
    for match in _FENCE.finditer(text):
        name = f"{page.name}:{text.count(chr(10), 0, match.start('code')) + 1}"
        reason = match["reason"]
        package = (reason or "").partition("without ")[2]
        is_there = bool(package) and importlib.util.find_spec(package) is not None
        yield Snippet(name, match["language"], match["code"], None if is_there else reason)


def run(page: Path, *, without: str | None = None) -> dict[str, Any]:
    """Run the snippets of a page in the working folder; returns the names that its Python leaves.

    Parameters
    ----------
    page : Path
        The page.
    without : str, optional
        Snippets with this text are left out.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for snippet in snippets(page):
        if snippet.reason is not None or (without is not None and without in snippet.code):
            continue
        if snippet.language == "python":
            exec(compile(snippet.code, snippet.name, "exec"), names)
        elif snippet.language == "bash":
            for line in snippet.code.replace("\\\n", " ").splitlines():
                _run_command(shlex.split(line, comments=True), snippet.name)
    return names


def _run_command(words: list[str], name: str) -> None:
    if not words:
        return
    if words[0] != "linum" and not words[0].startswith("linum-"):
        raise ValueError(f"{name}: {words[0]} is no command of linumpy: say above the snippet why it is not run")
    command = importlib.import_module(f"linumpy_scripts.{words[0].replace('-', '_')}")
    try:
        status = command.main(words[1:])
    except SystemExit as stop:  # --help
        status = stop.code
    if status:
        raise RuntimeError(f"{name}: {shlex.join(words)} ended with {status}")
