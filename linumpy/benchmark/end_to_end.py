"""Whole scripts on a raw mosaic: how close they come to the slower of reading alone and writing alone.

In: an :class:`EndToEndRequest`. Out: :class:`EndToEndResult` records, a table, and JSON where asked for. The mosaic is
made first; of every tile it is known what must come out, and what is wrong is not timed. Times are those of the clock
on the wall, from a device at rest to a device at rest, with the mosaic in the page cache.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.benchmark import machine
from linumpy.benchmark.kernel_case import verdict_of
from linumpy.benchmark.table import machine_text
from linumpy.benchmark.volumes import check_room, wall_seconds, write_tiles
from linumpy.device import require_cuda, synchronize
from linumpy.gpu.oct.projection import project
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.io.files import replacing
from linumpy.io.ome import open_image
from linumpy.io.volume import Volume
from linumpy.io.zarr_mode import read_on_host
from linumpy.mosaic.aip import project_mosaic
from linumpy.mosaic.grid import resample_mosaic_grid
from linumpy.mosaic.image import open_mosaic
from linumpy.mosaic.output import Write, new_image
from linumpy.mosaic.tiles import TILE_BYTES, Box, boxes, column_shape, read_box, tile_shape
from linumpy.plan.grid.tile_grid import TileGrid, plan_tile_grid
from linumpy.testing.synthetic import MosaicSpec, block

#: The part of the slower of reading and writing alone that a script should reach, on a GPU, from so many bytes on.
REACH, REACH_NBYTES = 0.8, 16 * 2**30
#: Wanted voxel spacing: voxels of the mosaic are half as wide.
RESOLUTION_UM = 10.0
_SPACING_UM = (5.0, 5.0, 5.0)

#: What the numbers of the JSON are, said in it: it is read without this source.
_UNITS = "times in seconds of every timed run; ratio: the slower of reading and writing alone over the script"


@dataclass(frozen=True)
class EndToEndRequest:
    """What to time.

    Attributes
    ----------
    gib : float
        Size of the mosaic, rounded to whole tiles.
    folder : Path or None
        Where the mosaic and results are made, in a folder of their own that goes at the end; by default where temporary
        files go.
    only : tuple of str
        Names of the scripts; all by default.
    runs : int
        Timed runs of each kind.
    tile : (int, int, int)
        Voxels of a tile (uint16).
    use_gpu : bool
        Whether to work on the GPU.
    tile_bytes : int
        Bytes of a batch of tiles.
    json : Path or None
        A file to write.
    """

    gib: float
    folder: Path | None = None
    only: tuple[str, ...] = ()
    runs: int = 5
    tile: tuple[int, int, int] = (256, 256, 256)
    use_gpu: bool = True
    tile_bytes: int = TILE_BYTES
    json: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.gib < 2**20:
            raise ValueError(f"a mosaic of {self.gib} GiB: more than 0 is needed")
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")
        unknown = [name for name in self.only if name not in CASES]
        if unknown:
            raise ValueError(f"case {unknown[0]!r} is unknown from end to end: choose from {', '.join(CASES)}")
        for folder in (self.folder, self.json and self.json.absolute().parent):
            if folder is not None and not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {str(folder)!r}")

    @property
    def tiles(self) -> tuple[int, int]:
        """Tiles along Y and X, about square."""
        count = max(1, round(self.gib * 2**30 / (2 * np.prod(self.tile, dtype=np.int64))))
        rows = max(1, int(count**0.5))
        return rows, -(-count // rows)


@dataclass(frozen=True)
class EndToEndResult:
    """What came of a script. All times are seconds, one for each run; empty where the result is wrong.

    Attributes
    ----------
    name : str
        Of the script.
    nbytes, written_nbytes : int
        Of the mosaic, and of what is written.
    wrong : str
        Why the result is wrong; empty where it is right.
    judged : bool
        Whether the reach is for this size and device.
    read, compute, write : tuple of float
        Every batch read, and nothing else; one batch computed as often; results written, and nothing else.
    serial : tuple of float
        Batch after batch, each step after the other.
    script : tuple of float
        The call that the script makes.
    """

    name: str
    nbytes: int
    written_nbytes: int
    wrong: str
    judged: bool
    read: tuple[float, ...] = ()
    compute: tuple[float, ...] = ()
    write: tuple[float, ...] = ()
    serial: tuple[float, ...] = ()
    script: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Time of the slower of reading and writing over that of the script; None where there are no times."""
        if not self.script:
            return None
        return max(map(statistics.median, (self.read, self.write))) / statistics.median(self.script)

    @property
    def verdict(self) -> str:
        """``"WRONG"``, ``"met"``, ``"MISSED"``, or nothing where there is no mark."""
        return verdict_of(self.wrong, (self.ratio, REACH if self.judged else None))


@dataclass(frozen=True)
class _Script:
    """The steps of a script, and the call that it makes.

    ``image(path)`` makes what is written; ``call(path)`` does all; ``check(path, base, numbers)`` says what is wrong.
    """

    places: tuple[Box, ...]
    compute: Callable[[Box, Any], Any]
    new_box: Callable[[Box], Box]
    image: Callable[[Path], Any]
    call: Callable[[Path], object]
    check: Callable[[Path, np.ndarray, np.ndarray], str]


def run_end_to_end(request: EndToEndRequest) -> tuple[EndToEndResult, ...]:
    """Make a mosaic, check and time the scripts on it, and show what came of it.

    Raises
    ------
    GpuUnavailableError
        A GPU is asked for and there is none.
    ValueError
        The folder has no room for the mosaic.
    """
    if request.use_gpu:
        require_cuda()
    with tempfile.TemporaryDirectory(prefix="linum-benchmark-", dir=request.folder) as made:
        folder = Path(made)
        here = machine.look(folder)
        print(machine_text(here), end="\n\n")
        source, base, numbers = _make_mosaic(request, folder)
        rows, columns = request.tiles
        print(
            f"mosaic: {rows} × {columns} tiles of {'×'.join(map(str, request.tile))} uint16, raw, on the "
            f"{'GPU' if request.use_gpu else 'CPU'}; medians of {request.runs} runs; in the page cache\n\n{HEADER}"
        )
        results = []
        for name in request.only or CASES:
            results.append(_measure(request, name, source, folder / f"{name}.ome.zarr", base, numbers))
            print(row(results[-1]), flush=True)
    if request.json is not None:
        document = {"machine": asdict(here), "tile": request.tile, "tiles": request.tiles, "units": _UNITS}
        document |= {"results": [{**asdict(one), "ratio": one.ratio} for one in results]}
        with replacing(request.json, overwrite=True) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nwritten: {request.json}")
    return tuple(results)


def _make_mosaic(request: EndToEndRequest, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Write tiles that differ by a number from one synthetic tile; returns that tile and the numbers."""
    rows, columns = request.tiles
    depth, height, width = request.tile
    shape = depth, rows * height, columns * width
    check_room(folder, 2 * int(np.prod(shape, dtype=np.int64)) * 5 // 4)
    spec = MosaicSpec((1, 1), request.tile, _SPACING_UM, dtype="uint16", water_um=depth * 5 * 0.2)
    base = np.minimum(block(spec, (0, 0, 0), spec.shape), 60000)
    numbers = np.random.default_rng(0).integers(0, 5000, (rows, columns)).astype(np.uint16)
    return write_tiles(folder / "mosaic.ome.zarr", base, numbers[None], _SPACING_UM), base, numbers


def _aip(request: EndToEndRequest, source: Path) -> _Script:
    image = open_mosaic(source)
    size = column_shape(image.array, 0, request.tile_bytes)

    def check(result: Path, base: np.ndarray, numbers: np.ndarray) -> str:
        mean = base.mean(axis=0, dtype=np.float64)
        return _tiles_differ(result, mean, numbers, 0.02)

    return _Script(
        tuple(boxes(image.array.shape, size)),
        lambda box, column: project(column, 0),
        lambda box: box[1:],
        lambda path: new_image(path, image.array.shape[1:], "float32", _SPACING_UM[1:], chunks=size[1:]),
        lambda path: project_mosaic(source, path, use_gpu=request.use_gpu, tile_bytes=request.tile_bytes),
        check,
    )


def _resample(request: EndToEndRequest, source: Path) -> _Script:
    array = open_mosaic(source).array
    grid = plan_tile_grid(array.shape, request.tile, _SPACING_UM, (0, 0, 0), RESOLUTION_UM)

    def check(result: Path, base: np.ndarray, numbers: np.ndarray) -> str:
        one = resample_tiles(base.astype(np.float32), grid.part(tuple(slice(0, n) for n in base.shape)))
        spacing = open_image(result).spacing[0]
        if not np.allclose(spacing, grid.spacing):
            return f"a spacing of {spacing} µm, but it is {grid.spacing}"
        return _tiles_differ(result, one, numbers, 0.51)

    return _Script(
        tuple(boxes(array.shape, tile_shape(array.shape, request.tile, 2, request.tile_bytes))),
        lambda box, tiles: resample_tiles(tiles, grid.part(box)),
        grid.new_box,
        lambda path: _new_grid(path, grid),
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


def _new_grid(path: Path, grid: TileGrid) -> Any:
    return new_image(path, grid.new_shape, "uint16", grid.spacing, chunks=grid.new_tile)


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
CASES: dict[str, Callable[[EndToEndRequest, Path], _Script]] = {
    "linum-aip": _aip,
    "linum-resample-mosaic-grid": _resample,
}


def _measure(
    request: EndToEndRequest, name: str, source: Path, result: Path, base: np.ndarray, numbers: np.ndarray
) -> EndToEndResult:
    script, array = CASES[name](request, source), open_mosaic(source).array
    script.call(result)  # the warm-up, too
    written = open_image(result).levels[0]
    measured = EndToEndResult(
        name,
        int(array.nbytes),
        int(written.nbytes),
        script.check(result, base, numbers),
        request.use_gpu and array.nbytes >= REACH_NBYTES,
    )
    if measured.wrong:
        return measured
    kinds: dict[str, Callable[[], object]] = {
        "read": lambda: _read_all(script, array, request.use_gpu),
        "compute": _compute_all(script, array, request.use_gpu),
        "write": _write_all(script, array, request.use_gpu, result),
        "serial": lambda: _one_after_another(script, array, request.use_gpu, result),
        "script": lambda: script.call(result),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _, (kind, work) in itertools.product(range(request.runs), kinds.items()):  # taking turns
        times[kind].append(wall_seconds(work, result))
    return replace(measured, **{kind: tuple(one) for kind, one in times.items()})  # type: ignore[arg-type]


def _read_all(script: _Script, array: Volume, use_gpu: bool) -> None:
    for box in script.places:
        read_box(array, box, use_gpu)


def _compute_all(script: _Script, array: Volume, use_gpu: bool) -> Callable[[], object]:
    """Compute batches that were read before, one of each shape."""
    tiles = {_shape(box): read_box(array, box, use_gpu) for box in _one_of_each(script.places)}

    def compute_all() -> None:
        for box in script.places:
            script.compute(box, tiles[_shape(box)])

    return compute_all


def _write_all(script: _Script, array: Volume, use_gpu: bool, result: Path) -> Callable[[], object]:
    """Write results that were computed before, one of each shape."""
    made = {_shape(box): script.compute(box, read_box(array, box, use_gpu)) for box in _one_of_each(script.places)}

    def write_all() -> None:
        write: Write
        with script.image(result) as (write, _):
            for box in script.places:
                write(script.new_box(box), made[_shape(box)])

    return write_all


def _one_after_another(script: _Script, array: Volume, use_gpu: bool, result: Path) -> None:
    write: Write
    with script.image(result) as (write, _):
        for box in script.places:
            tiles = read_box(array, box, use_gpu)
            synchronize()
            made = script.compute(box, tiles)
            synchronize()
            write(script.new_box(box), made)


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in box)


def _one_of_each(places: tuple[Box, ...]) -> list[Box]:
    return list({_shape(box): box for box in places}.values())


HEADER = (
    f"{'script':<28}{'mosaic':>10}{'result':>10}{'read':>10}{'compute':>10}{'write':>10}{'in turn':>10}{'script':>10}"
    f"{'GiB/s':>8}{'ratio':>7}{'reach':>8}\n" + "─" * 121
)


def row(result: EndToEndResult) -> str:
    """Show a result as a line of the table."""
    head = f"{result.name:<28}{result.nbytes / 2**30:>6.2f} GiB{result.written_nbytes / 2**30:>6.2f} GiB"
    if result.wrong:
        return f"{head}  WRONG: {result.wrong}"
    kinds = (result.read, result.compute, result.write, result.serial, result.script)
    seconds = "".join(f"{statistics.median(one):>8.3g} s" for one in kinds)
    rate = result.nbytes / 2**30 / statistics.median(result.script)
    reach = f"≥ {REACH}" if result.judged else "–"
    return f"{head}{seconds}{rate:>8.3g}{result.ratio:>7.2f}{reach:>8}  {result.verdict}".rstrip()
