"""What an encoder on the device launches, and the memory that it takes. Pure: addresses are names and offsets.

In: made by the planners of the codecs. Out: :class:`EncodePlan`, which :mod:`linumpy.gpu.codecs.encode` carries out.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Alignment of every part of the scratch, in bytes.
ALIGN = 256


@dataclass(frozen=True)
class Address:
    """An address within one of the arrays of a run: ``"chunks"``, ``"arena"``, ``"offsets"`` or ``"scratch"``."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class EncodeLaunch:
    """A launch of a kernel of :mod:`linumpy.gpu.codecs.cuda`.

    Attributes
    ----------
    source, kernel : str
        File name of the source without ``.cu``, and the kernel in it.
    grid, block : int
        Blocks, and threads of each.
    args : tuple of (Address or int)
        Arguments in order, each of 64 bits.
    shared : int
        Dynamic shared memory, in bytes.
    """

    source: str
    kernel: str
    grid: int
    block: int
    args: tuple[Address | int, ...]
    shared: int = 0


@dataclass(frozen=True)
class EncodePlan:
    """All that is launched for a batch of chunks.

    Attributes
    ----------
    arena_nbytes : int
        As long as the streams can get.
    scratch_nbytes : int
        Memory that is free again once the launches are over.
    launches : tuple of EncodeLaunch
        In their order, on one stream.
    """

    arena_nbytes: int
    scratch_nbytes: int
    launches: tuple[EncodeLaunch, ...]


class Scratch:
    """Lays parts out one behind another."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Address:
        """Return the address of a new part."""
        at, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // ALIGN) * ALIGN
        return Address("scratch", at)
