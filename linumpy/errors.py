"""The exceptions of linumpy, and the error of objects that cannot be pickled.

Each is also a builtin exception, so ``except OSError`` catches a broken chunk and ``except MemoryError`` a volume that
does not fit into memory, without an import from here.
"""


class LinumpyError(Exception):
    """Base of linumpy's exceptions."""


class ChunkError(LinumpyError, OSError):
    """The stored bytes of a chunk do not match its metadata.

    The message names the file and the chunk. A broken chunk is never replaced by fill values or read by a fallback.
    """


class StaleLayoutError(LinumpyError, RuntimeError):
    """The metadata of an array changed after linumpy read them: read them again, then submit again."""


class DeviceMemoryError(LinumpyError, MemoryError):
    """A request does not fit into the memory of the device; raised before the first byte is read."""


class GpuUnavailableError(LinumpyError, RuntimeError):
    """A CUDA device was requested and none can be used; the message says what is missing and how to install it."""


class CoreUnavailableError(LinumpyError, RuntimeError):
    """The native core was not built or has another version; the message says what to install."""


class UnsupportedLayoutError(LinumpyError, NotImplementedError):
    """linumpy's reader cannot read an array; the message names the property that it does not support."""


class RegionError(LinumpyError, IndexError):
    """A region does not fit the array: out of bounds, of too many axes, or with a step other than 1."""


class MetadataError(LinumpyError, ValueError):
    """The metadata of a group or an array lacks something, such as a unit, or is invalid."""


class SourceError(LinumpyError, ValueError):
    """The source is neither an array nor an OME-Zarr image."""


class ResumeError(LinumpyError, FileExistsError):
    """The path has an unfinished result of another request, or a result that another run is writing."""


class WorkerError(LinumpyError, RuntimeError):
    """A worker of a dask cluster cannot make its blocks; the message names the worker and what it lacks."""


class VoxelSessionError(LinumpyError, RuntimeError):
    """A voxel session stopped; the message names the finished planes, and the cause is attached."""


def not_pickled(instance: object, instead: str) -> TypeError:
    """Make the error of ``__reduce__`` for an object that holds threads, memory or open files of its process.

    Parameters
    ----------
    instance : object
        The object that cannot be pickled or copied.
    instead : str
        Advice: what to send to another process instead.
    """
    name = type(instance).__name__
    return TypeError(f"a {name} belongs to its process and can be neither pickled nor copied: {instead}")
