"""Check NGFF attributes by the schemas of the package ``ome-zarr-models``, where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator, Set
from typing import Any

from linumpy.io.ngff.axes import mappings_in
from linumpy.packages import install_line
from linumpy.verification.findings import Finding
from linumpy.verification.place import NOT_UNDERSTOOD, Place

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


def schema_note() -> str:
    """Return what the schemas do not check, as a sentence for the notes of a verification."""
    if importlib.util.find_spec("ome_zarr_models") is None:
        return f"the schemas of NGFF: ome-zarr-models is not installed ({install_line('verify')})"
    return "the schemas of NGFF 0.1 to 0.3 and 0.6, which ome-zarr-models does not have"


def check_schema(place: Place, told: Set[str]) -> Iterator[Finding]:
    """Check the attributes of a group by their schema.

    - `told`: what findings were about already, which is not told twice.
    """
    version = _version(place)
    kind = next((kind for key, kind in _MODELS.items() if key in place.ome), None)
    if version is None or kind is None or importlib.util.find_spec("ome_zarr_models") is None:
        return
    problems = [text for parts, text in _problems(version, *kind, place.ome) if not _is_told(parts, told)]
    if problems:
        more = f"; and {len(problems) - _MAX_LISTED} more" if len(problems) > _MAX_LISTED else ""
        what = f"against the schema of NGFF {version[1]}.{version[2:]}: {'; '.join(problems[:_MAX_LISTED])}{more}"
        yield place.tell("schema", what)[1]


def _version(place: Place) -> str | None:
    """Return the name of the subpackage for the version of a group; None if there is none."""
    if "ome" in place.attributes:
        return "v05" if place.ome.get("version") == "0.5" else None
    parts = [place.ome.get(key) for key in ("plate", "well", "image-label")] + mappings_in(place.ome, "multiscales")
    versions = {part.get("version") for part in parts if isinstance(part, dict)}
    return "v04" if versions and versions <= {"0.4", None} else None


def _problems(version: str, module: str, name: str, attributes: Any) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the place of each violation in the attributes, and a text with the place."""
    model = getattr(importlib.import_module(f"ome_zarr_models.{version}.{module}"), name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.model_validate(attributes)
    except NOT_UNDERSTOOD as error:
        for problem in getattr(error, "errors", list)():  # another exception is a mistake of the schema itself
            parts = tuple(map(str, problem["loc"]))
            yield parts, f"{'.'.join(parts)}: {problem['msg']}"


def _is_told(parts: tuple[str, ...], told: Set[str]) -> bool:
    """Return whether a violation is at a place that a finding was about."""
    if not parts or parts[0] != "multiscales" or "multiscales" in told:
        return bool(parts) and parts[0] in told
    part = parts[2] if len(parts) > 2 else "axes"
    return part in told or (part != "version" and "datasets" in told)
