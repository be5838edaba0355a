"""The interface between a sampler and a volume of any format.

In: coordinates, or the number of points to draw. Out: values, and the coordinates that were drawn. The sampler checks
arrays and counts, then calls the methods of a :class:`Field`. A field overrides the default of a method where it has a
faster one.
"""

from __future__ import annotations

import abc

import numpy as np

from linumpy.arrays import Array
from linumpy.sampling.coordinates import draws
from linumpy.sampling.coordinates.boxes import Boxes, Window

ORDERS = ("iid", "binned", "stratified", "sobol")


class Field(abc.ABC):
    """A scalar or vector field over the unit cube; the base class of all fields.

    Attributes
    ----------
    n_channels : int
        Number of values at each point.
    value_range : tuple of (float, float)
        Smallest and largest value that :meth:`decode` writes, as far as they are known when the field is opened.
    values_dtype : dtype
        Dtype of the values: float32, or int32 for labels.
    orders : tuple of str
        Orders in which samples can be drawn.
    boxes : Boxes
        Boxes by which order ``"binned"`` sorts samples; by default 32 along each axis.
    window_size : int or None
        Default number of samples that are sorted by box together; None: the samples of a call.
    has_own_order : bool
        Whether order ``"binned"`` calls :meth:`sample_in_order` instead of sorting by :attr:`boxes`. With weights,
        samples are always sorted by :attr:`boxes`.
    """

    n_channels: int
    value_range: tuple[float, float]
    values_dtype: np.dtype = np.dtype(np.float32)
    orders: tuple[str, ...] = ORDERS
    boxes: Boxes = Boxes((0, 1, 2) * 5)
    window_size: int | None = None
    has_own_order: bool = False

    @abc.abstractmethod
    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate the field.

        Parameters
        ----------
        coords : ndarray
            Points in order (x, y, z), shape (n, 3), float32, C-contiguous. The unit cube is [0, 1].
            Points outside get the value at the border. Points that are not finite get NaN, or, for labels, the value
            with 0 as that coordinate. NumPy for a field in host memory; CuPy for a field on a device, where the work is
            queued on CuPy's current stream.
        out : ndarray
            Receives the values, shape (n_channels, n), :attr:`values_dtype`, C-contiguous, in the same memory as
            ``coords``.
        """

    def decode_with_gradient(self, coords: Array, out: Array, gradient: Array) -> None:
        """Evaluate the field and its derivatives; by default raise ``ValueError``: the field has no derivatives.

        Parameters
        ----------
        coords, out
            As for :meth:`decode`.
        gradient : ndarray
            Receives the derivatives along x, y and z of the unit cube: shape (n_channels, 3, n), float32.
        """
        raise ValueError("gradient: this field has none; use a volume in memory with spline_order=1 or 3")

    def sample(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """Draw independent points and evaluate the field at them; fill both arrays.

        Parameters
        ----------
        key : (int, int)
            Key of the generator.
        first : int
            Number of the first sample in the stream.
        coords, out
            As for :meth:`decode`; `coords` is filled, too.
        """
        draws.draw(draws.Draw(), key, first, coords)
        self.decode(coords, out)

    def sample_in_order(self, key: tuple[int, int], first: int, coords: Array, out: Array) -> None:
        """As :meth:`sample`, with points in the field's own order; called only if :attr:`has_own_order`."""
        raise NotImplementedError("has_own_order is set, and sample_in_order is not overridden")

    def sample_window(self, window: Window, begin: int, coords: Array, out: Array) -> None:
        """Fill both arrays with samples of a window, sorted by :attr:`boxes`, from sample `begin` of the window on."""
        draws.draw_window(window, begin, coords)
        self.decode(coords, out)
