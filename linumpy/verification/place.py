"""A group whose NGFF attributes are checked: findings about it, and its check by the schemas of ome-zarr-models."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Generator, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import zarr

from linumpy.errors import SourceError
from linumpy.io.metadata import REFUSALS, Node, open_optional
from linumpy.io.ngff.axes import mappings_in
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.packages import install_line
from linumpy.verification.findings import Finding, Harm

#: Exceptions for documents that cannot be interpreted. Those of the storage are others.
NOT_UNDERSTOOD = (*REFUSALS, IndexError, RecursionError)

REFUSED = "Programs that follow NGFF may refuse the group, or read other axes, sizes or members than are meant."
WRITE_AGAIN = "Correct the attributes of the group, or let the program that wrote them write them again."

#: Attributes that have a schema of their own, its module and its class; the first one that a group has counts.
_MODELS = {
    "image-label": ("image_label", "ImageLabelAttrs"),
    "multiscales": ("image", "ImageAttrs"),
    "plate": ("hcs", "HCSAttrs"),
    "well": ("well", "WellAttrs"),
    "bioformats2raw.layout": ("bioformats2raw", "BioFormats2RawAttrs"),
    "labels": ("labels", "LabelsAttrs"),
}
_MAX_LISTED = 3

Told = tuple[str, Finding]
"""What a finding is about, as a part of the attributes such as ``"axes"``; and the finding."""


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

    def guarded(self, findings: Iterator[Told], topic: str) -> Iterator[Told]:
        """Yield findings, and one more if the metadata cannot be interpreted."""
        try:
            yield from findings
        except NOT_UNDERSTOOD as error:
            yield self.tell(topic, f"the metadata cannot be interpreted: {reason_of(error)}")

    def open(self, path: str) -> tuple[Node | None, str]:
        """Open a member of the group; return it, or None and why it cannot be opened."""
        try:
            node = open_optional(self.group, path)
        except NOT_UNDERSTOOD as error:
            return None, reason_of(error)
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


def reason_of(error: BaseException) -> str:
    """Return why a document cannot be interpreted; raise an error of the storage again."""
    if isinstance(error, SourceError) and not isinstance(error.__cause__, REFUSALS):
        raise error
    return str(error) if isinstance(error, SourceError) else f"{type(error).__name__}: {error}"


def readable_image(group: zarr.Group) -> OmeZarrImage | None:
    """Open an image; None if it cannot be opened, which the check of the image tells."""
    try:
        return open_image(group)
    except NOT_UNDERSTOOD:
        return None


def shown(value: object) -> str:
    """Return a value of a document for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def listed(texts: list[str]) -> str:
    """Return the first few of some texts, and how many more there are."""
    more = f"; and {len(texts) - _MAX_LISTED:,} more" if len(texts) > _MAX_LISTED else ""
    return f"{'; '.join(texts[:_MAX_LISTED])}{more}"


def schema_note() -> str:
    """Return that the schemas are not checked since their package is missing; empty if it is installed."""
    if importlib.util.find_spec("ome_zarr_models") is not None:
        return ""
    return f"the schemas of NGFF 0.4 and 0.5: ome-zarr-models is not installed ({install_line('verify')})"


def check_schema(place: Place, told: Set[str]) -> Iterator[Finding]:
    """Check the attributes of a group of NGFF 0.4 or 0.5 by their schema.

    - `told`: what findings were about already, which is not told twice.
    """
    parts = [place.ome.get(key) for key in ("plate", "well", "image-label")] + mappings_in(place.ome, "multiscales")
    versions = {str(part.get("version")) for part in parts if isinstance(part, Mapping)}
    is_below_ome = "ome" in place.attributes
    is_known = place.ome.get("version") == "0.5" if is_below_ome else versions and versions <= {"0.4", "None"}
    kind = next((kind for key, kind in _MODELS.items() if key in place.ome), None)
    if not is_known or kind is None or schema_note():
        return
    version = "0.5" if is_below_ome else "0.4"
    model = getattr(importlib.import_module(f"ome_zarr_models.v{version.replace('.', '')}.{kind[0]}"), kind[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.model_validate(place.ome)
    except NOT_UNDERSTOOD as error:
        # An exception without a list of errors is a mistake of the schema itself.
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in getattr(error, "errors", list)()
            if not _is_told([str(part) for part in problem["loc"]], told)
        ]
        if problems:
            yield place.tell("schema", f"against the schema of NGFF {version}: {listed(problems)}")[1]


def _is_told(parts: list[str], told: Set[str]) -> bool:
    """Return whether there is a finding already about the part of the attributes that violates the schema."""
    if not parts or parts[0] != "multiscales" or "multiscales" in told:
        return bool(parts) and parts[0] in told
    part = parts[2] if len(parts) > 2 else "axes"
    return part in told or (part != "version" and "datasets" in told)
