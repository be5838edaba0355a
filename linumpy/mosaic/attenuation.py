"""Compensate the attenuation of light and the loss of the beam in a volume, from disk to disk.

In: an OME-Zarr volume. Out: its attenuation coefficients, or its intensities without attenuation, as OME-Zarr with the
same axes, chunks, spacing and origin. First, up to 16 columns (boxes of the whole depth) are read, from which the light
from below the range and the parameters that the caller does not pass are estimated. Then the volume is read once.
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

#: Maximum number of evenly spread columns from which parameters are estimated, and approximate number of A-lines that
#: are taken of each column.
_SAMPLED, _LINES = 16, 4096


@dataclass(frozen=True)
class AttenuationMethod:
    """How attenuation is computed; parameters that are None are estimated from the data.

    Attributes
    ----------
    focus_um, rayleigh_um : float, optional
        See :class:`linumpy.correction.attenuation.Beam`.
    falloff_per_mm : float
        Fall-off of sensitivity, from the calibration of the instrument; it is not estimated.
    end_per_mm : float, optional
        Attenuation below the recorded range; 0 for no light from there.
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
    """The parameters of a compensation.

    Attributes
    ----------
    background : float
        Intensity without light.
    beam : Beam
        Loss of the beam.
    end_per_mm : float
        Attenuation below the recorded range.
    deep : DeepLight
        Light from below the recorded range.
    """

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
        The volume: axes z, y and x in any order. Light enters at the first plane along z.
    output : str or Path
        The OME-Zarr image to write.
    method : AttenuationMethod, optional
        Parameters; by default all are estimated, without fall-off.
    coefficients : bool
        Whether to write attenuation coefficients in 1/mm, as float32. By default intensities are written in the
        source's dtype: integers are rounded and clipped to their range.
    channel, time, spacing, levels, codec, use_gpu, overwrite, tile_bytes, distributed
        As for :func:`linumpy.mosaic.focal.correct_mosaic`.
    progress : callable, optional
        Called with the number of bytes of the volume done since the last call.

    Returns
    -------
    AttenuationUsed
        The parameters, given or estimated.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError, TypeError, GpuUnavailableError
        An existing output, a source that is no volume, parameters out of range, a volume of booleans; no CUDA device
        with `use_gpu`.
    """
    method = method or AttenuationMethod()
    image = open_mosaic(source, channel=channel, time=time, spacing=spacing)
    image.only("attenuation is computed in one volume")
    check_apart([output], [source])
    check_target(Path(output), overwrite=overwrite)
    used = _choose_parameters(image, method, use_gpu)
    log.info("%s: %s", image.name, used)
    step = image.spacing[image.depth_axis]
    # The smallest positive intensity that the output can hold.
    smallest = np.float32(1 if image.array.dtype.kind in "iu" else np.finfo(np.float32).tiny)

    def correct(_: Box, voxels: Array) -> Array:
        if coefficients:
            return attenuation(voxels, step, used.beam, deep=used.deep, background=used.background)
        clear = compensate(
            voxels, step, used.beam, deep=used.deep, background=used.background, max_gain=method.max_gain
        )
        # Later steps treat 0 as not measured, so a measured voxel as dark as the background must not become 0.
        xp = array_module(voxels)
        return xp.where(voxels > 0, xp.maximum(clear, smallest), clear)

    size = column_shape(image.array, image.depth_axis, tile_nbytes(tile_bytes, use_gpu))
    target = OutputImage(output, levels, codec, overwrite, progress)
    with tile_work(distributed, use_gpu=use_gpu) as work:
        write_corrected(image, target, size, correct, work, dtype=np.float32 if coefficients else None)
    return used


def _choose_parameters(image: MosaicImage, method: AttenuationMethod, use_gpu: bool) -> AttenuationUsed:
    """Return the parameters of the method, with estimates in place of None, and the light from below the range."""
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
    """Read A-lines of a few columns: float32, (Z, N). They are whole rows, because estimates compare neighbours."""
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
