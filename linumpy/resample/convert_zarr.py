"""Store images in another way: other chunks, shards, codec or version of NGFF, through the device where there is one.

In: an OME-Zarr image or any group of Zarr, with all that is in it; an array, or a TIFF stack, with a spacing. Out: the
same voxels and metadata in a new folder, which appears complete or not at all. A stopped run leaves its blocks in
``.NAME.unfinished``, and the same call continues from them. ``linumpy.resample.hierarchy`` plans the arrays.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from linumpy.device import resolve
from linumpy.errors import MetadataError, SourceError
from linumpy.io.ngff.axes import Spacing
from linumpy.io.output.checks import check_apart, check_free_space, check_parent, checked_version, refuse_url
from linumpy.io.output.folders import drop_partial_files, unfinished_beside
from linumpy.io.paths import absolute
from linumpy.io.source import (
    Source,
    describe_source,
    local_path,
    name_on_disk,
    open_node,
    path_of,
    with_options,
)
from linumpy.io.stores.tiff import TiffStack, open_stack, tiff_files
from linumpy.plan.pyramid import Box, shape_of
from linumpy.progress import bytes_progress
from linumpy.resample.blocks.overlap import work_through
from linumpy.resample.blocks.plans import check_limit
from linumpy.resample.cluster import client_of
from linumpy.resample.copying import CopyJob, copy_box, open_copier, plan_copy
from linumpy.resample.hierarchy import ArrayCopy, Storage, plan_array, plan_hierarchy
from linumpy.resample.identity import identify_data
from linumpy.resample.levels import make_coarser_levels
from linumpy.resample.resumable import Request, Resumable, resumable_folder
from linumpy.resample.workers import Needs, make_on, metadata_digest, needs_of, survey
from linumpy.write.new_image import ZARR_FORMATS, NewImage, plan_image
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster


def convert_zarr(
    source: Source,
    target: str | Path,
    *,
    codec: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    ngff_version: str | None = None,
    spacing: Spacing | None = None,
    levels: int = 1,
    device: str = "auto",
    device_memory: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    distributed: Client | Cluster | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Copy an image of any size into other chunks, shards, codecs, or another version of NGFF.

    Blocks of whole chunks (or shards) are decoded and encoded on the device, or on the CPU, while others are read and
    written. Voxels are the same, bit for bit; numbers of big-endian arrays are stored little-endian.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        An OME-Zarr image, with all its resolutions and labels; any other group of Zarr, such as a plate; an array of
        two or three axes; or a TIFF file, or a folder of TIFF files of one page each. (By tifffile: ``pip install
        tifffile``.)
    target : str or Path
        Folder to make, or ``*.ozx``.
    codec : str, optional
        As for :class:`linumpy.write.writer.OmeZarrWriter`; by default that of each array, of TIFF ``"zstd"``.
    chunks, shards : sequence of int, optional
        Along the last axes, those of space; along others 1. By default as in the source; with `chunks` alone, no
        shards. Coarser resolutions that are smaller than a chunk are one chunk.
    ngff_version : {"0.6", "0.5", "0.4"}, optional
        Version of the copy, by default that of the source.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing in µm, of a TIFF stack or an array, which it needs. Others keep their own.
    levels : int
        Resolutions to make of a TIFF stack or an array, means of 2 × 2 × 2 voxels. Others keep their own.
    device, device_memory, overwrite, durable, progress, distributed, storage_options
        As for :func:`linumpy.resample_zarr`. A TIFF stack is read by this process alone.

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        The source does not exist, holds no arrays of numbers, or changed meanwhile; a spacing is missing; metadata that
        the version cannot express.
    ValueError, TypeError
        Chunks, shards, codec or levels that do not fit.
    FileExistsError, ResumeError, ChunkError, DeviceMemoryError, GpuUnavailableError
        As for :func:`linumpy.resample_zarr`.

    Notes
    -----
    All attributes of groups and arrays, dimension names, fill values, and other files in the folders of groups are
    copied. In another version of NGFF the attributes have the form of that version; what it has no place for, such as
    further coordinate systems of 0.6, is listed in one warning.

    Examples
    --------
    >>> from linumpy import convert_zarr
    >>> convert_zarr("raw.ome.zarr", "small.ome.zarr", codec="blosc:zstd:bit")  # doctest: +SKIP
    """
    refuse_url(Path(target))
    target_path = absolute(target)
    check_parent(target_path)
    check_limit(device_memory)
    ngff_version = checked_version(target_path, ngff_version)
    if ngff_version is not None and ngff_version not in ZARR_FORMATS:
        raise ValueError(f"ngff_version={ngff_version!r}: choose one of {', '.join(ZARR_FORMATS)}")
    if isinstance(source, (str, Path)):
        check_apart([target_path], [source])
    storage = Storage(_sizes("chunks", chunks), _sizes("shards", shards), codec)
    with ExitStack() as scope:
        conversion = _plan(
            with_options(source, storage_options), storage, ngff_version, spacing, levels, target_path.name, scope
        )
        paths = [path for copy in conversion.arrays if (path := path_of(copy.source)) is not None]
        check_apart([target_path], paths)
        if not unfinished_beside(target_path).exists():
            encoded = any(copy.encoding.compressor for copy in conversion.arrays)
            check_free_space(target_path, sum(copy.nbytes for copy in conversion.arrays), encoded=encoded)
        client = scope.enter_context(client_of(distributed))
        needs = None if client is None else conversion.needs(target_path, device)
        kind = resolve(device).kind if client is None else "cpu"
        if client is not None and needs is not None:
            capacity = survey(client, needs)
            kind, device_memory = capacity.kind, min(device_memory or capacity.nbytes, capacity.nbytes)
        jobs = [plan_copy(copy, kind, device_memory, stack=conversion.stack) for copy in conversion.arrays]
        request = conversion.request()
        create = conversion.create
        with resumable_folder(target_path, request, create, overwrite=overwrite, durable=durable) as state:
            conversion.log_dropped(target_path)
            with _shown(progress, conversion.arrays) as report:
                for number, (copy, job) in enumerate(zip(conversion.arrays, jobs, strict=True)):
                    job = replace(job, target=str(state.folder / copy.path))
                    _copy(copy, job, state, number, report, client, needs)
            if conversion.image is not None:
                make_coarser_levels(state.folder, conversion.image, "mean", "cpu" if client else kind, device_memory)
            drop_partial_files(state.folder)
            if dict(conversion.request().origin) != dict(request.origin) and not conversion.unidentified:
                raise SourceError(
                    f"{conversion.name} was changed while it was converted, so that the result may mix two versions of "
                    "it and is not kept: run again once it is complete"
                )
    return Path(target)


def _sizes(label: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    try:
        return None if sizes is None else tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{label}={sizes!r}: pass whole numbers, one for each axis of space") from None


@dataclass
class Conversion:
    """What is made of a source.

    Attributes
    ----------
    name : str
        Of the source.
    arrays : tuple of ArrayCopy
        The arrays to fill.
    create : callable
        Takes a path, and makes the empty target there.
    image : NewImage or None
        The image, where the source is none: its coarser resolutions are made.
    stack : TiffStack or None
        The source, where it is one.
    about : dict
        What else the target depends on.
    dropped : tuple of str
        Descriptions of metadata that are not copied.
    """

    name: str
    arrays: tuple[ArrayCopy, ...]
    create: Any
    image: NewImage | None = None
    stack: TiffStack | None = None
    about: dict[str, Any] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    unidentified: bool = False

    def request(self) -> Request:
        """Return everything that the bytes of the target depend on."""
        settings = {
            "source": name_on_disk(self.arrays[0].source) if self.stack is None else self.stack.files[0],
            "arrays": [
                [copy.path, copy.source.shape, copy.dtype.str, copy.chunks, copy.shards, str(copy.encoding)]
                for copy in self.arrays
            ],
            "metadata": _digest([copy.source.metadata.to_dict() for copy in self.arrays]),
            **self.about,
        }
        first, *others = (copy.counts for copy in self.arrays)
        named = tuple(
            (key, _digest(value) if isinstance(value, list) else str(value)) for key, value in settings.items()
        )
        return Request("convert_zarr", first, named, (("source data", self._data()),), tuple(others))

    def needs(self, target: Path, device: str) -> Needs:
        """Return what workers need to copy the arrays."""
        if self.stack is not None:
            raise ValueError(f"distributed=: {self.name} is a TIFF stack, which this process alone converts")
        return needs_of(local_path(self.arrays[0].source), target, device)

    def _data(self) -> str:
        if self.stack is not None:
            looks = [(name, os.stat(name)) for name in self.stack.files]
            marks = [(name, look.st_size, look.st_mtime_ns) for name, look in looks]
            return _digest(marks)
        found = [identify_data(copy.source) for copy in self.arrays]
        if None in found:  # then a stopped run is never continued
            self.unidentified = True
            return f"not known {secrets.token_hex(8)}"
        return _digest(found)

    def log_dropped(self, target: Path) -> None:
        """Log once what is not copied."""
        if self.dropped:
            import logging

            logging.getLogger(__name__).warning(
                "%s: not carried over from %s: %s", target, self.name, "; ".join(self.dropped)
            )


def _digest(document: Any) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _plan(
    source: Source,
    storage: Storage,
    ngff_version: str | None,
    spacing: Spacing | None,
    levels: int,
    name: str,
    scope: ExitStack,
) -> Conversion:
    files = tiff_files(source) if isinstance(source, (str, Path)) and "://" not in str(source) else []
    if files:
        stack = scope.enter_context(open_stack(files))
        return _plan_image(str(source), stack.array, stack.axes, storage, ngff_version, spacing, levels, name, stack)
    node = open_node(source)
    if isinstance(node, zarr.Array):
        if node.ndim not in (2, 3):
            raise SourceError(f"{describe_source(node)} has shape {node.shape}: pass an array of two or three axes")
        axes = "zyx"[-node.ndim :]
        names = getattr(node.metadata, "dimension_names", None) or tuple(axes)
        if tuple(axis or "" for axis in names) != tuple(axes):
            raise MetadataError(
                f"{describe_source(node)} has the dimensions {', '.join(map(str, names))}, and an image of an array "
                f"has {', '.join(axes)}: transpose or rename them first"
            )
        return _plan_image(describe_source(node), node, axes, storage, ngff_version, spacing, levels, name, None)
    if spacing is not None or levels != 1:
        raise ValueError(
            f"spacing={spacing!r}, levels={levels}: {describe_source(node)} is a group, which keeps its own; they are "
            "for arrays and TIFF stacks"
        )
    found = plan_hierarchy(node, storage, ngff_version)
    if name.endswith(".ozx") and "ome" not in found.groups.get("", {}):
        raise SourceError(f"{describe_source(node)} is no OME-Zarr image, which .ozx files hold: name a folder")
    about = {"version": ngff_version, "groups": _digest(list(found.groups.items()))}
    return Conversion(describe_source(node), found.arrays, found.create, about=about, dropped=found.dropped)


def _plan_image(
    source: str,
    array: zarr.Array,
    axes: str,
    storage: Storage,
    ngff_version: str | None,
    spacing: Spacing | None,
    levels: int,
    name: str,
    stack: TiffStack | None,
) -> Conversion:
    """Plan the image that is made of an array without metadata."""
    if spacing is None:
        raise MetadataError(f"{source} says nothing of the voxel spacing that linumpy reads: pass spacing= in µm")
    space = axes.lstrip("tc")
    steps = [spacing.get(axis, math.nan) for axis in space] if isinstance(spacing, Mapping) else list(spacing)
    if len(steps) not in (len(space), len(axes), 3):  # of z, y and x, also for a plane
        raise ValueError(f"spacing={spacing!r}: {source} has the axes {', '.join(space)}, each of which takes a number")
    steps = steps[-len(space) :]
    if stack is not None and storage.codec is None:
        storage = Storage(storage.chunks, storage.shards, "zstd")
    version = ngff_version or "0.5"
    if stack is not None and storage.chunks is None:
        image = plan_image(array.shape, array.dtype, steps, name=name, axes=axes)
        storage = Storage(image.chunks, storage.shards, storage.codec)
    copy = plan_array("0", array, storage, ZARR_FORMATS[version])
    image = plan_image(
        array.shape, copy.dtype, steps, name=name, axes=axes, chunks=copy.chunks, shards=copy.shards,
        codec=str(copy.encoding), levels=levels, ngff_version=version,
        fill_value=0 if array.fill_value is None else array.fill_value, attributes=dict(array.attrs),
    )  # fmt: skip
    return Conversion(source, (copy,), image.create, image, stack, {"image": _digest(image.metadata)})


def _shown(progress: Progress | None, arrays: Iterable[ArrayCopy]) -> AbstractContextManager[Progress]:
    if progress is not None:
        return nullcontext(progress)
    return bytes_progress("convert", sum(copy.nbytes for copy in arrays))


def _copy(
    copy: ArrayCopy,
    job: CopyJob,
    state: Resumable,
    number: int,
    report: Progress,
    client: Client | None,
    needs: Needs | None,
) -> None:
    """Copy the missing blocks of an array, here or on workers."""

    def units(box: Box) -> tuple[list[int], list[int]]:
        sides = list(zip(box, copy.stored, strict=True))
        return [b.start // s for b, s in sides], [-(-b.stop // s) for b, s in sides]

    def nbytes(box: Box) -> int:
        return math.prod(shape_of(box)) * copy.dtype.itemsize

    def done(box: Box) -> None:
        state.add(*units(box), number)
        report(nbytes(box))

    wanted = {}
    for index, box in enumerate(job.boxes):
        if state.holds(*units(box), number):
            report(nbytes(box))
        else:
            wanted[index] = box
    if not wanted:
        return
    if client is None or needs is None:
        with open_copier(job) as (read, write):
            work_through(wanted.values(), read, lambda _, block: block, write, use_gpu=job.device == "cuda", done=done)
    else:
        source = local_path(copy.source)
        job = replace(job, source=source)
        needs = replace(needs, source=source, metadata=metadata_digest(source), block_nbytes=2 * job.block_nbytes)
        make_on(client, copy_box, job, needs, wanted, done, what=f"a block of {job.block} voxels")
