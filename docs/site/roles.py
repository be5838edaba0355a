"""Sphinx's roles in docstrings, such as ``:func:`read_zarr```, become links to the page that documents the name."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`(?:([\w.]+) <)?([~.]*)([\w.]+)>?`")


class Roles(griffe.Extension):
    """Rewrites docstrings when griffe has read them."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(obj, *match.groups()), obj.docstring.value)


def _link(obj: griffe.Object, title: str | None, prefix: str, name: str) -> str:
    shown = title or (name.rpartition(".")[2] if "~" in prefix else name)
    with contextlib.suppress(griffe.NameResolutionError):
        name = obj.resolve(name)
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
