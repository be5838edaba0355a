"""Arrays behind an HTTP server on this machine's loopback: linumpy, zarr-python with obstore, and obstore alone.

Each result is compared with the array on disk before the entry is timed; of obstore alone, only the number of bytes is
checked. The note of an entry has the processor time of this process per GiB; the processes of the server do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, Literal

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Entry, Mark, Prepared, Suite, check_scale, not_judged_at, peer_module
from linumpy.benchmark.data import work_folder
from linumpy.benchmark.shared import remote_shards
from linumpy.benchmark.shared.loopback import serve
from linumpy.benchmark.shared.stores import StoredArray, difference, host_zarr
from linumpy.benchmark.shared.volumes import make_volumes
from linumpy.device import resolve, synchronize

_DESCRIPTION = """Read arrays from an HTTP server on this machine's loopback, to its GPU and into host memory.

Arrays of 512×1024×1024 uint16 are made below --folder, which should be in memory (/dev/shm): raw and zstd, chunks of
64³ in shards of 256×512×512 and as objects of their own. The server has a process for every two cores. "obstore" only
moves the stored bytes; its rate counts the decoded bytes, too. The notes have the processor time of the reading process
for a decoded GiB. Raw shards are also read whole by kvikio's RemoteFile and by obstore, and array operations order
their chunks on the device.

For example:
  linum-benchmark remote --folder /dev/shm --json remote.json
"""

#: Arrays by name: codec, and whether there are shards.
_ARRAYS = {
    "raw shards": ("none", True),
    "raw chunks": ("none", False),
    "zstd shards": ("zstd", True),
    "zstd chunks": ("zstd", False),
}


@contextmanager
def remote_cases(
    *, folder: Path | None, scale: float, only: Sequence[str] = (), use_gpu: bool | None = None
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Yield a new folder, and cases of arrays that are made there; the folder is served, and removed at the end."""
    check_scale(scale)
    on_gpu = resolve().is_cuda if use_gpu is None else use_gpu
    with work_folder(folder) as path, serve(path) as url:
        volumes = make_volumes(_ARRAYS, only, path, scale)
        yield path, (_case(stored, url, scale, on_gpu) for stored in volumes)


def _case(stored: StoredArray, url: str, scale: float, on_gpu: bool) -> Case:
    name, array_url = stored.path.name, f"{url}/{stored.path.name}"

    def entry(key: str, title: str, call: Callable[[], Array], role: Literal["ours", "peer"] = "peer") -> Entry:
        return Entry(key, title, partial(_prepared, stored, call, False), role, max_seconds=20)

    alone = partial(_prepared, stored, partial(_obstore, url, stored), True)
    entries = [Entry("obstore", "obstore alone (limit)", alone, "limit")]
    if on_gpu:
        entries.append(entry("device", "linumpy to the device", partial(_linumpy, array_url, True), "ours"))
    entries += [
        entry("host", "linumpy to the host", partial(_linumpy, array_url, False), "ours"),
        entry("zarr", "zarr + obstore", partial(_zarr, url, name, None)),
        entry("zarr-64", "zarr + obstore, 64 at a time", partial(_zarr, url, name, 64)),
    ]
    if stored.name == "raw shards":
        kvikio = partial(remote_shards.by_kvikio, url, stored, on_gpu=on_gpu)
        entries.append(entry("kvikio", "kvikio's RemoteFile, laid out", kvikio))
        entries.append(entry("obstore-whole", "obstore, laid out", partial(_obstore_whole, url, stored, on_gpu)))
    raw = stored.stored_bytes == stored.nbytes
    return Case(
        stored.name,
        stored.nbytes,
        tuple(entries),
        (f"{stored.nbytes:,} bytes, {stored.stored_bytes:,} stored in {stored.chunk_files} objects",),
        {"objects": stored.chunk_files},
        (Mark(3, ("zarr", "zarr-64"), "× zarr"), *([Mark(0.8, ("obstore",), "× obstore")] if raw else [])),
        not_judged_at(scale),
    )


@contextmanager
def _prepared(stored: StoredArray, call: Callable[[], object], is_limit: bool) -> Iterator[Prepared]:
    def check(result: Any) -> str:
        if is_limit:
            return "" if result == stored.stored_bytes else f"{result:,} bytes were read, not {stored.stored_bytes:,}"
        return difference(stored, result)

    def note() -> str:
        before = process_time()
        call()
        synchronize()
        return f"{(process_time() - before) / stored.nbytes * 2**30:.2f} CPU s/GiB"

    yield Prepared(call, check, note=note)


def _linumpy(url: str, on_gpu: bool) -> Array:
    from linumpy.gpu.zarr_io import read_zarr, read_zarr_to_gpu

    return read_zarr_to_gpu(url, strict=True) if on_gpu else read_zarr(url, device="cpu", strict=True)


def _zarr(base: str, name: str, concurrency: int | None) -> np.ndarray:
    from zarr.storage import ObjectStore

    settings = {} if concurrency is None else {"async.concurrency": concurrency}
    with host_zarr(), zarr.config.set(settings):
        return np.asarray(zarr.open_array(ObjectStore(_store(base), read_only=True), path=name, mode="r")[...])


def _obstore(base: str, stored: StoredArray) -> int:
    """Read all stored bytes, in ranges, and discard them; return their number."""
    import obstore

    store = _store(base)
    ranges = [
        (f"{stored.path.name}/{file.relative_to(stored.path)}", start, min(size, start + remote_shards.REQUEST_NBYTES))
        for file in stored.files
        if file.name != "zarr.json"
        for size in [file.stat().st_size]
        for start in range(0, size, remote_shards.REQUEST_NBYTES)
    ]
    with ThreadPoolExecutor(remote_shards.REQUESTS) as threads:
        return sum(threads.map(lambda part: len(obstore.get_range(store, part[0], start=part[1], end=part[2])), ranges))


def _obstore_whole(base: str, stored: StoredArray, on_gpu: bool) -> Array:
    return remote_shards.by_obstore(_store(base), stored, on_gpu=on_gpu)


def _store(base: str) -> Any:
    return peer_module("obstore.store").HTTPStore.from_url(base, client_options={"allow_http": True})


SUITE = Suite(
    "remote", _DESCRIPTION, 5, remote_cases, tuple(_ARRAYS), "Part of all sizes.", "Where the arrays are made"
)
