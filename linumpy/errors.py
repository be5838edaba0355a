"""Every exception linumpy raises on its own account.

Each is also the builtin that fits, so ``except OSError`` catches a broken chunk and ``except MemoryError`` a
volume that does not fit, with no import from here.
"""


class LinumpyError(Exception):
    """Base of all of linumpy's own exceptions."""


class ChunkError(LinumpyError, OSError):
    """The stored bytes of a chunk are not what its metadata says.

    The message names the file and the chunk. It never turns into fill values and never into a fallback.
    """


class DeviceMemoryError(LinumpyError, MemoryError):
    """The request does not fit into the memory of the device; raised before the first byte is read."""


class GpuUnavailableError(LinumpyError, RuntimeError):
    """A CUDA device was asked for and there is none; the message says what is missing and how to get it."""


class UnsupportedLayoutError(LinumpyError, NotImplementedError):
    """linumpy's reader cannot read this array; the message says which property of it is the reason."""


class RegionError(LinumpyError, IndexError):
    """A region does not fit the array: out of bounds, of too many axes, or with a step other than 1."""


class MetadataError(LinumpyError, ValueError):
    """The metadata of a group or an array lacks something that nobody may guess, such as a unit, or cannot be true."""


class SourceError(LinumpyError, ValueError):
    """What was passed as a source is neither an array nor an OME-Zarr image."""


class ResumeError(LinumpyError, FileExistsError):
    """An unfinished result is in the way: of another request, or one that another run is writing just now."""


class VoxelSessionError(LinumpyError, RuntimeError):
    """A voxel session stopped half way; the message names the planes that are done, and its cause is attached."""
