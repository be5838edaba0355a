"""Write many files, and list the files below a folder, without Python's lock (the GIL).

In: bytes in host memory, or a folder. Out: files, or a text with a line for each file. Errors: ``OSError`` that names
the file or folder; :class:`~linumpy.errors.CoreUnavailableError` if the core cannot be used.
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
    """Write files one after another in the calling thread, each from contiguous bytes.

    `paths`: paths in folders that exist; existing files are overwritten. `data` (uint8): the bytes of all files,
    C-contiguous. `bounds` (int64, (count, 2)): begin and end of the bytes of each file in `data`. `with_checksum`:
    whether to append the CRC-32C of its bytes to each file. `suffix`: suffix of the name under which a file is written;
    the file is renamed to its path when it is complete. Empty to write to the path.

    `OSError`: A file cannot be written; the error names it, and later files are not written.
    """
    assert data.dtype == np.uint8
    assert data.flags.c_contiguous
    bounds = np.ascontiguousarray(bounds, np.int64)
    names = (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))
    failed_index = ctypes.c_int64()
    output = Output(names, len(paths), data.ctypes.data, bounds.ctypes.data, with_checksum, os.fsencode(suffix))
    code = library().waiting.lc_write_files(ctypes.byref(output), ctypes.byref(failed_index))
    if code:
        raise OSError(code, os.strerror(code), paths[failed_index.value] + suffix)


def list_files(folder: str) -> bytes:
    r"""Return a line ``path\0nbytes modification-time inode\n`` for each file below a folder.

    Paths are relative to the folder, and the entries of each folder are sorted by name. The modification time is in
    nanoseconds. Files that were removed but are still open on NFS (``.nfs…``) are left out.

    `OSError`: A folder or file cannot be read; the error names `folder`.
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
