"""What API pages add to docstrings: links, and the options that records declare.

Sphinx's roles, such as ``:func:`read_zarr```, become links to the page that documents the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from typing import Any

import griffe

from linumpy.cli.options import Option, options_of
from linumpy.declared import Declared

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
        is_record = dataclasses.is_dataclass(record) and isinstance(record, type) and issubclass(record, Declared)
        if cls.docstring is None or not is_record:
            return
        rows = [
            f"{option.settings['dest']} : {_type_of(option)}\n    {_help_of(option)}" for option in options_of(record)
        ]
        if rows:
            cls.docstring.value += "\n\n" + "\n".join(["Attributes", "----------", *rows])


def _type_of(option: Option) -> str:
    """Return the type of an option, and whether it may be None."""
    settings = option.settings
    kind = "bool" if "action" in settings else getattr(settings.get("type"), "__name__", "")
    if "choices" in settings:
        kind = f"{{{', '.join(map(repr, settings['choices']))}}}"
    return f"{kind} or None" if settings.get("default", ...) is None else kind


def _help_of(option: Option) -> str:
    """Return the help of an option without its default, which the signature has."""
    text: str = option.settings["help"]
    return text.partition(" [")[0].replace("%%", "%")


def _link(obj: griffe.Object, title: str | None, prefix: str, name: str) -> str:
    shown = title or (name.rpartition(".")[2] if "~" in prefix else name)
    with contextlib.suppress(griffe.NameResolutionError):
        name = obj.resolve(name)
    return f'<autoref identifier="{name}" optional><code>{shown}</code></autoref>'
