"""``resample_zarr`` on a raw volume: how close it comes to reading and writing the same bytes at the same time.

In: a :class:`ZarrRequest`. Out: :class:`ZarrResult`, a table, and JSON where asked for. The volume is made first and
halved; boxes of the result are compared with SciPy's, and what is wrong is not timed. Times are those of the clock on
the wall, from a device at rest to a device at rest, with the volume in the page cache.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark import machine
from linumpy.benchmark.kernel_case import verdict_of
from linumpy.benchmark.table import machine_text
from linumpy.benchmark.volumes import check_room, flush, wall_seconds, write_tiles
from linumpy.device import array_module, kvikio_mode, require_cuda
from linumpy.gpu.read.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import read_zarr_to_gpu
from linumpy.io.files import replacing
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.plan.grid.regrid import plan_regrid
from linumpy.resample.resample_zarr import plan_blocks, resample_zarr
from linumpy.write.writer import OmeZarrWriter

#: The part of the time of reading and writing at once that `resample_zarr` should reach, on a GPU, from so many bytes
#: on.
REACH, REACH_NBYTES = 0.7, 16 * 2**30
#: Spacing of voxels of the volume and of the result, µm.
_SPACING_UM, _WANTED_UM = 5.0, 10.0
#: Boxes of the result that are compared with SciPy, besides those in two corners, and their sides.
_BOXES, _SIDE = 14, 48
#: Half of a step of integers, and what single precision adds to it.
_TOLERANCE = 0.55


@dataclass(frozen=True)
class ZarrRequest:
    """What to time.

    Attributes
    ----------
    gib : float
        Size of the volume, rounded to whole chunks.
    folder : Path or None
        Where volume and result are made, in a folder of their own that goes at the end; by default where temporary
        files go.
    device_memory : float
        GiB that ``resample_zarr`` may take; on a GPU CuPy's pool refuses more.
    runs : int
        Timed runs of each kind.
    chunk : (int, int, int)
        Voxels of a chunk of the volume (uint16).
    use_gpu : bool
        Whether to work on the GPU.
    json : Path or None
        A file to write.
    """

    gib: float
    folder: Path | None = None
    device_memory: float = 8.0
    runs: int = 5
    chunk: tuple[int, int, int] = (256, 256, 256)
    use_gpu: bool = True
    json: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.gib < 2**20:
            raise ValueError(f"a volume of {self.gib} GiB: more than 0 is needed")
        if not self.device_memory > 0:
            raise ValueError(f"device_memory={self.device_memory} GiB: more than 0 is needed")
        if self.runs < 1:
            raise ValueError(f"runs={self.runs}: a median needs 1 run or more")
        for folder in (self.folder, self.json and self.json.absolute().parent):
            if folder is not None and not folder.is_dir():
                raise FileNotFoundError(f"there is no folder {str(folder)!r}")

    @property
    def grid(self) -> tuple[int, int, int]:
        """Chunks along each axis, about as many along all where their number can be so divided."""
        count = max(1, round(self.gib * 2**30 / (2 * math.prod(self.chunk))))
        depth = _divisor(count, 1 / 3)
        rows = _divisor(count // depth, 1 / 2)
        return depth, rows, count // (depth * rows)

    @property
    def limit(self) -> int:
        """Bytes of `device_memory`."""
        return int(self.device_memory * 2**30)


def _divisor(count: int, power: float) -> int:
    """Find the largest divisor of a number up to its root."""
    return next(n for n in range(max(1, int(count**power + 1e-9)), 0, -1) if count % n == 0)


@dataclass(frozen=True)
class ZarrResult:
    """What came of it. All times are seconds, one for each run; empty where the result is wrong.

    Attributes
    ----------
    nbytes, written_nbytes : int
        Of the volume, and of the result.
    blocks : int
        Blocks that it is made in.
    peak : int or None
        Bytes of CuPy's pool at the most while it is made; None without a GPU.
    wrong : str
        Why the result is wrong; empty where it is right.
    judged : bool
        Whether the reach is for this size and device.
    read, write : tuple of float
        Every box read by ``read_zarr_to_gpu``, and nothing else; the result written, and nothing else.
    overlapped : tuple of float
        Both at once, each as fast as it can.
    resample : tuple of float
        The call.
    """

    nbytes: int
    written_nbytes: int
    blocks: int
    peak: int | None
    wrong: str
    judged: bool
    read: tuple[float, ...] = ()
    write: tuple[float, ...] = ()
    overlapped: tuple[float, ...] = ()
    resample: tuple[float, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Time of reading and writing at once over that of the call; None where there are no times."""
        return statistics.median(self.overlapped) / statistics.median(self.resample) if self.resample else None

    @property
    def ratio_to_slower(self) -> float | None:
        """Time of the slower of reading alone and writing alone over that of the call; None where there are none."""
        if not self.resample:
            return None
        return max(map(statistics.median, (self.read, self.write))) / statistics.median(self.resample)

    @property
    def verdict(self) -> str:
        """``"WRONG"``, ``"met"``, ``"MISSED"``, or nothing where there is no mark."""
        return verdict_of(self.wrong, (self.ratio, REACH if self.judged else None))


def run_zarr_to_zarr(request: ZarrRequest) -> ZarrResult:
    """Make a volume, check and time its resampling, and show what came of it.

    Raises
    ------
    GpuUnavailableError
        A GPU is asked for and there is none.
    ValueError
        The folder has no room for the volume.
    """
    if request.use_gpu:
        require_cuda()
    with tempfile.TemporaryDirectory(prefix="linum-benchmark-", dir=request.folder) as made:
        folder = Path(made)
        here = machine.look(folder)
        print(machine_text(here), end="\n\n")
        shape = tuple(n * c for n, c in zip(request.grid, request.chunk, strict=True))
        check_room(folder, 2 * math.prod(shape) * 5 // 4)
        rng = np.random.default_rng(0)
        base = rng.integers(0, 50000, request.chunk, np.uint16)
        numbers = rng.integers(0, 15000, request.grid).astype(np.uint16)
        source = write_tiles(folder / "volume.ome.zarr", base, numbers, (_SPACING_UM,) * 3)
        if not flush(source):
            print("the disk is still busy with the volume: times of writes may be longer than they would be")
        print(
            f"{'×'.join(map(str, shape))} uint16, raw chunks of {'×'.join(map(str, request.chunk))}, to half of it, on "
            f"the {'GPU' if request.use_gpu else 'CPU'} within {request.device_memory:g} GiB; medians of "
            f"{request.runs} runs; in the page cache\n\n{HEADER}"
        )
        result = _measure(request, source, folder / "half.ome.zarr")
        print(row(result), flush=True)
    if request.json is not None:
        document = {"machine": asdict(here), "chunk": request.chunk, "shape": shape, **asdict(result)}
        document |= {"device_memory": request.limit, "ratio": result.ratio, "ratio_to_slower": result.ratio_to_slower}
        with replacing(request.json, overwrite=True) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n")
        print(f"\nwritten: {request.json}")
    return result


def _measure(request: ZarrRequest, source: Path, target: Path) -> ZarrResult:
    array = open_image(source).levels[0]

    def resample() -> None:
        with _limited(request):
            resample_zarr(
                source,
                target,
                _WANTED_UM,
                anti_aliasing=False,
                mode="nearest",
                device="cuda" if request.use_gpu else "cpu",
                device_memory=request.limit,
                durable=False,
                progress=lambda _: None,
            )

    peak = _peak_of(resample, use_gpu=request.use_gpu)  # the warm-up, too
    written = open_image(target).levels[0]
    plan, scratch = _plan(request, array, written)
    measured = ZarrResult(
        int(array.nbytes),
        int(written.nbytes),
        len(plan),
        peak,
        _differs(array, written),
        request.use_gpu and array.nbytes >= REACH_NBYTES,
    )
    if measured.wrong:
        return measured
    steps = _Steps(request, array, written, plan, scratch, target)
    if request.use_gpu and kvikio_mode()[0] != "none":
        # Set once for all kinds: none of them waits for kvikio's threads to be set up.
        with transfer_settings():
            return _timed(request, measured, steps, resample, target)
    return _timed(request, measured, steps, resample, target)


def _timed(
    request: ZarrRequest, measured: ZarrResult, steps: _Steps, resample: Callable[[], None], target: Path
) -> ZarrResult:
    kinds: dict[str, Callable[[], object]] = {
        "read": steps.read,
        "write": steps.write,
        "overlapped": steps.both,
        "resample": resample,
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _, (kind, work) in itertools.product(range(request.runs), kinds.items()):  # taking turns
        times[kind].append(wall_seconds(work, target))
    return replace(measured, **{kind: tuple(one) for kind, one in times.items()})  # type: ignore[arg-type]


def _plan(request: ZarrRequest, array: zarr.Array, written: zarr.Array) -> tuple[ResamplePlan, int | None]:
    """Find the blocks that ``resample_zarr`` makes."""
    regrid = plan_regrid(_WANTED_UM, array.shape, (_SPACING_UM,) * 3, (0.0,) * 3, None)
    grid = AffineGrid(tuple(array.shape), regrid.shape, regrid.matrix, regrid.offset, 1, "nearest")
    return plan_blocks(grid, array, written.chunks, "cuda" if request.use_gpu else "cpu", request.limit)


@contextmanager
def _limited(request: ZarrRequest) -> Iterator[None]:
    """Let CuPy's pool refuse what is more than the memory."""
    if not request.use_gpu:
        yield
        return
    pool = require_cuda().get_default_memory_pool()
    before = pool.get_limit()
    pool.set_limit(size=pool.used_bytes() + request.limit)
    try:
        yield
    finally:
        pool.set_limit(size=before)


def _peak_of(work: Callable[[], object], *, use_gpu: bool) -> int | None:
    """Bytes that CuPy's pool takes from the device for a call: it gives none back before it is asked to."""
    if not use_gpu:
        work()
        return None
    pool = require_cuda().get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    work()
    return int(pool.total_bytes() - before)


def _differs(source: zarr.Array, result: zarr.Array) -> str:
    """Compare boxes of the result with what SciPy makes of their boxes of the source; says what is wrong."""
    wanted = tuple(n * _SPACING_UM / _WANTED_UM for n in source.shape)
    if tuple(result.shape) != wanted:
        return f"its shape is {result.shape}, but must be {wanted}"
    rng = np.random.default_rng(1)
    side = [min(_SIDE, n) for n in result.shape]
    last = [n - s for n, s in zip(result.shape, side, strict=True)]
    starts = [[0, 0, 0], last, *([int(rng.integers(0, n + 1)) for n in last] for _ in range(_BOXES))]
    for start in starts:
        found = read_on_host(result, tuple(slice(a, a + s) for a, s in zip(start, side, strict=True)))
        worst = float(np.abs(found - _by_scipy(source, start, side)).max())
        if not worst <= _TOLERANCE:
            return f"the box at {tuple(start)} is wrong by {worst:.3g}"
    return ""


def _by_scipy(source: zarr.Array, start: list[int], side: list[int]) -> np.ndarray:
    """Resample the box of the source that a box of the result comes from, with two voxels around it, in float64."""
    import scipy.ndimage as ndimage

    low = [max(0, 2 * a - 2) for a in start]
    part = tuple(slice(a, 2 * (b + s) + 2) for a, b, s in zip(low, start, side, strict=True))
    box = read_on_host(source, part)
    offset = [2 * a + 0.5 - b for a, b in zip(start, low, strict=True)]
    made = ndimage.affine_transform(box.astype(np.float64), [2.0] * 3, offset, tuple(side), order=1, mode="nearest")
    return np.asarray(made)


class _Steps:
    """Reading alone, writing alone, and both at once."""

    def __init__(
        self,
        request: ZarrRequest,
        array: zarr.Array,
        written: zarr.Array,
        plan: ResamplePlan,
        scratch: int | None,
        target: Path,
    ) -> None:
        self._gpu, self._array, self._plan, self._scratch, self._target = request.use_gpu, array, plan, scratch, target
        self._shape, self._chunks = tuple(written.shape), tuple(written.chunks)
        first = next(iter(plan)).box
        self._block = read_on_host(written, first)
        if self._gpu:
            cupy = require_cuda()
            self._block = cupy.asarray(self._block)
            self._device = cupy.cuda.Device()
            self._streams: list[Any] = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]

    def read(self) -> None:
        """Read the box of every block."""
        buffer = None
        for block in self._plan:
            if not self._gpu:
                read_on_host(self._array, block.source_box)
                continue
            size = math.prod(block.source_shape)
            if buffer is None:
                buffer = require_cuda().empty(self._plan.largest[0], np.uint16)
            out = buffer[:size].reshape(block.source_shape)
            read_zarr_to_gpu(self._array, region=block.source_box, out=out, scratch_bytes=self._scratch)

    def write(self) -> None:
        """Write as many blocks as the result has, of its chunks, from where they would be."""
        options: dict[str, Any] = {"chunks": self._chunks, "durable": False}
        with OmeZarrWriter(self._target, self._shape, np.uint16, (_WANTED_UM,) * 3, **options) as writer:
            for block in self._plan:
                part = self._block[tuple(map(slice, block.shape))]
                writer.write(block.box, array_module(part).ascontiguousarray(part))

    def both(self) -> None:
        """Do both, each in a thread and on a stream of its own."""
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(self._alone, *one) for one in enumerate((self.read, self.write))]:
                future.result()

    def _alone(self, number: int, work: Callable[[], None]) -> None:
        if not self._gpu:
            work()
            return
        with self._device, self._streams[number] as stream:
            work()
            stream.synchronize()


HEADER = (
    f"{'volume':>10}{'result':>10}{'blocks':>8}{'memory':>10}{'read':>10}{'write':>10}{'at once':>10}{'resample':>10}"
    f"{'GiB/s':>8}{'of slower':>11}{'ratio':>7}{'reach':>8}\n" + "─" * 112
)


def row(result: ZarrResult) -> str:
    """Show a result as a line of the table."""
    memory = "–" if result.peak is None else f"{result.peak / 2**30:.2f} GiB"
    head = f"{result.nbytes / 2**30:>6.2f} GiB{result.written_nbytes / 2**30:>6.2f} GiB{result.blocks:>8}{memory:>10}"
    if result.wrong:
        return f"{head}  WRONG: {result.wrong}"
    kinds = (result.read, result.write, result.overlapped, result.resample)
    seconds = "".join(f"{statistics.median(one):>8.3g} s" for one in kinds)
    rate = result.nbytes / 2**30 / statistics.median(result.resample)
    reach = f"≥ {REACH}" if result.judged else "–"
    return (
        f"{head}{seconds}{rate:>8.3g}{result.ratio_to_slower:>11.2f}{result.ratio:>7.2f}{reach:>8}  {result.verdict}"
    ).rstrip()
