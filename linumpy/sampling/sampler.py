"""Draw coordinates, evaluate a field at them, and fill the caller's arrays.

In: a :class:`~linumpy.sampling.field.Field`, a seed, an order. Out: coordinates (n, 3) and values (channels, n). The
host and a device draw the same coordinates. A sample's coordinates depend only on the seed and the sample's number in
the stream, not on the sizes of calls, with two exceptions: in order ``"binned"`` they depend on the window, which by
default is a call, and a field with an order of its own may draw them differently.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import numpy as np

from linumpy.arrays import Array
from linumpy.checks import integer
from linumpy.errors import not_pickled
from linumpy.gpu.kernels import Uploaded, uploaded
from linumpy.sampling.arguments import (
    MAX_SAMPLES,
    Buffer,
    as_count,
    dtype_name,
    is_torch,
    stream_of,
    view_of,
)
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import Window, make_window
from linumpy.sampling.coordinates.draws import Draw
from linumpy.sampling.coordinates.generator import Use, key_of
from linumpy.sampling.field import ORDERS, Field

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset as TorchDataset

_Parameters = ParamSpec("_Parameters")


class Sampler:
    """Draw samples of a field; made by :func:`linumpy.sampling.create_sampler`.

    Parameters
    ----------
    field : Field
        The volume.
    device : int or None
        Number of the device on which arrays lie; None: in host memory.
    seed : int, optional
        Seed of the stream; by default random.
    order : {"iid", "binned", "stratified", "sobol"}
        See :func:`linumpy.sampling.create_sampler`.
    weights : Draw, optional
        How points are drawn by weights or inside a mask, from :func:`linumpy.sampling.create.weights_of`.
    strata : int
        Boxes along each axis for ``order="stratified"``.
    window : int, optional
        Number of samples that are sorted by box together; by default the field's ``window_size``, or if that is None
        the samples of a call.
    spacing : tuple of float, optional
        Voxel spacing along x, y and z; an attribute for the caller, without effect.
    """

    def __init__(
        self,
        field: Field,
        *,
        device: int | None = None,
        seed: int | None = None,
        order: str = "iid",
        weights: Draw | None = None,
        strata: int = 16,
        window: int | None = None,
        spacing: tuple[float, ...] | None = None,
    ) -> None:
        if not isinstance(field, Field):
            raise TypeError(f"field is a {type(field).__name__}; derive its class from linumpy.sampling.Field")
        self.field, self.device, self.spacing = field, device, spacing
        self._key, self._stratified, self._weights = key_of(seed), draws.stratified(strata), weights
        self.order = self._checked_order(order)
        if window is not None:
            window = integer("window", window, 1, MAX_SAMPLES, meaning="the samples that are put in order together")
        self._window_size = window or field.window_size
        self._window: Uploaded | None = None
        self._used = 0  # number of samples of the window that calls have returned
        self._next = 0  # number of the next sample of the stream
        self._cells: Uploaded | None = None  # cells of the weights, in the order of boxes
        self._draws: dict[str, Draw] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> NoReturn:
        raise not_pickled(self, "send the arguments of create_sampler, and make a sampler there")

    @property
    def value_range(self) -> tuple[float, float]:
        """Smallest and largest value of the field, as far as they were known when the field was opened."""
        return self.field.value_range

    def n_channels(self) -> int:
        """Return the number of values at each point."""
        return self.field.n_channels

    def sample(self, count: int, order: str | None = None) -> tuple[Array, Array]:
        """Draw samples into new arrays.

        Parameters
        ----------
        count : int
            Number of samples.
        order : str, optional
            By default the sampler's order.

        Returns
        -------
        coords : ndarray
            Shape (count, 3), float32, in order (x, y, z).
        values : ndarray
            Shape (channels, count), float32; int32 for labels.
        """
        count = as_count(count)
        with stream_of(self.device):
            coords = self._xp.empty((count, 3), np.float32)
            values = self._xp.empty((self.n_channels(), count), self.values_dtype)
            self._fill(coords, values, order)
        return coords, values

    def decode(self, coords: Buffer, gradient: bool = False) -> Any:
        """Evaluate at points.

        Parameters
        ----------
        coords : array
            Shape (n, 3), float32, C-contiguous, in order (x, y, z) in [0, 1]; NumPy, CuPy, torch or DLPack, in the
            sampler's memory. A point outside has the value at the border; a point that is not finite has the value NaN
            (as a label: the coordinate counts as 0).
        gradient : bool
            Whether to return derivatives, too.

        Returns
        -------
        values : ndarray
            Shape (channels, n), float32; int32 for labels.
        slopes : ndarray
            With `gradient`: derivatives along x, y and z per unit of the cube; shape (channels, 3, n), float32. Divide
            by voxels · spacing to get them per unit of length.

        Raises
        ------
        TypeError, ValueError
            `coords` has another dtype, shape or memory; `gradient` for a volume without derivatives (spline order 0,
            labels, the devices out of core, files of other programs).
        """
        shape = getattr(coords, "shape", None)
        if shape is None or len(shape) != 2:
            raise ValueError(
                f"coords has shape {shape}; give an array of shape (n, 3), or a pointer to the function decode"
            )
        count = int(shape[0])
        with stream_of(self.device, coords):
            values = self._xp.empty((self.n_channels(), count), self.values_dtype)
            slopes = self._xp.empty((self.n_channels(), 3, count), np.float32) if gradient else None
            self.decode_into(coords, values, count, slopes)
        return values if slopes is None else (values, slopes)

    def sample_into(self, coords: Buffer, values: Buffer, count: int, order: str | None = None) -> None:
        """Fill the caller's arrays with samples; see :func:`linumpy.sampling.sample`."""
        count = as_count(count)
        with stream_of(self.device, coords, values):
            points = view_of(coords, "coords", (count, 3), np.float32, self.device)
            with self._values(values, count) as target:
                self._fill(points, target, order)

    def decode_into(self, coords: Buffer, values: Buffer, count: int, gradient: Buffer = None) -> None:
        """Fill the caller's array with values at given points; see :func:`linumpy.sampling.decode`."""
        count = as_count(count)
        with stream_of(self.device, coords, values):
            points = view_of(coords, "coords", (count, 3), np.float32, self.device, writes=False)
            with self._values(values, count) as target:
                if gradient is None:
                    self.field.decode(points, target)
                    return
                slopes = view_of(gradient, "gradient", (self.n_channels(), 3, count), np.float32, self.device)
                self.field.decode_with_gradient(points, target, slopes)

    @property
    def _xp(self) -> ModuleType:
        if self.device is None:
            return np
        import cupy

        return cupy

    @property
    def values_dtype(self) -> np.dtype:
        """Dtype of the values: float32, or int32 for labels."""
        return self.field.values_dtype

    @contextlib.contextmanager
    def _values(self, buffer: Buffer, count: int) -> Iterator[Array]:
        """Yield the caller's values as an array of the field's dtype; convert float32 to 16-bit values afterwards."""
        shape, dtype = (self.n_channels(), count), self.values_dtype
        if dtype_name(buffer, "float32") not in ("float16", "bfloat16") or dtype != np.float32:
            yield view_of(buffer, "values", shape, dtype, self.device)
            return
        values = self._xp.empty(shape, np.float32)
        if not is_torch(buffer):
            target = view_of(buffer, "values", shape, np.float16, self.device)
            yield values
            target[...] = values
            return
        import torch

        # NumPy has no bfloat16: a view as int16 serves to check memory and shape.
        view_of(buffer.detach().view(torch.int16), "values", shape, np.int16, self.device)
        yield values
        buffer.detach().copy_(torch.from_dlpack(values).reshape(buffer.shape))

    def _checked_order(self, order: str) -> str:
        if order not in ORDERS:
            raise ValueError(f"order={order!r}: choose one of {', '.join(ORDERS)}")
        if self._weights is not None and order not in ("iid", "binned"):
            raise ValueError(f"order={order!r} with mask or importance: choose 'iid' or 'binned'")
        if order not in self.field.orders:
            raise ValueError(f"order={order!r}: this sampler has {', '.join(self.field.orders)}")
        return order

    def _fill(self, coords: Array, values: Array, order: str | None) -> None:
        order = self.order if order is None else self._checked_order(order)
        if not len(coords):
            return
        with self._lock:
            if order == "binned" and (self._weights is not None or not self.field.has_own_order):
                self._fill_binned(coords, values)
                return
            first, self._next = self._next, self._next + len(coords)
        if order == "binned":
            self.field.sample_in_order(self._key, first, coords, values)
        elif order == "iid" and self._weights is None:
            self.field.sample(self._key, first, coords, values)
        else:
            draws.draw(self._draw_of(order), self._key, first, coords)
            self.field.decode(coords, values)

    def _draw_of(self, order: str) -> Draw:
        if order not in self._draws:
            methods = {"iid": Draw(), "sobol": Draw(Use.SOBOL), "stratified": self._stratified}
            method = self._weights or methods[order]
            self._draws[order] = method.moved(self._xp)
        return self._draws[order]

    def _fill_binned(self, coords: Array, values: Array) -> None:
        done = 0
        while done < len(coords):
            size = self._window_size or min(len(coords) - done, MAX_SAMPLES)
            if self._window is None or self._used == self._window.value.total:
                first, self._next = self._next, self._next + size
                window = make_window(self.field.boxes, self._key, first, size, self._xp)
                self._window, self._used = self._uploaded(window), 0
            window = self._window.get()
            part = min(len(coords) - done, window.total - self._used)
            points = coords[done : done + part]
            if part == len(coords):
                self._fill_part(window, points, values)
            else:
                part_values = self._xp.empty((self.n_channels(), part), values.dtype)
                self._fill_part(window, points, part_values)
                values[:, done : done + part] = part_values
            done, self._used = done + part, self._used + part

    def _fill_part(self, window: Window, coords: Array, values: Array) -> None:
        if self._weights is None:
            self.field.sample_window(window, self._used, coords, values)
        else:
            if self._cells is None:
                self._cells = self._uploaded(draws.in_order(self._weights, self.field.boxes).moved(self._xp))
            draws.draw_in_order(window, self._cells.get(), self._used, coords)
            self.field.decode(coords, values)

    def _uploaded(self, tables: Any) -> Uploaded:
        """Return arrays as other streams may use them, too."""
        return Uploaded(tables, None) if self.device is None else uploaded(tables)


def _with_pointer_names(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Let a function also take `coords` and `values` by their names in the fixed interface, with a warning."""

    @functools.wraps(function)
    def call(*args: _Parameters.args, **options: _Parameters.kwargs) -> None:
        for new in ("coords", "values"):
            old = f"{new}_ptr"
            if old in options:
                if new in options:
                    raise TypeError(f"{old}= is the old name of {new}=: pass only {new}=")
                warnings.warn(f"{old}= is called {new}= now", FutureWarning, stacklevel=2)
                options[new] = options.pop(old)
        function(*args, **options)

    return call


@_with_pointer_names
def sample(sampler: Sampler, coords: Buffer, values: Buffer, count: int, order: str | None = None) -> None:
    """Fill arrays with samples.

    Parameters
    ----------
    sampler : Sampler
        A sampler that :func:`create_sampler` returned.
    coords : int or array
        Receives the coordinates: (count, 3), float32, C-contiguous, in order (x, y, z). A pointer such as
        ``tensor.data_ptr()``, or a NumPy, CuPy, torch or DLPack array; in the sampler's memory.
    values : int or array
        Receives the values: (channels, count), C-contiguous; float32, or int32 for labels. An array (not a pointer) may
        also be float16 or bfloat16 instead of float32.
    count : int
        Number of samples, 0 to 2^33.
    order : str, optional
        By default the sampler's order.
    """
    sampler.sample_into(coords, values, count, order)


@_with_pointer_names
def decode(sampler: Sampler, coords: Buffer, values: Buffer, count: int, gradient: Buffer = None) -> None:
    """Fill an array with the values at points.

    Parameters
    ----------
    sampler, values, count
        As for :func:`sample`.
    coords : int or array
        Points to read; memory, shape and dtype as for :func:`sample`. A point outside [0, 1] has the value at the
        border; a point that is not finite has the value NaN (as a label: the coordinate counts as 0).
    gradient : int or array, optional
        Receives the derivatives along x, y and z per unit of the cube: (channels, 3, count), float32.

    Raises
    ------
    ValueError
        Among others: `gradient` for a volume without derivatives; :meth:`.Sampler.decode` lists them.
    """
    sampler.decode_into(coords, values, count, gradient)


def sample_dataset(
    sampler: Sampler, batch_size: int, batches: int | None = None, order: str | None = None
) -> TorchDataset[tuple[Buffer, Buffer]]:
    """Make a torch ``IterableDataset`` of batches (coords, values).

    Parameters
    ----------
    sampler : Sampler
        The sampler; tensors are in the sampler's memory.
    batch_size : int
        Number of samples of a batch.
    batches : int, optional
        Number of batches of a pass; by default the dataset is endless.
    order : str, optional
        By default the sampler's order.

    Returns
    -------
    torch.utils.data.IterableDataset
        Of coords (batch_size, 3) and values (batch_size, channels), new tensors for each batch. A pass continues the
        sampler's stream. Not for worker processes: use ``DataLoader(dataset, batch_size=None)``.
    """
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    if batch_size < 1 or (batches is not None and batches < 0):
        raise ValueError(f"batch_size={batch_size}, batches={batches}: give 1 or more samples, and 0 or more batches")
    device = "cpu" if sampler.device is None else f"cuda:{sampler.device}"
    dtype = {"float32": torch.float32, "int32": torch.int32}[str(sampler.values_dtype)]

    class SampleDataset(IterableDataset):
        """Batches (coords, values) of a sampler."""

        def __reduce__(self) -> NoReturn:
            raise not_pickled(self, "DataLoader(num_workers=0) takes it")

        def __iter__(self) -> Iterator[tuple[Buffer, Buffer]]:
            if get_worker_info() is not None:
                raise RuntimeError("a sampler is not for worker processes: make the DataLoader with num_workers=0")
            done = 0
            while batches is None or done < batches:
                coords = torch.empty((batch_size, 3), dtype=torch.float32, device=device)
                values = torch.empty((sampler.n_channels(), batch_size), dtype=dtype, device=device)
                sampler.sample_into(coords, values, batch_size, order)
                yield coords, values.T
                done += 1

    return SampleDataset()
