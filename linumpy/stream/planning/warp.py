"""The augmentation of one sample: :class:`Augment` + (seed, epoch, index) → :class:`Warp`. Pure.

Offsets are in µm from the centre of a crop, along (Z, Y, X). Random numbers depend only on the seed, the epoch and the
index of the sample. A voxel of the crop at offset ``p`` shows the volume at offset ``M p + t + d(p)``, with
``M = rotation · shear · scale · flip`` and ``d`` a cubic B-spline over a grid of random displacements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from linumpy.stream.augment import Augment, Range
from linumpy.stream.errors import InvalidArgument

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
    intensity = _draw_intensity(augment, drawn, source)
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


def _draw_intensity(augment: Augment, drawn: _Uniforms, source: np.random.Generator) -> Intensity:
    low, high = augment.intensity_range or (0.0, 1.0)
    gamma = 1.0 if augment.gamma is None else drawn.log_between(augment.gamma)
    contrast = 1.0 if augment.contrast is None else drawn.between(augment.contrast)
    noise, blur = drawn.between(augment.noise), drawn.between(augment.blur)
    return Intensity(low, high - low, gamma, contrast, noise, blur, int(source.integers(0, 2**64, dtype=np.uint64)))


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
