"""Sample an image on the device by its texture unit: linear, with fractions of a voxel rounded to 1/256.

In: an image of two or three axes, and places, displacements or a map, as for :mod:`~linumpy.gpu.sampling`. Out:
samples. Errors: ``ValueError`` for what a texture cannot hold. The image is copied into a CUDA array, outside of CuPy's
memory pool; the last one of each device is kept for an image of the same shape and dtype, as making one is slow.

A rounded fraction is off by at most 1/512 of a voxel along each axis, and the unit's products of weights by about as
much again: an H200 stays within 1/240 of a voxel. Along an axis a linear interpolation changes by at most the range of
the 2**rank voxels around it from one voxel to the next. So a sample is taken to be within rank / 192 of that range
(:data:`ERROR`). Places outside of the image, between its outermost voxels and what a mode continues them by included,
are sampled exactly.
"""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, index_type, load
from linumpy.gpu.sampling import AffineMap
from linumpy.gpu.sampling_launch import MODES, blocks_of, three

#: By the image's axes: how far a sample may be off, in parts of the range of the voxels around it. float16 (11 bits)
#: and uint16 (17 bits of the whole range) are rounded besides.
ERROR = {2: 2 / 192, 3: 3 / 192}
#: Voxels along an axis: what a texture of three axes can have, and the kernel can round.
LARGEST = 16384
#: What the texture unit interpolates, by NumPy's name: its bits, and whether it is an integer.
_FORMATS = {"u1": (8, True), "u2": (16, True), "f2": (16, False), "f4": (32, False)}

_THREADS, _TILE_X, _MARCH = 256, 16, 4
_TEXTURED_DTYPE = np.dtype(
    [
        *[("count", "i8"), ("outside", "f8"), ("matrix", "f8", (3, 3)), ("shift", "f8", 3)],
        *[("whole", "i4", 3), ("grid", "i4", 3), ("tiles", "i4", 2)],
    ],
    align=True,
)


def check_texture(image: Any, order: int) -> None:
    """Refuse what a texture cannot hold, or the texture unit cannot interpolate."""
    asked = "interpolation='texture'"
    if order != 1:
        raise ValueError(f"{asked} is linear: it needs order=1, not order={order!r}")
    if image.ndim not in ERROR:
        raise ValueError(f"{asked} samples images of 2 or 3 axes, and this one has {image.ndim}")
    if image.dtype.str[1:] not in _FORMATS:
        raise ValueError(f"{asked} samples uint8, uint16, float16 and float32, not {image.dtype}: cast the image first")
    if max(image.shape) > LARGEST:
        raise ValueError(f"{asked} takes up to {LARGEST} voxels along an axis, and the image's shape is {image.shape}")


@dataclass(frozen=True)
class Outside:
    """What lies outside of an image.

    Attributes
    ----------
    mode : str
        One of :data:`~linumpy.gpu.sampling_launch.MODES`.
    cval : float
        The value there, for the constant modes.
    """

    mode: str
    cval: float


def sample_points(image: Any, coordinates: Any, outside: Outside, out: Any) -> None:
    """Sample at given places; arrays as for :func:`linumpy.gpu.sampling.sample_points`."""
    args = _arguments(image, outside, out)
    blocks = (-(-out.size // (_THREADS * _MARCH)),)
    _launch(image, coordinates, outside.mode, out, "0", blocks, args)


def sample_displaced(image: Any, field: Any, sizes: Sequence[float] | None, outside: Outside, out: Any) -> None:
    """Sample at voxels that are displaced; arrays as for :func:`linumpy.gpu.sampling.sample_displaced`."""
    args = _arguments(image, outside, out)
    if sizes is not None:
        args["matrix"][0, 0], args["matrix"][0, 1] = three(sizes, 1), three([1 / size for size in sizes], 1)
    _launch_grid(image, field, outside.mode, out, "1" if sizes is None else "2", args)


def sample_affine(image: Any, affine: AffineMap, outside: Outside, out: Any) -> None:
    """Sample on the grid of an affine map."""
    args = _arguments(image, outside, out)
    first = 3 - image.ndim
    args["matrix"][0, first:, first:], args["shift"][0, first:] = affine.matrix, affine.offset
    _launch_grid(image, image, outside.mode, out, "3", args)


def _arguments(image: Any, outside: Outside, out: Any) -> np.ndarray:
    args = np.zeros(1, _TEXTURED_DTYPE)
    args["count"], args["outside"], args["whole"] = out.size, outside.cval, three(image.shape)
    return args


def _launch_grid(image: Any, given: Any, mode: str, out: Any, places: str, args: np.ndarray) -> None:
    shape = (1,) * (3 - out.ndim) + tuple(out.shape)
    args["grid"] = shape
    blocks, args["tiles"] = blocks_of(shape, (_MARCH, _THREADS // _TILE_X, _TILE_X), image.ndim)
    _launch(image, given, mode, out, places, blocks, args)


def _launch(
    image: Any, given: Any, mode: str, out: Any, places: str, blocks: tuple[int, ...], args: np.ndarray
) -> None:
    if not out.size:
        return
    kernel = load(kernel_spec(image, given, mode, out, places))
    with _texture_of(image) as texture:
        kernel(blocks, (_THREADS,), (texture, image, given, out, args))


def kernel_spec(image: Any, given: Any, mode: str, out: Any, places: str) -> KernelSpec:
    """Describe the kernel; `places` by the number that texture.cu gives them."""
    defines = {
        "SOURCE": CUDA_TYPES[image.dtype.str[1:]],
        "TARGET": CUDA_TYPES[out.dtype.str[1:]],
        "COORDINATE": "float" if places == "3" else CUDA_TYPES[given.dtype.str[1:]],
        "PLACES": places,
        "COMPUTE": "float",
        "WIDE": "0",
        "RANK": str(image.ndim),
        "ORDER": "1",
        "MODE": str(MODES.index(mode)),
        "INDEX": index_type(max(image.size, out.size, given.size)),
        "TILE_X": str(_TILE_X),
        "THREADS": str(_THREADS),
        "MARCH": str(_MARCH),
    }
    return KernelSpec("texture", "sample_by_texture", tuple(defines.items()))


@dataclass(frozen=True)
class _Kept:
    """A CUDA array with its texture, and when it was last used."""

    key: tuple[tuple[int, ...], str]
    array: Any
    texture: Any
    used: Any


_kept: dict[int, _Kept] = {}
_lock = threading.Lock()


def release_textures() -> None:
    """Let go of the device memory that is kept for the next image."""
    with _lock:
        for device in tuple(_kept):
            _let_go(device)


@functools.cache
def _release_at_exit() -> None:
    """See to it that nothing is kept when CUDA ends; called when CuPy is there, so as to come before it."""
    atexit.register(release_textures)


@contextmanager
def _texture_of(image: Any) -> Iterator[Any]:
    """Copy an image into a texture, good for what the current stream is given meanwhile.

    Nothing waits: a stream that takes a kept array over lets the one before it finish first.
    """
    import cupy

    device, stream = int(cupy.cuda.Device().id), cupy.cuda.get_current_stream()
    key = (tuple(image.shape), image.dtype.str[1:])
    with _lock:
        kept = _kept.get(device)
        if kept is None or kept.key != key:
            kept = None
            _let_go(device)  # its memory goes before more is taken
            kept = _kept[device] = _make(*key)
        else:
            stream.wait_event(kept.used)
        try:
            kept.array.copy_from(image, stream)
            yield kept.texture
        finally:
            kept.used.record(stream)


def _let_go(device: int) -> None:
    """Destroy what is kept. CUDA waits for its last use when an array is freed, but not before a texture is."""
    if device in _kept:
        _kept[device].used.synchronize()
        del _kept[device]


def _make(shape: tuple[int, ...], kind: str) -> _Kept:
    import cupy
    from cupy.cuda import runtime
    from cupy.cuda.texture import (
        ChannelFormatDescriptor,
        CUDAarray,
        ResourceDescriptor,
        TextureDescriptor,
        TextureObject,
    )

    _release_at_exit()
    bits, is_integer = _FORMATS[kind]
    number = runtime.cudaChannelFormatKindUnsigned if is_integer else runtime.cudaChannelFormatKindFloat
    channel = ChannelFormatDescriptor(bits, 0, 0, 0, number)
    sizes = shape[::-1]
    try:
        array = CUDAarray(channel, *sizes)
    except runtime.CUDARuntimeError:  # what CuPy's pool holds for later may be what is missing
        cupy.get_default_memory_pool().free_all_blocks()
        array = CUDAarray(channel, *sizes)
    read = runtime.cudaReadModeNormalizedFloat if is_integer else runtime.cudaReadModeElementType
    how = TextureDescriptor((runtime.cudaAddressModeClamp,) * 3, runtime.cudaFilterModeLinear, read)
    texture = TextureObject(ResourceDescriptor(runtime.cudaResourceTypeArray, cuArr=array), how)
    return _Kept((shape, kind), array, texture, cupy.cuda.Event(disable_timing=True))
