"""Time whole commands on a raw mosaic: linum-aip, linum-resample-mosaic-grid, linum-stitch-3d and linum-resample.

The mosaic of --gib GiB is written below --folder first, and stays in the page cache. Beside each command, in turns, are
reading all of it alone and writing as many voxels as the result has alone. Each result is checked, tile by tile or, of
linum-resample, in boxes. Without a GPU the commands run on the CPU.

For example:
  linum-benchmark scripts --gib 16 --folder /scratch
  linum-benchmark scripts --only linum-resample --gib 32 --folder /scratch --device-memory 8
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import zarr
from scipy import ndimage

from linumpy import cli
from linumpy.arrays import DeviceName
from linumpy.benchmark.timing import GIB, Bench, Suite, Work
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import in_mode_of_caller, read_on_host
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.tiles import boxes, read_box, tile_shape
from linumpy.mosaic.stitching import stitch_mosaic
from linumpy.plan.grid.tile_grid import plan_tile_grid
from linumpy.registration.positions import AcquisitionModel, TilePositions
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.testing.synthetic import MosaicSpec, block
from linumpy.write.writer import OmeZarrWriter

_SPACING_UM, _NEW_SPACING_UM = (5.0, 5.0, 5.0), 10.0
#: Part of a tile that overlaps the next one, when it is stitched; every 16th plane of the result is compared.
_OVERLAP, _EVERY = 0.2, 16
#: Boxes of the result of linum-resample that are compared with SciPy, and the side of one.
_BOXES, _SIDE = 16, 48


@dataclass(frozen=True, kw_only=True)
class Mosaic:
    """A mosaic whose tile (i, j) is `base` plus ``numbers[i, j]``, and where its commands run."""

    path: Path
    base: np.ndarray
    numbers: np.ndarray
    device: DeviceName
    device_memory: int | None


def make_mosaic(path: Path, bench: Bench, gib: float, side: int = 256, device_memory: int | None = None) -> Mosaic:
    """Write a mosaic of cubic tiles, each a raw chunk."""
    count = max(1, round(gib * GIB / (2 * side**3)))
    rows = max(1, int(count**0.5))
    spec = MosaicSpec((1, 1), (side,) * 3, _SPACING_UM, dtype="uint16", water_um=side * 5 * 0.2)
    base = np.minimum(block(spec, (0, 0, 0), spec.shape), 60000)
    numbers = np.random.default_rng(0).integers(0, 5000, (rows, -(-count // rows))).astype(np.uint16)
    shape = side, side * numbers.shape[0], side * numbers.shape[1]
    with (
        OmeZarrWriter(path, shape, base.dtype, _SPACING_UM, chunks=base.shape, codec="none", durable=False) as writer,
        ThreadPoolExecutor(initializer=in_mode_of_caller()) as pool,
    ):

        def write(index: tuple[int, ...]) -> None:
            box = (slice(0, side), *(slice(i * side, (i + 1) * side) for i in index))
            writer.write(box, base + numbers[index])

        list(pool.map(write, np.ndindex(*numbers.shape)))
    return Mosaic(path=path, base=base, numbers=numbers, device=bench.device, device_memory=device_memory)


def _run(bench: Bench, args: argparse.Namespace) -> None:
    memory = None if args.device_memory is None else int(args.device_memory * GIB)
    with bench.work_folder() as folder:
        side = max(16, round(256 * bench.scale))
        mosaic = make_mosaic(folder / "mosaic.ome.zarr", bench, args.gib * bench.scale**3, side, memory)
        for name, (call, check) in COMMANDS.items():
            if bench.wants(name):
                _time(bench, name, mosaic, folder / "result.ome.zarr", call, check)


def _time(
    bench: Bench, name: str, mosaic: Mosaic, result: Path,
    call: Callable[[Mosaic, Path], object], check: Callable[[Mosaic, zarr.Array], str],
) -> None:  # fmt: skip
    array = open_mosaic(mosaic.path).array
    remove = partial(shutil.rmtree, result, ignore_errors=True)
    written: list[tuple[tuple[int, ...], tuple[int, ...], np.dtype]] = []

    def checked(_: object) -> str:
        made = open_image(result).levels[0]
        written.append((made.shape, made.chunks, made.dtype))
        return check(mosaic, made)

    def read() -> None:
        for box in boxes(array.shape, (array.shape[0], mosaic.base.shape[1], array.shape[2])):
            read_box(array, box, mosaic.device)

    def write() -> None:
        shape, chunks, dtype = written[0]
        size = tile_shape(shape, chunks, len(shape) - 1, 2**28)
        voxels = bench.xp.full(size, 7, dtype)  # without a codec, values do not change the time of writing
        spacing = _SPACING_UM[-len(shape) :]
        with OmeZarrWriter(result, shape, dtype, spacing, chunks=chunks, codec="none", durable=False) as writer:
            for box in boxes(shape, size):
                writer.write(box, voxels[tuple(slice(0, part.stop - part.start) for part in box)].copy())

    text = f"{mosaic.numbers.shape} tiles of {mosaic.base.shape} uint16, raw, in the page cache, on {mosaic.device}"
    with bench.case(name, array.nbytes / GIB, description=text) as case:
        case.time_in_turns(
            Work(name="linumpy", call=lambda: call(mosaic, result), check=checked, before=remove, warm_ups=0),
            Work(name="read alone", call=read, warm_ups=0),
            Work(name="write alone", call=write, before=remove, warm_ups=0),
        )
    remove()


# ---- the commands, and their results


def _aip(mosaic: Mosaic, result: Path) -> None:
    project_mosaic(mosaic.path, result, device=mosaic.device)


def _aip_differs(mosaic: Mosaic, result: zarr.Array) -> str:
    return _tiles_differ(mosaic, result, mosaic.base.mean(axis=0, dtype=np.float64), 0.02)


def _grid(mosaic: Mosaic, result: Path) -> None:
    tile = mosaic.base.shape[1:]
    resample_mosaic_grid(mosaic.path, result, _NEW_SPACING_UM, tile_shape=tile, device=mosaic.device)


def _grid_differs(mosaic: Mosaic, result: zarr.Array) -> str:
    shape = open_mosaic(mosaic.path).array.shape
    grid = plan_tile_grid(shape, mosaic.base.shape, _SPACING_UM, (0, 0, 0), _NEW_SPACING_UM)
    part = grid.part(tuple(slice(0, n) for n in mosaic.base.shape))
    return _tiles_differ(mosaic, result, resample_tiles(mosaic.base.astype(np.float32), part), 0.51)


def _tiles_differ(mosaic: Mosaic, result: zarr.Array, base: np.ndarray, tolerance: float) -> str:
    """Compare every tile of a result with `base` plus its number."""
    height, width = base.shape[-2:]
    if result.shape[-2:] != (mosaic.numbers.shape[0] * height, mosaic.numbers.shape[1] * width):
        return f"a result of {result.shape}"
    for y, x in np.ndindex(*mosaic.numbers.shape):
        box = (..., slice(y * height, (y + 1) * height), slice(x * width, (x + 1) * width))
        tile = read_on_host(result, box).astype(np.float64)
        worst = np.abs(tile - (base + np.float64(mosaic.numbers[y, x]))).max()
        if not worst <= tolerance:
            return f"the tile at ({y}, {x}) is wrong by {worst:.3g}"
    return ""


def _corners(mosaic: Mosaic) -> np.ndarray:
    """Return the positions of the tiles for stitching, which are not whole voxels: (rows, columns, 2)."""
    step = np.floor(np.array(mosaic.base.shape[1:]) * (1 - _OVERLAP)) + 0.25
    return np.stack(np.meshgrid(*map(np.arange, mosaic.numbers.shape), indexing="ij"), -1) * step


def _stitch(mosaic: Mosaic, result: Path) -> None:
    corners, tile = _corners(mosaic), mosaic.base.shape
    step = np.floor(np.array(tile[1:]) * (1 - _OVERLAP)) + 0.25
    model = AcquisitionModel((step[0], 0.0), (0.0, step[1]))
    present = np.ones(mosaic.numbers.shape, bool)
    positions = TilePositions(positions=corners, present=present, tile_shape=tile[1:], model=model)
    stitch_mosaic(mosaic.path, positions, result, tile_shape=tile[1:], chunks=tile, device=mosaic.device)


def _stitched_differs(mosaic: Mosaic, result: zarr.Array) -> str:
    """Compare each voxel of some planes with the interpolated tiles that cover it: it must lie between them."""
    planes, corners = mosaic.base[::_EVERY].astype(np.float64), _corners(mosaic)
    ends = np.ceil(corners[-1, -1]).astype(int) + mosaic.base.shape[1:]
    firsts = [np.append(np.ceil(corners[:, 0, 0]), ends[0]), np.append(np.ceil(corners[0, :, 1]), ends[1])]
    for i, j in np.ndindex(*mosaic.numbers.shape):
        cell = [
            slice(int(first[k]), min(int(first[k + 1]), size))
            for first, k, size in zip(firsts, (i, j), result.shape[1:], strict=True)
        ]
        low, high = np.array(np.inf), np.array(-np.inf)
        for tile in [(a, b) for a in (i - 1, i) for b in (j - 1, j) if min(a, b) >= 0]:
            covered = _interpolated(planes, corners[tile], cell) + np.float64(mosaic.numbers[tile])
            low, high = np.fmin(low, covered), np.fmax(high, covered)
        values = read_on_host(result, (slice(None), *cell))[::_EVERY].astype(np.float64)
        worst = np.maximum(low - values, values - high).max()
        if not worst <= 0.51:
            return f"the tile at ({i}, {j}) is wrong by {worst:.3g}"
    return ""


def _interpolated(planes: np.ndarray, corner: np.ndarray, cell: Sequence[slice]) -> np.ndarray:
    """Return the voxels of a cell in a tile at a corner, interpolated linearly; NaN outside the tile."""
    offset = [part.start - first for part, first in zip(cell, corner, strict=True)]
    size = (len(planes), *(part.stop - part.start for part in cell))
    return np.asarray(ndimage.affine_transform(planes, np.ones(3), [0, *offset], size, order=1, cval=np.nan))


def _resample(mosaic: Mosaic, result: Path) -> None:
    resample_zarr(
        mosaic.path, result, _NEW_SPACING_UM, anti_aliasing=False, mode="nearest", durable=False,
        device=mosaic.device, memory_bytes=mosaic.device_memory,
    )  # fmt: skip


def _resampled_differs(mosaic: Mosaic, result: zarr.Array) -> str:
    """Compare boxes of the result with the means of 2 × 2 × 2 voxels, which are linear samples in their middle."""
    source = open_image(mosaic.path).levels[0]
    if tuple(result.shape) != tuple(n // 2 for n in source.shape):
        return f"its shape is {result.shape}"
    rng, side = np.random.default_rng(1), [min(_SIDE, n) for n in result.shape]
    for number in range(_BOXES):
        last = [n - s for n, s in zip(result.shape, side, strict=True)]
        start = [0, 0, 0] if number == 0 else last if number == 1 else [int(rng.integers(0, n + 1)) for n in last]
        box = tuple(slice(a, a + s) for a, s in zip(start, side, strict=True))
        voxels = read_on_host(source, tuple(slice(2 * part.start, 2 * part.stop) for part in box))
        means = voxels.reshape([n for s in side for n in (s, 2)]).mean(axis=(1, 3, 5), dtype=np.float64)
        worst = float(np.abs(read_on_host(result, box) - means).max())
        if not worst <= 0.55:  # rounding, and the error of single precision
            return f"the box at {start} is wrong by {worst:.3g}"
    return ""


COMMANDS: dict[str, tuple[Callable[[Mosaic, Path], object], Callable[[Mosaic, zarr.Array], str]]] = {
    "linum-aip": (_aip, _aip_differs),
    "linum-resample-mosaic-grid": (_grid, _grid_differs),
    "linum-stitch-3d": (_stitch, _stitched_differs),
    "linum-resample": (_resample, _resampled_differs),
}


_TEXT = "Device memory of linum-resample. [as it chooses]"
SUITE = Suite(
    run=_run,
    help=__doc__,
    cases=tuple(COMMANDS),
    options=[
        cli.Option("--gib", type=float, default=16.0, metavar="GIB", help="Size of the mosaic. [%(default)s]"),
        cli.Option("--device-memory", type=float, metavar="GIB", help=_TEXT),
    ],
)
