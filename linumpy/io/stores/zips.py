"""ZIP files that hold Zarr arrays: their directories, a read-only store for zarr-python, entries for the native core.

No file stays open. Each read opens the file and checks that its directory was read from the same file. So stores can be
pickled, and used by several threads and in child processes. Errors: :class:`~linumpy.errors.SourceError` for a file
that is no ZIP file, is cut off or encrypted, or whose entries overlap; :class:`~linumpy.errors.ChunkError` for an entry
that cannot be read.
"""

from __future__ import annotations

import asyncio
import bisect
import functools
import math
import os
import re
import struct
import threading
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype

from linumpy.device import call_after_fork
from linumpy.errors import ChunkError, SourceError
from linumpy.io.paths import METADATA_FILES, ZARR_FILES, stamp_of
from linumpy.plan.layout import ChunkKeys, StoredEntries
from linumpy.plan.read import ReadPlan

#: Maximum number of directories that are kept, the most recently used ones.
_KEPT_DIRECTORIES = 8
#: The header before the bytes of an entry (the local header), without the name and the extra field after it.
_HEADER = struct.Struct("<4s5H3L2H")
#: Flags of an entry: it is encrypted; its name is in UTF-8.
_ENCRYPTED, _UTF8 = 1, 0x800
#: Names of compression methods that are not supported.
_METHODS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma", 93: "zstd"}
#: Bytes that are read at a time to compute a CRC-32, and threads that do.
_PIECE_NBYTES, _THREADS = 8 * 2**20, 8
#: How files begin that are often passed in place of Zarr, what they are, and what to do with them if linumpy knows it.
_KINDS = (
    (rb"II[*+]\0|MM\0[*+]", "a TIFF file", "linumpy.convert_zarr (linum-convert) makes an OME-Zarr image of it"),
    (rb"(.{512})?\x89HDF\r\n\x1a\n", "an HDF5 file", ""),
    (rb".{344}(n\+1|ni1)\0|.{4}(n\+2|ni2)\0\r\n\x1a\n", "a NIfTI file", ""),
    (rb"\x1f\x8b", "a file compressed by gzip, as NIfTI files (.nii.gz) are", ""),
    (rb"ZISRAWFILE", "a CZI file", "bioformats2raw makes an OME-Zarr image of it"),
    (rb"NRRD\d", "an NRRD file", ""),
    (rb"\x93NUMPY", "a NumPy file", "linumpy.OmeZarrWriter writes its array as an OME-Zarr image"),
    (rb"\x89PNG|\xff\xd8\xff", "a PNG or JPEG picture", ""),
)
#: Exceptions that zipfile raises for broken files.
_BROKEN = (zipfile.BadZipFile, NotImplementedError, ValueError, OverflowError, struct.error)


class Directory:
    """The directory of a ZIP file: the list of its entries, at the end of the file.

    - `stamp`: stamp of the file when its directory was read: see :func:`linumpy.io.paths.stamp`.
    - `entries`: entries by name, without folders; the last entry of several with the same name.
    - `verified`: names of the entries whose CRC-32 has been compared with the directory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        with open(path, "rb") as file:
            self.stamp = stamp_of(os.fstat(file.fileno()))
            try:
                with zipfile.ZipFile(file) as archive:
                    entries, end = archive.infolist(), archive.start_dir
            except _BROKEN as error:
                raise SourceError(_why_no_archive(path, error)) from error
        if any(entry.flag_bits & _ENCRYPTED for entry in entries):
            raise SourceError(f"{path} is an encrypted ZIP file, which linumpy does not read")
        _check_ranges(path, entries, end)
        self.entries = {entry.filename: entry for entry in entries if not entry.filename.endswith("/")}
        self.names = sorted(self.entries)
        self.verified: set[str] = set()

    def below(self, prefix: str) -> list[str]:
        """List the names that begin with a prefix."""
        first = bisect.bisect_left(self.names, prefix)
        # The last code point of Unicode sorts after any text that may follow the prefix.
        return self.names[first : bisect.bisect_right(self.names, prefix + "\U0010ffff")]

    @functools.cached_property
    def names_by_offset(self) -> dict[int, str]:
        """Names of the entries by the offsets of their headers."""
        return {entry.header_offset: name for name, entry in self.entries.items()}

    @functools.cached_property
    def roots(self) -> list[str]:
        """The topmost folders that hold the metadata of an array or a group; ``""`` is the root."""
        folders = sorted({name.rpartition("/")[0] for name in self.names if name.rpartition("/")[2] in ZARR_FILES})
        return [folder for folder in folders if not any(folder.startswith(f"{above}/") for above in folders)]


def _why_no_archive(path: str, error: Exception) -> str:
    """Return the message that a file cannot be read as a ZIP file, which says what the file is instead."""
    with open(path, "rb") as file:
        begin = file.read(1024)
    name = os.path.basename(path)
    if name in METADATA_FILES:
        return f"{path} is a metadata file of Zarr: pass the folder that holds it"
    kind, advice = next((words for pattern, *words in _KINDS if re.match(pattern, begin, re.S)), ("", ""))
    if not kind and begin and not begin.startswith(b"PK") and re.fullmatch(rb"[\t\n\r -~]*", begin):
        kind = "a text file"
    if not kind:
        return f"{path} is no ZIP file, or one that is cut off or damaged: {error}"
    return f"{path} is {kind}, not Zarr: {advice or 'convert it to OME-Zarr first'}"


def _check_ranges(path: str, entries: list[zipfile.ZipInfo], end: int) -> None:
    """Raise `SourceError` if entries overlap each other or the directory, or an uncompressed entry has two sizes."""
    for entry in entries:
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise SourceError(f"{path} is a damaged ZIP file: its directory gives {entry.filename} two sizes")
    ranges = np.array(
        [(entry.header_offset, entry.header_offset + _HEADER.size + entry.compress_size) for entry in entries], np.int64
    ).reshape(-1, 2)
    ranges = ranges[np.argsort(ranges[:, 0])]
    ends = np.append(ranges[1:, 0], end)
    if (ranges[:, 0] < 0).any() or (ranges[:, 1] > ends).any():
        raise SourceError(f"{path} is a damaged ZIP file: its entries overlap, or lie behind its end")


_directories: OrderedDict[str, Directory] = OrderedDict()
_lock = threading.Lock()


def _after_fork() -> None:
    """Replace the lock in a child process, whose parent may have held it."""
    global _lock
    _lock = threading.Lock()


call_after_fork(_after_fork)


def read_directory(path: str) -> Directory:
    """Return the directory of a ZIP file, which is read unless it is kept and the file has not changed."""
    with _lock:
        directory = _directories.get(path)
    if directory is None or directory.stamp != stamp_of(os.stat(path)):
        directory = Directory(path)
    with _lock:
        _directories[path] = directory
        _directories.move_to_end(path)
        while len(_directories) > _KEPT_DIRECTORIES:
            _directories.popitem(last=False)
    return directory


def entries_of(directory: Directory, folder: str, keys: ChunkKeys, grid: tuple[int, ...]) -> StoredEntries:
    """List the entries that hold the chunks (or shards) of the array in a folder, in a `grid` of chunks (or shards).

    ``is_compressed`` is True if zarr-python must read them: because one is compressed, or because the chunks of the
    grid cannot be numbered in 64 bits.
    """
    prefix = f"{folder}/{keys.prefix}" if folder else keys.prefix
    pattern = re.compile(re.escape(keys.separator).join([r"(0|[1-9]\d{0,18})"] * len(grid)), re.ASCII)
    rows, is_compressed = [], False
    for name in directory.below(prefix):
        match = pattern.fullmatch(name, len(prefix))
        if match is None:
            continue
        index = tuple(map(int, match.groups()))
        if all(number < count for number, count in zip(index, grid, strict=True)):
            number = functools.reduce(lambda sum_, step: sum_ * step[1] + step[0], zip(index, grid, strict=True), 0)
            entry = directory.entries[name]
            rows.append((number, entry.header_offset, entry.file_size))
            is_compressed |= entry.compress_type != zipfile.ZIP_STORED
    has_int64_numbers = math.prod(grid) < 2**63
    table = np.array(sorted(rows) if has_int64_numbers else [], np.int64).reshape(-1, 3)
    return StoredEntries(directory.path, directory.stamp, grid, table, is_compressed or not has_int64_numbers)


def verify_region(plan: ReadPlan) -> None:
    """Compare the CRC-32 of the entries that a read touches with the directory; nothing for arrays elsewhere.

    Otherwise it is compared only for entries that are read as a whole, or are compressed. Each entry is read once, as
    long as the ZIP file is unchanged.
    """
    entries = plan.layout.entries
    if entries is None or not len(entries.table):
        return
    store = ArchiveStore(entries.path)
    if store.directory.stamp != entries.stamp:
        raise ChunkError(f"{entries.path} was written anew since its directory was read: open it again")
    box = np.ix_(*(np.arange(first, last) for first, last in plan.object_box))
    wanted, stored = np.ravel_multi_index(box, entries.grid).ravel(), entries.table[:, 0]
    rows = np.minimum(np.searchsorted(stored, wanted), len(stored) - 1)
    rows = rows[stored[rows] == wanted]  # other chunks have no entry
    names = {store.directory.names_by_offset[int(offset)] for offset in entries.table[rows, 1]}
    with ThreadPoolExecutor(_THREADS, "linumpy-crc") as pool:
        list(pool.map(store.verify, names - store.directory.verified))


class ArchiveStore(Store):
    """A ZIP file as a store of zarr-python, read-only."""

    supports_writes = False
    supports_deletes = False
    supports_listing = True

    def __init__(self, path: str | Path) -> None:
        super().__init__(read_only=True)
        self.directory = read_directory(os.path.abspath(path))

    @property
    def path(self) -> str:
        """Absolute path of the file."""
        return self.directory.path

    def __reduce__(self) -> tuple[type[ArchiveStore], tuple[str]]:
        return ArchiveStore, (self.path,)

    def __str__(self) -> str:
        return f"zip://{self.path}"

    def __repr__(self) -> str:
        return f"ArchiveStore({self.path!r})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArchiveStore):
            return False
        return (self.path, self.directory.stamp) == (other.path, other.directory.stamp)

    __hash__ = None  # type: ignore[assignment]

    def read(self, key: str, request: ByteRequest | None = None) -> bytes | None:
        """Return the decompressed bytes of an entry, or a range of them; None if there is no such entry."""
        entry = self.directory.entries.get(key)
        if entry is None:
            return None
        if entry.compress_type == zipfile.ZIP_STORED:
            start, stop = _bounds(request, entry.file_size)
            data = self._pread(entry, start, stop)
            return _checked(f"{self}/{key}", entry, data) if stop - start == entry.file_size else data
        if entry.compress_type != zipfile.ZIP_DEFLATED:
            method = _METHODS.get(entry.compress_type, f"method {entry.compress_type}")
            raise ChunkError(f"{self}/{key} is compressed by {method}: stored and deflated entries are read")
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            # Decode one byte more than the directory states, to detect a stream that is too long.
            data = decoder.decompress(self._pread(entry, 0, entry.compress_size), entry.file_size + 1)
        except zlib.error as error:
            raise ChunkError(f"{self}/{key} cannot be decompressed: {error}") from error
        start, stop = _bounds(request, entry.file_size)
        return _checked(f"{self}/{key}", entry, data)[start:stop]

    def verify(self, key: str) -> None:
        """Compare the CRC-32 of an uncompressed entry with the directory; :meth:`read` does it for compressed ones."""
        entry = self.directory.entries[key]
        if key in self.directory.verified or entry.compress_type != zipfile.ZIP_STORED:
            return
        crc = 0
        for start in range(0, entry.file_size, _PIECE_NBYTES):
            crc = zlib.crc32(self._pread(entry, start, min(start + _PIECE_NBYTES, entry.file_size)), crc)
        if crc != entry.CRC:
            raise ChunkError(_broken(f"{self}/{key}"))
        self.directory.verified.add(key)

    def _pread(self, entry: zipfile.ZipInfo, start: int, stop: int) -> bytes:
        """Read a range of the stored bytes of an entry, after checking its local header."""
        name = f"{self}/{entry.filename}"
        with open(self.path, "rb") as file:
            if stamp_of(os.fstat(file.fileno())) != self.directory.stamp:
                raise ChunkError(f"{self.path} was written anew since its directory was read: open it again")
            file.seek(entry.header_offset)
            header = file.read(_HEADER.size)
            if len(header) < _HEADER.size or header[:4] != b"PK\x03\x04":
                raise ChunkError(f"{name} has no local header in the ZIP file")
            _, _, flags, method, *_, name_nbytes, extra_nbytes = _HEADER.unpack(header)
            if method != entry.compress_type or flags & _ENCRYPTED:
                raise ChunkError(f"{name}: its local header says that it is stored differently than the directory says")
            local_name = file.read(name_nbytes)
            if local_name.decode("utf-8" if flags & _UTF8 else "cp437", "replace") != entry.orig_filename:
                raise ChunkError(f"{name}: its local header in the ZIP file names another entry")
            begin = entry.header_offset + _HEADER.size + name_nbytes + extra_nbytes
            file.seek(begin + start)
            data = file.read(stop - start)
        if len(data) != stop - start:
            raise ChunkError(f"{name}: {len(data)} of {stop - start} bytes could be read")
        return data

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        """Return the bytes of an entry, or None if there is no such entry; see :meth:`read`."""
        data = await asyncio.to_thread(self.read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Return the bytes of several entries or ranges; see :meth:`get`."""
        return list(await asyncio.gather(*(self.get(key, prototype, request) for key, request in key_ranges)))

    async def exists(self, key: str) -> bool:
        """Return whether an entry exists."""
        return key in self.directory.entries

    async def set(self, key: str, value: Buffer) -> None:
        """Raise ``ValueError``, since the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raise ``ValueError``, since the store is read-only."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Yield the names of all entries."""
        for name in self.directory.names:
            yield name

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of the entries that begin with a prefix."""
        for name in self.directory.below(prefix):
            yield name

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Yield the names of the direct members of a folder."""
        folder = f"{prefix.rstrip('/')}/" if prefix.rstrip("/") else ""
        members = (name[len(folder) :].partition("/")[0] for name in self.directory.below(folder))
        for member in dict.fromkeys(members):
            yield member


def _bounds(request: ByteRequest | None, size: int) -> tuple[int, int]:
    """Return begin and end of a requested range, cut at the end of the entry."""
    match request:
        case None:
            return 0, size
        case RangeByteRequest():
            return min(request.start, size), max(min(request.start, size), min(request.end, size))
        case OffsetByteRequest():
            return min(request.offset, size), size
        case SuffixByteRequest():
            return max(0, size - request.suffix), size
    raise TypeError(f"unknown range of bytes: {request!r}")


def _checked(name: str, entry: zipfile.ZipInfo, data: bytes) -> bytes:
    """Return the bytes of an entry after comparing length and CRC-32 with the directory."""
    if len(data) != entry.file_size or zlib.crc32(data) != entry.CRC:
        raise ChunkError(_broken(name))
    return data


def _broken(name: str) -> str:
    return f"{name} is broken: its length or its CRC-32 differs from the ZIP file's directory"
