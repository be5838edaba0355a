"""Write an array as an OME-Zarr image (NGFF 0.5), complete or not at all.

In: a NumPy or CuPy array and its voxel spacing in µm. Out: a folder. It is written under a temporary name beside its
place and renamed when complete, so that a run that is killed leaves nothing that looks finished. A device array is
copied to the host block by block, once. Errors: ``FileExistsError`` for a place that is taken, ``ValueError`` for
sizes that do not fit, ``TypeError`` for what is not made of numbers, ``OSError`` for a disk that is full.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.device import to_host

#: A chunk of about this many bytes, where the caller names none.
_CHUNK_NBYTES = 8 * 2**20
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Progress = Callable[[int], object]
"""Called with the number of bytes written since the last call."""


def write_omezarr(
    path: str | Path,
    array: Any,
    spacing: Sequence[float],
    *,
    axes: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compressors: Any = None,
    name: str | None = None,
    origin: Sequence[float] | None = None,
    levels: int = 1,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write an array as an OME-Zarr image.

    Parameters
    ----------
    path : str or Path
        The folder to make.
    array : numpy.ndarray or cupy.ndarray
        The finest resolution.
    spacing : sequence of float
        Voxel spacing in µm, one for each axis.
    axes : str, optional
        Names of the axes, two or three of ``"zyx"``, all of space; by default the last of ``"zyx"``.
    chunks, shards : sequence of int, optional
        By default chunks of at most 8 MiB and no shards. Shards need chunks that divide them.
    compressors
        As zarr takes it; by default chunks are raw.
    name : str, optional
        Of the image; by default that of the folder.
    origin : sequence of float, optional
        Where the centre of the first voxel lies, in µm.
    levels : int
        Resolutions to write; each is the mean of 2 × 2 × 2 voxels of the one before, along the axes that still have
        more than one voxel.
    overwrite : bool
        Whether to replace a Zarr folder that is there. Nothing else is ever replaced.
    progress : callable, optional
        Called with the number of bytes written since the last call.

    Returns
    -------
    Path
        `path`.

    Raises
    ------
    FileExistsError
        The place is taken.
    ValueError
        Spacing, axes, chunks, shards or levels that do not fit the array, or an array without voxels.
    TypeError
        The array is not one of numbers.
    OSError
        Such as a full disk; nothing of the image is left then.
    """
    if not hasattr(array, "shape"):
        array = np.asarray(array)
    options: dict[str, Any] = {"chunks": chunks, "shards": shards, "compressors": compressors, "overwrite": overwrite}
    options |= {"axes": axes, "name": name, "origin": origin, "levels": levels}
    with create_omezarr(path, array.shape, array.dtype, spacing, **options) as targets:
        for box in blocks(targets[0]):
            block = to_host(array[box])
            targets[0][box] = block
            if progress is not None:
                progress(block.nbytes)
        for finer, coarser in itertools.pairwise(targets):
            for box in blocks(coarser):
                coarser[box] = halved(finer, box)
    return Path(path)


@contextmanager
def create_omezarr(
    path: str | Path,
    shape: Sequence[int],
    dtype: Any,
    spacing: Sequence[float],
    *,
    axes: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compressors: Any = None,
    name: str | None = None,
    origin: Sequence[float] | None = None,
    levels: int = 1,
    overwrite: bool = False,
) -> Iterator[list[zarr.Array]]:
    """Make an OME-Zarr image whose arrays the caller fills, finest first; it takes its place when the block ends well.

    Parameters
    ----------
    path, spacing, axes, chunks, shards, compressors, name, origin, levels, overwrite
        As for :func:`write_omezarr`, and so are the errors.
    shape : sequence of int
        Of the finest resolution.
    dtype : dtype
        Of all resolutions.
    """
    path = Path(path)
    image = plan_image(
        shape,
        dtype,
        spacing,
        axes=axes,
        chunks=chunks,
        shards=shards,
        compressors=compressors,
        name=name if name is not None else path.name,
        origin=origin,
        levels=levels,
    )
    check_place(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.part-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        yield image.create(temporary)
        check_place(path, overwrite=overwrite)  # someone else may have come first
        take_place(temporary, path)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(error.errno, f"{os.strerror(error.errno)}; nothing is left of", str(path)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class NewImage:
    """An OME-Zarr image that is yet to be made, all of it checked.

    Attributes
    ----------
    shapes : tuple of tuple of int
        Of each resolution, finest first.
    dtype : numpy.dtype
        Of all resolutions.
    chunks : tuple of int
        Of the finest resolution.
    shards : tuple of int or None
        Of all resolutions.
    compressors
        As zarr takes it.
    names : tuple of str
        Of the axes.
    metadata : dict
        Of NGFF, for the group's attribute ``"ome"``.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    compressors: Any
    names: tuple[str, ...]
    metadata: dict[str, Any]

    def create(self, folder: Path) -> list[zarr.Array]:
        """Make the image, empty, in a folder; returns its arrays, finest first."""
        group = zarr.create_group(folder, zarr_format=3)
        arrays = [
            group.create_array(
                str(level),
                shape=one,
                chunks=self.chunks if self.shards else tuple(map(min, self.chunks, one)),
                shards=self.shards,
                dtype=self.dtype,
                compressors=self.compressors,
                dimension_names=self.names,
                # So that a chunk that happens to be all zeros is there like the others.
                config={"write_empty_chunks": True},
            )
            for level, one in enumerate(self.shapes)
        ]
        group.attrs["ome"] = self.metadata
        return arrays


def plan_image(
    shape: Sequence[int],
    dtype: Any,
    spacing: Sequence[float],
    *,
    name: str,
    axes: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compressors: Any = None,
    origin: Sequence[float] | None = None,
    levels: int = 1,
) -> NewImage:
    """Check what is asked of an image, and choose what is not, before anything is written.

    Parameters and errors are those of :func:`create_omezarr`.
    """
    shape, dtype = tuple(int(n) for n in shape), np.dtype(dtype)
    if dtype.kind not in "biuf":
        raise TypeError(f"an image of {dtype} cannot be written: its voxels are no real numbers")
    names = _names(shape, spacing, axes, origin)
    factors = _level_factors(shape, levels)
    return NewImage(
        shapes=tuple(tuple(-(-n // f) for n, f in zip(shape, one, strict=True)) for one in factors),
        dtype=dtype,
        chunks=_chunk(shape, dtype.itemsize, chunks, shards),
        shards=None if shards is None else tuple(shards),
        compressors=compressors,
        names=tuple(names),
        metadata=_metadata(name, names, spacing, origin, factors),
    )


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a place that is taken, unless it holds a Zarr folder that may be replaced.

    Raises
    ------
    FileExistsError
        Naming the place.
    """
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise FileExistsError(f"{path} exists: choose another place, or overwrite it")
    if not any((path / name).is_file() for name in _ZARR_FILES):
        raise FileExistsError(f"{path} is not a Zarr folder, so it is not overwritten")


def take_place(temporary: Path, path: Path) -> None:
    """Rename the finished image to its place; what was there goes only when the new one stands."""
    if not (path.exists() or path.is_symlink()):
        temporary.rename(path)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    if old.is_symlink():
        old.unlink()  # what it points to is somebody else's
    else:
        shutil.rmtree(old, ignore_errors=True)


def drop_partial_files(folder: Path) -> None:
    """Remove the temporary files that zarr leaves of chunks it was writing when the process was killed."""
    for partial in folder.rglob("*.partial"):
        partial.unlink(missing_ok=True)


def default_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Choose chunks as cubic as the shape allows, of at most 8 MiB; each side is a power of two or the whole axis."""
    chunk = [1] * len(shape)
    while growing := [axis for axis, n in enumerate(shape) if chunk[axis] < n]:
        # The shortest side doubles; of equal ones the last, along which voxels are contiguous.
        axis = min(growing, key=lambda axis: (chunk[axis], -axis))
        longer = [*chunk[:axis], min(2 * chunk[axis], shape[axis]), *chunk[axis + 1 :]]
        if math.prod(longer) * itemsize > _CHUNK_NBYTES:
            break
        chunk = longer
    return tuple(chunk)


def _chunk(
    shape: tuple[int, ...], itemsize: int, chunks: Sequence[int] | None, shards: Sequence[int] | None
) -> tuple[int, ...]:
    """Check chunks and shards, and choose chunks where there are none."""
    for label, sizes in (("chunks", chunks), ("shards", shards)):
        if sizes is not None and (len(sizes) != len(shape) or min(sizes) < 1):
            raise ValueError(f"{label}={tuple(sizes)}: an array of shape {shape} needs {len(shape)} sizes from 1 on")
    if chunks is None and shards is not None:
        raise ValueError(f"shards={tuple(shards)} need chunks= that divide them")
    if chunks is None:
        return default_chunks(shape, itemsize)
    if shards is not None and any(s % c for s, c in zip(shards, chunks, strict=True)):
        raise ValueError(f"shards={tuple(shards)} are no whole numbers of chunks={tuple(chunks)}")
    return tuple(chunks)


def blocks(array: zarr.Array) -> Iterator[tuple[slice, ...]]:
    """Walk an array in boxes that are whole in storage: shards where it has them, else chunks."""
    step = array.shards or array.chunks
    starts = (range(0, n, s) for n, s in zip(array.shape, step, strict=True))
    for corner in itertools.product(*starts):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, step, array.shape, strict=True))


def halved(finer: Any, box: tuple[slice, ...]) -> np.ndarray:
    """Mean of 2 × 2 × … voxels of an array, for a box of the coarser one; an odd last voxel stands alone."""
    lengths = [min(2 * b.stop, n) - 2 * b.start for b, n in zip(box, finer.shape, strict=True)]
    source = np.asarray(finer[tuple(slice(2 * b.start, 2 * b.start + k) for b, k in zip(box, lengths, strict=True))])
    # Wide enough to hold every value of the dtype exactly: float64 would round the largest int64 out of its range.
    wide = np.longdouble if source.dtype.kind in "iu" else np.float64
    mean = source.astype({1: np.float32, 2: np.float32, 4: np.float64}.get(source.dtype.itemsize, wide))
    for axis, length in enumerate(lengths):
        pairs = np.add.reduceat(mean, np.arange(0, length, 2), axis=axis)
        counts = np.minimum(2, length - np.arange(0, length, 2))
        mean = pairs / counts.reshape([-1 if a == axis else 1 for a in range(mean.ndim)])
    return (np.rint(mean) if source.dtype.kind in "biu" else mean).astype(source.dtype)


def _level_factors(shape: tuple[int, ...], levels: int) -> list[tuple[int, ...]]:
    """By how much each level is coarser than the finest, along each axis; an axis of one voxel is halved no more."""
    most = (max(shape, default=1) - 1).bit_length() + 1
    if not 1 <= levels <= most:
        raise ValueError(f"levels={levels}: an array of shape {shape} has 1 to {most} resolutions")
    return [tuple(2 ** min(level, (n - 1).bit_length()) for n in shape) for level in range(levels)]


def _names(
    shape: tuple[int, ...], spacing: Sequence[float], axes: str | None, origin: Sequence[float] | None
) -> list[str]:
    names = list(axes if axes is not None else "zyx"[max(0, 3 - len(shape)) :])
    if len(names) != len(shape) or not 2 <= len(shape) <= 3:
        raise ValueError(f"axes {''.join(names)!r} do not fit an array of shape {shape}: two or three are written")
    if len(set(names)) != len(names) or not set(names) <= set("zyx"):
        raise ValueError(f"axes {''.join(names)!r}: only axes of space are written, each of z, y and x once at most")
    if 0 in shape:
        raise ValueError(f"an array of shape {shape} has no voxels to write")
    if len(spacing) != len(shape) or not all(np.isfinite(s) and s > 0 for s in spacing):
        raise ValueError(f"spacing={tuple(spacing)}: an array of shape {shape} needs {len(shape)} positive µm")
    if origin is not None and (len(origin) != len(shape) or not all(map(np.isfinite, origin))):
        raise ValueError(f"origin={tuple(origin)}: an array of shape {shape} needs {len(shape)} numbers in µm")
    return names


def _metadata(
    name: str,
    names: list[str],
    spacing: Sequence[float],
    origin: Sequence[float] | None,
    factors: list[tuple[int, ...]],
) -> dict[str, Any]:
    """Spell the metadata of NGFF 0.5: of each level the spacing, and where the mean of its first voxels lies."""
    start = [0.0] * len(names) if origin is None else [float(o) for o in origin]
    datasets = []
    for level, factor in enumerate(factors):
        steps = [float(s) * f for s, f in zip(spacing, factor, strict=True)]
        first = [o + (f - 1) / 2 * float(s) for o, f, s in zip(start, factor, spacing, strict=True)]
        transformations = [{"type": "scale", "scale": steps}, {"type": "translation", "translation": first}]
        datasets.append({"path": str(level), "coordinateTransformations": transformations})
    axes = [{"name": one, "type": "space", "unit": "micrometer"} for one in names]
    return {"version": "0.5", "multiscales": [{"name": name, "axes": axes, "datasets": datasets}]}
