"""Attenuation and loss of the beam of a mosaic, from disk to disk.

In: an OME-Zarr volume. Out: its attenuation coefficients, or its intensities without attenuation, as OME-Zarr with the
same axes, chunks, spacing and origin. The volume is read once, in columns of whole depth; a few columns are read before
to estimate the parameters that the caller does not pass.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from linumpy.arrays import Array
from linumpy.correction.attenuation import (
    Beam,
    DeepLight,
    attenuation,
    compensate,
    depth_profiles,
    estimate_background,
    estimate_beam,
    estimate_deep_light,
    estimate_end,
)
from linumpy.device import array_module
from linumpy.io.output.checks import check_apart, check_target
from linumpy.mosaic.io.corrected import write_corrected
from linumpy.mosaic.io.image import MosaicImage, open_mosaic
from linumpy.mosaic.io.output import OutputImage
from linumpy.mosaic.io.tiles import Box, boxes, column_shape, read_box, tile_nbytes
from linumpy.resample.tile_work import tile_work
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

log = logging.getLogger(__name__)

#: Number of evenly spread columns from which parameters are estimated, and maximum of A-lines of each.
_SAMPLED, _LINES = 16, 4096


@dataclass(frozen=True)
class AttenuationMethod:
    """How attenuation is computed; parameters that are None are estimated from the data.

    Attributes
    ----------
    focus_um, rayleigh_um : float, optional
        See :class:`linumpy.correction.attenuation.Beam`.
    falloff_per_mm : float
        Fall-off of sensitivity, of the instrument's calibration.
    end_per_mm : float, optional
        Attenuation below the range; 0 for no light from there.
    background : float, optional
        Intensity without light.
    max_gain : float
        Maximum factor by which attenuation is compensated.
    """

    focus_um: float | None = None
    rayleigh_um: float | None = None
    falloff_per_mm: float = 0.0
    end_per_mm: float | None = None
    background: float | None = None
    max_gain: float = 100.0


@dataclass(frozen=True)
class AttenuationUsed:
    """The background, the beam, the attenuation below the range and the light from there that were used."""

    background: float
    beam: Beam
    end_per_mm: float
    deep: DeepLight


def compensate_attenuation(
    source: str | Path,
    output: str | Path,
    method: AttenuationMethod | None = None,
    *,
    coefficients: bool = False,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
    levels: int = 1,
    codec: str | None = None,
    use_gpu: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    tile_bytes: int | None = None,
    distributed: Client | Cluster | str | None = None,
) -> AttenuationUsed:
    """Write an OME-Zarr volume without attenuation, or its attenuation coefficients.

    Parameters
    ----------
    source : str or Path
        The volume: axes z, y and x in any order, light comes from the first plane along z.
    output : str or Path
        The OME-Zarr image to write.
    method : AttenuationMethod, optional
        Parameters.
    coefficients : bool
        Whether to write attenuation coefficients in 1/mm, as float32. By default intensities in the source's dtype,
        which integers may clip.
    channel, time, spacing, levels, codec, use_gpu, overwrite, progress, tile_bytes, distributed
        As for :func:`linumpy.mosaic.focal.correct_mosaic`; the volume is read once.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, GpuUnavailableError
        An existing output, a source that is no volume, parameters out of range; no CUDA device with `use_gpu`.
    """
    method = method or AttenuationMethod()
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    image.only("attenuation is computed in one volume")
    check_apart([output], [source])
    check_target(Path(output), overwrite=overwrite)
    used = _choose(image, method, use_gpu)
    log.info("%s: %s", image.name, used)
    step = image.spacing[image.depth_axis]
    # The smallest positive value of the output; the boxes are float32.
    smallest = np.float32(1 if image.array.dtype.kind in "iu" else np.finfo(np.float32).tiny)

    def correct(_: Box, voxels: Array) -> Array:
        if coefficients:
            return attenuation(voxels, step, used.beam, deep=used.deep, background=used.background)
        clear = compensate(
            voxels, step, used.beam, deep=used.deep, background=used.background, max_gain=method.max_gain
        )
        # Later steps take 0 for a voxel that was not measured, so a measured one as dark as the background is not 0.
        xp = array_module(voxels)
        return xp.where(voxels > 0, xp.maximum(clear, smallest), clear)

    size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
    target = OutputImage(output, levels, codec, overwrite, progress)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        write_corrected(image, target, size, correct, work, dtype=np.float32 if coefficients else None)
    return used


def _choose(image: MosaicImage, method: AttenuationMethod, use_gpu: bool) -> AttenuationUsed:
    """Take the parameters of the method, and estimate those that are None."""
    step, sampled = image.spacing[image.depth_axis], _sampled_rows(image, use_gpu)
    dark = estimate_background(sampled) if method.background is None else method.background
    focus, rayleigh, end = method.focus_um, method.rayleigh_um, method.end_per_mm
    if focus is None or rayleigh is None:
        estimate = estimate_beam(depth_profiles(sampled, dark), step, falloff_per_mm=method.falloff_per_mm).beam
        focus = estimate.focus_um if focus is None else focus
        rayleigh = estimate.rayleigh_um if rayleigh is None else rayleigh
    beam = Beam(focus, rayleigh, method.falloff_per_mm)
    end = estimate_end(sampled, step, beam, background=dark) if end is None else end
    deep = estimate_deep_light(sampled, step, beam, end_per_mm=end, background=dark)
    return AttenuationUsed(dark, beam, end, deep)


def _sampled_rows(image: MosaicImage, use_gpu: bool) -> Array:
    """Return rows of A-lines of a few columns side by side: float32, (Z, N)."""
    z, array = image.depth_axis, image.array
    columns = list(boxes(array.shape, column_shape(array, z, 1)))
    count, parts = min(_SAMPLED, len(columns)), []
    for k in range(count):
        voxels = read_box(array, columns[(2 * k + 1) * len(columns) // (2 * count)], use_gpu)
        xp = array_module(voxels)
        lines = xp.moveaxis(voxels, z, 0)
        _, height, width = lines.shape
        rows = lines[:, :: max(1, height * width // _LINES)]
        parts.append(rows.reshape(len(rows), -1).astype(np.float32))
    sampled: Array = xp.concatenate(parts, axis=1)
    return sampled
