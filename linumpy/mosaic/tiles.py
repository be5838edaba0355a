"""Cut a volume into tiles, and work through them: the next is read while one is computed and the last one is written.

In: shapes, arrays, and what reads, computes and writes a tile. Out: nothing but what is written, in the order of the
tiles. About three tiles are in memory, whatever the volume's size. Errors: that of whichever step failed first, once,
after the others have come to rest.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any, TypeVar

import zarr

from linumpy.device import require_cuda
from linumpy.io.volume import Volume, as_volume
from linumpy.io.zarr_mode import in_mode_of_caller, read_chunks_on_host

#: Voxels of a column take about so many bytes on a GPU, unless one column of chunks takes more.
TILE_BYTES = 256 * 2**20
#: On the CPU SciPy's filters hold several float copies of a tile, and smaller ones cost no launches.
HOST_TILE_BYTES = 32 * 2**20

Box = tuple[slice, ...]
Place = TypeVar("Place")
Tile = TypeVar("Tile")
Result = TypeVar("Result")


def boxes(shape: tuple[int, ...], size: tuple[int, ...]) -> Iterator[Box]:
    """Walk a shape in boxes of a size, the last ones ragged."""
    for corner in itertools.product(*(range(0, n, s) for n, s in zip(shape, size, strict=True))):
        yield tuple(slice(a, min(a + s, n)) for a, s, n in zip(corner, size, shape, strict=True))


def tile_nbytes(wanted: int | None, use_gpu: bool) -> int:
    """Return the bytes that a tile may have: as the caller wants it, or what suits the device."""
    return wanted if wanted is not None else TILE_BYTES if use_gpu else HOST_TILE_BYTES


def column_shape(array: zarr.Array | Volume, depth_axis: int, tile_bytes: int) -> tuple[int, ...]:
    """Choose columns: whole along depth, laterally whole chunks (or shards), about square, of at most `tile_bytes`."""
    step = [n if k == depth_axis else s for k, (s, n) in enumerate(zip(stored(array), array.shape, strict=True))]
    return tile_shape(array.shape, step, array.dtype.itemsize, tile_bytes)


def stored(array: zarr.Array | Volume) -> tuple[int, ...]:
    """What is whole in storage: shards where an array has them, else chunks."""
    return array.shards or array.chunks


def tile_shape(shape: tuple[int, ...], step: Sequence[int], itemsize: int, tile_bytes: int) -> tuple[int, ...]:
    """Choose tiles of whole steps, about as long along each axis, of at most `tile_bytes`, but of one step at least."""
    size = tuple(min(s, n) for s, n in zip(step, shape, strict=True))
    while growing := [k for k, n in enumerate(shape) if size[k] < n]:
        axis = min(growing, key=lambda k: (size[k], -k))
        longer = (*size[:axis], min(size[axis] + step[axis], shape[axis]), *size[axis + 1 :])
        if math.prod(longer) * itemsize > tile_bytes:
            break
        size = longer
    return size


def box_nbytes(array: zarr.Array | Volume, box: Box) -> int:
    """Bytes of the voxels of a box, decoded."""
    return math.prod(one.stop - one.start for one in box) * array.dtype.itemsize


def read_box(array: zarr.Array | Volume, box: Box, use_gpu: bool) -> Any:
    """Read a box of an array, or of a volume of it, to the device or the host."""
    volume = as_volume(array)
    region = volume.region(box)
    if not use_gpu:
        return read_chunks_on_host(volume.array, region)
    from linumpy.gpu.zarr_io import read_zarr_to_gpu

    return read_zarr_to_gpu(volume.array, region=region)


def work_through(
    places: Iterable[Place],
    read: Callable[[Place], Tile],
    compute: Callable[[Place, Tile], Result],
    write: Callable[[Place, Result], object] = lambda place, result: None,
    *,
    use_gpu: bool = False,
) -> None:
    """Read, compute and write tile after tile, three at a time.

    Parameters
    ----------
    places : iterable
        What names each tile, such as its box.
    read : callable
        Place → tile; in a thread of its own.
    compute : callable
        Place, tile → result; in the caller's thread, on a device on its current stream. It may start work and return.
    write : callable
        Takes place and result; in a thread of its own, in order. It is where a device's result goes to the host. It
        begins when the work on the device is done; by default nothing is written.
    use_gpu : bool
        Whether the threads work on the caller's current CUDA device, reads and writes each on a stream of their own.
    """
    side = _Device() if use_gpu else _Host()

    def read_one(place: Place) -> tuple[Tile, Any]:
        with side.reading():
            return read(place), side.mark()

    def write_one(place: Place, tile: list[Tile], result: Result, made: Any) -> None:
        with side.writing():
            side.wait_for(made)
            # Only now: memory that is let go while a kernel still reads it would be given to the next tile.
            tile.clear()
            write(place, result)

    with (
        closing(side),
        ThreadPoolExecutor(1, "linumpy-read", in_mode_of_caller()) as reader,
        ThreadPoolExecutor(1, "linumpy-write", in_mode_of_caller()) as writer,
    ):
        reads: deque[tuple[Place, Future[tuple[Tile, Any]]]] = deque()
        writes: deque[Future[None]] = deque()

        def step() -> None:
            place, future = reads.popleft()
            tile, there = future.result()
            side.follow(there)
            result = compute(place, tile)
            while writes:
                writes.popleft().result()
            writes.append(writer.submit(write_one, place, [tile], result, side.mark()))

        for place in places:
            reads.append((place, reader.submit(read_one, place)))
            if len(reads) > 1:
                step()
        while reads:
            step()
        while writes:
            writes.popleft().result()


class _Host:
    """Threads that work in host memory need no order among them but that of their calls."""

    def reading(self) -> AbstractContextManager[Any]:
        return nullcontext()

    writing = reading

    def mark(self) -> Any:
        """Remember how far the work has come."""

    def follow(self, mark: Any) -> None:
        """Let what comes now work on what was done until the mark."""

    def wait_for(self, mark: Any) -> None:
        """Wait until all that came before the mark is done."""

    def close(self) -> None:
        """Come to rest."""


class _Device(_Host):
    """Threads that work on the caller's device: reads and writes on streams of their own, ordered by events."""

    def __init__(self) -> None:
        self._cupy = require_cuda()
        self._number = self._cupy.cuda.Device().id  # a new thread begins on device 0
        self._reads, self._writes = _streams(self._number)

    @contextmanager
    def reading(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._number), self._reads:
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._cupy.cuda.Device(self._number), self._writes:
            yield

    def mark(self) -> Any:
        return self._cupy.cuda.get_current_stream().record()

    def follow(self, mark: Any) -> None:
        self._cupy.cuda.get_current_stream().wait_event(mark)

    def wait_for(self, mark: Any) -> None:
        mark.synchronize()

    def close(self) -> None:
        for stream in (self._cupy.cuda.get_current_stream(), self._reads, self._writes):
            stream.synchronize()


@functools.cache
def _streams(device: int) -> tuple[Any, Any]:
    """Make a device's streams once: CuPy keeps the memory that was used on a stream for that stream."""
    cupy = require_cuda()
    with cupy.cuda.Device(device):
        return cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
