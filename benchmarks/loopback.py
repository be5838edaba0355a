"""A server of files on this machine's loopback: byte ranges by ``sendfile``, a thread per connection, many processes.

The processes run this file as a script, and share a port by ``SO_REUSEPORT``. They answer only the requests that
readers of object stores send: GET and HEAD, with at most one range; each after a latency, if one is given.
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

from linumpy.device import usable_cores

_REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable"}


@contextlib.contextmanager
def serve(folder: Path, latency_ms: float = 0.0) -> Iterator[str]:
    """Serve a folder by a process for every two cores; yield the URL. Raises ``OSError`` if one does not start."""
    count = max(1, usable_cores() // 2)
    with _bound_socket(0) as reserved:  # reserves the port; it does not listen, so that it gets no connection
        port = reserved.getsockname()[1]
        command = [sys.executable, __file__, str(folder), str(port), str(os.getpid()), str(latency_ms)]
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


def _bound_socket(port: int) -> socket.socket:
    """Return a socket on a port of the loopback, which other processes may share; 0 for a free port."""
    result = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    result.bind(("127.0.0.1", port))
    return result


class _Files:
    """The files that were requested; they are opened once and stay open."""

    def __init__(self, folder: str) -> None:
        self._folder = os.path.realpath(folder)
        self._open: dict[str, tuple[int, int, str]] = {}

    def find(self, path: str) -> tuple[int, int, str] | None:
        """Return the descriptor of a file, its size and its ETag; None if the folder has no such file."""
        if path not in self._open:
            name = os.path.realpath(self._folder + unquote(path))
            if not name.startswith(self._folder + "/") or not os.path.isfile(name):
                return None
            descriptor = os.open(name, os.O_RDONLY)
            status = os.fstat(descriptor)
            self._open[path] = descriptor, status.st_size, f'"{status.st_mtime_ns:x}-{status.st_size:x}"'
        return self._open[path]


def _answer(connection: socket.socket, files: _Files, head: str) -> None:
    """Answer a request, whose request line and headers are `head`."""
    method, path, _ = head.split(" ", 2)
    file = files.find(path.partition("?")[0])
    if file is None:
        _send_head(connection, 404, "", 0)
        return
    descriptor, size, tag = file
    first, stop, status, headers = 0, size, 200, f"ETag: {tag}\r\nAccept-Ranges: bytes\r\n"
    if requested := re.search(r"\r\nrange: bytes=(\d*)-(\d*)", head, re.IGNORECASE):
        status = 206
        first = int(requested[1]) if requested[1] else max(0, size - int(requested[2]))
        stop = min(size, int(requested[2]) + 1) if requested[1] and requested[2] else size
        if first >= stop:
            _send_head(connection, 416, "", 0)
            return
        headers += f"Content-Range: bytes {first}-{stop - 1}/{size}\r\n"
    has_body = method != "HEAD" and first < stop
    _send_head(connection, status, headers, stop - first, has_body=has_body)
    while has_body and first < stop:
        first += os.sendfile(connection.fileno(), descriptor, first, stop - first)


def _send_head(connection: socket.socket, status: int, headers: str, nbytes: int, *, has_body: bool = False) -> None:
    head = f"HTTP/1.1 {status} {_REASONS[status]}\r\n{headers}Content-Length: {nbytes}\r\n\r\n"
    # MSG_MORE only if a body follows: the system holds such bytes back for up to 200 ms.
    connection.sendall(head.encode(), socket.MSG_MORE if has_body else 0)


def _serve_connection(connection: socket.socket, files: _Files, latency: float) -> None:
    """Answer the requests of a connection, until its other end closes it."""
    received = b""
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            while b"\r\n\r\n" not in received:
                data = connection.recv(65536)
                if not data:
                    return
                received += data
            head, _, received = received.partition(b"\r\n\r\n")
            time.sleep(latency)
            _answer(connection, files, head.decode("latin-1"))


def _end_with(parent: int) -> None:
    """End this process when the benchmark's process has ended."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(0)


def main(folder: str, port: str, parent: str, latency_ms: str) -> None:
    """Serve until the process is ended."""
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    files = _Files(folder)
    with _bound_socket(int(port)) as listener:
        listener.listen(1024)
        print("ready", flush=True)
        while True:
            connection, _ = listener.accept()
            threading.Thread(
                target=_serve_connection, args=(connection, files, float(latency_ms) / 1e3), daemon=True
            ).start()


if __name__ == "__main__":
    main(*sys.argv[1:])
