"""Which voxels of a part show what a sample's crop shows: boxes of one image → voxels of another one. Pure.

Coordinates of voxels are those of their centres. Two images meet in physical coordinates (µm), axis by axis, by name;
two resolution levels of one image by the transformations of its metadata. An array whose metadata have no coordinates
has those of the sample's image if it has its shape, and is refused otherwise.
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
    """Coordinates of the voxels of a resolution level.

    Attributes
    ----------
    name : str
        Name of the array, in messages.
    axes : tuple of str or None
        Names of all axes in lower case; None where the metadata have none.
    space : int
        Number of axes of space; they are the last ones, three at most.
    finest : tuple of int
        Shape of level 0.
    factors, shifts : tuple of float
        Along each axis: voxels of level 0 in one of this level; where its first voxel lies, in voxels of level 0.
    spacing, origin : tuple of float or None
        Of level 0 in µm along the axes of space: distance of voxels, and where the first one lies.
    missing : str
        What the metadata lack, where `spacing` or `origin` is None.
    lead : tuple
        Scale, translation and unit of each axis that is not of space, where the metadata name axes.
    """

    name: str
    axes: tuple[str, ...] | None
    space: int
    finest: tuple[int, ...]
    factors: tuple[float, ...]
    shifts: tuple[float, ...]
    spacing: tuple[float, ...] | None = None
    origin: tuple[float, ...] | None = None
    missing: str = "it has no OME-Zarr metadata"
    lead: tuple[tuple[float, float, str | None], ...] = ()

    @property
    def rank(self) -> int:
        """Number of axes."""
        return len(self.finest)

    @cached_property
    def is_finest(self) -> bool:
        """Whether its voxels are those of level 0."""
        return set(self.factors) == {1.0} and set(self.shifts) == {0.0}

    @cached_property
    def step(self) -> tuple[float, ...] | None:
        """Distance of voxels of this level in µm along the axes of space."""
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


class Cut(NamedTuple):
    """The voxels of a level that a crop takes.

    Attributes
    ----------
    box : Box
        Whole voxels; their centre is within half a voxel of that of the sample.
    first : tuple of float or None
        Where the first voxel lies if the centre is exactly that of the sample; None where it is that of the box.
    dropped : tuple of int
        Axes, of one voxel each, that the batch does not have.
    step : tuple of float or None
        Distance of voxels in µm along the axes of space.
    """

    box: Box
    first: tuple[float, ...] | None
    dropped: tuple[int, ...]
    step: tuple[float, ...] | None


class _Axis(NamedTuple):
    """An axis of a part: what is at ``c`` along an axis of the sample is at ``scale * c + shift`` along this one."""

    of_sample: int | None  # None: it has one entry, whatever the sample shows
    scale: float = 1.0
    shift: float = 0.0


class _Alignment(NamedTuple):
    """All axes of a part, and the distance of its voxels in µm along those of space."""

    axes: tuple[_Axis, ...]
    step: tuple[float, ...] | None
    is_same: bool  # every voxel of the part has the coordinates of the sample's


def cut(sample: Sample, part: Part, image: Grid, grid: Grid) -> Cut:
    """Find the voxels of a part.

    Parameters
    ----------
    sample : Sample
        Its box is in voxels of level 0 of its own image.
    part : Part
        One of :meth:`Sample.all_parts`.
    image, grid : Grid
        Those of the sample's own image and of the part.

    Raises
    ------
    RankMismatch
        The number of axes of the box or of the part's shape differs from that of its array.
    InvalidArgument
        The position of the part is unknown, or its axes do not match those of the image.
    """
    if len(sample.aabb) != image.rank:
        raise RankMismatch(f"aabb has {len(sample.aabb)} axes, {image.name} has {image.rank}")
    if part.shape is not None and len(part.shape) != grid.rank:
        raise RankMismatch(f"shape of part {part.name!r} has {len(part.shape)} axes, {grid.name} has {grid.rank}")
    alignment = _aligned(image, grid, part.name, is_own(sample, part))
    if alignment.is_same and part.shape is None:
        return Cut(sample.aabb, None, sample.dropped, alignment.step)
    box, first, dropped = [], [], []
    for number, axis in enumerate(alignment.axes):
        given = None if part.shape is None else part.shape[number]
        is_single = axis.of_sample is not None and axis.of_sample in sample.dropped
        size, begin = given or 1, 0.0
        if axis.of_sample is not None:
            start, stop = sample.aabb[axis.of_sample]
            size = given or (1 if is_single else max(1, math.floor((stop - start) * axis.scale + 0.5 + _SLACK)))
            begin = (start + stop - 1) / 2 * axis.scale + axis.shift - (size - 1) / 2
        nearest = math.floor(begin + 0.5 + _SLACK)
        box.append((nearest, nearest + size))
        first.append(float(nearest) if abs(begin - nearest) < _SLACK else begin)
        if is_single and size == 1:
            dropped.append(number)
    return Cut(tuple(box), tuple(first), tuple(dropped), alignment.step)


def is_own(sample: Sample, part: Part) -> bool:
    """Whether a part is of the sample's own image."""
    return part.uri is None or (part.uri == sample.uri and part.spacing is None and part.origin is None)


@lru_cache(maxsize=1024)
def _aligned(image: Grid, grid: Grid, part: str, own: bool) -> _Alignment:
    """Align the axes of a part with those of an image."""
    of_image, of_part = _names(image, grid)
    _check_order(image, grid, of_image, of_part, part)
    pairs = [_partner(number, image, grid, of_image, of_part, part) for number in range(grid.rank)]
    is_physical = not own and None not in (image.spacing, image.origin, grid.spacing, grid.origin)
    if not own and not is_physical:
        _check_shape(image, grid, pairs, part)
    axes, steps = [], []
    for number, partner in enumerate(pairs):
        factor, behind = grid.factors[number], grid.shifts[number]
        space, image_space = number - (grid.rank - grid.space), -1
        if partner is not None:
            image_space = partner - (image.rank - image.space)
        scale, shift = 1.0, 0.0
        if is_physical and space >= 0 and partner is not None:
            scale = image.spacing[image_space] / grid.spacing[space]  # type: ignore[index]
            shift = (image.origin[image_space] - grid.origin[space]) / grid.spacing[space]  # type: ignore[index]
        axes.append(_Axis(partner, scale / factor, (shift - behind) / factor))
        if space >= 0:
            of_level_0 = grid.spacing[space] if grid.spacing else None
            if not is_physical and image.spacing is not None and image_space >= 0:
                of_level_0 = image.spacing[image_space]
            steps.append(None if of_level_0 is None else of_level_0 * factor)
    step = None if None in steps else tuple(steps)
    is_same = axes == [_Axis(number) for number in range(image.rank)]
    return _Alignment(tuple(axes), step, is_same)  # type: ignore[arg-type]


def _names(image: Grid, grid: Grid) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Name the axes of both; those of an array without names are the last ones of the other, or of its space."""
    if image.axes is None and grid.axes is None:
        return tuple(f"{n - image.rank}" for n in range(image.rank)), tuple(
            f"{n - grid.rank}" for n in range(grid.rank)
        )
    return image.axes or _borrowed(image, grid), grid.axes or _borrowed(grid, image)


def _borrowed(plain: Grid, named: Grid) -> tuple[str, ...]:
    assert named.axes is not None
    if plain.rank in (named.rank, named.space):
        return named.axes[-plain.rank :]
    raise InvalidArgument(
        f"{plain.name} has {plain.rank} axes without names, {named.name} has {', '.join(named.axes)}: which of them "
        "are the same? Write it as an OME-Zarr image"
    )


def _check_order(image: Grid, grid: Grid, of_image: tuple[str, ...], of_part: tuple[str, ...], part: str) -> None:
    """Raise for axes in another order, and for axes of space that the part lacks."""
    both = [name for name in of_image if name in of_part]
    if both != [name for name in of_part if name in of_image]:
        raise InvalidArgument(
            f"part {part!r}: {grid.name} has the axes {', '.join(of_part)}, {image.name} has {', '.join(of_image)}: "
            "those that both have must come in the same order"
        )
    for number in range(image.rank - image.space, image.rank):
        if of_image[number] not in of_part and image.finest[number] != 1:
            raise InvalidArgument(f"part {part!r}: {grid.name} has no axis {of_image[number]!r}, {image.name} has one")


def _partner(
    number: int, image: Grid, grid: Grid, of_image: tuple[str, ...], of_part: tuple[str, ...], part: str
) -> int | None:
    """Return the axis of the image that matches an axis of the part; None for a single entry that holds for all."""
    name, entries = of_part[number], grid.finest[number]
    if name not in of_image:
        if entries != 1:
            raise InvalidArgument(
                f"part {part!r}: axis {name!r} of {grid.name} has {entries} entries, and {image.name} has no such axis"
            )
        return None
    if name == "c" and entries == 1:
        return None
    partner = of_image.index(name)
    if number < grid.rank - grid.space and entries != image.finest[partner]:
        alike = name == "t" and grid.lead and image.lead and grid.lead[number] == image.lead[partner]
        if not alike:
            raise InvalidArgument(
                f"part {part!r}: axis {name!r} has {entries} entries in {grid.name} and {image.finest[partner]} in "
                f"{image.name}, and the metadata do not say which of them correspond"
            )
    return partner


def _check_shape(image: Grid, grid: Grid, pairs: list[int | None], part: str) -> None:
    """Raise for a part whose position is unknown: it has neither coordinates nor the shape of the image."""
    if all(axis is None or grid.finest[number] == image.finest[axis] for number, axis in enumerate(pairs)):
        return
    lacks = [
        f"{which.name}: {which.missing}; pass {call}(spacing=…, origin=…) in µm"
        for which, call in ((grid, "Part"), (image, "Config"))
        if which.spacing is None or which.origin is None
    ]
    raise InvalidArgument(
        f"part {part!r}: {grid.name} has the shape {grid.finest}, {image.name} {image.finest}, and their "
        f"relative position is unknown ({'; '.join(lacks)})"
    )
