"""What an encoder on the device launches, and the memory that it takes. Pure: addresses are names and offsets.

In: made by the planners of the codecs. Out: :class:`EncodePlan`, which :mod:`linumpy.gpu.codecs.encode` carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Alignment of every part of the scratch, in bytes.
ALIGN = 256
#: Most blocks of a launch; kernels loop over what is more.
_MOST_BLOCKS = 2**31 - 1


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
    defines : tuple of (str, str)
        Definitions that the source is compiled with.
    shared : int
        Dynamic shared memory, in bytes.
    """

    source: str
    kernel: str
    grid: int
    block: int
    args: tuple[Address | int, ...]
    defines: tuple[tuple[str, str], ...] = ()
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


def grid_of(tasks: int) -> int:
    """Return how many blocks a launch has for so many tasks."""
    return max(1, min(tasks, _MOST_BLOCKS))


def relocated(launches: tuple[EncodeLaunch, ...], places: Mapping[str, Address]) -> tuple[EncodeLaunch, ...]:
    """Return launches whose arrays are parts of others: a codec within another one."""

    def moved(arg: Address | int) -> Address | int:
        if isinstance(arg, int):
            return arg
        place = places[arg.array]
        return Address(place.array, place.offset + arg.offset)

    return tuple(replace(launch, args=tuple(map(moved, launch.args))) for launch in launches)


class Scratch:
    """Lays parts out one behind another."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Address:
        """Return the address of a new part."""
        at, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // ALIGN) * ALIGN
        return Address("scratch", at)
