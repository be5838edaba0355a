"""Scatter: staged chunks → outputs, on the device.

In: :class:`~linumpy.plan.read.scatter.ScatterTable` records. Out: kernel launches on CuPy's current stream. Edge crop,
region crop, byte order, axis order, dtype cast and fill values all happen in one launch for all boxes of a slab whose
elements have the same types, whatever outputs they go to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from linumpy.gpu.kernels import CUDA_TYPES, KernelSpec, load
from linumpy.gpu.rounding import bfloat16_bits, cast_elements
from linumpy.plan.layout import MAX_RANK
from linumpy.plan.read.scatter import ScatterTable, joined

_BLOCK = 256
_PER_THREAD = 8  # PER_THREAD of scatter.cu
_ALIGN = 16

_CUDA_TYPES = CUDA_TYPES | {"b1": "bool_bits", "c8": "complex_of<float>", "c16": "complex_of<double>"}


@dataclass(frozen=True)
class Conversion:
    """What happens to an element between storage and output.

    Attributes
    ----------
    source, target : numpy.dtype
        Stored type and type of the output, both in this machine's byte order.
    swapped : bool
        Whether the stored bytes come in the other order.
    bfloat16 : bool
        Whether outputs are bfloat16, which NumPy does not have: `target` is uint16, and holds their bits.
    """

    source: np.dtype
    target: np.dtype
    swapped: bool
    bfloat16: bool = False

    @property
    def is_copy(self) -> bool:
        """Whether the bytes arrive as they are stored."""
        return self.source == self.target and not self.swapped and not self.bfloat16

    @property
    def target_name(self) -> str:
        """Name of the outputs' type."""
        return "bfloat16" if self.bfloat16 else str(self.target)

    def cast(self, values: np.ndarray) -> np.ndarray:
        """Cast elements on the host, those in the stored byte order too."""
        if self.bfloat16:
            return bfloat16_bits(values)
        return cast_elements(values, self.target)

    def fill_bytes(self, fill: np.generic) -> np.ndarray:
        """Repeat a fill value, as an element of an output, over the 16 bytes of the widest unit."""
        value = self.cast(np.asarray(fill)).tobytes()
        return np.frombuffer(value * (16 // len(value)), np.uint8)


@dataclass(frozen=True, eq=False)
class ScatterLaunch:
    """One launch of the scatter kernel.

    Attributes
    ----------
    spec : KernelSpec
        The kernel.
    words : numpy.ndarray of int64
        Headers and rows.
    first_row : int
        Word where the rows begin.
    rows : int
        Boxes.
    largest : int
        Units of the largest box.
    """

    spec: KernelSpec
    words: np.ndarray
    first_row: int
    rows: int
    largest: int

    @property
    def nbytes(self) -> int:
        """Bytes of the words, up to where those of the next launch may begin."""
        return -(-self.words.nbytes // _ALIGN) * _ALIGN

    def moved(self, nbytes: int) -> ScatterLaunch:
        """Shift the outputs by so many bytes, a multiple of the widest unit."""
        words = self.words.copy()
        words[self.first_row + 1 :: (len(words) - self.first_row) // self.rows] += nbytes
        return ScatterLaunch(self.spec, words, self.first_row, self.rows, self.largest)

    def start(self, source: int, words: int) -> None:
        """Start the kernel on CuPy's current stream; the arguments are device addresses of the slab and the words."""
        blocks_per_box = -(-self.largest // (_BLOCK * _PER_THREAD))
        args = (np.uint64(source), np.uint64(words), np.uint64(words + 8 * self.first_row), np.uint32(blocks_per_box))
        load(self.spec)((blocks_per_box * self.rows,), (_BLOCK,), args)


def kernel_spec(conversion: Conversion, rank: int, unit: int) -> KernelSpec:
    """Choose the kernel for boxes of so many axes, moved in units of so many bytes."""
    if not 1 <= rank <= MAX_RANK:
        raise ValueError(f"a table of {rank} axes: 1 to {MAX_RANK} are scattered")
    package = "linumpy.gpu.staging.cuda"
    if conversion.is_copy:
        return KernelSpec("scatter", "scatter", (("RANK", str(rank)), ("COPY_UNIT", str(unit))), package)
    defines = (
        ("RANK", str(rank)),
        ("SOURCE", _CUDA_TYPES[conversion.source.str[1:]]),
        ("TARGET", "bfloat16_bits" if conversion.bfloat16 else _CUDA_TYPES[conversion.target.str[1:]]),
        ("SWAP", "true" if conversion.swapped else "false"),
    )
    return KernelSpec("scatter", "scatter", defines, package)


def plan_scatter(tables: list[tuple[Conversion, ScatterTable]]) -> list[ScatterLaunch]:
    """Plan the launches for tables of any types: one for all those whose elements have the same."""
    kinds: dict[object, list[tuple[Conversion, ScatterTable]]] = {}
    for conversion, table in tables:
        if len(table):
            key = ("copy", table.source_itemsize) if conversion.is_copy else conversion
            kinds.setdefault(key, []).append((conversion, table))
    launches = []
    for alike in kinds.values():
        table = joined([one for _, one in alike])
        unit = table.unit
        words, first_row, largest = table.words(unit)
        launches.append(
            ScatterLaunch(kernel_spec(alike[0][0], table.rank, unit), words, first_row, len(table), largest)
        )
    return launches
