"""Encode chunks in device memory, by kernels of this package.

In: chunks of one size, side by side on the device. Out: :class:`Encoded`, the stored bytes of each, packed. Nothing waits
for the device: sizes stay there, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from linumpy.plan.encoding import Encoding

if TYPE_CHECKING:
    import cupy


@dataclass(frozen=True)
class Encoded:
    """Streams packed one behind another: chunk k is ``arena[offsets[k]:offsets[k + 1]]``.

    Attributes
    ----------
    arena : cupy.ndarray
        uint8. As long as the streams can get, whatever is in the chunks.
    offsets : cupy.ndarray
        int64, one more than chunks.
    """

    arena: cupy.ndarray
    offsets: cupy.ndarray


def encode_chunks(chunks: cupy.ndarray, encoding: Encoding) -> Encoded:
    """Encode each chunk as a stream of its own.

    Parameters
    ----------
    chunks : cupy.ndarray
        (count, nbytes) uint8, contiguous, on CuPy's current device.
    encoding : Encoding
        Codecs and settings.

    Returns
    -------
    Encoded
        Complete once CuPy's current stream has got there; this function does not wait for it.
    """
    raise NotImplementedError(encoding.compressor)


def encoding_nbytes(count: int, nbytes: int, encoding: Encoding) -> int:
    """Return how many bytes of device memory :func:`encode_chunks` takes for `count` chunks, scratch and result."""
    raise NotImplementedError(encoding.compressor)
