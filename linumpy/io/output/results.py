"""Results of a stage as a JSON file: its numbers, and what a user should know of them, in one form for all stages.

At the end of the object are ``warnings`` (a list of sentences) and ``left_out`` (the reason why the stage left the data
as they were; empty if the data were changed).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linumpy.io.output.files import replacing

#: A value of parsed JSON.
JSON = Any


def write_result(
    path: str | Path,
    content: Mapping[str, JSON],
    *,
    warnings: Iterable[str] = (),
    left_out: str = "",
    overwrite: bool = False,
) -> None:
    """Write the result of a stage. NaN and infinities, which JSON does not have, are written as null."""
    document = {**content, "warnings": list(warnings), "left_out": left_out}
    text = json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)
    with replacing(path, overwrite=overwrite) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def read_result(path: str | Path) -> dict[str, JSON]:
    """Read a file of :func:`write_result`; ``ValueError`` if it is no JSON object."""
    document = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")
    return document


def notes_of(document: Mapping[str, JSON]) -> tuple[tuple[str, ...], str]:
    """Return the warnings of a result, and why its stage left the data as they were; no notes of other types."""
    warnings, reason = document.get("warnings"), document.get("left_out")
    lines = [line for line in warnings if isinstance(line, str)] if isinstance(warnings, list) else []
    return tuple(lines), reason if isinstance(reason, str) else ""


def _finite(value: JSON) -> JSON:
    """Replace NaN and infinities by None, also inside of objects and lists."""
    if isinstance(value, Mapping):
        return {key: _finite(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(member) for member in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
