"""Which augmentation a sample gets, :class:`Augment` → :class:`Warp`, and which voxels a warped crop needs. Pure.

All is in physical units: offsets from the centre of a crop in µm along (Z, Y, X). What is drawn depends on the seed,
the epoch and the number of the sample alone. A voxel of the crop at offset ``p`` shows the volume at offset
``M p + t + d(p)``, with ``M = rotation · shear · scale · flip`` and ``d`` a cubic B-spline over a grid of random
displacements.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.stream.errors import InvalidArgument

Range = tuple[float, float]
#: Second word of Philox's key, which separates the streams of random numbers.
AUGMENT_STREAM, CROP_STREAM = 1, 2
#: Nodes of the elastic grid along an axis, as augment.cu keeps a line of them in shared memory.
MAX_NODES = 128
#: Rounding errors of coordinates, which may be computed in another order on the device.
_SLACK = 1e-6


class _NoSeed(np.random.bit_generator.ISeedSequence):
    """Seed of a bit generator whose state is set afterwards; without one NumPy reads random bytes from the system."""

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> np.ndarray:
        return np.zeros(n_words, dtype)


_NO_SEED = _NoSeed()


def generator(stream: int, seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return random numbers that depend on these four alone: Philox with a key and a counter."""
    bits = np.random.Philox(_NO_SEED)  # type: ignore[arg-type] # NumPy's stubs lack what its documentation allows
    counter, key = np.array([0, 0, epoch, index], np.uint64), np.array([seed, stream], np.uint64)
    bits.state = {
        "bit_generator": "Philox", "state": {"counter": counter, "key": key}, "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4, "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    return np.random.Generator(bits)


@dataclass(frozen=True)
class Elastic:
    """Random elastic displacement.

    Attributes
    ----------
    spacing : float
        Distance of control points in µm.
    sigma : float
        Standard deviation of their displacement along each axis in µm.
    """

    spacing: float
    sigma: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.spacing) and self.spacing > 0):
            raise InvalidArgument(f"elastic spacing must be > 0 µm (got {self.spacing})")
        if not (math.isfinite(self.sigma) and self.sigma >= 0):
            raise InvalidArgument(f"elastic sigma must be >= 0 µm (got {self.sigma})")


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Ranges of a random augmentation; parameters that are not given change nothing.

    Attributes
    ----------
    rotation : float or three of (low, high)
        Degrees about the axes Z, Y, X, applied in the order X, Y, Z; a number r stands for (-r, r) about each. Angles
        are right-handed in (x, y, z): 90 about Z turns the crop's X axis to the volume's Y axis, about X its Y to Z,
        and about Y its Z to X, so that what the crop shows is turned the other way.
    scale : (float, float) or three of them
        Factors, drawn uniformly in the logarithm; one pair for all axes together, or one for each. A factor of 2 shows
        twice the field of view.
    shear : float or three of (low, high)
        Of Y by Z, X by Z and X by Y: µm per µm; a number s stands for (-s, s).
    flip : str or sequence of str
        Axes that are mirrored in half of the samples, of ``"zyx"``.
    elastic : Elastic or (spacing, sigma), optional
        In µm.
    translation : float or three of float
        Largest shift in µm along (Z, Y, X).
    gamma, contrast : (float, float), optional
        Exponent, applied to values scaled to 0…1 by `intensity_range` and clipped below at 0; factor about the middle
        of `intensity_range`.
    noise : float or (float, float)
        Standard deviation of Gaussian noise, or the range of it, in units of the values.
    blur : float or (float, float)
        Standard deviation of a Gaussian in µm, or the range of it.
    intensity_range : (float, float), optional
        What `gamma` and `contrast` refer to.

    Notes
    -----
    Intensities change in the order blur, gamma, contrast, noise; those of labels do not. Blur continues the crop by
    reflection, as SciPy's mode ``"reflect"``, and rounds to the batch's dtype after each axis.
    """

    rotation: Any = 0.0
    scale: Any = (1.0, 1.0)
    shear: Any = 0.0
    flip: Any = ""
    elastic: Any = None
    translation: Any = 0.0
    gamma: Range | None = None
    contrast: Range | None = None
    noise: Any = 0.0
    blur: Any = 0.0
    intensity_range: Range | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "rotation", _ranges("rotation", self.rotation))
        put(self, "shear", _ranges("shear", self.shear))
        put(self, "scale", _scales(self.scale))
        put(self, "flip", _axes(self.flip))
        if self.elastic is not None and not isinstance(self.elastic, Elastic):
            put(self, "elastic", Elastic(*_floats("elastic", self.elastic, 2, "an Elastic or (spacing, sigma) in µm")))
        shift = self.translation if _is_sequence(self.translation) else (self.translation,) * 3
        shift = _floats("translation", shift, 3, "a number or three of them, in µm")
        put(self, "translation", tuple(_range("translation", (-abs(t), abs(t)))[1] for t in shift))
        put(self, "noise", _least_and_most("noise", self.noise))
        put(self, "blur", _least_and_most("blur", self.blur))
        for name in ("gamma", "contrast", "intensity_range"):
            if getattr(self, name) is not None:
                put(self, name, _range(name, getattr(self, name)))
        if (self.gamma or self.contrast) and self.intensity_range is None:
            raise InvalidArgument("gamma and contrast need intensity_range, the values that they refer to")
        if self.gamma is not None and self.gamma[0] <= 0:
            raise InvalidArgument(f"gamma must be > 0 (got {self.gamma})")
        if self.intensity_range is not None and self.intensity_range[0] == self.intensity_range[1]:
            raise InvalidArgument(f"intensity_range must have low < high (got {self.intensity_range})")

    @property
    def needs_spacing(self) -> bool:
        """Whether anything is in µm, or mixes axes."""
        mixes = any(high > low or low != 0 for low, high in (*self.rotation, *self.shear))
        return mixes or self.elastic is not None or any(self.translation) or self.blur[1] > 0


@dataclass(frozen=True)
class Intensity:
    """Change of intensities of one sample: ``noise`` is the last.

    Attributes
    ----------
    low, span : float
        Intensity range: lowest value, and highest less lowest.
    gamma, contrast, noise, blur : float
        Exponent, factor, standard deviation in units of the values, and in µm.
    key : int
        64 bits that select the noise.
    """

    low: float = 0.0
    span: float = 1.0
    gamma: float = 1.0
    contrast: float = 1.0
    noise: float = 0.0
    blur: float = 0.0
    key: int = 0

    @property
    def is_neutral(self) -> bool:
        """Whether values stay as they are, but for the blur."""
        return self.gamma == 1 and self.contrast == 1 and self.noise == 0


NEUTRAL = Intensity()


@dataclass(frozen=True)
class Warp:
    """What was drawn for one sample; offsets in µm from the centre, axes (Z, Y, X).

    Attributes
    ----------
    matrix, translation : numpy.ndarray
        float64 (3, 3) and (3,).
    nodes : numpy.ndarray or None
        Displacements of control points in µm, float64 (3, nodes along Z, Y, X), components first. The middle of the
        grid is the centre of the crop.
    node_spacing : float
        Distance of control points in µm.
    intensity : Intensity
        Of images; labels keep theirs.
    """

    matrix: np.ndarray
    translation: np.ndarray
    nodes: np.ndarray | None
    node_spacing: float
    intensity: Intensity


def draw_warp(augment: Augment, half_extent: Sequence[float], *, seed: int, epoch: int, index: int, flat: int) -> Warp:
    """Draw the augmentation of a sample.

    Parameters
    ----------
    augment : Augment
        The ranges.
    half_extent : sequence of float
        Largest distance between the centre of a voxel of any part and that of the crop, in µm along (Z, Y, X).
    seed, epoch, index : int
        What the result depends on.
    flat : int
        Number of leading axes of the three that the arrays lack: 1 for 2-D images, which are rotated about Z only.
    """
    drawn = generator(AUGMENT_STREAM, seed, epoch, index)
    angles = [drawn.uniform(low, high) for low, high in augment.rotation]
    if len(augment.scale) == 1:
        scales = np.full(3, _log_uniform(drawn, augment.scale[0]))
    else:
        scales = np.array([_log_uniform(drawn, one) for one in augment.scale])
    shears = [drawn.uniform(low, high) for low, high in augment.shear]
    mirrored = drawn.random(3) < 0.5
    flips = np.array([-1.0 if name in augment.flip and mirrored[axis] else 1.0 for axis, name in enumerate("zyx")])
    shift = drawn.uniform(-1, 1, 3) * augment.translation
    if flat:
        angles = [angles[0] if flat == 1 else 0.0, 0.0, 0.0]
        shears = [0.0, 0.0, shears[2] if flat == 1 else 0.0]
        scales[:flat], flips[:flat], shift[:flat] = 1.0, 1.0, 0.0
    intensity = _draw_intensity(augment, drawn)
    matrix = _rotation(angles) @ _shear(shears) @ np.diag(scales * flips)
    nodes = None if augment.elastic is None else _draw_nodes(augment.elastic, half_extent, drawn, flat)
    spacing = 1.0 if augment.elastic is None else augment.elastic.spacing
    return Warp(matrix, shift, nodes, spacing, intensity)


def node_counts(half_extent: Sequence[float], spacing: float) -> tuple[int, int, int]:
    """Control points along each axis: a cubic B-spline needs one before and two behind each cell."""
    counts = [math.ceil(2 * half / spacing) + 4 for half in half_extent]
    if max(counts) > MAX_NODES:
        raise InvalidArgument(
            f"elastic spacing {spacing} µm gives {max(counts)} control points on an axis; {MAX_NODES} fit"
        )
    return counts[0], counts[1], counts[2]


def _draw_nodes(elastic: Elastic, half_extent: Sequence[float], source: np.random.Generator, flat: int) -> np.ndarray:
    nodes = source.standard_normal((3, *node_counts(half_extent, elastic.spacing))) * elastic.sigma
    nodes[:flat] = 0.0
    return nodes


def _draw_intensity(augment: Augment, source: np.random.Generator) -> Intensity:
    low, high = augment.intensity_range or (0.0, 1.0)
    gamma = 1.0 if augment.gamma is None else _log_uniform(source, augment.gamma)
    contrast = 1.0 if augment.contrast is None else source.uniform(*augment.contrast)
    noise, blur = source.uniform(*augment.noise), source.uniform(*augment.blur)
    return Intensity(low, high - low, gamma, contrast, noise, blur, int(source.integers(0, 2**64, dtype=np.uint64)))


def _log_uniform(source: np.random.Generator, limits: Range) -> float:
    low, high = limits
    value = source.uniform(math.log(low), math.log(high))
    return low if low == high else math.exp(value)


_IDENTITY = np.eye(3)
#: A right-handed turn about each axis of (Z, Y, X), by 90 degrees, takes the first of these axes to the second.
_TURNS = ((2, 1), (0, 2), (1, 0))


def _rotation(degrees: Sequence[float]) -> np.ndarray:
    """Rotate about X, then Y, then Z, right-handed in (x, y, z); the axes of the matrix are (Z, Y, X)."""
    result = _IDENTITY
    for axis, angle in zip((2, 1, 0), reversed(degrees), strict=True):
        if angle == 0:
            continue
        first, second = _TURNS[axis]
        turn = _IDENTITY.copy()
        cos, sin = math.cos(math.radians(angle)), math.sin(math.radians(angle))
        turn[first, first] = turn[second, second] = cos
        turn[second, first], turn[first, second] = sin, -sin
        result = turn @ result
    return result


def _shear(shears: Sequence[float]) -> np.ndarray:
    matrix = _IDENTITY.copy()
    matrix[1, 0], matrix[2, 0], matrix[2, 1] = shears
    return matrix


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def _floats(name: str, value: Any, count: int, what: str) -> list[float]:
    """Return so many numbers, or say `what` is expected."""
    if not _is_sequence(value) or len(value) != count or not all(isinstance(one, numbers.Real) for one in value):
        raise InvalidArgument(f"{name} must be {what} (got {value!r})")
    return [float(one) for one in value]


def _axes(flip: Any) -> tuple[str, ...]:
    names = tuple(flip) if isinstance(flip, (str, Sequence)) else (flip,)
    if not all(isinstance(one, str) and one in ("z", "y", "x") for one in names):
        raise InvalidArgument(f"flip must name axes of 'zyx' (got {flip!r})")
    return names


def _range(name: str, value: Any) -> Range:
    low, high = _floats(name, value, 2, "finite numbers (low, high) with low <= high")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidArgument(f"{name} must be finite numbers (low, high) with low <= high (got {value})")
    return low, high


def _ranges(name: str, value: Any) -> tuple[Range, Range, Range]:
    pairs = [(-abs(float(value)), abs(float(value)))] * 3 if isinstance(value, numbers.Real) else value
    if not _is_sequence(pairs) or len(pairs) != 3:
        raise InvalidArgument(f"{name} must be a number or three of (low, high) (got {value})")
    first, second, third = (_range(name, pair) for pair in pairs)
    return first, second, third


def _scales(value: Any) -> tuple[Range, ...]:
    pairs = value if _is_sequence(value) and len(value) and _is_sequence(value[0]) else [value]
    if len(pairs) not in (1, 3):
        raise InvalidArgument(f"scale must be (low, high) or three of them (got {value})")
    ranges = tuple(_range("scale", pair) for pair in pairs)
    if min(low for low, _ in ranges) <= 0:
        raise InvalidArgument(f"scale must be > 0 (got {value})")
    return ranges


def _least_and_most(name: str, value: Any) -> Range:
    low, high = _range(name, (value, value) if isinstance(value, numbers.Real) else value)
    if low < 0:
        raise InvalidArgument(f"{name} must be >= 0 (got {value})")
    return low, high


def grid_map(warp: Warp, grid: np.ndarray, middle: np.ndarray, steps: np.ndarray, space: int) -> Any:
    """Return scale and origin of the map from voxels of the crop to the grid; 0 for axes that are not of space."""
    scale = steps / warp.node_spacing
    scale[: 3 - space] = 0.0
    origin = (np.array(grid.shape[1:]) - 1) / 2 - middle * scale
    return tuple(scale.tolist()), tuple(origin.tolist())


def blur_sigma(blur: float, box: Sequence[tuple[int, int]], steps: np.ndarray, space: int) -> Any:
    """Return the blur in voxels along axes of space with more than one."""
    if blur == 0:
        return 0.0, 0.0, 0.0
    sizes = (stop - start for start, stop in box)
    wide = [axis >= 3 - space and n > 1 for axis, n in enumerate(sizes)]
    return tuple(value if is_wide else 0.0 for value, is_wide in zip((blur / steps).tolist(), wide, strict=True))


def reach(
    matrix: np.ndarray, offset: np.ndarray, size: np.ndarray, grid: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return bounds of the coordinates that the voxels of a crop have in the volume.

    A cubic B-spline lies between the least and the greatest of its control points, so that displacements inside of the
    crop that exceed those at its faces are within the bounds.
    """
    ends = matrix * (size - 1)
    low = offset + np.minimum(ends, 0).sum(axis=1)
    high = offset + np.maximum(ends, 0).sum(axis=1)
    if grid is not None:
        of_axes = grid.reshape(3, -1)
        low = low + of_axes.min(axis=1)
        high = high + of_axes.max(axis=1)
    return low, high


def read_bounds(
    low: np.ndarray, high: np.ndarray, n: np.ndarray, order: int, pad: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return (start, stop), whole numbers in floats, of the voxels that coordinates from `low` to `high` are made of.

    Neighbours of weight 0 are among them, but for those behind the last voxel of an axis, of `n` voxels.
    """
    shift = 0.5 if order == 0 else 0.0
    first, last = np.floor(low + (shift - _SLACK)), np.floor(high + (shift + _SLACK)) + order
    top = n - 1
    if pad == "constant":
        return np.maximum(first, 0), np.minimum(last, top) + 1
    if pad == "edge":
        return np.minimum(np.maximum(first, 0), top), np.minimum(np.maximum(last, order), top) + 1
    outside = (first < 0) | (last > top)
    first[outside], last[outside] = _reflected(
        first[outside], last[outside], np.broadcast_to(top, outside.shape)[outside]
    )
    return first, last + 1


def _reflected(first: np.ndarray, last: np.ndarray, top: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the least and the greatest of the voxels 0 to `top` that `first` to `last` stand for."""
    period = np.maximum(2 * top, 1)
    begin = np.mod(first, period)
    end = begin + (last - first)
    turned = [np.where(one <= top, one, period - one) for one in (begin, np.mod(end, period))]
    has_bottom = (begin == 0) | (end >= period)
    has_top = ((begin <= top) & (end >= top)) | (end >= period + top)
    return np.where(has_bottom, 0, np.minimum(*turned)), np.where(has_top, top, np.maximum(*turned))


def fold(voxels: np.ndarray, n: int, pad: str) -> np.ndarray:
    """Map indices of voxels into an axis of `n` voxels, as ``numpy.pad`` extends it in mode edge or reflect."""
    if pad == "edge" or n == 1:
        return np.clip(voxels, 0, n - 1)
    period = 2 * n - 2
    turned = np.mod(voxels, period)
    return np.where(turned < n, turned, period - turned)
