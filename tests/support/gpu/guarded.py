"""Arrays beside forbidden memory: a kernel that reads or writes beyond them ends its process."""

import ctypes
import mmap

import numpy as np

_PAGE = mmap.PAGESIZE
_C = ctypes.CDLL(None, use_errno=True)


def guarded(values, at_end):
    """Copy an array to where the page behind its last byte, or before its first one, is forbidden."""
    values = np.ascontiguousarray(values)
    pages = max(1, -(-values.nbytes // _PAGE))
    memory = mmap.mmap(-1, (pages + 2) * _PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for page in (0, pages + 1):
        assert _C.mprotect(ctypes.c_void_p(start + page * _PAGE), ctypes.c_size_t(_PAGE), 0) == 0
    offset = _PAGE + (pages * _PAGE - values.nbytes if at_end else 0)
    array = np.frombuffer(memory, values.dtype, values.size, offset).reshape(values.shape)
    array[...] = values
    return array
