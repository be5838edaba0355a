"""A volume in device memory, in a layout of ``volume.cuh``: values at points, and random samples.

In: voxels (C, Z, Y, X) in device memory. Out: values and derivatives at points, by a nearest, linear or cubic spline
with float32 weights. Work is queued on CuPy's current stream. Tests pass NumPy arrays and emulate the kernels.

A tile is the group of samples that a warp evaluates at the same time. A box is a part of the volume whose voxels fit
into shared memory (:mod:`linumpy.sampling.coordinates.boxes`).
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, free_memory, is_device_array
from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, Uploaded, address_of, index_type, int64, load, uploaded
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import BOX_VOXELS, Boxes, Window
from linumpy.sampling.coordinates.draws import NO_ARRAY
from linumpy.sampling.voxel_field import VoxelField, normalisation, normalised

#: Number of each layout in volume.cuh, and size of its copy as a multiple of the volume's size.
LAYOUTS = {"rows": 0, "bricks": 1, "quads": 2, "cells": 3}
_FACTORS = {"rows": 0, "bricks": 1, "quads": 4, "cells": 8}
#: dtypes that kernels sample; voxels of other dtypes are converted to float32, labels to int32.
KEPT = ("u1", "i1", "u2", "i2", "f2", "f4")
_PACKAGE = "linumpy.sampling.cuda"
_THREADS, _WARPS = 256, 8
#: Largest copy of a volume that stays in a GPU's L2 cache.
_CACHED_NBYTES = 40 * 2**20
# Launch parameters, from measurements on an H200.
#: Samples that a lane of the kernel ``sample`` evaluates at the same time.
_GROUPS = 4
#: Minimum number of resident blocks per multiprocessor, which limits registers: of ``sample``, and of ``sample_boxes``.
_BLOCKS, _BOX_BLOCKS = 3, 3
#: Threads of a block of ``sample_boxes``.
_BOX_THREADS = 384
#: Samples of a window are made box by box unless the volume has more voxels per sample than this.
_MAX_VOXELS_PER_SAMPLE = 16
#: Along an axis of this many voxels or more, the addition that rounds a coordinate to its cell is not exact in float32.
_LONG_AXIS = 2**22
#: Least number of samples that a block of threads makes, if its box has as many.
_BLOCK_SAMPLES = 16_384
#: From this number of samples on, a warp makes several tiles one after another: without and with reading ahead.
_MANY_SAMPLES = 2**22
_TILES_PER_WARP, _TILES_PER_WARP_AHEAD = 4, 8
VOLUME_RECORD = np.dtype(
    [
        *[("first", "u8"), ("count", "i8"), ("voxels", "i8"), ("packed", "i8"), ("key", "u4", 2), ("dims", "i4", 3)],
        *[("channels", "i4"), ("march", "i4"), ("aligned", "i4"), ("low", "f4"), ("scale", "f4")],
    ],
    align=True,
)
assert VOLUME_RECORD.itemsize == 72


class DeviceVolume(VoxelField):
    """A volume in device memory.

    `voxels`, (C, Z, Y, X), are C-contiguous, of a dtype of :data:`KEPT`, or int32 for labels. They are not copied for
    spline orders 0 and 1; a cubic spline keeps float32 coefficients instead. For a linear spline, `layout` names a copy
    in which random points cost fewer reads: by default the one with the fewest that fits into `memory_limit` bytes,
    which are a quarter of the free device memory by default; layouts that fit into the L2 cache come first. A box
    in shared memory has at most `box_voxels` voxels.
    """

    def __init__(
        self,
        voxels: Array,
        *,
        spline_order: int = 1,
        layout: str | None = None,
        memory_limit: int | None = None,
        low_high: tuple[float, float] | None = None,
        value_range: tuple[float, float] | None = None,
        labels: bool = False,
        box_voxels: int = BOX_VOXELS,
    ) -> None:
        super().__init__(voxels, spline_order, low_high, value_range, labels, box_voxels)
        self._xp = array_module(voxels)
        self._rows: Array = voxels if spline_order < 3 else self._coefficients(voxels)
        self.layout = self._choose_layout(layout, memory_limit)
        self._packed = self._pack() if LAYOUTS[self.layout] else None
        self._box_indices: Uploaded | None = None

    def _evaluate(self, coords: Array, out: Array, gradient: Array | None) -> None:
        if len(coords):
            self._launch(coords, out, gradient, draw=False)

    def sample(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw independent points and evaluate at them; a linear spline takes a single kernel. Fill both arrays."""
        if self._order != 1:
            draws.launch(draws.Draw(), key, first, coords)
            self.decode(coords, out)
        elif len(coords):
            self._launch(coords, out, None, draw=True, key=key, first=first)

    def sample_window(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        """Make samples of a window; box by box if the window has so many samples that reading all voxels pays."""
        if (
            self._order == 1
            and window.total * _MAX_VOXELS_PER_SAMPLE >= math.prod(self.dims)
            and max(self.dims) < _LONG_AXIS
        ):
            self.sample_boxes(window, begin, coords, out)
        else:
            super().sample_window(window, begin, coords, out)

    def sample_boxes(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        """Make samples of a window from sample `begin` on, box by box, with a linear spline; fill both arrays."""
        if not len(coords):
            return
        if self._box_indices is None:
            indices = self._xp.asarray(_box_indices(window.boxes))
            self._box_indices = uploaded(indices) if is_device_array(indices) else Uploaded(indices, None)
        kernel, nbytes = self._in_boxes
        boxes = window.boxes.count
        parts = min(65535, max(1, window.total // (boxes * _BLOCK_SAMPLES)))
        args = (
            self._rows,
            coords,
            out,
            window.starts,
            self._box_indices.get(),
            *int64(begin),
            window.record,
            self._record(len(coords), coords),
        )
        kernel((boxes, parts), (_BOX_THREADS,), args, shared_mem=nbytes)

    @functools.cached_property
    def _in_boxes(self) -> tuple[Any, int]:
        """The kernel ``sample_boxes``, and the bytes of its dynamic shared memory."""
        defines = self._defines(0) | {
            "FOURS": str(int(self.dims[2] % 4 == 0 and address_of(self._rows) % (4 * self._rows.itemsize) == 0)),
            "THREADS": str(_BOX_THREADS),
            "BLOCKS": str(_BOX_BLOCKS),
        }
        nbytes = 4 * math.prod(self.boxes.voxels(self.dims))
        kernel = load(_spec("sample_boxes", defines))
        # Other volumes, whose boxes may be larger, share the kernel.
        kernel.max_dynamic_shared_size_bytes = max(kernel.max_dynamic_shared_size_bytes, nbytes)
        return kernel, nbytes

    def _coefficients(self, voxels: Array) -> Array:
        from linumpy.gpu.interpolation import spline_filter

        coefficients = self._xp.empty(voxels.shape, np.float32)
        for channel, out in zip(voxels, coefficients, strict=True):
            voxels_in_range = normalised(channel, self._low_high)
            out[...] = spline_filter(voxels_in_range, order=3, output=np.float32, mode="mirror")
        return coefficients

    def _choose_layout(self, layout: str | None, limit: int | None) -> str:
        if layout is not None and layout not in LAYOUTS:
            raise ValueError(f"layout={layout!r}: choose one of {', '.join(LAYOUTS)}")
        if self._order != 1:
            return "rows"
        if layout is not None:
            return layout
        nbytes = self._rows.nbytes
        if limit is None:
            limit = free_memory() // 4 if is_device_array(self._rows) else 0
        fitting = [name for name in ("cells", "quads", "bricks") if nbytes * _FACTORS[name] <= limit]
        cached = [name for name in fitting if nbytes * _FACTORS[name] <= _CACHED_NBYTES]
        return (cached or fitting or ["rows"])[0]

    def _pack(self) -> Array:
        packed = self._xp.empty((self.n_channels, self._packed_size), self._rows.dtype)
        blocks = -(-math.prod(self.dims) // _THREADS)
        kernel = load(_spec("pack", self._defines(LAYOUTS[self.layout])))
        kernel((blocks, self.n_channels), (_THREADS,), (self._rows, packed, self._record(1, None)))
        return packed

    @functools.cached_property
    def _packed_size(self) -> int:
        """Number of elements of a channel of the copy; 0 for the layout ``"rows"``, which has no copy."""
        z, y, x = self.dims
        size = self._rows.itemsize
        if self.layout == "bricks":
            across, down = 4 if size <= 2 else 2, 4 if size == 1 else 2
            return -(-z // 2) * -(-y // down) * -(-x // across) * (32 // size)
        if self.layout == "quads":
            run = 8 // size
            return -(-z // run) * run * y * x * 4
        return z * y * x * 8 if self.layout == "cells" else 0

    def _record(self, count: int, coords: Array | None) -> np.ndarray:
        record = np.zeros((), VOLUME_RECORD)
        record["count"], record["voxels"], record["packed"] = count, math.prod(self.dims), self._packed_size
        record["dims"], record["channels"], record["march"] = self.dims, self.n_channels, 1
        record["aligned"] = coords is not None and address_of(coords) % 16 == 0
        if self._low_high is not None:
            record["low"], record["scale"] = normalisation(*self._low_high)
        return record

    def _defines(self, layout: int) -> dict[str, str]:
        size = max(self._rows[0].size, self._packed_size)
        kind = self._rows.dtype.str[1:]
        normalise = self._low_high is not None and self._order < 3
        return {
            "SOURCE": CUDA_TYPES[kind],
            "INDEX": index_type(size),
            "LAYOUT": str(layout),
            "NORMALISE": str(int(normalise)),
        }

    def _launch(
        self,
        coords: Array,
        out: Array,
        gradient: Array | None,
        *,
        draw: bool,
        key: tuple[int, int] = (0, 0),
        first: int = 0,
    ) -> None:
        count = len(coords)
        record = self._record(count, coords)
        ahead = not draw and count >= _MANY_SAMPLES
        record["first"], record["key"] = first, key
        record["march"] = _TILES_PER_WARP_AHEAD if ahead else _TILES_PER_WARP if count >= _MANY_SAMPLES else 1
        groups = _GROUPS if self._order == 1 else 1
        defines = self._defines(LAYOUTS[self.layout]) | {
            "TARGET": "int" if self._labels else "float",
            "LABELS": str(int(self._labels)),
            "ORDER": str(self._order),
            "DRAW": str(int(draw)),
            "GRADIENT": str(int(gradient is not None)),
            "GROUPS": str(groups),
            "BLOCKS": str(_BLOCKS),
            "LONG": str(int(max(self.dims) >= _LONG_AXIS)),
            "AHEAD": str(int(ahead)),
        }
        blocks = -(-count // (_WARPS * 32 * groups * int(record["march"])))
        packed = NO_ARRAY if self._packed is None else self._packed
        args = (self._rows, packed, coords, out, NO_ARRAY if gradient is None else gradient, record)
        load(_spec("sample", defines))((blocks,), (_THREADS,), args)


def _spec(name: str, defines: dict[str, str]) -> KernelSpec:
    return KernelSpec(name, name, tuple(sorted(defines.items())), _PACKAGE)


def _box_indices(boxes: Boxes) -> np.ndarray:
    """Return a row for each box, as sample_boxes.cu reads it: indices along z, y and x, and halvings of the axes."""
    table = np.empty((boxes.count, 4), np.int32)
    for axis, index in enumerate(boxes.indices(np.arange(boxes.count, dtype=np.int32))):
        table[:, axis] = index
    z, y, x = boxes.halved
    table[:, 3] = z | y << 8 | x << 16
    return table
