"""If this fails, chunks that are encoded here cannot be read by others, or hold other voxels."""

import itertools
import os
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, ZstdCodec

from linumpy import read_zarr
from linumpy.io.codecs import encoding_of, zarr_codecs
from linumpy.plan.codecs import parse_codec
from linumpy.write import device_chunks, writer
from linumpy.write.chunks import OwnChunks, ZarrChunks, _warn_once, chunks_of
from linumpy.write.pyramid import halve
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support.budget import examples
from tests.support.gpu import cupy_on_host, encode_on_host

pytestmark = pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")

NAMES = [
    "zstd", "zstd:small", "lz4", "gzip", "gzip:small", "none",
    *(f"blosc:{inner}:{shuffle}{preset}" for inner in ("lz4", "zstd") for shuffle in ("none", "byte", "bit")
      for preset in ("", ":small")),
]  # fmt: skip
KINDS = ["noise", "ramp", "constant", "fill", "nan", "some fill"]


def voxels(kind, shape, dtype, fill, chunk, seed):
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    noise = rng.integers(0, 256, (*shape, dtype.itemsize), "u1").view(dtype)[..., 0]
    if dtype.kind == "b":
        noise = rng.random(shape) < 0.5
    if kind == "ramp":
        return (np.arange(np.prod(shape)).reshape(shape) % 50).astype(dtype)
    if kind in ("constant", "fill"):
        return np.full(shape, fill if kind == "fill" else 1, dtype)
    if kind == "nan" and dtype.kind == "f":
        return np.where(rng.random(shape) < 0.5, np.nan, noise).astype(dtype)
    if kind == "some fill":  # whole chunks of it, and one voxel of another value at an end of a chunk
        noise[tuple(slice(0, 2 * c) for c in chunk)] = fill
        noise[tuple(min(c, n) - 1 for c, n in zip(chunk, shape, strict=True))] = 1 - fill
    return noise


@st.composite
def requests(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.integers(1, 20)) for _ in range(rank))
    chunks = tuple(draw(st.integers(1, 7)) for _ in range(rank))
    version = draw(st.sampled_from(["0.5", "0.4"]))
    v3 = version == "0.5"
    return {
        "shape": shape,
        "chunks": chunks,
        "shards": tuple(c * draw(st.integers(1, 3)) for c in chunks) if v3 and draw(st.booleans()) else None,
        "codec": draw(st.sampled_from(NAMES)) + draw(st.sampled_from(["", "+crc32c"] if v3 else [""])),
        "ngff_version": version,
        "dtype": draw(st.sampled_from(["bool", "u1", "i2", "u2", "u4", "i8", "f2", "f4", "f8"])),
        "kind": draw(st.sampled_from(KINDS)),
        "fill_value": draw(st.sampled_from([0, 1])),
        "levels": draw(st.integers(1, 2)) if max(shape) > 1 else 1,
        "seed": draw(st.integers(0, 2**32 - 1)),
    }


def by_tensorstore(path, array, codec):
    tensorstore = pytest.importorskip("tensorstore")
    if codec.startswith("lz4"):  # which it does not read
        return None
    driver = "zarr3" if array.metadata.zarr_format == 3 else "zarr"
    return (
        tensorstore.open({"driver": driver, "kvstore": {"driver": "file", "path": str(path)}}).result().read().result()
    )


def files_below(path):
    return {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}


@pytest.mark.parametrize("on_device", [False, True])
@settings(max_examples=examples(60))
@given(request=requests())
def test_what_was_put_in_comes_out(on_device, request):
    """By zarr-python, tensorstore and linumpy's reader; and zarr-python writes the same files, less those of fill."""
    options = dict(request)
    shape, dtype, kind, seed = (options.pop(key) for key in ("shape", "dtype", "kind", "seed"))
    data = voxels(kind, shape, dtype, options["fill_value"], options["chunks"], seed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, block = Path(folder) / "i", data
        if on_device:
            block, seen = cupy_on_host.install(patch).asarray(data), encode_on_host.install(patch)
            patch.setattr("linumpy.write.chunks.BATCH_NBYTES", 1 + seed % 3000)
            patch.setattr(device_chunks, "_PINNED_NBYTES", 1 + seed % 1000)
            patch.setattr(writer, "STEP_BYTES", 1 + seed % 5000)
            patch.setattr(device_chunks, "read_to_device", lambda array, box: cupy_on_host.Array(array[box]))
        with OmeZarrWriter(path, shape, dtype, (1,) * len(shape), **options) as target:
            target[...] = block
        finer = data
        if on_device:
            encoded_there = not options["codec"].startswith(("gzip", "none"))
            assert bool(seen) == encoded_there
            patch.undo()
        for level in range(options["levels"]):
            array = zarr.open_array(path / str(level), mode="r")
            assert encoding_of(array) == parse_codec(options["codec"], data.itemsize)
            found = [array[...], read_zarr(path / str(level), device="cpu")]
            found.append(by_tensorstore(path / str(level), array, options["codec"]))
            for one in found:
                assert one is None or np.asarray(one).tobytes() == finer.tobytes()
            if not (options["codec"] == "none" and options["shards"] is None):
                assert files_below(path / str(level)) == files_of_zarr(Path(folder) / f"zarr{level}", array, finer)
            finer = halve(finer)


def files_of_zarr(path, like, data):
    other = zarr.create_array(
        path, shape=like.shape, chunks=like.chunks, shards=like.shards, dtype=like.dtype, fill_value=like.fill_value,
        zarr_format=like.metadata.zarr_format, compressors=like.compressors or None,
        chunk_key_encoding={"name": "v2", "separator": "/"} if like.metadata.zarr_format == 2 else None,
    )  # fmt: skip
    other[...] = data
    return files_below(path)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("version", ["0.5", "0.4"])
def test_chunks_of_the_host_are_those_of_zarr_python(tmp_path, name, version):
    data = np.random.default_rng(1).integers(0, 60, (20, 21)).astype("u2")
    write_omezarr(tmp_path / "i", data, (1, 1), chunks=(8, 8), codec=name, ngff_version=version)
    like = zarr.open_array(tmp_path / "i/0")
    files_of_zarr(tmp_path / "other", like, data)
    for one in files_below(tmp_path / "other") - {"zarr.json", ".zarray", ".zattrs"}:
        mine, theirs = ((path / one).read_bytes() for path in (tmp_path / "i/0", tmp_path / "other"))
        at = 8 if name.startswith("gzip") else 0  # behind the time
        assert mine[at:] == theirs[at:], one


@pytest.mark.parametrize("location", ["start", "end"])
@pytest.mark.parametrize("endian", ["little", "big"])
@pytest.mark.parametrize("checked", [False, True])
def test_indexes_of_shards(tmp_path, location, endian, checked):
    index = [BytesCodec(endian=endian), *([Crc32cCodec()] if checked else [])]
    codec = ShardingCodec(
        chunk_shape=(4, 5), codecs=[BytesCodec(), ZstdCodec(level=1)], index_codecs=index, index_location=location
    )
    array = zarr.create(
        shape=(30, 33), chunks=(12, 10), dtype="f4", codecs=[codec], store=tmp_path / "a", zarr_format=3, fill_value=3
    )
    data = np.random.default_rng(1).normal(size=(30, 33)).astype("f4")
    data[4:8, :10] = data[:12, 20:30] = 3
    with ThreadPoolExecutor(4) as pool:
        chunks = chunks_of(array, pool, 4)
        assert isinstance(chunks, OwnChunks)
        box = tuple(map(slice, (0, 0), data.shape))
        chunks.start(box, data)()
        assert np.array_equal(zarr.open_array(tmp_path / "a")[...], data)
        assert np.array_equal(read_zarr(tmp_path / "a", device="cpu"), data)
        assert not (tmp_path / "a/c/0/2").exists()
        assert chunks.stored_nbytes == sum(f.stat().st_size for f in (tmp_path / "a/c").rglob("*") if f.is_file())
        chunks.start(box, np.full_like(data, 3))()  # written again, with nothing but the fill value
    assert files_below(tmp_path / "a") == {"zarr.json"}


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"codec": "none"}, OwnChunks),
        ({"codec": "none", "chunks": (2, 2), "shards": (4, 4)}, OwnChunks),
        ({"compressors": None}, OwnChunks),
        ({}, OwnChunks),
        ({"compressors": ZstdCodec(level=1)}, OwnChunks),
        ({"compressors": ZstdCodec(level=7)}, ZarrChunks),  # by object: exactly so
        ({"codec": "zstd", "dtype": ">u2", "ngff_version": "0.4"}, ZarrChunks),
    ],
)
def test_which_way_chunks_go(tmp_path, options, kind):
    dtype = options.pop("dtype", "u2")
    with OmeZarrWriter(tmp_path / "i", (4, 4), dtype, (1, 1), **options) as target:
        assert type(target._chunks[0]) is kind
        target[...] = data = np.arange(16).reshape(4, 4).astype(dtype)
    assert np.array_equal(zarr.open_array(tmp_path / "i/0")[...], data)


@pytest.mark.parametrize("name", ["", "zst", "zstd:bit", "none:small", "lz4:small", "blosc", "blosc:zlib",
                                  "blosc:lz4:bit:byte", "zstd:small:small", "blosc:lz4:"])  # fmt: skip
def test_names_that_do_not_exist(tmp_path, name):
    with pytest.raises(ValueError, match=r"codec='.*': choose one of zstd, zstd:small"):
        OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1), codec=name)


def test_one_of_two_ways_to_say_it(tmp_path):
    with pytest.raises(ValueError, match="codec='zstd', compressors=None: pass one of the two"):
        OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1), codec="zstd", compressors=None)
    with pytest.raises(ValueError, match="zarr v2 stores no checksum"):
        OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1), codec="zstd+crc32c", ngff_version="0.4")
    with pytest.raises(TypeError, match="codec=3: pass the name"):
        OmeZarrWriter(tmp_path / "i", (4, 4), "u2", (1, 1), codec=3)


@pytest.mark.parametrize("name", [*NAMES, "zstd+crc32c", "none+crc32c"])
@pytest.mark.parametrize("shards", [None, (8, 8)])
def test_a_name_is_found_again_in_the_metadata(name, shards):
    encoding = parse_codec(name, 2)
    assert parse_codec(str(encoding), 2) == encoding
    for zarr_format in (2, 3):
        if zarr_format == 3 or not (encoding.checksum or shards):
            array = zarr.create_array(
                {}, shape=(16, 16), chunks=(4, 4), shards=shards, dtype="u2", zarr_format=zarr_format,
                compressors=zarr_codecs(encoding, zarr_format),
            )  # fmt: skip
            assert encoding_of(zarr.open_array(array.store)) == encoding


@pytest.mark.parametrize("codec", ["zstd", "none"])
def test_only_stored_bytes_leave_the_device(tmp_path, monkeypatch, codec):
    """Blocks stay there: coarser ones are made there, and read back there."""
    cupy = cupy_on_host.install(monkeypatch)
    encode_on_host.install(monkeypatch)
    fetched, real = [], cupy_on_host.Array.get

    def get(self, *arguments, **options):
        fetched.append(self.nbytes)
        return real(self, *arguments, **options)

    monkeypatch.setattr(cupy_on_host.Array, "get", get)
    monkeypatch.setattr(device_chunks, "read_to_device", lambda array, box: cupy_on_host.Array(array[box]))
    data = np.random.default_rng(1).integers(0, 9, (13, 18, 21)).astype("u2")
    options = {"chunks": (4, 4, 4), "levels": 3, "codec": codec, "buffer_bytes": 2**20}
    with OmeZarrWriter(tmp_path / "i", data.shape, "u2", (1, 1, 1), **options) as target:
        for begin in range(0, 13, 3):
            end = min(begin + 3, 13)
            target[begin:end] = cupy.asarray(data[begin:end])
    report = target.report
    indexes = 9 * sum(1 for f in (tmp_path / "i").rglob("c/*/*/*")) + 8 * len(fetched)  # offsets, and which are fill
    assert report.stored_nbytes <= sum(fetched) <= report.stored_nbytes + indexes
    assert (report.decoded_nbytes, report.why_host) == (sum(one.nbytes for one in pyramid_of(data)), "")
    assert report.stored_nbytes == sum(f.stat().st_size for f in (tmp_path / "i").rglob("c/*/*/*"))
    for level, expected in enumerate(pyramid_of(data)):
        assert np.array_equal(zarr.open_array(tmp_path / "i" / str(level))[...], expected)


def pyramid_of(data):
    return [data, halve(data), halve(halve(data))]


def test_what_the_device_does_not_encode_is_said(tmp_path, monkeypatch, caplog):
    cupy = cupy_on_host.install(monkeypatch)
    _warn_once.cache_clear()
    data = np.arange(600, dtype="u2").reshape(20, 30)
    for number in range(2):
        with OmeZarrWriter(tmp_path / str(number), data.shape, "u2", (1, 1), codec="gzip") as target:
            target[...] = cupy.asarray(data)
        assert target.report.why_host == "gzip is encoded by the host"
        assert np.array_equal(zarr.open_array(tmp_path / str(number) / "0")[...], data)
    assert [one.getMessage() for one in caplog.records] == [
        "gzip is encoded by the host: chunks are copied to the host, which encodes them"
    ]


def test_a_file_has_its_name_when_it_is_complete(tmp_path, monkeypatch):
    """As zarr's do, where two processes may write the same chunk."""
    array = zarr.create_array(tmp_path / "a", shape=(8, 8), chunks=(4, 4), dtype="u2", compressors=ZstdCodec(level=1))
    seen, real = [], os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (seen.append(os.path.basename(a)), real(a, b)))
    with ThreadPoolExecutor(2) as pool:
        data = np.arange(64, dtype="u2").reshape(8, 8)
        chunks_of(array, pool, 2, renamed=True).start((slice(0, 8), slice(0, 8)), data)()
    assert len([name for name in seen if name.endswith(".partial")]) == 4
    assert np.array_equal(array[...], data)


# --- On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("codec", [name for name in NAMES if not name.startswith("gzip")])
@pytest.mark.parametrize("shards", [None, (32, 64, 64)])
def test_on_a_device(cupy, tmp_path, codec, shards):
    """What the device encodes is what was put in, by all readers, and no larger than by a third than of the host."""
    rng = np.random.default_rng(1)
    data = rng.gamma(4, 900, (70, 150, 140)).astype("u2")
    data[:32, :64, :64] = 0
    options = {"chunks": (16, 32, 32), "shards": shards, "codec": codec, "levels": 2}
    for name, block in (("host", data), ("device", cupy.asarray(data))):
        with OmeZarrWriter(tmp_path / name, data.shape, "u2", (1, 1, 1), **options) as target:
            target[...] = block
        if name == "host":
            host = target.report
    assert target.report.why_host == ""
    assert target.report.stored_nbytes < 1.33 * host.stored_nbytes
    for level, expected in enumerate([data, halve(data)]):
        path = tmp_path / "device" / str(level)
        array = zarr.open_array(path)
        for one in (array[...], read_zarr(path, device="cpu"), by_tensorstore(path, array, codec)):
            assert one is None or np.array_equal(one, expected)
        assert files_below(path) == files_below(tmp_path / "host" / str(level))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bool", "u1", "i2", "u4", "f4", "f8"])
@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_and_voxels_on_a_device(cupy, tmp_path, dtype, kind):
    data = voxels(kind, (40, 50, 60), dtype, 0, (16, 16, 16), 5)
    for codec, shards in itertools.product(("zstd", "blosc:lz4:bit", "lz4"), (None, (32, 32, 32))):
        path = tmp_path / f"{codec}{shards}".replace(":", "")
        write_omezarr(path, cupy.asarray(data), (1, 1, 1), chunks=(16, 16, 16), shards=shards, codec=codec)
        assert zarr.open_array(path / "0")[...].tobytes() == data.tobytes()
