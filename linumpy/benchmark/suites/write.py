"""Encoding on the device, writing of encoded images, and conversion, beside numcodecs, tensorstore and nvCOMP.

First 16 chunks of linumpy's encoders, and the whole images of all writers, are decoded and compared with the voxels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numcodecs
import numpy as np
import zarr
from numcodecs.abc import Codec

from linumpy.arrays import Array
from linumpy.benchmark.cases import (
    CannotRunError,
    Case,
    Entry,
    Mark,
    Prepared,
    Suite,
    check_scale,
    not_judged_at,
    peer_module,
    ready,
)
from linumpy.benchmark.data import change_for_ratio, check_free, generator, oct_voxels, work_folder
from linumpy.device import array_module, require_cuda, resolve, synchronize, to_host, usable_cores
from linumpy.io.codecs import host_encoder, zarr_codecs
from linumpy.io.ome import open_image
from linumpy.io.zarr_mode import read_on_host
from linumpy.plan.codecs import parse_codec
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.chunk_file import write_file
from linumpy.write.writer import OmeZarrWriter, write_omezarr

if TYPE_CHECKING:
    from linumpy.gpu.codecs.encode import Encoded

_DESCRIPTION = """Time encoding on the device, and writing of encoded images below --folder.

The voxels are 1024×1024×2048 uint16, OCT-like; zstd at level 1 compresses them to a third. Rates count voxels, not
stored bytes. "encode" cases work on chunks of 512×1024×1024 voxels in device memory, beside numcodecs in a thread for
each core, and nvCOMP if it is installed (pip install nvidia-nvcomp-cu13). "write" cases write an image from device
memory; "flat" writes as many bytes to as many files from host memory. "convert" and "resample" read an image in zstd
and write another image. The notes have the ratio of voxels to stored bytes, and in brackets numcodecs' ratio.

For example:
  linum-benchmark write --folder /dev/shm --json write.json
"""

#: Voxels of images, voxels of the "encode" cases, and depth of a layer.
_SHAPE, _ENCODED, _LAYER_DEPTH = (1024, 1024, 2048), (512, 1024, 1024), 64
_SPACING_UM = (5.0, 5.0, 5.0)
#: Tolerance for rounding to integers, and for the error of single precision.
_TOLERANCE = 0.55
#: Number of chunks whose streams are decoded to check them, and whose ratio by numcodecs is noted.
_SAMPLES = 16


@dataclass(frozen=True)
class Encode:
    """Chunks to encode: name of the codec, shape of a chunk, and GiB/s to reach."""

    codec: str
    chunk: tuple[int, int, int]
    reach: float

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"encode {self.codec}, {'×'.join(map(str, self.chunk))}"


@dataclass(frozen=True)
class Write:
    """An image to write: name of the codec, chunks and shards, and the "encode" case that limits its rate."""

    codec: str
    shards: tuple[int, int, int] | None
    bound: str
    chunk: tuple[int, int, int] = (64, 64, 64)

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"write {self.codec}, {'shards' if self.shards else 'files'}"


_ENCODE = (
    Encode("zstd", (64, 64, 64), 15),
    Encode("zstd", (32, 32, 32), 8),
    Encode("zstd", (64, 128, 128), 15),
    Encode("zstd:small", (64, 64, 64), 0),
    Encode("lz4", (64, 64, 64), 0),
    Encode("blosc:lz4:bit", (64, 64, 64), 30),
    Encode("blosc:lz4:byte", (64, 64, 64), 0),
    Encode("blosc:zstd:bit", (64, 64, 64), 15),
    Encode("blosc:lz4:bit", (32, 32, 32), 8),
)
_WRITE = (
    Write("zstd", None, _ENCODE[0].name),
    Write("zstd", (256, 512, 512), _ENCODE[0].name),
    Write("blosc:lz4:bit", (256, 512, 512), _ENCODE[5].name),
)


@dataclass(frozen=True)
class Copy:
    """A function that makes another image from an image (zstd, chunks of 64³ in files), a check, and GiB/s to reach."""

    name: str
    make: Callable[[Path, Path, str], object]
    check: Callable[[np.ndarray, np.ndarray], str]
    reach: float


def _converted(source: Path, target: Path, device: str) -> None:
    convert_zarr(source, target, chunks=(64, 128, 128), durable=False, device=device)


def _halved(source: Path, target: Path, device: str) -> None:
    spacing = tuple(2 * step for step in _SPACING_UM)
    resample_zarr(source, target, spacing, anti_aliasing=False, mode="nearest", durable=False, device=device)


def _is_same(voxels: np.ndarray, result: np.ndarray) -> str:
    return "" if np.array_equal(voxels, result) else "other voxels are read back"


def _is_half(voxels: np.ndarray, result: np.ndarray) -> str:
    """Compare with the means of 2 × 2 × 2 voxels: linear interpolation at the centre of eight voxels is their mean."""
    pairs = [n for size in result.shape for n in (size, 2)]
    worst = float(np.abs(voxels.reshape(pairs).mean(axis=(1, 3, 5), dtype=np.float32) - result).max())
    return "" if worst <= _TOLERANCE else f"it is wrong by {worst:.3g}"


_COPIES = (
    Copy("convert zstd to zstd, 64×128×128", _converted, _is_same, 10),
    Copy("resample zstd to zstd, to half", _halved, _is_half, 10),
)


@contextmanager
def write_cases(
    *, folder: Path | None, scale: float, only: Sequence[str] = (), use_gpu: bool | None = None
) -> Iterator[tuple[Path, Iterator[Case]]]:
    """Yield a new folder, and cases that write into the folder, which is removed at the end."""
    check_scale(scale)
    on_gpu = resolve().is_cuda if use_gpu is None else use_gpu
    with work_folder(folder) as path:
        yield path, _cases(path, scale, only, on_gpu)


def _cases(path: Path, scale: float, only: Sequence[str], on_gpu: bool) -> Iterator[Case]:
    voxels = _voxels(_shape(scale))
    check_free(path, 2 * voxels.nbytes)
    kinds: tuple[tuple[Sequence[Any], Callable[..., Case]], ...] = (
        (_ENCODE if on_gpu else (), _encode_case),
        (_WRITE, _write_case),
        (_COPIES, _copy_case),
    )
    device = require_cuda().asarray(voxels) if on_gpu else voxels
    encoded = tuple(slice(0, min(n, limit)) for n, limit in zip(voxels.shape, _ENCODED, strict=True))
    for works, make in kinds:
        chosen = (voxels[encoded], device[encoded]) if works is _ENCODE else (voxels, device)
        for work in works:
            if not only or work.name.split(",")[0] in only:
                yield make(work, *chosen, path, scale)


def _shape(scale: float) -> tuple[int, int, int]:
    """Return the shape of the volume, of whole chunks of every work."""
    depth, height, width = (max(128, round(n * scale) // 128 * 128) for n in _SHAPE)
    return depth, height, width


def _voxels(shape: tuple[int, int, int]) -> np.ndarray:
    """Make a volume of copies of one layer, shifted along X: making all layers would take longer than all cases."""
    layer_shape = (min(_LAYER_DEPTH, shape[0]), *shape[1:])
    level_1 = numcodecs.Zstd(level=1)
    change = change_for_ratio(lambda a: len(level_1.encode(a)), layer_shape, (64, 64, 64), np.dtype(np.uint16))
    box = tuple(slice(0, n) for n in layer_shape)
    layer = oct_voxels(generator(0, box), layer_shape, box, np.dtype(np.uint16), change)
    return np.concatenate([np.roll(layer, 7 * n, axis=2) for n in range(-(-shape[0] // layer_shape[0]))])[: shape[0]]


def _rows(voxels: Array, chunk: tuple[int, int, int]) -> Array:
    """Cut voxels into rows, each the bytes of a chunk."""
    xp = array_module(voxels)
    pairs = [n for size, part in zip(voxels.shape, chunk, strict=True) for n in (size // part, part)]
    cut = voxels.reshape(pairs).transpose(0, 2, 4, 1, 3, 5)
    return xp.ascontiguousarray(cut).reshape(-1, int(np.prod(chunk))).view(np.uint8)


# ---- encoding


def _encode_case(work: Encode, voxels: np.ndarray, device: Array, path: Path, scale: float) -> Case:
    encoding = parse_codec(work.codec, voxels.dtype.itemsize)
    rows, on_host = _rows(device, work.chunk), _rows(voxels, work.chunk)
    chosen = np.linspace(0, len(on_host) - 1, min(_SAMPLES, len(on_host))).astype(int)
    encode = host_encoder(encoding)
    ratio = on_host[chosen].nbytes / sum(len(encode(row)) for row in _typed(on_host[chosen]))
    ratios: list[float] = []

    def ours() -> Encoded:
        from linumpy.gpu.codecs.encode import encode_chunks

        return encode_chunks(rows, encoding)

    def check(encoded: Encoded) -> str:
        arena, offsets = encoded.arena, to_host(encoded.offsets)
        ratios.append(on_host.nbytes / int(offsets[-1]))
        for n in chosen:
            stream = to_host(arena[int(offsets[n]) : int(offsets[n + 1])]).tobytes()
            if bytes(_decoder(work.codec).decode(stream)) != on_host[n].tobytes():
                return f"chunk {n} is decoded to other bytes"
        return "" if ratios[-1] > 0.95 * ratio else f"its ratio is {ratios[-1]:.2f}, numcodecs' {ratio:.2f}"

    def note() -> str:
        return f"ratio {ratios[-1]:.2f} ({ratio:.2f})"

    threads = usable_cores()
    pool = ThreadPoolExecutor(threads)
    return Case(
        work.name,
        on_host.nbytes,
        (
            Entry("encode", "linumpy", ready(ours, check, note=note), "ours", 2),
            Entry("nvcomp", "nvCOMP", partial(_nvcomp, work, rows), max_seconds=5),
            Entry(
                "numcodecs", f"numcodecs, {threads} threads",
                ready(lambda: list(pool.map(encode, _typed(on_host[: len(on_host) // 4 or 1])))),
                share=(len(on_host) // 4 or 1) / len(on_host), max_seconds=5,
            ),
        ),
        (f"{len(on_host)} chunks",),
        {"chunk": list(work.chunk), "codec": work.codec},
        (Mark(work.reach),) if work.reach else (),
        not_judged_at(scale),
        clock="device",
    )  # fmt: skip


def _typed(rows: np.ndarray) -> np.ndarray:
    """View rows as voxels, since Blosc takes the item size from the array."""
    return rows.view(np.uint16)


def _decoder(codec: str) -> Codec:
    """Return numcodecs' decoder for a codec's name."""
    return {"zstd": numcodecs.Zstd, "lz4": numcodecs.LZ4, "blosc": numcodecs.Blosc}[codec.split(":")[0]]()


def _nvcomp(work: Encode, rows: Array) -> AbstractContextManager[Prepared]:
    """Prepare nvCOMP's encoder for the same codec; nvCOMP has no encoder for Blosc."""
    names = {"zstd": "Zstd", "lz4": "LZ4"}
    if work.codec not in names:
        raise CannotRunError(f"nvCOMP does not encode {work.codec}")
    try:
        from nvidia import nvcomp
    except ImportError:
        raise CannotRunError("nvCOMP is not installed: pip install nvidia-nvcomp-cu13") from None
    codec = nvcomp.Codec(algorithm=names[work.codec], bitstream_kind=nvcomp.BitstreamKind.RAW)
    nbytes = rows.shape[1]
    batch = nvcomp.as_arrays(rows.reshape(-1), [n * nbytes for n in range(len(rows))], [nbytes] * len(rows))

    def call() -> object:
        encoded = codec.encode(batch)
        synchronize()
        return encoded

    return nullcontext(Prepared(call))


# ---- writing


def _write_case(work: Write, voxels: np.ndarray, device: Array, path: Path, scale: float) -> Case:
    target = path / "image.ome.zarr"
    on_gpu = device is not voxels
    stored: list[tuple[int, int]] = []  # bytes and number of the chunks' files
    remove = partial(shutil.rmtree, target, ignore_errors=True)

    def ours() -> None:
        with OmeZarrWriter(
            target, device.shape, device.dtype, _SPACING_UM,
            chunks=work.chunk, shards=work.shards, codec=work.codec, durable=False,
        ) as writer:  # fmt: skip
            writer[...] = device

    def check(_: object) -> str:
        array = open_image(target).levels[0]
        files = [file for file in (target / array.path).rglob("*") if file.name not in ("zarr.json", ".zarray")]
        sizes = [file.stat().st_size for file in files if file.is_file()]
        stored[:] = [(sum(sizes), len(sizes))]
        return _is_same(voxels, read_on_host(array, ...))

    def note() -> str:
        return f"ratio {voxels.nbytes / stored[0][0]:.2f}"

    def by_zarr() -> AbstractContextManager[Prepared]:
        def write(array: zarr.Array) -> None:
            array[...] = voxels

        return _peer(target, work, voxels, write)

    def by_tensorstore() -> AbstractContextManager[Prepared]:
        tensorstore = peer_module("tensorstore")
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(target)}}

        def write(array: zarr.Array) -> None:
            tensorstore.open(spec, context=tensorstore.Context()).result()[...] = voxels

        return _peer(target, work, voxels, write)

    return Case(
        work.name,
        voxels.nbytes,
        (
            Entry("write", "OmeZarrWriter", ready(ours, check, before=remove, note=note), "ours"),
            Entry("flat", "the stored bytes alone", lambda: _flat(target, stored), "limit"),
            Entry("zarr", "zarr-python", by_zarr, max_seconds=10, warm_ups=0),
            Entry("tensorstore", "tensorstore", by_tensorstore, max_seconds=10, warm_ups=0),
        ),
        (f"{voxels.shape} from {'the device' if on_gpu else 'the host'}",),
        {"codec": work.codec},
        (Mark(0.8, (f"{work.bound}/encode", "flat"), "× the slower of encoder and flat", slowest=True),)
        if on_gpu
        else (),
        not_judged_at(scale),
    )


def _flat(target: Path, stored: list[tuple[int, int]]) -> AbstractContextManager[Prepared]:
    """Prepare the limit: as many bytes as an image stores, in as many files, from host memory."""
    if not stored:
        raise CannotRunError("no image was written")
    nbytes, count = stored[0]
    part = np.random.default_rng(0).integers(0, 256, -(-nbytes // count), np.uint8)

    def call() -> None:
        target.mkdir()
        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(lambda n: write_file(str(target / str(n)), [[part]]), range(count)))

    return nullcontext(Prepared(call, before=partial(shutil.rmtree, target, ignore_errors=True)))


def _peer(
    target: Path, work: Write, voxels: np.ndarray, write: Callable[[zarr.Array], object]
) -> AbstractContextManager[Prepared]:
    """Prepare a peer that writes the voxels into an array that zarr-python makes."""
    codecs = zarr_codecs(parse_codec(work.codec, voxels.dtype.itemsize), 3)

    def call() -> None:
        array = zarr.create_array(
            target, shape=voxels.shape, dtype=voxels.dtype, chunks=work.chunk, shards=work.shards, compressors=codecs
        )
        write(array)

    def check(_: object) -> str:
        return _is_same(voxels, read_on_host(zarr.open_array(target), ...))

    return nullcontext(Prepared(call, check, before=partial(shutil.rmtree, target, ignore_errors=True)))


def _copy_case(work: Copy, voxels: np.ndarray, device: Array, path: Path, scale: float) -> Case:
    source, target = path / "source.ome.zarr", path / "copy.ome.zarr"
    on_gpu = device is not voxels
    if not source.exists():
        write_omezarr(source, device, _SPACING_UM, chunks=(64, 64, 64), codec="zstd", durable=False)
    call = partial(work.make, source, target, "cuda" if on_gpu else "cpu")
    remove = partial(shutil.rmtree, target, ignore_errors=True)

    def check(_: object) -> str:
        return work.check(voxels, read_on_host(open_image(target).levels[0], ...))

    return Case(
        work.name,
        voxels.nbytes,
        (Entry("linumpy", "linumpy", ready(call, check, before=remove), "ours"),),
        (f"{voxels.shape} on the {'device' if on_gpu else 'CPU'}",),
        {},
        (Mark(work.reach),) if on_gpu else (),
        not_judged_at(scale),
    )


SUITE = Suite(
    "write", _DESCRIPTION, 5, write_cases,
    tuple(dict.fromkeys(work.name.split(",")[0] for work in (*_ENCODE, *_WRITE, *_COPIES))),
    scale="Factor of all axes.", folder="Where images are written",
)  # fmt: skip
