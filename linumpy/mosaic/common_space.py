"""Bring registered slices to one grid, each voxel resampled once, from disk to disk.

In: a folder of OME-Zarr slices, and their transforms (:mod:`linumpy.mosaic.alignment.transforms`). Out: one OME-Zarr
volume, made box by box. A slice begins at its cut surface and ends where it is imaged no deeper; where slices overlap
along Z they are blended as by :func:`linumpy.mosaic.stacking.compose`. Samples are linear, of the voxels that were
measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import require_cuda
from linumpy.errors import SourceError
from linumpy.gpu.rounding import rounded
from linumpy.io.carried import carried_from
from linumpy.io.output.checks import check_apart, check_target
from linumpy.mosaic.alignment.faces import valid_voxels
from linumpy.mosaic.alignment.transforms import SliceTransforms, read_transforms
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.slice_table import find_slices, open_slices
from linumpy.mosaic.io.tiles import Box, boxes, read_box, tile_nbytes, tile_shape
from linumpy.mosaic.stacking import StackPlan, compose, parts
from linumpy.plan.grid.blocks import AffineGrid, Block, anti_aliasing_sigmas, source_box
from linumpy.resample.blocks.block import make_box
from linumpy.resample.tile_work import TileWork, tile_work
from linumpy.write.writer import OmeZarrWriter, Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster


@dataclass(frozen=True)
class CommonSpace:
    """The grid of a stack of registered slices, and where each slice lies in it; pure.

    Attributes
    ----------
    spacing, origin : (float, float, float)
        Voxel spacing, and coordinates of the first voxel in the space of the transforms, in µm along z, y and x.
    plan : StackPlan
        The planes of each slice; laterally each has the whole grid.
    grids : tuple of AffineGrid
        Maps from the voxels of each slice's box in the stack to those of the slice.
    nbytes : int
        Bytes of the stack.
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
    """Choose the grid that holds all slices.

    Parameters
    ----------
    transforms : SliceTransforms
        Transforms of the slices.
    images : sequence of MosaicImage
        The slices, in their order.
    new_spacing : float or (float, float, float), optional
        Voxel spacing of the stack in µm; by default that of the slices. Slices are smoothed for a coarser one.

    Raises
    ------
    ValueError
        A spacing that is not positive.
    """
    wanted = np.atleast_1d(np.array(images[0].spacing if new_spacing is None else new_spacing, np.float64))
    if wanted.shape not in ((1,), (3,)) or not (wanted > 0).all() or not np.isfinite(wanted).all():
        raise ValueError(f"new_spacing={new_spacing}: pass one positive number in µm, or three")
    spacing = np.broadcast_to(wanted, (3,))
    maps = [_to_stack(np.array(one.matrix), image) for one, image in zip(transforms.slices, images, strict=True)]
    ends = [
        (matrix @ corner)[1:3]
        for matrix, image in zip(maps, images, strict=True)
        for corner in itertools.product(*((0.0, n - 1.0) for n in image.array.shape), (1.0,))
    ]
    low, high = np.min(ends, axis=0), np.max(ends, axis=0)
    lateral = [math.floor(length + 1e-6) + 1 for length in (high - low) / spacing[1:]]
    tops = [one.top_um for one in transforms.slices]
    origin = np.array([min(tops), *low])
    offsets, shapes = [], []
    for one in transforms.slices:
        # Planes whose centres lie in the slice: from its surface on, down to its last plane.
        first = math.ceil((one.top_um - origin[0]) / spacing[0] - 1e-6)
        stop = math.floor((one.top_um + one.depth_um - images[0].spacing[0] - origin[0]) / spacing[0] + 1e-6) + 1
        offsets.append((first, 0, 0))
        shapes.append((max(1, stop - first), *lateral))
    planes = max(offset[0] + shape[0] for offset, shape in zip(offsets, shapes, strict=True))
    plan = StackPlan((planes, *lateral), tuple(offsets), tuple(shapes))  # type: ignore[arg-type]
    grids = tuple(
        _grid(matrix, image, spacing, origin, offset, shape)
        for matrix, image, offset, shape in zip(maps, images, offsets, shapes, strict=True)
    )
    nbytes = math.prod(plan.shape) * images[0].array.dtype.itemsize
    return CommonSpace(tuple(spacing.tolist()), tuple(origin.tolist()), plan, grids, nbytes)


def _to_stack(matrix: np.ndarray, image: MosaicImage) -> np.ndarray:
    """Return the map from voxels of a slice to the stack, in µm."""
    voxels = np.diag([*image.spacing, 1.0])
    voxels[:3, 3] = image.origin
    return matrix @ voxels


def _grid(
    to_stack: np.ndarray, image: MosaicImage, spacing: np.ndarray, origin: np.ndarray,
    offset: Sequence[int], shape: Sequence[int],
) -> AffineGrid:  # fmt: skip
    placed = np.diag([*spacing, 1.0])
    placed[:3, 3] = origin + np.array(offset) * spacing
    # Rounding errors must not put the outermost voxels of an equal grid outside of the slice.
    back = np.linalg.inv(to_stack) @ placed
    linear, shift = back[:3, :3].round(12), back[:3, 3].round(9)
    rows = tuple(map(tuple, linear.tolist()))
    sigmas = anti_aliasing_sigmas(rows) if (spacing > 1.01 * np.array(image.spacing)).any() else ()
    return AffineGrid(tuple(image.array.shape), tuple(shape), rows, tuple(shift.tolist()), 1, "constant", sigmas)


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
    chosen = transforms if isinstance(transforms, SliceTransforms) else read_transforms(transforms)
    slices = open_slices(folder, least=1, channel=channel, time=time, spacing=spacing)
    images = tuple(slices.values())
    if [one.number for one in chosen.slices] != list(slices):
        raise SourceError(
            f"the transforms are those of slices {', '.join(str(one.number) for one in chosen.slices)}, and {folder} "
            f"has {', '.join(map(str, slices))}"
        )
    return images, plan_common_space(chosen, images, new_spacing)


def stack_registered(
    folder: str | Path,
    transforms: str | Path | SliceTransforms,
    output: str | Path,
    *,
    new_spacing: float | Sequence[float] | None = None,
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
) -> CommonSpace:
    """Stack OME-Zarr slices by their transforms.

    Parameters
    ----------
    folder : str or Path
        Folder of the slices, as for :func:`linumpy.mosaic.alignment.register.register_slices`.
    transforms : str, Path or SliceTransforms
        Their transforms, or the file that has them.
    output : str or Path
        The OME-Zarr image to write; its origin is in the space of the transforms. It has the metadata that are equal in
        all slices.
    new_spacing : float or (float, float, float), optional
        Voxel spacing of the stack in µm; by default that of the slices.
    channel, time, spacing, levels, codec, use_gpu, overwrite, distributed
        As for :func:`linumpy.mosaic.slices.stack_mosaics`.
    progress : callable, optional
        Called with the number of bytes of the stack written since the last call.
    tile_bytes : int
        Approximate bytes of a box of the stack; by default 256 MiB on a GPU and 32 MiB on the CPU.

    Raises
    ------
    FileExistsError, FileNotFoundError, SourceError, MetadataError, ValueError
        An existing output; missing slices or transforms, or ones that do not fit each other.
    GpuUnavailableError
        `use_gpu` and there is no CUDA device.

    Notes
    -----
    A voxel that is 0, not finite or filled by focal correction was not measured, and has no part in a sample; a sample
    of which less than half was measured is 0, or is taken from the other slice.
    """
    check_target(Path(output), overwrite=overwrite)
    check_apart(
        [output],
        [*find_slices(folder).values(), *([] if isinstance(transforms, SliceTransforms) else [transforms])],
    )
    images, space = open_stack(folder, transforms, new_spacing, channel=channel, time=time, spacing=spacing)
    own, *others = map(carried_from, images)
    carried = own.shared_with(others).without("labels", "image_label", "own", "systems").on_another_grid()
    carried.log_dropped("the slices", output)
    with (
        tile_work(distributed, use_gpu=use_gpu) as work,
        OmeZarrWriter(
            output, space.plan.shape, images[0].array.dtype.newbyteorder("="), space.spacing, axes="zyx",
            origin=space.origin, levels=levels, chunks=_chunks(images[0].array.chunks, space.plan.shape),
            codec=codec, overwrite=overwrite, carried=carried,
        ) as writer,
    ):  # fmt: skip
        _write(space, images, writer, work, tile_nbytes(tile_bytes, use_gpu), progress)
    return space


def _chunks(chunks: Sequence[int], shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(min(c, n) for c, n in zip(chunks, shape, strict=True))


def _write(
    space: CommonSpace,
    images: Sequence[MosaicImage],
    writer: OmeZarrWriter,
    work: TileWork,
    tile_bytes: int,
    progress: Progress | None,
) -> None:
    use_gpu, dtype = work.use_gpu, images[0].array.dtype.newbyteorder("=")

    def read(box: Box) -> dict[int, tuple[Block, Array]]:
        found = {}
        for number, part in parts(space.plan, box):
            block = _block(space.grids[number], part)
            if math.prod(block.source_shape):
                found[number] = block, read_box(images[number].array, block.source_box, use_gpu)
        return found

    def blend(box: Box, sources: Mapping[int, tuple[Block, Array]]) -> Array:
        xp = require_cuda() if use_gpu else np

        def sample(number: int, part: Box) -> Array:
            if number not in sources:
                return xp.zeros([extent.stop - extent.start for extent in part], dtype)
            return resampled(space.grids[number], *sources[number], images[number], xp, dtype)

        return compose(space.plan, box, sample, xp, dtype)

    def done(box: Box) -> None:
        if progress is not None:
            progress(math.prod(extent.stop - extent.start for extent in box) * dtype.itemsize)

    size = tile_shape(space.plan.shape, writer.stored, dtype.itemsize, tile_bytes)
    work(boxes(space.plan.shape, size), read, blend, writer.write, done=done)


def _block(grid: AffineGrid, part: Box) -> Block:
    start, stop = tuple(e.start for e in part), tuple(e.stop for e in part)
    return Block(0, start, stop, *source_box(grid, start, stop))


def resampled(
    grid: AffineGrid, block: Block, voxels: Array, image: MosaicImage, xp: ModuleType, dtype: np.dtype
) -> Any:
    """Sample a slice in a box of the stack: the mean of the measured voxels around a point, by their linear weights."""
    valid = valid_voxels(image, block.source_box, voxels)
    if bool(valid.all()):
        return make_box(voxels.astype(dtype, copy=False), grid, block, 0, xp.empty(block.shape, dtype))
    known = xp.where(valid, voxels, 0).astype(np.float32)
    sums = make_box(known, grid, block, 0, xp.empty(block.shape, np.float32))
    weights = make_box(valid.astype(np.float32), grid, block, 0, xp.empty(block.shape, np.float32))
    means = xp.where(weights >= 0.5, sums / xp.maximum(weights, np.float32(0.5)), 0)
    return rounded(means, dtype)
