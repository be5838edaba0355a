"""If this fails, another reader cannot read what linumpy's encoders write, or reads other voxels.

Arrays that the host and the device's kernels (under the emulator) encoded, in all codecs, files and shards, zarr v2 and
v3, of one to five axes. Readers that are not installed are skipped; ``cannot`` says what each of them does not
read, whoever wrote it.
"""

import itertools
import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy import read_zarr
from linumpy.io.codecs import zarr_codecs
from linumpy.plan.codecs import parse_codec
from linumpy.write.chunks import OwnChunks, chunks_of
from tests.support.gpu import cupy_on_host, encode_on_host
from tests.support.gpu.emulator import needs_compiler

CODECS = [
    "zstd", "zstd:small", "lz4", "gzip", "none",
    *(f"blosc:{inner}:{shuffle}{preset}" for inner in ("lz4", "zstd") for shuffle in ("none", "byte", "bit")
      for preset in ("", ":small")),
]  # fmt: skip
STORED = ["v2", "v3", "v3 crc32c", "v3 shards", "v3 shards crc32c"]
DTYPES = ["u2", "f4", "u1", "i8", "f8", "i2", "bool", "u4", "f2"]
SHAPES = [(13, 18, 21), (30, 33), (5, 9, 12, 10), (2, 3, 7, 9, 8), (700,)]
CHUNKS = [(8, 8, 16), (16, 16), (3, 8, 8, 4), (1, 2, 4, 8, 4), (256,)]


@dataclass(frozen=True)
class Written:
    """An array on disk: how it was encoded, and what is in it."""

    path: object
    codec: str
    stored: str
    encoder: str
    voxels: np.ndarray

    @property
    def zarr_format(self):
        return int(self.stored[1])


def cases():
    """Every codec in every kind of store; data types and numbers of axes take turns."""
    for number, (codec, stored) in enumerate(itertools.product(CODECS, STORED)):
        yield number, codec, stored


def voxels(shape, chunks, dtype, seed):
    """Make chunks of noise, constants, ramps, NaN, and of nothing but the fill value."""
    rng, dtype = np.random.default_rng(seed), np.dtype(dtype)
    data = np.empty(shape, dtype)
    corners = [range(0, n, c) for n, c in zip(shape, chunks, strict=True)]
    for number, corner in enumerate(itertools.product(*corners)):
        box = tuple(slice(a, a + c) for a, c in zip(corner, chunks, strict=True))
        part = data[box]
        match number % 6:
            case 0:
                part[...] = rng.integers(0, 256, (*part.shape, dtype.itemsize), "u1").view(dtype)[..., 0] if (
                    dtype.kind != "b"
                ) else rng.random(part.shape) < 0.5  # fmt: skip
            case 1:
                part[...] = 1
            case 2:
                part[...] = (np.arange(part.size) % 50).reshape(part.shape)
            case 3:
                part[...] = np.nan if dtype.kind == "f" else rng.integers(0, 2, part.shape)
            case 4:
                part[...] = np.clip(rng.gamma(4, 9, part.shape), 0, 100).astype(dtype)
            case _:
                part[...] = 0
    return data


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder, found = tmp_path_factory.mktemp("written"), []
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of codecs that are not in the specification
        cupy = cupy_on_host.install(patch)
        seen = encode_on_host.install(patch, by_kernels=True)
        for number, codec, stored in cases():
            shape, chunks = SHAPES[number % len(SHAPES)], CHUNKS[number % len(CHUNKS)]
            data = voxels(shape, chunks, DTYPES[number % len(DTYPES)], number)
            encoding = parse_codec(codec + "+crc32c" * ("crc32c" in stored), data.itemsize)
            for encoder in ("host", "device"):
                array = zarr.create_array(
                    folder / f"{number}-{encoder}", shape=shape, dtype=data.dtype, chunks=chunks, fill_value=0,
                    shards=tuple(2 * c for c in chunks) if "shards" in stored else None,
                    zarr_format=int(stored[1]), compressors=zarr_codecs(encoding, int(stored[1])),
                )  # fmt: skip
                chunks_of_array = chunks_of(array, pool, 2)
                before = len(seen)
                block = cupy.asarray(data) if encoder == "device" else data
                chunks_of_array.start(tuple(slice(0, n) for n in shape), block)()
                on_device = encoder == "device" and codec not in ("gzip", "none")
                assert (len(seen) > before) == on_device
                assert codec == "none" or isinstance(chunks_of_array, OwnChunks)
                found.append(Written(folder / f"{number}-{encoder}", codec, stored, encoder, data))
    return found


def by_zarr_python(one):
    return zarr.open_array(one.path, mode="r")[...]


def by_linumpy(one):
    return read_zarr(one.path, device="cpu")


def by_numcodecs(one):
    """Read files of zarr v2 without any library for Zarr."""
    about = json.loads((one.path / ".zarray").read_bytes())
    decode = numcodecs.get_codec(about["compressor"]).decode if about["compressor"] else bytes
    made = np.zeros(about["shape"], about["dtype"])
    chunks = about["chunks"]
    for index in itertools.product(*(range(-(-n // c)) for n, c in zip(about["shape"], chunks, strict=True))):
        file = one.path / about.get("dimension_separator", ".").join(map(str, index))
        if file.exists():
            part = np.frombuffer(decode(file.read_bytes()), about["dtype"]).reshape(chunks)
            box = made[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))]
            box[...] = part[tuple(map(slice, box.shape))]
    return made


def by_tensorstore(one):
    tensorstore = pytest.importorskip("tensorstore")
    driver = "zarr3" if one.zarr_format == 3 else "zarr"
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": str(one.path)}}
    return tensorstore.open(spec).result().read().result()


def by_zarrs(one):
    pytest.importorskip("zarrs")
    with zarr.config.set({"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}):
        return zarr.open_array(one.path, mode="r")[...]


def by_zarrita(one):
    zarrita = pytest.importorskip("zarrita")
    made = (zarrita.Array if one.zarr_format == 3 else zarrita.ArrayV2).open(
        zarrita.LocalStore(one.path.parent) / one.path.name
    )
    return made[tuple(map(slice, one.voxels.shape))]


def by_gdal(one):
    """By the GDAL that rasterio brings; axes before the last two are bands."""
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(f'ZARR:"{one.path}"') as image:
        return image.read().astype(one.voxels.dtype).reshape(one.voxels.shape)  # of float16 it makes float32


READERS = {name.removeprefix("by_"): made for name, made in sorted(globals().items()) if name.startswith("by_")}


def cannot(reader, one):
    """Why a reader does not read an array, whoever wrote it; empty if it does."""
    if one.codec == "lz4" and reader in ("tensorstore", "zarrs", "zarrita", "gdal"):
        return "" if reader == "zarrita" and one.zarr_format == 2 else "it has no lz4"
    if one.zarr_format == 3:
        if reader == "numcodecs":
            return "it decodes chunks of zarr v2"
        if reader == "zarrita" and one.voxels.dtype in ("f2", "u1", "?"):
            return "it reads no float16, and no codec 'bytes' without a byte order"
        if reader == "gdal" and (gdal_version() < (3, 12) or "shards" in one.stored or "crc32c" in one.stored):
            return "GDAL 3.12 knows neither shards nor crc32c, GDAL 3.10 not the codec 'bytes'"
    return ""


def gdal_version():
    return tuple(map(int, pytest.importorskip("rasterio").__gdal_version__.split(".")[:2]))


@needs_compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("reader", READERS)
def test_reads_what_was_put_in(written, reader):
    read, wrong = 0, []
    for one in written:
        if cannot(reader, one):
            continue
        try:
            same = np.asarray(READERS[reader](one)).tobytes() == one.voxels.tobytes()
        except Exception as error:
            wrong.append((one.path.name, one.codec, one.stored, one.encoder, one.voxels.dtype, str(error)[:90]))
        else:
            read += 1
            if not same:
                wrong.append((one.path.name, one.codec, one.stored, one.encoder, one.voxels.dtype, "other voxels"))
    assert read
    assert not wrong, "\n".join(map(str, wrong))
