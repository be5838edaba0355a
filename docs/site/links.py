"""Links between files of the repository, and the pages that the site makes of these files."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable

#: Pages of the site whose source is not in docs.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "gds.md": "shell_scripts/server_setup/README.md",
    "nextflow.md": "workflows/README.md",
}
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(#[^)\s]+)?\)")


def source_of(page: str) -> str:
    """Return the file of the repository of which a page is made."""
    return PAGES.get(page, f"docs/{page}")


def page_of(source: str) -> str | None:
    """Return the page, or the file of the site, that is made of a file of the repository; None if there is none."""
    outside = {path: page for page, path in PAGES.items()}
    return outside.get(source) or (source.removeprefix("docs/") if source.startswith("docs/") else None)


def links(text: str, source: str) -> list[tuple[str, str]]:
    """Find the links of a file to other files; returns their paths in the repository and their anchors, or ``""``."""
    return [(_resolve(match[1], source), (match[2] or "")[1:]) for match in _LINK.finditer(text)]


def for_site(text: str, page: str, elsewhere: Callable[[str], str]) -> str:
    """Make the links of a file links between pages; `elsewhere` gives those to files that the site does not have."""
    source = source_of(page)

    def link(match: re.Match[str]) -> str:
        path = _resolve(match[1], source)
        target = page if path == source else page_of(path)
        here = posixpath.dirname(page) or "."
        url = elsewhere(path) if target is None else posixpath.relpath(target, here)
        return f"]({url if match[1] else ''}{match[2] or ''})"

    return _LINK.sub(link, text)


def _resolve(link: str, source: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link)) if link else source
