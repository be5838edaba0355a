"""Resample an OME-Zarr volume that is larger than memory: block by block, from Zarr to Zarr.

In: an image, and a spacing or an affine map. Out: an image with its labels, complete or not there at all. A run that is
stopped leaves its blocks in ``.NAME.unfinished``, and the same call goes on from them. Planning is in
``linumpy.plan.grid.blocks``, the place of labels in ``linumpy.resample.labels``, what is filled in
``linumpy.resample.parts``, the transform of a block in ``linumpy.resample.block``, the way of the blocks in
``linumpy.resample.pipeline``.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from linumpy.device import resolve
from linumpy.errors import DeviceMemoryError, MetadataError
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, MIN_SCRATCH_BYTES, free_memory
from linumpy.io.carried import Carried, carried_from
from linumpy.io.ome import open_image
from linumpy.io.place import (
    absolute,
    check_apart,
    check_free_space,
    check_parent,
    drop_partial_files,
    refuse_url,
    unfinished_beside,
)
from linumpy.io.source import Source, describe_source, folder_of, local_path, local_store, open_node
from linumpy.io.volume import Volume, Volumes, as_volume, select_volumes
from linumpy.plan.grid.block_shape import BlockBytes, choose_block_shape
from linumpy.plan.grid.blocks import AffineGrid, Block, ResamplePlan, anti_aliasing_sigmas
from linumpy.plan.grid.regrid import plan_regrid
from linumpy.plan.pyramid import Pyramid, split
from linumpy.progress import bytes_progress
from linumpy.resample.block import box_work_bytes
from linumpy.resample.labels import LABELS, plan_labels
from linumpy.resample.parts import Part, check_unchanged, creator_of, plan_part_image, request_of
from linumpy.resample.pipeline import BlockJob, make_blocks
from linumpy.resample.resumable import Resumable, resumable_folder
from linumpy.resample.workers import Needs, client_of, make_blocks_on, needs_of, survey
from linumpy.write.new_image import NewImage
from linumpy.write.pyramid import halve, halve_by_threads
from linumpy.write.raw_chunks import Chunks, chunks_of, writing_threads
from linumpy.write.writer import STEP_BYTES, Progress

#: Without a limit of the caller's: this part of the free memory, and in host memory no more than so many bytes.
_SHARE, _HOST_MOST = 0.8, 8 * 2**30


def resample_zarr(
    source: Source,
    target: str | Path,
    transform_or_spacing: Any,
    *,
    output_shape: Sequence[int] | None = None,
    order: int = 1,
    anti_aliasing: bool | None = None,
    mode: str | None = None,
    cval: float = 0.0,
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    compressors: Any = None,
    levels: int = 1,
    downsampling: str | None = None,
    ngff_version: str | None = None,
    labels: str = "resample",
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    source_spacing: Sequence[float] | None = None,
    device: str = "auto",
    device_memory: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    distributed: Any = None,
) -> Path:
    """Resample an OME-Zarr volume of any size into another.

    Each block of the output, of whole chunks or shards, reads only the box of the source that it needs. The next
    block's read and the last block's write overlap it. With orders 0 and 1 the result does not depend on the blocks: it
    is the same, bit for bit, as that of a call on the whole array in memory. For a coarser spacing, which is smoothed,
    with order 1 that is ``resample_volume``, rounded to the dtype of the source (integers of 4 and 8 bytes are computed
    in float64); without smoothing it is ``affine_transform``. Higher orders differ by rounding.

    Parameters
    ----------
    source : str, Path, zarr.Array[Any], zarr.Group, Store, StorePath or (Store, str)
        An OME-Zarr image (NGFF 0.4 or 0.5) with two or three axes of space, each of whose times and channels is
        resampled by itself; or an array of two or three axes, with `source_spacing`.
    target : str or Path
        Folder of the OME-Zarr image to make.
    transform_or_spacing : float, sequence of float, or matrix
        The wanted spacing in µm, one number or one for each axis: centres of voxels keep their coordinates in µm. Or an
        affine matrix of shape (rank, rank), (rank, rank + 1) or (rank + 1, rank + 1) that takes voxels of the output
        to coordinates in the source, both counted in voxels, in the order of the axes (Z, Y, X).
    output_shape : sequence of int, optional
        Voxels of the output. By default, for a spacing, the nearest whole number that fills the extent of the source,
        and the spacing is adapted to fill it; for a matrix, the shape of the source.
    order : int
        Of the spline: 0 nearest, 1 linear, up to 5. Orders above 1 take the modes ``"constant"`` and ``"nearest"``.
    anti_aliasing : bool, optional
        Whether to smooth the source along axes that get coarser, by a Gaussian of (factor - 1) / 2 voxels, as
        scikit-image's ``resize`` does; else what is finer than the new spacing turns up as false patterns. By default
        True for a spacing and False for a matrix: rotations and other general maps are not smoothed unless this is
        True, and then factor is the length of the matrix's row for each axis of the source. Beyond its edges the source
        is continued by its outermost voxels for the smoothing, whatever the `mode`. Order 0, whose voxels may be
        labels, is never smoothed.
    mode : str, optional
        How the source is continued beyond its edges, as SciPy names it. By default ``"nearest"`` for a spacing, whose
        grid covers the source's extent up to half a voxel beyond the outermost centres, and ``"constant"`` for a
        matrix.
    cval : float
        Value outside, for the constant modes.
    chunks, shards, compressors, levels
        Of the target, as for :func:`linumpy.write.writer.write_omezarr`; `chunks` and `shards` along the axes of space,
        of one time and one channel each.
    downsampling : {"mean", "label", "nearest"}, optional
        How coarser levels are made, as for :func:`linumpy.write.writer.write_omezarr`. By default ``"label"`` with
        order 0, whose voxels may be labels, and else ``"mean"``.
    ngff_version : {"0.5", "0.4"}, optional
        Of the target; by default that of the source, and of a single array 0.5.
    labels : {"resample", "drop"}
        What becomes of the label images inside of the source: by default each is brought onto the grid of the target
        by its nearest voxels, and lies in it as it does in the source. Where the image is continued beyond its edges,
        labels of the same grid are too, and outside they are 0.
    level : int
        Resolution level of the source; 0 is the finest.
    channel, time : int, optional
        The one to take, counted from 0; by default all of them. The target has those with more than one entry.
    source_spacing : sequence of float, optional
        Voxel spacing of the source in µm (of its level 0), where it is not in its metadata or wrong there.
    device : {"auto", "cuda", "cpu"}
        Where blocks are made. With `distributed` this is asked of the workers.
    device_memory : int, optional
        Bytes that all blocks under way may take, on the device or, without one, in host memory; with `distributed`
        on each worker, for one thread of it, and no more than fits beside its other threads in the worker's memory
        limit. By default 80 % of what is free, in host memory at most 8 GiB. Host memory
        is taken beyond it: about 16 MiB, and some ten chunks of the source while zarr reads; with a device up to
        100 MiB of pinned memory. Coarser levels keep to it as long as eight of their chunks do.
    overwrite : bool
        Whether to replace a Zarr folder that is there.
    durable : bool
        Whether the target is on the disk before it is renamed, and blocks every 30 s, so that they count after a
        power cut too. Without it, a stopped run is gone on with only on the same machine, until that is started again.
    progress : callable, optional
        Called with the number of bytes done since the last call; by default a bar, on a terminal.
    distributed : distributed.Client, cluster or str, optional
        A dask client, a cluster, or the address of a scheduler. Makes the blocks on its workers, which need linumpy and
        must see both paths: one GPU each (``dask_cuda.LocalCUDACluster``), or CPUs. Blocks of a lost worker are made
        again by the others; workers that come later take part, so the cluster may be adaptive.

    Returns
    -------
    Path
        `target`.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError
        There is no such source, or no folder for the target; it is no image, or was written to meanwhile; its spacing
        is not known; it has axes that are neither space, time nor channel; labels that do not say where they lie.
    ValueError, TypeError
        A channel or time that is not there; a transform, shape, order, mode, chunks, shards or dtype that does not fit.
    FileExistsError, ResumeError
        The target is there; another run is writing it, or one with another request has begun to.
    ChunkError
        Broken data in the source.
    DeviceMemoryError
        Not even a block of one chunk (or shard) fits `device_memory`.
    GpuUnavailableError
        ``device="cuda"`` and there is none.
    WorkerError
        A worker of `distributed` lacks linumpy, a disk or memory; the message names it. The same call goes on with what
        is there.

    Notes
    -----
    All that a new grid leaves true is carried over: units, scale and translation of t and c, channels (omero), the
    name, attributes of others. What is not is logged, once, as a warning.

    What NGFF cannot say of a turned grid is kept beside it: the group's attribute ``"linumpy"`` holds the matrix,
    the offset, the sigmas of the smoothing (voxels of the source) and the name of the source.

    Examples
    --------
    >>> from linumpy.resample.resample_zarr import resample_zarr
    >>> resample_zarr("brain.ome.zarr", "brain-25um.ome.zarr", 25.0)  # doctest: +SKIP
    """
    refuse_url(Path(target))
    target_path = absolute(target)
    check_parent(target_path)
    if not isinstance(cval, (int, float, np.integer, np.floating)):
        raise TypeError(f"cval={cval!r}: a real number is needed")
    if downsampling is None:
        downsampling = "label" if order == 0 else "mean"
    if mode is None:
        mode = "nearest" if np.ndim(transform_or_spacing) < 2 else "constant"
    if labels not in LABELS:
        raise ValueError(f"labels={labels!r}: one of {', '.join(LABELS)} is wanted")
    volumes = _open_volumes(source, level, channel, time, source_spacing)
    volume = volumes.first
    sources = (source if isinstance(source, (str, Path)) else None, folder_of(volume.array))
    check_apart([target_path], [one for one in sources if one is not None])
    _check_dtype(volume, order)
    regrid = plan_regrid(transform_or_spacing, volume.shape, volumes.spacing, volumes.origin, output_shape)
    if anti_aliasing is None:
        anti_aliasing = np.ndim(transform_or_spacing) < 2
    sigmas = anti_aliasing_sigmas(regrid.matrix) if anti_aliasing and order != 0 else ()
    grid = AffineGrid(volume.shape, regrid.shape, regrid.matrix, regrid.offset, order, mode, sigmas)
    carried = carried_from(volumes).without("own").on_another_grid()
    carried = carried.without("image_label") if order else carried
    storage = {"chunks": chunks, "shards": shards, "compressors": compressors, "levels": levels}

    def part(folder: str, one: Volumes, grid: AffineGrid, kept: Carried, how: str, **options: Any) -> Part:
        image = plan_part_image(one, regrid, kept, downsampling=how, **storage, **options)
        return Part(folder, one, grid, kept, image, how)

    parts = [part("", volumes, grid, carried, downsampling, name=target_path.name, ngff_version=ngff_version)]
    version, names = parts[0].image.ngff_version, carried.labels if labels == "resample" else ()
    for found in plan_labels(volumes, names, regrid, mode, source_spacing):
        kept = carried_from(found.volumes).without("own", "labels").on_another_grid()
        options = {"name": found.name, "ngff_version": version}
        parts.append(part(f"labels/{found.name}", found.volumes, found.grid, kept, "label", **options))
    # Before blocks are planned, which takes minutes for a target of 1e30 voxels.
    if not unfinished_beside(target_path).exists():
        nbytes = sum(one.image.nbytes for one in parts)
        check_free_space(target_path, nbytes, encoded=compressors is not None)
    arrays = [one.volumes.first.array for one in parts]
    opened_from: list[Any] = arrays if distributed is None else [local_path(array) for array in arrays]
    with client_of(distributed) as client:
        needs: Needs | None = None
        if client is None:
            kind = resolve(device).kind
            plans = [plan_blocks(one.grid, one.volumes.first, one.stored, kind, device_memory) for one in parts]
        else:
            needs = needs_of(opened_from[0], target_path, device)
            kind, plans = _plan_for_workers(client, needs, parts, device_memory)
        request = request_of(parts, kind, cval)
        with resumable_folder(target_path, request, creator_of(parts), overwrite=overwrite, durable=durable) as state:
            for one in parts:
                one.carried.log_dropped(one.volumes.name, Path(target) / one.folder)
            with _shown(progress, parts) as report:
                for number, (one, (plan, scratch)) in enumerate(zip(parts, plans, strict=True)):
                    filled = str(state.folder / one.folder / "0")
                    job = BlockJob(opened_from[number], filled, plan, 0.0 if number else float(cval), kind, scratch)
                    for entries, each in one.volumes.volumes.items():
                        each_job = replace(job, index=each.index, entries=entries)
                        _fill(each_job, state, number, one.stored, report, client, needs)
            for one in parts:
                where = kind if client is None else "cpu"
                _finish(state.folder / one.folder, one.image, one.downsampling, where, device_memory)
            drop_partial_files(state.folder)
            check_unchanged(parts, request)
    return Path(target)


def _plan_for_workers(
    client: Any, needs: Needs, parts: Sequence[Part], limit: int | None
) -> tuple[str, list[tuple[ResamplePlan, int | None]]]:
    """Choose where workers make blocks, and blocks that fit each of them; with what a read may use besides."""
    _check_limit(limit)
    capacity = survey(client, needs)
    most = capacity.nbytes if limit is None else min(limit, capacity.nbytes)
    try:
        plans = [plan_blocks(one.grid, one.volumes.first, one.stored, capacity.kind, most) for one in parts]
    except DeviceMemoryError as error:
        if limit is not None and limit <= capacity.nbytes:
            raise
        raise DeviceMemoryError(f"{error}; of more only this is used: {capacity.reason}") from error
    return capacity.kind, plans


def _open_volumes(
    source: Source, level: int, channel: int | None, time: int | None, spacing: Sequence[float] | None
) -> Volumes:
    node = open_node(source)
    if isinstance(node, zarr.Array):
        name = describe_source(node)
        if level != 0:
            raise ValueError(f"level={level}, but {name} is a single array, which has no levels")
        if channel is not None or time is not None:
            raise ValueError(
                f"channel={channel}, time={time}: {name} is a single array, whose axes have no names; pass the "
                "OME-Zarr image that it is in"
            )
        if spacing is None:
            raise MetadataError(f"{name} is a single array, whose voxel spacing is unknown: pass source_spacing= in µm")
        if node.ndim not in (2, 3):
            raise ValueError(f"{name} has shape {node.shape}: volumes of two or three axes are resampled")
        if len(spacing) != node.ndim:
            raise ValueError(f"source_spacing={tuple(spacing)}: {name} has {node.ndim} axes")
        every: dict[tuple[int, ...], Volume] = {(): as_volume(node)}
        return Volumes(name, "zyx"[-node.ndim :], tuple(map(float, spacing)), (0.0,) * node.ndim, "", every, {})
    try:
        image = open_image(node, spacing=spacing)
    except (MetadataError, ValueError) as error:  # the parameter has another name here
        raise type(error)(re.sub(r"\bspacing=", "source_spacing=", str(error))) from error
    volumes = select_volumes(image, level, channel=channel, time=time)
    if volumes.first.ndim not in (2, 3) or not set(volumes.axes) <= set("zyx"):
        raise MetadataError(
            f"{image.name} has the axes of space {', '.join(volumes.axes)}: two or three of z, y, x are read"
        )
    return volumes


def _check_dtype(array: Volume, order: int) -> None:
    kinds = "biuf" if order == 0 else "iuf"
    if array.dtype.kind not in kinds or array.dtype.itemsize > 8:
        raise TypeError(f"voxels of {array.dtype} cannot be resampled with order={order}: integers and floats can")


def plan_blocks(
    grid: AffineGrid,
    source: zarr.Array[Any] | Volume,
    stored: tuple[int, ...],
    kind: str,
    limit: int | None = None,
) -> tuple[ResamplePlan, int | None]:
    """Choose the blocks of :func:`resample_zarr`, and what a read may use besides them.

    Parameters
    ----------
    grid : AffineGrid
        What is made.
    source : zarr.Array[Any] or Volume
        The volume.
    stored : tuple of int
        What is whole in storage of the target, along the axes of space.
    kind : {"cuda", "cpu"}
        Where blocks are made.
    limit : int, optional
        As `device_memory`.

    Returns
    -------
    plan : ResamplePlan
        The blocks.
    scratch : int or None
        Bytes of a read on a device beyond its result.
    """
    _check_limit(limit)
    work, output_work = box_work_bytes(source.dtype, grid, kind)
    itemsize = source.dtype.itemsize
    if kind == "cpu":
        cost = BlockBytes(itemsize, itemsize, work, output_work)
        budget = limit if limit is not None else min(int(_SHARE * _host_memory()), _HOST_MOST)
        return ResamplePlan(grid, choose_block_shape(grid, stored, cost, budget, source.chunks)), None
    # On its way out a block is copied into the order of its chunks.
    cost = BlockBytes(itemsize, itemsize, work, output_work + itemsize)
    budget = limit if limit is not None else int(_SHARE * free_memory())
    scratch = min(DEFAULT_SCRATCH_BYTES, max(MIN_SCRATCH_BYTES, budget // 4))
    return ResamplePlan(grid, choose_block_shape(grid, stored, cost, budget - scratch, source.chunks)), scratch


def _check_limit(limit: Any) -> None:
    if limit is not None and (not isinstance(limit, (int, float, np.integer)) or not 1 <= limit < math.inf):
        raise ValueError(f"device_memory={limit!r}: a number of bytes is needed")


def _host_memory() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _shown(progress: Progress | None, parts: Sequence[Part]) -> AbstractContextManager[Progress]:
    if progress is not None:
        return nullcontext(progress)
    nbytes = (one.image.dtype.itemsize * math.prod(one.image.shapes[0]) for one in parts)
    return bytes_progress("resample", sum(nbytes))


def _fill(
    job: BlockJob,
    state: Resumable,
    number: int,
    stored: tuple[int, ...],
    report: Progress,
    client: Any,
    needs: Needs | None,
) -> None:
    """Make the blocks of a volume that are not there, on workers where there are `needs` of them.

    `number` is that of the image among those that are filled.
    """

    def corners(block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        start = tuple(a // s for a, s in zip(block.start, stored, strict=True))
        stop = tuple(-(-b // s) for b, s in zip(block.stop, stored, strict=True))
        return job.entries + start, (*(one + 1 for one in job.entries), *stop)

    def nbytes(block: Block) -> int:
        return math.prod(block.shape) * itemsize

    def done(block: Block) -> None:
        state.add(*corners(block), number)
        report(nbytes(block))

    itemsize = job.open()[1].dtype.itemsize
    wanted = []
    for block in job.plan:
        if state.holds(*corners(block), number):
            report(nbytes(block))
        else:
            wanted.append(block)
    if needs is None:
        make_blocks(job, wanted, done)
    else:
        needs = replace(needs, target=job.target, block_nbytes=itemsize * sum(job.plan.largest))
        make_blocks_on(client, job, needs, wanted, done)


def _finish(folder: Path, image: NewImage, downsampling: str, kind: str, limit: int | None) -> None:
    """Make the coarser resolutions, where blocks were made."""
    pyramid = Pyramid(image.shapes, image.stored, image.dtype.itemsize)
    # A finer box, the buffers that it is read through, and sums of its pairs.
    nbytes = STEP_BYTES if limit is None else min(STEP_BYTES, limit // 8)
    threads = writing_threads()
    with ThreadPoolExecutor(threads, "linumpy-chunks") as pool:
        levels = [_level(folder, level, pool, threads) for level in range(len(image.shapes))]
        for level, (finer, coarser) in enumerate(itertools.pairwise(levels), 1):
            every = tuple(slice(0, n) for n in image.shapes[level])
            for box in split(every, pyramid.step(level, nbytes >> len(every))):
                block = finer.read(pyramid.finer(level, box), on_device=kind == "cuda")
                factors = pyramid.factors(level)
                if kind == "cuda":
                    coarser.write(box, halve(block, downsampling, factors))
                else:
                    coarser.write(box, halve_by_threads(block, downsampling, pool, threads, factors))


def _level(folder: Path, level: int, pool: ThreadPoolExecutor, threads: int) -> Chunks:
    array = zarr.open_array(local_store(folder / str(level), read_only=False), mode="r+")
    return chunks_of(array.with_config({"write_empty_chunks": True}), pool, threads)
