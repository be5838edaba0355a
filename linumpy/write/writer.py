"""Write an OME-Zarr image with its pyramid, region by region, complete or not at all.

In: regions as NumPy or CuPy arrays, and the voxel spacing in µm. Out: a folder, NGFF 0.4 (zarr v2), 0.5 or 0.6 (zarr
v3), or an ``.ozx`` file. The image is written in a work folder beside its path, and the folder is renamed when the
image is complete and on the disk: a killed run leaves nothing that looks finished. Chunks of device arrays are encoded
on the device if it supports the codec, and only stored bytes are copied to the host.
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
from linumpy.io.output.checks import as_given, check_target, checked_version, target_of
from linumpy.io.output.folders import new_folder
from linumpy.io.output.syscalls import named_errors
from linumpy.plan.codecs import BY_CODEC
from linumpy.plan.pyramid import Box, Pyramid, shape_of, split, within
from linumpy.plan.region import RegionLike
from linumpy.write.chunks import Chunks, chunks_of, read_back
from linumpy.write.levels import Levels, WriteReport, WriteState
from linumpy.write.new_image import plan_image
from linumpy.write.regions import CutChunks, checked_block, region_text
from linumpy.write.tasks import Finish, finish_all, writing_threads

log = logging.getLogger(__name__)

#: Bytes of the voxels that are processed at the same time, unless one chunk or shard is larger.
STEP_BYTES = 256 * 2**20
#: Steps of a region whose files may be unfinished when the next step begins.
_MAX_UNFINISHED = 4

Progress = Callable[[int], object]
"""Called with the number of bytes written since the last call."""


class OmeZarrWriter:
    """An OME-Zarr image, written region by region; it appears at its path when the ``with`` block ends without error.

    Parameters
    ----------
    path : str or Path
        The folder to make; or ``*.ozx``, a ZIP file (RFC-9) of NGFF 0.5 or 0.6, into which the finished folder is
        packed, so that the disk must hold both; or a URL, ``s3://``, ``gs://`` or ``az://`` (see docs/remote.md).
    shape : sequence of int
        Voxels of the finest resolution: two or three axes of space, optionally preceded by time, channel, or both.
    dtype : dtype
        Data type of a voxel: bool, integers, or floats of 2 to 8 bytes.
    spacing : sequence of float
        Voxel spacing in µm along each axis of space. (Along t and c the metadata have a scale of 1 and no unit, unless
        `carried` has others.)
    axes : str, optional
        Names of the axes, such as ``"tczyx"``: ``"t"``, ``"c"`` or ``"tc"`` if there are such axes, then two or three
        of ``"zyx"`` in any order. By default the last of ``"zyx"``; more than three axes must be named.
    chunks, shards : sequence of int, optional
        One number for each axis. By default chunks of at most 8 MiB, of one time and one channel, and no shards. Shards
        need chunks that divide them, and zarr v3.
    codec : str, optional
        Name of a codec: ``"zstd"``, ``"lz4"``, ``"gzip"``, ``"none"``, or ``"blosc:lz4"`` and ``"blosc:zstd"`` with
        ``":byte"`` (the default), ``":bit"`` or ``":none"`` for the shuffle; append ``":small"`` for fewer bytes and
        more time, ``"+crc32c"`` for a checksum (zarr v3). Device arrays are compressed on the device, except by gzip.
        By default the codec of `carried`, or else ``"zstd"``.
    compressors
        In place of `codec`, as for zarr: codecs of zarr v3 for NGFF 0.5 and 0.6, one of numcodecs for 0.4; None for raw
        chunks. zarr-python applies codecs and settings that have no name for `codec`.
    name : str, optional
        Name of the image; by default the name in `carried`, or else the folder's.
    origin : sequence of float, optional
        Position of the centre of the first voxel in µm, along each axis of space.
    levels : int
        Number of resolutions. Each resolution has half the voxels of the last along each axis of space with more than
        one voxel, and all times and channels.
    downsampling : {"mean", "label", "nearest"}, optional
        Method that makes a voxel from 2 × 2 × 2 finer ones: their mean, exact for integers and rounded half to even;
        the most frequent value, for labels (the first of equally frequent values); or the first voxel. The last voxel
        of an odd length counts twice. The metadata have the centre of all eight voxels as the position of the coarser
        voxel, and this method as the ``type`` of the multiscales. By default
        ``"label"`` if `carried` is the metadata of a label image, and else ``"mean"``.
    ngff_version : {"0.6", "0.5", "0.4"}, optional
        Version of the metadata (0.4 in zarr v2, others in v3). By default the version in `carried`, or else 0.5.
    fill_value : number
        Value of voxels that are never written.
    attributes : mapping, optional
        Attributes of the group beside those of NGFF; JSON must be able to hold them.
    carried : Carried, optional
        Metadata of the source image, by :func:`linumpy.io.carried.carried_from`: units, coordinates along t and c,
        omero, attributes, name and version.
    buffer_bytes : int
        Memory for incomplete chunks, which regions have written only in part. By default 0: regions must consist of
        whole chunks (or shards).
    overwrite : bool
        Whether to replace an existing Zarr folder, atomically where the file system can exchange two names; at a URL
        it is removed at the beginning. Nothing else is ever replaced.
    durable : bool
        Whether to flush the image to the disk before it is renamed, so that not even a power cut leaves an incomplete
        image. The end of the ``with`` block then waits for the disk.
    progress : callable, optional
        Called with the number of bytes of the finest resolution written since the last call, in the thread that
        writes.
    storage_options : mapping, optional
        Options of obstore's ``from_url``, if `path` is a URL.

    Raises
    ------
    FileExistsError
        The path exists.
    FileNotFoundError
        The parent folder does not exist.
    ValueError
        A parameter does not fit the shape, the dtype or the version.
    TypeError
        A parameter of another type, or a dtype of which no image can be written.
    OSError
        The disk has less free space than the image takes.

    Notes
    -----
    **Regions.** A region that begins and ends at the edges of chunks (or shards), or at the end of the image, is
    written directly to its files. A region that cuts a chunk is an error, unless `buffer_bytes` allows memory that
    holds the chunk until other regions complete it; a chunk that is still incomplete at the end is written with the
    fill value in its missing voxels. A region may be written again; the last write counts.

    **Pyramid.** Coarser chunks inside a region are made from it, in its memory, before :meth:`write` returns. Coarser
    chunks that several regions share are made at the end, from written chunks; regions of :meth:`regions` share few.

    **Voxels that are never written** have the fill value; a warning in the log gives the number of such chunks.

    **Threads.** Several threads may write at the same time if their regions share no chunk; otherwise the second write
    raises ``ValueError``. With `buffer_bytes` the regions may cut the same chunks.

    **Memory.** Beyond the regions themselves: on a device up to about 2.5 GiB (encoding takes at most an eighth of the
    free memory); in host memory less; more only if eight chunks (or shards) of a resolution take more than 256 MiB
    together; and `buffer_bytes`.

    **Device arrays.** Kernels run on CuPy's current stream of the thread that calls :meth:`write`. Raw chunks are
    written by GPUDirect Storage where kvikio offers it, and through pinned host memory elsewhere.

    Examples
    --------
    >>> with OmeZarrWriter("a.ome.zarr", (64, 512, 512), "uint16", (5, 10, 10), levels=3) as writer:  # doctest: +SKIP
    ...     for region in writer.regions():
    ...         writer[region] = make(region)
    """

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
        downsampling: str | None = None,
        ngff_version: str | None = None,
        fill_value: complex | np.generic = 0,
        attributes: Mapping[str, object] | None = None,
        carried: Carried | None = None,
        buffer_bytes: int = 0,
        overwrite: bool = False,
        durable: bool = True,
        progress: Progress | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = target_of(path, storage_options)
        self.path = as_given(path, self._target)
        self._image = image = plan_image(
            shape, dtype, spacing, axes=axes, chunks=chunks, shards=shards, codec=codec, compressors=compressors,
            name=name if name is not None else (carried and carried.name) or self._target.name,
            origin=origin, levels=levels, downsampling=downsampling, fill_value=fill_value, attributes=attributes,
            ngff_version=checked_version(self._target, ngff_version), carried=carried,
        )  # fmt: skip
        check_target(self._target, overwrite=overwrite)
        image.check_fits(self._target)
        self._progress = progress
        self._overwrite, self._durable = overwrite, durable
        self._pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
        self._cut = CutChunks(buffer_bytes, image.dtype.itemsize)
        if progress is not None and not callable(progress):
            raise TypeError(f"progress={progress!r}: pass a function that takes a number of bytes")
        self._state = WriteState(self._pyramid)
        self._scope = ExitStack()
        self._chunks: list[Chunks] = []
        self._threads = writing_threads(self._target)
        self._on_device = self._is_open = False
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
        """Bytes, time and encoder of the running ``with`` block, or of the last block."""
        seconds = (time.perf_counter() if self._is_open else self._ended) - self._began
        why_host = self._chunks[0].why_host if self._on_device and self._chunks else ""
        stored_nbytes = sum(chunks.stored_nbytes for chunks in self._chunks)
        return WriteReport(self._state.nbytes, stored_nbytes, seconds, why_host)

    def regions(self, nbytes: int = STEP_BYTES) -> Iterator[Box]:
        """Cut the image into regions of whole chunks (or shards), each of at most `nbytes` or one chunk (or shard).

        If `nbytes` allows it, each coarser chunk can be made from a single region.
        """
        return split(tuple(map(slice, (0,) * len(self.shape), self.shape)), self._pyramid.step(0, nbytes))

    def __enter__(self) -> OmeZarrWriter:
        if self._is_open:
            raise ValueError(f"this writer is already writing {self._target}: make another one")
        # An earlier block that failed must not count.
        self._state, self._on_device = WriteState(self._pyramid), False
        self._cut = CutChunks(self._cut.limit, self._image.dtype.itemsize)
        with ExitStack() as scope:
            folder = scope.enter_context(new_folder(self._target, overwrite=self._overwrite, durable=self._durable))
            pool = ThreadPoolExecutor(self._threads, "linumpy-write")
            scope.callback(pool.shutdown, cancel_futures=True)
            with named_errors(str(self._target)):
                arrays = self._image.create(folder)
            self._chunks = [chunks_of(array, pool, self._threads) for array in arrays]
            self._levels = Levels(
                self._chunks, self._pyramid, self._image.downsampling, self._state, pool, self._threads
            )
            scope.callback(self._state.close)
            self._state.open()
            self._scope = scope.pop_all()
        self._is_open, self._began = True, time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is not None:
                self._scope.__exit__(*error)
                return
            with self._scope:
                self._finish()
        finally:
            self._is_open, self._ended = False, time.perf_counter()

    def __setitem__(self, region: RegionLike, block: Array | ArrayLike) -> None:
        self.write(region, block)

    def write(self, region: RegionLike, block: Array | ArrayLike) -> None:
        """Write a region, and return when its files are written.

        Parameters
        ----------
        region : slice, int, Ellipsis, or a tuple of these
            As for NumPy, with steps of 1, within the image.
        block : numpy.ndarray or cupy.ndarray
            Of the region's shape and the image's dtype, in either byte order. A device array is ordered on CuPy's
            current stream; it may change when this returns.

        Raises
        ------
        IndexError
            The region is not within the image.
        ValueError
            The region has no voxels, cuts a chunk (see `buffer_bytes`), shares a chunk with a region that another
            thread is writing, or has another shape than `block`.
        TypeError
            `block` has another dtype.
        OSError
            Such as a full disk. A ``with`` block that ignores the error ends with ``ValueError``, without an image.
        """
        box, voxels = checked_block(region, block, self.shape, self.dtype)
        whole = self._pyramid.whole(0, box)
        parts = split(box, self.stored)  # the region's part of each chunk (or shard)
        cut_parts = [] if whole == box else [part for part in parts if self._pyramid.whole(0, part) is None]
        name = region_text(box)
        if cut_parts and not self._cut.limit:
            unit, kind = self._pyramid.voxels(0, self._pyramid.units(0, cut_parts[0])), self._image.object_name
            raise ValueError(
                f"region {name} cuts the {kind} {region_text(unit)}: write whole {kind}s of {self.stored} (only the "
                f"end of the image may be ragged), or buffer incomplete {kind}s in memory with buffer_bytes="
            )
        device = voxels.device if is_device_array(voxels) else nullcontext()
        with self._state.writing(whole, box, name), device:
            self._on_device = self._on_device or is_device_array(voxels)
            if cut_parts:
                self._buffer(cut_parts, box, voxels, name)
            if whole is not None:
                self._write_whole(whole, voxels if whole == box else voxels[within(whole, box)])

    def _write_whole(self, box: Box, block: Array) -> None:
        with self._state.lock:
            if self._cut.limit:
                for unit in split(box, self.stored):
                    self._cut.remove(unit)
        writes: deque[list[Finish]] = deque()
        for step in split(box, self._pyramid.step(0, STEP_BYTES)):
            part = block[within(step, box)]
            writes.append(self._levels.store(0, step, part if is_device_array(part) else np.asarray(part)))
            if len(writes) > _MAX_UNFINISHED:
                finish_all(writes.popleft())
            self._report_progress(step)
        for started in writes:
            finish_all(started)

    def _buffer(self, cut_parts: list[Box], box: Box, block: Array, name: str) -> None:
        """Buffer the chunks that a region cuts, and write the chunks that the region completes."""
        pyramid, complete = self._pyramid, []
        with self._state.lock:
            units = [pyramid.voxels(0, pyramid.units(0, part)) for part in cut_parts]
            self._cut.check_fits(units, name)
            for unit, part in zip(units, cut_parts, strict=True):
                voxels = block[within(part, box)]
                voxels = voxels if is_device_array(voxels) else np.asarray(voxels)
                voxels_of_unit = self._cut.add(unit, part, voxels, self._initial_voxels)
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
        for part in cut_parts:
            self._report_progress(part)

    def _initial_voxels(self, xp: ModuleType, unit: Box) -> tuple[Array, bool]:
        """Return the voxels of a chunk before its first part, stored ones or the fill value, and whether stored."""
        if self._state.is_stored(unit):
            return read_back(self._chunks[0].array, unit, on_device=xp is not np), True
        return xp.full(shape_of(unit), self._image.fill_value, self.dtype.newbyteorder("=")), False

    def _report_progress(self, box: Box) -> None:
        if self._progress is not None:
            self._progress(math.prod(shape_of(box)) * self.dtype.itemsize)

    def _finish(self) -> None:
        """Write the buffered chunks, and the coarser chunks that several regions share."""
        self._state.close()
        self._state.check(self._target)
        for unit, voxels in self._cut.drain():
            finish_all(self._levels.store(0, unit, voxels))
        missing, all_chunks = self._state.missing()
        if missing:
            log.warning(
                "%s: %d of %d %ss were not written and hold the fill value %s",
                self._target, missing, all_chunks, self._image.object_name, self._image.fill_value,
            )  # fmt: skip
        self._levels.make_shared(STEP_BYTES, on_device=self._on_device)


def write_omezarr(path: str | Path, array: Array | ArrayLike, spacing: Sequence[float], **options: Any) -> str | Path:
    """Write an array as an OME-Zarr image.

    Parameters
    ----------
    path, spacing
        As for :class:`OmeZarrWriter`, which also documents the errors.
    array : numpy.ndarray or cupy.ndarray
        The finest resolution.
    **options
        The other keyword parameters of :class:`OmeZarrWriter`: `axes`, `chunks`, `levels`, `overwrite` and so on.

    Returns
    -------
    Path, or str for a URL
        `path`.
    """
    voxels: Any = array if hasattr(array, "shape") else np.asarray(array)
    with OmeZarrWriter(path, voxels.shape, voxels.dtype, spacing, **options) as writer:
        writer[...] = voxels
    return writer.path
