"""A demonstration: make an OCT mosaic, read it, find the tissue surface, resample, write, and compare with the truth.

In: a folder for the results, a size, a device. Out: OME-Zarr images and pictures in the folder, and a
:class:`DemoResult`. On a GPU, the volume stays in its memory between reading and writing. Errors: those of
:func:`run_demo`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from linumpy import device as devices
from linumpy.arrays import Array, DeviceName
from linumpy.device import Device, to_host
from linumpy.geometry.interface import find_tissue_interface
from linumpy.gpu.interpolation import resample_volume
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.ome import open_image
from linumpy.io.output.checks import check_parent, check_target, refuse_url
from linumpy.io.output.files import check_file
from linumpy.mosaic.io.figures import draw_depth_map, draw_section
from linumpy.pictures import save
from linumpy.plan.read import format_shape
from linumpy.progress import progress_bar
from linumpy.testing import synthetic
from linumpy.write.writer import write_omezarr

#: Width of the lateral mean before the surface is detected, in µm.
_SMOOTH_UM = 50.0


@dataclass(frozen=True)
class Stage:
    """One stage of the demonstration.

    - `nbytes`: bytes that were processed, for a rate; None for a stage without a rate.
    """

    name: str
    seconds: float
    nbytes: int | None


@dataclass(frozen=True)
class DemoResult:
    """Results of the demonstration.

    - `read_by`: the reader that read the mosaic, as :class:`~linumpy.gpu.read.report.ReadReport` names it.
    - `shape`, `spacing_um`: shape of the resampled volume, and its voxel spacing in µm.
    - `error_voxels`, `bias_voxels`: median absolute error, and median error, of the surface against the truth, in
      voxels of the mosaic along Z.
    - `error_um`: the median absolute error in µm.
    - `outputs`: the written images and pictures.
    """

    device: Device
    read_by: str
    shape: tuple[int, ...]
    spacing_um: tuple[float, ...]
    error_voxels: float
    bias_voxels: float
    error_um: float
    stages: tuple[Stage, ...]
    outputs: tuple[Path, ...]

    def __str__(self) -> str:
        total = sum(stage.seconds for stage in self.stages)
        rows = [f"{'stage':<34}{'seconds':>9}{'share':>8}{'GiB/s':>9}"]
        for stage in (*self.stages, Stage("all", total, None)):
            rate = "" if stage.nbytes is None else f"{stage.nbytes / 2**30 / max(stage.seconds, 1e-9):.2f}"
            rows.append(f"{stage.name:<34}{stage.seconds:>9.3f}{stage.seconds / total:>8.0%}{rate:>9}")
        rows += [
            "",
            f"device     {self.device} ({self.device.reason})",
            f"read by    {self.read_by}",
            f"resampled  {format_shape(self.shape)} voxels of {' × '.join(f'{step:g}' for step in self.spacing_um)} µm",
            f"surface    median absolute error {self.error_voxels:.2f} voxels, {self.error_um:.1f} µm; "
            f"bias {self.bias_voxels:+.2f} voxels",
            "written    " + "\n           ".join(map(str, self.outputs)),
        ]
        return "\n".join(rows)


@contextmanager
def _timed(stages: list[Stage], name: str, nbytes: int | None = None) -> Iterator[None]:
    """Time a stage, which ends when its kernels have ended, and append it."""
    begin = time.perf_counter()
    yield
    devices.synchronize()
    stages.append(Stage(name, time.perf_counter() - begin, nbytes))


def run_demo(
    out: str | Path = "linum-demo", size: str = "small", device: DeviceName | None = None, *, overwrite: bool = False
) -> DemoResult:
    """Run the demo.

    Parameters
    ----------
    out : str or Path
        Folder for the results; it is made if its parent folder exists.
    size : {"small", "medium", "large"}
        A mosaic of 16 MiB, 1 GiB or 8 GiB.
    device : {"auto", "cuda", "cpu"}, optional
        As for :func:`linumpy.device.resolve`.
    overwrite : bool
        Whether to replace the results of another run in that folder. Other files are kept.

    Raises
    ------
    ValueError
        An unknown size or device; a URL for `out`.
    FileExistsError
        A result exists already, or `out` is a file.
    FileNotFoundError
        The parent folder of `out` does not exist.
    GpuUnavailableError
        ``"cuda"`` is requested and cannot be used.
    """
    if size not in synthetic.SIZES:
        raise ValueError(f"size {size!r} is unknown: choose one of {', '.join(synthetic.SIZES)}")
    used, spec, out = devices.resolve(device), synthetic.SIZES[size], Path(out)
    mosaic, volume_out, map_out = (out / f"{name}.ome.zarr" for name in ("mosaic", "resampled", "surface_depth"))
    pictures = out / "section_xz.png", out / "surface_depth.png"
    refuse_url(out)
    check_parent(out)
    out.mkdir(exist_ok=True)
    for path in (mosaic, volume_out, map_out):
        check_target(path, overwrite=overwrite)
    for picture in pictures:
        check_file(picture, overwrite=overwrite)
    stages: list[Stage] = []
    if used.is_cuda:
        with _timed(stages, "start CUDA"), used.xp.cuda.Device(used.index):
            used.xp.zeros(1)
    with _timed(stages, "make the mosaic and write it", spec.nbytes), progress_bar("making", spec.nbytes) as progress:
        synthetic.write_mosaic(mosaic, spec, overwrite=overwrite, progress=progress)
    with _timed(stages, "read it to the GPU" if used.is_cuda else "read it to the CPU", spec.nbytes):
        image = open_image(mosaic)
        volume, report = read_zarr(image.levels[0], device=used.kind, return_report=True)
    spacing = image.spacing[0]
    read_by = f"{report.backend}: {report.engine}{f'; {report.gds}' if used.is_cuda else ''}"
    step = min(spacing[1:])
    # The surface is detected before resampling, which mixes water and tissue: the logarithm would then move the edge.
    with _timed(stages, "find the tissue surface", spec.nbytes):
        mean_width = max(1, round(_SMOOTH_UM / step))
        surface = find_tissue_interface(volume, s_xy=mean_width, s_z=2, depth_axis=0, definition="edge")
    truth = synthetic.surface_depth(spec)
    depths, depth_spacing = to_host(surface), spacing[0]
    depth_um, lateral = surface * np.float32(depth_spacing), spacing[1:]
    with _timed(stages, "resample to isotropic voxels", spec.nbytes):
        volume, spacing = resample_volume(volume, spacing, step)
    with (
        _timed(stages, "write volume and depth map", int(volume.nbytes)),
        progress_bar("writing", volume.nbytes) as bar,
    ):
        write_omezarr(volume_out, volume, spacing, overwrite=overwrite, progress=bar)
        write_omezarr(map_out, depth_um, lateral, axes="yx", overwrite=overwrite)
    with _timed(stages, "draw the pictures"):
        _draw(volume, depths, truth, depth_spacing, lateral, spacing, pictures)
    error, bias = float(np.nanmedian(np.abs(depths - truth))), float(np.nanmedian(depths - truth))
    outputs = (mosaic, volume_out, map_out, *pictures)
    shape = tuple(volume.shape)
    return DemoResult(used, read_by, shape, spacing, error, bias, error * depth_spacing, tuple(stages), outputs)


def _draw(
    volume: Array,
    surface: np.ndarray,
    truth: np.ndarray,
    depth_spacing: float,
    lateral: tuple[float, ...],
    spacing: tuple[float, ...],
    paths: tuple[Path, Path],
) -> None:
    """Draw an XZ section of the resampled volume, and the map of depths.

    `surface` and `truth` are in voxels of the mosaic, whose spacing is `depth_spacing` (Z) and `lateral` (Y, X). The
    spacing of the resampled volume is `spacing` (Z, Y, X).
    """
    row = volume.shape[1] // 2
    mosaic_row = min(surface.shape[0] - 1, int((row + 0.5) * spacing[1] / lateral[0]))
    # Both grids begin at the same edge: voxel n has its centre at (n + 0.5) times the spacing.
    lines = [(depths[mosaic_row] + 0.5) * depth_spacing / spacing[0] - 0.5 for depths in (surface, truth)]
    columns = (np.arange(volume.shape[2]) + 0.5) * spacing[2] / lateral[1] - 0.5
    depths, true_depths = (np.interp(columns, np.arange(len(line)), line) for line in lines)
    section = to_host(volume[:, row, :])  # one plane goes to the host
    name = "resampled.ome.zarr"
    picture = draw_section(section, depths, true_depths, spacing[0], spacing[2], row * spacing[1], source=name)
    save(picture, paths[0])
    save(draw_depth_map(surface * depth_spacing, lateral, source="mosaic.ome.zarr"), paths[1])
