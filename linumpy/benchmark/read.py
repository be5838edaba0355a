"""Time reading a Zarr array into GPU memory.

Give an array (or an OME-Zarr image, whose finest level is read), or have one made with --generate, or run the standard
cases with --suite. Each result is compared with zarr-python's before it is timed. "flat" is the limit: one flat file of
the same decoded size beside the array, read in one call by several threads. The others are linumpy-auto,
linumpy-kvikio, zarr-gpu (zarr.config.enable_gpu()), zarr-gpu-gds (the same over kvikio.zarr.GDSStore), and through the
host zarr-numpy, tensorstore and zarrs, if these are installed. Without a GPU, or with --device cpu, arrays are read
into host memory. Each time includes opening the array by its path.

An existing store is never overwritten. Rates are GiB of decoded bytes per second. kvikio's compat mode is not
GPUDirect Storage; the first lines name the mode.

For example:
  linum-benchmark read mosaic.ome.zarr --plot mosaic.png
  linum-benchmark read mosaic.ome.zarr --cold --only flat linumpy-auto zarr-gpu
  linum-benchmark read --generate /data/bench --shape 512 1024 1024 --chunks 64 64 64 --dtype uint16 --codec zstd
  linum-benchmark read --suite raw --json raw.json --plot raw.png
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from zarr.storage import LocalStore

from linumpy import cli
from linumpy.arrays import Array
from linumpy.benchmark.timing import GIB, Bench, Suite, peer_module
from linumpy.device import is_device_array, require_cuda, to_host, usable_cores
from linumpy.errors import SourceError
from linumpy.gpu.kvikio_settings import transfer_settings
from linumpy.gpu.zarr_io import Backend, read_zarr, read_zarr_to_gpu
from linumpy.io.open import open_source
from linumpy.io.zarr_mode import gpu_mode, host_zarr_context
from linumpy.packages import install_line
from linumpy.testing.stores import CODECS, StoreSpec, slabs

#: zarr-python's own codec pipeline.
OWN_PIPELINE = {"codec_pipeline.path": "zarr.core.codec_pipeline.BatchedCodecPipeline"}
#: Bytes of one read task of the flat file.
_TASK_NBYTES = 4 * 2**20
_SHARDS = (256, 512, 512)


def difference(path: Path, result: Array) -> str:
    """Return where an array differs from what zarr-python reads; empty if it does not differ. NaN equals NaN."""
    with host_zarr_context(), zarr.config.set(OWN_PIPELINE):
        array = zarr.open_array(path, mode="r")
        dtype = np.dtype(array.dtype).newbyteorder("=")
        if (tuple(result.shape), np.dtype(result.dtype)) != (array.shape, dtype):
            return f"{result.dtype} {tuple(result.shape)}, not {dtype} {array.shape}"
        for block in slabs(array):
            expected, values = np.asarray(array[block]), to_host(result[block])
            wrong = ~((values == expected) | ((values != values) & (expected != expected)))
            if wrong.any():
                index = np.unravel_index(int(wrong.argmax()), wrong.shape)
                voxel = (block[0].start + int(index[0]), *map(int, index[1:]))
                return f"voxel {voxel} is {values[index]}, not {expected[index]}"
    return ""


SUITES: dict[str, tuple[StoreSpec, ...]] = {
    "raw": (
        StoreSpec(name="raw float32, 128³ chunks", chunks=(128,) * 3, dtype="float32"),
        StoreSpec(name="raw uint16, 64³ chunks", chunks=(64,) * 3),
        StoreSpec(name="raw uint16, 64³ in 256×512×512 shards", chunks=(64,) * 3, shards=_SHARDS),
        StoreSpec(name="raw float32, 256³ chunks, ragged", chunks=(256,) * 3, dtype="float32", shape=(500, 1000, 1000)),
    ),
    "codecs": (
        StoreSpec(name="zstd, 64×128×128 chunks", chunks=(64, 128, 128), codec="zstd"),
        StoreSpec(name="Blosc lz4 bytes, 64×128×128, v2", chunks=(64, 128, 128), codec="blosc", zarr_format=2),
        StoreSpec(name="Blosc zstd bits, 16×256×256, v2", chunks=(16, 256, 256), codec="blosc-zstd", zarr_format=2),
        StoreSpec(name="zstd, 64³ in 256×512×512 shards", chunks=(64,) * 3, codec="zstd", shards=_SHARDS),
        StoreSpec(name="zstd, 4096 chunks of 32³", chunks=(32,) * 3, codec="zstd", shape=(512,) * 3),
        StoreSpec(name="zstd, one chunk of 512 MiB", chunks=(256, 1024, 1024), codec="zstd", shape=(256, 1024, 1024)),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An array in a local folder, and where to read it."""

    path: Path
    shape: tuple[int, ...]
    dtype: np.dtype
    zarr_format: int
    on_gpu: bool


# ---- ways to read; each returns a call that makes a new array


def _linumpy(stored: Stored, backend: Backend) -> Callable[[], Array]:
    if not stored.on_gpu and backend == "auto":
        return lambda: read_zarr(stored.path, device="cpu")
    require_cuda()
    return lambda: read_zarr_to_gpu(stored.path, backend=backend)


def _zarr_gpu(stored: Stored, *, gds: bool) -> Callable[[], Array]:
    require_cuda()
    store = peer_module("kvikio.zarr", install_line()).GDSStore(stored.path, read_only=True) if gds else stored.path
    settings = transfer_settings if gds else nullcontext

    def read() -> Any:
        with settings(), gpu_mode(), zarr.config.set(OWN_PIPELINE):
            return zarr.open_array(store, mode="r")[...]

    return read


def _through_host(stored: Stored, read: Callable[[], np.ndarray]) -> Callable[[], Array]:
    if not stored.on_gpu:
        return lambda: read().astype(stored.dtype, copy=False)
    cupy = require_cuda()
    return lambda: cupy.asarray(read().astype(stored.dtype, copy=False))


def _zarr_numpy(stored: Stored, pipeline: dict[str, str] = OWN_PIPELINE) -> Callable[[], Array]:
    def read() -> np.ndarray:
        with host_zarr_context(), zarr.config.set(pipeline):
            return np.asarray(zarr.open_array(stored.path, mode="r")[...])

    return _through_host(stored, read)


def _zarrs(stored: Stored) -> Callable[[], Array]:
    peer_module("zarrs")
    return _zarr_numpy(stored, {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline"})


def _tensorstore(stored: Stored) -> Callable[[], Array]:
    tensorstore = peer_module("tensorstore")
    driver = "zarr3" if stored.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{stored.path}/"}}

    def read() -> np.ndarray:
        # A new context, whose cache holds no chunk of an earlier run.
        opened = tensorstore.open(spec, open=True, read=True, context=tensorstore.Context()).result()
        return np.asarray(opened.read().result())

    return _through_host(stored, read)


def _flat(stored: Stored, flat: Path) -> Callable[[], Array]:
    """Read one file of the same decoded bytes, by kvikio to the device or by threads to the host."""

    def to_device() -> Array:
        out = cupy.empty(stored.shape, stored.dtype)
        with transfer_settings(), kvikio.CuFile(flat, "r") as file:
            file.read(out.reshape(-1).view(np.uint8), task_size=_TASK_NBYTES)
        return out

    def to_host_memory() -> Array:
        out = np.empty(stored.shape, stored.dtype)
        buffer = out.reshape(-1).view(np.uint8).data
        with open(flat, "rb", buffering=0) as file, ThreadPoolExecutor(usable_cores()) as threads:
            parts = [(buffer[n : n + _TASK_NBYTES], n) for n in range(0, len(buffer), _TASK_NBYTES)]
            list(threads.map(lambda part: os.preadv(file.fileno(), [part[0]], part[1]), parts))
        return out

    if not stored.on_gpu:
        return to_host_memory
    cupy, kvikio = require_cuda(), peer_module("kvikio", install_line())
    return to_device


@contextmanager
def _flat_file(stored: Stored) -> Iterator[Path]:
    """Write the decoded voxels into one file beside the array, on the same disk, and remove the file at the end."""
    with tempfile.NamedTemporaryFile(dir=stored.path.parent, prefix=".linum-benchmark-", suffix=".flat") as file:
        with host_zarr_context(), zarr.config.set(OWN_PIPELINE):
            np.asarray(zarr.open_array(stored.path, mode="r")[...]).astype(stored.dtype).tofile(file.name)
        yield Path(file.name)


WAYS: dict[str, Callable[[Stored], Callable[[], Array]]] = {
    "linumpy-auto": lambda stored: _linumpy(stored, "auto"),
    "linumpy-kvikio": lambda stored: _linumpy(stored, "kvikio"),
    "zarr-gpu": lambda stored: _zarr_gpu(stored, gds=False),
    "zarr-gpu-gds": lambda stored: _zarr_gpu(stored, gds=True),
    "zarr-numpy": _zarr_numpy,
    "tensorstore": _tensorstore,
    "zarrs": _zarrs,
}


# ---- the suite


def time_reading(bench: Bench, name: str, path: str | Path) -> None:
    """Time all ways to read an array."""
    array = open_source(path)
    if not isinstance(array.store, LocalStore) or not array.size:
        raise SourceError(f"{path}: the benchmark reads arrays with voxels in local folders")
    folder, dtype = Path(array.store.root) / array.path, np.dtype(array.dtype).newbyteorder("=")
    zarr_format = array.metadata.zarr_format
    stored = Stored(path=folder, shape=array.shape, dtype=dtype, zarr_format=zarr_format, on_gpu=bench.on_gpu)
    files = [file for file in folder.rglob("*") if file.is_file()]
    nbytes = sum(file.stat().st_size for file in files)
    shards = f" in shards {array.shards}" if array.shards else ""
    text = f"{dtype} {array.shape}, chunks {array.chunks}{shards}, {nbytes:,} bytes in {len(files):,} files"

    def check(result: Array) -> str:
        if is_device_array(result) != bench.on_gpu:
            return f"the result is a {type(result).__module__}.{type(result).__name__}"
        return difference(folder, result)

    with bench.case(name, array.nbytes / GIB, description=text, files=files) as case:
        if bench.wants("flat"):
            with case.attempt("flat"), _flat_file(stored) as flat:
                case.time("flat", _flat(stored, flat), check, files=[flat])
        for way, make in WAYS.items():
            if bench.wants(way):
                with case.attempt(way):
                    case.time(way, make(stored), check)


def _run(bench: Bench, args: argparse.Namespace) -> None:
    described = {name: getattr(args, name) for name in ("shape", "chunks", "shards", "dtype", "codec")}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in described.items() if value}
    if (args.array is not None) == (args.generate is not None or args.suite is not None):
        raise ValueError("give one of ARRAY, --generate DIR and --suite NAME (--help shows examples)")
    if given and (args.generate is None or args.suite is not None):
        raise ValueError(f"--{next(iter(given))} goes with --generate DIR, and not with --suite")
    if args.array is not None:
        time_reading(bench, args.array, args.array)
        return
    defaults = {"shape": (512,) * 3, "chunks": (128,) * 3, "dtype": "float32", "codec": "none"}
    specs: Sequence[StoreSpec] = SUITES.get(args.suite, ()) or [StoreSpec(name="generated", **defaults | given)]
    with bench.work_folder() if args.generate is None else nullcontext(args.generate) as folder:
        for spec in specs:
            path = spec.scaled(bench.scale).make(folder)
            time_reading(bench, spec.name, path)
            if args.generate is None:
                shutil.rmtree(path)


SUITE = Suite(
    run=_run, help=__doc__, cases=("flat", *WAYS),
    options=(
        cli.Option("array", metavar="ARRAY", nargs="?", help="Folder of a Zarr array or OME-Zarr image."),
        cli.Option("--generate", metavar="DIR", type=Path, help="Make a store here, and leave it there."),
        *(
            cli.Option(f"--{name}", type=int, nargs="+", metavar="N", help=f"Voxels along each axis. [{default}]")
            for name, default in (("shape", "512 512 512"), ("chunks", "128 128 128"), ("shards", "none"))
        ),
        cli.Option("--dtype", help="Type of a voxel. [float32]"),
        cli.Option("--codec", choices=tuple(CODECS), help="none: random voxels; others: OCT-like. [none]"),
        cli.Option("--suite", choices=tuple(SUITES), help="Run the standard cases."),
        cli.Option("--cold", action="store_true", help="Drop the files from the page cache before every run."),
    ),
)  # fmt: skip
