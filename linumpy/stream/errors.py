"""Exceptions of a pipeline: one for each status, each also a subclass of the matching built-in exception.

Also the log level, whose numbers are damacy's.
"""

from __future__ import annotations

import enum
import errno
import logging
from typing import ClassVar

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
        The faulty sample.
    what : str, optional
        The stage; by default the stage in which errors of this class usually occur.

    Attributes
    ----------
    status : Status
        Kind of the error.
    what : str
        Stage of the error: ``"argument"``, ``"pull"`` (the iterable that was pushed), ``"open"``, ``"plan"``,
        ``"read"``, ``"decode"``, ``"assemble"``, ``"pop"``, ``"memory"``, ``"device"`` or ``"close"``.
    detail : str
        What went wrong, without the sample.
    sample : Sample or None
        The faulty sample; None for an error of the whole batch or pipeline.
    """

    status: ClassVar[Status] = Status.OK
    _stage: ClassVar[str] = "pop"

    def __init_subclass__(cls, *, status: Status | None = None, stage: str | None = None) -> None:
        super().__init_subclass__()
        cls.status, cls._stage = status or cls.status, stage or cls._stage

    def __init__(self, detail: str, sample: object = None, what: str = "") -> None:
        super().__init__(detail if sample is None else f"{detail} (sample {sample})")
        self.what = what or self._stage
        self.detail = detail
        self.sample = sample

    def __reduce__(self) -> tuple[type[StreamError], tuple[str, object, str]]:
        return type(self), (self.detail, self.sample, self.what)


#: The name in damacy, for code that was written for it.
DamacyError = StreamError


class TryAgain(StreamError, BlockingIOError, status=Status.TRY_AGAIN):  # noqa: N818 - the name is part of the interface
    """There is no batch now: too few samples were pushed, or the user holds the memory of all batches."""


class InvalidArgument(StreamError, ValueError, status=Status.INVALID_ARGUMENT, stage="argument"):  # noqa: N818
    """A parameter is invalid, or a sample does not fit its array or batch."""


class ArgumentTypeError(InvalidArgument, TypeError):
    """A parameter has a wrong type."""


class NotFound(StreamError, FileNotFoundError, status=Status.NOT_FOUND, stage="open"):  # noqa: N818
    """The array of a sample does not exist."""


class DtypeMismatch(StreamError, TypeError, status=Status.DTYPE_MISMATCH, stage="plan"):  # noqa: N818
    """A sample has another dtype in the batch than the first sample, or complex numbers would have to be cast."""


class RankMismatch(StreamError, ValueError, status=Status.RANK_MISMATCH, stage="plan"):  # noqa: N818
    """A crop has another number of axes than its array or the first sample, or drops other axes."""


class StorageError(StreamError, OSError, status=Status.STORAGE_ERROR, stage="read"):
    """Stored bytes cannot be read; also an error of no other class."""


class DecodeError(StreamError, OSError, status=Status.DECODE_ERROR, stage="decode"):
    """Stored bytes do not match the array's metadata."""


class NativeCudaError(StreamError, RuntimeError, status=Status.CUDA_ERROR, stage="device"):
    """CUDA reported an error."""


class OutOfMemory(StreamError, MemoryError, status=Status.OUT_OF_MEMORY, stage="memory"):  # noqa: N818
    """Memory cannot be allocated."""


class ShutdownError(StreamError, RuntimeError, status=Status.SHUTDOWN, stage="close"):
    """The pipeline is closed."""


_BY_NUMBER = {errno.ENOENT: NotFound, errno.ENOMEM: OutOfMemory}


def as_stream_error(error: BaseException, sample: object = None, what: str = "") -> StreamError:
    """Convert an error of a read, of opening an array or of CUDA to a :class:`StreamError`, and set it as the cause.

    A :class:`StreamError` is returned unchanged if it names its sample, or if neither `sample` nor `what`, the stage,
    is passed.
    """
    if isinstance(error, StreamError):
        if error.sample is not None or (sample is None and not what):
            return error
        converted = type(error)(error.detail, sample, what or error.what)
    else:
        converted = _error_class(error)(f"{type(error).__name__}: {error}", sample, what)
    converted.__cause__ = error
    return converted


def iterable_error(error: Exception) -> StreamError:
    """Convert an error that a pushed iterable raised; an error of unknown class becomes an :class:`InvalidArgument`."""
    converted = as_stream_error(error, what="pull")
    if type(converted) is StorageError and not isinstance(error, (OSError, StreamError)):
        converted = InvalidArgument(converted.detail, what="pull")
        converted.__cause__ = error
    return converted


def _error_class(error: BaseException) -> type[StreamError]:
    module = type(error).__module__.partition(".")[0]
    if module in ("cupy", "cupy_backends") and not isinstance(error, MemoryError):
        return NativeCudaError
    if isinstance(error, ChunkError):
        cause = error.__cause__  # an error of the operating system, if the read itself failed
        return StorageError if isinstance(cause, OSError) and cause.errno is not None else DecodeError
    if isinstance(error, MemoryError):
        return OutOfMemory
    if isinstance(error, OSError):
        return _BY_NUMBER.get(error.errno or 0, NotFound if isinstance(error, FileNotFoundError) else StorageError)
    if isinstance(error, (ValueError, TypeError, LookupError, ArithmeticError, NotImplementedError)):
        return InvalidArgument
    return StorageError


#: TRACE, DEBUG, INFO, WARN, ERROR and FATAL, by number.
_LOG_LEVELS = (5, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


def set_log_level(level: int | str) -> None:
    """Set the lowest level that :mod:`linumpy.stream` logs.

    Parameters
    ----------
    level : int or str
        0 to 5 for TRACE, DEBUG, INFO, WARN, ERROR, FATAL, or one of these names; or a level of :mod:`logging`, 10 or
        more.

    Raises
    ------
    InvalidArgument
        `level` is another number or name.
    """
    number: int | None
    if isinstance(level, str):
        number = {"TRACE": _LOG_LEVELS[0], **logging.getLevelNamesMapping()}.get(level.upper())
    elif isinstance(level, bool) or not isinstance(level, int):
        number = None
    elif 0 <= level < len(_LOG_LEVELS):
        number = _LOG_LEVELS[level]
    else:
        number = level if level >= logging.DEBUG else None
    if not number:
        raise InvalidArgument(
            f"level must be 0 (TRACE) to 5 (FATAL), a level of logging, or the name of one (got {level!r})"
        )
    logging.getLogger("linumpy.stream").setLevel(number)
