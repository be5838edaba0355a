"""Applies a network to an image that is larger than memory: :func:`predict`, from Zarr to Zarr.

In: a model, an image, and the shape of crops. Out: an image of predictions, which appears complete or not at all. A
:class:`~linumpy.stream.Pipeline` reads the crops of a grid ahead. Predictions are blended on the host or the device,
where the model returns them. Planes of whole chunks are written as soon as they are complete. The volume is divided
into *columns*, which span the first axis and are as wide as memory allows; columns are predicted one after another. A
stopped run leaves the complete planes beside the target, and the same call continues from them
(``linumpy.resample.resumable``).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import DTypeLike
from zarr.storage import FsspecStore, ZipStore

from linumpy.arrays import Array, DeviceName
from linumpy.device import Device, free_memory, resolve
from linumpy.errors import SourceError
from linumpy.io.ngff.axes import Spacing
from linumpy.io.output.checks import as_given, check_apart
from linumpy.io.output.folders import drop_partial_files
from linumpy.io.source import Source, describe_source, local_name, path_of, with_options
from linumpy.io.stores.remote import is_remote
from linumpy.io.volume import open_source_volumes
from linumpy.plan.codecs import BY_CODEC
from linumpy.progress import progress_bar
from linumpy.resample.blocks.pipeline import level_chunks, log_fetches
from linumpy.resample.blocks.plans import host_memory
from linumpy.resample.filling import check_space, checked_output, make_coarser_levels, options_of_source
from linumpy.resample.identity import identify_data
from linumpy.resample.resumable import Resumable, resumable_folder
from linumpy.stream.arguments import integer
from linumpy.stream.config import Config, Dtype, Pad
from linumpy.stream.crops.order import Columns
from linumpy.stream.crops.stitch import Blend, CropGrid, Window, cast
from linumpy.stream.errors import ArgumentTypeError, InvalidArgument
from linumpy.stream.pipeline import Pipeline
from linumpy.stream.prediction import Prediction, as_array, name_of
from linumpy.write.chunks import Chunks
from linumpy.write.new_image import NewImage
from linumpy.write.tasks import writing_threads
from linumpy.write.writer import Progress

Model = Callable[[Any], Any]
"""A batch of crops (batch, channel, *crop) → predictions (batch, channel, *crop), or (batch, *crop)."""

#: Default memory for sums of predictions and kept chunks: the free memory over a divisor, and a maximum in bytes.
_MEMORY_DIVISOR, _MAX_MEMORY_NBYTES = 3, 16 * 2**30
_READER_NBYTES = 256 * 2**20


def predict(
    model: Model,
    source: Source,
    out: str | Path,
    *,
    shape: Sequence[int],
    overlap: int | Sequence[int] = 0,
    batch_size: int = 1,
    window: Window = "linear",
    channels: int | None = None,
    argmax: bool = False,
    dtype: DTypeLike | None = None,
    input_dtype: Any = "f32",
    pad: Pad = "reflect",
    chunks: Sequence[int] | None = None,
    shards: Sequence[int] | None = None,
    codec: str | None = None,
    compressors: Any = BY_CODEC,
    levels: int = 1,
    ngff_version: str | None = None,
    level: int = 0,
    channel: int | None = None,
    time: int | None = None,
    spacing: Spacing | None = None,
    model_name: str | None = None,
    device: DeviceName = "auto",
    memory: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
    storage_options: Mapping[str, object] | None = None,
) -> str | Path:
    """Apply a model to all crops of an image of any size, and write its blended predictions as an image.

    Parameters
    ----------
    model : callable
        Takes a batch of crops, (batch, channel, z, y, x), with one channel where the image has no such axis, and
        returns predictions, (batch, channel, z, y, x) or, without `channels`, (batch, z, y, x). A ``torch.nn.Module``
        takes and returns tensors, in evaluation mode and without gradients. Any other callable takes a CuPy array, or a
        NumPy array without a GPU, and returns any array that supports DLPack. The batch is overwritten later.
    source : str, Path, zarr.Array, zarr.Group, Store, StorePath or (Store, str)
        An OME-Zarr image, or an array of two or three axes, with `spacing`; in a local folder, a ZIP file or at a URL.
        Each time is predicted separately; all channels are the model's input.
    out : str or Path
        The image to make: a folder, ``*.ozx``, or a URL (``s3://``, ``gs://``, ``az://``).
    shape : sequence of int
        Voxels of a crop along the axes of space.
    overlap : int or sequence of int
        Minimum number of voxels that neighbouring crops share.
    batch_size : int
        Crops in a batch; the last batch may have fewer.
    window : {"linear", "gaussian", "flat"}
        Weights within a crop in the blending: falling linearly to the faces, a Gaussian with a standard deviation of an
        eighth of the crop's size, or all equal. The weights of all crops add up to 1 at every voxel.
    channels : int, optional
        Number of channels that the model returns, which become the axis c of the image; by default predictions have no
        such axis.
    argmax : bool
        Whether to write labels, without axis c: the channel that is largest after blending.
    dtype : dtype, optional
        Dtype of the image: by default float32, or for labels uint8, with more than 256 channels uint16. Integers are
        rounded and saturated.
    input_dtype : {"f32", "f16", "stored"}
        Dtype of the model's batches.
    pad : {"reflect", "edge", "constant"}
        Continuation of an image that is smaller than a crop; ``"constant"`` by zeros.
    chunks, shards, codec, compressors, levels, ngff_version
        Storage of the image, as for :class:`linumpy.write.writer.OmeZarrWriter`; `chunks` and `shards` along the axes
        of space. Voxels of coarser levels are means, or for labels the most frequent label.
    level, channel, time : int
        Resolution level of the source, and the channel and time to select, counted from 0; by default all.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of the source's level 0 in µm, where its metadata has none.
    model_name : str, optional
        Identifies the model when a stopped run is continued. By default the name of the function or class. A digest of
        the model's ``state_dict()``, for a method of the object's ``state_dict()``, is appended if there is one.
    device : {"auto", "cuda", "cpu"}
        Device of batches and sums.
    memory : int, optional
        Limit in bytes of sums of predictions, planes that are being written, and decoded chunks of the source that
        following crops need again; by default a third of the free memory, at most 16 GiB. With less memory the image is
        made in more columns, and a crop that touches several columns is read and predicted again for each column. A
        column that is one chunk (or shard) wide is made even if it takes more memory. Each chunk of the source is
        fetched once if the crops at one position along the first axis fit: their sums, and the chunks that they touch.
        The log says how many chunks were fetched, at level INFO.
    overwrite, durable, progress, storage_options
        As for :func:`linumpy.resample_zarr`.

    Returns
    -------
    Path, or str for a URL
        `out`.

    Raises
    ------
    InvalidArgument
        A crop, overlap, window, dtype or number of channels does not fit, or predictions have another shape or are no
        real numbers.
    FileNotFoundError, SourceError, MetadataError, ValueError, TypeError, FileExistsError, ResumeError
        As for :func:`linumpy.resample_zarr`; SourceError also where the source changed during the run.
    StreamError
        A crop cannot be read; the message names it.

    Notes
    -----
    Names, units, coordinates along t and attributes of other programs are carried over; labels and the display settings
    of channels are not. The group's attribute ``"linumpy"`` holds the names of source and model, and the crop.

    Examples
    --------
    >>> import linumpy.stream as stream
    >>> options = {"shape": (64, 128, 128), "overlap": 32, "channels": 2, "argmax": True}
    >>> stream.predict(net, "brain.ome.zarr", "mask.ome.zarr", **options)  # doctest: +SKIP
    """
    target, ngff_version = checked_output(out, ngff_version, storage_options)
    source_options = options_of_source(source, target, storage_options)
    volumes = open_source_volumes(with_options(source, source_options), level, channel, time, spacing)
    array = volumes.first.array
    check_apart([target], [source if isinstance(source, (str, Path)) else array, path_of(array) or array])
    count = None if channels is None else integer("channels", channels, 1)
    if argmax and count is None:
        raise InvalidArgument("argmax needs the number of channels that the model returns: channels=")
    if 0 in volumes.first.shape:
        raise InvalidArgument(f"{describe_source(array)} has no voxels: its shape is {array.shape}")
    grid = CropGrid(_address(array), shape, overlap, volume=volumes.first.shape)
    target_device = resolve(device)
    if not callable(model):
        raise ArgumentTypeError(f"model must be callable (got {type(model).__name__})")
    limit = None if memory is None else integer("memory", memory, 1)
    task = Prediction(volumes, grid, window, count, argmax, name_of(model) if model_name is None else model_name)
    image = task.plan(
        dtype, name=target.name, chunks=chunks, shards=shards, codec=codec, compressors=compressors, levels=levels,
        ngff_version=ngff_version,
    )  # fmt: skip
    check_space(target, image.nbytes, encoded=image.compressors is not None)
    on_device = target_device.xp.cuda.Device(target_device.index) if target_device.is_cuda else nullcontext()
    if limit is None:
        with on_device:
            free = free_memory() if target_device.is_cuda else host_memory()
        limit = min(free // _MEMORY_DIVISOR, _MAX_MEMORY_NBYTES)
    config = _config(task, integer("batch_size", batch_size, 1), input_dtype, pad, target_device, source_options)
    columns = task.columns(image.stored[0][len(task.leading) :], limit)
    config = replace(config, cache_bytes=columns.cache_bytes)
    request = task.request(image, config)
    with resumable_folder(target, request, image.create, overwrite=overwrite, durable=durable) as state:
        task.carried.log_dropped(volumes.name, target)
        bar = progress_bar("predict", math.prod(image.shapes[0]) * image.dtype.itemsize, instead=progress)
        with bar as report, on_device, _evaluating(model) as call:
            _PredictionRun(task, image, state, call, report, target_device).run(config, columns)
            make_coarser_levels(state.folder, image, target_device.kind)
        drop_partial_files(state.folder)
        if dict(request.origin)["source data"] != (identify_data(array) or dict(request.origin)["source data"]):
            raise SourceError(
                f"{describe_source(array)} was changed while it was predicted, so that the result may mix two versions "
                "of it and is not kept: run again once it is complete"
            )
    return as_given(out, target)


class _PredictionRun:
    """A run of :func:`predict`: reads batches of crops, calls the model, blends, and writes planes of level 0."""

    def __init__(
        self, task: Prediction, image: NewImage, state: Resumable, call: Model, report: Progress, device: Device
    ) -> None:
        self._task, self._image, self._state, self._call = task, image, state, call
        self._report, self._xp = report, device.xp
        self._units = image.stored[0][len(task.leading) :]  # shape of a chunk (or shard) along the axes of space

    def run(self, config: Config, columns: Columns) -> None:
        """Predict and write the missing planes, column by column; log how often chunks were fetched."""
        threads = writing_threads(self._state.folder)
        with ThreadPoolExecutor(threads, "linumpy-chunks") as pool:
            chunks = level_chunks(self._state.folder / "0", pool, threads)
            blends = [
                (time, self._blend(chunks, time, box))
                for time in self._task.times
                for box in self._boxes(time, columns.widths)
            ]
            order = ((blend, index) for _, blend in blends for index in blend.indices())
            with closing(Pipeline(config)) as pipeline:
                pipeline.push(self._task.sample(time, index) for time, blend in blends for index in blend.indices())
                for batch in pipeline.batches():
                    with batch as tensor:
                        predictions = self._predictions(tensor.array)
                        crops = list(itertools.islice(order, len(predictions)))
                        for (blend, index), prediction in zip(crops, predictions, strict=True):
                            blend.add(index, prediction)
                            blend.write_complete()
                fetched = pipeline.stats.chunks_fetched
        log_fetches(self._task.volumes.name, fetched, self._task.chunk_count)

    def _boxes(self, time: int | None, widths: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
        """Divide the volume of a time into columns; yield the missing planes of each column."""
        shape, units = self._task.grid.volume, self._units
        sides = [range(0, n, width) for n, width in zip(shape[1:], widths, strict=True)]
        for corner in itertools.product(*sides):
            across = tuple(slice(a, min(a + side.step, n)) for a, side, n in zip(corner, sides, shape[1:], strict=True))
            complete = self._state.grids[0][self._stored_parts(time, (slice(0, shape[0]), *across))]
            axes = tuple(axis for axis in range(complete.ndim) if axis != len(self._task.leading))
            planes = np.asarray(complete.all(axis=axes))
            done = len(planes) if planes.all() else int(planes.argmin())
            begin = min(done * units[0], shape[0])
            self._report(self._nbytes((slice(0, begin), *across)))
            if begin < shape[0]:
                yield (slice(begin, shape[0]), *across)

    def _stored_parts(self, time: int | None, box: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return the indices of the chunks (or shards) of a box in space, with all channels."""
        lead = () if time is None else (slice(time, time + 1),)
        lead = lead if self._task.output_channels is None else (*lead, slice(0, self._task.output_channels))
        inner = (slice(s.start // unit, -(-s.stop // unit)) for s, unit in zip(box, self._units, strict=True))
        return (*lead, *inner)

    def _nbytes(self, box: tuple[slice, ...]) -> int:
        voxels = math.prod(side.stop - side.start for side in box)
        return voxels * (self._task.output_channels or 1) * self._image.dtype.itemsize

    def _blend(self, chunks: Chunks, time: int | None, box: tuple[slice, ...]) -> Blend:
        def write(region: tuple[slice, ...], block: Array) -> None:
            dtype = self._image.dtype
            voxels = block.argmax(axis=0).astype(dtype) if self._task.argmax else cast(block, dtype)
            stored = self._stored_parts(time, region)
            lead = stored[: len(stored) - len(region)]
            shape = tuple(side.stop - side.start for side in (*lead, *region))
            chunks.start((*lead, *region), voxels.reshape(shape))()
            self._state.add([side.start for side in stored], [side.stop for side in stored])
            self._report(self._nbytes(region))

        return Blend(self._task.grid, write, self._task.window, self._units[0], box)

    def _predictions(self, batch: Array) -> Array:
        """Call the model, and check its predictions."""
        axis = self._task.channel_axis()
        crops = batch[:, None] if axis is None else self._xp.moveaxis(batch, 1 + axis, 1)
        result = as_array(self._call(crops), self._xp)
        count = () if self._task.channels is None else (self._task.channels,)
        expected = (len(batch), *count, *self._task.grid.shape)
        if tuple(result.shape) != expected:
            hint = "" if count else "; channels= says how many channels it returns"
            raise InvalidArgument(f"the model returned shape {tuple(result.shape)}, expected {expected}{hint}")
        if result.dtype.kind not in "biuf":
            raise InvalidArgument(f"the model returned {result.dtype}, expected real numbers")
        return result


def _config(
    task: Prediction, batch_size: int, dtype: object, pad: Pad, device: Device, options: Mapping[str, object] | None
) -> Config:
    """Configure a pipeline with memory for four batches, and as much for staged crops, which reach out of the image."""
    try:
        kind = Dtype.coerce(dtype)
    except InvalidArgument:
        kind = Dtype.BF16
    if kind is Dtype.BF16:
        raise InvalidArgument(f"input_dtype must be f32, f16 or stored, since NumPy has no bfloat16 (got {dtype!r})")
    itemsize = kind.numpy(task.volumes.first.dtype).itemsize
    voxels = batch_size * task.input_channels * math.prod(task.grid.shape)
    nbytes = voxels * max(itemsize, task.volumes.first.dtype.itemsize)
    return Config(
        batch_size=batch_size,
        host_buffer_bytes=_READER_NBYTES,
        device_buffer_bytes=8 * nbytes + 2**20,
        dtype=kind,
        pad=pad,
        device=device.index if device.is_cuda else "cpu",
        storage_options=options,
    )


def _address(array: zarr.Array) -> str:
    """Return the path or URL by which the pipeline opens the array; raise SourceError if there is none."""
    if isinstance(array.store, ZipStore):
        return f"{array.store.path}/{array.path}".rstrip("/")
    if isinstance(array.store, FsspecStore):
        return f"{array.store.fs.unstrip_protocol(array.store.path)}/{array.path}".rstrip("/")
    address = path_of(array) or describe_source(array)
    if local_name(address) is None and not is_remote(address):
        raise SourceError(
            f"{address} cannot be opened a second time: predict takes arrays in local folders and ZIP files, and URLs"
        )
    return address


@contextmanager
def _evaluating(model: Model) -> Iterator[Model]:
    """Yield a callable that takes arrays: the model itself, or for a PyTorch module a function that converts by DLPack.

    In the ``with`` block the module is in evaluation mode, without gradients.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        yield model
        return
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            yield lambda batch: model(torch.from_dlpack(batch))
    finally:
        model.train(was_training)
