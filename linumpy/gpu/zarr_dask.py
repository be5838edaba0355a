"""A Zarr array as a dask array, whose blocks are read by the workers that need them.

In: the source of an array. Out: a dask array; its graph holds the path of the array
and the bounds of blocks, never data and never an open store. dask is imported inside functions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import zarr

from linumpy.arrays import Array, DeviceName
from linumpy.checks import is_integer
from linumpy.device import resolve
from linumpy.gpu.read.request import check_elements, new_array
from linumpy.gpu.zarr_io import read_zarr, read_zarr_to_gpu
from linumpy.io.layout import read_layout
from linumpy.io.open import open_source
from linumpy.io.source import Source, local_path, written
from linumpy.packages import needs
from linumpy.plan.layout import ArrayLayout

#: Maximum size of blocks by default, as in dask.
_BLOCK_NBYTES = 128 * 2**20


@dataclass(frozen=True)
class BlockReader:
    """Reads blocks of one array; a small object that is pickled to every worker."""

    path: str
    reader: Callable[..., Array]

    def __call__(self, block_info: Any = None) -> Array:
        """Read a block of dask's array."""
        region = tuple(slice(int(a), int(b)) for a, b in block_info[None]["array-location"])
        try:
            return self.reader(self.path, region=region)
        except Exception as error:
            if worker := _worker_address():
                error.add_note(f"on worker {worker}, which needs linumpy and the disk of {self.path}")
            raise


def _worker_address() -> str:
    """Return the address of the dask worker of this thread; empty without a worker."""
    if "distributed" not in sys.modules:
        return ""
    try:
        return str(sys.modules["distributed"].get_worker().address)
    except ValueError:
        return ""


def zarr_to_dask(source: Source, *, level: int = 0, chunks: Any = None, device: DeviceName = "auto") -> Any:
    """Make a dask array of a Zarr array; each block is read by the worker that needs it.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        In a local folder that the workers see; otherwise as for :func:`read_zarr_to_gpu`.
    level : int
        Resolution level of an OME-Zarr image; 0 is the finest.
    chunks : int or sequence of int, optional
        Shape of the blocks: whole chunks, or whole shards where the array has them; -1 for a whole axis. By default
        blocks of as many chunks or shards as fit into 128 MiB, at least one.
    device : {"auto", "cuda", "cpu"}
        ``"cuda"``: blocks are CuPy arrays, read by :func:`read_zarr_to_gpu`; ``"cpu"``: NumPy arrays, read by
        :func:`read_zarr`. ``"auto"`` depends on this process, so workers must have the same kind of device.

    Returns
    -------
    dask.array.Array
        Axes in the order of the array, dtype in this machine's byte order, ``_meta`` of the kind of the blocks. Its
        name is the same for the same array and blocks. The graph holds a path and the corners of blocks, nothing else.

    Raises
    ------
    ImportError
        dask is not installed.
    FileNotFoundError, SourceError
        No such path; neither an array nor an OME-Zarr image; not in a local folder.
    ValueError
        `chunks` that would cut a chunk or a shard, or that are not one size of 1 or more, or -1, for each axis.
    GpuUnavailableError
        ``device="cuda"`` and there is none here.

    Notes
    -----
    dask arrays carry no units. Spacing, axes and origin are beside it, read without touching a voxel:
    ``image = open_image(source)``, then ``image.axes``, ``image.spacing[level]`` in µm and ``image.origin[level]``.

    linumpy's functions work on blocks: `project` along an axis that one block spans,
    `resize` by a whole factor without smoothing, and with ``map_overlap`` filters whose halo is known (16 voxels for
    `spline_filter` in float32; for `resize` that smooths, the Gaussian's 4 sigma). dask cannot try them on its empty
    arrays: describe the result by ``meta=``.

    Examples
    --------
    >>> from linumpy.gpu import zarr_to_dask
    >>> volume = zarr_to_dask("brain.ome.zarr", level=1)  # doctest: +SKIP
    >>> volume.mean(axis=0).compute()  # doctest: +SKIP

    Half the voxels along each axis, block by block, and a projection:

    >>> def half(block):
    ...     return resize(block, [n // 2 for n in block.shape], anti_aliasing=False)
    >>> chunks = [[n // 2 for n in sizes] for sizes in volume.chunks]  # doctest: +SKIP
    >>> volume.map_blocks(half, chunks=chunks, meta=volume._meta.astype("f4"))  # doctest: +SKIP
    >>> columns = zarr_to_dask("brain.ome.zarr", chunks=(-1, 256, 256))  # doctest: +SKIP
    >>> flat = columns._meta[0].astype("f4")  # doctest: +SKIP
    >>> columns.map_blocks(project, axis=0, drop_axis=0, meta=flat)  # doctest: +SKIP
    """
    with needs("dask", "dask"):
        import dask.array as da
        from dask.base import tokenize

    array = open_source(source, level)
    layout = read_layout(array)
    check_elements(layout)
    blocks = block_shape(layout, chunks)
    where = resolve(device)
    read = read_zarr_to_gpu if where.is_cuda else partial(read_zarr, device="cpu")
    task = BlockReader(local_path(array), read)
    token = tokenize(task.path, layout.shape, str(layout.dtype), blocks, where.kind, _version(array))
    return da.map_blocks(
        task,
        chunks=da.core.normalize_chunks(blocks, layout.shape),
        dtype=layout.dtype,
        meta=new_array(where.xp, (0,) * layout.rank, layout.dtype),
        name=f"zarr-{token}",
    )


def _version(array: zarr.Array) -> tuple[str, str]:
    """Return an array's metadata and when they were written: arrays written to one path in turn differ in them."""
    return repr(array.metadata.to_dict()), written(array)


def block_shape(layout: ArrayLayout, chunks: int | Sequence[int] | None) -> tuple[int, ...]:
    """Choose the shape of blocks.

    `layout`: how the array is stored. `chunks`: wanted shape; -1 for a whole axis, one number for all axes. By default
    whole stored objects of at most 128 MiB together, as cubic as possible.

    `ValueError`: Blocks that would cut a stored object, so that two workers would read it; `chunks` that are not one
    size of 1 or more, or -1, for each axis.
    """
    stored, shape = layout.object_shape, layout.shape
    if chunks is None:
        return _default_block(stored, shape, layout.dtype.itemsize)
    sizes = tuple(chunks) if isinstance(chunks, Iterable) else (chunks,) * layout.rank
    if len(sizes) != layout.rank or not all(is_integer(size) and (size > 0 or size == -1) for size in sizes):
        raise ValueError(f"chunks={chunks!r}: {layout.name} has {layout.rank} axes, each needs a size from 1 on, or -1")
    wanted = tuple(max(1, n) if c == -1 else int(c) for c, n in zip(sizes, shape, strict=True))
    if any(c % s and c < n for c, s, n in zip(wanted, stored, shape, strict=True)):
        whole = tuple(max(1, round(c / s)) * s for c, s in zip(wanted, stored, strict=True))
        raise ValueError(f"chunks={tuple(wanted)} cut what is stored in pieces of {stored}: choose {whole}")
    return wanted


def _default_block(stored: Sequence[int], shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    block = list(stored)
    open_axes = {axis for axis, n in enumerate(shape) if block[axis] < n}
    while open_axes:
        axis = min(open_axes, key=lambda axis: (block[axis], -axis))
        longer = [*block[:axis], 2 * block[axis], *block[axis + 1 :]]
        if math.prod(map(min, longer, shape)) * itemsize > _BLOCK_NBYTES:
            open_axes.discard(axis)
        else:
            block = longer
            open_axes = {axis for axis in open_axes if block[axis] < shape[axis]}
    return tuple(block)
