"""Scatter: decoded chunks of a slab → outputs, on the device, by kernels that the native core launches.

In: types of elements. Out: a :class:`Conversion`, and the specification of its kernel. One launch crops chunks to
regions, changes byte order, axis order and dtype, and writes fill values. It serves all boxes of a slab whose elements
have the same types, also boxes of different outputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec
from linumpy.gpu.read.request import cast_dtype
from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.plan.layout import MAX_RANK

_CUDA_TYPES = CUDA_TYPES | {"b1": "bool_bits", "c8": "complex_of<float>", "c16": "complex_of<double>"}


@dataclass(frozen=True)
class Conversion:
    """The conversion of elements between storage and output.

    `source`, `target`: stored type and type of the output, both in this machine's byte order. `swapped`: whether the
    stored bytes are in the other byte order. `bfloat16`: whether outputs are bfloat16, which NumPy does not have:
    `target` is uint16 and holds the bits.
    """

    source: np.dtype
    target: np.dtype
    swapped: bool
    bfloat16: bool = False

    @property
    def is_copy(self) -> bool:
        """Whether outputs hold the bytes as they are stored."""
        return self.source == self.target and not self.swapped and not self.bfloat16

    @property
    def target_name(self) -> str:
        """Name of the output's dtype, for reports."""
        return "bfloat16" if self.bfloat16 else str(self.target)

    def cast(self, values: np.ndarray) -> np.ndarray:
        """Cast elements on the host, in either byte order."""
        if self.bfloat16:
            return bfloat16_bits(values)
        return cast_elements(values, self.target)

    def fill_bytes(self, fill: np.generic) -> np.ndarray:
        """Cast a fill value to an element of the output, and repeat it over the 16 bytes of the widest unit."""
        value = self.cast(np.asarray(fill)).tobytes()
        return np.frombuffer(value * (16 // len(value)), np.uint8)


@functools.lru_cache(maxsize=256)
def conversion_to(dtype: DTypeLike | None, stored: np.dtype, swapped: bool, on_device: bool) -> Conversion:
    """Return the conversion of stored elements to a dtype, by default to their own."""
    bfloat16 = isinstance(dtype, str) and dtype == "bfloat16"
    if bfloat16 and stored.kind == "c":
        raise TypeError(f"dtype='bfloat16' would drop the imaginary parts of {stored}: read it and take .real or .imag")
    dtype = np.uint16 if bfloat16 else dtype  # which holds the bits
    return Conversion(stored, cast_dtype(stored, dtype, on_device=on_device), swapped, bfloat16)


def kernel_spec(conversion: Conversion, rank: int, unit: int) -> KernelSpec:
    """Choose the kernel for boxes of `rank` axes; elements that are only copied move in units of `unit` bytes."""
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"a table of {rank} axes: 1 to {MAX_RANK} are scattered")
    package = "linumpy.gpu.read.cuda"
    if conversion.is_copy:
        return KernelSpec("scatter", "scatter", (("RANK", str(rank)), ("COPY_UNIT", str(unit))), package)
    defines = (
        ("RANK", str(rank)),
        ("SOURCE", _CUDA_TYPES[conversion.source.str[1:]]),
        ("TARGET", "bfloat16_bits" if conversion.bfloat16 else _CUDA_TYPES[conversion.target.str[1:]]),
        ("SWAP", "true" if conversion.swapped else "false"),
    )
    return KernelSpec("scatter", "scatter", defines, package)
