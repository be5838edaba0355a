"""Makes samplers by the type of volume and the device.

In: a type, a device, and what names the volume. Out: a :class:`~linumpy.sampling.sampler.Sampler`. Errors:
``ValueError`` and ``TypeError`` that name the argument, and what opening the volume gives.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.device import is_device_array, require_cuda
from linumpy.sampling import regular
from linumpy.sampling.arguments import whole
from linumpy.sampling.field import Field
from linumpy.sampling.generator import key_of
from linumpy.sampling.host import HostVolume, check_order
from linumpy.sampling.importance import weights_of
from linumpy.sampling.sampler import Sampler
from linumpy.sampling.volume import DeviceVolume

log = logging.getLogger(__name__)

_HOST = ("cpu", "openvkl")
#: Fields of other formats: module of linumpy.sampling.fields, and the function that opens one.
_OPENERS = {
    "openvdb": ("vdb", "open_vdb"),
    "vtkm": ("vtk_images", "open_vtk"),
    "exabrick": ("amr", "open_exabrick"),
    "exastitch": ("umesh", "open_exastitch"),
}


@dataclass(frozen=True)
class Evaluation:
    """How values are evaluated.

    Attributes
    ----------
    spline_order : int
        0, 1 or 3.
    labels : bool
        Values are int32, of the nearest voxel.
    layout : str or None
        Of a volume on a device.
    memory_limit : int or None
        Bytes that such a layout may take.
    seed : int or None
        Of the stream.
    """

    spline_order: int
    labels: bool
    layout: str | None
    memory_limit: int | None
    seed: int | None


def make_sampler(
    kind: str,
    device: str,
    *,
    seed: int | None,
    order: str,
    spline_order: int,
    interpolation: str,
    labels: bool,
    mask: Any,
    importance: Any,
    strata: int,
    window: int | None,
    layout: str | None,
    memory_limit: int | None,
    source: dict[str, Any],
) -> Sampler:
    """Make a sampler; see :func:`linumpy.sampling.create_sampler`."""
    if interpolation != "exact":
        raise ValueError(f"interpolation={interpolation!r}: give 'exact', which has float32 weights")
    check_order(spline_order)
    if labels and spline_order not in (0, 1):
        raise ValueError(f"spline_order={spline_order} with labels: labels are those of the nearest voxel")
    how = Evaluation(0 if labels else spline_order, labels, layout, memory_limit, seed)
    opener = _opener(kind, device)
    spacing = source.pop("spacing", None) if kind == "structuredRegular" else None
    _check_names(kind, opener, source, skipped=1)
    cupy = require_cuda() if device.startswith("cuda") else None
    number = None if cupy is None else int(cupy.cuda.runtime.getDevice())
    field = opener(how, **source)
    weights = weights_of(field, mask, importance, number)
    if weights is not None and cupy is not None:
        weights = weights.moved(cupy)
    if cupy is not None:
        cupy.cuda.get_current_stream().synchronize()  # so that samples may be drawn on any stream
    return Sampler(
        field,
        device=number,
        seed=seed,
        order=order,
        weights=weights,
        strata=strata,
        window=window,
        spacing=_spacing(spacing),
    )


def _opener(kind: str, device: str) -> Callable[..., Field]:
    name = "cpu" if device in _HOST else device
    table: dict[str, dict[str, Callable[..., Field]]] = {
        "structuredRegular": {
            "cuda": _regular_on_device,
            "cpu": _regular_on_host,
            "virtual_memory": _mapped,
            "out_of_core": _in_slabs,
        },
        "zarr": {"cuda": _zarr_on_device, "cuda_out_of_core": _zarr_pages, "cpu": _zarr_on_host},
    }
    for other in _OPENERS:
        table[other] = dict.fromkeys(("cuda", "cpu"), _other(other))
    if not isinstance(kind, str) or kind not in table:
        raise ValueError(f"type={kind!r}: choose one of {', '.join(table)}")
    if not isinstance(name, str) or name not in table[kind]:
        raise ValueError(f"device={device!r} of type {kind!r}: choose one of {', '.join(table[kind])}")
    return table[kind][name]


def _check_names(kind: str, opener: Callable[..., Field], source: dict[str, Any], skipped: int = 0) -> None:
    """Raise an error that lists the arguments where one is unknown or missing."""
    parameters = list(inspect.signature(opener).parameters.values())[skipped:]
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return
    names = [one.name for one in parameters]
    unknown = [name for name in source if name not in names]
    missing = [one.name for one in parameters if one.default is one.empty and one.name not in source]
    if unknown or missing:
        what = f"unknown argument {unknown[0]!r}" if unknown else f"argument {missing[0]!r} is missing"
        raise TypeError(f"{what}: type {kind!r} takes {', '.join(names)} on this device")


def _other(kind: str) -> Callable[..., Field]:
    module, function = _OPENERS[kind]

    def opener(how: Evaluation, **source: Any) -> Field:
        if how.spline_order != 1 or how.labels or how.layout or how.memory_limit:
            raise ValueError(f"spline_order, labels, layout and memory_limit: type {kind!r} does not take them")
        made: Callable[..., Field] = getattr(importlib.import_module(f"linumpy.sampling.fields.{module}"), function)
        _check_names(kind, made, source)
        return made(**source)

    return opener


def _source_of(
    filename: Any, array: Any, dims: Any, dtype: Any, n_channels: int, offset: int, is_big_endian: bool
) -> regular.RawFile | Any:
    if (filename is None) == (array is None):
        raise ValueError("filename and array: give one of them")
    if filename is not None:
        if dims is None or dtype is None:
            raise ValueError("a file of raw voxels does not say what it holds: give dims=[Dx, Dy, Dz] and dtype=")
        return regular.open_raw(filename, dims, dtype, n_channels, offset, is_big_endian)
    if dims is not None or dtype is not None or n_channels != 1 or offset or is_big_endian:
        raise ValueError("dims, dtype, n_channels, offset and is_big_endian describe a file; an array has them itself")
    return array


def _regular_on_device(
    how: Evaluation,
    filename: Any = None,
    array: Any = None,
    dims: Any = None,
    dtype: Any = None,
    n_channels: int = 1,
    offset: int = 0,
    is_big_endian: bool = False,
    range: Any = None,
) -> Field:
    source = _source_of(filename, array, dims, dtype, n_channels, offset, is_big_endian)
    voxels = source.read() if isinstance(source, regular.RawFile) else regular.as_channels(_array(source))
    return on_device(voxels, regular.check_range(range), how)


def on_device(voxels: Any, low_high: tuple[float, float] | None, how: Evaluation) -> DeviceVolume:
    """Bring voxels (C, Z, Y, X) onto the device and in the form that kernels sample."""
    _check_labels(voxels, how, low_high)
    made, is_normalised = regular.to_device(voxels, low_high, how.labels)
    return DeviceVolume(
        made,
        spline_order=how.spline_order,
        layout=how.layout,
        memory_limit=how.memory_limit,
        low_high=None if is_normalised else low_high,
        value_range=(0.0, 1.0) if low_high else None,
        labels=how.labels,
    )


def _check_labels(voxels: Any, how: Evaluation, low_high: tuple[float, float] | None) -> None:
    if not how.labels:
        return
    if low_high is not None:
        raise ValueError("range with labels: labels are not normalised")
    if voxels.dtype.kind not in "ui":
        raise ValueError(f"labels of dtype {voxels.dtype}: give integers")
    if voxels.dtype.itemsize >= 4 and not -(2**31) <= int(voxels.min()) <= int(voxels.max()) < 2**31:
        raise ValueError(f"labels up to {int(voxels.max())}: they must lie in -2**31 to 2**31 - 1")


def _array(array: Any) -> Any:
    """Take an array of any package as NumPy's or CuPy's."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("array is a masked array: give array.filled(value), and the mask as mask=")
    if isinstance(array, np.ndarray):
        return array.view(np.ndarray)
    if is_device_array(array):
        return array
    if hasattr(array, "__dlpack__"):
        if array.__dlpack_device__()[0] == 1:  # kDLCPU
            return np.from_dlpack(array)
        return require_cuda().from_dlpack(array)
    return np.asarray(array)


def _on_host_only(array: Any) -> np.ndarray:
    made = _array(array)
    if not isinstance(made, np.ndarray):
        raise ValueError("array lies on a device; give device='cuda', or an array of host memory")
    return np.ascontiguousarray(regular.as_channels(made))


def _regular_on_host(
    how: Evaluation,
    filename: Any = None,
    array: Any = None,
    dims: Any = None,
    dtype: Any = None,
    n_channels: int = 1,
    offset: int = 0,
    is_big_endian: bool = False,
    range: Any = None,
) -> Field:
    source = _source_of(filename, array, dims, dtype, n_channels, offset, is_big_endian)
    voxels = source.read() if isinstance(source, regular.RawFile) else _on_host_only(source)
    return on_host(voxels, regular.check_range(range), how)


def on_host(
    voxels: np.ndarray,
    low_high: tuple[float, float] | None,
    how: Evaluation,
    check: Callable[[], None] | None = None,
) -> HostVolume:
    """Sample voxels (C, Z, Y, X) where they are."""
    _check_host(how)
    _check_labels(voxels, how, low_high)
    return HostVolume(voxels, spline_order=how.spline_order, low_high=low_high, labels=how.labels, check=check)


def _check_host(how: Evaluation) -> None:
    if how.layout is not None or how.memory_limit is not None:
        raise ValueError("layout and memory_limit are those of a volume on device 'cuda'")


def _file_and_range(
    filename: Any, dims: Any, dtype: Any, n_channels: int, offset: int, is_big_endian: bool, value_range: Any
) -> tuple[regular.RawFile, tuple[float, float]]:
    source = _source_of(filename, None, dims, dtype, n_channels, offset, is_big_endian)
    low_high = regular.check_range(value_range)
    if low_high is None:
        raise ValueError(
            "range: give the lowest and the highest value, since this device does not read the whole file to find them"
        )
    return source, low_high


def _mapped(
    how: Evaluation,
    filename: Any,
    dims: Any = None,
    dtype: Any = None,
    n_channels: int = 1,
    offset: int = 0,
    is_big_endian: bool = False,
    range: Any = None,
) -> Field:
    source, low_high = _file_and_range(filename, dims, dtype, n_channels, offset, is_big_endian, range)
    if how.spline_order == 3:
        raise ValueError("spline_order=3 needs the whole volume: use device 'cpu' or 'cuda'")
    voxels = source.map()
    made = on_host(voxels, low_high, how, check=functools.partial(source.check_mapped, voxels))
    _tell(source, low_high, "mapped into memory")
    return made


def _in_slabs(
    how: Evaluation,
    filename: Any,
    dims: Any = None,
    dtype: Any = None,
    n_channels: int = 1,
    offset: int = 0,
    is_big_endian: bool = False,
    range: Any = None,
    num_blocks: int | None = None,
    num_concurrent_blocks: int | None = None,
) -> Field:
    from linumpy.sampling.paging.slabs import SlabVolume

    source, low_high = _file_and_range(filename, dims, dtype, n_channels, offset, is_big_endian, range)
    if how.spline_order != 1 or how.labels:
        raise ValueError("spline_order and labels: the device 'out_of_core' interpolates linearly")
    _check_host(how)
    slabs = _setting("num_blocks", num_blocks, "VNR_NUM_BLOCKS", 64)
    made = SlabVolume(
        source,
        low_high,
        slabs=slabs,
        replaced=_setting("num_concurrent_blocks", num_concurrent_blocks, "VNR_NUM_CONCURRENT_BLOCKS", min(16, slabs)),
        key=key_of(how.seed),
    )
    plan = made.plan
    _tell(
        source,
        low_high,
        f"{made.held} of {plan.count} slabs ({plan.z} along z, {plan.y} along y) in memory, "
        f"{made.replaced if made.held < plan.count else 0} replaced after each batch",
    )
    return made


def _setting(argument: str, given: int | None, variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if given is None and text and not (text.isascii() and text.isdigit()):
        raise ValueError(f"{variable}={text!r} in the environment: give a number of slabs")
    return int(text or default) if given is None else whole(argument, given, 1, 2**31, "number of slabs")


def _tell(source: regular.RawFile, low_high: tuple[float, float], cache: str) -> None:
    channels, z, y, x = source.shape
    many = f", {channels} channels" if channels > 1 else ""
    print(f"{source.filename}: {x} × {y} × {z} {source.dtype}{many}, range {low_high[0]:g} to {low_high[1]:g}; {cache}")


def _zarr_on_device(
    how: Evaluation,
    source: Any,
    level: int = 0,
    channel_axis: int | None = None,
    channel: int | None = None,
    time: int | None = None,
    range: Any = None,
) -> Field:
    from linumpy.sampling.paging import zarr_volumes

    volumes, low_high = (
        zarr_volumes.open_channels(source, level, channel_axis, channel, time),
        regular.check_range(range),
    )
    return on_device(zarr_volumes.read_channels_to_gpu(volumes, low_high, how.labels), low_high, how)


def _zarr_on_host(
    how: Evaluation,
    source: Any,
    level: int = 0,
    channel_axis: int | None = None,
    channel: int | None = None,
    time: int | None = None,
    range: Any = None,
) -> Field:
    from linumpy.sampling.paging import zarr_volumes

    volumes = zarr_volumes.open_channels(source, level, channel_axis, channel, time)
    return on_host(zarr_volumes.read_channels(volumes), regular.check_range(range), how)


def _zarr_pages(
    how: Evaluation,
    source: Any,
    level: int = 0,
    channel_axis: int | None = None,
    channel: int | None = None,
    time: int | None = None,
    range: Any = None,
    cache_bytes: int | None = None,
    ahead: int | None = None,
    reader: Any = None,
) -> Field:
    from linumpy.sampling.paging import zarr_volumes

    if how.spline_order != 1 or how.labels or how.layout or how.memory_limit:
        raise ValueError(
            "spline_order, labels, layout, memory_limit: 'cuda_out_of_core' interpolates linearly, in pages"
        )
    volumes = zarr_volumes.open_channels(source, level, channel_axis, channel, time)
    low_high = regular.check_range(range)
    return zarr_volumes.open_pages(
        volumes, low_high=low_high, value_range=None, cache_bytes=cache_bytes, ahead=ahead, reader=reader
    )


def _spacing(given: Any) -> tuple[float, ...] | None:
    if given is None:
        return None
    made = tuple(float(v) for v in given)
    if len(made) != 3 or not all(v > 0 for v in made):
        raise ValueError(f"spacing={given!r}: give three numbers above 0, along x, y and z")
    return made
