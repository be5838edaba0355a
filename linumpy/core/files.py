"""Write many files, and list those below a folder, without Python's lock (the GIL).

In: bytes in host memory, or a folder. Out: files, or a line for each file. Errors: ``OSError`` that names the file;
:class:`~linumpy.errors.CoreUnavailableError` where the core was not built.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

import numpy as np

from linumpy.core.native import Output, library


def write_files(
    paths: Sequence[str], data: np.ndarray, bounds: np.ndarray, *, with_checksum: bool = False, suffix: str = ""
) -> None:
    """Write files, each from contiguous bytes.

    Parameters
    ----------
    paths : sequence of str
        Paths in folders that exist; existing files are overwritten.
    data : numpy.ndarray of uint8
        The bytes of all files.
    bounds : numpy.ndarray of int64, (count, 2)
        Begin and end of the bytes of each file in `data`.
    with_checksum : bool
        Whether to append the CRC-32C of the bytes to each file.
    suffix : str
        Appended to the name of a file until it is complete.

    Raises
    ------
    OSError
        Naming the file. Later files are not written.
    """
    assert data.dtype == np.uint8
    assert data.flags.c_contiguous
    bounds = np.ascontiguousarray(bounds, np.int64)
    names = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
    number = ctypes.c_int64()
    output = Output(names, len(paths), data.ctypes.data, bounds.ctypes.data, with_checksum, os.fsencode(suffix))
    code = library().waiting.lc_write_files(ctypes.byref(output), ctypes.byref(number))
    if code:
        raise OSError(code, os.strerror(code), paths[number.value] + suffix)


def list_files(folder: str) -> bytes:
    r"""Return a line for each file below a folder, sorted by name: ``name\0size modification-time inode\n``.

    The modification time is in nanoseconds. Removed files that are still open (``.nfs…``) are left out.
    """
    text, nbytes = ctypes.c_void_p(), ctypes.c_int64()
    waiting = library().waiting
    code = waiting.lc_list_files(os.fsencode(folder), ctypes.byref(text), ctypes.byref(nbytes))
    if code:
        raise OSError(code, os.strerror(code), folder)
    try:
        return ctypes.string_at(text, nbytes.value)  # type: ignore[arg-type]
    finally:
        waiting.lc_free(text)
