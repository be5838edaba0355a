"""Reading a Zarr array: linumpy, peers, and the limits of the hardware.

In: the options of the command. Out: a case for each array, with the entries of
:mod:`linumpy.benchmark.shared.read_paths`. Stores that are made in a folder of the caller stay; stores in a temporary
folder, and all flat files, are removed.
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Entry, Mark, Prepare, Prepared, Suite
from linumpy.benchmark.data import work_folder
from linumpy.benchmark.report import size
from linumpy.benchmark.shared import stores
from linumpy.benchmark.shared.read_paths import PATHS, read_entries
from linumpy.benchmark.shared.stores import CODECS, StoredArray, StoreSpec, by_x, difference, open_stored
from linumpy.device import is_device_array, why_no_cuda

_DESCRIPTION = """Time reading a Zarr array from the disk into GPU memory, by linumpy and by others.

Give an array (or an OME-Zarr image, whose finest level is read), or have one made with --generate, or run the
standard cases with --suite. Each result is compared with zarr-python's before it is timed: a wrong result is reported
as WRONG and has no time. An entry that cannot run on this machine says why. There are two limits,

  flat   one flat file of the same decoded size, read in one call by several threads
  h2d    page-locked host memory, copied to the device

and linumpy-auto, linumpy-kvikio, zarr-gpu (zarr.config.enable_gpu()), zarr-gpu-gds (the same over
kvikio.zarr.GDSStore), and through the host: zarr-numpy, tensorstore and zarrs, if these are installed.
Without a GPU arrays are read into host memory, by the entries that need no GPU.

The flat file is written beside the array, in its folder, and removed at the end. An existing store is never
overwritten. Rates are GiB of decoded bytes per second. kvikio's compat mode is not GPUDirect Storage; the first
lines name the mode.

For example:
  linum-benchmark read mosaic.ome.zarr --plot mosaic.png
  linum-benchmark read mosaic.ome.zarr --cold --only flat linumpy-auto zarr-gpu
  linum-benchmark read --generate /data/bench --shape 512 1024 1024 --chunks 64 64 64 --dtype uint16 --codec zstd
  linum-benchmark read --suite raw --json raw.json --plot raw.png
"""

_RAW, _SHARDS = (512, 1024, 1024), (256, 512, 512)
_SHARDED = "zstd, 64³ in 256×512×512 shards"
_EIGHTH = ((128, 384), (256, 768), (256, 768))

#: The standard cases and the rates to reach on an H200-class machine with a warm page cache.
SUITES: dict[str, tuple[StoreSpec, ...]] = {
    "raw": (
        StoreSpec("raw float32, 128³ chunks", _RAW, (128,) * 3, "float32", reach=0.85),
        StoreSpec("raw uint16, 64³ chunks", _RAW, (64,) * 3, "uint16", reach=0.4),
        StoreSpec("raw uint16, 64³ in 256×512×512 shards", _RAW, (64,) * 3, "uint16", shards=_SHARDS, reach=0.8),
        StoreSpec("raw float32, 256³ chunks, ragged", (500, 1000, 1000), (256,) * 3, "float32", reach=0.8),
    ),
    "codecs": tuple(
        StoreSpec(name, shape, chunks, "uint16", codec, reach, of, shards, region, 2 if name.endswith("v2") else 3)
        for name, shape, chunks, codec, reach, of, shards, region in (
            ("zstd, 64×128×128 chunks", _RAW, (64, 128, 128), "zstd", 12, "rate", None, None),
            ("Blosc lz4 shuffle, 64×128×128, v2", _RAW, (64, 128, 128), "blosc", 12, "rate", None, None),
            ("Blosc zstd bitshuffle, 16×256×256, v2", _RAW, (16, 256, 256), "blosc-zstd", 10, "rate", None, None),
            (_SHARDED, _RAW, (64,) * 3, "zstd", 12, "rate", _SHARDS, None),
            ("1/8 of it", _RAW, (64,) * 3, "zstd", 0.6, _SHARDED, _SHARDS, _EIGHTH),
            ("zstd, 4096 chunks of 32³", (512,) * 3, (32,) * 3, "zstd", 10, "zarr-gpu", None, None),
            ("zstd, one chunk of 512 MiB", (256, 1024, 1024), (256, 1024, 1024), "zstd", 1, "host", None, None),
        )
    ),
}

_DEFAULTS = {"shape": (512, 512, 512), "chunks": (128, 128, 128), "shards": None, "dtype": "float32", "codec": "none"}


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("array", metavar="ARRAY", nargs="?", help="Folder of a Zarr array or OME-Zarr image.")
    stores_made = parser.add_argument_group("stores to make")
    stores_made.add_argument(
        "--generate", metavar="DIR", type=Path, help="Make a store in this folder, and leave it there."
    )
    stores_made.add_argument("--shape", type=int, nargs="+", metavar="N", help="Voxels per axis. [512 512 512]")
    stores_made.add_argument("--chunks", type=int, nargs="+", metavar="N", help="Voxels of a chunk. [128 128 128]")
    stores_made.add_argument("--shards", type=int, nargs="+", metavar="N", help="Voxels of a shard. [no shards]")
    stores_made.add_argument("--dtype", help="Type of a voxel. [float32]")
    stores_made.add_argument(
        "--codec",
        choices=tuple(CODECS),
        help="none: random voxels. zstd (level 3), gzip (5), blosc (lz4, byte shuffle), blosc-zstd (bit shuffle): "
        "OCT-like voxels of ratio 3. [none]",
    )
    stores_made.add_argument(
        "--suite",
        choices=tuple(SUITES),
        dest="standard",
        help="Run the standard cases, in a temporary folder (TMPDIR) or in the folder of --generate.",
    )
    stores_made.add_argument("--scale", type=float, metavar="S", help="Shrink every axis of the suite's cases. [1]")
    state = parser.add_mutually_exclusive_group()
    state.add_argument(
        "--cold", action="store_true", help="Drop the files from the page cache before every run (needs no root)."
    )
    state.add_argument("--warm", action="store_true", help="Read once, untimed, before the runs. This is the default.")


@contextmanager
def read_cases(
    *,
    array: str | None = None,
    generate: Path | None = None,
    standard: str | None = None,
    scale: float | None = None,
    only: Sequence[str] = (),
    cold: bool = False,
    warm: bool = True,
    **described: object,
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Yield the folder of the arrays, and the cases; the parameters are the command's options.

    Raises
    ------
    ValueError
        Options that exclude each other.
    Exception
        Errors of opening or making an array. Errors of entries are reported in their rows.
    """
    given = {name: value for name, value in described.items() if value is not None}
    making = generate is not None or standard is not None
    if (array is not None) == making:
        raise ValueError("give one of ARRAY, --generate DIR and --suite NAME (--help shows examples)")
    if given and (generate is None or standard is not None):
        raise ValueError(f"--{next(iter(given))} goes with --generate DIR, and not with --suite")
    if scale is not None and standard is None:
        raise ValueError("--scale goes with --suite")
    if scale is not None and not 0 < scale <= 1:
        raise ValueError(f"--scale {scale:g}: more than 0, at most 1")
    if array is not None:
        stored = open_stored(array)
        yield stored.path, iter([read_case(stored, gpu=why_no_cuda() is None, only=only, cold=cold)])
        return
    specs = [_spec(given)] if standard is None else [spec.scaled(scale or 1.0) for spec in SUITES[standard]]
    with work_folder(None) if generate is None else nullcontext(generate) as folder:
        for spec in specs:  # check all paths before hours are spent on the first store
            stores.new_store(spec, folder)
        yield folder, _generated(specs, folder, only, cold=cold, keep=generate is not None)


def _spec(given: dict[str, Any]) -> StoreSpec:
    values = {**_DEFAULTS, **given}
    sizes: dict[str, Any] = {name: values[name] and tuple(values[name]) for name in ("shape", "chunks", "shards")}
    return StoreSpec(f"{values['codec']} {values['dtype']}", dtype=values["dtype"], codec=values["codec"], **sizes)


def _generated(specs: list[StoreSpec], folder: Path, only: Sequence[str], *, cold: bool, keep: bool) -> Iterator[Case]:
    for spec in specs:
        stored = stores.generate(spec, folder)
        yield read_case(stored, spec.mark, gpu=why_no_cuda() is None, only=only, cold=cold)
        if not keep:
            shutil.rmtree(stored.path)


def read_case(
    stored: StoredArray, mark: Mark | None = None, *, gpu: bool, only: Sequence[str] = (), cold: bool = False
) -> Case:
    """Make the case of reading an array; the mark is for the first entry of linumpy."""
    entries = [entry for entry in read_entries(stored, gpu) if not only or entry.name in only]
    return Case(
        name=stored.name,
        nbytes=stored.nbytes,
        entries=tuple(replace(entry, prepare=_checked(entry, stored, gpu)) for entry in entries),
        description=_lines(stored),
        facts=_facts(stored),
        marks=() if mark is None else (mark,),
        not_judged="no GPU" if not gpu else "cold page cache" if cold else "",
        files=stored.files,
    )


def _checked(entry: Entry, stored: StoredArray, gpu: bool) -> Prepare:
    """Return the ``prepare`` of an entry, with a check that compares the result with zarr-python's."""

    def check(array: Array) -> str:
        if is_device_array(array) != gpu:
            return f"the result is on the wrong device: {type(array).__module__}.{type(array).__name__}"
        return difference(stored, array)

    @contextmanager
    def prepare() -> Iterator[Prepared]:
        with entry.prepare() as prepared:
            yield replace(prepared, check=check)

    return prepare


def _lines(stored: StoredArray) -> tuple[str, ...]:
    shards = f", in shards {by_x(stored.shards, '×')}" if stored.shards else ""
    region = f", of which {by_x(stored.result_shape, '×')} are read" if stored.region else ""
    return (
        f"{by_x(stored.shape, '×')} {stored.dtype}, chunks {by_x(stored.chunks, '×')}{shards}{region}, codecs "
        f"{stored.codecs}, zarr v{stored.zarr_format}",
        f"{size(stored.nbytes)} decoded, {size(stored.stored_bytes)} in {stored.chunk_files:,} files "
        f"(ratio {stored.ratio:.2f}); voxels: {stored.data}",
    )


def _facts(stored: StoredArray) -> dict[str, object]:
    same = ("codecs", "zarr_format", "data", "stored_bytes", "chunk_files")
    return {
        "path": str(stored.path),
        "shape": list(stored.shape),
        "region": stored.region and [list(bounds) for bounds in stored.region],
        "chunks": list(stored.chunks),
        "shards": stored.shards and list(stored.shards),
        "dtype": str(stored.dtype),
        "ratio": stored.ratio if math.isfinite(stored.ratio) else None,
        **{name: getattr(stored, name) for name in same},
    }


SUITE = Suite("read", _DESCRIPTION, 5, read_cases, tuple(PATHS), add_options=_add_options)
