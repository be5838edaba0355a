"""Class counts in the cells of labels or a mask: array → :class:`Histogram`, which can be saved to a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from linumpy.io.open import open_source
from linumpy.stream.errors import InvalidArgument


@dataclass(frozen=True)
class Histogram:
    """Number of voxels of each class in each cell of an array. Cells are the array's chunks, or have another shape.

    Attributes
    ----------
    shape, cell : tuple of int
        Shape of the array, and of a cell; the last cell of an axis may be shorter.
    classes : numpy.ndarray
        Values of the classes without `background`, ascending.
    cells : numpy.ndarray
        Indices, in C order, of the cells that hold any class but `background`; ascending.
    counts : numpy.ndarray of int64
        Number of voxels, (cells, classes).
    background : int
        Class that is not counted, so that no crop is centred on it.

    Raises
    ------
    InvalidArgument
        Shapes, cells and counts do not match.
    """

    shape: tuple[int, ...]
    cell: tuple[int, ...]
    classes: np.ndarray
    cells: np.ndarray
    counts: np.ndarray
    background: int = 0

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.cell) or min((*self.shape, *self.cell), default=0) < 1:
            raise InvalidArgument(f"histogram: cells of {self.cell} do not fit an array of {self.shape}")
        expected = len(self.cells), len(self.classes)
        if np.shape(self.counts) != expected or (np.asarray(self.counts) < 0).any():
            raise InvalidArgument(f"histogram: counts must be {expected} numbers (cells, classes) of 0 or more")
        cells = np.asarray(self.cells)
        if not ((cells >= 0) & (cells < math.prod(self.grid))).all():
            raise InvalidArgument(
                f"histogram: cells must be numbers from 0 to {math.prod(self.grid) - 1}, for a grid of {self.grid}"
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """Number of cells along each axis."""
        return tuple(-(-n // c) for n, c in zip(self.shape, self.cell, strict=True))

    @classmethod
    def of(
        cls,
        source: str | Path | zarr.Array,
        *,
        level: int = 0,
        cell: Sequence[int] | None = None,
        threshold: float | None = None,
        background: int = 0,
    ) -> Histogram:
        """Count the classes of an array, cell by cell; :meth:`save` keeps the result.

        Parameters
        ----------
        source : path, array, …
            Labels, a mask, or an image with a `threshold`; see :func:`linumpy.io.open.open_source`.
        level : int
            Resolution level of an OME-Zarr image; a coarse level takes less time.
        cell : sequence of int, optional
            Shape of a cell in voxels of that level; by default a chunk. Cells should not be larger than crops.
        threshold : float, optional
            Voxels above the threshold are class 1, others class 0.
        background : int
            Class that is not counted.

        Raises
        ------
        InvalidArgument
            The array holds floats and `threshold` is missing, or `cell` does not fit the array.
        """
        array = open_source(source, level)
        if threshold is None and array.dtype.kind not in "biu":
            raise InvalidArgument(f"{source} holds {array.dtype}: labels are integers; pass threshold= for an image")
        cell_ = tuple(int(n) for n in cell) if cell is not None else tuple(array.chunks)
        if len(cell_) != array.ndim or min(cell_) < 1:
            raise InvalidArgument(f"cell={cell_} does not fit an array of {array.ndim} axes")
        grid = tuple(-(-n // c) for n, c in zip(array.shape, cell_, strict=True))
        cells: dict[int, dict[int, int]] = {}
        for number, index in enumerate(np.ndindex(*grid)):
            values = np.asarray(array[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, cell_, strict=True))])
            if threshold is not None:
                values = values > threshold
            found, counts = np.unique(values, return_counts=True)
            counted = {int(value): int(n) for value, n in zip(found, counts, strict=True) if value != background}
            if counted:
                cells[number] = counted
        classes = sorted({value for counted in cells.values() for value in counted})
        table = np.array([[counted.get(value, 0) for value in classes] for counted in cells.values()], np.int64)
        return cls(
            tuple(array.shape), cell_, np.array(classes, np.int64), np.array(list(cells), np.int64),
            table.reshape(len(cells), len(classes)), background,
        )  # fmt: skip

    def save(self, path: str | Path) -> None:
        """Write the histogram to a file for :meth:`load`."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file, shape=self.shape, cell=self.cell, classes=self.classes, cells=self.cells, counts=self.counts,
                background=self.background,
            )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Histogram:
        """Read a file that :meth:`save` wrote."""
        with np.load(path) as file:
            shape, cell = (tuple(int(n) for n in file[name]) for name in ("shape", "cell"))
            return cls(shape, cell, file["classes"], file["cells"], file["counts"], int(file["background"]))
