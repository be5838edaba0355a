"""Augmentation: parameters (:class:`Augment`) + (seed, epoch, index) → :class:`Warp`, drawn for a sample. Pure.

Lengths are in µm, along (Z, Y, X). Offsets are in µm from the centre of a crop. Random numbers depend only on the seed,
the epoch and the index of the sample. A voxel of the crop at offset ``p`` shows the volume at offset
``M p + t + d(p)``, with ``M = rotation · shear · scale · flip`` and ``d`` a cubic B-spline over a grid of random
displacements.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

from linumpy.stream.errors import InvalidArgument

Range = tuple[float, float]


@dataclass(frozen=True)
class Elastic:
    """Random elastic displacement.

    Attributes
    ----------
    spacing : float
        Distance between control points in µm.
    sigma : float
        Standard deviation of the displacement of a control point along each axis, in µm.
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
    """Ranges of a random augmentation; the defaults change nothing.

    Attributes
    ----------
    rotation : float or three of (low, high)
        Degrees about the axes Z, Y, X, applied in the order X, Y, Z. A number r means (-r, r) about each axis. Angles
        are right-handed in (x, y, z): 90 about Z turns the crop's X axis to the volume's Y axis; 90 about X turns the
        Y axis to Z, and 90 about Y the Z axis to X. Structures in the crop appear rotated in the opposite direction.
    scale : (float, float) or three of them
        Factors, drawn uniformly in the logarithm: one pair for all axes together, or a pair for each axis. A factor of
        2 shows twice the field of view.
    shear : float or three of (low, high)
        Shear of Y by Z, X by Z and X by Y in µm per µm; a number s means (-s, s).
    flip : str or sequence of str
        Axes of ``"zyx"``, each of which is mirrored in half of the samples.
    elastic : Elastic or (spacing, sigma), optional
        Elastic displacement, in µm.
    translation : float or three of float
        Maximum shift in µm along (Z, Y, X).
    gamma, contrast : (float, float), optional
        `gamma` is the range of an exponent, drawn uniformly in the logarithm. It applies to values that are scaled so
        that `intensity_range` becomes 0…1, and clipped below at 0. `contrast` is the range of a factor of the
        difference from the middle of `intensity_range`.
    noise : float or (float, float)
        Standard deviation of Gaussian noise in units of the values, or the range of this standard deviation.
    blur : float or (float, float)
        Standard deviation of a Gaussian filter in µm, or the range of this standard deviation.
    intensity_range : (float, float), optional
        Reference values of `gamma` and `contrast`.

    Notes
    -----
    Intensities change in the order blur, gamma, contrast, noise; labels keep their values. The blur continues the crop
    by reflection, as SciPy's mode ``"reflect"`` does. Values are rounded to the batch's dtype before the filter of each
    axis.
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
        flip = tuple(self.flip) if isinstance(self.flip, (str, Sequence)) else (self.flip,)
        if not all(isinstance(name, str) and name in ("z", "y", "x") for name in flip):
            raise InvalidArgument(f"flip must name axes of 'zyx' (got {self.flip!r})")
        put(self, "flip", flip)
        if self.elastic is not None and not isinstance(self.elastic, Elastic):
            put(self, "elastic", Elastic(*_floats("elastic", self.elastic, 2, "an Elastic or (spacing, sigma) in µm")))
        shift = self.translation if _is_sequence(self.translation) else (self.translation,) * 3
        shift = _floats("translation", shift, 3, "a number or three of them, in µm")
        put(self, "translation", tuple(_range("translation", (-abs(t), abs(t)))[1] for t in shift))
        put(self, "noise", _low_and_high("noise", self.noise))
        put(self, "blur", _low_and_high("blur", self.blur))
        for name in ("gamma", "contrast", "intensity_range"):
            if getattr(self, name) is not None:
                put(self, name, _range(name, getattr(self, name)))
        if (self.gamma or self.contrast) and self.intensity_range is None:
            raise InvalidArgument("gamma and contrast need intensity_range, their reference values")
        if self.gamma is not None and self.gamma[0] <= 0:
            raise InvalidArgument(f"gamma must be > 0 (got {self.gamma})")
        if self.intensity_range is not None and self.intensity_range[0] == self.intensity_range[1]:
            raise InvalidArgument(f"intensity_range must have low < high (got {self.intensity_range})")

    @property
    def needs_spacing(self) -> bool:
        """Whether voxel spacing is needed, because a length in µm is not 0, or rotation or shear mix axes."""
        mixes = any(high > low or low != 0 for low, high in (*self.rotation, *self.shear))
        return mixes or self.elastic is not None or any(self.translation) or self.blur[1] > 0


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, str)


def _floats(name: str, value: object, count: int, expected: str) -> list[float]:
    """Return `count` numbers, or raise an error that says what is expected."""
    if not _is_sequence(value) or len(value) != count or not all(isinstance(number, numbers.Real) for number in value):
        raise InvalidArgument(f"{name} must be {expected} (got {value!r})")
    return [float(number) for number in value]


def _range(name: str, value: object) -> Range:
    low, high = _floats(name, value, 2, "finite numbers (low, high) with low <= high")
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InvalidArgument(f"{name} must be finite numbers (low, high) with low <= high (got {value})")
    return low, high


def _ranges(name: str, value: object) -> tuple[Range, Range, Range]:
    pairs = [(-abs(float(value)), abs(float(value)))] * 3 if isinstance(value, numbers.Real) else value
    if not _is_sequence(pairs) or len(pairs) != 3:
        raise InvalidArgument(f"{name} must be a number or three of (low, high) (got {value})")
    first, second, third = (_range(name, pair) for pair in pairs)
    return first, second, third


def _scales(value: object) -> tuple[Range, ...]:
    pairs = value if _is_sequence(value) and len(value) and _is_sequence(value[0]) else [value]
    if len(pairs) not in (1, 3):
        raise InvalidArgument(f"scale must be (low, high) or three of them (got {value})")
    ranges = tuple(_range("scale", pair) for pair in pairs)
    if min(low for low, _ in ranges) <= 0:
        raise InvalidArgument(f"scale must be > 0 (got {value})")
    return ranges


def _low_and_high(name: str, value: object) -> Range:
    low, high = _range(name, (value, value) if isinstance(value, numbers.Real) else value)
    if low < 0:
        raise InvalidArgument(f"{name} must be >= 0 (got {value})")
    return low, high


#: Second word of Philox's key: each use of random numbers has a stream of its own.
AUGMENT_STREAM, CROP_STREAM = 1, 2
#: Maximum number of nodes of the elastic grid along an axis: augment.cu keeps a line of them in shared memory.
MAX_NODES = 128


class _NoSeed(np.random.bit_generator.ISeedSequence):
    """Seed of a bit generator whose state is set afterwards; without a seed NumPy would read the system's entropy."""

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray:
        return np.zeros(n_words, dtype)  # type: ignore[call-overload]


_NO_SEED = _NoSeed()


def generator(stream: int, seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a generator that depends only on these four numbers: Philox with a key and a counter."""
    bits = np.random.Philox(_NO_SEED)  # type: ignore[arg-type] # NumPy's stubs lack what its documentation allows
    counter, key = np.array([0, 0, epoch, index], np.uint64), np.array([seed, stream], np.uint64)
    bits.state = {
        "bit_generator": "Philox", "state": {"counter": counter, "key": key}, "buffer": np.zeros(4, np.uint64),
        "buffer_pos": 4, "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    return np.random.Generator(bits)


@dataclass(frozen=True)
class Intensity:
    """Change of intensities of one sample; the defaults change nothing."""

    #: Minimum of the intensity range, and its width.
    low: float = 0.0
    span: float = 1.0
    #: Exponent; factor; standard deviations of the noise in units of the values, and of the blur in µm.
    gamma: float = 1.0
    contrast: float = 1.0
    noise: float = 0.0
    blur: float = 0.0
    key: int = 0  # key of Philox4x32, 64 bits, for the random numbers of the noise


NEUTRAL = Intensity()


@dataclass(frozen=True)
class Warp:
    """The augmentation drawn for one sample; offsets in µm from the centre, axes (Z, Y, X)."""

    #: ``M`` and ``t`` of the module's head, float64 (3, 3) and (3,).
    matrix: np.ndarray
    translation: np.ndarray
    #: Displacements of control points in µm, float64 (3, nodes along Z, Y, X), components first. The centre of the grid
    #: is the centre of the crop. None without elastic displacement.
    nodes: np.ndarray | None
    node_spacing: float  # distance of control points in µm
    intensity: Intensity  # change of intensities of images; labels keep their values


def draw_warp(augment: Augment, half_extent: Sequence[float], *, seed: int, epoch: int, index: int, flat: int) -> Warp:
    """Draw the augmentation of a sample.

    `half_extent` is the largest distance between the centres of a voxel and of its crop, over all parts, in µm along
    (Z, Y, X). `flat` is how many of the axes (Z, Y, X) the arrays lack: 1 for 2-D images, which are rotated about Z
    only.
    """
    source = generator(AUGMENT_STREAM, seed, epoch, index)
    drawn = _Uniforms(source, 14 + len(augment.scale) + (augment.gamma is not None) + (augment.contrast is not None))
    angles = [drawn.between(limits) for limits in augment.rotation]
    scales = [drawn.log_between(limits) for limits in augment.scale] * (3 // len(augment.scale))
    shears = [drawn.between(limits) for limits in augment.shear]
    mirrored = [drawn.between((0.0, 1.0)) < 0.5 for _ in range(3)]
    flips = [-1.0 if name in augment.flip and mirrored[axis] else 1.0 for axis, name in enumerate("zyx")]
    shift = [drawn.between((-1.0, 1.0)) * limit for limit in augment.translation]
    if flat:
        angles = [angles[0] if flat == 1 else 0.0, 0.0, 0.0]
        shears = [0.0, 0.0, shears[2] if flat == 1 else 0.0]
        scales[:flat], flips[:flat], shift[:flat] = [1.0] * flat, [1.0] * flat, [0.0] * flat
    low, high = augment.intensity_range or (0.0, 1.0)
    gamma = 1.0 if augment.gamma is None else drawn.log_between(augment.gamma)
    contrast = 1.0 if augment.contrast is None else drawn.between(augment.contrast)
    noise, blur = drawn.between(augment.noise), drawn.between(augment.blur)
    noise_key = int(source.integers(0, 2**64, dtype=np.uint64))
    intensity = Intensity(low, high - low, gamma, contrast, noise, blur, noise_key)
    shear = _IDENTITY.copy()
    shear[1, 0], shear[2, 0], shear[2, 1] = shears
    matrix = _rotation(angles) @ shear * np.array([scale * flip for scale, flip in zip(scales, flips, strict=True)])
    nodes, spacing = None, 1.0
    if augment.elastic is not None:
        spacing = augment.elastic.spacing
        nodes = source.standard_normal((3, *node_counts(half_extent, spacing))) * augment.elastic.sigma
        nodes[:flat] = 0.0
    return Warp(matrix, np.array(shift), nodes, spacing, intensity)


def node_counts(half_extent: Sequence[float], spacing: float) -> list[int]:
    """Return the number of control points along each axis.

    The crop is covered by whole distances of control points; a cubic B-spline needs one control point before and two
    after such a distance.
    """
    counts = [math.ceil(2 * half / spacing) + 4 for half in half_extent]
    if max(counts) > MAX_NODES:
        raise InvalidArgument(
            f"elastic spacing {spacing} µm gives {max(counts)} control points on an axis; {MAX_NODES} fit"
        )
    return counts


class _Uniforms:
    """Uniform random numbers, drawn by one call of the generator, since a call costs more than the numbers."""

    def __init__(self, source: np.random.Generator, count: int) -> None:
        self._values = iter(source.random(count).tolist())

    def between(self, limits: Range) -> float:
        low, high = limits
        return low + (high - low) * next(self._values)

    def log_between(self, limits: Range) -> float:
        low, high = limits
        value = self.between((math.log(low), math.log(high)))
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
