"""Results as a GPU would give them, made up, for what shows results."""

import dataclasses
from pathlib import Path

import numpy as np

from linumpy.benchmark import machine
from linumpy.benchmark.cases import Case
from linumpy.benchmark.paths import standard_paths
from linumpy.benchmark.runner import CaseResult, PathResult, Settings
from linumpy.benchmark.specs import SUITES

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
    here = machine.look(Path())
    compat = machine.Gds("compat", "compat mode, not GDS (kvikio's own word)")
    return dataclasses.replace(here, gpu="NVIDIA H200, 140 GiB", why_no_gpu="", gds=compat)


def gpu_results(cold=False, rates=RATES):
    return tuple(_result(spec, cold, rates) for spec in SUITES["raw"])


def _result(spec, cold, rates):
    case = Case(
        spec.name, Path("/data/a.zarr"), spec.shape, spec.chunks, np.dtype(spec.dtype), spec.shards, "none", 3,
        (Path("/data/a.zarr/zarr.json"), Path("/data/a.zarr/c/0")), spec.nbytes, spec.reach, "random",
    )  # fmt: skip
    made = []
    for path in standard_paths(gpu=True):
        rate = rates.get(path.name)
        verdict, note = "ok", "by kvikio" if path.name.startswith("linumpy") else ""
        if rate is None:
            verdict = "WRONG" if path.name.startswith("linumpy") else "cannot run"
            note = "voxel (0, 5, 7) is 0.0, not 17.0; " + "and so on " * 12
        seconds = () if rate is None else tuple(case.nbytes / 2**30 / rate * factor for factor in (1.0, 0.9, 1.2))
        made.append(PathResult(path.name, path.title, path.is_limit, verdict, note, seconds, case.nbytes))
    return CaseResult(case, Settings(3, cold, gpu=True), tuple(made))
