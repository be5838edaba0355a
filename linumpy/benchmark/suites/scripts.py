"""Whole scripts on a raw mosaic, beside the slower of reading alone and writing alone.

In: an :class:`EndToEndRequest`. Out: a :class:`~linumpy.benchmark.cases.Case` for each script. The mosaic is written
first, and stays in the page cache. All tiles are a synthetic tile plus a number, so that the right results are known.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Entry, Mark, Suite, ready
from linumpy.benchmark.data import check_free, check_size, work_folder, write_tiles
from linumpy.benchmark.report import size
from linumpy.device import array_module, require_cuda, resolve, synchronize
from linumpy.gpu.oct.projection import project
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.ome import open_image
from linumpy.io.volume import Volume
from linumpy.io.zarr_mode import read_on_host
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.tiles import TILE_BYTES, Box, boxes, column_shape, read_box, tile_shape
from linumpy.mosaic.stitching import plan_stitching, stitch_mosaic
from linumpy.plan.grid.tile_grid import plan_tile_grid
from linumpy.registration.positions import AcquisitionModel, TilePositions
from linumpy.testing.synthetic import MosaicSpec, block
from linumpy.write.writer import OmeZarrWriter

_DESCRIPTION = """Time whole scripts on a raw mosaic: linum-aip, linum-resample-mosaic-grid and linum-stitch-3d.

The mosaic of --gib GiB is written below --folder first. The rate to reach is relative to the slower of reading alone
and writing alone. Each result is checked first, tile by tile. Without a GPU the scripts run on the CPU.

For example:
  linum-benchmark scripts --gib 16 --folder /scratch --runs 5
"""

#: Rate to reach relative to the slower of reading and writing alone, on a GPU, and the smallest mosaic that is judged.
REACH, REACH_NBYTES = 0.8, 16 * 2**30
#: The rate to reach for stitching, and the fraction of a tile that overlaps the next tile.
STITCH_REACH, _OVERLAP = 0.7, 0.2
#: After stitching every 16th plane is compared: the check interpolates each voxel.
_EVERY = 16
#: Voxel spacing of the result, twice the mosaic's.
RESOLUTION_UM = 10.0
_SPACING_UM = (5.0, 5.0, 5.0)


@dataclass(frozen=True)
class EndToEndRequest:
    """The mosaic (uint16) of `gib` GiB, rounded to whole tiles, and the scripts: `only` some of them, by default all.

    The scripts process batches of `tile_bytes`. Mosaic and results are in a new folder in `folder`, by default the
    folder of temporary files.
    """

    gib: float
    folder: Path | None = None
    only: tuple[str, ...] = ()
    tile: tuple[int, int, int] = (256, 256, 256)
    use_gpu: bool = True
    tile_bytes: int = TILE_BYTES

    def __post_init__(self) -> None:
        check_size("a mosaic", self.gib, self.folder)
        unknown = [name for name in self.only if name not in SCRIPTS]
        if unknown:
            raise ValueError(f"case {unknown[0]!r} is unknown: choose from {', '.join(SCRIPTS)}")

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along Y and X, about square."""
        count = max(1, round(self.gib * 2**30 / (2 * np.prod(self.tile, dtype=np.int64))))
        rows = max(1, int(count**0.5))
        return rows, -(-count // rows)


@dataclass(frozen=True)
class _Script:
    """A script and its steps.

    ``image(path)`` makes the writer of the output; ``call(path)`` runs the script; ``check(path, base, numbers)``
    returns why the result is wrong. `boxes` of `array` are read, and `new_boxes` are written. Without `compute` the two
    lists do not correspond, and only reading and writing are timed.
    """

    array: Volume
    use_gpu: bool
    boxes: tuple[Box, ...]
    new_boxes: tuple[Box, ...]
    image: Callable[[Path], OmeZarrWriter]
    call: Callable[[Path], object]
    check: Callable[[Path, np.ndarray, np.ndarray], str]
    compute: Callable[[Box, Array], Any] | None = None
    reach: float = REACH

    def _read_box(self, box: Box) -> Array:
        return read_box(self.array, box, self.use_gpu)

    def read(self) -> None:
        """Read all boxes."""
        for box in self.boxes:
            self._read_box(box)

    def computing(self) -> Callable[[], object]:
        """Read a box of each shape, and return a call that computes from these boxes as often as the script does."""
        assert self.compute is not None
        compute = self.compute
        tiles = {_shape(box): self._read_box(box) for box in {_shape(box): box for box in self.boxes}.values()}

        def compute_all() -> None:
            for box in self.boxes:
                compute(box, tiles[_shape(box)])

        return compute_all

    def writing(self, result: Path) -> Callable[[], object]:
        """Make a result of each shape, and return a call that writes these results as often as the script does."""
        if self.compute is None:
            # Results of the right size in the same memory: without a codec, values do not change the time of writing.
            voxels = self._read_box(tuple(slice(0, n) for n in self.array.chunks))
            results = {_shape(new): array_module(voxels).full(_shape(new), 7, voxels.dtype) for new in self.new_boxes}
        else:
            first = {_shape(box): (box, new) for box, new in zip(self.boxes, self.new_boxes, strict=True)}
            results = {_shape(new): self.compute(box, self._read_box(box)) for box, new in first.values()}

        def write_all() -> None:
            with self.image(result) as writer:
                for new in self.new_boxes:
                    writer.write(new, results[_shape(new)])

        return write_all

    def serial(self, result: Path) -> None:
        """Read, compute and write one box after another, without overlap."""
        assert self.compute is not None
        with self.image(result) as writer:
            for box, new in zip(self.boxes, self.new_boxes, strict=True):
                tiles = self._read_box(box)
                synchronize()
                new_tiles = self.compute(box, tiles)
                synchronize()
                writer.write(new, new_tiles)


@contextmanager
def end_to_end_cases(request: EndToEndRequest) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Write a mosaic; yield its folder, which is removed at the end, and a case for each script.

    Raises
    ------
    GpuUnavailableError
        ``use_gpu`` without a GPU.
    ValueError
        The disk is too small for the mosaic.
    """
    if request.use_gpu:
        require_cuda()
    with work_folder(request.folder) as folder:
        mosaic = _make_mosaic(request, folder)
        yield folder, (_case(request, name, mosaic) for name in request.only or SCRIPTS)


def _case(request: EndToEndRequest, name: str, mosaic: tuple[Path, np.ndarray, np.ndarray]) -> Case:
    """Make a case: the script, each step alone (limits), all steps without overlap; their runs alternate."""
    source, base, numbers = mosaic
    script = SCRIPTS[name](request, source)
    result, nbytes = source.parent / f"{name}.ome.zarr", int(script.array.nbytes)
    remove = partial(shutil.rmtree, result, ignore_errors=True)

    def check(_: object) -> str:
        return script.check(result, base, numbers)

    def note() -> str:
        return f"{size(int(open_image(result).levels[0].nbytes))} written"

    entries = [
        Entry("script", name, ready(partial(script.call, result), check, before=remove, note=note), "ours", 0),
        Entry("read", "read alone", ready(script.read), "limit", 0),
        Entry("write", "write alone", lambda: ready(script.writing(result), before=remove)(), "limit", 0),
    ]
    if script.compute is not None:
        serial = ready(partial(script.serial, result), before=remove)
        entries.append(Entry("compute", "compute alone", lambda: ready(script.computing())(), "limit", 0))
        entries.append(Entry("serial", "one step after the other", serial, "peer", 0))
    rows, columns = request.tiles
    return Case(
        name, nbytes, tuple(entries),
        description=(
            f"mosaic: {rows} × {columns} tiles of {'×'.join(map(str, request.tile))} uint16, {size(nbytes)}, raw, on "
            f"the {'GPU' if request.use_gpu else 'CPU'}; in the page cache",
        ),
        facts={"tile": list(request.tile), "tiles": list(request.tiles), "gpu": request.use_gpu},
        marks=(Mark(script.reach, ("read", "write"), "× the slower of reading and writing alone", slowest=True),),
        not_judged=not_judged(request.use_gpu, nbytes),
        in_turns=True,
    )  # fmt: skip


def not_judged(use_gpu: bool, nbytes: int) -> str:
    """Return why the marks of a run on `nbytes` are not judged; empty if they are."""
    if not use_gpu:
        return "no GPU"
    return "" if nbytes >= REACH_NBYTES else f"less than {REACH_NBYTES >> 30} GiB"


def _make_mosaic(request: EndToEndRequest, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write a mosaic, whose tiles are one synthetic tile plus a number; return path, synthetic tile and numbers."""
    rows, columns = request.tiles
    depth, height, width = request.tile
    shape = depth, rows * height, columns * width
    check_free(folder, 2 * int(np.prod(shape, dtype=np.int64)) * 5 // 4)
    spec = MosaicSpec((1, 1), request.tile, _SPACING_UM, dtype="uint16", water_um=depth * 5 * 0.2)
    base = np.minimum(block(spec, (0, 0, 0), spec.shape), 60000)
    numbers = np.random.default_rng(0).integers(0, 5000, (rows, columns)).astype(np.uint16)
    return write_tiles(folder / "mosaic.ome.zarr", base, numbers[None], _SPACING_UM), base, numbers


def _aip(request: EndToEndRequest, source: Path) -> _Script:
    image = open_mosaic(source)
    shape = image.array.shape[1:]
    column = column_shape(image.array, 0, request.tile_bytes)

    def check(result: Path, base: np.ndarray, numbers: np.ndarray) -> str:
        mean = base.mean(axis=0, dtype=np.float64)
        return _tiles_differ(result, mean, numbers, 0.02)

    columns = tuple(boxes(image.array.shape, column))
    return _Script(
        image.array,
        request.use_gpu,
        columns,
        tuple(box[1:] for box in columns),
        lambda path: OmeZarrWriter(path, shape, "float32", _SPACING_UM[1:], chunks=column[1:], codec="none"),
        lambda path: project_mosaic(source, path, use_gpu=request.use_gpu, tile_bytes=request.tile_bytes),
        check,
        lambda box, voxels: project(voxels, 0),
    )


def _resample(request: EndToEndRequest, source: Path) -> _Script:
    array = open_mosaic(source).array
    grid = plan_tile_grid(array.shape, request.tile, _SPACING_UM, (0, 0, 0), RESOLUTION_UM)

    def check(result: Path, base: np.ndarray, numbers: np.ndarray) -> str:
        expected = resample_tiles(base.astype(np.float32), grid.part(tuple(slice(0, n) for n in base.shape)))
        spacing = open_image(result).spacing[0]
        if not np.allclose(spacing, grid.spacing):
            return f"a spacing of {spacing} µm, not {grid.spacing}"
        return _tiles_differ(result, expected, numbers, 0.51)

    batches = tuple(boxes(array.shape, tile_shape(array.shape, request.tile, 2, request.tile_bytes)))

    def call(path: Path) -> object:
        return resample_mosaic_grid(
            source, path, RESOLUTION_UM, tile_shape=request.tile[1:], use_gpu=request.use_gpu,
            tile_bytes=request.tile_bytes,
        )  # fmt: skip

    return _Script(
        array,
        request.use_gpu,
        batches,
        tuple(grid.new_box(box) for box in batches),
        lambda path: OmeZarrWriter(path, grid.new_shape, "uint16", grid.spacing, chunks=grid.new_tile, codec="none"),
        call,
        check,
        lambda box, tiles: resample_tiles(tiles, grid.part(box)),
    )


def _stitch(request: EndToEndRequest, source: Path) -> _Script:
    array, (depth, height, width) = open_mosaic(source).array, request.tile
    rows, columns = request.tiles
    step = np.floor(np.array([height, width]) * (1 - _OVERLAP)) + 0.25  # positions are not whole voxels
    corners = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), -1) * step
    model = AcquisitionModel((step[0], 0.0), (0.0, step[1]))
    positions = TilePositions(
        positions=corners, present=np.ones((rows, columns), bool), tile_shape=(height, width), model=model
    )
    shape = depth, *plan_stitching(positions).size

    def image(path: Path) -> OmeZarrWriter:
        return OmeZarrWriter(path, shape, "uint16", _SPACING_UM, chunks=request.tile, codec="none")

    def call(path: Path) -> object:
        return stitch_mosaic(
            source, positions, path, tile_shape=request.tile[1:], chunks=request.tile, use_gpu=request.use_gpu,
            tile_bytes=request.tile_bytes,
        )  # fmt: skip

    return _Script(
        array,
        request.use_gpu,
        tuple(boxes(array.shape, (depth, height, array.shape[2]))),
        tuple(boxes(shape, tile_shape(shape, request.tile, 2, request.tile_bytes))),
        image,
        call,
        partial(_stitched_differs, corners=corners),
        reach=STITCH_REACH,
    )


def _stitched_differs(result: Path, base: np.ndarray, numbers: np.ndarray, corners: np.ndarray) -> str:
    """Compare each voxel of some planes with the interpolated tiles that cover it: it must lie between them."""
    array, planes = open_image(result).levels[0], base[::_EVERY].astype(np.float64)
    ends = np.ceil(corners[-1, -1]).astype(int) + base.shape[1:]
    firsts = [np.append(np.ceil(corners[:, 0, 0]), ends[0]), np.append(np.ceil(corners[0, :, 1]), ends[1])]
    for i, j in np.ndindex(*numbers.shape):
        cell = [
            slice(int(first[k]), min(int(first[k + 1]), size))
            for first, k, size in zip(firsts, (i, j), array.shape[1:], strict=True)
        ]
        low, high = np.array(np.inf), np.array(-np.inf)
        for tile in [(a, b) for a in (i - 1, i) for b in (j - 1, j) if min(a, b) >= 0]:
            covered = _interpolated(planes, corners[tile], cell) + np.float64(numbers[tile])
            low, high = np.fmin(low, covered), np.fmax(high, covered)
        values = read_on_host(array, (slice(None), *cell))[::_EVERY].astype(np.float64)
        worst = np.maximum(low - values, values - high).max()
        if not worst <= 0.51:
            return f"the tile at ({i}, {j}) is wrong by {worst:.3g}"
    return ""


def _interpolated(planes: np.ndarray, corner: np.ndarray, cell: Sequence[slice]) -> np.ndarray:
    """Return the voxels of a cell in a tile at a corner, interpolated linearly; NaN outside the tile."""
    outside: bool | np.ndarray = False
    for axis, first, extent in zip((1, 2), corner, cell, strict=True):
        coords, last = np.arange(extent.start, extent.stop) - first, planes.shape[axis] - 1
        below = np.clip(np.floor(coords).astype(int), 0, last - 1)
        fraction = (coords - below)[:, None] if axis == 1 else coords - below
        planes = np.take(planes, below, axis) * (1 - fraction) + np.take(planes, below + 1, axis) * fraction
        beyond = (coords < 0) | (coords > last)
        outside = outside | (beyond[:, None] if axis == 1 else beyond)
    return np.where(outside, np.nan, planes)


def _tiles_differ(result: Path, base: np.ndarray, numbers: np.ndarray, tolerance: float) -> str:
    """Compare every tile of a result with `base` plus its number."""
    array = open_image(result).levels[0]
    height, width = base.shape[-2:]
    if array.shape[-2:] != (numbers.shape[0] * height, numbers.shape[1] * width):
        return f"a result of {array.shape}"
    for y, x in np.ndindex(*numbers.shape):
        box = (..., slice(y * height, (y + 1) * height), slice(x * width, (x + 1) * width))
        tile = read_on_host(array, box).astype(np.float64)
        worst = np.abs(tile - (base + np.float64(numbers[y, x]))).max()
        if not worst <= tolerance:
            return f"the tile at ({y}, {x}) is wrong by {worst:.3g}"
    return ""


#: The scripts, in order.
SCRIPTS: dict[str, Callable[[EndToEndRequest, Path], _Script]] = {
    "linum-aip": _aip,
    "linum-resample-mosaic-grid": _resample,
    "linum-stitch-3d": _stitch,
}


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


@contextmanager
def _cases(*, gib: float, folder: Path | None, only: Sequence[str]) -> Iterator[tuple[Path, Iterator[Case]]]:
    request = EndToEndRequest(gib, folder, tuple(only), use_gpu=resolve().is_cuda)
    with end_to_end_cases(request) as folder_and_cases:
        yield folder_and_cases


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=16.0, metavar="GIB", help="Size of the mosaic. [%(default)s]")


SUITE = Suite(
    "scripts", _DESCRIPTION, 5, _cases, tuple(SCRIPTS),
    folder="Where the mosaic is written", add_options=_add_options,
)  # fmt: skip
