"""Write an array as an OME-Zarr image (NGFF 0.5), complete or not at all.

In: a NumPy or CuPy array and its voxel spacing in µm. Out: a folder. It is written under a temporary name beside its
place and renamed when complete, so that a run that is killed leaves nothing that looks finished. A device array is
copied to the host block by block, once. Errors: ``FileExistsError`` for a place that is taken, ``ValueError`` for
sizes that do not fit.
"""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.device import to_host

#: A chunk of about this many bytes, where the caller names none.
_CHUNK_NBYTES = 8 * 2**20
_ZARR_FILES = ("zarr.json", ".zgroup", ".zarray")

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
        Names of the axes, all of space; by default the last of ``"zyx"``.
    chunks, shards : sequence of int, optional
        By default chunks of about 8 MiB and no shards.
    compressors
        As zarr takes it; by default chunks are raw.
    origin : sequence of float, optional
        Where the centre of the first voxel lies, in µm.
    levels : int
        Resolutions to write; each is the mean of 2 × 2 × 2 voxels of the one before.
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
        Spacing, axes or levels that do not fit the array.
    """
    options = {"axes": axes, "chunks": chunks, "shards": shards, "compressors": compressors, "origin": origin}
    with create_omezarr(
        path, array.shape, array.dtype, spacing, levels=levels, overwrite=overwrite, **options
    ) as targets:
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
    origin: Sequence[float] | None = None,
    levels: int = 1,
    overwrite: bool = False,
) -> Iterator[list[zarr.Array]]:
    """Make an OME-Zarr image whose arrays the caller fills, finest first; it takes its place when the block ends well.

    Parameters
    ----------
    path, spacing, axes, chunks, shards, compressors, origin, levels, overwrite
        As for :func:`write_omezarr`.
    shape : sequence of int
        Of the finest resolution.
    dtype : dtype
        Of all resolutions.
    """
    path = Path(path)
    shape = tuple(int(n) for n in shape)
    names = _names(shape, spacing, axes, origin)
    shapes = _level_shapes(shape, levels)
    check_place(path, overwrite=overwrite)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.part-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        group = zarr.create_group(temporary, zarr_format=3)
        chunk = tuple(chunks) if chunks is not None else default_chunks(shape, np.dtype(dtype).itemsize)
        arrays = [
            group.create_array(
                str(level),
                shape=one,
                chunks=tuple(min(c, n) for c, n in zip(chunk, one, strict=True)) if shards is None else chunk,
                shards=None if shards is None else tuple(shards),
                dtype=dtype,
                compressors=compressors,
                dimension_names=names,
                # So that a chunk that happens to be all zeros is there like the others.
                config={"write_empty_chunks": True},
            )
            for level, one in enumerate(shapes)
        ]
        group.attrs["ome"] = _metadata(path.name, names, spacing, origin, len(arrays))
        yield arrays
        _take_place(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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


def _take_place(temporary: Path, path: Path) -> None:
    """Rename the finished image to its place; what was there goes only when the new one stands."""
    if not path.exists():
        temporary.rename(path)
        return
    old = temporary.with_name(f"{temporary.name}.old")
    path.rename(old)
    try:
        temporary.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def default_chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Choose chunks as cubic as the shape allows, of about 8 MiB."""
    side = round((_CHUNK_NBYTES / itemsize) ** (1 / len(shape)))
    side = 2 ** max(0, side.bit_length() - 1)
    return tuple(max(1, min(side, n)) for n in shape)


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
    mean = source.astype(np.float64 if source.dtype.itemsize > 2 else np.float32)
    for axis, length in enumerate(lengths):
        pairs = np.add.reduceat(mean, np.arange(0, length, 2), axis=axis)
        counts = np.minimum(2, length - np.arange(0, length, 2))
        mean = pairs / counts.reshape([-1 if a == axis else 1 for a in range(mean.ndim)])
    return (np.rint(mean) if source.dtype.kind in "iu" else mean).astype(source.dtype)


def _level_shapes(shape: tuple[int, ...], levels: int) -> list[tuple[int, ...]]:
    if levels < 1:
        raise ValueError(f"levels={levels}: at least one resolution is written")
    return [tuple(-(-n // 2**level) for n in shape) for level in range(levels)]


def _names(
    shape: tuple[int, ...], spacing: Sequence[float], axes: str | None, origin: Sequence[float] | None
) -> list[str]:
    names = list(axes if axes is not None else "zyx"[max(0, 3 - len(shape)) :])
    if len(names) != len(shape) or not shape:
        raise ValueError(f"axes {''.join(names)!r} do not fit an array of shape {shape}")
    if len(spacing) != len(shape) or not all(np.isfinite(s) and s > 0 for s in spacing):
        raise ValueError(f"spacing={tuple(spacing)}: an array of shape {shape} needs {len(shape)} positive µm")
    if origin is not None and len(origin) != len(shape):
        raise ValueError(f"origin={tuple(origin)}: an array of shape {shape} needs {len(shape)} numbers in µm")
    return names


def _metadata(
    name: str, names: list[str], spacing: Sequence[float], origin: Sequence[float] | None, levels: int
) -> dict[str, Any]:
    """Spell the metadata of NGFF 0.5: of each level the spacing, and where the mean of its first voxels lies."""
    datasets = []
    for level in range(levels):
        steps = [float(s) * 2**level for s in spacing]
        first = [o + (2**level - 1) / 2 * s for o, s in zip(origin or [0.0] * len(names), spacing, strict=True)]
        transformations = [{"type": "scale", "scale": steps}, {"type": "translation", "translation": first}]
        datasets.append({"path": str(level), "coordinateTransformations": transformations})
    axes = [{"name": one, "type": "space", "unit": "micrometer"} for one in names]
    return {"version": "0.5", "multiscales": [{"name": name, "axes": axes, "datasets": datasets}]}
