"""Write raw chunks from device memory by cuFile, many at the same time.

In: chunks of one size, as rows of bytes on the device, which the caller has waited for. Out: their files. A chunk that
kvikio fails to write is written again from host memory, which raises the system's own error (``OSError``).
"""

from __future__ import annotations

import logging
from typing import Any

from linumpy.arrays import Array
from linumpy.device import to_host
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.io.budget import PROCESS, Share
from linumpy.write.chunk_file import write_file

log = logging.getLogger(__name__)

#: Files open at the same time, and descriptors that kvikio opens for each.
_OPEN_FILES, _DESCRIPTORS = 128, 2


def write_rows(paths: list[str], rows: Array) -> None:
    """Write each row of bytes to its file by kvikio; after an error or interrupt too, no write is still running."""
    most = min(_OPEN_FILES, len(paths))
    with PROCESS.take(Share(_DESCRIPTORS), Share(_DESCRIPTORS * most)) as share, transfer_settings():
        step = share.descriptors // _DESCRIPTORS
        for begin in range(0, len(paths), step):
            batch = _Batch(rows.shape[1])
            try:
                batch.start(paths[begin : begin + step], rows[begin : begin + step])
            finally:
                batch.wait()
            if batch.failed:
                log.warning("kvikio did not write %d chunks (%s); they are written from host memory", *batch.why())
            for number in batch.failed:
                # Raises the system's error instead of kvikio's, unless the error was temporary.
                write_file(paths[begin + number], [[to_host(rows[begin + number])]])


class _Batch:
    """Files of equal size that kvikio writes at the same time."""

    def __init__(self, nbytes: int) -> None:
        self.failed: dict[int, str] = {}
        self._nbytes = nbytes
        self._files: list[Any] = []
        self._futures: list[tuple[int, Any]] = []

    def start(self, paths: list[str], rows: Array) -> None:
        """Open all files and start their writes."""
        import kvikio

        for number, path in enumerate(paths):
            try:
                self._files.append(kvikio.CuFile(path, "w"))
                self._futures.append((number, self._files[-1].pwrite(rows[number])))
            except (RuntimeError, OSError) as error:
                self.failed[number] = str(error)

    def wait(self) -> None:
        """Wait for all writes, after an interrupt too, since they read from the rows; note which failed."""
        interrupt: BaseException | None = None
        for number, future in self._futures:
            try:
                count = future.get()
                if count != self._nbytes:
                    self.failed[number] = f"{count} of {self._nbytes} bytes"
            except (RuntimeError, OSError) as error:
                self.failed[number] = str(error)
            except BaseException as error:
                interrupt = error
        for file in self._files:
            file.close()
        if interrupt is not None:
            raise interrupt

    def why(self) -> tuple[int, str]:
        """Return how many writes failed, and the reason of one."""
        return len(self.failed), next(iter(self.failed.values()))
