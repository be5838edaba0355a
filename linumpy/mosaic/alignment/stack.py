"""Bring registered slices to one grid, each voxel resampled once, from disk to disk.

In: a folder of OME-Zarr slices, and their transforms (:mod:`linumpy.mosaic.alignment.transforms`). Out: one OME-Zarr
volume, written box by box. A slice begins at its cut surface and ends at the depth that its transform records. Where
slices overlap along Z, :func:`linumpy.mosaic.stacking.compose` blends them. Measured voxels are interpolated linearly.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Unpack

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module_of
from linumpy.errors import SourceError
from linumpy.gpu.rounding import rounded
from linumpy.mosaic.alignment.transforms import SliceTransforms, read_transforms
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import find_slices, open_slices
from linumpy.mosaic.io.step import ImageOptions, Step, carried_from_slices
from linumpy.mosaic.io.tiles import Box
from linumpy.mosaic.slices import make_stack
from linumpy.mosaic.stacking import StackPlan
from linumpy.plan.boundary import anti_aliasing_sigmas
from linumpy.plan.grid.blocks import AffineGrid, Block, source_box
from linumpy.plan.grid.regrid import without_rounding
from linumpy.resample.blocks.block import make_box

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CommonSpace:
    """The grid of a stack of registered slices, and the box of each slice in it; pure.

    - `spacing`, `origin` (float, float, float): voxel spacing, and coordinates of the first voxel in the space of the
      transforms, in µm along z, y and x.
    - `plan`: the box of each slice in the stack: its planes, and the whole lateral grid.
    - `grids`: for each slice the map from the voxels of its box to the voxels of the slice.
    - `nbytes`: bytes of all boxes.
    """

    spacing: tuple[float, float, float]
    origin: tuple[float, float, float]
    plan: StackPlan
    grids: tuple[AffineGrid, ...]
    nbytes: int


def plan_common_space(
    transforms: SliceTransforms,
    images: Sequence[MosaicImage],
    new_spacing: float | Sequence[float] | None = None,
) -> CommonSpace:
    """Plan the grid that holds all slices; pure.

    - `images`: the slices, in their order.
    - `new_spacing` (float, float, float): voxel spacing of the stack in µm, along all axes or along z, y and x; by
      default the spacing of the slices. Slices are smoothed if a step is more than 1 % coarser than theirs.

    Raises `ValueError`: a spacing that is neither one nor three positive numbers.
    """
    steps = np.atleast_1d(np.array(images[0].spacing if new_spacing is None else new_spacing, np.float64))
    if steps.shape not in ((1,), (3,)) or not (steps > 0).all() or not np.isfinite(steps).all():
        raise ValueError(f"new_spacing={new_spacing}: pass one positive number in µm, or three")
    spacing = np.broadcast_to(steps, (3,))
    maps = [_to_stack(np.array(part.matrix), image) for part, image in zip(transforms.slices, images, strict=True)]
    corners = [
        (matrix @ corner)[1:3]
        for matrix, image in zip(maps, images, strict=True)
        for corner in itertools.product(*((0.0, n - 1.0) for n in image.array.shape), (1.0,))
    ]
    low, high = np.min(corners, axis=0), np.max(corners, axis=0)
    lateral = [math.floor(length + 1e-6) + 1 for length in (high - low) / spacing[1:]]
    origin = np.array([min(part.top_um for part in transforms.slices), *low])
    offsets, shapes = [], []
    for part in transforms.slices:
        # Planes whose centres lie between the surface and the last plane of the slice.
        first = math.ceil((part.top_um - origin[0]) / spacing[0] - 1e-6)
        stop = math.floor((part.top_um + part.depth_um - images[0].spacing[0] - origin[0]) / spacing[0] + 1e-6) + 1
        offsets.append((first, 0, 0))
        shapes.append((max(1, stop - first), *lateral))
    planes = max(offset[0] + shape[0] for offset, shape in zip(offsets, shapes, strict=True))
    plan = StackPlan((planes, *lateral), tuple(offsets), tuple(shapes))  # type: ignore[arg-type]
    grids = tuple(
        _grid(matrix, image, spacing, origin, offset, shape)
        for matrix, image, offset, shape in zip(maps, images, offsets, shapes, strict=True)
    )
    nbytes = sum(map(math.prod, plan.shapes)) * images[0].array.dtype.itemsize
    return CommonSpace(
        spacing=tuple(spacing.tolist()), origin=tuple(origin.tolist()), plan=plan, grids=grids, nbytes=nbytes
    )


def _to_stack(matrix: np.ndarray, image: MosaicImage) -> np.ndarray:
    """Return the map from voxels of a slice to coordinates of the stack in µm."""
    voxels = np.diag([*image.spacing, 1.0])
    voxels[:3, 3] = image.origin
    return matrix @ voxels


def _grid(
    to_stack: np.ndarray, image: MosaicImage, spacing: np.ndarray, origin: np.ndarray,
    offset: Sequence[int], shape: Sequence[int],
) -> AffineGrid:  # fmt: skip
    """Return the map from the voxels of a slice's box in the stack to the voxels of the slice."""
    box_to_um = np.diag([*spacing, 1.0])
    box_to_um[:3, 3] = origin + np.array(offset) * spacing
    box_to_slice = np.linalg.inv(to_stack) @ box_to_um
    rows, shift = without_rounding(box_to_slice[:3, :3], box_to_slice[:3, 3], shape)
    sigmas = anti_aliasing_sigmas(rows) if (spacing > 1.01 * np.array(image.spacing)).any() else ()
    return AffineGrid(tuple(image.array.shape), tuple(shape), rows, shift, 1, "constant", sigmas)


def open_stack(
    folder: str | Path,
    transforms: str | Path | SliceTransforms,
    new_spacing: float | Sequence[float] | None = None,
    *,
    channel: int | None = None,
    time: int | None = None,
    spacing: Sequence[float] | None = None,
) -> tuple[tuple[MosaicImage, ...], CommonSpace]:
    """Open slices and plan their stack; parameters and errors are those of :func:`stack_registered`."""
    transforms = transforms if isinstance(transforms, SliceTransforms) else read_transforms(transforms)
    paths, numbers = find_slices(folder), [part.number for part in transforms.slices]
    if not set(numbers) <= set(paths):
        raise SourceError(
            f"the transforms are those of slices {', '.join(map(str, numbers))}, and {folder} has "
            f"{', '.join(map(str, paths))}"
        )
    slices = open_slices(
        {number: paths[number] for number in numbers}, least=1, channel=channel, time=time, spacing=spacing
    )
    images = tuple(slices.values())
    return images, plan_common_space(transforms, images, new_spacing)


def stack_registered(
    folder: str | Path,
    transforms: str | Path | SliceTransforms,
    output: str | Path,
    *,
    new_spacing: float | Sequence[float] | None = None,
    **common: Unpack[ImageOptions],
) -> CommonSpace:
    """Stack OME-Zarr slices by their transforms.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices, as for :func:`linumpy.mosaic.alignment.register.register_slices`. Slices without a
        transform are left out, with a log line (warning).
    transforms : str, Path or SliceTransforms
        Their transforms, or a file of them.
    output : str or Path
        The OME-Zarr image to write; its origin is in the space of the transforms. It has the metadata that are equal in
        all slices.
    new_spacing : float or (float, float, float), optional
        Voxel spacing of the stack in µm, as for :func:`plan_common_space`.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.

    Notes
    -----
    Voxels that are 0, not finite or filled by focal correction are not valid, and are not interpolated. Where valid
    voxels have less than half of the interpolation weights, the sample is taken from the other slice, or is 0.
    """
    step, paths = Step(output, **common), find_slices(folder)
    step.check([*paths.values(), *([] if isinstance(transforms, SliceTransforms) else [transforms])])
    images, space = open_stack(folder, transforms, new_spacing, **step.selection)
    left_out = [path.name for path in paths.values() if str(path) not in {image.name for image in images}]
    if left_out:
        log.warning("slices without a transform are left out: %s", ", ".join(left_out))
    array = images[0].array
    with step.work() as work, step.writer(
        "the slices", carried_from_slices(images), space.plan.shape, array.dtype.newbyteorder("="), space.spacing,
        axes="zyx", origin=space.origin,
        chunks=tuple(min(chunk, n) for chunk, n in zip(array.chunks, space.plan.shape, strict=True)),
    ) as writer:  # fmt: skip
        device, dtype = work.device, writer.dtype

        def needed(number: int, part: Box) -> Box | None:
            block = _block(space.grids[number], part)
            return block.source_box if math.prod(block.source_shape) else None

        def sample(number: int, part: Box, voxels: Array) -> Array:
            grid = space.grids[number]
            return resampled(grid, _block(grid, part), voxels, images[number], array_module_of(device), dtype)

        make_stack(step, writer, images, space.plan, work, needed=needed, sample=sample)
    return space


def _block(grid: AffineGrid, part: Box) -> Block:
    """Plan the box of a slice that a box of the stack needs."""
    start, stop = tuple(e.start for e in part), tuple(e.stop for e in part)
    return Block(0, start, stop, *source_box(grid, start, stop))


def resampled(
    grid: AffineGrid, block: Block, voxels: Array, image: MosaicImage, xp: ModuleType, dtype: np.dtype
) -> Array:
    """Sample a slice in a box of the stack: the mean of the valid voxels around each point, by their linear weights.

    A sample is 0 if valid voxels have less than half of the weights.
    """
    valid = image.valid_voxels(block.source_box, voxels)
    if bool(valid.all()):
        return make_box(voxels.astype(dtype, copy=False), grid, block, 0, xp.empty(block.shape, dtype))
    valid_or_zero = xp.where(valid, voxels, 0).astype(np.float32)
    sums = make_box(valid_or_zero, grid, block, 0, xp.empty(block.shape, np.float32))
    weights = make_box(valid.astype(np.float32), grid, block, 0, xp.empty(block.shape, np.float32))
    means = xp.where(weights >= 0.5, sums / xp.maximum(weights, np.float32(0.5)), 0)
    return rounded(means, dtype)
