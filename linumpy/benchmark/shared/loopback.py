"""A server of files on this machine's loopback: byte ranges by ``sendfile``, a thread a connection, several processes.

In: a folder. Out: the URL of a server. The processes run this file as a script, without importing linumpy, and listen
on one port by ``SO_REUSEPORT``. It knows what readers of object stores ask for, and no more.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

_REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable"}


@contextlib.contextmanager
def serve(folder: Path, processes: int | None = None) -> Iterator[str]:
    """Serve a folder; yields the URL.

    Parameters
    ----------
    folder : Path
        What is served.
    processes : int, optional
        By default one for each two cores.
    """
    count = processes or max(1, len(os.sched_getaffinity(0)) // 2)
    with _listening(0) as reserved:  # without listening, so that no connection comes here
        port = reserved.getsockname()[1]
        command = [sys.executable, __file__, str(folder), str(port), str(os.getpid())]
        servers = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(count)]
        try:
            for server in servers:
                assert server.stdout is not None
                if not server.stdout.readline():
                    raise OSError("a server for the benchmark ended at its start")
            yield f"http://127.0.0.1:{port}"
        finally:
            for server in servers:
                server.terminate()
                server.communicate()


def _listening(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    found.bind(("127.0.0.1", port))
    return found


class _Files:
    """Open files by path, with their sizes."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._known: dict[str, tuple[int, int, str]] = {}

    def find(self, path: str) -> tuple[int, int, str] | None:
        """Return the descriptor of a file, its size and its ETag; None where there is none."""
        if path not in self._known:
            name = os.path.realpath(self._folder + unquote(path))
            if not name.startswith(self._folder + "/") or not os.path.isfile(name):
                return None
            descriptor = os.open(name, os.O_RDONLY)
            status = os.fstat(descriptor)
            self._known[path] = descriptor, status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        return self._known[path]


def _answer(connection: socket.socket, files: _Files, head: str) -> None:
    method, path, _ = head.split(" ", 2)
    found = files.find(path.partition("?")[0])
    if found is None:
        _begin(connection, 404, "", 0)
        return
    descriptor, size, tag = found
    first, stop, status, lines = 0, size, 200, f"ETag: {tag}\r\nAccept-Ranges: bytes\r\n"
    if asked := re.search(r"\r\nrange: bytes=(\d*)-(\d*)", head, re.IGNORECASE):
        status = 206
        first = int(asked[1]) if asked[1] else max(0, size - int(asked[2]))
        stop = min(size, int(asked[2]) + 1) if asked[1] and asked[2] else size
        if first >= stop:
            _begin(connection, 416, "", 0)
            return
        lines += f"Content-Range: bytes {first}-{stop - 1}/{size}\r\n"
    has_body = method != "HEAD" and first < stop
    _begin(connection, status, lines, stop - first, more=has_body)
    while has_body and first < stop:
        first += os.sendfile(connection.fileno(), descriptor, first, stop - first)


def _begin(connection: socket.socket, status: int, lines: str, nbytes: int, *, more: bool = False) -> None:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{lines}Content-Length: {nbytes}\r\n\r\n"
    # Only where a body follows: the system keeps such bytes back for 200 ms.
    connection.sendall(head.encode(), socket.MSG_MORE if more else 0)


def _attend(connection: socket.socket, files: _Files) -> None:
    """Answer the requests of a connection, until its other end closes it."""
    waiting = b""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while b"\r\n\r\n" not in waiting:
                got = connection.recv(65536)
                if not got:
                    return
                waiting += got
            head, _, waiting = waiting.partition(b"\r\n\r\n")
            _answer(connection, files, head.decode("latin-1"))


def _end_with(parent: int) -> None:
    """End this process when the benchmark has ended, however it did."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main(folder: str, port: str, parent: str) -> None:
    """Serve until the process is ended."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    files = _Files(folder)
    with _listening(int(port)) as listener:
        listener.listen(1024)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=_attend, args=(connection, files), daemon=True).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
