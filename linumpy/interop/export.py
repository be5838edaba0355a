"""Copies of OME-Zarr images as single files of other formats: :func:`to_tiff` and :func:`to_nifti`.

In: an image, or a volume of it. Out: an OME-TIFF with the spacing in µm, or a NIfTI file with it in mm, complete or not
there. Planes are read and written some chunks at a time, so the image may be larger than memory. tifffile and
nibabel are imported inside. Errors: those of :func:`linumpy.open_image`; ``FileExistsError``; ``TypeError`` for voxels
that the format has no type for.
"""

from __future__ import annotations

import gzip
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.device import install_line
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.carried import carried_from
from linumpy.io.ngff.axes import Spacing
from linumpy.io.ome import open_image
from linumpy.io.output.files import replacing
from linumpy.io.volume import Volumes, select_volumes

#: Voxels are read in slabs of about so many bytes.
_SLAB_NBYTES = 64 * 2**20
#: World axis and direction (right, anterior and superior are positive) that an orientation of RFC-4 means.
_TOWARDS = {
    "left-to-right": (0, 1), "right-to-left": (0, -1),
    "posterior-to-anterior": (1, 1), "anterior-to-posterior": (1, -1),
    "inferior-to-superior": (2, 1), "superior-to-inferior": (2, -1),
}  # fmt: skip
_TIFF_DTYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "f4", "f8")
_NIFTI_DTYPES = (*_TIFF_DTYPES, "u8", "i8")
_NIFTI1_LONGEST = 2**15 - 1


def to_tiff(
    source: str | Path,
    path: str | Path,
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
    path : str or Path
        ``*.tif``, ``*.tiff``; the file has the metadata of OME, also where its name does not end in ``.ome.tif``.
    level, channel, time : int
        Resolution level, and the entry to select, counted from 0; by default all.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of level 0 in µm, where the metadata has none.
    compression : str, optional
        As tifffile names it, such as ``"zlib"`` or ``"zstd"``; by default none.
    overwrite : bool
        Whether to replace an existing file.

    Returns
    -------
    Path
        `path`.

    Notes
    -----
    Bool is written as uint8.
    """
    try:
        import tifffile
    except ImportError as error:
        raise ImportError(f"tifffile is not installed ({error}): {install_line('export')}") from error
    volumes = _volumes(source, level, channel, time, spacing)
    first = volumes.first
    dtype = _written_dtype(volumes, "OME-TIFF", _TIFF_DTYPES)
    axes = volumes.leading.upper() + volumes.axes.upper()
    about: dict[str, Any] = {"axes": axes, "Name": carried_from(volumes).name or Path(volumes.name).name}
    for axis, step in zip(volumes.axes.upper(), volumes.spacing, strict=True):
        about |= {f"PhysicalSize{axis}": step, f"PhysicalSize{axis}Unit": "µm"}
    names = _channel_names(volumes)
    if names and "C" in axes:
        about["Channel"] = {"Name": names}
    shape = volumes.leading_shape + first.shape
    slabs = (slab.astype(dtype, copy=False) for slab in _slabs(volumes))
    planes = (plane for slab in slabs for plane in slab.reshape(-1, *first.shape[-2:]))
    with (
        replacing(path, overwrite=overwrite) as file,
        tifffile.TiffWriter(file, bigtiff=math.prod(shape) * dtype.itemsize > 2**31, ome=True) as writer,
    ):
        writer.write(
            planes, shape=shape, dtype=dtype, metadata=about, compression=compression, photometric="minisblack"
        )
    return Path(path)


def to_nifti(
    source: str | Path,
    path: str | Path,
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
    path : str or Path
        ``*.nii`` or ``*.nii.gz``.

    Returns
    -------
    Path
        `path`.

    Notes
    -----
    Axes of the file are x, y, z, then t and c. Where all axes of space have an anatomical orientation (RFC-4), the
    affine turns them to right, anterior and superior; otherwise x, y and z are taken for these. Bool is written as
    uint8.
    """
    try:
        import nibabel
    except ImportError as error:
        raise ImportError(f"nibabel is not installed ({error}): {install_line('export')}") from error
    suffixes = Path(path).name.lower()
    if not suffixes.endswith((".nii", ".nii.gz")):
        raise ValueError(f"{path}: the name of a NIfTI file ends in .nii or .nii.gz")
    volumes = _volumes(source, level, channel, time, spacing)
    dtype = _written_dtype(volumes, "NIfTI", _NIFTI_DTYPES)
    shape = _nifti_shape(volumes)
    kind = nibabel.Nifti1Header if max(shape) <= _NIFTI1_LONGEST else nibabel.Nifti2Header
    header = kind()
    header.set_data_dtype(dtype)
    header.set_data_shape(shape)
    affine = affine_in_mm(volumes)
    along = carried_from(volumes).leading.get("t")
    seconds = along.scale if along is not None and along.unit == "second" else 1.0
    header.set_zooms((*np.linalg.norm(affine[:3, :3], axis=0), seconds, 1.0)[: len(shape)])
    header.set_xyzt_units("mm", "sec")
    header.set_sform(affine, code="scanner")
    header.set_qform(affine, code="scanner")
    header.set_slope_inter(1, 0)
    with replacing(path, overwrite=overwrite) as temporary, open(temporary, "wb") as raw:
        file: Any = gzip.GzipFile("", "wb", 3, raw, 0) if suffixes.endswith(".gz") else raw
        header.write_to(file)  # up to the first voxel
        for slab in _slabs(volumes, channels_last=True):
            file.write(np.ascontiguousarray(slab, dtype).data)
        if file is not raw:
            file.close()
    return Path(path)


def affine_in_mm(volumes: Volumes) -> np.ndarray:
    """Return the affine from voxels (x, y, z) to mm towards right, anterior and superior, (4, 4)."""
    orientations = carried_from(volumes).orientations
    towards = {axis: _TOWARDS.get(str(about.get("value"))) for axis, about in orientations.items()}
    known = [towards.get(axis) for axis in volumes.axes]
    if None in known or len({one[0] for one in known if one is not None}) < len(known):
        towards = {"x": (0, 1), "y": (1, 1), "z": (2, 1)}
    affine = np.diag([0.0, 0.0, 0.0, 1.0])
    for axis, step, start in zip(volumes.axes, volumes.spacing, volumes.origin, strict=True):
        world, sign = towards[axis] or (0, 1)
        affine[world, "xyz".index(axis)], affine[world, 3] = sign * step / 1000, sign * start / 1000
    if len(volumes.axes) == 2:
        affine[np.flatnonzero(~affine[:3, :3].any(axis=1)), 2] = 1.0
    return affine


def _written_dtype(volumes: Volumes, name: str, known: Sequence[str]) -> np.dtype:
    """Return the dtype of a file, or raise where the format has none, or other axes."""
    if volumes.axes not in ("zyx", "yx"):
        raise ValueError(f"{volumes.name} has the axes of space {volumes.axes}: {name} is written of zyx or yx")
    dtype = volumes.first.dtype
    dtype = np.dtype("u1") if dtype.kind == "b" else dtype.newbyteorder("=")
    if dtype.str[1:] not in known:
        raise TypeError(f"{volumes.name}: {name} has no type for voxels of {dtype}")
    return dtype


def _nifti_shape(volumes: Volumes) -> tuple[int, ...]:
    space = volumes.first.shape[::-1]
    space += (1,) * (3 - len(space)) if volumes.leading else ()
    counts = dict(zip(volumes.leading, volumes.leading_shape, strict=True))
    leading = (counts.get("t", 1), counts["c"]) if "c" in counts else (counts["t"],) if "t" in counts else ()
    return (*space, *leading)


def _volumes(source: str | Path, level: int, channel: int | None, time: int | None, spacing: Spacing | None) -> Volumes:
    return select_volumes(open_image(source, spacing=spacing), level, channel=channel, time=time)


def _channel_names(volumes: Volumes) -> list[str]:
    omero = carried_from(volumes).omero or {}
    channels = omero.get("channels")
    names = [one.get("label") for one in channels] if isinstance(channels, list) else []
    return [str(name) for name in names] if names and all(isinstance(name, str) for name in names) else []


def _slabs(volumes: Volumes, *, channels_last: bool = False) -> Iterator[np.ndarray]:
    """Read planes in order, volume by volume: of each time all channels, or of each channel all times."""
    entries = itertools.product(*map(range, volumes.leading_shape))
    where = volumes.leading.find("c")
    order = sorted(entries, key=lambda one: one[where]) if channels_last and where >= 0 else list(entries)
    for entry in order:
        volume = volumes.volumes[entry]
        depth, chunk = volume.shape[0], volume.chunks[0]
        plane = math.prod(volume.shape[1:]) * volume.dtype.itemsize
        planes = max(1, _SLAB_NBYTES // plane)
        planes = planes // chunk * chunk or planes
        if volume.ndim == 2:
            planes = depth
        for start in range(0, depth, planes):
            box = (slice(start, min(start + planes, depth)), *(slice(0, n) for n in volume.shape[1:]))
            yield read_zarr(volume.array, region=volume.region(box), device="cpu")
