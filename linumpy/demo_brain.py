"""A demonstration of the pipeline: all stages on a synthetic brain, and the error of each stage against the truth.

In: a folder for the results, a size, a device. Out: mosaic grids and the results of all stages in the folder, and a
:class:`BrainDemoResult`. Errors: those of :func:`run_brain_demo`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from linumpy import device as devices
from linumpy import kernel_cache
from linumpy.arrays import DeviceName
from linumpy.device import Device
from linumpy.io.output.checks import check_parent, refuse_url
from linumpy.kernel_cache import Compiled
from linumpy.pipeline.runner import Summary, run_pipeline
from linumpy.pipeline.settings import Focal, Positions, Resample, Run, Surface
from linumpy.progress import progress_bar
from linumpy.testing.brain import BrainSpec, Faults, draw_brain
from linumpy.testing.brain_errors import StageError, errors_of
from linumpy.testing.brain_files import write_brain
from linumpy.warm_up import warming_up

#: Tiles of brains whose mosaic grids have 54 MiB, 0.9 GiB and 49 GiB.
BRAINS = {
    "small": BrainSpec(
        slices=4, tiles=(4, 4), tile_shape=(48, 96, 96), spacing_um=(10.0, 7.5, 7.5), interval_um=200.0, dtype="uint16",
        faults=Faults(galvo=12),
    ),
    "medium": BrainSpec(
        slices=8, tiles=(3, 3), tile_shape=(100, 256, 256), spacing_um=(5.0, 5.0, 5.0), interval_um=250.0,
        dtype="uint16",
    ),
    "large": BrainSpec(
        slices=20, tiles=(5, 5), tile_shape=(200, 512, 512), spacing_um=(3.0, 5.0, 5.0), interval_um=300.0,
        dtype="uint16",
    ),
}  # fmt: skip
#: The brain that is drawn by default: 45 % of its slices are tissue, the rest is agarose.
SEED = 4


def drawn_brain(size: str, seed: int = SEED) -> BrainSpec:
    """Return the brain of a size and seed: of each three seeds one is full, one partial and one severe.

    The kinds are those of :func:`linumpy.testing.brain_spec.draw_brain`.
    """
    return draw_brain(seed, ("full", "partial", "severe")[seed % 3], geometry=BRAINS[size])


@dataclass(frozen=True)
class BrainDemoResult:
    """Results of the demonstration.

    - `nbytes`: bytes of the mosaic grids.
    - `made_seconds`: seconds that making the mosaic grids took.
    - `summary`: stages of the pipeline, with their times.
    - `errors`: errors of the stages whose truth is known; a stage may have several.
    - `compiled`: kernels that this process compiled; others may have been compiled beside it (:mod:`linumpy.warm_up`).
    """

    device: Device
    nbytes: int
    made_seconds: float
    summary: Summary
    errors: tuple[StageError, ...]
    compiled: Compiled

    def __str__(self) -> str:
        total = sum(stage.wall_seconds for stage in self.summary.stages)
        slices = len(self.summary.slices)
        rows = [f"{'stage':<12}{'seconds':>9}{'s a slice':>11}  error against the truth"]
        for stage in self.summary.stages:
            lines = []
            for error in (error for error in self.errors if error.stage == stage.name):
                nothing = "" if error.nothing is None else f"({error.nothing:.3g} without the stage)"
                lines.append(" ".join(f"{error.what}: {error.value:.3g} {error.unit} {nothing}".split()))
            first, *rest = lines or [""]
            rows.append(
                f"{stage.name:<12}{stage.wall_seconds:>9.2f}{stage.wall_seconds / slices:>11.3f}  {first}".rstrip()
            )
            rows += [f"{'':<34}{line}" for line in rest]
        rows += [
            f"{'all':<12}{total:>9.2f}{total / slices:>11.3f}",
            "",
            f"device     {self.device} ({self.device.reason})",
            f"brain      {slices} slices, {self.nbytes / 2**30:.3g} GiB, made in {self.made_seconds:.1f} s",
        ]
        if self.device.is_cuda:
            rows.append(f"kernels    {self.compiled}")
        return "\n".join(rows)


def run_brain_demo(
    out: str | Path = "linum-demo",
    size: str = "small",
    device: DeviceName | None = None,
    *,
    overwrite: bool = False,
    seed: int = SEED,
) -> BrainDemoResult:
    """Run the demonstration.

    Parameters
    ----------
    out : str or Path
        Folder in which ``brain`` and ``results`` are written; it is made if its parent folder exists.
    size : {"small", "medium", "large"}
        Mosaic grids of 54 MiB, 0.9 GiB or 49 GiB.
    device, overwrite
        As for :func:`linumpy.demo.run_demo`.
    seed : int
        The brain and all of its faults are drawn by it (:func:`drawn_brain`).

    Raises
    ------
    ValueError, FileExistsError, FileNotFoundError, GpuUnavailableError
        As :func:`linumpy.demo.run_demo`.
    """
    if size not in BRAINS:
        raise ValueError(f"size {size!r} is unknown: choose one of {', '.join(BRAINS)}")
    used, spec, out = devices.resolve(device), drawn_brain(size, seed), Path(out)
    refuse_url(out)
    check_parent(out)
    out.mkdir(exist_ok=True)
    run, begin = run_of(spec, out), time.perf_counter()
    with warming_up(run, spec.dtype) if used.is_cuda else nullcontext():
        with progress_bar("making", spec.nbytes) as progress:
            write_brain(spec, out / "brain", device=used.kind, overwrite=overwrite, progress=progress)
        made_seconds = time.perf_counter() - begin
        summary = run_pipeline(run, device=used.kind, overwrite=overwrite)
    return BrainDemoResult(
        used, spec.nbytes, made_seconds, summary, errors_of(spec, out / "results"), kernel_cache.compiled()
    )


def run_of(spec: BrainSpec, out: Path) -> Run:
    """Return the run of the pipeline on the brain in ``out / "brain"``.

    The resolution is 10 µm. Other options are the defaults, except for those that depend on the size of the tiles and
    for the definition of the surface, which is the edge, as in the truth.
    """
    mean_width = max(3, min(15, spec.tile_shape[1] // 10))
    options = {
        "resample": Resample(10.0),
        "focal": Focal(s_xy=mean_width),
        "surface": Surface(s_xy=mean_width, definition="edge"),
        "positions": Positions(spec.overlap),
    }
    return Run(
        mosaics=out / "brain" / "mosaics",
        output=out / "results",
        slicing_interval_mm=spec.interval_um / 1e3,
        shifts=out / "brain" / "shifts.csv",
        options=options,
    )
