"""Resample an OME-Zarr volume that is larger than memory, block by block, from Zarr to Zarr.

The output, an image with its labels, appears complete or not at all. A stopped run leaves its blocks in
``.NAME.unfinished``, or at their keys in an object store, and the same call continues from them. ``target_grid``
chooses the grid; ``target_images`` describes the images to fill (the target and its labels); ``blocks.plans`` plans the
blocks; ``blocks.pipeline`` makes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import DeviceName, is_small
from linumpy.device import require_cuda, resolve
from linumpy.errors import DeviceMemoryError
from linumpy.io.carried import Carried, carried_from
from linumpy.io.ngff.axes import Spacing
from linumpy.io.output.checks import as_given, check_apart
from linumpy.io.output.folders import drop_partial_files
from linumpy.io.source import Source, path_of, source_for_others, with_options
from linumpy.io.volume import Volumes, open_source_volumes
from linumpy.plan.boundary import anti_aliasing_sigmas
from linumpy.plan.codecs import BY_CODEC
from linumpy.plan.grid.blocks import AffineGrid, Block
from linumpy.progress import progress_bar
from linumpy.resample.blocks.pipeline import BlockJob, make_block, make_blocks, make_blocks_on_each
from linumpy.resample.blocks.plans import check_limit, memory_of_each
from linumpy.resample.filling import (
    BlockRecord,
    check_space,
    checked_output,
    make_coarser_levels,
    options_of_source,
    warn_of_labels,
)
from linumpy.resample.resumable import resumable_folder
from linumpy.resample.target_grid import TargetGrid, on_grid_of, plan_target_grid, turned_systems
from linumpy.resample.target_images import (
    LABELS,
    TargetImage,
    check_unchanged,
    creator_of,
    plan_labels,
    plan_target,
    plan_target_image,
    request_of,
)
from linumpy.resample.workers import Needs, client_of, make_on, needs_of, survey
from linumpy.write.writer import Progress

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster


def resample_zarr(
    source: Source,
    output: str | Path,
    transform_or_spacing: ArrayLike | None = None,
    *,
    like: Source | Volumes | None = None,
    coordinate_system: str | None = None,
    output_shape: Sequence[int] | None = None,
    order: int | None = None,
    anti_aliasing: bool | None = None,
    mode: str | None = None,
    cval: float = 0.0,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    codec: str | None = None,
    compressors: Any = BY_CODEC,
    levels: int | None = None,
    downsampling: str | None = None,
    ngff_version: str | None = None,
    labels: str = "resample",
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Spacing | None = None,
    device: DeviceName = "auto",
    memory_bytes: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    distributed: Client | Cluster | str | None = None,
    devices: str | Sequence[int] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> str | Path:
    """Resample an OME-Zarr volume of any size into another.

    Each block of the output consists of whole chunks or shards, and only the box of the source that it needs is read.
    While a block is computed, the next block is read and the last block is written. With orders 0 and 1 the result
    equals, bit for bit, the result of one call on the whole array in memory: of ``affine_transform`` or, with order 1
    and smoothing for a coarser spacing, of ``resample_volume``, rounded to the dtype of the source (integers of 4 and 8
    bytes are computed in float64). Higher orders differ by rounding.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        An OME-Zarr image (NGFF 0.4 to 0.6) with two or three axes of space, whose times and channels are resampled
        separately; or an array of two or three axes, with `spacing`.
    output : str or Path
        Folder of the OME-Zarr image to make, ``*.ozx``, or a URL (``s3://``, ``gs://``, ``az://``).
    transform_or_spacing : float, sequence of float, or matrix
        The new spacing in µm, one number or a number for each axis: voxel centres keep their coordinates in µm. Or an
        affine matrix of shape (rank, rank), (rank, rank + 1) or (rank + 1, rank + 1) that maps voxels of the output
        to coordinates in the source, both in voxels, in the order of the axes (Z, Y, X).
    like : str, Path, zarr.Group or Volumes, optional
        Another OME-Zarr image, whose grid the output takes: shape, spacing, position, axes, and the number of
        resolutions. (For a coarser level of `like` pass ``linumpy.io.volume.open_volumes(path, level)``.) The images
        are aligned in µm; in NGFF 0.6 by the transformations of a scene that contains both, or to `coordinate_system`.
        These may be affine, or fields of displacements or coordinates, which are read block by block.
    coordinate_system : str, optional
        Name of a coordinate system (NGFF 0.6). With `like`, both images are mapped to it. Without `like`, the output
        lies in it, with the spacing given, and covers the source.
    output_shape : sequence of int, optional
        Voxels of the output. By default, for a spacing, the nearest whole number that fills the extent of the source,
        with the spacing adapted to fill it; for a matrix, the shape of the source.
    order : int, optional
        Order of the spline: 0 nearest, 1 linear, up to 5. Orders above 1 need the mode ``"constant"`` or ``"nearest"``.
        By default 0 for a label image (with ``image-label`` in its metadata), and else 1.
    anti_aliasing : bool, optional
        Whether to smooth the source along axes that get coarser, by a Gaussian whose sigma is (factor - 1) / 2 voxels,
        as scikit-image's ``resize`` does; otherwise detail finer than the new spacing causes aliasing. By default
        False for a matrix, such as a rotation, and else True. If axes turn, factor is the length of the matrix's row
        for each axis of the source. The smoothing extends the source by its outermost voxels, in every `mode`. Order 0,
        whose voxels may be labels, is never smoothed.
    mode : str, optional
        SciPy's name of the extension of the source beyond its edges. By default ``"nearest"`` for a spacing, whose grid
        covers the source up to half a voxel beyond the outermost centres, and else ``"constant"``. Coordinates up to
        1e-6 voxels outside of the source, a rounding error, are moved to its edge. Between two voxels at the same
        distance, order 0 takes the one of higher index.
    cval : float
        Value outside the source, for the constant modes. For labels it is 0.
    chunks, shards, codec, compressors, levels
        Storage of the target, as for :class:`linumpy.write.writer.OmeZarrWriter`; `chunks` and `shards` along the axes
        of space, with one time and one channel each. By default as many levels as `like` has, or else one.
    downsampling : {"mean", "label", "nearest"}, optional
        Method that makes coarser levels, as for :class:`linumpy.write.writer.OmeZarrWriter`. By default ``"label"``
        with order 0, whose voxels may be labels, and else ``"mean"``.
    ngff_version : {"0.6", "0.5", "0.4"}, optional
        Version of the target; by default the source's, and 0.5 for a single array. Attributes of 0.4 in zarr v3, which
        some writers made, give 0.5.
    labels : {"resample", "drop"}
        Whether to resample the label images inside the source, by their nearest voxels; they keep their position
        relative to the image. Labels with the image's grid are extended beyond its edges by the image's `mode`; other
        labels are 0 there.
    level : int
        Resolution level of the source; 0 is the finest.
    channel, time : int, optional
        The entry to select, counted from 0; by default all. The target has the axes with more than one entry.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of the source's level 0 in µm, if its metadata lack it or are wrong.
    device : {"auto", "cuda", "cpu"}
        Device of the transform; with `distributed`, the workers' device.
    memory_bytes : int, optional
        Bytes that all blocks in the pipeline may take, on the device or, without one, in host memory, where they are
        also for decoded chunks of the source that several blocks need. With `distributed` it is the limit of one thread
        of each worker, at most the thread's part of the worker's memory limit. By default 80 % of the free memory, in
        host memory at most 8 GiB. Further host memory is about 16 MiB, and some ten chunks of the source; with a device
        up to 100 MiB of pinned memory. Coarser levels stay within the limit if eight of their chunks do.
    overwrite : bool
        Whether to replace an existing Zarr folder; at a URL it is removed before the first block is made.
    durable : bool
        Whether to flush the target to the disk before it is renamed, and blocks every 30 s, so that a run can be
        continued after a power cut. Otherwise a stopped run can be continued only on the same machine, until its next
        boot.
    progress : callable, optional
        Called with the number of bytes done since the last call; by default a bar, on a terminal.
    distributed : distributed.Client, cluster or str, optional
        A dask client, a cluster, or the address of a scheduler. Its workers make the blocks. The workers need linumpy
        and access to both paths; each has one GPU (``dask_cuda.LocalCUDACluster``), or CPUs. Other workers repeat the
        blocks of a lost worker; workers that join later take part, so the cluster may be adaptive.
    devices : "all" or sequence of int, optional
        CUDA devices of this machine that make the blocks, each with a reader and threads of its own on the cores near
        it; `memory_bytes` is for each of them. By default the current device. Not together with `distributed`.
    storage_options : mapping, optional
        Options of obstore's ``from_url`` for the URLs among `source` and `output`; see docs/remote.md.

    Returns
    -------
    Path, or str for a URL
        `output`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        The source does not exist, is no image, or changed during the run; the parent folder of the target does not
        exist; the spacing is unknown; the source has axes that are neither space, time nor channel, or labels without a
        known position.
    ValueError, TypeError
        A channel or time that does not exist; a transform, shape, order, mode, chunks, shards or dtype that does not
        fit; parameters that exclude each other.
    FileExistsError, ResumeError
        The target exists; another run is writing it; or a run with other parameters has begun to write it.
    OSError
        The disk is full, or too small for the target; complete blocks are kept.
    ChunkError
        Broken data in the source.
    DeviceMemoryError
        Not even a block of one chunk (or shard) fits `memory_bytes`.
    GpuUnavailableError
        ``device="cuda"`` without a CUDA device.
    WorkerError
        A worker of `distributed` lacks linumpy, a disk or memory; the message names the worker. The same call continues
        from the complete blocks.

    Notes
    -----
    Metadata that the new grid does not change are copied: units, scale and translation of t and c, channels (omero),
    the name, and attributes of other programs. One warning lists all others.

    A displacement is 0 outside its field; outside a field of coordinates the output is `cval`. Fields are interpolated
    by the order that their metadata name.

    A scale and a translation cannot describe a rotated grid. In NGFF 0.6 the target then has a transformation to the
    coordinate system of the source. In every version the group's attribute ``"linumpy"`` holds the matrix, the offset,
    the sigmas of the smoothing (voxels of the source) and the name of the source.

    Examples
    --------
    >>> from linumpy.resample.resample_zarr import resample_zarr
    >>> resample_zarr("brain.ome.zarr", "brain-25um.ome.zarr", 25.0)  # doctest: +SKIP
    """
    place, ngff_version = checked_output(output, ngff_version, storage_options)
    check_limit(memory_bytes)
    if not isinstance(cval, (int, float, np.integer, np.floating)):
        raise TypeError(f"cval={cval!r}: pass a real number")
    if labels not in LABELS:
        raise ValueError(f"labels={labels!r}: choose one of {', '.join(LABELS)}")
    options = options_of_source(source, place, storage_options)
    volumes = open_source_volumes(with_options(source, options), level, channel, time, spacing)
    volume = volumes.first
    named = source if isinstance(source, (str, Path)) else volume.array
    check_apart([place], [named, path_of(volume.array) or volume.array])
    if order is None:
        order = 1 if carried_from(volumes).image_label is None else 0
        if order:
            warn_of_labels(volume.array, "pass order=0 (--order 0) if they are labels, or order=1")
    kinds = "biuf" if order == 0 else "iuf"
    if volume.dtype.kind not in kinds or volume.dtype.itemsize > 8 or is_small(volume.dtype):
        raise TypeError(f"voxels of {volume.dtype} cannot be resampled with order={order}: pass integers or floats")
    new_grid = plan_target_grid(
        volumes, transform_or_spacing, like, coordinate_system, output_shape, spacing_given=spacing is not None
    )
    regrid, mode = new_grid.regrid, new_grid.mode if mode is None else mode
    smoothed = (new_grid.smoothed if anti_aliasing is None else anti_aliasing) and order != 0
    sigmas = anti_aliasing_sigmas(new_grid.scaled) if smoothed else ()
    grid = AffineGrid(volume.shape, regrid.shape, regrid.matrix, regrid.offset, order, mode, sigmas, regrid.warp)
    carried = _carried(volumes, volumes, new_grid, ngff_version, "own", *(["image_label"] if order else []))
    levels = new_grid.levels if levels is None else levels
    storage = {"chunks": chunks, "shards": shards, "codec": codec, "compressors": compressors, "levels": levels}

    def target_of(
        folder: str, own_volumes: Volumes, grid: AffineGrid, kept: Carried, method: str, **options: Any
    ) -> TargetImage:
        planned = plan_target_image(own_volumes, regrid, new_grid.axes, kept, downsampling=method, **storage, **options)
        return TargetImage(folder, own_volumes, grid, kept, planned)

    method = downsampling or ("mean" if order else "label")
    targets = [target_of("", volumes, grid, carried, method, name=place.name, ngff_version=ngff_version)]
    version, names = targets[0].image.ngff_version, carried.labels if labels == "resample" else ()
    for name in names:
        label_volumes, label_grid = plan_labels(volumes, name, regrid, mode, spacing)
        kept = _carried(label_volumes, volumes, new_grid, version, "own", "labels")
        options = {"name": name, "ngff_version": version}
        targets.append(target_of(f"labels/{name}", label_volumes, label_grid, kept, "label", **options))
    # The space is checked before blocks are planned, which takes minutes for a target of 1e30 voxels.
    encoded = any(target.image.compressors is not None for target in targets)
    check_space(place, sum(target.image.nbytes for target in targets), encoded=encoded)
    numbers = _device_numbers(devices, device, distributed)
    arrays = [target.volumes.first.array for target in targets]
    job_sources: Sequence[Source] = arrays if distributed is None else [source_for_others(array) for array in arrays]
    # The first device makes the coarser levels.
    current = require_cuda().cuda.Device(numbers[0]) if numbers else nullcontext()
    with client_of(distributed) as client, current:
        needs: Needs | None = None
        if client is None:
            kind = "cuda" if numbers else resolve(device).kind
            if len(numbers) > 1 and memory_bytes is None:
                memory_bytes = memory_of_each(numbers)
            plans = [plan_target(target, kind, memory_bytes) for target in targets]
        else:
            needs = needs_of(job_sources[0], place, device)
            kind, plans = _plan_for_workers(client, needs, targets, memory_bytes)
        request = request_of(targets, kind, cval)
        with resumable_folder(place, request, creator_of(targets), overwrite=overwrite, durable=durable) as state:
            for target in targets:
                target.carried.log_dropped(target.volumes.name, place / target.folder)
            voxels_nbytes = sum(target.voxels_nbytes for target in targets)
            with progress_bar("resample", voxels_nbytes, instead=progress) as report:
                for number, (target, planned) in enumerate(zip(targets, plans, strict=True)):
                    array_place = state.folder / target.folder / "0"
                    job = replace(planned, source=job_sources[number], target=array_place)
                    job = job if number else replace(job, cval=float(cval))
                    for entries, source_volume in target.volumes.volumes.items():
                        record = BlockRecord(state, number, target.stored, target.image.dtype.itemsize, report, entries)
                        volume_job = replace(job, index=source_volume.index, entries=entries)
                        _make_missing_blocks(volume_job, record, client, needs, numbers)
            for target in targets:
                folder, levels_kind = state.folder / target.folder, kind if client is None else "cpu"
                make_coarser_levels(folder, target.image, levels_kind, memory_bytes)
            drop_partial_files(state.folder)
            check_unchanged(targets, request)
    return as_given(output, place)


def _device_numbers(devices: str | Sequence[int] | None, device: DeviceName, distributed: object) -> list[int]:
    """Check `devices`, and return the numbers of the devices that make blocks; an empty list if it is None."""
    if devices is None:
        return []
    if distributed is not None or device == "cpu":
        other = "distributed=" if distributed is not None else "device='cpu'"
        raise ValueError(f"devices={devices!r} are those of this machine: not together with {other}")
    from linumpy.gpu.devices import checked_devices

    return checked_devices(devices)


def _plan_for_workers(
    client: Client, needs: Needs, targets: Sequence[TargetImage], limit: int | None
) -> tuple[Literal["cuda", "cpu"], list[BlockJob]]:
    """Ask the workers for their device, and plan blocks that fit into the memory of each worker."""
    capacity = survey(client, needs)
    budget = capacity.nbytes if limit is None else min(limit, capacity.nbytes)
    try:
        plans = [plan_target(target, capacity.kind, budget, may_cache=False) for target in targets]
    except DeviceMemoryError as error:
        if limit is not None and limit <= capacity.nbytes:
            raise
        raise DeviceMemoryError(f"{error}; the limit is {capacity.reason}") from error
    return capacity.kind, plans


def _carried(volumes: Volumes, source: Volumes, grid: TargetGrid, version: str | None, *dropped: str) -> Carried:
    """Return the metadata of `volumes` that the resampled image, or the labels in it, keep.

    If axes turn, orientations and coordinate systems do not hold for the axes of the new image. NGFF 0.6 can describe
    that by a further coordinate system; older versions cannot, so orientations and systems are dropped.
    """
    matrix, carried = np.array(grid.regrid.matrix), on_grid_of(carried_from(volumes), grid)
    along_axes = np.array_equal(matrix, np.diag(np.diag(matrix))) and bool((np.diag(matrix) > 0).all())
    turned = grid.carried is None and not along_axes
    if (version or carried.ngff_version) != "0.6":
        carried = carried.without("systems", *(["orientations"] if turned else []))
    elif turned:
        carried = turned_systems(carried, volumes, source, grid.regrid)
    return carried.without(*dropped).on_another_grid()


def _make_missing_blocks(
    job: BlockJob, record: BlockRecord, client: Client | None, needs: Needs | None, devices: Sequence[int]
) -> None:
    """Make the blocks of a volume that are not complete: on workers, on several devices, or in this process."""

    def done(block: Block) -> None:
        record.add(block.box)

    in_order = job.plan.in_order(job.cache_bytes // record.itemsize) if job.cache_bytes else job.plan
    missing = [block for block in in_order if not record.is_complete(block.box)]
    if client is not None and needs is not None:
        needs = replace(needs, block_nbytes=record.itemsize * sum(job.plan.largest))
        block_name = f"a block of {job.plan.largest} voxels (read, made)"
        blocks = {block.number: block for block in missing}
        make_on(client, make_block, job, needs, blocks, done, block_name=block_name)
    elif len(devices) > 1 and missing:
        make_blocks_on_each(job, missing, done, devices)
    elif missing:
        make_blocks(job, missing, done)
