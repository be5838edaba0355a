"""Records of a planned encoding on the device: launches, and memory. Pure: addresses are names and offsets.

The planners of the codecs make an :class:`EncodePlan`; :mod:`linumpy.gpu.codecs.encode` allocates the memory and
launches the kernels. The memory is four arrays: ``"chunks"`` (the input), ``"arena"`` (the packed encoded streams),
``"offsets"`` (of each stream in the arena, and the end of the last one, int64) and ``"scratch"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

#: Alignment of every part of the scratch, in bytes.
ALIGN = 256
#: Maximum number of blocks of a launch; with more tasks each block loops over several.
_MAX_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Address:
    """An address: an offset in bytes within ``"chunks"``, ``"arena"``, ``"offsets"`` or ``"scratch"``."""

    array: str
    offset: int = 0


@dataclass(frozen=True)
class EncodeLaunch:
    """A launch of a kernel of :mod:`linumpy.gpu.codecs.cuda`.

    - `source`, `kernel`: file name of the source without ``.cu``, and the kernel in it.
    - `grid`, `block`: blocks, and threads of each.
    - `args`: arguments in order, each of 64 bits.
    - `defines`: definitions that the source is compiled with.
    - `shared`: dynamic shared memory, in bytes.
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
    """The launches and memory for a batch of chunks.

    - `arena_nbytes`: size of the arena: the maximum total size of the streams.
    - `scratch_nbytes`: size of the scratch, which can be freed when the launches have completed.
    - `launches`: in order, for one CUDA stream.
    """

    arena_nbytes: int
    scratch_nbytes: int
    launches: tuple[EncodeLaunch, ...]


def grid_of(tasks: int) -> int:
    """Return the number of blocks of a launch with `tasks` tasks."""
    return max(1, min(tasks, _MAX_BLOCKS))


def relocated(launches: tuple[EncodeLaunch, ...], addresses: Mapping[str, Address]) -> tuple[EncodeLaunch, ...]:
    """Return the launches of an inner codec with other addresses: each array begins at ``addresses[name of array]``."""

    def relocated_arg(arg: Address | int) -> Address | int:
        if isinstance(arg, int):
            return arg
        begin = addresses[arg.array]
        return Address(begin.array, begin.offset + arg.offset)

    return tuple(replace(launch, args=tuple(map(relocated_arg, launch.args))) for launch in launches)


class Scratch:
    """Allocates aligned, consecutive parts of the scratch."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Address:
        """Return the address of a new part."""
        offset, self.nbytes = self.nbytes, self.nbytes + -(-nbytes // ALIGN) * ALIGN
        return Address("scratch", offset)
