"""The exceptions of linumpy, and the error of objects that cannot be pickled.

Each exception is also a builtin exception: ``except OSError`` catches a broken chunk, and ``except MemoryError`` a
volume that does not fit into memory, without an import of this module.
"""


class LinumpyError(Exception):
    """Base of linumpy's exceptions."""


class ChunkError(LinumpyError, OSError):
    """A chunk cannot be read, its stored bytes do not match the metadata, or they changed during the read.

    The message names the file or object. A broken chunk is never replaced by fill values or read by a fallback.
    """


class StorageRefusedError(ChunkError):
    """The storage did not give the bytes of a chunk, which may be whole: no access, no connection, no descriptors."""


class StaleLayoutError(LinumpyError, RuntimeError):
    """The metadata of an array changed after linumpy had read them: open the array again."""


class DeviceMemoryError(LinumpyError, MemoryError):
    """A request exceeds the memory of the device, or the limit `memory_bytes`; raised before the first byte is read.

    On the CPU, a request exceeds the limit for host memory.
    """


class GpuUnavailableError(LinumpyError, RuntimeError):
    """A CUDA device was requested and none can be used; the message says what is missing and how to install it."""


class CoreUnavailableError(LinumpyError, RuntimeError):
    """The native core was not built, has another version or is switched off; the message gives the reason."""


class UnsupportedLayoutError(LinumpyError, NotImplementedError):
    """linumpy's reader cannot read an array; the message names the property that it does not support."""


class RegionError(LinumpyError, IndexError):
    """A region is out of bounds, has too many axes or has a step other than 1; or a position is outside of a volume."""


class MetadataError(LinumpyError, ValueError):
    """The metadata of a group or an array lacks something, such as a unit, or is invalid."""


class SourceError(LinumpyError, ValueError):
    """The source is neither an array nor an OME-Zarr image, has no such resolution level, or cannot be opened."""


class ResumeError(LinumpyError, FileExistsError):
    """The path has an unfinished result of another request, or a result that another run is writing."""


class WorkerError(LinumpyError, RuntimeError):
    """Workers of a dask cluster cannot make their blocks: they lack something, do not answer or died.

    The message names a worker and the reason.
    """


class VoxelSessionError(LinumpyError, RuntimeError):
    """A voxel session stopped; the message names the finished planes, and ``__cause__`` is the error."""


def not_pickled(instance: object, instead: str) -> TypeError:
    """Return the error for ``__reduce__`` of an object that holds threads, memory or open files of its process.

    - `instance`: the object that cannot be pickled or copied.
    - `instead`: what to send to another process instead, as advice in the message.
    """
    name = type(instance).__name__
    return TypeError(f"a {name} belongs to its process and can be neither pickled nor copied: {instead}")
