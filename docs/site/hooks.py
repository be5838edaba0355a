"""Build steps of the documentation site, called by MkDocs.

Pages from outside of docs and a page for each command are added, links between files of the repository become links
between pages, and the pictures of the gallery are drawn by its own snippets.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from commands import pages
from links import PAGES, for_site
from mkdocs.structure.files import File
from snippets import run

ROOT = Path(__file__).parents[2]


def on_config(config: Any) -> Any:
    """Add the commands' pages to the navigation, behind the API."""
    index = next(number for number, entry in enumerate(config.nav) if "API" in entry)
    config.nav.insert(index, {"Commands": list(pages())})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages from outside, those of commands, and the pictures of the gallery."""
    for page, text in pages().items():
        files.append(File.generated(config, page, content=text))
    for page, path in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for name, content in draw_gallery().items():
        files.append(File.generated(config, f"pictures/{name}", content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links between files links between pages; MkDocs warns of those that lead nowhere."""
    return for_site(markdown, page.file.src_uri, lambda path: f"{config.repo_url or ''}/blob/main/{path}")


def draw_gallery() -> dict[str, bytes]:
    """Run the snippets of the gallery in an empty folder; returns the pictures that they save."""
    os.environ.setdefault("LINUMPY_DEVICE", "cpu")
    matplotlib.use("agg")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run(ROOT / "docs/gallery.md")
        return {path.name: path.read_bytes() for path in sorted(Path("pictures").iterdir())}
