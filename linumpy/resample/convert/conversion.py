"""Plan a conversion, and copy its blocks: read a box, write it as whole chunks (or shards).

Errors: :class:`~linumpy.errors.SourceError` and :class:`~linumpy.errors.MetadataError` for sources that cannot be
converted, ``ValueError`` for parameters that do not fit the source; :class:`~linumpy.errors.DeviceMemoryError` if a
block of one chunk (or shard) does not fit into the memory of the device. In host memory it may exceed the limit.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import zarr

from linumpy.arrays import Array, DeviceName
from linumpy.device import kvikio_mode, require_cuda
from linumpy.errors import DeviceMemoryError, MetadataError, SourceError
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.kvikio_zarr import OwnReader
from linumpy.gpu.read.layouts import LAYOUTS
from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.carried import Carried
from linumpy.io.ngff.axes import Spacing
from linumpy.io.open import open_source
from linumpy.io.output.objects import Target
from linumpy.io.source import Source, describe_source, name_on_disk, open_node, source_for_others
from linumpy.io.stores.tiff import TiffStack, open_stack, tiff_files
from linumpy.io.stores.zips import verify_region
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.pyramid import Box, grown, split
from linumpy.plan.read import plan_read
from linumpy.resample.blocks.on_device import read_to_device
from linumpy.resample.blocks.pipeline import level_chunks
from linumpy.resample.blocks.plans import memory_budget, scratch_within
from linumpy.resample.convert.hierarchy import ArrayCopy, Storage, plan_array, plan_hierarchy
from linumpy.resample.convert.tiff_metadata import TiffMetadata, metadata_of
from linumpy.resample.identity import digest_of, identify_data, unknown_data
from linumpy.resample.resumable import Request
from linumpy.resample.workers import Needs, needs_of
from linumpy.write.chunks import NO_BATCH, Batch, plan_batch
from linumpy.write.new_image import ZARR_FORMATS, NewImage, plan_image
from linumpy.write.regions import region_text
from linumpy.write.tasks import Finish, writing_threads
from linumpy.write.writer import STEP_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Parameters:
    """Parameters of :func:`linumpy.convert_zarr`; `name` is the target's file name."""

    name: str
    storage: Storage
    ngff_version: str | None
    spacing: Spacing | None
    levels: int
    downsampling: str | None
    missing: str = "error"


@dataclass(frozen=True)
class Conversion:
    """The plan of a conversion.

    - `create`: takes a path, and makes the empty target there.
    - `image`: the new image of an array or TIFF stack, whose coarser resolutions are made at the end; None for a group.
    - `stack`: the source, if it is a TIFF stack.
    - `settings`: further values on which the target depends.
    - `dropped`: descriptions of metadata that are not copied.
    - `kept`: the arrays that are copied as they are.
    """

    name: str
    arrays: tuple[ArrayCopy, ...]
    create: Callable[[Target], object]
    image: NewImage | None = None
    stack: TiffStack | None = None
    settings: Mapping[str, str | None] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    kept: tuple[zarr.Array, ...] = ()

    def request(self, data: str | None) -> Request:
        """Return everything on which the bytes of the target depend; `data` is the result of :meth:`data`."""
        arrays = [
            [copy.path, copy.source.shape, copy.dtype.str, copy.chunks, copy.shards, str(copy.encoding)]
            for copy in self.arrays
        ]
        settings = {
            "source": name_on_disk(self.arrays[0].source) if self.stack is None else self.stack.files[0],
            "arrays": digest_of(arrays),
            "metadata": digest_of([copy.source.metadata.to_dict() for copy in self.arrays]),
            **self.settings,
        }
        first, *others = (copy.counts for copy in self.arrays)
        named = tuple((key, str(value)) for key, value in settings.items())
        return Request("convert_zarr", first, named, (("source data", data or unknown_data()),), tuple(others))

    def data(self) -> str | None:
        """Return a digest that changes with the data of the source; None if its store does not identify them."""
        if self.stack is not None:
            status_of = [(name, os.stat(name)) for name in self.stack.files]
            return digest_of([(name, status.st_size, status.st_mtime_ns) for name, status in status_of])
        digests = [identify_data(array) for array in (*(copy.source for copy in self.arrays), *self.kept)]
        return None if None in digests else digest_of(digests)

    def needs(self, target: Target, device: DeviceName) -> Needs:
        """Return the requirements of workers that copy the arrays; raise ``ValueError`` for a TIFF stack."""
        if self.stack is not None:
            raise ValueError(f"distributed=: {self.name} is a TIFF stack, which this process alone converts")
        return needs_of(source_for_others(self.arrays[0].source), target, device)

    def log_dropped(self, target: Target) -> None:
        """Log, in one warning, the metadata that are not copied."""
        Carried(dropped=self.dropped).log_dropped(self.name, target)


def plan_conversion(source: Source, parameters: Parameters, scope: ExitStack) -> Conversion:
    """Plan the conversion of a source; `scope` closes the files of a TIFF stack."""
    files = tiff_files(source) if isinstance(source, (str, Path)) and "://" not in str(source) else []
    if files:
        stack = scope.enter_context(open_stack(files, parameters.missing))
        return _plan_image(str(source), stack.array, stack.axes, parameters, stack)
    if parameters.missing != "error":
        raise ValueError(f"missing={parameters.missing!r} is for TIFF files, and {source} is none")
    node = open_node(source)
    name = describe_source(node)
    if isinstance(node, zarr.Array):
        if node.ndim not in (2, 3):
            raise SourceError(f"{name} has shape {node.shape}: pass an array of two or three axes")
        axes = "zyx"[-node.ndim :]
        dimensions = getattr(node.metadata, "dimension_names", None) or tuple(axes)
        if tuple(axis or "" for axis in dimensions) != tuple(axes):
            raise MetadataError(
                f"{name} has the dimensions {', '.join(map(str, dimensions))}, and an image of an array has "
                f"{', '.join(axes)}: transpose or rename them first"
            )
        return _plan_image(name, node, axes, parameters, None)
    for option, default in (("spacing", None), ("levels", 1), ("downsampling", None)):
        if (given := getattr(parameters, option)) != default:
            raise ValueError(f"{option}={given!r}: {name} is a group, which keeps its own; for arrays and TIFF stacks")
    copy = plan_hierarchy(node, parameters.storage, parameters.ngff_version)
    if parameters.name.endswith(".ozx") and "ome" not in copy.groups.get("", {}):
        raise SourceError(f"{name} is no OME-Zarr image, which .ozx files hold: name a folder")
    settings = {"version": parameters.ngff_version, "groups": digest_of(list(copy.groups.items()))}
    kept = tuple(copy.kept.values())
    return Conversion(name, copy.arrays, copy.create, settings=settings, dropped=copy.dropped, kept=kept)


def _plan_image(
    source: str, array: zarr.Array, axes: str, parameters: Parameters, stack: TiffStack | None
) -> Conversion:
    """Plan the image that is made from an array or a TIFF stack."""
    storage, name = parameters.storage, parameters.name
    read = TiffMetadata() if stack is None else metadata_of(stack)
    is_plane = stack is not None and "z" in axes and array.shape[stack.order[axes.index("z")]] == 1
    steps = _spacing(source, axes.lstrip("tc"), parameters.spacing, read.spacing, is_plane=is_plane)
    if read.is_of_tags and parameters.spacing is None:
        log.warning("%s: the spacing %s µm is that of the resolution tags; give it if it is another", source, steps)
    if stack is not None and storage.codec is None:
        storage = replace(storage, codec="zstd")
    order, version = None if stack is None else stack.order, parameters.ngff_version or "0.5"
    if stack is not None and storage.chunks is None and storage.crop is None:
        shape = tuple(array.shape[axis] for axis in stack.order)
        storage = replace(storage, chunks=plan_image(shape, array.dtype, steps, name=name, axes=axes).chunks)
    copy = plan_array("0", array, storage, ZARR_FORMATS[version], order=order, space=len(steps))
    carried = Carried(leading=read.leading, omero=read.omero(copy.dtype))
    image = plan_image(
        copy.shape, copy.dtype, steps, name=name, axes=axes, chunks=copy.chunks, shards=copy.shards,
        codec=str(copy.encoding), levels=parameters.levels, ngff_version=version, downsampling=parameters.downsampling,
        fill_value=0 if array.fill_value is None else array.fill_value,
        attributes={} if stack is not None else dict(array.attrs), carried=carried,
    )  # fmt: skip
    return Conversion(source, (copy,), image.create, image, stack, {"image": digest_of(image.metadata)})


def _spacing(
    name: str, space: str, given: Spacing | None, known: Mapping[str, float], *, is_plane: bool
) -> list[float]:
    """Return the spacing along the axes of space: the caller's, and else the file's.

    `is_plane` says that there is one plane along z, whose spacing is then known.
    """
    if given is not None and not isinstance(given, Mapping):
        numbers = list(given)
        # A plane may get a spacing along z, y and x, too, and a volume of one plane a spacing along y and x.
        if len(numbers) not in (len(space), 3) and not (len(numbers) == 2 and is_plane):
            raise ValueError(f"spacing={given!r}: {name} has the axes {', '.join(space)}, each of which takes a number")
        given = dict(zip(reversed(space), reversed(numbers), strict=False))
    steps = {**known, **(given or {})}
    if absent := [axis for axis in space if axis not in steps]:
        raise MetadataError(
            f"{name} has no voxel spacing along {', '.join(absent)} that linumpy reads: pass spacing= in µm"
        )
    return [steps[axis] for axis in space]


#: Maximum number of blocks in memory: one that is read, two that wait, two that are being written.
_BLOCKS = 5


@dataclass(frozen=True)
class CopyJob:
    """The parameters of all blocks of a copy.

    - `source`, `target`: the array to copy, which other processes open again; place of the array to write.
    - `dtype`: data type of the copy, in this machine's byte order.
    - `shape`, `block`: voxels of the array, and of a block.
    - `stack`: the source, if it is a TIFF stack.
    - `scratch_bytes`, `batch`: device memory that a read may use beyond its result, and batches that are encoded there.
    """

    source: Source
    target: Target
    dtype: np.dtype
    shape: tuple[int, ...]
    block: tuple[int, ...]
    device: DeviceName
    stack: TiffStack | None = None
    scratch_bytes: int | None = None
    batch: Batch | None = None

    @property
    def boxes(self) -> list[Box]:
        """All blocks."""
        return list(split(tuple(slice(0, n) for n in self.shape), self.block))

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.block) * self.dtype.itemsize


@contextmanager
def open_copier(job: CopyJob) -> Iterator[tuple[Callable[[Box], Array], Callable[[Box, Array], Finish]]]:
    """Yield two functions: one reads a box, one starts to write a box; on a device, on CuPy's current stream."""
    threads, on_device = writing_threads(job.target), job.device == "cuda"
    source = job.source if isinstance(job.source, zarr.Array) else open_source(job.source)
    with ExitStack() as scope:
        pool = scope.enter_context(ThreadPoolExecutor(threads, "linumpy-chunks"))
        chunks = level_chunks(job.target, pool, threads, job.batch)
        if on_device:
            reader = scope.enter_context(closing(OwnReader(job.scratch_bytes)))
            if kvikio_mode()[0] != "none":
                scope.enter_context(transfer_settings())

        def read(box: Box) -> Array:
            if job.stack is not None:
                voxels = _read_pages(job.stack, box)
                return require_cuda().asarray(voxels) if on_device else voxels  # type: ignore[no-any-return]
            verify_region(plan_read(LAYOUTS.get(source, 0), box))
            if on_device:
                return read_to_device(source, box, reader)
            return np.asarray(read_zarr(source, region=box, device="cpu"), job.dtype)

        yield read, chunks.start


def _read_pages(stack: TiffStack, box: Box) -> np.ndarray:
    """Read a box of a stack; raise an error that names the file if a page cannot be read."""
    stored, others = [slice(0, 1)] * stack.array.ndim, tuple(set(range(stack.array.ndim)).difference(stack.order))
    for axis, part in zip(stack.order, box, strict=True):
        stored[axis] = part
    try:
        voxels = np.asarray(read_on_host(stack.array, tuple(stored)), stack.array.dtype.newbyteorder("="))
    except Exception as error:  # a decoder may raise anything
        axis = stack.axes.find("z")
        files = stack.files[box[axis]] if stack.is_folder else stack.files[:1]
        for z in range(box[axis].start, box[axis].stop) if len(files) > 1 and stack.is_folder else ():
            _read_pages(stack, (*box[:axis], slice(z, z + 1), *box[axis + 1 :]))  # raises the error of the broken page
        name = (
            files[0]
            if len(stack.files) == 1 or stack.is_folder
            else f"one of the {len(stack.files)} files of {files[0]}"
        )
        raise SourceError(f"{name} cannot be read at {region_text(box)}: {error}") from error
    return np.ascontiguousarray(voxels.squeeze(others).transpose(np.argsort(np.argsort(stack.order))))


def copy_box(job: CopyJob, number: int) -> None:
    """Copy one block; `number` is the index in the boxes of the job."""
    box = job.boxes[number]
    with open_copier(job) as (read, write):
        write(box, read(box))()


def plan_copy(
    copy: ArrayCopy, device: DeviceName, memory_bytes: int | None, *, stack: TiffStack | None = None
) -> CopyJob:
    """Plan blocks of whole chunks (or shards) of the copy and, if memory allows it, also of the source.

    `device` is ``"cuda"`` or ``"cpu"``. The caller sets the job's `target`, which is empty.
    """
    budget, itemsize = memory_budget(device, memory_bytes), copy.dtype.itemsize
    min_nbytes, scratch, batch = math.prod(copy.stored) * itemsize, None, None
    if device == "cuda":
        chunk_nbytes = math.prod(copy.chunks) * itemsize
        scratch, batch = scratch_within(budget), plan_batch(copy.encoding, chunk_nbytes, min_nbytes, budget)
        budget -= scratch
        if _BLOCKS * min_nbytes > budget - batch.device_nbytes:
            batch = NO_BATCH
        budget -= batch.device_nbytes
        if _BLOCKS * min_nbytes > budget:
            raise DeviceMemoryError(
                f"blocks of one chunk (or shard) {copy.stored} need {_BLOCKS * min_nbytes} bytes, and {max(0, budget)} "
                "may be used: pass a larger memory_bytes, or smaller chunks and shards"
            )
    shape, max_nbytes = copy.shape, max(1, min(STEP_BYTES, budget // _BLOCKS))
    size = [min(s, n) for s, n in zip(copy.stored, shape, strict=True)]
    for axis in reversed(range(len(shape))):  # the last axes first, along which voxels are contiguous
        longer = min(math.lcm(copy.stored[axis], copy.source_stored[axis]), shape[axis])
        if math.prod(size) // size[axis] * longer * itemsize <= max_nbytes:
            size[axis] = longer
    block = grown(tuple(size), shape, itemsize, max_nbytes)
    return CopyJob(copy.source, Path(), copy.dtype, shape, block, device, stack, scratch, batch)
