"""Write the file of a chunk from arrays in host memory. Errors: ``OSError`` that names the file."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np


def write_file(path: str, parts: Iterable[tuple[np.ndarray, int]]) -> None:
    """Write a file from pairs of an array and its offset in bytes.

    Raises
    ------
    OSError
        Naming the file.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        for array, offset in parts:
            left = memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            while len(left):
                count = os.pwrite(descriptor, left, offset)
                left, offset = left[count:], offset + count
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)
