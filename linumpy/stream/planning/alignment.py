"""Crops of the parts of a sample: the sample's `aabb` → the `aabb` of each part, in voxels of the part's array. Pure.

The coordinates of a voxel are the coordinates of its centre. Axes are matched by name. Along an axis, two images are
aligned in physical coordinates (µm), and two resolution levels of one image by the transformations of the metadata. An
array without coordinates takes the coordinates of the sample's image if both have the same shape, and is refused
otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from linumpy.stream.arguments import Box
from linumpy.stream.config import Part, Sample
from linumpy.stream.errors import InvalidArgument, RankMismatch

#: Rounding error of positions, in voxels.
_SLACK = 1e-6


@dataclass(frozen=True)
class Grid:
    """Coordinates of the voxels of a resolution level."""

    name: str  # name of the array, in messages
    axes: tuple[str, ...] | None  # names of all axes in lower case; None where the metadata have none
    space: int  # number of axes of space, three at most; they are the last axes
    finest: tuple[int, ...]  # shape of level 0
    #: Along each axis, in voxels of level 0: the size of a voxel of this level, and the coordinate of the first voxel
    #: of this level.
    factors: tuple[float, ...]
    shifts: tuple[float, ...]
    #: Voxel spacing of level 0, and coordinates of the first voxel of level 0, in µm along the axes of space; None
    #: where they are unknown.
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None
    missing: str = "it has no OME-Zarr metadata"  # why `spacing` or `origin` is None
    #: Scale, translation and unit of each leading axis (such as t and c), where the metadata name axes.
    lead: tuple[tuple[float, float, str | None], ...] = ()

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.finest)

    @cached_property
    def is_finest(self) -> bool:
        """Whether this is level 0, or a level with the same voxels."""
        return set(self.factors) == {1.0} and set(self.shifts) == {0.0}

    @cached_property
    def step(self) -> tuple[float, ...] | None:
        """Voxel spacing of this level in µm along the axes of space; None where it is unknown."""
        if self.spacing is None:
            return None
        return tuple(s * f for s, f in zip(self.spacing, self.factors[-self.space :], strict=True))

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.name, self.axes, self.finest, self.factors, self.shifts, self.spacing, self.origin, self.lead)
        )

    def __hash__(self) -> int:
        return self._hash


class Crop(NamedTuple):
    """The crop of one part of a sample."""

    #: Half-open (start, stop) along each axis of the part's array, in voxels of the part's level. The centre of the box
    #: is within half a voxel of the centre of the sample's crop.
    aabb: Box
    #: Coordinates of the first voxel with which both crops have exactly the same centre; None where `aabb` starts
    #: there.
    exact_start: tuple[float, ...] | None
    dropped: tuple[int, ...]  # axes, of one voxel each, that the batch does not have
    step: tuple[float, ...] | None  # voxel spacing in µm along the axes of space; None where it is unknown

    @property
    def zyx(self) -> Box:
        """`aabb` along (Z, Y, X); an axis that the array lacks has one voxel."""
        return ((0, 1),) * (3 - len(self.aabb)) + self.aabb[-3:]

    @property
    def zyx_step(self) -> tuple[float, ...]:
        """Voxel spacing along (Z, Y, X) in µm; 1 where it is unknown, and along an axis that the array lacks."""
        return (1.0, 1.0, 1.0) if self.step is None else (1.0,) * (3 - len(self.step)) + self.step


class _Axis(NamedTuple):
    """An axis of a part: coordinate ``c`` along the axis `of_sample` is ``scale * c + shift`` along this axis.

    ``c`` is in voxels of level 0 of the sample's image, the result in voxels of the part's level.
    """

    of_sample: int | None  # None: the axis has one entry, which is used for every sample
    scale: float = 1.0
    shift: float = 0.0


class _Alignment(NamedTuple):
    """All axes of a part, and its voxel spacing in µm along the axes of space."""

    axes: tuple[_Axis, ...]
    step: tuple[float, ...] | None
    is_same: bool  # a voxel of the part has the same index as the voxel of the sample's image that it shows


def crop_of(sample: Sample, part: Part, image: Grid, grid: Grid) -> Crop:
    """Plan the crop of a part.

    The `aabb` of a sample is in voxels of level 0 of its own image, whose coordinates `image` has; those of the part's
    array are in `grid`.
    """
    if len(sample.aabb) != image.rank:
        raise RankMismatch(f"aabb has {len(sample.aabb)} axes, {image.name} has {image.rank}")
    if part.shape is not None and len(part.shape) != grid.rank:
        raise RankMismatch(f"shape of part {part.name!r} has {len(part.shape)} axes, {grid.name} has {grid.rank}")
    alignment = _aligned(image, grid, part.name, is_own(sample, part))
    if alignment.is_same and part.shape is None:
        return Crop(sample.aabb, None, sample.dropped, alignment.step)
    aabb, exact_start, dropped = [], [], []
    for number, axis in enumerate(alignment.axes):
        given = None if part.shape is None else part.shape[number]
        is_single = axis.of_sample is not None and axis.of_sample in sample.dropped
        size, exact = given or 1, 0.0
        if axis.of_sample is not None:
            start, stop = sample.aabb[axis.of_sample]
            size = given or (1 if is_single else max(1, math.floor((stop - start) * axis.scale + 0.5 + _SLACK)))
            exact = (start + stop - 1) / 2 * axis.scale + axis.shift - (size - 1) / 2
        nearest = math.floor(exact + 0.5 + _SLACK)
        aabb.append((nearest, nearest + size))
        exact_start.append(float(nearest) if abs(exact - nearest) < _SLACK else exact)
        if is_single and size == 1:
            dropped.append(number)
    return Crop(tuple(aabb), tuple(exact_start), tuple(dropped), alignment.step)


def is_own(sample: Sample, part: Part) -> bool:
    """Whether a part shows the sample's own image."""
    return part.uri is None or (part.uri == sample.uri and part.spacing is None and part.origin is None)


@lru_cache(maxsize=1024)
def _aligned(image: Grid, grid: Grid, part: str, is_own_image: bool) -> _Alignment:
    """Align the axes of a part with the axes of the sample's image."""
    image_axes, part_axes = _axis_names(image, grid)
    _check_order(image, grid, image_axes, part_axes, part)
    partners = [_partner(number, image, grid, image_axes, part_axes, part) for number in range(grid.rank)]
    is_physical = not is_own_image and None not in (image.spacing, image.origin, grid.spacing, grid.origin)
    if not is_own_image and not is_physical:
        _check_shape(image, grid, partners, part)
    axes, steps = [], []
    for number, partner in enumerate(partners):
        factor, first = grid.factors[number], grid.shifts[number]
        space, image_space = number - (grid.rank - grid.space), -1
        if partner is not None:
            image_space = partner - (image.rank - image.space)
        scale, shift = 1.0, 0.0
        if is_physical and space >= 0 and partner is not None:
            scale = image.spacing[image_space] / grid.spacing[space]  # type: ignore[index]
            shift = (image.origin[image_space] - grid.origin[space]) / grid.spacing[space]  # type: ignore[index]
        axes.append(_Axis(partner, scale / factor, (shift - first) / factor))
        if space >= 0:
            spacing = grid.spacing[space] if grid.spacing else None
            if not is_physical and image.spacing is not None and image_space >= 0:
                spacing = image.spacing[image_space]
            steps.append(None if spacing is None else spacing * factor)
    step = None if None in steps else tuple(steps)
    is_same = axes == [_Axis(number) for number in range(image.rank)]
    return _Alignment(tuple(axes), step, is_same)  # type: ignore[arg-type]


def _axis_names(image: Grid, grid: Grid) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the axes of both arrays.

    An array without names takes the names of the other array: of all axes, or of the axes of space. If neither has
    names, an axis is named by its number from the last axis on.
    """
    if image.axes is None and grid.axes is None:
        return tuple(f"{n - image.rank}" for n in range(image.rank)), tuple(
            f"{n - grid.rank}" for n in range(grid.rank)
        )
    return image.axes or _names_of(image, grid), grid.axes or _names_of(grid, image)


def _names_of(plain: Grid, named: Grid) -> tuple[str, ...]:
    """Return names for the axes of `plain`, which has none, from an array that has as many axes or axes of space."""
    assert named.axes is not None
    if plain.rank in (named.rank, named.space):
        return named.axes[-plain.rank :]
    raise InvalidArgument(
        f"{plain.name} has {plain.rank} axes without names, {named.name} has {', '.join(named.axes)}: which of them "
        "are the same? Write it as an OME-Zarr image, whose metadata name them"
    )


def _check_order(image: Grid, grid: Grid, image_axes: tuple[str, ...], part_axes: tuple[str, ...], part: str) -> None:
    """Raise if common axes come in another order, or the part lacks an axis of space that has several voxels."""
    both = [name for name in image_axes if name in part_axes]
    if both != [name for name in part_axes if name in image_axes]:
        raise InvalidArgument(
            f"part {part!r}: {grid.name} has the axes {', '.join(part_axes)}, "
            f"{image.name} has {', '.join(image_axes)}: axes that both have must come in the same order"
        )
    for number in range(image.rank - image.space, image.rank):
        if image_axes[number] not in part_axes and image.finest[number] != 1:
            raise InvalidArgument(
                f"part {part!r}: {grid.name} has no axis {image_axes[number]!r}, {image.name} has one"
            )


def _partner(
    number: int, image: Grid, grid: Grid, image_axes: tuple[str, ...], part_axes: tuple[str, ...], part: str
) -> int | None:
    """Return the axis of the image that matches an axis of the part; None if the part has one entry for all samples."""
    name, entries = part_axes[number], grid.finest[number]
    if name not in image_axes:
        if entries != 1:
            raise InvalidArgument(
                f"part {part!r}: axis {name!r} of {grid.name} has {entries} entries, and {image.name} has no such axis"
            )
        return None
    if name == "c" and entries == 1:
        return None
    partner = image_axes.index(name)
    if number < grid.rank - grid.space and entries != image.finest[partner]:
        alike = name == "t" and grid.lead and image.lead and grid.lead[number] == image.lead[partner]
        if not alike:
            raise InvalidArgument(
                f"part {part!r}: axis {name!r} has {entries} entries in {grid.name} and {image.finest[partner]} in "
                f"{image.name}, and the metadata do not say which of them correspond"
            )
    return partner


def _check_shape(image: Grid, grid: Grid, partners: list[int | None], part: str) -> None:
    """Raise if the position of a part is unknown, since it has neither coordinates nor the shape of the image."""
    if all(axis is None or grid.finest[number] == image.finest[axis] for number, axis in enumerate(partners)):
        return
    lacks = [
        f"{array.name}: {array.missing}; pass {call}(spacing=…, origin=…) in µm"
        for array, call in ((grid, "Part"), (image, "Config"))
        if array.spacing is None or array.origin is None
    ]
    raise InvalidArgument(
        f"part {part!r}: {grid.name} has the shape {grid.finest}, {image.name} {image.finest}, and their "
        f"relative position is unknown ({'; '.join(lacks)})"
    )
