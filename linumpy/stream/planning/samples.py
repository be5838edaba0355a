"""Plans the crops of a sample: sample and arrays → reads of direct crops, and staged crops. Pure.

A *direct* crop is read into its row of the batch. A *staged* crop is augmented, or its border repeats voxels of the
array: a region of the array is read into a buffer, and resampled from there into the batch. For all staged crops of a
batch together, :mod:`~linumpy.stream.planning.reach` plans the regions, which hold every voxel that a crop depends on,
and the chunks of these regions that are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from linumpy.stream.arguments import Box
from linumpy.stream.augment import NEUTRAL, Warp, draw_warp
from linumpy.stream.config import Config, Dtype, Part, Sample
from linumpy.stream.errors import DtypeMismatch, InvalidArgument, RankMismatch
from linumpy.stream.planning.alignment import Crop, crop_of
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, WarpedCrop


def _part_shape(part: Part, crop: Crop, info: ArrayInfo, config: Config) -> PartShape:
    """Return the shape and dtype of a part in the batch."""
    dtype = part.dtype
    if dtype is None:
        dtype = Dtype.STORED if part.kind == "labels" else config.dtype
    if info.dtype.kind == "c" and dtype is not Dtype.STORED:
        raise DtypeMismatch(f"{info.name} holds {info.dtype}, which is not cast to {dtype.label}: use dtype='stored'")
    return PartShape(part.name, tuple([b - a for a, b in crop.aabb]), dtype, dtype.numpy(info.dtype), crop.dropped)


def check_alike(first: Sequence[PartShape], other: Sequence[PartShape]) -> None:
    """Raise if a sample differs from the first sample of a pipeline."""
    if [part.name for part in first] != [part.name for part in other]:
        named = (", ".join(part.name for part in parts) for parts in (other, first))
        raise InvalidArgument("parts {} differ from {} of the first sample".format(*named))
    for wanted, given in zip(first, other, strict=True):
        if len(wanted.shape) != len(given.shape):
            raise RankMismatch(f"{wanted.name}: {len(given.shape)} axes, {len(wanted.shape)} in the first sample")
        if wanted.shape != given.shape:
            raise InvalidArgument(f"{wanted.name}: crop of {given.shape}, of {wanted.shape} in the first sample")
        if wanted.dropped != given.dropped:
            raise RankMismatch(f"{wanted.name}: crop of {given.kept}, of {wanted.kept} in the first sample")
        if wanted != given:
            raise DtypeMismatch(f"{wanted.name}: dtype {given.element}, {wanted.element} in the first sample")


def is_whole(sample: Sample, infos: Sequence[ArrayInfo], config: Config, parts: Sequence[PartShape]) -> bool:
    """Say whether a sample has one part, which is only copied, lies in its array, and is as the first sample's."""
    info, part = infos[0], parts[0]
    aabb, shape = sample.aabb, part.shape
    if sample.parts or len(parts) > 1 or config.augment is not None or not info.grid.is_finest:
        return False
    if not len(aabb) == len(shape) == len(info.shape) or sample.dropped != part.dropped or sample.name != part.name:
        return False
    if part.dtype is not config.dtype or info.dtype.kind == "c" or part.dtype.numpy(info.dtype) != part.element:
        return False
    for (start, stop), size, n in zip(aabb, shape, info.shape, strict=True):
        if stop - start != size or start < 0 or stop > n:
            return False
    return True


def plan_sample(
    sample: Sample, infos: Sequence[ArrayInfo], config: Config, row: int, index: int, epoch: int
) -> tuple[tuple[PartShape, ...], tuple[CropRead | WarpedCrop, ...]]:
    """Plan all parts of a sample: shape and dtype in the batch, and the read or the staged crop of each part.

    :func:`~linumpy.stream.planning.reach.with_regions` then plans the reads of all staged crops of a batch together.
    """
    crops, shapes = checked_crops(sample, infos, config)
    warp = _warp(crops, infos, config, index, epoch)
    reads = tuple(
        _plan_crop(row, crop, info, part, shape, config, warp)
        for part, crop, info, shape in zip(sample.all_parts(), crops, infos, shapes, strict=True)
    )
    return shapes, reads


def checked_crops(
    sample: Sample, infos: Sequence[ArrayInfo], config: Config
) -> tuple[list[Crop], tuple[PartShape, ...]]:
    """Check all parts of a sample, which takes a fraction of planning it; return their crops and shapes."""
    parts, image = sample.all_parts(), infos[0].grid
    crops = [crop_of(sample, part, image, info.grid) for part, info in zip(parts, infos, strict=True)]
    shapes = tuple(_part_shape(part, crop, info, config) for part, crop, info in zip(parts, crops, infos, strict=True))
    for part, crop, info in zip(parts, crops, infos, strict=True):
        _check_crop(crop, info, part, config)
    return crops, shapes


def _warp(crops: Sequence[Crop], infos: Sequence[ArrayInfo], config: Config, index: int, epoch: int) -> Warp | None:
    if config.augment is None:
        return None
    half_extents = [
        [(stop - start - 1) / 2 * step for (start, stop), step in zip(crop.zyx, crop.zyx_step, strict=True)]
        for crop in crops
    ]
    flat = 3 - min(info.space for info in infos)
    half_extent = [max(extents) for extents in zip(*half_extents, strict=True)]
    half_extent[:flat] = [0.0] * flat
    return draw_warp(config.augment, half_extent, seed=config.seed, epoch=epoch, index=index, flat=flat)


def _reaches_out(crop: Crop, info: ArrayInfo) -> list[bool]:
    return [start < 0 or stop > n for (start, stop), n in zip(crop.aabb, info.shape, strict=True)]


def _check_crop(crop: Crop, info: ArrayInfo, part: Part, config: Config) -> None:
    aabb, reaches_out = crop.aabb, _reaches_out(crop, info)
    if config.augment is not None and config.augment.needs_spacing and crop.step is None:
        raise InvalidArgument(
            f"{info.name} has no voxel spacing, which this augmentation needs: pass Config(spacing=…) in µm "
            f"({info.grid.missing})"
        )
    if any(reaches_out) and config.pad is None:
        axis = reaches_out.index(True)
        name = "aabb" if crop.exact_start is None else f"part {part.name!r}"
        raise InvalidArgument(
            f"{name} axis {axis}: {aabb[axis]} reaches out of {info.name} with {info.shape[axis]} voxels; "
            "pass Config(pad=…) to allow that"
        )
    if config.augment is None and (config.pad == "constant" or not any(reaches_out)):
        return  # the crop is copied, and not resampled
    if info.dtype.kind == "c":
        raise InvalidArgument(
            f"{info.name} holds complex numbers, which can only be padded by a constant, and not augmented"
        )
    if any(reaches_out[:-3]):
        axis = reaches_out.index(True)
        raise InvalidArgument(f"aabb axis {axis}: only the last three axes may reach out of {info.name} here")


def _plan_crop(
    row: int, crop: Crop, info: ArrayInfo, part: Part, shape: PartShape, config: Config, warp: Warp | None
) -> CropRead | WarpedCrop:
    if warp is None and not any(_reaches_out(crop, info)):
        return CropRead(row, info, crop.aabb, _whole(shape.shape), None, is_whole=True)
    if warp is None and config.pad == "constant":
        region = tuple((max(start, 0), min(stop, n)) for (start, stop), n in zip(crop.aabb, info.shape, strict=True))
        if any(start >= stop for start, stop in region):
            return CropRead(row, info, None, ((0, 0),) * len(region), None)
        inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(region, crop.aabb, strict=True))
        return CropRead(row, info, region, inside, None)
    if warp is None:
        return WarpedCrop(row, info, crop._replace(exact_start=None, step=None), _NO_WARP, 0)
    if part.kind == "image":
        return WarpedCrop(row, info, crop, warp, 1)
    return WarpedCrop(row, info, crop, replace(warp, intensity=NEUTRAL), 0)


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


#: The augmentation of a crop that is only padded.
_NO_WARP = Warp(np.eye(3), np.zeros(3), None, 1.0, NEUTRAL)
