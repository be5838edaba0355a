"""Time encoding on the device, and writing of encoded images below --folder.

The voxels are 1024×1024×2048 uint16, OCT-like; zstd at level 1 compresses them to a third. Rates count voxels, not
stored bytes. "encode" cases work on chunks of 512×1024×1024 voxels in device memory, beside numcodecs in a thread for
each core, and nvCOMP if it is installed (pip install nvidia-nvcomp-cu13). "write" cases write an image from device
memory; "stored bytes" writes as many bytes to as many files from host memory. "convert" and "resample" read an image in
zstd and write another image. 16 chunks of the encoders, and whole images of all writers, are decoded and compared with
the voxels first. The notes have the ratio of voxels to stored bytes.

For example:
  linum-benchmark write --folder /dev/shm --json write.json
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import zarr

from linumpy.arrays import Array, DeviceName
from linumpy.benchmark.timing import GIB, Bench, CannotRunError, Suite, peer_module
from linumpy.device import array_module, synchronize, to_host, usable_cores
from linumpy.io.codecs import host_encoder, zarr_codecs
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.codecs import parse_codec
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.testing.stores import change_for_ratio, oct_voxels
from linumpy.write.chunk_file import write_file
from linumpy.write.writer import OmeZarrWriter, write_omezarr

if TYPE_CHECKING:
    from linumpy.gpu.codecs.encode import Encoded

Chunk = tuple[int, int, int]

_SHAPE, _LAYER_DEPTH, _SPACING_UM = (1024, 1024, 2048), 64, (5.0, 5.0, 5.0)
_CHUNK, _SHARD = (64, 64, 64), (256, 512, 512)
#: Number of chunks whose streams are decoded to check them, and whose ratio by numcodecs is noted.
_SAMPLES = 16
_ENCODE: tuple[tuple[str, Chunk], ...] = (
    ("zstd", _CHUNK),
    ("zstd", (32, 32, 32)),
    ("zstd", (64, 128, 128)),
    ("zstd:small", _CHUNK),
    ("lz4", _CHUNK),
    ("blosc:lz4:bit", _CHUNK),
    ("blosc:lz4:byte", _CHUNK),
    ("blosc:zstd:bit", _CHUNK),
)
_WRITE: tuple[tuple[str, Chunk | None], ...] = (("zstd", None), ("zstd", _SHARD), ("blosc:lz4:bit", _SHARD))


def _run(bench: Bench, args: argparse.Namespace) -> None:
    voxels = _voxels(tuple(max(128, round(n * bench.scale) // 128 * 128) for n in _SHAPE))
    device = bench.xp.asarray(voxels)
    if bench.wants("encode") and bench.on_gpu:
        for codec, chunk in _ENCODE:
            _time_encoding(bench, codec, chunk, voxels[:512, :1024, :1024], device[:512, :1024, :1024])
    with bench.work_folder() as folder:
        if bench.wants("write"):
            for codec, shards in _WRITE:
                _time_writing(bench, codec, shards, voxels, device, folder / "image.ome.zarr")
        if bench.wants("convert") or bench.wants("resample"):
            source, target = folder / "source.ome.zarr", folder / "copy.ome.zarr"
            write_omezarr(source, device, _SPACING_UM, chunks=_CHUNK, codec="zstd", durable=False)
            for name, (make, check) in _COPIES.items():
                if bench.wants(name.split()[0]):
                    _time_copy(bench, name, voxels, partial(make, source, target, bench.device), check, target)


def _voxels(shape: tuple[int, ...]) -> np.ndarray:
    """Make a volume of copies of one layer, shifted along X: making all layers would take longer than all cases."""
    layer_shape = (min(_LAYER_DEPTH, shape[0]), *shape[1:])
    level_1 = numcodecs.Zstd(level=1)
    change = change_for_ratio(lambda part: len(level_1.encode(part)), layer_shape, _CHUNK, np.dtype(np.uint16))
    box = tuple(slice(0, n) for n in layer_shape)
    layer = oct_voxels(np.random.default_rng(0), layer_shape, box, np.dtype(np.uint16), change)
    return np.concatenate([np.roll(layer, 7 * n, axis=2) for n in range(-(-shape[0] // layer_shape[0]))])[: shape[0]]


def _rows(voxels: Array, chunk: Chunk) -> Array:
    """Cut voxels into rows, each the bytes of a chunk."""
    pairs = [n for size, part in zip(voxels.shape, chunk, strict=True) for n in (size // part, part)]
    cut = array_module(voxels).ascontiguousarray(voxels.reshape(pairs).transpose(0, 2, 4, 1, 3, 5))
    return cut.reshape(-1, int(np.prod(chunk))).view(np.uint8)


# ---- encoding


def _time_encoding(bench: Bench, codec: str, chunk: Chunk, voxels: np.ndarray, device: Array) -> None:
    from linumpy.gpu.codecs.encode import encode_chunks

    encoding = parse_codec(codec, voxels.dtype.itemsize)
    rows, on_host = _rows(device, chunk), _rows(voxels, chunk)
    chosen = np.linspace(0, len(on_host) - 1, min(_SAMPLES, len(on_host))).astype(int)
    encode, decoder = host_encoder(encoding), _decoder(codec)
    ratio = on_host[chosen].nbytes / sum(len(encode(row.view(np.uint16))) for row in on_host[chosen])
    ratios: list[float] = []

    def check(encoded: Encoded) -> str:
        offsets = to_host(encoded.offsets)
        ratios.append(on_host.nbytes / int(offsets[-1]))
        for n in chosen:
            stream = to_host(encoded.arena[int(offsets[n]) : int(offsets[n + 1])]).tobytes()
            if bytes(decoder.decode(stream)) != on_host[n].tobytes():
                return f"chunk {n} is decoded to other bytes"
        return "" if ratios[-1] > 0.95 * ratio else f"its ratio is {ratios[-1]:.2f}, numcodecs' {ratio:.2f}"

    # numcodecs takes a quarter of the chunks; Blosc takes the item size from the array.
    part = [row.view(np.uint16) for row in on_host[: len(on_host) // 4 or 1]]
    name, threads = f"encode {codec}, {'×'.join(map(str, chunk))}", usable_cores()
    with bench.case(name, on_host.nbytes / GIB, by_events=True) as case, ThreadPoolExecutor(threads) as pool:
        note = lambda: f"ratio {ratios[-1]:.2f} (numcodecs {ratio:.2f})"  # noqa: E731
        case.time("linumpy", lambda: encode_chunks(rows, encoding), check, note=note)
        share = len(part) / len(on_host)
        case.time(f"numcodecs, {threads} threads", lambda: list(pool.map(encode, part)), share=share)
        with case.attempt("nvCOMP"):
            case.time("nvCOMP", _nvcomp(codec, rows))


def _decoder(codec: str) -> Any:
    return {"zstd": numcodecs.Zstd, "lz4": numcodecs.LZ4, "blosc": numcodecs.Blosc}[codec.split(":")[0]]()


def _nvcomp(codec: str, rows: Array) -> Callable[[], object]:
    names = {"zstd": "Zstd", "lz4": "LZ4"}
    if codec not in names:
        raise CannotRunError(f"nvCOMP does not encode {codec}")
    nvcomp = peer_module("nvidia.nvcomp", "pip install nvidia-nvcomp-cu13")
    encoder = nvcomp.Codec(algorithm=names[codec], bitstream_kind=nvcomp.BitstreamKind.RAW)
    nbytes = rows.shape[1]
    batch = nvcomp.as_arrays(rows.reshape(-1), [n * nbytes for n in range(len(rows))], [nbytes] * len(rows))

    def call() -> object:
        encoded = encoder.encode(batch)
        synchronize()
        return encoded

    return call


# ---- writing


def _time_writing(
    bench: Bench, codec: str, shards: Chunk | None, voxels: np.ndarray, device: Array, target: Path
) -> None:
    stored: list[int] = []  # bytes and number of the files of chunks
    remove = partial(shutil.rmtree, target, ignore_errors=True)
    codecs = zarr_codecs(parse_codec(codec, voxels.dtype.itemsize), 3)

    def ours() -> None:
        options: dict[str, Any] = {"chunks": _CHUNK, "shards": shards, "codec": codec, "durable": False}
        with OmeZarrWriter(target, device.shape, device.dtype, _SPACING_UM, **options) as writer:
            writer[...] = device

    def check(_: object) -> str:
        array = open_image(target).levels[0]
        files = [file for file in (target / array.path / "c").rglob("*") if file.is_file()]
        stored[:] = sum(file.stat().st_size for file in files), len(files)
        return _is_same(voxels, read_on_host(array, ...))

    def bytes_alone() -> None:
        target.mkdir()
        part = np.zeros(-(-stored[0] // stored[1]), np.uint8)
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(lambda n: write_file(str(target / str(n)), [[part]]), range(stored[1])))

    def new_array() -> zarr.Array:
        return zarr.create_array(
            target, shape=voxels.shape, dtype=voxels.dtype, chunks=_CHUNK, shards=shards, compressors=codecs
        )

    def by_zarr() -> None:
        new_array()[...] = voxels

    def by_tensorstore() -> None:
        new_array()
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(target)}}
        tensorstore.open(spec, context=tensorstore.Context()).result()[...] = voxels

    def array_differs(_: object) -> str:
        return _is_same(voxels, read_on_host(zarr.open_array(target), ...))

    name = f"write {codec}, {'shards' if shards else 'files'}"
    with bench.case(name, voxels.nbytes / GIB, description=f"{voxels.shape} from {bench.device}") as case:
        note = lambda: f"ratio {voxels.nbytes / stored[0]:.2f}"  # noqa: E731
        case.time("linumpy", ours, check, before=remove, note=note)
        case.time("stored bytes", bytes_alone, before=remove)
        with case.attempt("tensorstore"):
            tensorstore = peer_module("tensorstore")
            case.time("tensorstore", by_tensorstore, array_differs, before=remove)
        case.time("zarr-python", by_zarr, array_differs, before=remove)
    remove()


def _is_same(voxels: np.ndarray, result: np.ndarray) -> str:
    return "" if np.array_equal(voxels, result) else "other voxels are read back"


# ---- images made of images


def _converted(source: Path, target: Path, device: DeviceName) -> None:
    convert_zarr(source, target, chunks=(64, 128, 128), durable=False, device=device)


def _halved(source: Path, target: Path, device: DeviceName) -> None:
    spacing = tuple(2 * step for step in _SPACING_UM)
    resample_zarr(source, target, spacing, anti_aliasing=False, mode="nearest", durable=False, device=device)


def _is_half(voxels: np.ndarray, result: np.ndarray) -> str:
    """Compare with the means of 2 × 2 × 2 voxels: linear interpolation at the centre of eight voxels is their mean."""
    pairs = [n for size in result.shape for n in (size, 2)]
    worst = float(np.abs(voxels.reshape(pairs).mean(axis=(1, 3, 5), dtype=np.float32) - result).max())
    return "" if worst <= 0.55 else f"it is wrong by {worst:.3g}"  # rounding, and the error of single precision


def _time_copy(
    bench: Bench, name: str, voxels: np.ndarray, call: Callable[[], object],
    check: Callable[[np.ndarray, np.ndarray], str], target: Path,
) -> None:  # fmt: skip
    remove = partial(shutil.rmtree, target, ignore_errors=True)
    with bench.case(name, voxels.nbytes / GIB, description=f"{voxels.shape} on {bench.device}") as case:
        result = lambda: read_on_host(open_image(target).levels[0], ...)  # noqa: E731
        case.time("linumpy", call, lambda _: check(voxels, result()), before=remove)


_COPIES = {
    "convert zstd to zstd, 64×128×128": (_converted, _is_same),
    "resample zstd to zstd, to half": (_halved, _is_half),
}

SUITE = Suite(run=_run, help=__doc__, cases=("encode", "write", "convert", "resample"))
