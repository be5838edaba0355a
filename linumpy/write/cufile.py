"""Write raw chunks from device memory by cuFile, many at the same time.

In: chunks of one size, as rows of bytes on the device; the caller has waited for the work that writes the rows. Out: a
file for each chunk. A chunk that kvikio fails to write is written again from host memory. If that fails, too, the error
is the system's own (``OSError``).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from linumpy.arrays import Array
from linumpy.device import to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.io.budget import PROCESS, Share
from linumpy.write.chunk_file import write_file

if TYPE_CHECKING:
    from kvikio import CuFile
    from kvikio.cufile import IOFuture

log = logging.getLogger(__name__)

#: Limit of files that are open at the same time, and descriptors that kvikio opens for each file.
_MAX_OPEN_FILES, _DESCRIPTORS_PER_FILE = 128, 2


def write_rows(paths: list[str], rows: Array) -> None:
    """Write each row of bytes to its file by kvikio; all writes have ended when this returns or raises."""
    max_open = min(_MAX_OPEN_FILES, len(paths))
    min_share, max_share = Share(_DESCRIPTORS_PER_FILE), Share(_DESCRIPTORS_PER_FILE * max_open)
    with PROCESS.take(min_share, max_share) as share, transfer_settings():
        step = share.descriptors // _DESCRIPTORS_PER_FILE
        for begin in range(0, len(paths), step):
            batch = _RowWrites(rows.shape[1])
            try:
                batch.start(paths[begin : begin + step], rows[begin : begin + step])
            finally:
                batch.wait()
            if batch.failed:
                log.warning("kvikio did not write %d chunks (%s); they are written from host memory", *batch.failures())
            for index in batch.failed:
                # Raises the system's error instead of kvikio's. A temporary error does not come back.
                write_file(paths[begin + index], [[to_host(rows[begin + index])]])


class _RowWrites:
    """Files of equal size that kvikio writes at the same time."""

    def __init__(self, nbytes: int) -> None:
        self.failed: dict[int, str] = {}
        self._nbytes = nbytes
        self._files: list[CuFile] = []
        self._futures: list[tuple[int, IOFuture]] = []

    def start(self, paths: list[str], rows: Array) -> None:
        """Open all files and start their writes."""
        import kvikio

        for index, path in enumerate(paths):
            try:
                self._files.append(kvikio.CuFile(path, "w"))
                self._futures.append((index, self._files[-1].pwrite(rows[index])))
            except (RuntimeError, OSError) as error:
                self.failed[index] = str(error)

    def wait(self) -> None:
        """Wait for all writes, and record those that failed. An interrupt is raised at the end: writes use the rows."""
        interrupt: BaseException | None = None
        for index, future in self._futures:
            try:
                count = future.get()
                if count != self._nbytes:
                    self.failed[index] = f"{count} of {self._nbytes} bytes"
            except (RuntimeError, OSError) as error:
                self.failed[index] = str(error)
            except BaseException as error:
                interrupt = error
        for file in self._files:
            file.close()
        if interrupt is not None:
            raise interrupt

    def failures(self) -> tuple[int, str]:
        """Return how many writes failed, and the reason of the first failure."""
        return len(self.failed), next(iter(self.failed.values()))
