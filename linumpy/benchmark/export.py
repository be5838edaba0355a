"""Results as one JSON document, so that another run, or another machine, can be set beside them.

The document's ``schema`` is 1. Times are in seconds, sizes in bytes, rates in GiB of decoded bytes per second.
Whatever was not measured is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from linumpy.benchmark.cases import Case
from linumpy.benchmark.machine import Machine
from linumpy.benchmark.runner import CaseResult, PathResult, Settings
from linumpy.benchmark.specs import REACH_OF
from linumpy.io.files import replacing

SCHEMA = 1
#: What the numbers of a document are, said in it: it is read without this source.
UNITS = "times in seconds, sizes in bytes, rates in GiB of decoded bytes per second; null was not measured"


def document(
    results: Sequence[CaseResult], machine: Machine, settings: Settings, command: str, date: str
) -> dict[str, Any]:
    """Put everything that was measured, and on what, into plain dicts and lists.

    Parameters
    ----------
    results : sequence of CaseResult
        The cases.
    machine : Machine
        What they ran on.
    settings : Settings
        How they ran.
    command : str
        The command line.
    date : str
        ISO 8601.
    """
    hardware = ("gpu", "why_no_gpu", "cpu", "cores", "memory_bytes", "file_system")
    described = asdict(machine)
    return {
        "schema": SCHEMA,
        "units": UNITS,
        "date": date,
        "command": command,
        "hardware": {key: described[key] for key in hardware},
        "versions": dict(machine.versions),
        "gds": {"mode": machine.gds.mode, "how": machine.gds.how, "warning": machine.gds.warning},
        "settings": {
            "runs": settings.runs,
            "cache": "cold" if settings.cold else "warm",
            "gpu": settings.gpu,
            "kvikio_threads": machine.kvikio_threads,
            "task_bytes": machine.task_bytes,
        },
        "cases": [_case(result) for result in results],
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write the document, readable by people too."""
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path, overwrite=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _case(result: CaseResult) -> dict[str, Any]:
    return {
        **_described(result.case),
        "reach": {
            "value": result.case.reach,
            "of": REACH_OF[result.case.reach_of],
            "got": result.got,
            "met": result.reached,
        },
        "paths": [_path(result, path) for path in result.paths],
    }


def _described(case: Case) -> dict[str, Any]:
    return {
        "name": case.name,
        "path": str(case.path),
        "shape": list(case.shape),
        "region": None if case.region is None else [list(bounds) for bounds in case.region],
        "chunks": list(case.chunks),
        "shards": None if case.shards is None else list(case.shards),
        "dtype": str(case.dtype),
        "codecs": case.codecs,
        "zarr_format": case.zarr_format,
        "data": case.data,
        "decoded_bytes": case.nbytes,
        "stored_bytes": case.stored_bytes,
        "ratio": case.ratio if math.isfinite(case.ratio) else None,
        "chunk_files": case.chunk_files,
    }


def _path(result: CaseResult, path: PathResult) -> dict[str, Any]:
    return {
        "name": path.name,
        "title": path.title,
        "is_limit": path.is_limit,
        "verdict": path.verdict,
        "note": path.note,
        "seconds": list(path.seconds),
        "median_s": path.median,
        "min_s": min(path.seconds, default=None),
        "max_s": max(path.seconds, default=None),
        "gib_per_s": path.rate,
        "ratio_to_flat": result.ratio(path, "flat"),
        "ratio_to_zarr_gpu": result.ratio(path, "zarr-gpu"),
    }
