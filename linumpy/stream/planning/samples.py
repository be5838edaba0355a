"""Plans the crops of a sample: sample and arrays → what is read, and how it is resampled. Pure.

A crop is *direct* where the reader fills a view of the batch. It is *staged* where it is augmented, or where its border
repeats voxels of the array: its voxels are read into a buffer and resampled from there into the batch. The box of a
staged crop holds every voxel that the crop depends on; :mod:`~linumpy.stream.planning.needed` selects the chunks of the
box that are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from linumpy.stream.arguments import Box
from linumpy.stream.config import Config, Dtype, Part, Sample
from linumpy.stream.errors import DtypeMismatch, InvalidArgument, RankMismatch
from linumpy.stream.planning.alignment import Cut, cut
from linumpy.stream.planning.reach import blur_sigma, grid_map, reach, read_bounds
from linumpy.stream.planning.records import ArrayInfo, CropRead, PartShape, Resampling
from linumpy.stream.planning.warp import NEUTRAL, Warp, draw_warp


def part_shape(part: Part, crop: Cut, info: ArrayInfo, config: Config) -> PartShape:
    """Return shape and dtype of a part in the batch."""
    dtype = part.dtype
    if dtype is None:
        dtype = Dtype.STORED if part.kind == "labels" else config.dtype
    if info.dtype.kind == "c" and dtype is not Dtype.STORED:
        raise DtypeMismatch(f"{info.name} holds {info.dtype}, which is not cast to {dtype.label}: use dtype='stored'")
    return PartShape(part.name, tuple([b - a for a, b in crop.box]), dtype, dtype.numpy(info.dtype), crop.dropped)


def check_alike(first: Sequence[PartShape], other: Sequence[PartShape]) -> None:
    """Raise for a sample that does not fit the batches of a pipeline.

    Raises
    ------
    InvalidArgument, RankMismatch, DtypeMismatch
        Parts or shapes, numbers of axes, or dtypes differ from those of the first sample.
    """
    if [part.name for part in first] != [part.name for part in other]:
        named = (", ".join(part.name for part in parts) for parts in (other, first))
        raise InvalidArgument("parts {} differ from {} of the first sample".format(*named))
    for here, there in zip(first, other, strict=True):
        if len(here.shape) != len(there.shape):
            raise RankMismatch(f"{here.name}: {len(there.shape)} axes, {len(here.shape)} in the first sample")
        if here.shape != there.shape:
            raise InvalidArgument(f"{here.name}: crop of {there.shape}, of {here.shape} in the first sample")
        if here.dropped != there.dropped:
            raise RankMismatch(f"{here.name}: crop of {there.kept}, of {here.kept} in the first sample")
        if here != there:
            raise DtypeMismatch(f"{here.name}: dtype {there.element}, {here.element} in the first sample")


def plan_whole(
    sample: Sample, infos: Sequence[ArrayInfo], config: Config, parts: Sequence[PartShape], row: int
) -> CropRead | None:
    """Plan a sample that lies completely in its array and is only copied, as most do; None for other samples.

    The result is that of :func:`plan_sample`, in less time; `parts` are those of the batch.
    """
    info, part = infos[0], parts[0]
    box, shape = sample.aabb, part.shape
    if sample.parts or len(parts) > 1 or config.augment is not None or not info.grid.is_finest:
        return None
    if not len(box) == len(shape) == len(info.shape) or sample.dropped != part.dropped or sample.name != part.name:
        return None
    if part.dtype is not config.dtype or info.dtype.kind == "c" or part.dtype.numpy(info.dtype) != part.element:
        return None
    for (start, stop), size, n in zip(box, shape, info.shape, strict=True):
        if stop - start != size or start < 0 or stop > n:
            return None
    return CropRead(row, info, box, _whole(shape), None, is_whole=True)


@dataclass(frozen=True)
class WarpedCrop:
    """A crop that is resampled, of which the box that is read is not known yet.

    Attributes
    ----------
    row : int
        Position in the batch.
    info : ArrayInfo
        The array.
    cut : Cut
        Its voxels.
    warp : Warp
        The augmentation; of a crop that is only padded, one that moves nothing.
    order : int
        0 for nearest voxels, 1 for linear interpolation.
    """

    row: int
    info: ArrayInfo
    cut: Cut
    warp: Warp
    order: int


def plan_sample(
    sample: Sample, infos: Sequence[ArrayInfo], config: Config, row: int, index: int, epoch: int
) -> tuple[tuple[PartShape, ...], tuple[CropRead | WarpedCrop, ...]]:
    """Plan all parts of a sample: shape and dtype in the batch, and the reads.

    The boxes of staged crops follow for all samples of a batch together, by :func:`with_boxes`.

    Parameters
    ----------
    sample : Sample
        The sample.
    infos : sequence of ArrayInfo
        The array of each part.
    config : Config
        dtype, pad, augmentation, seed.
    row : int
        Position in the batch.
    index, epoch : int
        With the seed, they determine the augmentation.
    """
    parts = sample.all_parts()
    image = infos[0].grid
    crops = [cut(sample, part, image, info.grid) for part, info in zip(parts, infos, strict=True)]
    shapes = tuple(part_shape(part, crop, info, config) for part, crop, info in zip(parts, crops, infos, strict=True))
    warp = _warp(crops, infos, config, index, epoch)
    reads = tuple(
        _plan_crop(row, crop, info, part, shape, config, warp)
        for part, crop, info, shape in zip(parts, crops, infos, shapes, strict=True)
    )
    return shapes, reads


def _warp(crops: Sequence[Cut], infos: Sequence[ArrayInfo], config: Config, index: int, epoch: int) -> Warp | None:
    if config.augment is None:
        return None
    if config.augment.needs_spacing:
        for info, crop in zip(infos, crops, strict=True):
            if crop.step is None:
                raise InvalidArgument(
                    f"{info.name} has no voxel spacing, which this augmentation needs: pass Config(spacing=…) in µm "
                    f"({info.grid.missing})"
                )
    halves = [
        [(stop - start - 1) / 2 * n for (start, stop), n in zip(_last(crop.box), _steps(crop), strict=True)]
        for crop in crops
    ]
    flat = 3 - min(info.space for info in infos)
    half = [max(extents) for extents in zip(*halves, strict=True)]
    half[:flat] = [0.0] * flat
    return draw_warp(config.augment, half, seed=config.seed, epoch=epoch, index=index, flat=flat)


def _steps(crop: Cut) -> tuple[float, ...]:
    """Return the distance of voxels along (Z, Y, X) in µm; 1 where the metadata lacks it."""
    return _ONES if crop.step is None else (1.0,) * (3 - len(crop.step)) + crop.step


def _last(box: Box) -> Box:
    """Return the last three axes; missing axes have one voxel."""
    return ((0, 1),) * (3 - len(box)) + box[-3:]


_ONES = (1.0, 1.0, 1.0)


def _plan_crop(
    row: int, crop: Cut, info: ArrayInfo, part: Part, shape: PartShape, config: Config, warp: Warp | None
) -> CropRead | WarpedCrop:
    box = crop.box
    reaches_out = [start < 0 or stop > n for (start, stop), n in zip(box, info.shape, strict=True)]
    if warp is None and True not in reaches_out:
        return CropRead(row, info, box, _whole(shape.shape), None, is_whole=True)
    if any(reaches_out) and config.pad is None:
        axis = reaches_out.index(True)
        which = "aabb" if crop.first is None else f"part {part.name!r}"
        raise InvalidArgument(
            f"{which} axis {axis}: {box[axis]} reaches out of {info.name} with {info.shape[axis]} voxels; "
            "pass Config(pad=…) to allow that"
        )
    if warp is None and config.pad == "constant":
        return _direct(row, box, info)
    if info.dtype.kind == "c":
        raise InvalidArgument(
            f"{info.name} holds complex numbers, which are neither augmented nor padded but by a constant"
        )
    lead = len(box) - min(len(box), 3)
    if any(reaches_out[:lead]):
        axis = reaches_out.index(True)
        raise InvalidArgument(f"aabb axis {axis}: only the last three axes may reach out of {info.name} here")
    return _staged(row, crop, info, part, warp)


@lru_cache(maxsize=256)
def _whole(shape: tuple[int, ...]) -> Box:
    return tuple((0, n) for n in shape)


def _direct(row: int, box: Box, info: ArrayInfo) -> CropRead:
    region = tuple((max(start, 0), min(stop, n)) for (start, stop), n in zip(box, info.shape, strict=True))
    if any(start >= stop for start, stop in region):
        return CropRead(row, info, None, ((0, 0),) * len(box), None)
    inside = tuple((a - start, b - start) for (a, b), (start, _) in zip(region, box, strict=True))
    return CropRead(row, info, region, inside, None)


def _staged(row: int, crop: Cut, info: ArrayInfo, part: Part, warp: Warp | None) -> WarpedCrop:
    if warp is None:
        return WarpedCrop(row, info, crop._replace(first=None, step=None), _NO_WARP, 0)
    if part.kind == "image":
        return WarpedCrop(row, info, crop, warp, 1)
    return WarpedCrop(row, info, crop, replace(warp, intensity=NEUTRAL), 0)


def with_boxes(planned: Sequence[CropRead | WarpedCrop], pad: str) -> list[CropRead]:
    """Find the boxes that staged crops read.

    Parameters
    ----------
    planned : sequence of CropRead or WarpedCrop
        Of all samples of a batch.
    pad : str
        Values outside of volumes: ``Config.pad``.

    Returns
    -------
    list of CropRead
        In the same order.
    """
    reads = {n: crop for n, crop in enumerate(planned) if isinstance(crop, CropRead)}
    staged = [(n, crop) for n, crop in enumerate(planned) if isinstance(crop, WarpedCrop)]
    for order in {crop.order for _, crop in staged}:
        crops = [(n, crop) for n, crop in staged if crop.order == order]
        boxed = _boxed([crop for _, crop in crops], order, pad)
        reads.update(zip([n for n, _ in crops], boxed, strict=True))
    return [reads[n] for n in range(len(planned))]


def _boxed(crops: Sequence[WarpedCrop], order: int, pad: str) -> Iterator[CropRead]:
    """Yield the reads of staged crops of one order of interpolation."""
    boxes = np.array([_last(crop.cut.box) for crop in crops], float)
    step = np.array([_steps(crop.cut) for crop in crops])
    first, sizes = boxes[:, :, 0], boxes[:, :, 1] - boxes[:, :, 0]
    for number, crop in enumerate(crops):
        if crop.cut.first is not None:
            first[number, -len(crop.cut.box) :] = crop.cut.first[-3:]
    middles = (sizes - 1) / 2
    matrices = np.array([crop.warp.matrix for crop in crops]) * (step[:, None, :] / step[:, :, None])
    offsets = first + middles + np.array([crop.warp.translation for crop in crops]) / step
    offsets -= (matrices * middles[:, None, :]).sum(axis=2)
    grids = [
        None if crop.warp.nodes is None else crop.warp.nodes / steps[:, None, None, None]
        for crop, steps in zip(crops, step, strict=True)
    ]
    volumes: list[Any] = [(1,) * (3 - len(crop.info.shape)) + crop.info.shape[-3:] for crop in crops]
    bounds = read_bounds(*reach(matrices, offsets, sizes, grids), np.array(volumes), order, pad)
    begin, end = (bound.astype(int).tolist() for bound in bounds)
    for n, crop in enumerate(crops):
        box, space, warp = crop.cut.box, crop.info.space, crop.warp
        reads = all(start < stop for start, stop in zip(begin[n], end[n], strict=True))
        start, stop = (tuple(begin[n]), tuple(end[n])) if reads else (_NOWHERE, _NOWHERE)
        scale, origin = _NO_GRID
        if (grid := grids[n]) is not None:
            steps = _steps(crop.cut)
            scale, origin = grid_map(warp.node_spacing, grid.shape[1:], tuple(middles[n].tolist()), steps, space)
        sigma = blur_sigma(warp.intensity.blur, _last(box), step[n], space)
        shape = tuple([b - a for a, b in zip(start, stop, strict=True)])
        region = (*box[:-3], *zip(start, stop, strict=True))[-len(box) :] if reads else None
        resampling = Resampling(
            matrices[n], offsets[n], start, shape, volumes[n], grid, scale, origin, sigma, warp.intensity, order
        )  # fmt: skip
        yield CropRead(crop.row, crop.info, region, (), resampling)


_NOWHERE = (0, 0, 0)
_NO_GRID = (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)
#: Of a crop that is only padded.
_NO_WARP = Warp(np.eye(3), np.zeros(3), None, 1.0, NEUTRAL)
