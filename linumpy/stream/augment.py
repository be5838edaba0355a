"""Parameters of augmentation: :class:`Augment` and :class:`Elastic`, validated. Pure.

Lengths are in µm, along (Z, Y, X). :mod:`linumpy.stream.planning.warp` draws from them.
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
        put(self, "flip", _axes(self.flip))
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


def _axes(flip: object) -> tuple[str, ...]:
    names = tuple(flip) if isinstance(flip, (str, Sequence)) else (flip,)
    if not all(isinstance(name, str) and name in ("z", "y", "x") for name in names):
        raise InvalidArgument(f"flip must name axes of 'zyx' (got {flip!r})")
    return names


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
