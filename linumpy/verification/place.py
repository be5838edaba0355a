"""A group whose metadata are checked, and what is told about it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import zarr

from linumpy.errors import SourceError
from linumpy.io.metadata import REFUSALS, Node, open_optional
from linumpy.io.ngff.collection import ome_attributes
from linumpy.verification.findings import Finding, Harm

#: Exceptions for documents that cannot be interpreted. Those of the storage are others.
NOT_UNDERSTOOD = (*REFUSALS, IndexError, RecursionError)

REFUSED = "Programs that follow NGFF may refuse the group, or read other axes, sizes or members than are meant."
WRITE_AGAIN = "Correct the attributes of the group, or let the program that wrote them write them again."

Told = tuple[str, Finding]
"""What a finding is about, as a part of the attributes such as ``"axes"``; and the finding."""


def is_of_document(error: BaseException) -> bool:
    """Return whether an exception is about what a document says, and not about reading it."""
    return not isinstance(error, SourceError) or isinstance(error.__cause__, REFUSALS)


@dataclass(frozen=True)
class Place:
    """A group, and its path below the source."""

    group: zarr.Group
    path: str

    @cached_property
    def attributes(self) -> Mapping[str, Any]:
        """All attributes of the group."""
        return self.group.attrs.asdict()

    @cached_property
    def ome(self) -> Mapping[str, Any]:
        """The attributes of NGFF."""
        return ome_attributes(self.group)

    def tell(
        self, topic: str, what: str, effect: str = REFUSED, advice: str = WRITE_AGAIN, harm: Harm = "metadata",
        below: str = "", count: int = 1,
    ) -> Told:  # fmt: skip
        """Make a finding about the group, or about what is at a path below."""
        return topic, Finding(harm, f"{self.path}/{below}".strip("/"), what, effect, advice, count)

    def open(self, path: str) -> tuple[Node | None, str]:
        """Open a member of the group; return it, or None and why it cannot be opened."""
        try:
            node = open_optional(self.group, path)
        except NOT_UNDERSTOOD as error:
            if not is_of_document(error):
                raise
            return None, str(error) or type(error).__name__
        return node, "" if node is not None else "nothing is stored there"

    def opened(self, path: str, kind: type[Node], named: str, topic: str) -> Generator[Told, None, Node | None]:
        """Open a member that the metadata name, as what `named` says; tell why if it is not of its kind."""
        node, reason = self.open(path)
        if isinstance(node, kind):
            return node
        reason = reason or f"there is a {type(node).__name__.lower()}, not a {kind.__name__.lower()}"
        effect = f"The {named} cannot be read."
        advice = "Copy it again from where the image came from, or remove it from the metadata."
        yield self.tell(topic, f"the metadata name the {named} {path!r}: {reason}", effect, advice, "missing", path)
        return None
