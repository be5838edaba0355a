"""What API pages add to docstrings: links, and the options that records declare.

Sphinx's roles, such as ``:func:`read_zarr```, become links to the page that documents the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
import typing
from typing import Any

import griffe

from linumpy.declared import Declared, Help

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`(?:([\w.]+) <)?([~.]*)([\w.]+)>?`")


class Roles(griffe.Extension):
    """Rewrites docstrings when griffe has read them."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Rewrite the docstring of an object."""
        if obj.docstring is not None:
            obj.docstring.value = _ROLE.sub(lambda match: _link(obj, *match.groups()), obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        """List the options that a record declares, with their helps."""
        record = None
        with contextlib.suppress(ImportError):  # of a package that is not installed, such as MONAI
            record = getattr(importlib.import_module(cls.module.path), cls.name, None)
        if cls.docstring is None or not isinstance(record, type) or not issubclass(record, Declared):
            return
        rows = []
        for name, declaration in typing.get_type_hints(record, include_extras=True).items():
            for text in (part for part in typing.get_args(declaration) if isinstance(part, Help)):
                rows.append(f"{name} : {_type_of(declaration)}\n    {text.text.partition(' [')[0]}")
        if rows and dataclasses.is_dataclass(record):
            cls.docstring.value += "\n\n" + "\n".join(["Attributes", "----------", *rows])


def _type_of(declaration: Any) -> str:
    """Return a type without its annotations."""
    while typing.get_origin(declaration) is typing.Annotated:
        declaration = typing.get_args(declaration)[0]
    if typing.get_origin(declaration) is typing.Literal:
        return f"{{{', '.join(map(repr, typing.get_args(declaration)))}}}"
    parts = [part for part in typing.get_args(declaration) if part is not type(None)]
    if parts and type(None) in typing.get_args(declaration):
        return f"{_type_of(parts[0])} or None"
    return getattr(declaration, "__name__", str(declaration))


def _link(obj: griffe.Object, title: str | None, prefix: str, name: str) -> str:
    shown = title or (name.rpartition(".")[2] if "~" in prefix else name)
    with contextlib.suppress(griffe.NameResolutionError):
        name = obj.resolve(name)
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
