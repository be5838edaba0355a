"""``resample_zarr`` on a raw volume, beside reading and writing as many bytes at the same time.

In: a :class:`ZarrRequest`. Out: a :class:`~linumpy.benchmark.cases.Case`. The volume is written first, and stays in the
page cache. Boxes of the result are compared with the result of SciPy.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.benchmark.cases import CannotRunError, Case, Entry, Mark, Prepare, Prepared, Suite, ready
from linumpy.benchmark.data import check_free, check_size, flush, work_folder, write_tiles
from linumpy.benchmark.report import size
from linumpy.benchmark.suites.scripts import not_judged
from linumpy.device import array_module, kvikio_mode, require_cuda, resolve
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.gpu.zarr_io import read_region_into
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.grid.blocks import AffineGrid, ResamplePlan
from linumpy.plan.grid.regrid import plan_regrid
from linumpy.resample.blocks.plans import plan_blocks
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import OmeZarrWriter

_DESCRIPTION = """Time resample_zarr: a raw volume to half its resolution, beside its reading and writing alone.

A volume of --gib GiB is written below --folder, which needs 1.25 times as much space. The limits are reading the same
boxes, writing as many bytes, and both at once, by the wall clock. Boxes of the result are compared with SciPy's first.

For example:
  linum-benchmark resample-zarr --gib 32 --folder /scratch --device_memory 8 --json zarr.json
"""

#: The rate that `resample_zarr` should reach, relative to reading and writing at once.
REACH = 0.7
#: Voxel spacing of the volume and of the result, in µm.
_SPACING_UM, _NEW_SPACING_UM = 5.0, 10.0
#: Number of random boxes of the result that are compared with SciPy, besides two corners, and the side of a box.
_BOXES, _SIDE = 14, 48
#: Tolerance for rounding to integers, and for the error of single precision.
_TOLERANCE = 0.55


@dataclass(frozen=True)
class ZarrRequest:
    """The volume (uint16) of `gib` GiB, rounded to whole chunks, and the memory (GiB) that ``resample_zarr`` may take.

    On a GPU CuPy's pool is limited to that memory. Volume and result are in a new folder in `folder`, by default the
    folder of temporary files.
    """

    gib: float
    folder: Path | None = None
    device_memory: float = 8.0
    chunk: tuple[int, int, int] = (256, 256, 256)
    use_gpu: bool = True

    def __post_init__(self) -> None:
        check_size("a volume", self.gib, self.folder)
        check_size("device memory", self.device_memory)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Chunks along each axis, about equal if their number has such divisors."""
        count = max(1, round(self.gib * 2**30 / (2 * math.prod(self.chunk))))
        depth = _divisor(count, 1 / 3)
        rows = _divisor(count // depth, 1 / 2)
        return depth, rows, count // (depth * rows)

    @property
    def limit(self) -> int:
        """Bytes of `device_memory`."""
        return int(self.device_memory * 2**30)


def _divisor(count: int, power: float) -> int:
    """Return the largest divisor of a number up to a power of the number."""
    return next(n for n in range(max(1, int(count**power + 1e-9)), 0, -1) if count % n == 0)


@contextmanager
def zarr_cases(request: ZarrRequest) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Write a volume; yield the folder of the volume, which is removed at the end, and the case.

    Raises
    ------
    GpuUnavailableError
        ``use_gpu`` without a GPU.
    ValueError
        The disk is too small for the volume.
    """
    if request.use_gpu:
        require_cuda()
    with ExitStack() as stack:
        folder = stack.enter_context(work_folder(request.folder))
        shape = tuple(n * c for n, c in zip(request.grid, request.chunk, strict=True))
        check_free(folder, 2 * math.prod(shape) * 5 // 4)
        rng = np.random.default_rng(0)
        base = rng.integers(0, 50000, request.chunk, np.uint16)
        numbers = rng.integers(0, 15000, request.grid).astype(np.uint16)
        source = write_tiles(folder / "volume.ome.zarr", base, numbers, (_SPACING_UM,) * 3)
        if not flush(source):
            print("the disk is still busy with the volume: times of writes may be too long")
        if request.use_gpu and kvikio_mode()[0] != "none":
            # Set once for all entries, so that no entry waits for kvikio's threads to start.
            stack.enter_context(transfer_settings())
        yield folder, iter([_case(request, source, folder / "half.ome.zarr")])


def _case(request: ZarrRequest, source: Path, target: Path) -> Case:
    """Make the case: the call, and the limits (reading, writing, both at once), in alternating runs."""
    array = open_image(source).levels[0]
    nbytes = int(array.nbytes)
    peaks: list[int | None] = []
    steps: list[_Steps] = []
    remove = partial(shutil.rmtree, target, ignore_errors=True)

    def resample() -> None:
        with _limited(request):
            resample_zarr(
                source, target, _NEW_SPACING_UM, anti_aliasing=False, mode="nearest", durable=False,
                device="cuda" if request.use_gpu else "cpu", memory_bytes=request.limit, progress=lambda _: None,
            )  # fmt: skip

    def call() -> None:
        if peaks:
            resample()
        else:  # the call for the check, which is not timed
            peaks.append(_peak_of(resample, use_gpu=request.use_gpu))

    def check(_: object) -> str:
        written = open_image(target).levels[0]
        steps.append(_Steps(request, array, written, *_plan(request, array, written), target))
        return _differs(array, written)

    def note() -> str:
        memory = "" if peaks[0] is None else f", {size(peaks[0])} of device memory"
        count = len(steps[0].plan)
        return f"{count} block{'s' if count > 1 else ''}{memory}"

    def step(name: str) -> Prepare:
        def prepare() -> AbstractContextManager[Prepared]:
            if not steps:
                raise CannotRunError("resample_zarr made no result, whose shape and chunks are needed")
            return nullcontext(Prepared(getattr(steps[0], name), before=remove))

        return prepare

    return Case(
        name="resample_zarr to half",
        nbytes=nbytes,
        entries=(
            Entry("resample", "resample_zarr", ready(call, check, before=remove, note=note), "ours", 0),
            Entry("read", "read alone", step("read"), "limit", 0),
            Entry("write", "write alone", step("write"), "limit", 0),
            Entry("overlapped", "read and write at once", step("both"), "limit", 0),
        ),
        description=(
            f"{'×'.join(map(str, array.shape))} uint16, {size(nbytes)}, raw chunks of "
            f"{'×'.join(map(str, request.chunk))}, to half of it, on the {'GPU' if request.use_gpu else 'CPU'} within "
            f"{request.device_memory:g} GiB; in the page cache",
        ),
        facts={
            "shape": list(array.shape),
            "chunk": list(request.chunk),
            "device_memory": request.limit,
            "gpu": request.use_gpu,
        },
        marks=(Mark(REACH, ("overlapped",), "× reading and writing at once"),),
        not_judged=not_judged(request.use_gpu, nbytes),
        in_turns=True,
    )


def _plan(request: ZarrRequest, array: zarr.Array, written: zarr.Array) -> tuple[ResamplePlan, int | None]:
    """Return the blocks of ``resample_zarr``, and the scratch memory of its reads."""
    regrid = plan_regrid(_NEW_SPACING_UM, array.shape, (_SPACING_UM,) * 3, (0.0,) * 3, None)
    grid = AffineGrid(tuple(array.shape), regrid.shape, regrid.matrix, regrid.offset, 1, "nearest")
    planned = plan_blocks(grid, array, written.chunks, "cuda" if request.use_gpu else "cpu", request.limit)
    return planned.plan, planned.scratch


@contextmanager
def _limited(request: ZarrRequest) -> Iterator[None]:
    """Limit CuPy's pool to ``device_memory``."""
    if not request.use_gpu:
        yield
        return
    pool = require_cuda().get_default_memory_pool()
    before = pool.get_limit()
    # Memory of the pool that is in use, and cannot be freed, does not count.
    pool.free_all_blocks()
    pool.set_limit(size=pool.total_bytes() + request.limit)
    try:
        yield
    finally:
        pool.set_limit(size=before)


def _peak_of(work: Callable[[], object], *, use_gpu: bool) -> int | None:
    """Return the bytes that CuPy's pool takes from the device during a call: the pool frees none by itself."""
    if not use_gpu:
        work()
        return None
    pool = require_cuda().get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    work()
    return int(pool.total_bytes() - before)


def _differs(source: zarr.Array, result: zarr.Array) -> str:
    """Compare boxes of the result with SciPy's results for the same boxes; return why they differ, or an empty str."""
    expected_shape = tuple(n * _SPACING_UM / _NEW_SPACING_UM for n in source.shape)
    if tuple(result.shape) != expected_shape:
        return f"its shape is {result.shape}, but must be {expected_shape}"
    rng = np.random.default_rng(1)
    side = [min(_SIDE, n) for n in result.shape]
    last = [n - s for n, s in zip(result.shape, side, strict=True)]
    starts = [[0, 0, 0], last, *([int(rng.integers(0, n + 1)) for n in last] for _ in range(_BOXES))]
    for start in starts:
        box = read_on_host(result, tuple(slice(a, a + s) for a, s in zip(start, side, strict=True)))
        worst = float(np.abs(box - _by_scipy(source, start, side)).max())
        if not worst <= _TOLERANCE:
            return f"the box at {tuple(start)} is wrong by {worst:.3g}"
    return ""


def _by_scipy(source: zarr.Array, start: list[int], side: list[int]) -> np.ndarray:
    """Resample the box of the source for a box of the result, with a margin of two voxels, in float64."""
    import scipy.ndimage as ndimage

    low = [max(0, 2 * a - 2) for a in start]
    source_box = tuple(slice(a, 2 * (b + s) + 2) for a, b, s in zip(low, start, side, strict=True))
    box = read_on_host(source, source_box)
    offset = [2 * a + 0.5 - b for a, b in zip(start, low, strict=True)]
    options = {"order": 1, "mode": "nearest"}
    return np.asarray(ndimage.affine_transform(box.astype(np.float64), [2.0] * 3, offset, tuple(side), **options))


class _Steps:
    """Reading alone, writing alone, and both at once."""

    def __init__(
        self, request: ZarrRequest, array: zarr.Array, written: zarr.Array,
        plan: ResamplePlan, scratch: int | None, target: Path,
    ) -> None:  # fmt: skip
        self._gpu, self._array, self.plan, self._scratch, self._target = request.use_gpu, array, plan, scratch, target
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
        if not self._gpu:
            for block in self.plan:
                read_on_host(self._array, block.source_box)
            return
        buffer = require_cuda().empty(self.plan.largest[0], np.uint16)
        with closing(OwnReader(self._scratch)) as reader:  # one for all blocks, as in resample_zarr
            for block in self.plan:
                out = buffer[: math.prod(block.source_shape)].reshape(block.source_shape)
                read_region_into(self._array, block.source_box, out, reader)

    def write(self) -> None:
        """Write the blocks of the result, in its chunks, from the memory in which they would be computed."""
        with OmeZarrWriter(
            self._target, self._shape, np.uint16, (_NEW_SPACING_UM,) * 3,
            chunks=self._chunks, codec="none", durable=False,
        ) as writer:  # fmt: skip
            for block in self.plan:
                part = self._block[tuple(map(slice, block.shape))]
                writer.write(block.box, array_module(part).ascontiguousarray(part))

    def both(self) -> None:
        """Read and write at once, each in a thread and on a stream of its own."""
        with ThreadPoolExecutor(2) as pool:
            for future in [pool.submit(self._on_stream, *work) for work in enumerate((self.read, self.write))]:
                future.result()

    def _on_stream(self, number: int, work: Callable[[], None]) -> None:
        if not self._gpu:
            work()
            return
        with self._device, self._streams[number] as stream:
            work()
            stream.synchronize()


@contextmanager
def _cases(*, gib: float, folder: Path | None, device_memory: float) -> Iterator[tuple[Path, Iterator[Case]]]:
    with zarr_cases(ZarrRequest(gib, folder, device_memory, use_gpu=resolve().is_cuda)) as folder_and_cases:
        yield folder_and_cases


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gib", type=float, default=32.0, metavar="GIB", help="Size of the volume. [%(default)s]")
    parser.add_argument(
        "--device_memory", type=float, default=8.0, metavar="GIB", help="What resample_zarr may take. [%(default)s]"
    )


SUITE = Suite(
    "resample-zarr", _DESCRIPTION, 5, _cases,
    folder="Where volume and result are written", add_options=_add_options,
)  # fmt: skip
