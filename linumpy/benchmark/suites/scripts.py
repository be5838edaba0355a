"""Whole scripts on a raw mosaic: how close they come to the slower of reading alone and writing alone.

In: an :class:`EndToEndRequest`. Out: a :class:`~linumpy.benchmark.cases.Case` for each script. The mosaic is written
first, of tiles whose results are known; it stays in the page cache.
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

from linumpy.benchmark.cases import Case, Entry, Mark, Suite, ready
from linumpy.benchmark.data import check_free, check_size, work_folder, write_tiles
from linumpy.benchmark.report import size
from linumpy.device import require_cuda, resolve, synchronize
from linumpy.gpu.oct.projection import project
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.ome import open_image
from linumpy.io.volume import Volume
from linumpy.io.zarr_mode import read_on_host
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.io.image import open_mosaic
from linumpy.mosaic.io.tiles import TILE_BYTES, Box, boxes, column_shape, read_box, tile_shape
from linumpy.plan.grid.tile_grid import plan_tile_grid
from linumpy.testing.synthetic import MosaicSpec, block
from linumpy.write.writer import OmeZarrWriter

_DESCRIPTION = """Time whole scripts on a raw mosaic: linum-aip and linum-resample-mosaic-grid.

The mosaic of --gib GiB is written below --folder first. "ratio" is the time of the slower of reading alone and writing
alone over that of the script. Each result is checked first, tile by tile. Without a GPU the scripts run on the CPU.

For example:
  linum-benchmark scripts --gib 16 --folder /scratch --runs 5
"""

#: The part of the slower of reading and writing alone that a script should reach, on a GPU, from so many bytes on.
REACH, REACH_NBYTES = 0.8, 16 * 2**30
#: Wanted voxel spacing: voxels of the mosaic are half as wide.
RESOLUTION_UM = 10.0
_SPACING_UM = (5.0, 5.0, 5.0)


@dataclass(frozen=True)
class EndToEndRequest:
    """What to time.

    Attributes
    ----------
    gib : float
        Size of the mosaic, rounded to whole tiles.
    folder : Path or None
        Where the mosaic and results are written, in a folder that is removed at the end; by default where temporary
        files go.
    only : tuple of str
        Names of the scripts; all by default.
    tile : (int, int, int)
        Voxels of a tile (uint16).
    use_gpu : bool
        Whether to work on the GPU.
    tile_bytes : int
        Bytes of a batch of tiles.
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
    """The steps of a script, and the call that it makes.

    ``image(path)`` opens the output; ``call(path)`` runs the script; ``check(path, base, numbers)`` says what is wrong.
    """

    boxes: tuple[Box, ...]
    compute: Callable[[Box, Any], Any]
    new_box: Callable[[Box], Box]
    image: Callable[[Path], OmeZarrWriter]
    call: Callable[[Path], object]
    check: Callable[[Path, np.ndarray, np.ndarray], str]


@contextmanager
def end_to_end_cases(request: EndToEndRequest) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Write a mosaic; give its folder, which is removed at the end, and a case for each script.

    Raises
    ------
    GpuUnavailableError
        A GPU is asked for and there is none.
    ValueError
        The disk is too small for the mosaic.
    """
    if request.use_gpu:
        require_cuda()
    with work_folder(request.folder) as folder:
        mosaic = _make_mosaic(request, folder)
        yield folder, (_case(request, name, mosaic) for name in request.only or SCRIPTS)


def _case(request: EndToEndRequest, name: str, mosaic: tuple[Path, np.ndarray, np.ndarray]) -> Case:
    """The script, the limits (each step alone), and batch after batch without overlap, taking turns."""
    source, base, numbers = mosaic
    script, array = SCRIPTS[name](request, source), open_mosaic(source).array
    result = source.parent / f"{name}.ome.zarr"

    def remove() -> None:
        shutil.rmtree(result, ignore_errors=True)

    def written() -> str:
        return f"{size(int(open_image(result).levels[0].nbytes))} written"

    use_gpu = request.use_gpu
    check = partial(_check, script, result, base, numbers)
    read = partial(_read_all, script, array, use_gpu)
    serial = partial(_one_after_another, script, array, use_gpu, result)
    prepare_write = lambda: ready(_write_all(script, array, use_gpu, result), before=remove)()  # noqa: E731
    entries = (
        Entry("script", name, ready(partial(script.call, result), check, before=remove, note=written), "ours", 0),
        Entry("read", "read alone", ready(read), "limit", 0),
        Entry("compute", "compute alone", lambda: ready(_compute_all(script, array, use_gpu))(), "limit", 0),
        Entry("write", "write alone", prepare_write, "limit", 0),
        Entry("serial", "one step after the other", ready(serial, before=remove), "peer", 0),
    )
    rows, columns = request.tiles
    return Case(
        name=name,
        nbytes=int(array.nbytes),
        entries=entries,
        description=(
            f"mosaic: {rows} × {columns} tiles of {'×'.join(map(str, request.tile))} uint16, "
            f"{size(int(array.nbytes))}, raw, on the {'GPU' if request.use_gpu else 'CPU'}; in the page cache",
        ),
        facts={"tile": list(request.tile), "tiles": list(request.tiles), "gpu": request.use_gpu},
        marks=(Mark(REACH, ("read", "write"), "× the slower of reading and writing alone", slowest=True),),
        not_judged=not_judged(request.use_gpu, int(array.nbytes)),
        in_turns=True,
    )


def _check(script: _Script, result: Path, base: np.ndarray, numbers: np.ndarray, _: object) -> str:
    return script.check(result, base, numbers)


def not_judged(use_gpu: bool, nbytes: int) -> str:
    """Say why a mark on whole calls does not count; empty where it does."""
    if not use_gpu:
        return "no GPU"
    return "" if nbytes >= REACH_NBYTES else f"less than {REACH_NBYTES >> 30} GiB"


def _make_mosaic(request: EndToEndRequest, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write tiles that differ by a number from one synthetic tile; returns their path, that tile, and the numbers."""
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

    return _Script(
        tuple(boxes(image.array.shape, column)),
        lambda box, voxels: project(voxels, 0),
        lambda box: box[1:],
        lambda path: OmeZarrWriter(path, shape, "float32", _SPACING_UM[1:], chunks=column[1:], codec="none"),
        lambda path: project_mosaic(source, path, use_gpu=request.use_gpu, tile_bytes=request.tile_bytes),
        check,
    )


def _resample(request: EndToEndRequest, source: Path) -> _Script:
    array = open_mosaic(source).array
    grid = plan_tile_grid(array.shape, request.tile, _SPACING_UM, (0, 0, 0), RESOLUTION_UM)

    def check(result: Path, base: np.ndarray, numbers: np.ndarray) -> str:
        expected = resample_tiles(base.astype(np.float32), grid.part(tuple(slice(0, n) for n in base.shape)))
        spacing = open_image(result).spacing[0]
        if not np.allclose(spacing, grid.spacing):
            return f"a spacing of {spacing} µm, but it is {grid.spacing}"
        return _tiles_differ(result, expected, numbers, 0.51)

    return _Script(
        tuple(boxes(array.shape, tile_shape(array.shape, request.tile, 2, request.tile_bytes))),
        lambda box, tiles: resample_tiles(tiles, grid.part(box)),
        grid.new_box,
        lambda path: OmeZarrWriter(path, grid.new_shape, "uint16", grid.spacing, chunks=grid.new_tile, codec="none"),
        lambda path: resample_mosaic_grid(
            source,
            path,
            RESOLUTION_UM,
            tile_shape=request.tile[1:],
            use_gpu=request.use_gpu,
            tile_bytes=request.tile_bytes,
        ),
        check,
    )


def _tiles_differ(result: Path, base: np.ndarray, numbers: np.ndarray, tolerance: float) -> str:
    """Compare every tile of a result with what it must be."""
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


#: The scripts, in their order.
SCRIPTS: dict[str, Callable[[EndToEndRequest, Path], _Script]] = {
    "linum-aip": _aip,
    "linum-resample-mosaic-grid": _resample,
}


def _read_all(script: _Script, array: Volume, use_gpu: bool) -> None:
    for box in script.boxes:
        read_box(array, box, use_gpu)


def _compute_all(script: _Script, array: Volume, use_gpu: bool) -> Callable[[], object]:
    """Compute batches that were read before, one of each shape."""
    tiles = {_shape(box): read_box(array, box, use_gpu) for box in _first_of_each_shape(script.boxes)}

    def compute_all() -> None:
        for box in script.boxes:
            script.compute(box, tiles[_shape(box)])

    return compute_all


def _write_all(script: _Script, array: Volume, use_gpu: bool, result: Path) -> Callable[[], object]:
    """Write results that were computed before, one of each shape."""
    results = {
        _shape(box): script.compute(box, read_box(array, box, use_gpu)) for box in _first_of_each_shape(script.boxes)
    }

    def write_all() -> None:
        with script.image(result) as writer:
            for box in script.boxes:
                writer.write(script.new_box(box), results[_shape(box)])

    return write_all


def _one_after_another(script: _Script, array: Volume, use_gpu: bool, result: Path) -> None:
    with script.image(result) as writer:
        for box in script.boxes:
            tiles = read_box(array, box, use_gpu)
            synchronize()
            new_tiles = script.compute(box, tiles)
            synchronize()
            writer.write(script.new_box(box), new_tiles)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(side.stop - side.start for side in box)


def _first_of_each_shape(boxes: tuple[Box, ...]) -> list[Box]:
    return list({_shape(box): box for box in boxes}.values())


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
