"""Fills rows of a batch: values outside of arrays, and staged crops.

On a GPU the kernels of ``augment.cu`` resample staged crops on CuPy's current stream: one launch for all rows of the
same stored dtype and order of interpolation, and one for each axis that is blurred. Without a GPU NumPy and SciPy
resample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait
from itertools import groupby

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, address_of, int32, int64, load
from linumpy.stream.augment import MAX_NODES
from linumpy.stream.config import Dtype
from linumpy.stream.planning.records import CropRead, PartShape, zyx
from linumpy.stream.resampling.on_host import Staged, as_elements, fill_row

PACKAGE = "linumpy.stream.resampling.cuda"
#: A row of the kernels' table: ``struct Row`` of augment.cu.
ROW = np.dtype(
    [
        ("source", "u8"), ("row", "i8"), ("box_start", "i8", 3), ("box_shape", "i8", 3), ("volume", "i8", 3),
        ("matrix", "f8", 9), ("offset", "f8", 3), ("grid", "u8"), ("grid_shape", "i8", 3), ("grid_scale", "f8", 3),
        ("grid_origin", "f8", 3), ("low", "f8"), ("span", "f8"), ("gamma", "f8"), ("contrast", "f8"), ("noise", "f8"),
        ("key", "u8"), ("sigma", "f8", 3),
    ]
)  # fmt: skip
_MODES = {"constant": "CONSTANT", "edge": "NEAREST", "reflect": "MIRROR"}
_THREADS, _SHARED = 128, 48 * 1024
_MAX_BLOCKS = 2**20


def kernel_spec(name: str, source: np.dtype, out: np.dtype, dtype: Dtype, order: int, pad: str) -> KernelSpec:
    """Return the specification of a kernel of augment.cu.

    `source` and `out` are the dtypes that are stored, and of the batch in memory: uint16 if `dtype` is bf16.
    """
    out_type = "bfloat16_bits" if dtype is Dtype.BF16 else CUDA_TYPES[out.str[1:]]
    copies = dtype is not Dtype.BF16 and source == out
    defines = (
        ("SOURCE", CUDA_TYPES[source.str[1:]]), ("OUT", out_type), ("COPY", str(int(copies))),
        ("WIDE", str(int(source == np.float64))), ("ORDER", str(order)), ("MODE", _MODES[pad]),
    )  # fmt: skip
    return KernelSpec("augment", name, defines, PACKAGE)


def resample(
    batch: Array, part: PartShape, staged: Sequence[Staged], pad: str, fill: float, pool: Executor | None
) -> None:
    """Resample staged crops into their rows of the batch of a part, which is contiguous; for bf16 its bits as uint16.

    `pad`: values outside of volumes, as ``Config.pad``; `fill` for ``"constant"``. `pool`: threads for NumPy arrays;
    None to use the caller's thread.
    """
    if not isinstance(batch, np.ndarray):
        launch(batch, part, staged, pad, fill)
        return
    work = [(batch[crop.read.row], part, crop, pad, fill) for crop in staged]
    if pool is None or len(work) == 1:
        for arguments in work:
            fill_row(*arguments)
        return
    futures = [pool.submit(fill_row, *arguments) for arguments in work]
    try:
        for future in futures:
            future.result()
    finally:  # from here on no thread writes any more
        for future in futures:
            future.cancel()
        wait(futures)


def fill_borders(batch: Array, part: PartShape, direct: Sequence[CropRead], fill: float) -> None:
    """Fill the voxels outside of their arrays in crops that were read into a batch: two slabs along each axis."""
    if not direct:
        return
    value = as_elements(np.array(fill), part)[()]
    for read in direct:
        extent = [slice(0, n) for n in part.shape]
        for axis, ((start, stop), n) in enumerate(zip(read.inside, part.shape, strict=True)):
            for a, b in ((0, start), (stop, n)):
                if a < b:
                    index: tuple[int | slice, ...] = (read.row, *extent[:axis], slice(a, b), *extent[axis + 1 :])
                    batch[index] = value
            extent[axis] = slice(start, stop)


def launch(batch: Array, part: PartShape, staged: Sequence[Staged], pad: str, fill: float) -> None:
    """Resample staged crops on the device, as :func:`resample` does."""

    def dtype_and_order(crop: Staged) -> tuple[str, int]:
        assert crop.read.resampling is not None
        return crop.read.info.dtype.str, crop.read.resampling.order

    lead, (nz, ny, nx) = math.prod(part.shape[:-3]), zyx(part.shape)
    lines, threads = nz * ny, min(_THREADS, -(-nx // 32) * 32)
    for (stored, order), group in groupby(sorted(staged, key=dtype_and_order), dtype_and_order):
        rows = list(group)
        records, grids = table(rows)
        records["source"] = [0 if crop.voxels is None else address_of(crop.voxels) for crop in rows]
        has_grid = records["grid"] > 0
        if has_grid.any():
            # Freed at the end of this function, after which CuPy reuses the memory on the same stream.
            device_grids = _to_device(grids, batch)
            records["grid"][has_grid] += np.uint64(address_of(device_grids) - 1)
        device_rows = _to_device(records.view(np.uint8), batch)
        spec = (np.dtype(stored), batch.dtype, part.dtype, order, pad)
        arguments = (device_rows, batch, *int32(lead, ny, nx), *int64(lines), np.float64(fill))
        load(kernel_spec("augment", *spec))((min(lines, _MAX_BLOCKS), len(rows)), (threads,), arguments)
        if records["sigma"].any():
            _launch_blur(load(kernel_spec("blur", *spec)), batch, part.shape, device_rows, records["sigma"])


def table(rows: Sequence[Staged]) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernels' table, and the concatenated elastic grids.

    In place of addresses, ``grid`` has 1 plus the offset in bytes of the grid, or 0 for no grid. ``source`` is 0.
    """
    records = np.zeros(len(rows), ROW)  # filling field by field is several times as fast as record by record
    resamplings = [crop.read.resampling for crop in rows if crop.read.resampling is not None]
    records["row"] = [crop.read.row for crop in rows]
    for name in ("box_start", "box_shape", "volume", "offset", "grid_scale", "grid_origin", "sigma"):
        records[name] = [getattr(resampling, name) for resampling in resamplings]
    records["matrix"] = [resampling.matrix.ravel() for resampling in resamplings]
    for name in ("low", "span", "gamma", "contrast", "noise", "key"):
        records[name] = [getattr(resampling.intensity, name) for resampling in resamplings]
    grids, size = [np.zeros(0)], 0
    for number, resampling in enumerate(resamplings):
        if (grid := resampling.grid) is not None:
            assert max(grid.shape[1:]) <= MAX_NODES
            records["grid"][number], records["grid_shape"][number] = 1 + 8 * size, grid.shape[1:]
            grids.append(grid.ravel())
            size += grid.size
    return records, np.concatenate(grids)


def _to_device(array: np.ndarray, batch: Array) -> Array:
    if isinstance(batch, np.ndarray):  # under the emulator
        return array
    import cupy

    return cupy.asarray(array)


def _launch_blur(
    kernel: Callable[..., None], batch: Array, shape: Sequence[int], rows: Array, sigmas: np.ndarray
) -> None:
    lead, space = math.prod(shape[:-3]), zyx(shape)
    axes = [axis for axis in range(3) if sigmas[:, axis].any()]
    for axis in axes:
        n, stride = space[axis], math.prod(space[axis + 1 :])
        total = lead * math.prod(space) // n
        weights = int(4.0 * sigmas[:, axis].max() + 0.5) + 1
        columns = min(32, (_SHARED // 8 - weights) // n, total)
        if columns < 1:
            raise ValueError(
                f"blur: an axis of {n} voxels with a radius of {weights - 1} does not fit into shared memory"
            )
        arguments = (
            rows, batch, *int32(axis, n), *int64(stride, total), *int32(columns, weights, int(axis == axes[-1])),
        )  # fmt: skip
        blocks = (-(-total // columns), len(sigmas))
        kernel(blocks, (_THREADS,), arguments, shared_mem=8 * (n * columns + weights))
