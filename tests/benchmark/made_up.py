"""Results as a GPU would give them, made up, for what shows results."""

import dataclasses
from pathlib import Path

import numpy as np

from linumpy.benchmark import machine
from linumpy.benchmark.cases import Case, Entry, ready
from linumpy.benchmark.runner import CaseResult, Settings, run_case
from linumpy.benchmark.shared.stores import StoredArray
from linumpy.benchmark.suites.reading import SUITES, read_case

#: GiB/s of each standard path; a path without a number is WRONG or cannot run.
RATES = {
    "flat": 36.0,
    "h2d": 48.0,
    "linumpy-auto": 32.0,
    "zarr-gpu": 4.0,
    "zarr-gpu-gds": 0.5,
    "zarr-numpy": 1.9,
    "tensorstore": 2.5,
}


def gpu_machine():
    here = machine.describe_machine(Path())
    compat = machine.GdsStatus("compat", "compat mode, not GDS (kvikio's own word)")
    return dataclasses.replace(here, gpu="NVIDIA H200, 140 GiB", why_no_gpu="", gds=compat)


def gpu_results(cold=False, rates=RATES):
    return tuple(_result(spec, cold, rates) for spec in SUITES["raw"])


def _result(spec, cold, rates):
    stored = StoredArray(
        spec.name, Path("/data/a.zarr"), spec.shape, spec.chunks, np.dtype(spec.dtype), spec.shards, "none", 3,
        (Path("/data/a.zarr/zarr.json"), Path("/data/a.zarr/c/0")), spec.nbytes, "random",
    )  # fmt: skip
    case = read_case(stored, spec.mark, gpu=True, cold=cold)
    timed = result_of(case, {name: stored.nbytes / 2**30 / rate for name, rate in rates.items()}, Settings(3, cold))
    note = "voxel (0, 5, 7) is 0.0, not 17.0; " + "and so on " * 12
    entries = tuple(
        one
        if one.seconds
        else dataclasses.replace(one, verdict="WRONG" if one.role == "ours" else one.verdict, note=note)
        for one in timed.entries
    )
    return dataclasses.replace(timed, entries=entries)


def result_of(case: Case, seconds: dict[str, float], settings: Settings, earlier=()) -> CaseResult:
    """Have the runner make a result of times that are made up: of each entry the one given, 0.9 and 1.2 times it.

    An entry without a time cannot run.
    """
    from unittest.mock import patch

    from linumpy.benchmark import runner

    entries, queue = [], {}
    for entry in case.entries:
        one = seconds.get(entry.name)

        def call(name=entry.name, one=one):
            if one is None:
                raise runner.CannotRunError("no time is made up for it")
            return name

        queue[entry.name] = [] if one is None else [one * entry.share * factor for factor in (1.0, 0.9, 1.2)]
        entries.append(Entry(entry.name, entry.title, ready(call), entry.role, 0, share=entry.share))
    case = dataclasses.replace(case, entries=tuple(entries), files=(), clock="wall")
    with (
        patch.object(runner, "_wall_seconds", lambda call: queue[call()].pop(0)),
        patch.object(runner.machine, "cached_fraction", lambda files: 0.0),
    ):
        return run_case(case, settings, earlier=earlier)
