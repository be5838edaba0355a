"""A real HTTP server of a folder, with ranges and ETags, and with faults that a test asks for."""

import hashlib
import re
import socket
import socketserver
import struct
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote


@dataclass
class Faults:
    """What goes wrong, for paths that contain ``where``.

    Attributes
    ----------
    busy : int
        So many requests get 503 first.
    busy_until : float
        Requests get 503 with Retry-After until this time (``time.monotonic()``).
    status : int
        Of all responses; 0 for what is right.
    no_ranges, no_etags, weak_etags : bool
        All of an object comes whatever is asked for; no ETags and no times; weak ones.
    cut : int
        So many responses end early; with ``resets`` by a reset of the connection.
    short, moved : bool
        Ranges come without their last byte, or begin a byte later, and say so.
    redirects, loops : bool
        Requests are sent on to another path of the same object; to the same path.
    elsewhere : str
        Another server that requests are sent on to.
    gone_after : int or None
        Objects are missing after so many requests for each.
    changes_after : int or None
        The ETag of each object is another one after so many requests for it.
    seconds, late, each : float, float, int
        Before a response; before one of so many.
    hold : threading.Event or None
        Which is waited for before each response.
    """

    where: str = ""
    busy: int = 0
    busy_until: float = 0.0
    status: int = 0
    no_ranges: bool = False
    no_etags: bool = False
    cut: int = 0
    resets: bool = False
    short: bool = False
    moved: bool = False
    redirects: bool = False
    loops: bool = False
    elsewhere: str = ""
    gone_after: int | None = None
    changes_after: int | None = None
    seconds: float = 0.0
    late: float = 0.0
    each: int = 10**9
    hold: threading.Event | None = None


@dataclass
class Served:
    """A server, and what was asked of it: (method, path, range) of each request."""

    url: str
    faults: Faults = field(default_factory=Faults)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    credentials: set[str] = field(default_factory=set)

    def of(self, text: str) -> list[tuple[str, str, str | None]]:
        """List requests for paths that contain a text."""
        return [request for request in self.requests if text in request[1]]


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 256
    allow_reuse_address = True


@contextmanager
def serve(folder):
    """Serve a folder; yields a :class:`Served`."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_):
            pass

        def handle(self):
            with suppress(ConnectionError):
                super().handle()

        def do_GET(self):
            path = unquote(self.path.partition("?")[0])
            with lock:
                served.requests.append((self.command, path, self.headers.get("Range")))
                self.number = len(served.requests)
                served.credentials.add(self.headers.get("Authorization", ""))
                served.under_way += 1
                served.most_under_way = max(served.most_under_way, served.under_way)
            try:
                self._respond(path)
            finally:
                with lock:
                    served.under_way -= 1

        do_HEAD = do_GET  # noqa: N815

        def _respond(self, path):
            faults = served.faults if served.faults.where in path else Faults()
            if faults.hold is not None:
                faults.hold.wait(30)
            time.sleep(faults.seconds if self.number % faults.each else faults.late)
            with lock:
                busy, faults.busy = faults.busy > 0, faults.busy - 1
            if busy:
                return self._send(503, b"<html>slow down</html>")
            if time.monotonic() < faults.busy_until:
                return self._send(503, b"slow down", {"Retry-After": "2"})
            if faults.status:
                page = "<html>" * (faults.status == 200) + "no, token=secret " + self.headers.get("Authorization", "")
                return self._send(faults.status, page.encode())
            if faults.redirects and not path.startswith("/moved"):
                return self._send(307, b"", {"Location": "/moved" + self.path})
            if faults.loops or faults.elsewhere:
                return self._send(307, b"", {"Location": faults.elsewhere + self.path})
            file = Path(folder, path.removeprefix("/moved").lstrip("/"))
            times = len([one for one in served.requests if one[1] == path])
            if not file.is_file() or (faults.gone_after is not None and times > faults.gone_after):
                return self._send(404, b"<html>no such object</html>")
            data = file.read_bytes()
            changed = faults.changes_after is not None and times > faults.changes_after
            headers = {} if faults.no_etags else {"ETag": f'"{hashlib.md5(data).hexdigest()}{"x" * changed}"'}
            found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range") or "")
            if found is None or faults.no_ranges:
                return self._send(200, data, headers, faults)
            first = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
            stop = int(found[2]) + 1 if found[1] and found[2] else len(data)
            if first >= len(data):
                return self._send(416, b"")
            first, stop = first + faults.moved, stop - faults.short
            part = data[first:stop]
            headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(data)}"
            return self._send(206, part, headers, faults)

        def _send(self, status, body, headers=None, faults=None):
            lines = {**(headers or {}), "Content-Length": len(body)}
            head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
            with lock:
                cut = faults is not None and faults.cut > 0 and len(body) > 0
                if cut:
                    faults.cut -= 1
            sent = b"" if self.command == "HEAD" else body[: len(body) // 2] if cut else body
            self.wfile.write(head.encode() + sent)
            if cut and faults.resets:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection |= cut

    with _Server(("127.0.0.1", 0), Handler) as server:
        served = Served(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
