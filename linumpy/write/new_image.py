"""Plan an OME-Zarr image, and create the image without voxels.

Out: :class:`NewImage`, checked before anything is written, which creates the folder with metadata (NGFF 0.5 or 0.6 in
zarr v3, 0.4 in v2) and empty arrays. Errors: ``ValueError`` and ``TypeError`` for values that do not fit.

Formats: https://ngff.openmicroscopy.org/0.6/, https://ngff.openmicroscopy.org/0.5/ and
https://ngff.openmicroscopy.org/0.4/, section "multiscales".
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import zarr
from numpy.typing import DTypeLike

from linumpy.io.carried import Carried, LeadingAxis
from linumpy.io.codecs import zarr_codecs
from linumpy.io.ngff.axes import MICROMETERS
from linumpy.io.ngff.coordinate_systems import INTRINSIC, Systems, with_systems
from linumpy.io.output.checks import check_free_space
from linumpy.io.output.objects import Target, writable_store
from linumpy.io.zarr_mode import host_zarr_context
from linumpy.plan.codecs import BY_CODEC, DEFAULT_CODEC, Encoding, parse_codec
from linumpy.version import __version__

#: Versions of NGFF that linumpy writes, and the zarr format of each.
ZARR_FORMATS: dict[str, Literal[2, 3]] = {"0.6": 3, "0.5": 3, "0.4": 2}
#: Axes before the axes of space, in their order, and their types in NGFF.
LEADING_AXES = {"t": "time", "c": "channel"}
#: Methods that make a coarser resolution from a finer one.
DOWNSAMPLING = ("mean", "label", "nearest")

#: Limit of a default chunk, in bytes.
_CHUNK_NBYTES = 8 * 2**20


@dataclass(frozen=True)
class NewImage:
    """A checked plan of an OME-Zarr image.

    - `shapes`: shape of each resolution, finest first.
    - `chunks`, `shards`: chunk shape of the finest resolution; shard shape of all resolutions.
    - `compressors`: as for zarr; None for raw chunks.
    - `encoding`: the encoding that `compressors` express; None if the caller passed `compressors`, None among them.
    - `metadata`: attributes of the group: the NGFF attributes (from 0.5 on below ``"ome"``), and the caller's.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    compressors: Any
    names: tuple[str, ...]
    metadata: dict[str, Any]
    fill_value: np.generic
    ngff_version: str
    encoding: Encoding | None = None
    downsampling: str = "mean"

    @property
    def object_name(self) -> str:
        """``"shard"`` or ``"chunk"``: the unit of writing."""
        return "chunk" if self.shards is None else "shard"

    @property
    def nbytes(self) -> int:
        """Bytes of the voxels of all resolutions, decoded."""
        return sum(math.prod(shape) for shape in self.shapes) * self.dtype.itemsize

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of the voxels of an (inner) chunk of the finest resolution."""
        return math.prod(self.chunks) * self.dtype.itemsize

    @property
    def stored(self) -> tuple[tuple[int, ...], ...]:
        """Shape of a shard, or else of a chunk, for each resolution."""
        if self.shards is not None:
            return (self.shards,) * len(self.shapes)
        return tuple(tuple(map(min, self.chunks, shape)) for shape in self.shapes)

    def check_fits(self, path: Target) -> None:
        """Raise an error if the file system of a path lacks the space for the image; see :func:`check_free_space`."""
        check_free_space(path, self.nbytes, encoded=self.compressors is not None)

    def create(self, folder: Target) -> list[zarr.Array]:
        """Create the image in a folder, without voxels; return its arrays, finest first, for host memory."""
        version = ZARR_FORMATS[self.ngff_version]
        options: dict[str, Any] = (
            {"dimension_names": self.names, "shards": self.shards}
            if version == 3
            else {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
        )
        with host_zarr_context():
            group = zarr.create_group(writable_store(folder), zarr_format=version)
            arrays = [
                self._create_array(
                    group,
                    str(level),
                    shape=shape,
                    chunks=self.chunks if self.shards else tuple(map(min, self.chunks, shape)),
                    dtype=self.dtype,
                    compressors=self.compressors,
                    fill_value=self.fill_value,
                    # zarr-python writes a file for a chunk that holds only the fill value, too.
                    config={"write_empty_chunks": True},
                    **options,
                )
                for level, shape in enumerate(self.shapes)
            ]
            group.update_attributes(self.metadata)
        return arrays

    def _create_array(self, group: zarr.Group, name: str, **options: Any) -> zarr.Array:
        try:
            return group.create_array(name, **options)
        except (TypeError, ValueError, KeyError) as error:
            if self.compressors is None:
                raise
            error_type = ValueError if isinstance(error, KeyError) else type(error)  # a KeyError quotes its message
            accepted = "codecs of zarr.codecs" if ZARR_FORMATS[self.ngff_version] == 3 else "one of numcodecs"
            raise error_type(
                f"compressors={self.compressors!r}: an image of NGFF {self.ngff_version} takes {accepted} ({error}); "
                f"ngff_version= chooses another version"
            ) from error


def plan_image(
    shape: Sequence[int],
    dtype: DTypeLike,
    spacing: Sequence[float],
    *,
    name: str,
    axes: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    codec: str | None = None,
    compressors: Any = BY_CODEC,
    origin: Sequence[float] | None = None,
    levels: int = 1,
    downsampling: str | None = None,
    ngff_version: str | None = None,
    fill_value: complex | np.generic = 0,
    attributes: Mapping[str, object] | None = None,
    carried: Carried | None = None,
) -> NewImage:
    """Check the parameters of :class:`linumpy.write.writer.OmeZarrWriter`, and choose what the caller left out."""
    shape, dtype, carried = _integers("shape", shape), np.dtype(dtype), carried or Carried()
    if ngff_version is None:
        ngff_version = carried.ngff_version if carried.ngff_version in ZARR_FORMATS else "0.5"
    if not hasattr(levels, "__index__"):
        raise TypeError(f"levels={levels!r}: pass a whole number")
    chunks = None if chunks is None else _integers("chunks", chunks)
    shards = None if shards is None else _integers("shards", shards)
    _check_numbers("spacing", spacing)
    if origin is not None:
        _check_numbers("origin", origin)
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise TypeError(f"an image of {dtype} cannot be written: its voxels are no real numbers of 1 to 8 bytes")
    if not isinstance(ngff_version, str) or ngff_version not in ZARR_FORMATS:
        raise ValueError(f"ngff_version={ngff_version!r}: choose one of {', '.join(ZARR_FORMATS)}")
    if downsampling is None:
        downsampling = "mean" if carried.image_label is None else "label"
    if downsampling not in DOWNSAMPLING:
        raise ValueError(f"downsampling={downsampling!r}: choose one of {', '.join(DOWNSAMPLING)}")
    if shards is not None and ZARR_FORMATS[ngff_version] == 2:
        raise ValueError(
            f"shards={tuple(shards)}: NGFF {ngff_version} is zarr v2, which has none; leave them out, or pass "
            "ngff_version='0.5'"
        )
    if not isinstance(name, str):
        raise TypeError(f"name={name!r}: pass a str")
    names = _names(shape, spacing, axes, origin)
    leading = sum(name in LEADING_AXES for name in names)
    max_levels = (max(shape[leading:], default=1) - 1).bit_length() + 1
    if not 1 <= levels <= max_levels:
        raise ValueError(f"levels={levels}: an array of shape {shape} can have 1 to {max_levels} resolutions")
    # For each level and axis, how many voxels of the finest level one of the level spans: 1 along t and c.
    halvings = [0] * leading + [(n - 1).bit_length() for n in shape[leading:]]
    factors = [tuple(2 ** min(level, most) for most in halvings) for level in range(levels)]
    steps = [factor[leading:] for factor in factors]
    metadata = _metadata(name, names, spacing, origin, steps, downsampling, ngff_version, carried)
    if not isinstance(attributes, Mapping | None):
        raise TypeError(f"attributes={attributes!r}: pass a mapping")
    try:
        json.dumps(dict(attributes or {}))
    except (TypeError, ValueError) as error:
        raise TypeError(f"attributes={attributes!r}: JSON cannot hold them ({error})") from error
    if reserved := sorted(metadata.keys() & (attributes or {}).keys()):
        raise ValueError(f"attributes={attributes!r}: NGFF reserves {', '.join(reserved)}")
    encoding = _encoding(codec, compressors, carried, dtype.itemsize, ZARR_FORMATS[ngff_version])
    return NewImage(
        shapes=tuple(tuple(-(-n // f) for n, f in zip(shape, factor, strict=True)) for factor in factors),
        dtype=dtype,
        chunks=_chunk_shape(shape, dtype.itemsize, chunks, shards, leading),
        shards=shards,
        compressors=compressors if encoding is None else zarr_codecs(encoding, ZARR_FORMATS[ngff_version]),
        names=tuple(names),
        metadata={**carried.attributes, **metadata, **(attributes or {})},
        fill_value=_fill_value(fill_value, dtype),
        ngff_version=ngff_version,
        encoding=encoding,
        downsampling=downsampling,
    )


def _encoding(
    codec: str | None, compressors: Any, carried: Carried, itemsize: int, zarr_format: int
) -> Encoding | None:
    """Return the encoding of chunks: the caller's, else the source's, else the default; None with `compressors`."""
    if not (isinstance(compressors, str) and compressors == BY_CODEC):
        if codec is not None:
            raise ValueError(f"codec={codec!r}, compressors={compressors!r}: pass one of the two")
        return None
    encoding = parse_codec(codec if codec is not None else carried.codec or DEFAULT_CODEC, itemsize)
    return replace(encoding, checksum=False) if codec is None and zarr_format == 2 else encoding


def create_labels_group(folder: Target, names: Sequence[str], ngff_version: str) -> None:
    """Create the group ``labels`` of an image, whose metadata list the names of the label images, groups in it."""
    version = ZARR_FORMATS[ngff_version]
    labels = {"labels": list(names)}
    attributes: dict[str, Any] = {**labels} if version == 2 else {"ome": {"version": ngff_version, **labels}}
    with host_zarr_context():
        zarr.create_group(writable_store(folder), zarr_format=version, attributes=attributes)


def default_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Choose chunks as cubic as the shape allows, of at most 8 MiB; each side is a power of two or the whole axis."""
    chunk = [1] * len(shape)
    while growing := [axis for axis, n in enumerate(shape) if chunk[axis] < n]:
        # Double the shortest side; of equal sides the last, along which voxels are contiguous.
        axis = min(growing, key=lambda axis: (chunk[axis], -axis))
        longer = [*chunk[:axis], min(2 * chunk[axis], shape[axis]), *chunk[axis + 1 :]]
        if math.prod(longer) * itemsize > _CHUNK_NBYTES:
            break
        chunk = longer
    return tuple(chunk)


def _chunk_shape(
    shape: tuple[int, ...], itemsize: int, chunks: Sequence[int] | None, shards: Sequence[int] | None, leading: int
) -> tuple[int, ...]:
    """Return the caller's chunk shape or a default, after checking chunks and shards."""
    for label, sizes in (("chunks", chunks), ("shards", shards)):
        if sizes is not None and (len(sizes) != len(shape) or min(sizes) < 1):
            raise ValueError(f"{label}={tuple(sizes)}: an array of shape {shape} needs {len(shape)} sizes from 1 on")
    if chunks is None and shards is not None:
        raise ValueError(f"shards={tuple(shards)} need chunks= that divide them")
    if chunks is None:
        return (1,) * leading + default_chunks(shape[leading:], itemsize)
    if shards is not None and any(s % c for s, c in zip(shards, chunks, strict=True)):
        raise ValueError(f"shards={tuple(shards)} are no whole numbers of chunks={tuple(chunks)}")
    return tuple(chunks)


def _integers(label: str, sizes: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(n) for n in sizes)
    except TypeError as error:
        raise TypeError(f"{label}={sizes!r}: pass whole numbers, one for each axis") from error


def _check_numbers(label: str, values: Sequence[float]) -> None:
    if not np.iterable(values) or not all(isinstance(value, (Real, np.number)) for value in values):
        raise TypeError(f"{label}={values!r}: pass numbers in µm, one for each axis of space")


def _fill_value(value: complex | np.generic, dtype: np.dtype) -> np.generic:
    """Return the fill value as a number of the dtype; an error unless the dtype holds the value (floats: rounded)."""
    try:
        with np.errstate(all="ignore"):
            number = np.asarray(value)
            fill = number.astype(dtype)[()]
        is_value = (
            number.ndim == 0 and number.dtype.kind in "biuf" and (number == fill or (number != number and fill != fill))
        )
        if number.ndim == 0 and number.dtype.kind == dtype.kind == "f":  # rounded, but not to infinity
            is_value = is_value or bool(np.isfinite(number) & np.isfinite(fill))
    except (TypeError, ValueError, OverflowError):
        is_value = False
    if not is_value:
        raise ValueError(f"fill_value={value!r} is no value of {dtype}")
    return fill  # type: ignore[return-value]


def _names(
    shape: tuple[int, ...], spacing: Sequence[float], axes: str | None, origin: Sequence[float] | None
) -> list[str]:
    if axes is None and len(shape) > 3:
        raise ValueError(f"an array of shape {shape} has {len(shape)} axes: name them by axes=, such as 'tczyx'")
    if axes is not None and not (np.iterable(axes) and all(isinstance(name, str) for name in axes)):
        raise TypeError(f"axes={axes!r}: pass the name of each axis as a str, such as 'zyx'")
    names = list(axes if axes is not None else "zyx"[max(0, 3 - len(shape)) :])
    leading = [name for name in names if name in LEADING_AXES]
    space = names[len(leading) :]
    if len(names) != len(shape) or not 2 <= len(space) <= 3:
        raise ValueError(
            f"axes {''.join(names)!r} do not fit an array of shape {shape}: an image has two or three axes of space"
        )
    if len(set(names)) != len(names) or not set(space) <= set("zyx") or leading != sorted(leading, reverse=True):
        raise ValueError(
            f"axes {''.join(names)!r}: the order is t, c, then axes of space; each of t, c, z, y, x occurs at most once"
        )
    if min(shape) < 1:
        raise ValueError(f"an array of shape {shape} has no voxels to write")
    needs = f"needs {len(space)}" if not leading else f"with axes {''.join(names)!r} needs {len(space)}"
    if len(spacing) != len(space) or not all(np.isfinite(s) and s > 0 for s in spacing):
        raise ValueError(f"spacing={tuple(spacing)}: an array of shape {shape} {needs} positive µm")
    if origin is not None and (len(origin) != len(space) or not all(map(np.isfinite, origin))):
        raise ValueError(f"origin={tuple(origin)}: an array of shape {shape} {needs} numbers in µm")
    return names


def described_axes(names: Sequence[str], carried: Carried) -> list[dict[str, Any]]:
    """Return the axes of a new image as NGFF describes them, with the units and orientations of its source."""
    axes: list[dict[str, Any]] = []
    for name in names:
        if name in LEADING_AXES:
            unit = carried.leading.get(name, LeadingAxis()).unit
            axes.append({"name": name, "type": LEADING_AXES[name]} | ({"unit": unit} if unit is not None else {}))
        else:
            axes.append({"name": name, "type": "space", "unit": carried.units.get(name, "micrometer")})
        if name in carried.orientations:
            axes[-1]["orientation"] = dict(carried.orientations[name])
    return axes


def _metadata(
    name: str,
    names: list[str],
    spacing: Sequence[float],
    origin: Sequence[float] | None,
    factors: list[tuple[int, ...]],
    downsampling: str,
    version: str,
    carried: Carried,
) -> dict[str, Any]:
    """Return the NGFF attributes; `spacing`, `origin` and `factors` are along the axes of space."""
    leading_count = len(names) - len(spacing)
    start = [0.0] * len(spacing) if origin is None else [float(o) for o in origin]
    leading = [carried.leading.get(name, LeadingAxis()) for name in names[:leading_count]]
    units = [carried.units.get(name, "micrometer") for name in names[leading_count:]]
    datasets = []
    for level, factor in enumerate(factors):
        steps = [float(s) * f for s, f in zip(spacing, factor, strict=True)]
        first = [o + (f - 1) / 2 * float(s) for o, f, s in zip(start, factor, spacing, strict=True)]
        scale, translation = (
            [value / MICROMETERS[unit] for value, unit in zip(values, units, strict=True)] for values in (steps, first)
        )
        transformations = [
            {"type": "scale", "scale": [axis.scale for axis in leading] + scale},
            {"type": "translation", "translation": [axis.translation for axis in leading] + translation},
        ]
        datasets.append({"path": str(level), "coordinateTransformations": transformations})
    image: dict[str, Any] = {"name": name, "axes": described_axes(names, carried), "datasets": datasets}
    if len(factors) > 1:
        image["type"] = downsampling
        image["metadata"] = {
            "method": "linumpy.write.pyramid.halve", "version": __version__, "args": [],
            "kwargs": {"downsampling": downsampling, "factors": [1] * leading_count + list(factors[1])},
        }  # fmt: skip
    carried_fields = {"omero": carried.omero, "image-label": carried.image_label}
    others = {
        key: {**value, "version": version} if "version" in value else dict(value)
        for key, value in carried_fields.items()
        if value is not None
    }
    if version == "0.4":
        return {"multiscales": [{"version": "0.4", **image}], **others}
    if version == "0.6":
        image = with_systems(image, carried.systems or Systems(INTRINSIC, (), ()))
    return {"ome": {"version": version, "multiscales": [image], **others}}
