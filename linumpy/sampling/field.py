"""The interface between a sampler and a volume of any format.

In: coordinates in the unit cube. Out: values there. The sampler draws the coordinates, checks arrays and counts, and
calls :meth:`Field.decode`.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Field(Protocol):
    """A scalar or vector field over the unit cube.

    Attributes
    ----------
    n_channels : int
        Values at each point.
    value_range : tuple of (float, float)
        Smallest and largest value that ``decode`` gives, as far as it is known when the field is opened.
    """

    n_channels: int
    value_range: tuple[float, float]

    def decode(self, coords: Any, out: Any) -> None:
        """Evaluate the field.

        Parameters
        ----------
        coords : ndarray
            Points in order (x, y, z), shape (n, 3), float32, in [0, 1]. C-contiguous; NumPy for a field in host
            memory, CuPy for one on a device, where the work is queued on CuPy's current stream.
        out : ndarray
            Receives the values, shape (n_channels, n), float32, C-contiguous, in the same memory as ``coords``.
        """
        ...
