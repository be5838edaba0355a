"""Scatter: buffer of stored chunks → result array, on the device.

In: a :class:`~linumpy.plan.read.scatter.ScatterTable` and two device addresses. Out: one kernel launch. Edge crop,
region crop, byte order, axis order, dtype cast and fill values all happen in that launch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.gpu.kernels import KernelSpec, load
from linumpy.plan.layout import MAX_RANK
from linumpy.plan.read.scatter import ScatterTable

_BLOCK = 256
_PER_THREAD = 8  # PER_THREAD of scatter.cu

_CUDA_TYPES = {
    "b1": "bool_bits",
    "i1": "signed char",
    "i2": "short",
    "i4": "int",
    "i8": "long long",
    "u1": "unsigned char",
    "u2": "unsigned short",
    "u4": "unsigned",
    "u8": "unsigned long long",
    "f2": "half_bits",
    "f4": "float",
    "f8": "double",
    "c8": "complex_of<float>",
    "c16": "complex_of<double>",
}


@dataclass(frozen=True)
class Conversion:
    """What happens to an element on its way.

    Attributes
    ----------
    source, target : numpy.dtype
        Stored type and type of the result, both in this machine's byte order.
    swapped : bool
        Whether the stored bytes come in the other order.
    """

    source: np.dtype
    target: np.dtype
    swapped: bool

    @property
    def is_copy(self) -> bool:
        """Whether the bytes arrive as they are stored."""
        return self.source == self.target and not self.swapped


def kernel_spec(conversion: Conversion, table: ScatterTable) -> KernelSpec:
    """Choose the kernel for a table."""
    if not 1 <= table.rank <= MAX_RANK:
        raise ValueError(f"a table of {table.rank} axes: 1 to {MAX_RANK} are scattered")
    if conversion.is_copy:
        return KernelSpec(
            "scatter", "scatter", (("RANK", str(table.rank)), ("COPY_UNIT", str(table.unit))), "linumpy.gpu.read.cuda"
        )
    defines = (
        ("RANK", str(table.rank)),
        ("SOURCE", _CUDA_TYPES[conversion.source.str[1:]]),
        ("TARGET", _CUDA_TYPES[conversion.target.str[1:]]),
        ("SWAP", "true" if conversion.swapped else "false"),
    )
    return KernelSpec("scatter", "scatter", defines, "linumpy.gpu.read.cuda")


def table_words(table: ScatterTable, fill: np.generic) -> np.ndarray:
    """Lay out a table as the kernel reads it.

    Parameters
    ----------
    table : ScatterTable
        The boxes.
    fill : numpy.generic
        Fill value in the dtype of the result.

    Returns
    -------
    numpy.ndarray of int64, (words,)
        Strides, fill value, rows.
    """
    words = np.zeros(16, np.uint8)
    unit = np.frombuffer(np.asarray(fill).tobytes(), np.uint8)
    words[:] = np.resize(unit, 16)  # a unit may hold several elements
    head = [*table.source_strides, *table.target_strides, *words.view(np.int64)]
    return np.concatenate([np.array(head, np.int64), table.rows.reshape(-1)])


def table_nbytes(rank: int, rows: int) -> int:
    """Bytes that :func:`table_words` takes at most."""
    return 8 * (2 * rank + 2 + rows * (2 + rank))


def launch(table: ScatterTable, conversion: Conversion, source: int, target: int, words: int) -> None:
    """Start the kernel on CuPy's current stream.

    Parameters
    ----------
    table : ScatterTable
        The boxes.
    conversion : Conversion
        Element types.
    source, target, words : int
        Device addresses of the buffer, the result, and the table as :func:`table_words` lays it out.
    """
    if not len(table.rows):
        return
    blocks_per_box = -(-table.largest // (_BLOCK * _PER_THREAD))
    kernel = load(kernel_spec(conversion, table))
    grid = (blocks_per_box * len(table.rows),)
    kernel(grid, (_BLOCK,), (np.uint64(source), np.uint64(target), np.uint64(words), np.uint32(blocks_per_box)))
