"""Make a sampler for a type of volume and a device.

In: the arguments of :func:`linumpy.sampling.create_sampler`. Out: a :class:`~linumpy.sampling.sampler.Sampler`. Errors:
``ValueError`` and ``TypeError`` that name the argument, ``GpuUnavailableError``, and the errors of opening the volume.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.checks import integer
from linumpy.device import require_cuda, to_host
from linumpy.sampling.coordinates.draws import Draw, weighted
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.field import Field
from linumpy.sampling.host import HostVolume
from linumpy.sampling.raw_voxels import RawFile, check_range, to_device
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.sources import FileSource, PagedSource, Range, RawSource, SlabSource, ZarrSource
from linumpy.sampling.volume import DeviceVolume
from linumpy.sampling.voxel_field import check_spline_order

#: Points along each axis at which ``importance="gradient"`` evaluates the field.
_GRADIENT_POINTS = 96
#: Names of the device in host memory.
_HOST_NAMES = ("cpu", "openvkl")
#: For each type of another program: the module of linumpy.sampling.fields, and the function that opens a field.
_OPENERS = {
    "openvdb": ("vdb", "open_vdb"),
    "vtkm": ("vtk_images", "open_vtk"),
    "exabrick": ("amr", "open_exabrick"),
    "exastitch": ("umesh", "open_exastitch"),
}


@dataclass(frozen=True)
class Evaluation:
    """How values are evaluated; attributes are parameters of :func:`linumpy.sampling.create_sampler`."""

    spline_order: int
    labels: bool
    layout: str | None
    memory_limit: int | None
    seed: int | None


@dataclass(frozen=True)
class Drawing:
    """How coordinates are drawn; attributes are parameters of :func:`linumpy.sampling.create_sampler`."""

    order: str
    mask: Array | None
    importance: Array | str | None
    strata: int
    window: int | None


#: The class of the arguments that describe a volume, and the function that makes a field from such a record.
Opener = tuple[Callable[..., Any], Callable[[Evaluation, Any], Field]]


def make_sampler(
    kind: str, device: str, evaluation: Evaluation, drawing: Drawing, source: dict[str, Any], interpolation: str
) -> Sampler:
    """Make a sampler; see :func:`linumpy.sampling.create_sampler`."""
    if interpolation != "exact":
        raise ValueError(f"interpolation={interpolation!r}: give 'exact', which has float32 weights")
    check_spline_order(evaluation.spline_order)
    if evaluation.labels and evaluation.spline_order not in (0, 1):
        raise ValueError(f"spline_order={evaluation.spline_order} with labels: labels are those of the nearest voxel")
    evaluation = dataclasses.replace(evaluation, spline_order=0 if evaluation.labels else evaluation.spline_order)
    record, opener = _opener(kind, device)
    spacing = source.pop("spacing", None) if kind in _VOXELS else None
    steps = None if spacing is None else tuple(float(step) for step in spacing)
    if steps is not None and (len(steps) != 3 or not all(step > 0 for step in steps)):
        raise ValueError(f"spacing={spacing!r}: give three numbers above 0, along x, y and z")
    _check_names(kind, record, source)
    cupy = require_cuda() if device.startswith("cuda") else None
    number = None if cupy is None else int(cupy.cuda.runtime.getDevice())
    field = opener(evaluation, record(**source))
    weights = weights_of(field, drawing.mask, drawing.importance, number)
    if weights is not None and cupy is not None:
        weights = weights.moved(cupy)
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()  # so that samples may be drawn on any stream
    return Sampler(
        field,
        device=number,
        seed=evaluation.seed,
        order=drawing.order,
        weights=weights,
        strata=drawing.strata,
        window=drawing.window,
        spacing=steps,
    )


def _opener(kind: str, device: str) -> Opener:
    name = "cpu" if device in _HOST_NAMES else device
    devices = {voxels: tuple(openers) for voxels, openers in _VOXELS.items()} | dict.fromkeys(_OPENERS, ("cuda", "cpu"))
    if not isinstance(kind, str) or kind not in devices:
        raise ValueError(f"type={kind!r}: choose one of {', '.join(devices)}")
    if not isinstance(name, str) or name not in devices[kind]:
        raise ValueError(f"device={device!r} of type {kind!r}: choose one of {', '.join(devices[kind])}")
    return _format_opener(kind) if kind in _OPENERS else _VOXELS[kind][name]


def _format_opener(kind: str) -> Opener:
    module, function = _OPENERS[kind]
    open_field = getattr(importlib.import_module(f"linumpy.sampling.fields.{module}"), function)

    @functools.wraps(open_field)  # _check_names reads the argument names from the signature
    def source(**arguments: object) -> Callable[[], Field]:
        return functools.partial(open_field, **arguments)

    def opener(evaluation: Evaluation, open_source: Callable[[], Field]) -> Field:
        if evaluation.spline_order != 1 or evaluation.labels or evaluation.layout or evaluation.memory_limit:
            raise ValueError(f"spline_order, labels, layout and memory_limit: type {kind!r} does not take them")
        return open_source()

    return source, opener


def _check_names(kind: str, record: Callable[..., object], source: dict[str, object]) -> None:
    """Refuse an unknown or missing argument; the error lists all arguments of the type."""
    parameters = inspect.signature(record).parameters
    unknown = [name for name in source if name not in parameters]
    missing = [name for name, entry in parameters.items() if entry.default is entry.empty and name not in source]
    if unknown or missing:
        problem = f"unknown argument {unknown[0]!r}" if unknown else f"argument {missing[0]!r} is missing"
        raise TypeError(f"{problem}: type {kind!r} takes {', '.join(parameters)} on this device")


def _mapped(evaluation: Evaluation, source: FileSource) -> Field:
    file, low_high = source.file(), source.needed_range()
    if evaluation.spline_order == 3:
        raise ValueError("spline_order=3 needs the whole volume: use device 'cpu' or 'cuda'")
    voxels = file.map()
    volume = on_host(voxels, low_high, evaluation, check=functools.partial(file.check_mapped, voxels))
    _print_source(file, low_high, "mapped into memory")
    return volume


def _in_slabs(evaluation: Evaluation, source: SlabSource) -> Field:
    from linumpy.sampling.paging.slabs import SlabVolume

    file, low_high = source.file(), source.needed_range()
    if evaluation.spline_order != 1 or evaluation.labels:
        raise ValueError("spline_order and labels: the device 'out_of_core' interpolates linearly")
    _check_host(evaluation)
    slabs = _setting("num_blocks", source.num_blocks, "VNR_NUM_BLOCKS", 64)
    replaced = _setting(
        "num_concurrent_blocks", source.num_concurrent_blocks, "VNR_NUM_CONCURRENT_BLOCKS", min(16, slabs)
    )
    volume = SlabVolume(file, low_high, slabs=slabs, replaced=replaced, key=key_of(evaluation.seed))
    plan = volume.plan
    _print_source(
        file,
        low_high,
        f"{volume.held} of {plan.count} slabs ({plan.z} along z, {plan.y} along y) in memory, "
        f"{volume.replaced if volume.held < plan.count else 0} replaced after each batch",
    )
    return volume


def _zarr_on_device(evaluation: Evaluation, source: ZarrSource) -> Field:
    from linumpy.sampling import zarr_volumes

    volumes, low_high = zarr_volumes.open_channels(source), check_range(source.range)
    return on_device(zarr_volumes.read_channels_to_gpu(volumes, low_high, evaluation.labels), low_high, evaluation)


def _zarr_on_host(evaluation: Evaluation, source: ZarrSource) -> Field:
    from linumpy.sampling import zarr_volumes

    voxels = zarr_volumes.read_channels(zarr_volumes.open_channels(source))
    return on_host(voxels, check_range(source.range), evaluation)


def _zarr_pages(evaluation: Evaluation, source: PagedSource) -> Field:
    from linumpy.sampling import zarr_volumes

    if evaluation.spline_order != 1 or evaluation.labels or evaluation.layout or evaluation.memory_limit:
        raise ValueError(
            "spline_order, labels, layout, memory_limit: 'cuda_out_of_core' interpolates linearly, in pages"
        )
    return zarr_volumes.open_pages(source)


_VOXELS: dict[str, dict[str, Opener]] = {
    "structuredRegular": {
        "cuda": (RawSource, lambda given, source: on_device(source.voxels(), check_range(source.range), given)),
        "cpu": (RawSource, lambda given, source: on_host(source.host_voxels(), check_range(source.range), given)),
        "virtual_memory": (FileSource, _mapped),
        "out_of_core": (SlabSource, _in_slabs),
    },
    "zarr": {
        "cuda": (ZarrSource, _zarr_on_device),
        "cuda_out_of_core": (PagedSource, _zarr_pages),
        "cpu": (ZarrSource, _zarr_on_host),
    },
}


def on_device(voxels: Array, low_high: Range | None, evaluation: Evaluation) -> DeviceVolume:
    """Make a field in device memory from voxels (C, Z, Y, X); only a CuPy array of a fitting dtype is not copied."""
    _check_labels(voxels, evaluation, low_high)
    device_voxels, is_normalised = to_device(voxels, low_high, evaluation.labels)
    return DeviceVolume(
        device_voxels,
        spline_order=evaluation.spline_order,
        layout=evaluation.layout,
        memory_limit=evaluation.memory_limit,
        low_high=None if is_normalised else low_high,
        value_range=(0.0, 1.0) if low_high else None,
        labels=evaluation.labels,
    )


def _check_labels(voxels: Array, evaluation: Evaluation, low_high: Range | None) -> None:
    if not evaluation.labels:
        return
    if low_high is not None:
        raise ValueError("range with labels: labels are not normalised")
    if voxels.dtype.kind not in "ui":
        raise ValueError(f"labels of dtype {voxels.dtype}: give integers")
    if voxels.dtype.itemsize >= 4 and not -(2**31) <= int(voxels.min()) <= int(voxels.max()) < 2**31:
        raise ValueError(f"labels up to {int(voxels.max())}: they must lie in -2**31 to 2**31 - 1")


def on_host(
    voxels: np.ndarray,
    low_high: Range | None,
    evaluation: Evaluation,
    check: Callable[[], None] | None = None,
) -> HostVolume:
    """Make a field from voxels (C, Z, Y, X) in host memory; a cubic spline copies them, other orders do not."""
    _check_host(evaluation)
    _check_labels(voxels, evaluation, low_high)
    return HostVolume(
        voxels, spline_order=evaluation.spline_order, low_high=low_high, labels=evaluation.labels, check=check
    )


def _check_host(evaluation: Evaluation) -> None:
    if evaluation.layout is not None or evaluation.memory_limit is not None:
        raise ValueError("layout and memory_limit: only a volume on device 'cuda' has them")


def _setting(argument: str, value: int | None, variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if value is None and text:
        if not (text.isascii() and text.isdigit()):
            raise ValueError(f"{variable}={text!r} in the environment: give a number of slabs")
        argument, value = f"in the environment {variable}", int(text)
    return default if value is None else integer(argument, value, 1, 2**31, meaning="the number of slabs")


def _print_source(file: RawFile, low_high: Range, cache: str) -> None:
    channels, z, y, x = file.shape
    suffix = f", {channels} channels" if channels > 1 else ""
    place = f"{file.nbytes} bytes from byte {file.offset}"
    values = f"range {low_high[0]:g} to {low_high[1]:g}"
    print(f"{file.filename}: {x} × {y} × {z} {file.dtype}{suffix}, {place}, {values}; {cache}")


def weights_of(field: Field, mask: Array | None, importance: Array | str | None, device: int | None) -> Draw | None:
    """Return how points are drawn by `mask` or `importance`; None if both are None: points are uniform."""
    if mask is not None and importance is not None:
        raise ValueError("mask and importance: give one of them, such as importance=density * mask")
    if mask is not None:
        voxels = to_host(mask)
        if voxels.dtype.kind == "f" and np.isnan(voxels).any():
            raise ValueError("mask holds NaN, which is neither inside nor outside: give 0 or another number")
        return weighted(voxels != 0)
    if importance is None:
        return None
    if isinstance(importance, str):
        if importance != "gradient":
            raise ValueError(f"importance={importance!r}: give 'gradient' or a density (Z, Y, X)")
        return weighted(gradient_density(field, device))
    return weighted(to_host(importance).astype(np.float64))


def gradient_density(field: Field, device: int | None, points: int = _GRADIENT_POINTS) -> np.ndarray:
    """Compute the mean gradient magnitude of a field in each cell of a grid: (points / 4,) * 3, (Z, Y, X).

    The field is evaluated at `points` points along each axis, a multiple of 4. A tenth of the mean of all cells (1 for
    a constant field) is added, so that every cell is sampled.
    """
    axis = (np.arange(points, dtype=np.float32) + np.float32(0.5)) / np.float32(points)
    z, y, x = np.meshgrid(axis, axis, axis, indexing="ij")
    coords = np.stack([x, y, z], -1).reshape(-1, 3)
    values = np.empty((field.n_channels, len(coords)), field.values_dtype)
    if device is None:
        field.decode(coords, values)
    else:
        cupy = require_cuda()
        values_on_device = cupy.empty(values.shape, values.dtype)
        field.decode(cupy.asarray(coords), values_on_device)
        values = values_on_device.get()
    grids = np.nan_to_num(values.astype(np.float64)).reshape(-1, points, points, points)
    slopes = np.sqrt(sum(np.square(slope) for grid in grids for slope in np.gradient(grid)))
    coarse = slopes.reshape(points // 4, 4, points // 4, 4, points // 4, 4).mean((1, 3, 5))
    return coarse + (coarse.mean() * 0.1 or 1.0)
