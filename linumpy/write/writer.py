"""Write an OME-Zarr image with its pyramid, region by region, complete or not at all.

In: regions as NumPy or CuPy arrays, and the voxel spacing in µm. Out: a folder, NGFF 0.5 (zarr v3) or 0.4 (zarr v2). It
is written in a work folder beside its path and renamed when complete and on the disk, so that a run that is killed
leaves nothing that looks finished. Raw chunks of a device array go out by GPUDirect Storage, or through pinned memory
where kvikio or the system does not offer it; encoded ones are copied to the host, once, and left to zarr. Errors:
``FileExistsError`` for a path that is taken, ``ValueError`` for sizes and regions that do not fit, ``TypeError`` for
what is not made of numbers, ``OSError`` for a disk that is full.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from linumpy.arrays import Array
from linumpy.device import is_device_array, synchronize
from linumpy.errors import not_pickled
from linumpy.io.carried import Carried
from linumpy.io.place import absolute, check_place, new_folder
from linumpy.plan.pyramid import Box, Pyramid, shape_of, split, within
from linumpy.plan.region import normalize_region
from linumpy.write.cut_chunks import CutChunks
from linumpy.write.new_image import plan_image
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.raw_chunks import Chunks, chunks_of, writing_threads
from linumpy.write.state import WriteState

log = logging.getLogger(__name__)

#: Voxels that are worked on at the same time take about so many bytes, unless one chunk or shard takes more.
STEP_BYTES = 256 * 2**20

Progress = Callable[[int], object]
"""Called with the number of bytes written since the last call."""


class OmeZarrWriter:
    """An OME-Zarr image that is written region by region; it appears at its path when the ``with`` block ends well.

    Parameters
    ----------
    path : str or Path
        The folder to make.
    shape : sequence of int
        Voxels of the finest resolution: two or three axes of space, before them any of time and channel.
    dtype : dtype
        Of all resolutions: bool, integers, or floats of 2 to 8 bytes.
    spacing : sequence of float
        Voxel spacing in µm, one for each axis of space. (Along t and c the metadata has a scale of 1 and no unit,
        unless `carried` says more.)
    axes : str, optional
        Names of the axes: two or three of ``"zyx"``, of space, in any order; before them ``"t"``, ``"c"`` or ``"tc"``,
        as ``"tczyx"``. By default the last of ``"zyx"``; with more than three axes they must be named.
    chunks, shards : sequence of int, optional
        One number for each axis. By default chunks of at most 8 MiB, of one time and one channel, and no shards. Shards
        need chunks that divide them, and NGFF 0.5.
    compressors
        As zarr takes it for the format: codecs of zarr v3 for NGFF 0.5, one of numcodecs for 0.4; by default chunks
        are raw.
    name : str, optional
        Of the image; by default that of `carried`, or else that of the folder.
    origin : sequence of float, optional
        Where the centre of the first voxel lies, in µm, along each axis of space.
    n_levels : int
        Resolutions. Each has half the voxels of the one before along each axis of space that has more than one, and
        all times and channels.
    downsampling : {"mean", "label", "nearest"}
        How a voxel comes from the 2 × 2 × 2 finer ones: their mean, of integers exact and rounded half to even; for
        labels the most frequent of them (of equally frequent ones the first); or the first of them. An odd last voxel
        stands alone. The metadata gives the centre of all eight, and the way as the ``type`` of the multiscales.
    ngff_version : {"0.5", "0.4"}, optional
        Of the metadata, and with it the zarr format, 3 or 2; by default that of `carried`, or else 0.5.
    fill_value : number
        Of voxels that are never written.
    attributes : mapping, optional
        Of the group, beside those of NGFF; what JSON can hold.
    carried : Carried, optional
        What the metadata of the image that this one is made from say beside its grid, from
        :func:`linumpy.io.carried.carried_from`: units, coordinates along t and c, omero, attributes, name and version.
    buffer_bytes : int
        How many bytes of chunks that regions have cut may wait in memory for the rest. By default none: then regions
        are whole chunks (or shards).
    overwrite : bool
        Whether to replace a Zarr folder that is there, in one step where the file system can exchange two names.
        Nothing else is ever replaced.
    durable : bool
        Whether the image is on the disk before it is renamed, so that not even a power cut leaves half of one.
        The end of the ``with`` block waits for the disk then.
    progress : callable, optional
        Called with the number of bytes of the finest resolution written since the last call, in the thread that
        writes.

    Raises
    ------
    FileExistsError
        The path is taken.
    FileNotFoundError
        The folder that it is in is not there.
    ValueError
        Something does not fit the shape.
    TypeError
        Voxels that are no numbers.
    OSError
        The disk has less free than the image takes.

    Notes
    -----
    **Regions.** One that begins and ends at the edges of chunks (of shards, where there are some), or at the end of
    the image, is written straight to its files. One that cuts a chunk is refused, unless `buffer_bytes` has memory in
    which the chunk is kept until the rest is written; what still lacks some at the end is written with the fill value
    there. A region may be written again; the last one counts.

    **Pyramid.** Coarser chunks that lie in a region are made from it, where it is, before :meth:`write` returns. Those
    that several regions share are made at the end, from what was written; regions of :meth:`regions` leave few.

    **What is left out** has the fill value; a log line (warning) says how many chunks that are.

    **Threads.** Several may write at the same time, if their regions share no chunk: a second one there is an error.
    With `buffer_bytes` they may cut the same chunks.

    **Memory.** Beyond the regions themselves: on a device up to about 1.25 GiB, in host memory less; more only where
    eight chunks (or shards) of a resolution together take more than 256 MiB; and `buffer_bytes`.

    **Device arrays.** Work goes on in CuPy's current stream, of the thread that calls :meth:`write`. Raw chunks leave
    the device by GPUDirect Storage where kvikio offers it, else through pinned host memory.

    Examples
    --------
    >>> with OmeZarrWriter("a.ome.zarr", (64, 512, 512), "uint16", (5, 10, 10), n_levels=3) as writer:  # doctest: +SKIP
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
        compressors: Any = None,
        name: str | None = None,
        origin: Sequence[float] | None = None,
        n_levels: int = 1,
        downsampling: str = "mean",
        ngff_version: str | None = None,
        fill_value: Any = 0,
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
            compressors=compressors,
            name=name if name is not None else (carried and carried.name) or self._target.name,
            origin=origin,
            levels=n_levels,
            downsampling=downsampling,
            ngff_version=ngff_version,
            fill_value=fill_value,
            attributes=attributes,
            carried=carried,
        )
        check_place(self.path, overwrite=overwrite)
        image.check_fits(self.path)
        self._downsampling, self._progress = downsampling, progress
        self._overwrite, self._durable = overwrite, durable
        self._pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
        if not isinstance(buffer_bytes, (int, float, np.integer)) or not 0 <= buffer_bytes < math.inf:
            raise ValueError(f"buffer_bytes={buffer_bytes!r}: a number of bytes is needed, 0 for none")
        if progress is not None and not callable(progress):
            raise TypeError(f"progress={progress!r}: a function that takes a number of bytes is needed")
        self._buffer_bytes = int(buffer_bytes)
        self._cut = CutChunks(self._buffer_bytes, image.dtype.itemsize)
        self._state = WriteState(self._pyramid)
        self._scope = ExitStack()
        self._chunks: list[Chunks] = []
        self._threads = writing_threads()
        self._on_device = self._at_work = False

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send regions to the process that has it, which alone makes the image complete")

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels of the finest resolution."""
        return self._image.shapes[0]

    @property
    def dtype(self) -> np.dtype:
        """Of the voxels."""
        return self._image.dtype

    @property
    def stored(self) -> tuple[int, ...]:
        """What is whole in storage at the finest resolution: shards, or else chunks."""
        return self._image.stored[0]

    def regions(self, nbytes: int = STEP_BYTES) -> Iterator[Box]:
        """Cut the image into regions that are whole in storage, of at most so many bytes or one chunk or shard.

        Where the bytes allow it, coarser chunks too come from one region each.
        """
        return split(tuple(map(slice, (0,) * len(self.shape), self.shape)), self._pyramid.step(0, nbytes))

    def __enter__(self) -> OmeZarrWriter:
        if self._at_work:
            raise ValueError(f"{self.path} is being written by this writer already: make another one")
        self._state = WriteState(self._pyramid)
        # Nothing of an earlier block that failed counts.
        self._cut, self._on_device = CutChunks(self._buffer_bytes, self._image.dtype.itemsize), False
        with ExitStack() as scope:
            temporary = new_folder(self._target, overwrite=self._overwrite, durable=self._durable)
            folder = scope.enter_context(temporary)
            self._pool = ThreadPoolExecutor(self._threads, "linumpy-write")
            scope.callback(self._pool.shutdown, cancel_futures=True)
            self._chunks = [chunks_of(one, self._pool, self._threads) for one in self._image.create(folder)]
            scope.callback(self._state.close)
            self._state.open()
            self._scope = scope.pop_all()
        self._at_work = True
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is not None:
                self._scope.__exit__(*error)
                return
            with self._scope:
                self._finish()
        finally:
            self._at_work = False

    def __setitem__(self, region: Any, block: Array | ArrayLike) -> None:
        self.write(region, block)

    def write(self, region: Any, block: Array | ArrayLike) -> None:
        """Write a region, and return when it is on the file system.

        Parameters
        ----------
        region : slice, int, Ellipsis, or a tuple of these
            As NumPy takes it, with steps of 1, within the image.
        block : numpy.ndarray or cupy.ndarray
            Of the region's shape and the image's dtype, in either byte order. A device array is ordered on CuPy's
            current stream, which is waited for.

        Raises
        ------
        IndexError
            The region is not within the image.
        ValueError
            It has no voxels, cuts a chunk (see `buffer_bytes`), is being written by another thread, or has another
            shape than `block`.
        TypeError
            `block` has another dtype.
        OSError
            Such as a full disk. The image cannot be finished then.
        """
        box, voxels = self._checked(region, block)
        whole = self._pyramid.whole(0, box)
        cut = [] if whole == box else [one for one in split(box, self.stored) if self._pyramid.whole(0, one) is None]
        name = _text(box)
        if cut and not self._cut.limit:
            raise ValueError(self._refusal(name, cut[0]))
        here = is_device_array(voxels)
        with self._state.writing(whole, box, name), voxels.device if here else nullcontext():
            self._on_device = self._on_device or here
            if cut:
                self._keep(cut, box, voxels, name)
            if whole is not None:
                self._write_whole(whole, voxels if whole == box else voxels[within(whole, box)])

    def _checked(self, region: Any, block: Any) -> tuple[Box, Any]:
        wanted = normalize_region(region, self.shape)
        box = tuple(slice(a, b) for a, b in zip(wanted.start, wanted.stop, strict=True))
        if not wanted.size:
            raise ValueError(f"region {wanted} of an image of shape {self.shape} has no voxels to write")
        if not hasattr(block, "shape") or not hasattr(block, "dtype"):
            block = np.asarray(block)
        if np.ma.is_masked(block):
            raise TypeError("voxels of the block are masked, and files hold no masks: fill it yourself")
        if tuple(block.shape) != wanted.shape:
            raise ValueError(f"region {wanted} has shape {wanted.shape}, but the block has {tuple(block.shape)}")
        if np.dtype(block.dtype).newbyteorder("=") != self.dtype.newbyteorder("="):
            raise TypeError(f"the block is of {block.dtype}, the image of {self.dtype}: round and cast it yourself")
        if not all(wanted.kept):
            block = (block if is_device_array(block) else np.asarray(block)).reshape(wanted.box_shape)
        return box, block

    def _refusal(self, name: str, cut: Box) -> str:
        unit = self._pyramid.voxels(0, self._pyramid.units(0, cut))
        kind = "chunk" if self._image.shards is None else "shard"
        return (
            f"region {name} cuts the {kind} {_text(unit)}: write whole {kind}s of {self.stored} (only the end of the "
            f"image may be ragged), or let cut ones wait in memory for the rest with buffer_bytes="
        )

    def _write_whole(self, box: Box, block: Any) -> None:
        with self._state.lock:
            if self._cut.limit:
                for one in split(box, self.stored):
                    self._cut.drop(tuple(b.start for b in one))
        for step in split(box, self._pyramid.step(0, STEP_BYTES)):
            part = block[within(step, box)]
            self._store(0, step, part if is_device_array(part) else np.asarray(part))
            self._report(step)

    def _keep(self, cut: list[Box], box: Box, block: Any, name: str) -> None:
        """Let chunks wait that a region cuts, and write those that it completes."""
        pyramid, complete = self._pyramid, []
        with self._state.lock:
            units = [pyramid.voxels(0, pyramid.units(0, one)) for one in cut]
            self._cut.reserve(units, name)
            for unit, part in zip(units, cut, strict=True):
                voxels = block[within(part, box)]
                voxels = voxels if is_device_array(voxels) else np.asarray(voxels)
                every = self._cut.add(unit, part, voxels, self._held)
                if every is not None:
                    self._state.begin(unit)
                    complete.append((unit, every))
            if is_device_array(block):
                synchronize()  # the next part of these chunks may come on another stream
        for unit, voxels in complete:
            try:
                self._store(0, unit, voxels)
            finally:
                self._state.end(unit)
        for part in cut:
            self._report(part)

    def _held(self, xp: Any, unit: Box) -> tuple[Any, bool]:
        """What a stored object holds before its first part comes: what was written, or the fill value."""
        if self._state.is_stored(unit):
            return self._chunks[0].read(unit, on_device=xp is not np), True
        return xp.full(shape_of(unit), self._image.fill_value, self.dtype.newbyteorder("=")), False

    def _report(self, box: Box) -> None:
        if self._progress is not None:
            self._progress(math.prod(shape_of(box)) * self.dtype.itemsize)

    def _store(self, level: int, box: Box, block: Any) -> None:
        """Write what is whole in storage, and what comes from it alone in coarser resolutions."""
        self._chunks[level].write(box, block)
        self._state.stored(level, box)
        if level + 1 < len(self._chunks) and (coarser := self._pyramid.coarser(level, box)) is not None:
            finer = within(self._pyramid.finer(level + 1, coarser), box)
            self._store(level + 1, coarser, self._halved(level + 1, block[finer]))

    def _halved(self, level: int, block: Any) -> Any:
        """Make a block of a resolution from the one before where it is; on the host in several threads."""
        factors = self._pyramid.factors(level)
        if is_device_array(block):
            return halve(block, self._downsampling, factors)
        return halve_by_threads(block, self._downsampling, self._pool, self._threads, factors)

    def _finish(self) -> None:
        """Write what waits, and the coarser chunks that no region held alone, from the finer ones."""
        self._state.close()
        self._state.check(self.path)
        for unit, voxels in self._cut.drain():
            self._store(0, unit, voxels)
        missing, all_chunks = self._state.missing()
        if missing:
            kind = "chunks" if self._image.shards is None else "shards"
            log.warning(
                "%s: %d of %d %s were not written and hold the fill value %s",
                self.path, missing, all_chunks, kind, self._image.fill_value,
            )  # fmt: skip
        for level in range(1, len(self._chunks)):
            for box in self._state.to_make(level, STEP_BYTES):
                finer = self._chunks[level - 1].read(self._pyramid.finer(level, box), on_device=self._on_device)
                self._store(level, box, self._halved(level, finer))


def write_omezarr(
    path: str | Path,
    array: Array | ArrayLike,
    spacing: Sequence[float],
    *,
    axes: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compressors: Any = None,
    name: str | None = None,
    origin: Sequence[float] | None = None,
    levels: int = 1,
    downsampling: str = "mean",
    ngff_version: str | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Write an array as an OME-Zarr image.

    Parameters
    ----------
    array : numpy.ndarray or cupy.ndarray
        The finest resolution.
    levels : int
        Resolutions, as `n_levels` of :class:`OmeZarrWriter`.
    path, spacing, axes, chunks, shards, compressors, name, origin, downsampling, ngff_version, overwrite, durable,
    progress
        As for :class:`OmeZarrWriter`, and so are the errors.

    Returns
    -------
    Path
        `path`.
    """
    voxels: Any = array if hasattr(array, "shape") else np.asarray(array)
    options: dict[str, Any] = {"chunks": chunks, "shards": shards, "compressors": compressors, "overwrite": overwrite}
    options |= {"axes": axes, "name": name, "origin": origin, "n_levels": levels, "downsampling": downsampling}
    options |= {"ngff_version": ngff_version, "durable": durable, "progress": progress}
    with OmeZarrWriter(path, voxels.shape, voxels.dtype, spacing, **options) as writer:
        writer[...] = voxels
    return Path(path)


def _text(box: Box) -> str:
    return "[" + ", ".join(f"{b.start}:{b.stop}" for b in box) + "]"
