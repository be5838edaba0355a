"""Load the native core by ctypes, and declare the functions and records of ``src/core.h`` in Python.

In: nothing. Out: :func:`library`, for the other modules of this package; records, whose fields ``src/core.h`` explains;
:func:`why_not_decoded`. Errors: :class:`~linumpy.errors.CoreUnavailableError` if the core was not built or is switched
off, or has another interface number or other sizes of records.

Functions of :attr:`Library.quick` keep Python's lock (the GIL): they copy their arguments and return at once, whereas
acquiring the lock again beside a busy thread takes 5 ms. Functions of :attr:`Library.waiting` release the lock.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib.util
import os
import sys
import warnings
from ctypes import POINTER, c_char, c_char_p, c_double, c_int64, c_uint8, c_void_p
from typing import Any, NamedTuple

from linumpy.device import call_after_fork
from linumpy.errors import CoreUnavailableError
from linumpy.plan.codecs import DecodeChain
from linumpy.plan.layout import MAX_RANK

#: Version of the interface, equal to LC_ABI in core.h.
ABI = 15
#: Environment variable; the value "0" switches the core off, for comparison.
CORE_VARIABLE = "LINUMPY_CORE"
#: Advice for an installation in which the core was not built.
HOW_TO_BUILD = (
    "install a C++20 compiler, on Debian and Ubuntu by apt install g++, then install linumpy again"
    " (from an sdist with pip --no-cache-dir)"
)

#: Data types by NumPy's kind and size, in the order of lc_dtype: the code of a type is its index here.
DTYPES = ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")
DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
BFLOAT16 = len(DTYPES)
#: Compressors in the order of lc_compressor: the code of a compressor is its index here.
COMPRESSORS = ("", "zstd", "lz4", "zlib", "gzip", "blosc")


class Decoder(NamedTuple):
    """A library that the core opens at run time: its file name, its package on Debian, and the codecs it decodes."""

    file: str
    package: str
    codecs: str


#: By the name of :attr:`~linumpy.plan.codecs.DecodeChain.streams_by`, in the order of lc_library.
DECODERS = {
    "zstd": Decoder("libzstd.so.1", "libzstd1", "zstd"),
    "lz4": Decoder("liblz4.so.1", "liblz4-1", "lz4"),
    "inflate": Decoder("libz.so.1", "zlib1g", "zlib, gzip"),
}

# Codes of the reasons why a job failed: lc_error_code.
(
    OK, OPEN, NOT_FILE, SIZE, REPLACED, READ, SHORT, INDEX, DECODE, GONE, MEMORY, THREAD, CLOSED, CANCELLED, INTERNAL,
    DEVICE, CHANGED, ENTRY, MISSING, REMOTE, BROKEN,
) = range(21)  # fmt: skip

_Axes = c_int64 * MAX_RANK


def _integers(*names: str) -> tuple[tuple[str, type[c_int64]], ...]:
    return tuple((name, c_int64) for name in names)


def _doubles(*names: str) -> tuple[tuple[str, type[c_double]], ...]:
    return tuple((name, c_double) for name in names)


class Chain(ctypes.Structure):
    """How a chunk was encoded: ``lc_chain``."""

    _fields_ = _integers("is_encoded", "compressor", "inner", "stored_checksum", "decoded_checksum", "shuffle")


class Geometry(ctypes.Structure):
    """How chunks are stored in arrays of one geometry (chunk shape, dtype, codecs, shards): ``lc_geometry``."""

    _fields_ = (
        ("rank", c_int64),
        ("chunk_shape", _Axes),
        ("stored_axes", _Axes),
        ("chunks_per_shard", _Axes),
        *_integers("index_at_end", "index_big_endian", "index_checksum", "dtype", "swapped"),
        ("chain", Chain),
    )


class Look(ctypes.Structure):
    """The version of a file (device, inode, size, times), to detect changes: ``lc_look``."""

    _fields_ = (("path", c_char_p), *_integers("device", "inode", "nbytes", "written", "changed"))


class Entry(ctypes.Structure):
    """An entry of a ZIP file: ``lc_entry``."""

    _fields_ = _integers("number", "header", "nbytes")


class Array(ctypes.Structure):
    """One array: ``lc_array``."""

    _fields_ = (
        ("prefix", c_char_p),
        ("separator", c_char_p),
        ("metadata", c_char_p),
        ("looks", POINTER(Look)),
        ("look_count", c_int64),
        ("archive", POINTER(Look)),
        ("grid", _Axes),
        ("entries", c_void_p),
        *_integers("entry_count", "store"),
    )


class Argument(ctypes.Structure):
    """An argument of a kernel, the sum of a constant and of multiples of a slab's addresses and stored bytes."""

    _fields_ = _integers("constant", "base", "status", "stored")


class Launch(ctypes.Structure):
    """A kernel that decodes a slab: ``lc_launch``."""

    _fields_ = (
        *_integers("function", "grid_x", "grid_y", "block", "shared", "argument_count"),
        ("arguments", Argument * 12),
    )


class DecodePlan(ctypes.Structure):
    """How chunks of one kind are decoded on a device: ``lc_decode_plan``."""

    _fields_ = (
        *_integers(
            "chunks", "stored_nbytes", "stored", "slots", "slab_nbytes", "capacity", "each", "has_pool", "reordered",
            "chunk_nbytes", "chunk_stride", "target_nbytes", "checksum_nbytes", "counter", "codec", "shuffle",
            "device_from", "launch_count",
        ),
        ("launches", POINTER(Launch)),
        ("layouts", c_void_p),
    )  # fmt: skip


class Scatter(ctypes.Structure):
    """Scatter kernels of one conversion and rank: ``lc_scatter``."""

    _fields_ = (("rank", c_int64), ("axes", _Axes), ("functions", c_int64 * 5), ("is_copy", c_int64))


class OnDevice(ctypes.Structure):
    """What a batch with outputs on a device needs in addition to its regions: ``lc_on_device``."""

    _fields_ = (
        ("scatter", POINTER(Scatter)),
        ("decode", POINTER(DecodePlan)),
        *_integers("ready", "timed", "memory"),
    )


class DirectRead(ctypes.Structure):
    """One read of stored bytes into device memory: ``lc_direct_read``."""

    _fields_ = (("path", c_char_p), *_integers("offset", "nbytes", "address", "result"))


class Fetch(ctypes.Structure):
    """One request to an object store: ``lc_fetch``."""

    _fields_ = (
        ("store", c_int64),
        ("key", c_char_p),
        *_integers("offset", "nbytes", "capacity"),
        ("returned", POINTER(c_int64)),
        *_integers("returned_count", "code", "address", "got", "loan", "size"),
        ("version", c_int64 * 2),
        ("text", c_char * 256),
    )


#: ``lc_fetch_object``
FetchObject = ctypes.CFUNCTYPE(None, POINTER(Fetch))
#: ``lc_read_direct``
ReadDirect = ctypes.CFUNCTYPE(None, POINTER(DirectRead), c_int64)


class Device(ctypes.Structure):
    """The device of a reader, and the number and sizes of its slabs: ``lc_device``."""

    _fields_ = (
        *_integers("context", "slabs", "pinned_nbytes", "slots", "device_nbytes", "rows", "timed"),
        ("direct", ReadDirect),
        ("keep", POINTER(Scatter)),
    )


class Batch(ctypes.Structure):
    """Regions of arrays of one geometry: ``lc_batch``."""

    _fields_ = (
        ("geometry", POINTER(Geometry)),
        ("arrays", POINTER(Array)),
        *_integers("array_count", "region_count"),
        *((name, c_void_p) for name in ("array", "start", "stop", "strides", "address")),
        ("target", c_int64),
        ("fill", c_uint8 * 16),
        ("one_job", c_int64),
        ("on_device", POINTER(OnDevice)),
    )


class Error(ctypes.Structure):
    """Why a job failed: ``lc_error``."""

    _fields_ = (
        *_integers("code", "number", "a", "b"),
        ("object", _Axes),
        ("chunk", _Axes),
        *_integers("offset", "nbytes"),
        ("text", c_char * 256),
    )


class Report(ctypes.Structure):
    """Counts and times of a job: ``lc_report``."""

    _fields_ = (
        *_integers("chunks", "filled", "decoded", "bytes_read", "files_opened", "reads_repeated"),
        *_doubles("seconds", "decode_seconds", "device_decode_seconds", "device_scatter_seconds"),
    )


class Stats(ctypes.Structure):
    """Counts and times of a reader: ``lc_stats``."""

    _fields_ = (
        *_integers(
            "jobs", "chunks", "boxes", "tasks", "bytes_read", "index_hits", "index_misses", "files_opened", "hedges",
            "decoded", "kept_hits", "kept_misses", "kept_nbytes", "slabs", "copies", "copied_nbytes", "slabs_decoded",
            "decoded_nbytes",
        ),
        *_doubles(
            "plan_seconds", "read_seconds", "decode_seconds", "copy_seconds", "device_copy_seconds",
            "device_decode_seconds", "device_scatter_seconds",
        ),
    )  # fmt: skip


class Output(ctypes.Structure):
    """Files to write: ``lc_output``."""

    _fields_ = (
        ("paths", POINTER(c_char_p)),
        ("count", c_int64),
        ("base", c_void_p),
        ("bounds", c_void_p),
        ("with_checksum", c_int64),
        ("suffix", c_char_p),
    )


#: Records whose sizes are compared with the library's, in the order of ``lc_record_sizes``.
_RECORDS = (
    Chain, Geometry, Array, Batch, Error, Report, Stats, Launch, DecodePlan, Scatter, OnDevice, Device, DirectRead,
    Look, Entry, Fetch, Output,
)  # fmt: skip
_Signatures = dict[str, tuple[Any, list[Any]]]
"""Type of the result, and types of the arguments, of each function."""

_QUICK: _Signatures = {
    "lc_reader_new": (c_void_p, [c_int64, c_int64, POINTER(Device), c_char_p]),
    "lc_reader_memory": (None, [c_void_p, c_int64, c_int64, c_int64]),
    "lc_reader_close": (None, [c_void_p]),
    "lc_reader_delete": (None, [c_void_p]),
    "lc_reader_stats": (None, [c_void_p, POINTER(Stats)]),
    "lc_submit": (c_int64, [c_void_p, POINTER(Batch), POINTER(c_void_p)]),
    "lc_job_done": (c_int64, [c_void_p]),
    "lc_since_wait": (c_double, []),
    "lc_jobs_over": (c_int64, [c_void_p, c_int64]),
    "lc_jobs_failed": (c_int64, [c_void_p, c_int64, c_int64]),
    "lc_jobs_release": (c_int64, [c_void_p, c_int64]),
    "lc_job_cancel": (c_int64, [c_void_p]),
    "lc_job_error": (None, [c_void_p, POINTER(Error)]),
    "lc_job_report": (None, [c_void_p, POINTER(Report)]),
    "lc_set_fetch": (None, [FetchObject]),
    "lc_set_reads": (None, [c_int64]),
    "lc_set_hedging": (None, [c_int64]),
    "lc_after_fork": (None, []),
    "lc_fail_next": (None, [c_int64, c_int64, c_int64]),
}
_WAITING: _Signatures = {
    "lc_wait_closed": (c_int64, [c_void_p, c_double]),
    "lc_wait_capacity": (c_int64, [c_void_p, c_double]),
    "lc_wait_jobs": (c_int64, [c_void_p, c_int64, c_double]),
    "lc_wait_job": (c_int64, [c_void_p, c_double]),
    "lc_decode": (c_int64, [POINTER(Chain), c_void_p, c_int64, c_void_p, c_int64, c_char_p]),
    "lc_write_files": (c_int64, [POINTER(Output), POINTER(c_int64)]),
    "lc_list_files": (c_int64, [c_char_p, POINTER(c_void_p), POINTER(c_int64)]),
    "lc_open_library": (c_int64, [c_int64, c_char_p, c_char_p]),
    "lc_free": (None, [c_void_p]),
    "lc_trace_rays": (c_int64, [c_int64, c_int64, c_int64, c_void_p, c_int64, c_int64]),
    "lc_draw_points": (c_int64, [*[c_void_p] * 4, c_int64, c_int64, c_void_p, c_void_p]),
    "lc_shutdown": (None, []),
}


class Library:
    """The loaded core.

    `quick`: functions that return at once, under Python's lock. `waiting`: functions that wait or decode, without
    Python's lock. `opened`, `missing`: path and version of the library of each of :data:`DECODERS`, or why it cannot be
    loaded.
    """

    def __init__(self, path: str) -> None:
        self.quick, self.waiting = ctypes.PyDLL(path), ctypes.CDLL(path)
        _check(self.quick, path)
        for library, functions in ((self.quick, _QUICK), (self.waiting, _WAITING)):
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
        self.opened: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        for number, name in enumerate(DECODERS):
            self._open(number, name, *DECODERS[name])

    def _open(self, number: int, name: str, file: str, package: str, codecs: str) -> None:
        """Open a decoder's library: that of this Python's environment, such as conda's, or else the system's."""
        folders = dict.fromkeys(os.path.join(prefix, "lib") for prefix in (sys.prefix, sys.base_prefix))
        candidates = [path for folder in folders if os.path.exists(path := os.path.join(folder, file))]
        reasons, text = [], ctypes.create_string_buffer(1024)
        for path in (*candidates, file):
            is_open = not self.waiting.lc_open_library(number, os.fsencode(path), text)
            reasons.append(os.fsdecode(text.value))
            if is_open:
                self.opened[name] = reasons[-1]
                return
        self.missing[name] = (
            f"{file} cannot be loaded ({'; '.join(reasons)}): zarr-python decodes {codecs}, slowly"
            f" (on Debian and Ubuntu: apt install {package})"
        )


def _check(library: ctypes.CDLL, path: str) -> None:
    """Raise `CoreUnavailableError` for a library with another interface number or other sizes of records."""
    library.lc_abi.restype = c_int64
    abi = int(library.lc_abi())
    if abi == ABI:
        sizes = (c_int64 * len(_RECORDS))()
        library.lc_record_sizes(sizes)
        if list(sizes) == [ctypes.sizeof(record) for record in _RECORDS]:
            return
    raise CoreUnavailableError(
        f"the native core at {path} has interface {abi}, and this linumpy needs {ABI}: install linumpy again"
    )


def why_no_core() -> str | None:
    """Return why the native core cannot be used; None if it can."""
    if os.environ.get(CORE_VARIABLE) == "0":
        return f"{CORE_VARIABLE}=0 switches the native core off"
    return _load()[1]


def library() -> Library:
    """Return the native core.

    `CoreUnavailableError`: The core was not built, has another interface, or is switched off.
    """
    reason, loaded = why_no_core(), _load()[0]
    if loaded is None or reason is not None:
        raise CoreUnavailableError(reason)
    return loaded


def why_not_decoded(chain: DecodeChain | None) -> str | None:
    """Return why the core cannot load the library that decodes chunks; None if it can, or needs none."""
    loaded = _load()[0]
    if chain is None or loaded is None or not loaded.missing:
        return None
    return loaded.missing.get(chain.streams_by)


@functools.cache
def _load() -> tuple[Library | None, str | None]:
    """Load the core; return it, or None and the reason why it cannot be used."""
    # An editable install keeps the library in another folder than the Python files, where find_spec finds it.
    spec = importlib.util.find_spec("linumpy.core.liblinumpy_core")
    if spec is None or spec.origin is None:
        return None, f"linumpy was installed without its native core ({HOW_TO_BUILD})"
    try:
        loaded = Library(spec.origin)
    except (OSError, AttributeError, CoreUnavailableError) as error:
        # The library exists but is outdated or needs a newer libc: warn, since reads become slow.
        warnings.warn(f"{error}; zarr-python reads instead, slowly", RuntimeWarning, stacklevel=3)
        return None, str(error)
    call_after_fork(loaded.quick.lc_after_fork)
    atexit.register(loaded.waiting.lc_shutdown)
    return loaded, None
