"""Every exception linumpy raises on its own account, and the one line of what cannot go to another process.

Each is also the builtin that fits, so ``except OSError`` catches a broken chunk and ``except MemoryError`` a
volume that does not fit, with no import from here.
"""


class LinumpyError(Exception):
    """Base of all of linumpy's own exceptions."""


class ChunkError(LinumpyError, OSError):
    """The stored bytes of a chunk are not what its metadata says.

    The message names the file and the chunk. It never turns into fill values and never into a fallback.
    """


class StaleLayoutError(LinumpyError, RuntimeError):
    """The metadata of an array were written anew after they had been read: read them again, then submit again."""


class DeviceMemoryError(LinumpyError, MemoryError):
    """The request does not fit into the memory of the device; raised before the first byte is read."""


class GpuUnavailableError(LinumpyError, RuntimeError):
    """A CUDA device was asked for and there is none; the message says what is missing and how to get it."""


class CoreUnavailableError(LinumpyError, RuntimeError):
    """The native core was not built or does not fit; the message says what to install."""


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


class WorkerError(LinumpyError, RuntimeError):
    """A worker of a dask cluster cannot do its part; the message names the worker and what it lacks."""


class VoxelSessionError(LinumpyError, RuntimeError):
    """A voxel session stopped half way; the message names the planes that are done, and its cause is attached."""


def not_pickled(one: object, instead: str) -> TypeError:
    """Make the error of ``__reduce__`` for what belongs to its process: it has threads, memory or files open there.

    Parameters
    ----------
    one : object
        What was to be pickled or copied.
    instead : str
        What to send to another process in its stead.
    """
    name = type(one).__name__
    return TypeError(f"a {name} belongs to its process and can be neither pickled nor copied: {instead}")
