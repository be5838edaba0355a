"""``linumpy.verify``: whether an image is whole and says what it holds."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zarr

from linumpy.arrays import DeviceName, ReadDevice
from linumpy.device import resolve
from linumpy.errors import ResumeError
from linumpy.gpu.read.shared import shared_reader
from linumpy.io.metadata import Node
from linumpy.io.output.checks import check_apart
from linumpy.io.output.syscalls import lock
from linumpy.io.source import Source, describe_source, open_node, with_options
from linumpy.progress import progress_bar
from linumpy.resample.identity import digest_of, identify_data
from linumpy.resample.workers import carry_out_on, client_of
from linumpy.verification.chunks import LevelUnit, Unit, UnitReader, units_of
from linumpy.verification.findings import ArrayResult, Finding, Proposal, Verification, in_order
from linumpy.verification.images import Image, images_of, linked, nodes_of
from linumpy.verification.judge import judge
from linumpy.verification.ngff import check_group
from linumpy.verification.place import schema_note
from linumpy.version import __version__

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

#: Number of an image and of a unit of it.
_Key = tuple[int, int]
_Found = Mapping[int, LevelUnit]

#: Beginning of a journal.
_JOURNAL = '{"linumpy": "verify"'


def verify(
    source: Source,
    *,
    thorough: bool = False,
    device: DeviceName | None = None,
    distributed: Client | Cluster | str | None = None,
    journal: str | Path | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Callable[[int], object] | None = None,
) -> Verification:
    """Verify that an image, or any other Zarr group or array, is whole and says what it holds.

    Every chunk of every array is read and decoded, on the device where there is one: what checksums, decoders, sizes
    and indexes of shards tell is found. The voxels of each level are compared with the finer level, which shows
    chunks that were exchanged, lost or changed, and levels that lie elsewhere than their metadata say. Metadata are
    compared with the specification of their version of NGFF, and with what is stored. Nothing is written.

    What no checksum, decoder or level tells is not found: changed voxels of raw chunks in an image of one level, or
    chunks that were lost before the levels were made.

    Parameters
    ----------
    source : str, Path, zarr.Array, zarr.Group or store
        An image, a plate, a group or an array; local, in a ZIP file, or a URL.
    thorough : bool
        Whether all voxels of a level are compared with the finer level, in place of one of 4 along each axis. It finds
        single voxels that have changed, and takes up to twice the time.
    device : {"auto", "cuda", "cpu"}, optional
        Where chunks are decoded and compared; by default on the GPU if there is one.
    distributed : distributed.Client, cluster or str, optional
        Read on the workers of a dask cluster; a text is the address of its scheduler.
    journal : str or Path, optional
        File in which finished parts are recorded. The same call with the same file goes on from there.
    storage_options : mapping, optional
        Options for a URL, as for :func:`linumpy.open_image`.
    progress : callable, optional
        Called with the number of decoded bytes since the last call, in place of a progress bar.

    Returns
    -------
    Verification
        Findings in order of harm; none if everything is sound.

    Raises
    ------
    FileNotFoundError, SourceError
        There is no such source, or it is neither an array nor a group.
    GpuUnavailableError
        ``device="cuda"``, and there is none.
    ResumeError
        `journal` belongs to another source or other options, or the source has changed since.
    ValueError
        `journal` lies in the source.
    WorkerError
        Several workers of the cluster died.

    Examples
    --------
    >>> import linumpy
    >>> result = linumpy.verify("brain.ome.zarr")  # doctest: +SKIP
    >>> print(result)  # doctest: +SKIP
    """
    began = time.monotonic()
    chosen: ReadDevice = "cpu" if not resolve(device).is_cuda else (resolve(device).index or 0)
    if journal is not None and isinstance(source, (str, Path)):
        check_apart([str(journal)], [source])
    root = open_node(with_options(source, storage_options))
    nodes, findings = nodes_of(root)
    images, unnamed, notes = images_of(nodes)
    findings += [*unnamed, *_metadata_findings(nodes, {finding.path for finding in findings}, notes)]
    with ExitStack() as stack:
        reader = stack.enter_context(shared_reader(chosen))
        client = stack.enter_context(client_of(distributed))
        proposals = list[Proposal]()
        for number, image in enumerate(images):
            images[number], problems, right = linked(image, reader)
            proposals += right
            told = {finding.path for finding in problems if finding.harm == "misplaced"}
            findings = [finding for finding in findings if finding.harm != "misplaced" or finding.path not in told]
            findings += problems
        units = {(n, k): unit for n, image in enumerate(images) for k, unit in enumerate(units_of(image.levels))}
        found: dict[_Key, _Found] = {}
        record = stack.enter_context(_recorded(journal, images, units, thorough, found))
        nbytes = sum(plan.layout.nbytes for image in images for plan in image.levels)
        advance = stack.enter_context(progress_bar("verify", nbytes, instead=progress))
        advance(_nbytes_of(found.values()))
        todo = {key: unit for key, unit in units.items() if key not in found}

        def settle(key: _Key, result: _Found) -> None:
            found[key] = result
            record(key, result)

        def settle_of_worker(key: _Key, result: _Found) -> None:
            settle(key, result)
            advance(_nbytes_of([result]))

        if client is None:
            for number, keys in itertools.groupby(todo, key=lambda key: key[0]):
                units_of_image = UnitReader(reader, images[number].levels, thorough=thorough)
                for key in keys:
                    settle(key, units_of_image.read(units[key], advance))
        else:
            _read_on(client, images, todo, chosen, thorough, settle_of_worker)
        arrays, by_image = list[ArrayResult](), defaultdict[int, list[_Found]](list)
        for (number, _), result in found.items():
            by_image[number].append(result)
        for number, image in enumerate(images):
            results, problems = judge(image, _merged(len(image.levels), by_image[number]), reader)
            arrays += results
            findings += problems
    return Verification(
        describe_source(source), tuple(arrays), in_order(findings), tuple(notes), _nbytes_of(found.values()),
        time.monotonic() - began, tuple(proposals),
    )  # fmt: skip


def _metadata_findings(nodes: Mapping[str, Node], unreadable: Set[str], notes: list[str]) -> Iterator[Finding]:
    """Yield what is wrong with the metadata of groups; members that are known to be `unreadable` are not told again."""
    for path, node in nodes.items():
        if isinstance(node, zarr.Group):
            findings = check_group(node, path, notes)
            yield from (finding for finding in findings if finding.path not in unreadable or path in unreadable)
    if any(isinstance(node, zarr.Group) for node in nodes.values()):
        notes += filter(None, [schema_note()])


def _nbytes_of(results: Any) -> int:
    return sum(unit.nbytes for result in results for unit in result.values())


def _merged(count: int, results: Sequence[_Found]) -> list[LevelUnit]:
    """Join what units found, by levels."""
    merged = [LevelUnit() for _ in range(count)]
    for result in results:
        for level, unit in result.items():
            merged[level].damaged += unit.damaged
            merged[level].zero += unit.zero
            merged[level].differ += unit.differ
            merged[level].nbytes += unit.nbytes
    for unit in merged:
        unit.damaged.sort()
        unit.differ.sort()
    return merged


def _read_on(
    client: Client,
    images: Sequence[Image],
    todo: Mapping[_Key, Unit],
    device: ReadDevice,
    thorough: bool,
    settle: Callable[[_Key, _Found], object],
) -> None:
    """Read units on the workers of a dask cluster."""
    sent = [pickle.dumps((image.levels, device, thorough)) for image in images]
    carry_out_on(
        client, todo, lambda key: client.submit(read_unit, sent[key[0]], todo[key], pure=False), settle,
        task_name="the verification of chunks", memory_parameter="number of threads of a worker",
    )  # fmt: skip


def read_unit(payload: bytes, unit: Unit) -> _Found:
    """Read a unit on a worker: `payload` holds the levels, the device and `thorough`."""
    levels, device, thorough = pickle.loads(payload)
    with shared_reader(device) as reader:
        return UnitReader(reader, levels, thorough=thorough).read(unit)


@contextmanager
def _recorded(
    path: str | Path | None,
    images: Sequence[Image],
    units: Mapping[_Key, Unit],
    thorough: bool,
    found: dict[_Key, _Found],
) -> Iterator[Callable[[_Key, _Found], None]]:
    """Fill `found` with what a journal holds, and yield the function that appends to the journal."""
    if path is None:
        yield lambda key, result: None
        return
    identity = [*(_identity(image) for image in images), list(map(str, units.values())), thorough, __version__]
    request = json.dumps({"linumpy": "verify", "request": digest_of(identity)})
    with open(path, "a+b") as file:
        try:
            lock(file.fileno())
        except BlockingIOError:
            raise ResumeError(f"journal={os.fspath(path)!r} is written by another run: name another file") from None
        file.seek(0)
        stored = file.read()
        complete = stored[: stored.rfind(b"\n") + 1]  # a killed run leaves a part of a line
        head, *lines = complete.decode(errors="replace").split("\n")[:-1] or [""]
        if not stored or (not complete and request.encode().startswith(stored)):
            file.truncate(0)
            file.write(request.encode() + b"\n")
            file.flush()
        elif not head.startswith(_JOURNAL):
            raise ResumeError(f"journal={os.fspath(path)!r} is no journal of a verification: name another file")
        elif head != request:
            raise ResumeError(
                f"journal={os.fspath(path)!r} is no journal of this verification: it was begun with another source or "
                "other options, or the source has changed since; name another file, or delete it"
            )
        else:
            file.truncate(len(complete))
            found.update(read for line in lines if (read := _from_line(line)) is not None)

        def record(key: _Key, result: _Found) -> None:
            # What the storage refused is asked for again.
            if not any(is_refused for unit in result.values() for _, _, is_refused in unit.damaged):
                file.write(_line(key, result))
                file.flush()

        yield record


def _identity(image: Image) -> list[Any]:
    return [image.path, image.multiscale, *map(identify_data, image.arrays), str(image.levels)]


def _line(key: _Key, result: _Found) -> bytes:
    text = json.dumps([*key, {level: asdict(unit) for level, unit in result.items()}], separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x} {text}\n".encode()


def _from_line(line: str) -> tuple[_Key, _Found] | None:
    """Return what a line holds; None for a damaged line, whose unit is read again."""
    checksum, _, text = line.partition(" ")
    if checksum != f"{zlib.crc32(text.encode()):08x}":
        return None
    number, unit, content = json.loads(text)
    return (number, unit), {
        int(level): LevelUnit(
            damaged=[(tuple(chunk), message, is_refused) for chunk, message, is_refused in one["damaged"]],
            zero=[tuple(chunk) for chunk in one["zero"]],
            differ=[(tuple(chunk), count, size) for chunk, count, size in one["differ"]],
            nbytes=one["nbytes"],
        )
        for level, one in content.items()
    }
