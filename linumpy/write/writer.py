"""Write an OME-Zarr image with its pyramid, region by region, complete or not at all.

In: regions as NumPy or CuPy arrays, and the voxel spacing in µm. Out: a folder, NGFF 0.4 (zarr v2), 0.5 or 0.6 (zarr
v3), or an ``.ozx`` file. It is written in a work folder beside its path and renamed when complete and on the disk, so
that a killed run leaves nothing that looks finished. Raw chunks of a device array are written by GPUDirect Storage, or
through pinned memory where kvikio or the system does not offer it; others are encoded on the device, and their stored
bytes alone are copied to the host.
Errors: ``FileExistsError`` for a path that exists, ``ValueError`` for sizes and regions that do not fit, ``TypeError``
for values that are no numbers, ``OSError`` for a full disk.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from linumpy.arrays import Array
from linumpy.device import is_device_array, synchronize
from linumpy.errors import not_pickled
from linumpy.io.carried import Carried
from linumpy.io.output.checks import check_target, checked_version
from linumpy.io.output.folders import new_folder
from linumpy.io.output.syscalls import named_errors
from linumpy.io.paths import absolute
from linumpy.plan.encoding import BY_CODEC
from linumpy.plan.pyramid import Box, Pyramid, shape_of, split, within
from linumpy.renamed import renamed_parameter
from linumpy.write.cut_chunks import CutChunks
from linumpy.write.levels import Levels
from linumpy.write.new_image import plan_image
from linumpy.write.raw_chunks import Chunks, chunks_of, read_back, writing_threads
from linumpy.write.regions import checked_block, region_text
from linumpy.write.report import WriteReport
from linumpy.write.state import WriteState
from linumpy.write.tasks import Finish, finish_all

log = logging.getLogger(__name__)

#: Bytes of the voxels that are processed at the same time, unless one chunk or shard is larger.
STEP_BYTES = 256 * 2**20
#: Steps of a device array whose files may be unfinished when the next one begins.
_MOST_STEPS = 4

Progress = Callable[[int], object]
"""Called with the number of bytes written since the last call."""


class OmeZarrWriter:
    """An OME-Zarr image, written region by region; it appears at its path when the ``with`` block ends without error.

    Parameters
    ----------
    path : str or Path
        The folder to make; or ``*.ozx``, a ZIP file (RFC-9), into which the finished folder is packed, so that the disk
        needs room for both. It holds NGFF 0.5 or 0.6.
    shape : sequence of int
        Voxels of the finest resolution: two or three axes of space, before them any of time and channel.
    dtype : dtype
        Data type of a voxel: bool, integers, or floats of 2 to 8 bytes.
    spacing : sequence of float
        Voxel spacing in µm, one for each axis of space. (Along t and c the metadata has a scale of 1 and no unit,
        unless `carried` says more.)
    axes : str, optional
        Names of the axes: two or three of ``"zyx"``, of space, in any order; before them ``"t"``, ``"c"`` or ``"tc"``,
        as ``"tczyx"``. By default the last of ``"zyx"``; with more than three axes they must be named.
    chunks, shards : sequence of int, optional
        One number for each axis. By default chunks of at most 8 MiB, of one time and one channel, and no shards. Shards
        need chunks that divide them, and zarr v3.
    codec : str, optional
        How chunks are compressed: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``, or ``"blosc:lz4"`` and
        ``"blosc:zstd"`` with ``":byte"`` (the default), ``":bit"`` or ``":none"`` for the shuffle; ``":small"`` behind
        it for less bytes and more time, ``"+crc32c"`` for a checksum (zarr v3). Device arrays are compressed on the
        device, except by gzip. By default what the source of `carried` has, or else ``"zstd"``.
    compressors
        In place of `codec`, as for zarr: codecs of zarr v3 for NGFF 0.5 and 0.6, one of numcodecs for 0.4; None for raw
        chunks. Codecs and settings that have no name as `codec` are applied by zarr-python.
    name : str, optional
        Name of the image; by default that of `carried`, or else that of the folder.
    origin : sequence of float, optional
        Position of the centre of the first voxel in µm, along each axis of space.
    levels : int
        Number of resolutions. Each has half the voxels of the one before along each axis of space that has more than
        one, and all times and channels.
    downsampling : {"mean", "label", "nearest"}
        How a voxel is made from 2 × 2 × 2 finer ones: their mean, exact for integers and rounded half to even; for
        labels the most frequent of them (of equally frequent ones the first); or the first of them. An odd last voxel
        is averaged with itself. The metadata has the centre of all eight, and this method as the ``type`` of the
        multiscales.
    ngff_version : {"0.6", "0.5", "0.4"}, optional
        Version of the metadata; of 0.4 in zarr v2, else v3. By default that of `carried`, or else 0.5.
    fill_value : number
        Value of voxels that are never written.
    attributes : mapping, optional
        Attributes of the group beside those of NGFF, as JSON can hold them.
    carried : Carried, optional
        Metadata of the image that this one is made from, by :func:`linumpy.io.carried.carried_from`: units, coordinates
        along t and c, omero, attributes, name and version.
    buffer_bytes : int
        Bytes of incomplete chunks, of which regions have written only a part, that may be buffered in memory. By
        default none: then regions must be whole chunks (or shards).
    overwrite : bool
        Whether to replace an existing Zarr folder, atomically where the file system can exchange two names. Nothing
        else is ever replaced.
    durable : bool
        Whether to flush the image to the disk before it is renamed, so that not even a power cut leaves half of one.
        The end of the ``with`` block waits for the disk then.
    progress : callable, optional
        Called with the number of bytes of the finest resolution written since the last call, in the thread that
        writes.

    Raises
    ------
    FileExistsError
        The path exists.
    FileNotFoundError
        Its parent folder does not exist.
    ValueError
        A parameter does not fit the shape.
    TypeError
        A dtype without numbers.
    OSError
        The disk has less free space than the image takes.

    Notes
    -----
    **Regions.** A region that begins and ends at the edges of chunks (or shards), or at the end of the image, is
    written directly to its files. A region that cuts a chunk is refused, unless `buffer_bytes` has memory in which the
    chunk is buffered until other regions complete it; a chunk that is still incomplete at the end is written with the
    fill value in its missing voxels. A region may be written again; the last one counts.

    **Pyramid.** Coarser chunks that lie in a region are made from it, where it is, before :meth:`write` returns. Those
    that several regions share are made at the end, from the written chunks; regions of :meth:`regions` leave few.

    **Voxels that are never written** have the fill value; a log line (warning) gives the number of such chunks.

    **Threads.** Several may write at the same time if their regions share no chunk; otherwise the second one raises.
    With `buffer_bytes` they may cut the same chunks.

    **Memory.** Beyond the regions themselves: on a device up to about 2.5 GiB, and at most an eighth of what is free to
    encode; in host memory less; more only where eight chunks (or shards) of a resolution together take more than
    256 MiB; and `buffer_bytes`.

    **Device arrays.** Kernels run on CuPy's current stream of the thread that calls :meth:`write`. Raw chunks are
    written by GPUDirect Storage where kvikio offers it, and through pinned host memory elsewhere.

    Examples
    --------
    >>> with OmeZarrWriter("a.ome.zarr", (64, 512, 512), "uint16", (5, 10, 10), levels=3) as writer:  # doctest: +SKIP
    ...     for region in writer.regions():
    ...         writer[region] = make(region)
    """

    @renamed_parameter("n_levels", "levels")
    def __init__(
        self,
        path: str | Path,
        shape: Sequence[int],
        dtype: DTypeLike,
        spacing: Sequence[float],
        *,
        axes: str | None = None,
        chunks: Sequence[int] | None = None,
        shards: Sequence[int] | None = None,
        codec: str | None = None,
        compressors: Any = BY_CODEC,
        name: str | None = None,
        origin: Sequence[float] | None = None,
        levels: int = 1,
        downsampling: str = "mean",
        ngff_version: str | None = None,
        fill_value: complex | np.generic = 0,
        attributes: Mapping[str, Any] | None = None,
        carried: Carried | None = None,
        buffer_bytes: int = 0,
        overwrite: bool = False,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        self.path = Path(path)
        self._target = absolute(path)
        self._image = image = plan_image(
            shape,
            dtype,
            spacing,
            axes=axes,
            chunks=chunks,
            shards=shards,
            codec=codec,
            compressors=compressors,
            name=name if name is not None else (carried and carried.name) or self._target.name,
            origin=origin,
            levels=levels,
            downsampling=downsampling,
            ngff_version=checked_version(self._target, ngff_version),
            fill_value=fill_value,
            attributes=attributes,
            carried=carried,
        )
        check_target(self.path, overwrite=overwrite)
        image.check_fits(self.path)
        self._downsampling, self._progress = downsampling, progress
        self._overwrite, self._durable = overwrite, durable
        self._pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
        if not isinstance(buffer_bytes, (int, float, np.integer)) or not 0 <= buffer_bytes < math.inf:
            raise ValueError(f"buffer_bytes={buffer_bytes!r}: pass a number of bytes, 0 for none")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress={progress!r}: pass a function that takes a number of bytes")
        self._buffer_bytes = int(buffer_bytes)
        self._cut = CutChunks(self._buffer_bytes, image.dtype.itemsize)
        self._state = WriteState(self._pyramid)
        self._scope = ExitStack()
        self._chunks: list[Chunks] = []
        self._threads = writing_threads()
        self._on_device = self._at_work = False
        self._began = self._ended = 0.0

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send regions to the process that made it, which completes the image")

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels of the finest resolution."""
        return self._image.shapes[0]

    @property
    def dtype(self) -> np.dtype:
        """Data type of a voxel."""
        return self._image.dtype

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of a shard, or else of a chunk, of the finest resolution: the unit of writing."""
        return self._image.stored[0]

    @property
    def report(self) -> WriteReport:
        """What was written so far, in the last or the running ``with`` block."""
        seconds = (time.perf_counter() if self._at_work else self._ended) - self._began
        reasons = [chunks.why_host for chunks in self._chunks] if self._on_device else []
        return WriteReport(
            self._state.nbytes, sum(chunks.stored_nbytes for chunks in self._chunks), seconds, next(iter(reasons), "")
        )

    def regions(self, nbytes: int = STEP_BYTES) -> Iterator[Box]:
        """Cut the image into regions of whole chunks (or shards), of at most `nbytes` or one chunk (or shard).

        Where `nbytes` allows it, each coarser chunk too is made from one region.
        """
        return split(tuple(map(slice, (0,) * len(self.shape), self.shape)), self._pyramid.step(0, nbytes))

    def __enter__(self) -> OmeZarrWriter:
        if self._at_work:
            raise ValueError(f"this writer is already writing {self.path}: make another one")
        self._state = WriteState(self._pyramid)
        # An earlier block that failed must not count.
        self._cut, self._on_device = CutChunks(self._buffer_bytes, self._image.dtype.itemsize), False
        with ExitStack() as scope:
            temporary = new_folder(self._target, overwrite=self._overwrite, durable=self._durable)
            folder = scope.enter_context(temporary)
            pool = ThreadPoolExecutor(self._threads, "linumpy-write")
            scope.callback(pool.shutdown, cancel_futures=True)
            with named_errors(self._target):
                arrays = self._image.create(folder)
            self._chunks = [chunks_of(array, pool, self._threads) for array in arrays]
            self._levels = Levels(self._chunks, self._pyramid, self._downsampling, self._state, pool, self._threads)
            scope.callback(self._state.close)
            self._state.open()
            self._scope = scope.pop_all()
        self._at_work, self._began = True, time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is not None:
                self._scope.__exit__(*error)
                return
            with self._scope:
                self._finish()
        finally:
            self._at_work, self._ended = False, time.perf_counter()

    def __setitem__(self, region: Any, block: Array | ArrayLike) -> None:
        self.write(region, block)

    def write(self, region: Any, block: Array | ArrayLike) -> None:
        """Write a region, and return when its files are written.

        Parameters
        ----------
        region : slice, int, Ellipsis, or a tuple of these
            As for NumPy, with steps of 1, within the image.
        block : numpy.ndarray or cupy.ndarray
            Of the region's shape and the image's dtype, in either byte order. A device array is ordered on CuPy's
            current stream, which the function synchronizes.

        Raises
        ------
        IndexError
            The region is not within the image.
        ValueError
            The region has no voxels, cuts a chunk (see `buffer_bytes`), shares a chunk with one that another thread is
            writing, or has another shape than `block`.
        TypeError
            `block` has another dtype.
        OSError
            Such as a full disk. The image cannot be finished then.
        """
        box, voxels = checked_block(region, block, self.shape, self.dtype)
        whole = self._pyramid.whole(0, box)
        cut = [] if whole == box else [unit for unit in split(box, self.stored) if self._pyramid.whole(0, unit) is None]
        name = region_text(box)
        if cut and not self._cut.limit:
            raise ValueError(self._refusal(name, cut[0]))
        on_device = is_device_array(voxels)
        with self._state.writing(whole, box, name), voxels.device if on_device else nullcontext():
            self._on_device = self._on_device or on_device
            if cut:
                self._keep(cut, box, voxels, name)
            if whole is not None:
                self._write_whole(whole, voxels if whole == box else voxels[within(whole, box)])

    def _refusal(self, name: str, cut: Box) -> str:
        unit = region_text(self._pyramid.voxels(0, self._pyramid.units(0, cut)))
        kind = "chunk" if self._image.shards is None else "shard"
        return (
            f"region {name} cuts the {kind} {unit}: write whole {kind}s of {self.stored} (only the end of the "
            f"image may be ragged), or buffer incomplete {kind}s in memory with buffer_bytes="
        )

    def _write_whole(self, box: Box, block: Array) -> None:
        with self._state.lock:
            if self._cut.limit:
                for unit in split(box, self.stored):
                    self._cut.drop(tuple(b.start for b in unit))
        writes: deque[list[Finish]] = deque()
        for step in split(box, self._pyramid.step(0, STEP_BYTES)):
            part = block[within(step, box)]
            writes.append(self._levels.store(0, step, part if is_device_array(part) else np.asarray(part)))
            if len(writes) > _MOST_STEPS:
                finish_all(writes.popleft())
            self._report(step)
        for started in writes:
            finish_all(started)

    def _keep(self, cut: list[Box], box: Box, block: Array, name: str) -> None:
        """Buffer the chunks that a region cuts, and write those that it completes."""
        pyramid, complete = self._pyramid, []
        with self._state.lock:
            units = [pyramid.voxels(0, pyramid.units(0, part)) for part in cut]
            self._cut.reserve(units, name)
            for unit, part in zip(units, cut, strict=True):
                voxels = block[within(part, box)]
                voxels = voxels if is_device_array(voxels) else np.asarray(voxels)
                voxels_of_unit = self._cut.add(unit, part, voxels, self._held)
                if voxels_of_unit is not None:
                    self._state.begin(unit)
                    complete.append((unit, voxels_of_unit))
            if is_device_array(block):
                synchronize()  # another stream may write the next part of these chunks
        for unit, voxels in complete:
            try:
                finish_all(self._levels.store(0, unit, voxels))
            finally:
                self._state.end(unit)
        for part in cut:
            self._report(part)

    def _held(self, xp: ModuleType, unit: Box) -> tuple[Array, bool]:
        """Return a stored object before its first part: the stored voxels, or the fill value; and which of the two."""
        if self._state.is_stored(unit):
            return read_back(self._chunks[0].array, unit, on_device=xp is not np), True
        return xp.full(shape_of(unit), self._image.fill_value, self.dtype.newbyteorder("=")), False

    def _report(self, box: Box) -> None:
        if self._progress is not None:
            self._progress(math.prod(shape_of(box)) * self.dtype.itemsize)

    def _finish(self) -> None:
        """Write the buffered chunks, and the coarser chunks that several regions share, from the finer ones."""
        self._state.close()
        self._state.check(self.path)
        for unit, voxels in self._cut.drain():
            finish_all(self._levels.store(0, unit, voxels))
        missing, all_chunks = self._state.missing()
        if missing:
            kind = "chunks" if self._image.shards is None else "shards"
            log.warning(
                "%s: %d of %d %s were not written and hold the fill value %s",
                self.path, missing, all_chunks, kind, self._image.fill_value,
            )  # fmt: skip
        self._levels.make_shared(STEP_BYTES, on_device=self._on_device)


def write_omezarr(
    path: str | Path,
    array: Array | ArrayLike,
    spacing: Sequence[float],
    **options: Any,
) -> Path:
    """Write an array as an OME-Zarr image.

    Parameters
    ----------
    path, spacing
        As for :class:`OmeZarrWriter`, and so are the errors.
    array : numpy.ndarray or cupy.ndarray
        The finest resolution.
    **options
        The other keyword parameters of :class:`OmeZarrWriter`: `axes`, `chunks`, `levels`, `overwrite` and so on.

    Returns
    -------
    Path
        `path`.
    """
    voxels: Any = array if hasattr(array, "shape") else np.asarray(array)
    with OmeZarrWriter(path, voxels.shape, voxels.dtype, spacing, **options) as writer:
        writer[...] = voxels
    return Path(path)
