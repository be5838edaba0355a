"""ZIP files for tests, written by Python's zipfile and not by linumpy."""

import os
import struct
import zipfile
from pathlib import Path


def zip_folder(folder, file, method=zipfile.ZIP_STORED, *, prefix="", force_zip64=False, extra=b"", ahead=b""):
    """Pack a folder; `extra` lies in the local headers alone, `ahead` before the archive."""
    file = Path(file)
    file.write_bytes(ahead)
    with zipfile.ZipFile(file, "a" if ahead else "w", method) as archive:
        for above, _, names in os.walk(folder):
            for name in sorted(names):
                path = os.path.join(above, name)
                info = zipfile.ZipInfo(prefix + os.path.relpath(path, folder))
                info.compress_type, info.extra = method, extra
                with archive.open(info, "w", force_zip64=force_zip64) as target:
                    target.write(Path(path).read_bytes())
                info.extra = b""  # before the directory is written
    return file


def header_of(file, name):
    """Offset of the local header of an entry."""
    with zipfile.ZipFile(file) as archive:
        return archive.getinfo(name).header_offset


def data_of(file, name):
    """Offset of the bytes of an entry."""
    header = header_of(file, name)
    with open(file, "rb") as stream:
        stream.seek(header + 26)
        name_nbytes, extra = struct.unpack("<2H", stream.read(4))
    return header + 30 + name_nbytes + extra


def central_of(file, name):
    """Offset of the record of an entry in the directory."""
    whole = Path(file).read_bytes()
    with zipfile.ZipFile(file) as archive:
        at = archive.start_dir
    while True:
        assert whole[at : at + 4] == b"PK\x01\x02"
        sizes = struct.unpack("<3H", whole[at + 28 : at + 34])
        if whole[at + 46 : at + 46 + sizes[0]] == name.encode():
            return at
        at += 46 + sum(sizes)


def patch(file, offset, data):
    """Overwrite bytes of a file."""
    with open(file, "r+b") as stream:
        stream.seek(offset)
        stream.write(data)
