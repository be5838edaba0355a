"""Copy images into other chunks, shards, codecs or another version of NGFF, through the device if there is one.

The copy appears complete or not at all. A stopped run leaves its blocks in ``.NAME.unfinished``, and the same call
continues from them. ``linumpy.resample.convert`` plans the copy and copies blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linumpy.arrays import DeviceName
from linumpy.device import resolve
from linumpy.errors import SourceError
from linumpy.io.ngff.axes import Spacing
from linumpy.io.output.checks import as_given, check_apart
from linumpy.io.output.folders import drop_partial_files
from linumpy.io.source import Source, path_of, source_for_others, with_options
from linumpy.progress import progress_bar
from linumpy.resample.blocks.overlap import work_through
from linumpy.resample.blocks.plans import check_limit
from linumpy.resample.convert.conversion import CopyJob, Parameters, copy_box, open_copier, plan_conversion, plan_copy
from linumpy.resample.convert.hierarchy import ArrayCopy, Storage
from linumpy.resample.filling import (
    BlockRecord,
    check_space,
    checked_output,
    make_coarser_levels,
    options_of_source,
    warn_of_labels,
)
from linumpy.resample.resumable import resumable_folder
from linumpy.resample.workers import Needs, client_of, make_on, metadata_digest, survey
from linumpy.write.new_image import ZARR_FORMATS
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster


def convert_zarr(
    source: Source,
    output: str | Path,
    *,
    codec: str | None = None,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    crop: Sequence[int] | None = None,
    ngff_version: str | None = None,
    spacing: Spacing | None = None,
    levels: int = 1,
    downsampling: str | None = None,
    missing: str = "error",
    device: DeviceName = "auto",
    memory_bytes: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    distributed: Client | Cluster | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | Path:
    """Copy an image of any size into other chunks, shards, codecs, or another version of NGFF.

    Blocks of whole chunks (or shards) are decoded and encoded on the device, or on the CPU, while other blocks are read
    and written. Voxels are the same, bit for bit; numbers of big-endian arrays are stored little-endian.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        An OME-Zarr image, with all its resolutions and labels; any other group of Zarr, such as a plate; an array of
        two or three axes; or a TIFF file, such as an OME-TIFF of several files or an ImageJ hyperstack, or a folder of
        TIFF files of one page each, which need ``pip install tifffile``.
    output : str or Path
        Folder to make, or ``*.ozx``.
    codec : str, optional
        As for :class:`linumpy.write.writer.OmeZarrWriter`; by default the codec of each array, and ``"zstd"`` for TIFF.
    chunks, shards : sequence of int, optional
        Sizes along the last axes, the axes of space; they are 1 along other axes. By default as in the source; with
        `chunks` alone, no shards. Coarser resolutions that are smaller than a chunk are one chunk.
    crop : sequence of int, optional
        Voxels along the last axes of the crops for which chunks, and shards from NGFF 0.5 on, are chosen, unless
        `chunks` are given: those for which random crops decode the fewest bytes.
    ngff_version : {"0.6", "0.5", "0.4"}, optional
        Version of the copy, by default the source's.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing in µm, required for an array. For TIFF it replaces the spacing in OME-XML, in ImageJ's description
        or in resolution tags, and is required along axes for which there is none. Groups keep their own spacing: pass
        none.
    levels : int
        Number of resolutions of a TIFF stack or an array. Groups keep their own resolutions: pass none.
    downsampling : {"mean", "label", "nearest"}, optional
        Method that makes the coarser resolutions of a TIFF stack or an array, as for
        :class:`linumpy.write.writer.OmeZarrWriter`: ``"label"`` for labels. By default ``"mean"``, with a warning if
        integers have few values.
    missing : {"error", "fill"}
        Whether planes of a TIFF stack that the metadata declare and no file holds are an error, or are written as 0.
    device, memory_bytes, overwrite, durable, progress, distributed, storage_options
        As for :func:`linumpy.resample_zarr`. Workers cannot read a TIFF stack: with one, `distributed` is an error.

    Returns
    -------
    Path, or str for a URL
        `output`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        The source does not exist, holds no arrays of numbers, or changed during the run; a spacing, or a plane of a
        TIFF stack, is missing; the version cannot express the metadata.
    ValueError, TypeError
        Chunks, shards, codec, version or levels that do not fit; `spacing` or `levels` for a group.
    FileExistsError, ResumeError, ChunkError, DeviceMemoryError, GpuUnavailableError, WorkerError, OSError
        As for :func:`linumpy.resample_zarr`. Without a device a block of one chunk (or shard) may exceed
        `memory_bytes`.

    Notes
    -----
    All attributes of groups and arrays, dimension names, fill values, and other files in the folders of groups are
    copied. If the version of NGFF changes, the attributes get the form of the new version; one warning lists the
    attributes that the version cannot hold, such as further coordinate systems of 0.6.

    Axes of TIFF become t, c, z, y, x, whatever the order of the planes in the file. Time step, names and colours of
    channels are taken from OME-XML or ImageJ's description.

    Examples
    --------
    >>> from linumpy import convert_zarr
    >>> convert_zarr("raw.ome.zarr", "small.ome.zarr", codec="blosc:zstd:bit")  # doctest: +SKIP
    """
    target, ngff_version = checked_output(output, ngff_version, storage_options)
    check_limit(memory_bytes)
    if ngff_version is not None and ngff_version not in ZARR_FORMATS:
        raise ValueError(f"ngff_version={ngff_version!r}: choose one of {', '.join(ZARR_FORMATS)}")
    if isinstance(source, (str, Path)):
        check_apart([target], [source])
    if missing not in ("error", "fill"):
        raise ValueError(f"missing={missing!r}: choose one of error, fill")
    storage = Storage(_sizes("chunks", chunks), _sizes("shards", shards), codec, _sizes("crop", crop))
    parameters = Parameters(target.name, storage, ngff_version, spacing, levels, downsampling, missing)
    with ExitStack() as scope:
        options = options_of_source(source, target, storage_options)
        conversion = plan_conversion(with_options(source, options), parameters, scope)
        arrays = conversion.arrays
        check_apart([target], [path_of(copy.source) or copy.source for copy in arrays])
        nbytes = sum(copy.nbytes for copy in arrays)
        check_space(target, nbytes, encoded=any(copy.encoding.compressor for copy in arrays))
        client = scope.enter_context(client_of(distributed))
        needs = None if client is None else conversion.needs(target, device)
        kind = resolve(device).kind if client is None else "cpu"
        if client is not None and needs is not None:
            capacity = survey(client, needs)
            kind, memory_bytes = capacity.kind, min(memory_bytes or capacity.nbytes, capacity.nbytes)
        jobs = [plan_copy(copy, kind, memory_bytes, stack=conversion.stack) for copy in arrays]
        data, create = conversion.data(), conversion.create
        request = conversion.request(data)
        with resumable_folder(target, request, create, overwrite=overwrite, durable=durable) as state:
            conversion.log_dropped(target)
            if levels > 1 and downsampling is None:
                warn_of_labels(arrays[0].source, "pass downsampling='label' (--downsampling label) if they are labels")
            with progress_bar("convert", nbytes, instead=progress) as report:
                for number, (copy, job) in enumerate(zip(arrays, jobs, strict=True)):
                    job = replace(job, target=state.folder / copy.path)
                    record = BlockRecord(state, number, copy.stored, copy.dtype.itemsize, report)
                    _copy(copy, job, record, client, needs)
            if conversion.image is not None:
                make_coarser_levels(state.folder, conversion.image, "cpu" if client else kind, memory_bytes)
            drop_partial_files(state.folder)
            if data is not None and conversion.data() not in (None, data):
                raise SourceError(
                    f"{conversion.name} was changed while it was converted, so that the result may mix two versions of "
                    "it and is not kept: run again once it is complete"
                )
    return as_given(output, target)


def _sizes(label: str, sizes: Sequence[int] | None) -> tuple[int, ...] | None:
    try:
        return None if sizes is None else tuple(map(operator.index, sizes))
    except TypeError:
        raise TypeError(f"{label}={sizes!r}: pass whole numbers, one for each axis of space") from None


def _copy(copy: ArrayCopy, job: CopyJob, record: BlockRecord, client: Client | None, needs: Needs | None) -> None:
    """Copy the blocks of an array that are not complete, in this process or on workers."""
    missing = {index: box for index, box in enumerate(job.boxes) if not record.is_complete(box)}
    if not missing:
        return
    if client is None or needs is None:
        with open_copier(job) as (read, write):
            work_through(missing.values(), read, lambda _, block: block, write, device=job.device, done=record.add)
    else:
        source = source_for_others(copy.source)
        job = replace(job, source=source)
        needs = replace(needs, source=source, metadata=metadata_digest(source), block_nbytes=2 * job.block_nbytes)
        make_on(client, copy_box, job, needs, missing, record.add, block_name=f"a block of {job.block} voxels")
