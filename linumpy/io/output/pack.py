"""Pack the folder of an OME-Zarr image into one ZIP file, as RFC-9 of NGFF requires.

In: a folder with a ``zarr.json``. Out: the file. Errors: ``OSError``. The entries of the file are not compressed. The
``zarr.json`` of the root is the first entry. Then come the ``zarr.json`` of folders, breadth first, then the chunks.
The file has a comment with the NGFF version, and the end record of ZIP64. The same folder gives the same bytes.

Format: https://ngff.openmicroscopy.org/rfc/9/
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import zipfile
from pathlib import Path
from typing import BinaryIO

_COPY_NBYTES = 4 * 2**20
#: The end record of a ZIP file, the end record of ZIP64, and the record that locates the latter.
_END = struct.Struct("<4s4H2LH")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_METADATA = "zarr.json"


def pack(folder: Path, file: Path, *, durable: bool) -> Path:
    """Pack a folder into a file.

    - `folder`: folder of an OME-Zarr image.
    - `file`: the file to write or overwrite.
    - `durable`: whether to flush the file to the disk.

    Returns `file`.
    """
    names = [
        os.path.relpath(os.path.join(above, name), folder) for above, _, files in os.walk(folder) for name in files
    ]
    with open(file, "w+b") as stream:
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
            archive.comment = _comment(folder)
            for name in sorted(names, key=_sort_key):
                _add(archive, folder / name, name)
        _use_zip64(stream)
        if durable:
            stream.flush()
            os.fsync(stream.fileno())
    return file


def _sort_key(name: str) -> tuple[bool, int, list[tuple[bool, int, str]]]:
    """Return the sort key of an entry: metadata first, by depth; then chunks, by their coordinates as numbers."""
    parts = name.split("/")
    is_metadata = parts[-1] == _METADATA
    numbered = [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]
    return not is_metadata, len(parts) if is_metadata else 0, numbered


def _comment(folder: Path) -> bytes:
    """Return the comment of the file, as RFC-9 defines it."""
    ome = json.loads((folder / _METADATA).read_bytes())["attributes"]["ome"]
    central = {"centralDirectory": {"jsonFirst": True}}
    return json.dumps({"ome": {"version": ome["version"], "zipFile": central}}).encode()


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    entry = zipfile.ZipInfo(name)  # by default its date is in 1980: the same folder gives the same bytes
    entry.external_attr = 0o100644 << 16
    with open(path, "rb") as source:
        entry.file_size = os.fstat(source.fileno()).st_size  # zipfile chooses ZIP64 for the entry by this size
        with archive.open(entry, "w") as target:
            shutil.copyfileobj(source, target, _COPY_NBYTES)


def _use_zip64(stream: BinaryIO) -> None:
    """Append the end record of ZIP64, which RFC-9 requires at any size, unless zipfile has written it."""
    with zipfile.ZipFile(stream) as archive:
        begin, count, comment = archive.start_dir, len(archive.infolist()), archive.comment
    size = stream.seek(0, os.SEEK_END) - len(comment) - _END.size - begin
    stream.seek(begin + size - _LOCATOR.size)
    if stream.read(4) == b"PK\x06\x07":
        return
    stream.seek(begin + size)
    stream.write(_END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, size, begin))
    stream.write(_LOCATOR.pack(b"PK\x06\x07", 0, begin + size, 1))
    stream.write(_END.pack(b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, len(comment)) + comment)
