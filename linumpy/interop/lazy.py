"""A dask array of a Zarr array, of which a slice reads only its own voxels.

In: an open array. Out: a dask array of NumPy blocks. Its graph holds the path of a local array, or else the open array.
dask is imported inside functions. Errors: ``ImportError`` without dask; when voxels are read, those of
:func:`linumpy.read_zarr`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import zarr

from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.interop.outer import AxisIndex, read_outer
from linumpy.io.layout import read_layout
from linumpy.io.source import Source, path_of, written
from linumpy.packages import needs

if TYPE_CHECKING:
    from dask.array import Array as DaskArray

#: Size in bytes up to which dask joins whole chunks into a block.
_BLOCK_NBYTES = 16 * 2**20


class LazyArray:
    """A Zarr array that is read when it is indexed, with the attributes that dask uses.

    - `array`: the array. Of an array in a local folder or ZIP file only the path is kept.
    """

    def __init__(self, array: zarr.Array) -> None:
        layout = read_layout(array)
        self.source: Source = path_of(array) or array
        self.shape, self.ndim = layout.shape, layout.rank
        self.dtype = layout.dtype.newbyteorder("=")
        self.chunks = tuple(map(min, layout.chunk_shape, layout.shape))

    def __getitem__(self, index: AxisIndex | tuple[AxisIndex, ...]) -> np.ndarray:
        index = index if isinstance(index, tuple) else (index,)
        values: np.ndarray = read_outer(
            self.source, LAYOUTS.get(self.source, 0), (*index, *[slice(None)] * (self.ndim - len(index)))
        )
        return values


def lazy_dask_array(array: zarr.Array) -> DaskArray:
    """Return a dask array of NumPy blocks; a slice of it reads only its own voxels."""
    with needs("dask", "dask"):
        import dask
        import dask.array as da
    lazy = LazyArray(array)
    token = dask.base.tokenize(str(array.store_path), repr(array.metadata.to_dict()), written(array))
    with dask.config.set({"array.chunk-size": _BLOCK_NBYTES}):
        meta = np.empty((0,) * lazy.ndim, lazy.dtype)
        return da.from_array(lazy, chunks="auto", name=f"linumpy-{token}", asarray=False, meta=meta)
