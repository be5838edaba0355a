"""Zarr arrays of every kind that the kvikio reader takes, drawn by hypothesis and written by zarr-python."""

import itertools
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numcodecs
import numpy as np
import zarr
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs import numcodecs as numcodecs_v3

DTYPES = ["bool", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]


@dataclass(frozen=True)
class Case:
    """One array and a region of it."""

    shape: tuple
    chunks: tuple
    shards: tuple | None
    dtype: str
    zarr_format: int
    big_endian: bool
    order: tuple
    separator: str
    v2_keys: bool
    index_at_end: bool
    fill: object
    missing: int
    region: tuple
    seed: int
    codecs: tuple = ()


def regions(shape):
    """Indices that zarr takes: open, negative and empty slices, ints, and '...' in place of any run of full axes."""

    def axis(n):
        whole = st.just(slice(None))
        integer = st.integers(-n, n - 1) if n else whole
        bound = st.none() | st.integers(-n, n)
        return st.one_of(whole, st.builds(slice, bound, bound), integer)

    def shorten(items):
        full = [i for i, item in enumerate(items) if item == slice(None)]
        if full and len(items) > 1:
            i = full[0]
            return (*items[:i], Ellipsis, *items[i + 1 :])
        return items

    exact = st.tuples(*(axis(n) for n in shape))
    return exact | exact.map(shorten)


def fills(dtype):
    kind = np.dtype(dtype).kind
    if kind == "f":
        return st.sampled_from([0.0, 1.5, -2.0, math.nan, math.inf, -math.inf])
    if kind == "c":
        return st.sampled_from([0j, 1.5 - 2j])
    if kind == "b":
        return st.booleans()
    return st.sampled_from([0, 1, 77, np.iinfo(dtype).max])


@st.composite
def cases(draw, max_elements=4000):
    rank = draw(st.integers(1, 6))
    longest = {1: 300, 2: 40, 3: 14, 4: 7, 5: 5, 6: 4}[rank]
    shape = tuple(draw(st.lists(st.integers(1, longest), min_size=rank, max_size=rank)))
    while math.prod(shape) > max_elements:
        shape = tuple(max(1, n // 2) for n in shape)
    chunks = tuple(draw(st.integers(1, n + 2)) for n in shape)
    zarr_format = draw(st.sampled_from([2, 3]))
    shards = None
    if zarr_format == 3 and draw(st.booleans()):
        shards = tuple(c * draw(st.integers(1, 3)) for c in chunks)
    dtype = draw(st.sampled_from(DTYPES))
    axes = tuple(range(rank))
    order = draw(st.sampled_from([axes, axes[::-1]])) if zarr_format == 2 else tuple(draw(st.permutations(axes)))
    return Case(
        shape=shape,
        chunks=chunks,
        shards=shards,
        dtype=dtype,
        zarr_format=zarr_format,
        big_endian=draw(st.booleans()),
        order=order,
        separator=draw(st.sampled_from("./")),
        v2_keys=draw(st.booleans()),
        index_at_end=draw(st.booleans()),
        fill=draw(fills(dtype) if zarr_format == 3 else st.none() | fills(dtype)),
        missing=draw(st.sampled_from([0, 0, 2, 5])),
        region=draw(regions(shape)),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


BLOSC = [
    (name, shuffle, typesize, block)
    for name in ("lz4", "lz4hc", "zstd", "zlib")
    for shuffle in (0, 1, 2)
    for typesize in (1, 2, 3, 4, 8, 16, 255)
    for block in (0, 64, 1000)
]


@st.composite
def chains(draw, zarr_format):
    """Codecs behind the bytes of a chunk, in the order of encoding, that the device decodes."""
    compressor = draw(
        st.sampled_from(["zstd", "lz4", "gzip", "zlib", None])
        | st.tuples(st.just("zstd"), st.sampled_from([-3, 1, 9, 19]), st.booleans())
        | st.tuples(st.just("blosc"), st.sampled_from(BLOSC))
    )
    is_blosc = isinstance(compressor, tuple) and compressor[0] == "blosc"
    shuffle = [("shuffle", draw(st.sampled_from([1, 2, 4, 7])))] if not is_blosc and draw(st.booleans()) else []
    if zarr_format == 2:
        return (*shuffle, *([compressor] if compressor else []))
    before = ["crc32c"] if compressor and draw(st.booleans()) else []
    after = ["crc32c"] if draw(st.booleans()) else []
    return (*shuffle, *before, *([compressor] if compressor else []), *after)


@st.composite
def encoded_cases(draw, max_elements=4000):
    """Cases whose chunks are encoded."""
    case = draw(cases(max_elements))
    codecs = draw(chains(case.zarr_format))
    nbytes = math.prod(case.chunks) * np.dtype(case.dtype).itemsize
    # numcodecs shuffles nothing but whole elements.
    return replace(case, codecs=tuple(one for one in codecs if one[0] != "shuffle" or nbytes % one[1] == 0))


def _codec_v2(codec):
    if isinstance(codec, str):
        return {"zstd": numcodecs.Zstd, "lz4": numcodecs.LZ4, "gzip": numcodecs.GZip, "zlib": numcodecs.Zlib}[codec]()
    if codec[0] == "zstd":
        return numcodecs.Zstd(codec[1], checksum=codec[2])
    if codec[0] == "shuffle":
        return numcodecs.Shuffle(codec[1])
    name, shuffle, typesize, block = codec[1]
    return numcodecs.Blosc(name, 5, shuffle, block, typesize=typesize)


def _codec_v3(codec):
    if isinstance(codec, str):
        made = {"zstd": ZstdCodec, "gzip": GzipCodec, "crc32c": Crc32cCodec}
        made |= {"lz4": numcodecs_v3.LZ4, "zlib": numcodecs_v3.Zlib}
        return made[codec]()
    if codec[0] == "zstd":
        return ZstdCodec(level=codec[1], checksum=codec[2])
    if codec[0] == "shuffle":
        return numcodecs_v3.Shuffle(elementsize=codec[1])
    name, shuffle, typesize, block = codec[1]
    kind = ["noshuffle", "shuffle", "bitshuffle"][shuffle]
    return BloscCodec(cname=name, clevel=5, shuffle=kind, typesize=typesize, blocksize=block)


def plain_values(dtype, shape, seed):
    """Values that compress: runs, steps and a little noise, in an order that depends on the seed."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape)
    kinds = [
        lambda: np.repeat(rng.integers(0, 100, size // 9 + 1), 9)[:size],
        lambda: np.cumsum(rng.integers(-2, 3, size)) + 1000,
        lambda: np.resize(rng.integers(0, 2**15, 37), size),
        lambda: np.zeros(size),
        lambda: rng.integers(0, 4, size),
    ]
    return kinds[seed % len(kinds)]().astype(np.uint16).astype(dtype).reshape(shape)


def random_values(dtype, shape, seed):
    """Random bits, with NaN and infinities where the dtype has them."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    nbytes = math.prod(shape) * dtype.itemsize
    return np.frombuffer(rng.bytes(nbytes), dtype).reshape(shape).copy()


def stored(folder, values, chunks=None, **options):
    """Write an array; returns it, open for writing. `options` are those of ``zarr.create_array``."""
    array = zarr.create_array(folder, shape=values.shape, dtype=values.dtype, chunks=chunks or values.shape, **options)
    array[...] = values
    return array


def write(case, folder: Path, values=None) -> zarr.Array:
    """Write a case with random values.

    Every `missing`-th chunk or shard is left out, and of the other shards all but the first rows of inner chunks.
    """
    dtype = np.dtype(case.dtype).newbyteorder(">" if case.big_endian else "<")
    array = _create_v2(case, dtype, folder) if case.zarr_format == 2 else _create_v3(case, folder)
    values = random_values(case.dtype, case.shape, case.seed) if values is None else values
    step = case.shards or case.chunks
    starts = itertools.product(*(range(0, n, s) for n, s in zip(case.shape, step, strict=True)))
    for number, start in enumerate(starts):
        if case.missing and number % case.missing == 1:
            continue
        box = tuple(slice(a, a + s) for a, s in zip(start, step, strict=True))
        if case.missing and case.shards:
            box = (slice(start[0], start[0] + case.chunks[0]), *box[1:])
        array[box] = values[box]
    return zarr.open_array(folder, mode="r")


def _create_v2(case, dtype, folder):
    return zarr.create_array(
        folder,
        shape=case.shape,
        chunks=case.chunks,
        dtype=dtype,
        zarr_format=2,
        order="F" if case.order != tuple(range(len(case.shape))) else "C",
        compressors=[_codec_v2(one) for one in case.codecs if one[0] != "shuffle"] or None,
        filters=[_codec_v2(one) for one in case.codecs if one[0] == "shuffle"] or None,
        fill_value=case.fill,
        chunk_key_encoding={"name": "v2", "separator": case.separator},
        config={"write_empty_chunks": True},
    )


def _create_v3(case, folder):
    inner = [BytesCodec(endian="big" if case.big_endian else "little")]
    if case.order != tuple(range(len(case.shape))):
        inner = [TransposeCodec(order=case.order), *inner]
    inner += [_codec_v3(one) for one in case.codecs]
    if case.shards:
        location = "end" if case.index_at_end else "start"
        inner = [ShardingCodec(chunk_shape=case.chunks, codecs=inner, index_location=location)]
    return zarr.create(
        store=folder,
        shape=case.shape,
        chunks=case.shards or case.chunks,
        dtype=case.dtype,
        zarr_format=3,
        codecs=inner,
        fill_value=case.fill,
        chunk_key_encoding=("v2" if case.v2_keys else "default", case.separator),
        config={"write_empty_chunks": True},
    )


def same(got, expected):
    """Equal bit for bit, apart from the byte order of the dtype."""
    expected = np.asarray(expected)
    expected = np.ascontiguousarray(expected.astype(expected.dtype.newbyteorder("=")))
    got = np.ascontiguousarray(got)
    return got.shape == expected.shape and got.dtype == expected.dtype and got.tobytes() == expected.tobytes()


def same_but_nan(got, stored, target):
    """Equal to NumPy's cast; a NaN may have other bits."""
    expected = np.asarray(stored).astype(target)
    return got.dtype == expected.dtype and np.array_equal(got, expected, equal_nan=target.kind in "fc")


def values_of(path, level=0):
    """Return the voxels of one level of an image."""
    return zarr.open_group(path, mode="r")[str(level)][...]


def levels_of(path):
    """Return the voxels of all levels of an image, finest first."""
    return [values_of(path, level) for level in range(len(list(zarr.open_group(path, mode="r").array_keys())))]
