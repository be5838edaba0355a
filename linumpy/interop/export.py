"""Copies of OME-Zarr images as single files of other formats: :func:`to_tiff` and :func:`to_nifti`.

In: an image. Out: an OME-TIFF with the spacing in µm, or a NIfTI file with the spacing in mm, written completely or not
at all. Planes are read and written some chunks at a time, so the image may be larger than memory. tifffile and nibabel
are imported inside functions. Errors: those of :func:`linumpy.open_image` and :func:`linumpy.read_zarr`;
``FileExistsError``; ``ImportError`` without the package; ``TypeError`` for voxels of a type that the format does not
have; ``ValueError`` for other axes of space than z, y, x or y, x, and for the suffix of a file.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.gpu.zarr_io import read_zarr
from linumpy.interop.channels import channel_names
from linumpy.io.carried import carried_from
from linumpy.io.ngff.axes import Spacing
from linumpy.io.output.files import replacing
from linumpy.io.stores.tiff import SUFFIXES
from linumpy.io.volume import Volumes, open_volumes
from linumpy.packages import needs

#: Approximate bytes of the planes that are read at once.
_SLAB_NBYTES = 64 * 2**20
#: Axis of NIfTI's world and direction along it, by the orientation (RFC-4). The axes point right, anterior, superior.
_WORLD_DIRECTIONS = {
    "left-to-right": (0, 1), "right-to-left": (0, -1),
    "posterior-to-anterior": (1, 1), "anterior-to-posterior": (1, -1),
    "inferior-to-superior": (2, 1), "superior-to-inferior": (2, -1),
}  # fmt: skip
#: OME's symbols of NGFF's units of time, and the seconds of each.
_TIMES = {
    "nanosecond": ("ns", 1e-9), "microsecond": ("µs", 1e-6), "millisecond": ("ms", 1e-3), "second": ("s", 1.0),
    "minute": ("min", 60.0), "hour": ("h", 3600.0), "day": ("d", 86400.0),
}  # fmt: skip
_TIFF_DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8")
_NIFTI_DTYPES = (*_TIFF_DTYPES, "u8", "i8")
#: Maximum voxels along an axis of NIfTI-1.
_NIFTI1_MAX_LENGTH = 2**15 - 1


def to_tiff(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Spacing | None = None,
    compression: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a resolution level as an OME-TIFF.

    Parameters
    ----------
    source : str or Path
        An OME-Zarr image with the axes of space z, y, x or y, x.
    output : str or Path
        The file to write, ``*.tif``, ``*.tiff``, ``*.btf`` or ``*.tf8``; it has the metadata of OME even if its name
        does not end in ``.ome.tif``.
    level : int
        Resolution level; 0 is the finest.
    channel, time : int, optional
        The entry to select, counted from 0; by default all channels and times.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of level 0 in µm, if the metadata have none.
    compression : str, optional
        As tifffile names it, such as ``"zlib"`` or ``"zstd"``; by default none.
    overwrite : bool
        Whether to replace an existing file.

    Returns
    -------
    Path
        `output`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        As :func:`linumpy.open_image`; the spacing is unknown.
    FileExistsError
        The file exists.
    ValueError
        A channel or time that the image does not have; other axes of space; another suffix of `output`.
    TypeError
        OME-TIFF has no type for the voxels. Bool is written as uint8.
    ImportError
        tifffile is not installed.
    """
    with needs("tifffile", "export"):
        import tifffile
    if not Path(output).name.lower().endswith(SUFFIXES):
        raise ValueError(f"{output}: the name of a TIFF file ends in {', '.join(SUFFIXES)}")
    volumes = open_volumes(source, level, channel=channel, time=time, spacing=spacing)
    first = volumes.first
    dtype = _written_dtype(volumes, "OME-TIFF", _TIFF_DTYPES)
    axes = volumes.leading.upper() + volumes.axes.upper()
    carried = carried_from(volumes)
    metadata: dict[str, object] = {"axes": axes, "Name": carried.name or Path(volumes.name).name}
    for axis, step in zip(volumes.axes.upper(), volumes.spacing, strict=True):
        metadata |= {f"PhysicalSize{axis}": step, f"PhysicalSize{axis}Unit": "µm"}
    time_axis = carried.leading.get("t")
    if time_axis is not None and time_axis.unit in _TIMES:
        metadata |= {"TimeIncrement": time_axis.scale, "TimeIncrementUnit": _TIMES[time_axis.unit][0]}
    names = channel_names(carried.omero)
    if names and "C" in axes:
        metadata["Channel"] = {"Name": names}
    shape = volumes.leading_shape + first.shape
    slabs = (slab.astype(dtype, copy=False) for slab in _slabs(volumes))
    planes = (plane for slab in slabs for plane in slab.reshape(-1, *first.shape[-2:]))
    with (
        replacing(output, overwrite=overwrite) as file,
        tifffile.TiffWriter(file, bigtiff=math.prod(shape) * dtype.itemsize > 2**31, ome=True) as writer,
    ):
        writer.write(
            planes, shape=shape, dtype=dtype, metadata=metadata, compression=compression, photometric="minisblack"
        )
    return Path(output)


def to_nifti(
    source: str | Path,
    output: str | Path,
    *,
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Spacing | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a resolution level as a NIfTI file, whose affine is in mm.

    Parameters
    ----------
    source, level, channel, time, spacing, overwrite
        As for :func:`to_tiff`; the axes of space are z, y, x or y, x.
    output : str or Path
        The file to write, ``*.nii`` or ``*.nii.gz``.

    Returns
    -------
    Path
        `output`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError, FileExistsError, ValueError, TypeError, ImportError
        As :func:`to_tiff`, with nibabel; another suffix of `output` is a `ValueError`.

    Notes
    -----
    Axes of the file are x, y, z, then t and c. If all axes of space have an anatomical orientation (RFC-4), the affine
    maps them to right, anterior and superior; otherwise it assumes that x, y and z are these directions. The step of t
    is written in seconds; if it has no unit of time from nanosecond to day, it is written with an unknown unit. Bool is
    written as uint8.
    """
    with needs("nibabel", "export"):
        import nibabel
    file_name = Path(output).name.lower()
    if not file_name.endswith((".nii", ".nii.gz")):
        raise ValueError(f"{output}: the name of a NIfTI file ends in .nii or .nii.gz")
    volumes = open_volumes(source, level, channel=channel, time=time, spacing=spacing)
    dtype = _written_dtype(volumes, "NIfTI", _NIFTI_DTYPES)
    # x, y, z, t, c, without the last axes that the image does not have.
    space, counts = volumes.first.shape[::-1], dict(zip(volumes.leading, volumes.leading_shape, strict=True))
    leading = (counts.get("t", 1), counts["c"]) if "c" in counts else (counts["t"],) if "t" in counts else ()
    shape = (*space, *((1,) * (3 - len(space)) if leading else ()), *leading)
    header = nibabel.Nifti1Header() if max(shape) <= _NIFTI1_MAX_LENGTH else nibabel.Nifti2Header()
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    affine = affine_in_mm(volumes)
    time_axis = carried_from(volumes).leading.get("t")
    step = 1.0 if time_axis is None else time_axis.scale * _TIMES.get(str(time_axis.unit), ("", 1.0))[1]
    header.set_zooms((*np.linalg.norm(affine[:3, :3], axis=0), step, 1.0)[: len(shape)])
    header.set_xyzt_units("mm", "sec" if time_axis is None or time_axis.unit in _TIMES else "unknown")
    header.set_sform(affine, code="scanner")
    header.set_qform(affine, code="scanner")
    header.set_slope_inter(1, 0)
    with replacing(output, overwrite=overwrite) as temporary, open(temporary, "wb") as raw:
        file: Any = gzip.GzipFile("", "wb", 3, raw, 0) if file_name.endswith(".gz") else raw
        header.write_to(file)  # the header, and the bytes between it and the first voxel
        for slab in _slabs(volumes, channels_last=True):
            file.write(np.ascontiguousarray(slab, dtype).data)
        if file is not raw:
            file.close()
    return Path(output)


def affine_in_mm(volumes: Volumes) -> np.ndarray:
    """Return the affine, (4, 4), from voxels (x, y, z) to mm towards right, anterior and superior.

    Without orientations of all axes, or if two of them contradict each other, x, y and z are assumed to be these
    directions.
    """
    orientations = carried_from(volumes).orientations
    by_axis = {axis: _WORLD_DIRECTIONS.get(str(orientation.get("value"))) for axis, orientation in orientations.items()}
    directions = [by_axis.get(axis) for axis in volumes.axes]
    if None in directions or len({direction[0] for direction in directions if direction}) < len(directions):
        by_axis = {"x": (0, 1), "y": (1, 1), "z": (2, 1)}
    affine = np.diag([0.0, 0.0, 0.0, 1.0])
    for axis, step, start in zip(volumes.axes, volumes.spacing, volumes.origin, strict=True):
        world_axis, sign = by_axis[axis] or (0, 1)
        affine[world_axis, "xyz".index(axis)], affine[world_axis, 3] = sign * step / 1000, sign * start / 1000
    if len(volumes.axes) == 2:
        affine[np.flatnonzero(~affine[:3, :3].any(axis=1)), 2] = 1.0
    return affine


def _written_dtype(volumes: Volumes, name: str, supported: Sequence[str]) -> np.dtype:
    """Return the dtype of the voxels in a file; `TypeError` or `ValueError` if the format lacks the dtype or axes."""
    if volumes.axes not in ("zyx", "yx"):
        raise ValueError(f"{volumes.name} has the axes of space {volumes.axes}: {name} is written of zyx or yx")
    dtype = volumes.first.dtype
    dtype = np.dtype("u1") if dtype.kind == "b" else dtype.newbyteorder("=")
    if dtype.str[1:] not in supported:
        raise TypeError(f"{volumes.name}: {name} has no type for voxels of {dtype}")
    return dtype


def _slabs(volumes: Volumes, *, channels_last: bool = False) -> Iterator[np.ndarray]:
    """Read planes volume by volume, some at a time; the channel varies fastest, or slowest with `channels_last`."""
    entries = list(itertools.product(*map(range, volumes.leading_shape)))
    channel_index = volumes.leading.find("c")
    if channels_last and channel_index >= 0:
        entries.sort(key=lambda entry: entry[channel_index])
    for entry in entries:
        volume = volumes.volumes[entry]
        depth, chunk = volume.shape[0], volume.chunks[0]
        plane_nbytes = math.prod(volume.shape[1:]) * volume.dtype.itemsize
        count = max(1, _SLAB_NBYTES // plane_nbytes)
        count = count // chunk * chunk or count  # whole chunks, if they fit
        if volume.ndim == 2:
            count = depth  # the image is one plane
        for start in range(0, depth, count):
            box = (slice(start, min(start + count, depth)), *(slice(0, n) for n in volume.shape[1:]))
            yield read_zarr(volume.array, region=volume.region(box), device="cpu")
