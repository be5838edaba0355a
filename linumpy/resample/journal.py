"""The journal of a folder that is filled over several runs: a record of the complete parts.

In: the request, and boxes of parts that were written. Out: a file of lines, and the complete parts that the lines
record. A *part* is a chunk or shard, with an index in the grid of an array. Each line begins with a checksum over its
own text and the first line. A line that is incomplete, joined to another line, made of zeros or outside the grid is
ignored, and its parts are made again. Errors: ``OSError``, such as a full disk; the journal is then unchanged.

The first line holds the request. The others are ``boot`` with the kernel's boot id, at the beginning of each run;
``box`` with two corners in the first grid of parts (``box1``, ``box2`` and so on for further grids); and ``sync``, when
all parts of the lines before are on the disk. Parts without a later ``sync`` count only in the same boot: what a killed
process wrote is in the kernel's memory, which a power cut empties.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linumpy.io.output.syscalls import BINARY, named_errors, write_fully


def boot_id() -> str:
    """Return the kernel's id of the current boot; empty if the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def begin_journal(path: Path, head: Mapping[str, object]) -> None:
    """Write the first line of a new journal; an existing journal is replaced."""
    line = _line(0, json.dumps(head))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | BINARY, 0o666)
    with named_errors(path):
        try:
            write_fully(descriptor, line)
        finally:
            os.close(descriptor)


class Journal:
    """An open journal, to which lines are added. Opening it adds a ``boot`` line."""

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, os.open(path, os.O_RDWR | os.O_APPEND | BINARY)
        try:
            lines = path.read_bytes()
            # Remove the incomplete last line of a killed run, so that the next line is not joined to it.
            os.ftruncate(self._descriptor, lines.rfind(b"\n") + 1)
            self._seed = _seed(lines.split(b"\n", 1)[0])
            self._add(f"boot {boot_id()}")
        except BaseException:
            self.close()
            raise

    def add_box(self, start: Sequence[int], stop: Sequence[int], number: int = 0) -> None:
        """Record that a box of parts of grid `number` is written."""
        self._add(" ".join(map(str, (_box_word(number), *start, *stop))))

    def add_sync(self) -> None:
        """Record that the parts of all lines so far are on the disk, and flush the journal itself."""
        self._add("sync")
        getattr(os, "fdatasync", os.fsync)(self._descriptor)  # macOS has fsync only

    def close(self) -> None:
        """Close the file."""
        with named_errors(self._path):
            os.close(self._descriptor)

    def _add(self, text: str) -> None:
        write_fully(self._descriptor, _line(self._seed, text))


def read_head(path: Path) -> dict[str, Any] | None:
    """Read the first line; None for a missing or a broken journal."""
    try:
        text = _text(path.read_bytes().split(b"\n", 1)[0], 0)
        head = None if text is None else json.loads(text)
    except (FileNotFoundError, ValueError):
        return None
    return head if isinstance(head, dict) else None


def has_boxes(path: Path) -> bool:
    """Return whether the journal records any part of any grid, whether it still counts or not."""
    head, *lines = path.read_bytes().split(b"\n")
    return any((_text(line, _seed(head)) or "").startswith("box") for line in lines[:-1])


def read_boxes(path: Path, grids: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Read which parts of each grid are complete: a mask for each grid."""
    head, *lines = path.read_bytes().split(b"\n")
    seed, boot, current_boot = _seed(head), "", boot_id()
    complete, unsynced = ([np.zeros(grid, bool) for grid in grids] for _ in range(2))
    numbers = {_box_word(number): number for number in range(len(grids))}
    for line in lines[:-1]:  # the last line has no line end and is incomplete
        word, _, text = (_text(line, seed) or "").partition(" ")
        if word == "boot":
            boot = text
        elif word == "sync":
            for synced, written in zip(complete, unsynced, strict=True):
                synced |= written
        elif word in numbers:
            number = numbers[word]
            box = _box(text, grids[number])
            unsynced[number][box] = True
            if boot and boot == current_boot:
                complete[number][box] = True
    return complete


def _box_word(number: int) -> str:
    """Return the first word of the lines of a grid."""
    return f"box{number}" if number else "box"


def _box(text: str, grid: tuple[int, ...]) -> tuple[slice, ...]:
    """Parse corners into slices; an empty box if they are not numbers within the grid."""
    corners = [int(word) for word in text.split() if re.fullmatch(r"\d{1,18}", word)]
    start, stop = corners[: len(grid)], corners[len(grid) :]
    if len(stop) != len(grid) or not all(0 <= a < b <= n for a, b, n in zip(start, stop, grid, strict=True)):
        return (slice(0, 0),) * len(grid)
    return tuple(map(slice, start, stop))


def _seed(head: bytes) -> int:
    """Return the start value of the checksums of all lines after the first line, `head`."""
    return zlib.crc32(head)


def _line(seed: int, text: str) -> bytes:
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data, seed), data)


def _text(line: bytes, seed: int) -> str | None:
    """Return the text of a line; None if its checksum is wrong."""
    if b"%08x " % zlib.crc32(line[9:], seed) != line[:9]:
        return None
    return line[9:].decode(errors="replace")
