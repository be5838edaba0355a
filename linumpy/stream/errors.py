"""Exceptions of a pipeline: one for each status, each also a subclass of the matching builtin."""

from __future__ import annotations

import enum
import errno
from typing import Any, ClassVar

from linumpy.errors import ChunkError, LinumpyError


class Status(enum.IntEnum):
    """Outcome of an operation of a pipeline."""

    OK = 0
    TRY_AGAIN = 1
    INVALID_ARGUMENT = 2
    NOT_FOUND = 3
    DTYPE_MISMATCH = 4
    RANK_MISMATCH = 5
    STORAGE_ERROR = 6
    DECODE_ERROR = 7
    CUDA_ERROR = 8
    OUT_OF_MEMORY = 9
    SHUTDOWN = 10


class StreamError(LinumpyError):
    """Base of the errors of a pipeline.

    Parameters
    ----------
    detail : str
        What went wrong.
    sample : Sample, optional
        The sample that it concerns.
    what : str, optional
        The stage; by default the one where errors of this class usually occur.

    Attributes
    ----------
    status : Status
        Kind of the error.
    what : str
        Stage in which it occurred: ``"argument"``, ``"pull"`` (the iterable that was pushed), ``"open"``, ``"plan"``,
        ``"read"``, ``"decode"``, ``"assemble"``, ``"pop"``, ``"memory"``, ``"device"`` or ``"close"``.
    detail : str
        What went wrong, without the sample.
    sample : Sample or None
        The sample that it concerns.
    """

    status: ClassVar[Status] = Status.OK
    _stage: ClassVar[str] = "pop"

    def __init__(self, detail: str, sample: Any = None, what: str = "") -> None:
        super().__init__(detail if sample is None else f"{detail} (sample {sample})")
        self.what = what or self._stage
        self.detail = detail
        self.sample = sample

    def __reduce__(self) -> tuple[type[StreamError], tuple[str, Any, str]]:
        return type(self), (self.detail, self.sample, self.what)


#: The name that code written for damacy imports.
DamacyError = StreamError


class TryAgain(StreamError, BlockingIOError):  # noqa: N818 - the name is part of the interface
    """There is no batch now: nothing was pushed, or all memory of batches is held by the consumer."""

    status = Status.TRY_AGAIN


class InvalidArgument(StreamError, ValueError):  # noqa: N818
    """A sample or a parameter that cannot be served."""

    status = Status.INVALID_ARGUMENT
    _stage = "argument"


class ArgumentTypeError(InvalidArgument, TypeError):
    """A parameter of another type than it may have."""


class NotFound(StreamError, FileNotFoundError):  # noqa: N818
    """The array of a sample does not exist."""

    status = Status.NOT_FOUND
    _stage = "open"


class DtypeMismatch(StreamError, TypeError):  # noqa: N818
    """The arrays of a batch have different dtypes and the batch has that of its arrays."""

    status = Status.DTYPE_MISMATCH
    _stage = "plan"


class RankMismatch(StreamError, ValueError):  # noqa: N818
    """A crop has other numbers of axes than its array or than the batch."""

    status = Status.RANK_MISMATCH
    _stage = "plan"


class StorageError(StreamError, OSError):
    """Stored bytes cannot be read."""

    status = Status.STORAGE_ERROR
    _stage = "read"


class DecodeError(StreamError, OSError):
    """Stored bytes do not match the array's metadata."""

    status = Status.DECODE_ERROR
    _stage = "decode"


class NativeCudaError(StreamError, RuntimeError):
    """CUDA reported an error."""

    status = Status.CUDA_ERROR
    _stage = "device"


class OutOfMemory(StreamError, MemoryError):  # noqa: N818
    """The requested memory cannot be allocated."""

    status = Status.OUT_OF_MEMORY
    _stage = "memory"


class ShutdownError(StreamError, RuntimeError):
    """The pipeline is closed."""

    status = Status.SHUTDOWN
    _stage = "close"


_BY_NUMBER = {errno.ENOENT: NotFound, errno.ENOMEM: OutOfMemory}


def as_stream_error(error: BaseException, sample: Any = None, what: str = "") -> StreamError:
    """Turn an error of a read, of opening an array or of CUDA into one of a pipeline; `error` is its cause.

    Parameters
    ----------
    error : BaseException
        The error; one of a pipeline that names its sample is returned as it is.
    sample : Sample, optional
        The sample that it concerns.
    what : str, optional
        The stage in which it occurred.
    """
    if isinstance(error, StreamError):
        if error.sample is not None or (sample is None and not what):
            return error
        made = type(error)(error.detail, sample, what or error.what)
    else:
        made = _kind_of(error)(f"{type(error).__name__}: {error}", sample, what)
    made.__cause__ = error
    return made


def of_iterable(error: Exception) -> StreamError:
    """Turn an error that a pushed iterable raised into one of a pipeline; only those of files are of storage."""
    made = as_stream_error(error, what="pull")
    if type(made) is StorageError and not isinstance(error, (OSError, StreamError)):
        made = InvalidArgument(made.detail, what="pull")
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
