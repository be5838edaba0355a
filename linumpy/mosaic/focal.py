"""Focal curvature of a mosaic of any size, detected and corrected from disk to disk.

In: an OME-Zarr mosaic and the size of its tiles. Out: the mosaic without focal curvature, as OME-Zarr with the same
dtype, axes, chunks, spacing and origin; a report as JSON and as a picture. The mosaic is read twice, in columns (boxes
of the whole depth): its complete tiles for their surface, and all of it for the correction.
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature, detect_focal_curvature, mean_tile
from linumpy.io.carried import carried_from
from linumpy.io.output.results import write_result
from linumpy.mosaic.io.image import MosaicImage, needed_tile, tile_attributes
from linumpy.mosaic.io.measured import Correction, corrections_attribute
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box, box_nbytes, boxes, read_box
from linumpy.mosaic.options import FocalCorrection, SurfaceMethod
from linumpy.mosaic.surface import read_column, surface_of, zero_log_of
from linumpy.resample.tile_work import TileWork
from linumpy.version import __version__

log = logging.getLogger(__name__)

#: Maximum voxels of the fitted surface (512 MiB). Of a larger mosaic only the tiles in the middle are used.
MAP_VOXELS = 2**27
#: Maximum voxels of a picture along an axis.
_PICTURE_VOXELS = 1024


def correct_mosaic(
    source: str | Path,
    output: str | Path,
    tile_shape: tuple[int, int] | None = None,
    method: SurfaceMethod | None = None,
    correction: FocalCorrection | None = None,
    *,
    report: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> FocalCurvature:
    """Find the focal curvature of an OME-Zarr mosaic, and write the corrected mosaic.

    Parameters
    ----------
    source : str or Path
        The mosaic: axes z, y and x in any order. Its first tile begins at its first voxel, and tiles do not overlap.
        Of several times or channels one must be selected: curvature is found in one volume.
    output : str or Path
        The OME-Zarr image to write. Its metadata has the tile shape and the metadata of the mosaic that still apply.
        Without `wrap` it also records the filled voxels, which surface detection, projection and stacking exclude.
    tile_shape : (int, int), optional
        Voxels of a tile along the lateral axes, in the order of the array's axes; by default from the metadata that
        linumpy writes.
    method : SurfaceMethod, optional
        Parameters of the surface detection.
    correction : FocalCorrection, optional
        How to shift A-lines.
    report : str or Path, optional
        A PNG, PDF or SVG to write; the fit is written beside it as JSON, with the suffix ``.json``.
    progress : callable, optional
        Called with the number of bytes done since the last call. In all these are twice the bytes of the mosaic, or
        less if it has incomplete tiles or is so large that only the surface of its middle is used.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.
    """
    method, correction = method or SurfaceMethod(), correction or FocalCorrection()
    step, numbers = Step(output, **common), None if report is None else Path(report).with_suffix(".json")
    why = "focal curvature is found and corrected in one volume"
    image = step.open(source, one=why, picture=report, file=numbers)
    if correction.wrap and image.corrections:
        raise ValueError(
            f"wrap=True: {image.name} has voxels that an earlier correction filled, which would count as measured; "
            "correct the original mosaic"
        )
    tile_shape = _checked_tile(image, tile_shape)
    with step.work() as work:
        surface = _surface_of_tiles(image, tile_shape, method, work, step)
        curvature = detect_focal_curvature(surface, tile_shape)
        log.info("%s: %s", image.name, curvature)
        if reason := _left_out(curvature):
            log.warning("%s: focal curvature is not corrected: %s", image.name, reason)
        depth_axis, array = image.depth_axis, image.array
        attributes = tile_attributes(image, tile_shape)
        if not correction.wrap:
            new_correction = Correction(curvature, correction.interpolate)
            all_corrections = (*image.corrections, new_correction)
            attributes["linumpy"] |= corrections_attribute(all_corrections, image.lateral_names)
        carried = carried_from(image).without("labels", "image_label")
        with step.writer_like(image, carried, array.dtype, attributes) as writer:

            def flatten(box: Box, voxels: Array) -> Array:
                first, second = (box[axis].start for axis in image.lateral_axes)
                return correct_focal_curvature(
                    voxels, curvature, depth_axis=depth_axis, origin=(first, second),
                    interpolate=correction.interpolate, wrap=correction.wrap, fill_value=correction.fill_value,
                )  # fmt: skip

            work(
                boxes(array.shape, step.column(image, work)),
                partial(read_box, array, device=work.device),
                flatten,
                writer.write,
                done=lambda box: step.advance(box_nbytes(array, box)),
            )
            if report is not None:
                nth = -(-max(tile_shape) // _PICTURE_VOXELS)
                mean = to_host(mean_tile(surface, tile_shape)[::nth, ::nth])
                _report(step, Path(report), image, curvature, (mean, nth), method, correction)
    return curvature


def _left_out(curvature: FocalCurvature) -> str:
    """Return why nothing is corrected; empty if the mosaic is."""
    if curvature.vv or curvature.vu or curvature.uu:
        return ""
    return f"it is not larger than its standard error over {curvature.tiles} tiles"


def _checked_tile(image: MosaicImage, tile_given: tuple[int, int] | None) -> tuple[int, int]:
    """Return the tile shape, and refuse tiles that are too small for a fit."""
    tile_shape = needed_tile(image, tile_given)
    for axis, size in zip(image.lateral_axes, tile_shape, strict=True):
        if size < 3:
            raise ValueError(
                f"tile_shape={tuple(tile_shape)}: {image.name} has {image.array.shape[axis]} voxels along "
                f"{image.axes[axis]}, so a tile has 3 to {image.array.shape[axis]} there"
            )
    return tile_shape


def surface_bounds(shape: tuple[int, int], tile_shape: tuple[int, int], max_voxels: int) -> tuple[slice, slice]:
    """Choose the tiles whose surface is used: all complete tiles, or as many in the middle as fit `max_voxels`."""
    grid = [n // size for n, size in zip(shape, tile_shape, strict=True)]
    count = list(grid)
    while max(count) > 1 and count[0] * count[1] * tile_shape[0] * tile_shape[1] > max_voxels:
        count[count.index(max(count))] -= 1
    first, second = (
        slice((n - c) // 2 * size, ((n - c) // 2 + c) * size)
        for n, c, size in zip(grid, count, tile_shape, strict=True)
    )
    return first, second


def _surface_of_tiles(
    image: MosaicImage, tile_shape: tuple[int, int], method: SurfaceMethod, work: TileWork, step: Step
) -> Array:
    """Find the surface of complete tiles in voxels, in the memory of `work`; -1 or infinity where it is unknown.

    The surface of an A-line whose steepest rise is at its first voxel, as in a missing tile, is unknown: the fit would
    take it for a flat surface.
    """
    # The surface that surface_of returns for a rise at the first voxel.
    top = math.ceil(method.s_z / 2) if method.definition == "linumpy" else 0
    bounds = surface_bounds(image.lateral_shape, tile_shape, MAP_VOXELS)
    device, depth_axis = work.device, image.depth_axis
    dtype = np.int32 if method.definition == "linumpy" else np.float32
    surface = work.xp.empty([bound.stop - bound.start for bound in bounds], dtype)
    size, zero_log = step.column(image, work), zero_log_of(image, method)

    def find(_: Box, read: tuple[Array, tuple[slice, slice]]) -> Array:
        column, inside = read
        depths = surface_of(column, method, depth_axis, zero_log)[inside]
        return array_module(depths).where(depths > top, depths, -1)

    def keep(part: Box, depths: Array) -> None:
        lateral = tuple(
            slice(part[axis].start - bound.start, part[axis].stop - bound.start)
            for axis, bound in zip(image.lateral_axes, bounds, strict=True)
        )
        surface[lateral] = depths

    parts = (_within(image, box, bounds) for box in boxes(image.array.shape, size))
    work(
        (part for part in parts if part is not None),
        lambda part: read_column(image, part, method.s_xy // 2, device),
        find,
        keep,
        done=lambda part: step.advance(box_nbytes(image.array, part)),
    )
    return surface


def _within(image: MosaicImage, box: Box, bounds: tuple[slice, slice]) -> Box | None:
    """Return the part of a box within lateral bounds; None if it is empty."""
    part = list(box)
    for axis, bound in zip(image.lateral_axes, bounds, strict=True):
        part[axis] = slice(max(box[axis].start, bound.start), min(box[axis].stop, bound.stop))
        if part[axis].start >= part[axis].stop:
            return None
    return tuple(part)


def _report(
    step: Step,
    path: Path,
    image: MosaicImage,
    curvature: FocalCurvature,
    mean: tuple[np.ndarray, int],
    method: SurfaceMethod,
    correction: FocalCorrection,
) -> None:
    """Write the picture and the JSON of the fit; `mean` is every n-th A-line of the mean tile's surface, and n."""
    from linumpy.mosaic.io.figures import draw_focal_curvature

    unit, names = image.spacing[image.depth_axis], image.lateral_names
    content = {
        "source": image.name,
        "linumpy": __version__,
        "axes": list(names),
        "spacing_um": dict(zip(image.axes, image.spacing, strict=True)),
        "tile_shape": list(curvature.tile_shape),
        "tiles": curvature.tiles,
        "formula": "deeper by vv v² + vu v u + uu u², v and u from -1 to 1 over a tile along the two axes",
        "voxels": _numbers(curvature, 1.0),
        "um": _numbers(curvature, unit),
        "method": asdict(method),
        "correction": asdict(correction),
        "keys": _KEYS,
    }
    shown, nth = mean
    focal, tissue = (depth[::nth, ::nth] * unit for depth in (curvature.depth(), curvature.tissue_depth()))
    spacing = image.lateral_spacing[0] * nth, image.lateral_spacing[1] * nth
    title = f"mean of {curvature.tiles} tiles, fit leaves {curvature.rms * unit:.2g} µm RMS"
    upper, source = (names[0].upper(), names[1].upper()), PurePosixPath(image.name).name
    step.draw(draw_focal_curvature(shown * unit, focal, tissue, spacing, title, upper, source=source), path)
    write_result(path.with_suffix(".json"), content, left_out=_left_out(curvature), overwrite=step.overwrite)


#: Explanations in the report, for readers without this source.
_KEYS = {
    "vv, vu, uu": "coefficients of the focal curvature, see formula: how much deeper at the edge of a tile",
    "rms": "root mean square of the residual of the mean tile's surface",
    "deepest, shallowest": "largest and smallest value of the focal curvature over a tile",
    "tissue": "coefficients of the curvature of the tissue itself, which is not corrected",
    "voxels, um": "the same numbers in voxels along depth and in µm",
    "tiles": "tiles whose surface was averaged",
    "method": "parameters of the surface detection: the options of linum-detect-focal-curvature",
    "correction": "how A-lines were shifted",
    "left_out": "why nothing was corrected; empty if the mosaic was",
}


def _numbers(curvature: FocalCurvature, unit: float) -> dict[str, Any]:
    """Return the numbers of the fit, in voxels times `unit`."""
    depth = curvature.depth()
    return {
        **{name: getattr(curvature, name) * unit for name in ("vv", "vu", "uu", "rms")},
        "deepest": float(depth.max()) * unit,
        "shallowest": float(depth.min()) * unit,
        "tissue": dict(zip(("vv", "vu", "uu"), (coefficient * unit for coefficient in curvature.tissue), strict=True)),
    }
