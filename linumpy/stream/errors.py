"""Exceptions of a pipeline: one for each status, each also a subclass of the matching builtin."""

from __future__ import annotations

import enum
import errno
from typing import TYPE_CHECKING, ClassVar

from linumpy.errors import ChunkError, LinumpyError

if TYPE_CHECKING:
    from linumpy.stream.config import Sample


class Status(enum.Enum):
    """Outcome of an operation of a pipeline."""

    OK = "ok"
    TRY_AGAIN = "try again"
    INVALID_ARGUMENT = "invalid argument"
    NOT_FOUND = "not found"
    DTYPE_MISMATCH = "dtype mismatch"
    RANK_MISMATCH = "rank mismatch"
    STORAGE_ERROR = "storage error"
    DECODE_ERROR = "decode error"
    CUDA_ERROR = "CUDA error"
    OUT_OF_MEMORY = "out of memory"
    SHUTDOWN = "shutdown"


class StreamError(LinumpyError):
    """Base of the errors of a pipeline.

    Parameters
    ----------
    what : str
        What went wrong.
    sample : Sample, optional
        The sample that it concerns.

    Attributes
    ----------
    status : Status
        Kind of the error.
    what : str
        What went wrong, without the sample.
    sample : Sample or None
        The sample that it concerns.
    """

    status: ClassVar[Status] = Status.OK

    def __init__(self, what: str, sample: Sample | None = None) -> None:
        super().__init__(what if sample is None else f"{what} (sample {sample})")
        self.what = what
        self.sample = sample

    def __reduce__(self) -> tuple[type[StreamError], tuple[str, Sample | None]]:
        return type(self), (self.what, self.sample)


class TryAgain(StreamError, BlockingIOError):  # noqa: N818 - the name is part of the interface
    """There is no batch now: nothing was pushed, or all memory of batches is held by the consumer."""

    status = Status.TRY_AGAIN


class InvalidArgument(StreamError, ValueError):  # noqa: N818
    """A sample or a parameter that cannot be served."""

    status = Status.INVALID_ARGUMENT


class NotFound(StreamError, FileNotFoundError):  # noqa: N818
    """The array of a sample does not exist."""

    status = Status.NOT_FOUND


class DtypeMismatch(StreamError, TypeError):  # noqa: N818
    """The arrays of a batch have different dtypes and the batch has that of its arrays."""

    status = Status.DTYPE_MISMATCH


class RankMismatch(StreamError, ValueError):  # noqa: N818
    """A crop has other numbers of axes than its array or than the batch."""

    status = Status.RANK_MISMATCH


class StorageError(StreamError, OSError):
    """Stored bytes cannot be read."""

    status = Status.STORAGE_ERROR


class DecodeError(StreamError, OSError):
    """Stored bytes do not match the array's metadata."""

    status = Status.DECODE_ERROR


class NativeCudaError(StreamError, RuntimeError):
    """CUDA reported an error."""

    status = Status.CUDA_ERROR


class OutOfMemory(StreamError, MemoryError):  # noqa: N818
    """The requested memory cannot be allocated."""

    status = Status.OUT_OF_MEMORY


class ShutdownError(StreamError, RuntimeError):
    """The pipeline is closed."""

    status = Status.SHUTDOWN


_BY_NUMBER = {errno.ENOENT: NotFound, errno.ENOMEM: OutOfMemory}


def as_stream_error(error: BaseException, sample: Sample | None = None) -> StreamError:
    """Turn an error of a read, of opening an array or of CUDA into one of a pipeline; `error` is its cause."""
    if isinstance(error, StreamError):
        made = error if error.sample is not None or sample is None else type(error)(error.what, sample)
    else:
        made = _kind_of(error)(f"{type(error).__name__}: {error}", sample)
    if made is not error:
        made.__cause__ = error
    return made


def _kind_of(error: BaseException) -> type[StreamError]:
    module = type(error).__module__.partition(".")[0]
    if module in ("cupy", "cupy_backends") and not isinstance(error, MemoryError):
        return NativeCudaError
    if isinstance(error, ChunkError):
        cause = error.__cause__  # of the operating system where the bytes were not read at all
        return StorageError if isinstance(cause, OSError) and cause.errno is not None else DecodeError
    if isinstance(error, MemoryError):
        return OutOfMemory
    if isinstance(error, OSError):
        return _BY_NUMBER.get(error.errno or 0, NotFound if isinstance(error, FileNotFoundError) else StorageError)
    if isinstance(error, (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError)):
        return InvalidArgument
    return StorageError
