"""If this fails, encoded chunks are read wrong, or broken ones are not refused (oracle: zarr-python, numcodecs)."""

import itertools
import re
import tempfile
from pathlib import Path

import numcodecs
import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec, ShardingCodec, TransposeCodec, ZstdCodec
from zarr.codecs import numcodecs as numcodecs_v3

from linumpy.errors import ChunkError
from linumpy.gpu.kernels import source_text
from linumpy.io.layout import read_layout
from linumpy.plan.codecs import DecodeChain, UndecodableError, read_array_filter
from linumpy.plan.decode.launches import DeviceLimits, ring_nbytes
from tests.support.budget import matrix, some
from tests.support.gpu import reference
from tests.support.gpu.decoders import BIG, Decoder, kernel
from tests.support.gpu.emulator import needs_compiler
from tests.support.gpu.mutants import CHAINS, corpus, disagreements
from tests.support.other_writers import HOST_ONLY, LEFT_TO_ZARR, TENSORSTORE, old_stores, tensorstore_store
from tests.support.stores import encoded_cases, plain_values, random_values, same, write

inside_a_test = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
values_of = {"random": random_values, "plain": plain_values}


def check(case, kind, **options):
    with tempfile.TemporaryDirectory() as folder:
        array = write(case, Path(folder) / "a", values_of[kind](case.dtype, case.shape, case.seed))
        job = reference.make_job(array, case.region, seed=case.seed, **options)
        assert same(reference.execute(job), array[case.region])
        return job


@pytest.mark.needs_core
@needs_compiler
@inside_a_test
@given(
    case=encoded_cases(),
    kind=st.sampled_from(sorted(values_of)),
    scratch=st.sampled_from(reference.SCRATCHES),
    decode_on=st.sampled_from(["device", "host", None]),
)
def test_same_bytes_as_zarr(case, kind, scratch, decode_on):
    """Locating, reading, decoding, placing."""
    job = check(case, kind, scratch_bytes=scratch, decode_on=decode_on)
    stored = job.report.chunks_read
    if decode_on == "host" and job.layout.chain is not None:
        assert job.report.chunks_decoded_by_host == stored
    # Blosc blocks of 64 bytes are more streams than a slab has memory for.
    tiny_blocks = any(one[0] == "blosc" and one[1][3] == 64 for one in case.codecs)
    if decode_on == "device" and job.layout.chain is not None and kind == "plain" and not tiny_blocks:
        assert job.report.chunks_decoded_by_host == 0, "chunks were left to the host"


@needs_compiler
@pytest.mark.parametrize(("name", "nbytes"), matrix(sorted(CHAINS), [64, 5000, 70000]))
def test_broken_bytes_are_refused_or_decoded_as_numcodecs_does(name, nbytes):
    """The kernels run with undefined behaviour trapped and with a guard around every chunk."""
    refused, wrong = disagreements(Decoder, np.random.default_rng(len(name) * nbytes), name, nbytes, 60)
    assert not wrong, [one[:40].hex() for one in wrong[:3]]
    assert refused > 10


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", sorted(CHAINS))
@pytest.mark.parametrize("seed", range(10))
def test_more_broken_bytes(name, seed):
    rng = np.random.default_rng([seed, len(name)])
    for nbytes in (64, 3000, 20000, 140000):
        _, wrong = disagreements(Decoder, rng, name, nbytes, 200 if nbytes < 10000 else 60)
        assert not wrong, [one[:40].hex() for one in wrong[:3]]


@needs_compiler
@pytest.mark.parametrize(
    ("name", "kib", "ring"),
    some(
        [(name, *sizes) for name in ("zstd", "lz4", "gzip") for sizes in ((26, 8), (64, 32), (99, 64), (227, 128))],
        lambda name, kib, ring: kib == 26 or (name, kib) in [("lz4", 64), ("gzip", 99), ("zstd", 227)],
    ),
)
def test_devices_with_less_shared_memory(name, kib, ring):
    architecture = 750 if (name, kib) == ("lz4", 64) else 900  # `any_of` is another one there
    limits = DeviceLimits(processors=15, shared_nbytes=kib * 1024)

    def load(spec):
        one = kernel(spec, architecture)
        one.seed = kib  # another order of threads for each
        return one

    for chain, encoded, chunks in corpus(name):
        nbytes = len(chunks[0])
        assert ring_nbytes(chain, len(chunks), nbytes, limits) == ring * 1024
        decoder = Decoder(chain, nbytes, limits=limits, load=load)
        decoded, status = decoder.decode(encoded)
        assert not status.any()
        assert decoded == chunks


@needs_compiler
@pytest.mark.parametrize("level", [pytest.param(1, marks=pytest.mark.slow), 19])
def test_frames_of_several_blocks(level):
    """Later blocks take tables, trees and offsets of those before; runs are longer than a tile, and than a ring."""
    rng = np.random.default_rng(level)
    nbytes = 2**18 + 1001  # three blocks of at most 2**17 bytes
    words = [rng.bytes(int(n)) for n in rng.integers(3, 40, 300)]
    chunks = [
        plain_values("u2", (nbytes // 2 + 1,), 5).tobytes(),
        b"".join(words[k] for k in rng.integers(0, 300, nbytes // 10)),
        b"".join(bytes([k]) * n for k, n in rng.integers((0, 1), (256, 9000), (200, 2)).tolist()),
        rng.bytes(2**16) + bytes(2**17) + rng.bytes(2**17),
        rng.binomial(20, 0.3, nbytes).astype("u1").tobytes(),
    ]
    chunks = [(one * (nbytes // len(one) + 1))[:nbytes] for one in chunks]
    for limits in (SMALLEST, BIG):
        decoder = Decoder(DecodeChain("zstd"), nbytes, limits=limits)
        decoded, status = decoder.decode([numcodecs.Zstd(level).encode(one) for one in chunks], skew=level % 4)
        assert not status.any()
        assert decoded == chunks


#: Rings so short that long matches, and many batches, are copied one sequence after another.
SMALLEST = DeviceLimits(processors=4, shared_nbytes=26 * 1024)
#: Barriers, by the line that begins the function around them and their number in it.
BARRIERS = {
    "team": ("zstd_execute", "inline void flush(", 0),
    "links": ("inflate", "inline void follow_links(", 0),
    "literals": ("inflate", "bool put_literals(", 0),
    "known bytes": ("zstd_execute", "inline bool execute_sequences(", 0),
    "sums": ("zstd_execute", "inline u64 team_sum(", 0),
    "known cells": ("zstd_cells", "inline bool write_cells(", 0),
    "sums of cells": ("zstd_cells", "inline u64 team_sum(", 0),
    "staged": ("zstd", "inline void stage(", 0),
    "placed": ("zstd", "inline void build_cells(", 0),
    "spread": ("zstd", "inline void build_cells(", 1),
    "numbered": ("zstd", "inline void build_cells(", 2),
    "next numbers": ("zstd", "inline void build_cells(", 3),
    "described": ("zstd", "inline u32 make_tables(", 2),
    "window": ("zstd", "inline void fill(", 0),
    "literal window": ("zstd", "inline bool decode_streams(", 0),
    "window in use": ("zstd", "inline bool decode_streams(", 1),
    "tables": ("zstd", "    zstd_entropy(", 0),
    "next tables": ("zstd", "    zstd_entropy(", 1),
    "found": ("zstd", "inline int walk_sequences(", 0),
    "next found": ("zstd", "inline int unpack_sequences(", 0),
    "counted weights": ("zstd", "inline bool read_weights(", 0),
    "weights": ("zstd", "inline int entropy_literals(", 0),
    "last weight": ("zstd", "inline bool build_huffman(", 0),
    "codes": ("zstd", "inline bool build_huffman(", 1),
    "batch": ("lz4", "inline void read_batch(", 0),
    "next stream": ("lz4", "    lz4(", 0),
    "inflated batch": ("inflate", "    inflate(", 0),
    "next inflated stream": ("inflate", "    inflate(", 2),
    "row": ("blosc", "    unshuffle(", 0),
    "next row": ("blosc", "    unshuffle(", 1),
    "crc table": ("checksum", "inline u32 crc_of(", 0),
    "crc rows": ("checksum", "inline u32 crc_of(", 1),
    "crc": ("checksum", "inline u32 crc_of(", 2),
    "next crc": ("checksum", "    check_crc32c(", 0),
    "adler": ("checksum", "inline u32 adler_of(", 0),
    "adler sums": ("checksum", "inline u32 adler_of(", 1),
    "xxh": ("checksum", "inline u32 xxh_of(", 0),
}
SHOWN_BY = {
    "zstd": ["zstd"],
    "zstd_execute": ["zstd"],
    "zstd_cells": ["zstd"],
    "lz4": ["lz4"],
    "inflate": ["gzip"],
    "blosc": ["blosc-lz4-1-0"],
    "checksum": ["zstd-checksum", "zlib", "crc32c-of-zstd"],
}
IN_SHORT = {"known bytes", "next stream"}


@needs_compiler
@pytest.mark.parametrize("name", [n if n in IN_SHORT else pytest.param(n, marks=pytest.mark.slow) for n in BARRIERS])
def test_a_barrier_that_is_missing_is_noticed(name):
    source, function, number = BARRIERS[name]
    text = source_text(source, "linumpy.gpu.codecs.cuda")
    begin = text.index(function)
    found = next(itertools.islice(re.finditer(r"\bsync_(warp|team|block|pair)\(\);", text[begin:]), number, None))
    changed = text[: begin + found.start()] + ";" + text[begin + found.end() :]

    def load(spec):
        return kernel(spec, text=changed if spec.source == source else None)

    def decode_all():
        group = 2**15 if source == "zstd_cells" else 0
        for limits, one in itertools.product((SMALLEST, BIG), SHOWN_BY[source]):
            for chain, encoded, chunks in corpus(one):
                Decoder(chain, len(chunks[0]), limits=limits, load=load, group_nbytes=group).decode(encoded * 2)

    with pytest.raises(AssertionError, match=r"race|nobody wrote"):
        decode_all()


@pytest.mark.needs_core
@needs_compiler
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_stores_that_zarr_2_18_wrote(tmp_path, decode_on):
    seen = 0
    for name, folder, expected in old_stores(tmp_path):
        assert np.array_equal(zarr.open_array(folder, mode="r")[...], expected)
        if name in LEFT_TO_ZARR:
            assert LEFT_TO_ZARR[name] in read_layout(zarr.open_array(folder, mode="r")).unsupported
            continue
        job = reference.make_job(folder, decode_on=decode_on)
        assert same(reference.execute(job), expected), name
        assert (job.report.chunks_decoded_by_host > 0) == (decode_on == "host" and name not in HOST_ONLY), name
        seen += 1
    assert seen == 13


@pytest.mark.needs_core
@needs_compiler
@pytest.mark.parametrize(
    "name",
    some(sorted(TENSORSTORE), lambda name: name in ("zarr2-default", "zarr2-zlib", "zarr3-gzip", "zarr3-sharded")),
)
def test_stores_that_tensorstore_wrote(tmp_path, name):
    expected = tensorstore_store(name, tmp_path / "a")
    for region in ((), (slice(3, 18), -4, slice(7, 40))):
        job = reference.make_job(tmp_path / "a", region, decode_on="device")
        assert same(reference.execute(job), expected[region])
        assert job.report.chunks_decoded_by_host == 0


def written(folder, **options):
    options = {"shape": (40, 48), "chunks": (8, 16), "dtype": "u2", "compressors": zarr.codecs.ZstdCodec()} | options
    array = zarr.create_array(folder, **options)
    array[...] = plain_values("u2", options["shape"], 0)
    return array


@pytest.mark.needs_core
@needs_compiler
@pytest.mark.parametrize("decode_on", ["device", "host"])
@pytest.mark.parametrize(("cname", "shuffle"), [("lz4", 1), ("zstd", 2), ("zlib", 0)])
def test_frames_of_blosc_may_have_other_compressors_than_the_metadata(tmp_path, cname, shuffle, decode_on):
    """The header of a frame says which; the device leaves such frames to the host."""
    names = ["blosclz", "lz4", "zlib", "zstd"]
    values = np.add.outer(100 * np.arange(8), np.arange(3000) // 7).astype("u2")
    chunks, options = (1, 3000), {"zarr_format": 2, "compressors": numcodecs.Blosc(cname, 5, shuffle)}
    array = zarr.create_array(tmp_path / "a", shape=values.shape, chunks=chunks, dtype="u2", **options)
    array[...] = values
    for row, name in enumerate(names * 2):
        stored = numcodecs.Blosc(name, 9, row // 4, blocksize=4096 * (row // 4)).encode(values[row])
        assert not stored[2] & 2, "stored without compression"
        (tmp_path / f"a/{row}.0").write_bytes(stored)
    assert same(array[...], values)
    job = reference.make_job(array, decode_on=decode_on)
    assert same(reference.execute(job), values)
    assert job.report.chunks_decoded_by_host == (6 if decode_on == "device" else 8)


@needs_compiler
def test_a_zstd_block_whose_number_of_sequences_is_0_in_two_bytes():
    """As in zstd's golden file ``zeroSeq_2B.zst``; libzstd decodes it from 1.5.6 on."""
    literals = bytes(range(24))
    for count in (b"\0", b"\x80\0"):
        block = bytes([len(literals) << 3]) + literals + count
        frame = bytes.fromhex("28b52ffd20") + bytes([len(literals)])
        frame += (1 | 2 << 1 | len(block) << 3).to_bytes(3, "little") + block
        decoded, status = Decoder(DecodeChain("zstd"), len(literals)).decode([frame])
        assert (decoded, status.tolist()) == ([literals], [0])


@pytest.mark.needs_core
@needs_compiler
@pytest.mark.parametrize("decode_on", ["device", "host"])
def test_a_broken_chunk_is_named(tmp_path, decode_on):
    array = written(tmp_path / "a")
    file = tmp_path / "a/c/3/1"
    whole = file.read_bytes()
    expected = array[...]
    for broken in (b"", whole[:7], whole[:-3], b"\0" * len(whole), numcodecs.Zstd().encode(b"too short")):
        file.write_bytes(broken)
        with pytest.raises(ChunkError, match=r"chunk \(3, 1\) of .*c/3/1.*zstd"):
            reference.execute(reference.make_job(array, decode_on=decode_on))
    file.write_bytes(whole)
    assert same(reference.execute(reference.make_job(array, decode_on=decode_on)), expected)


@pytest.mark.needs_core
@needs_compiler
def test_a_broken_inner_chunk_is_named_with_its_bytes(tmp_path):
    array = written(tmp_path / "a", shards=(16, 32))
    file = tmp_path / "a/c/1/0"
    data = bytearray(file.read_bytes())
    data[:4] = b"nope"
    file.write_bytes(data)
    with pytest.raises(ChunkError, match=r"chunk \(\d, \d\) of .*c/1/0, bytes 0 to \d+ cannot be decoded \(zstd\)"):
        reference.execute(reference.make_job(array, decode_on="device"))


@pytest.mark.needs_core
@needs_compiler
def test_what_a_slab_cannot_hold_goes_to_the_host(tmp_path):
    """A frame may be longer than its chunk: empty blocks, or skippable ones, of any number."""
    array = written(tmp_path / "a", shape=(64, 64), chunks=(16, 64))
    file = tmp_path / "a/c/2/0"
    data = numcodecs.Zstd().decode(file.read_bytes())
    file.write_bytes(b"".join(numcodecs.Zstd().encode(data[k : k + 1]) for k in range(len(data))))
    job = reference.make_job(array, decode_on="device")
    assert same(reference.execute(job), array[...])
    assert job.report.chunks_decoded_by_host == 1
    # It was never staged for the device: the host alone has read its bytes.
    others = sum((tmp_path / f"a/c/{k}/0").stat().st_size for k in (0, 1, 3))
    assert job.stats.bytes_read == others + file.stat().st_size


@pytest.mark.needs_core
@needs_compiler
def test_ranges_with_small_gaps_are_read_together(tmp_path):
    array = written(tmp_path / "a", shape=(64, 64, 64), chunks=(8, 8, 8), shards=(64, 64, 64))
    region = (slice(None), slice(0, 8), slice(0, 8))
    job = reference.make_job(array, region, decode_on="device")
    assert same(reference.execute(job), array[region])
    assert job.report.files_opened <= 8  # for the index and data together
    assert job.report.bytes_read < (tmp_path / "a/c/0/0/0").stat().st_size


FILTERS = {
    "delta": (numcodecs.Delta("<i4"), "<i4"),
    "delta-narrower": (numcodecs.Delta("<i4", astype="<i2"), "<i4"),
    "delta-big-endian": (numcodecs.Delta(">i2"), ">i2"),
    "fixedscaleoffset": (numcodecs.FixedScaleOffset(offset=500, scale=10, dtype="<f8", astype="<i4"), "<f8"),
}


@pytest.mark.needs_core
@pytest.mark.parametrize("name", sorted(FILTERS))
@pytest.mark.parametrize("compressor", [numcodecs.Zstd(3), numcodecs.Blosc("lz4")], ids=["zstd", "blosc"])
def test_filters_that_the_host_undoes(tmp_path, name, compressor):
    made, dtype = FILTERS[name]
    options = {"zarr_format": 2, "filters": [made], "compressors": [compressor], "fill_value": 0}
    array = zarr.create_array(tmp_path / "a", shape=(23, 40), chunks=(8, 16), dtype=dtype, **options)
    array[...] = np.random.default_rng(1).integers(0, 900, array.shape)
    job = reference.make_job(tmp_path / "a", (slice(3, 20), slice(5, None)))
    assert same(reference.execute(job), array[3:20, 5:])
    assert "zarr-python into host memory" in job.report.engine
    file = tmp_path / "a/1.1"
    file.write_bytes(compressor.encode(numcodecs.Zstd().encode(b"odd")[:7]))
    with pytest.raises(ChunkError, match=r"/a/1\.1 cannot be read"):
        reference.execute(reference.make_job(tmp_path / "a"))


@pytest.mark.needs_core
@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("behind", ["none", "zstd", "blosc"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_rounded_bits_are_read_as_they_are_stored(tmp_path, zarr_format, behind):
    rounded = numcodecs.BitRound(7) if zarr_format == 2 else numcodecs_v3.BitRound(keepbits=7)
    compressors = {
        2: {"none": None, "zstd": [numcodecs.Zstd()], "blosc": [numcodecs.Blosc()]},
        3: {"none": None, "zstd": [ZstdCodec()], "blosc": [numcodecs_v3.Blosc()]},
    }[zarr_format][behind]
    options = {"zarr_format": zarr_format, "filters": [rounded], "compressors": compressors, "fill_value": 1.5}
    array = zarr.create_array(tmp_path / "a", shape=(23, 40), chunks=(8, 16), dtype="<f4", **options)
    array[:, :30] = np.random.default_rng(1).random((23, 30))
    job = reference.make_job(tmp_path / "a", (slice(3, 20), slice(5, None)))
    assert same(reference.execute(job), array[3:20, 5:])
    assert "zarr-python" not in job.report.engine


def with_filter(folder, dtype, chain, *, sharded=False):
    """An array of zarr v3 whose first codecs are filters of numcodecs."""
    chain = [ShardingCodec(chunk_shape=(8, 16), codecs=chain)] if sharded else chain
    options = {"codecs": chain, "chunks": (16, 32) if sharded else (8, 16), "zarr_format": 3, "fill_value": 3}
    array = zarr.create(store=folder, shape=(23, 40), dtype=dtype, **options)
    array[:, :30] = np.random.default_rng(1).integers(0, 100, (23, 30)).astype(dtype)  # the last chunks are missing
    return zarr.open_array(folder, mode="r")


def delta(**settings):
    return numcodecs_v3.Delta(**settings)


def scale(offset=20, scale=0.5, **settings):
    return numcodecs_v3.FixedScaleOffset(offset=offset, scale=scale, **settings)


NUMBERS = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8"]
BEHIND = {
    "zstd": [BytesCodec(), ZstdCodec()],
    "blosc": [BytesCodec(), numcodecs_v3.Blosc(cname="lz4")],
    "zlib": [BytesCodec(), numcodecs_v3.Zlib()],
    "checksums": [BytesCodec(), Crc32cCodec(), ZstdCodec(), Crc32cCodec()],
}


def check_filter(array):
    for region in ((), (slice(3, 20), slice(5, None)), (-1, slice(2, 9))):
        job = reference.make_job(array, region)
        assert same(reference.execute(job), array[region])
        assert "zarr-python into host memory" in job.report.engine


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("dtype", "stored"),
    some(itertools.product(NUMBERS, [None, *NUMBERS]), lambda dtype, stored: stored is None or dtype == "i2"),
)
def test_filters_of_zarr_v3_over_dtypes(tmp_path, dtype, stored):
    """Also where differences do not fit their dtype: what comes of that is numcodecs' own."""
    settings = {"dtype": f"<{dtype}"} | ({} if stored is None else {"astype": f"<{stored}"})
    for number, made in enumerate((delta(**settings), scale(**settings))):
        array = with_filter(tmp_path / str(number), dtype, [made, *BEHIND["zstd"]])
        if stored and np.dtype(stored).itemsize > 1 and array.metadata.codecs[1].endian is None:
            # zarr 3.1 forgets the byte order of arrays of bytes, though a filter makes something else of them.
            assert "does not name its byte order" in read_layout(array).unsupported
            with pytest.raises(ValueError, match="endian"):
                array[...]
        else:
            check_filter(array)


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize(
    ("behind", "made", "sharded"),
    matrix(
        sorted(BEHIND), [delta(dtype="<i4", astype="<i2"), scale(dtype="<i4", astype="<f4"), scale()], [False, True]
    ),
)
def test_filters_of_zarr_v3_before_codecs(tmp_path, made, sharded, behind):
    check_filter(with_filter(tmp_path / "a", "i4", [made, *BEHIND[behind]], sharded=sharded))
    chain = [TransposeCodec(order=(1, 0)), made, *BEHIND[behind]]
    check_filter(with_filter(tmp_path / "b", "i4", chain, sharded=sharded))


# zarr reads these otherwise than numcodecs would read their bytes, or they have no compressor, or two filters.
LEFT = {
    "big-endian": ("i4", [delta(dtype="<i4"), BytesCodec(endian="big"), ZstdCodec()], "big-endian"),
    "stored-big-endian": ("i4", [delta(dtype="<i4", astype=">i2"), *BEHIND["zstd"]], "big-endian"),
    "other-dtype": ("f4", [delta(dtype="<i4"), *BEHIND["zstd"]], "from int32 to int32, in an array of float32"),
    "raw": ("i4", [delta(dtype="<i4"), BytesCodec()], "without a compressor"),
    "two": ("i4", [delta(dtype="<i4"), scale(), *BEHIND["zstd"]], "not decoded"),
    "shuffle": ("i4", [scale(), BytesCodec(), numcodecs_v3.Shuffle(elementsize=4), ZstdCodec()], "'numcodecs.shuffle'"),
    "quantize": ("f4", [numcodecs_v3.Quantize(digits=2, dtype="<f4"), *BEHIND["zstd"]], "'numcodecs.quantize'"),
}


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
@pytest.mark.parametrize("name", sorted(LEFT))
def test_filters_of_zarr_v3_that_are_left_to_zarr(tmp_path, name):
    dtype, chain, reason = LEFT[name]
    assert reason in read_layout(with_filter(tmp_path / "a", dtype, chain)).unsupported


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        ({"name": "numcodecs.delta"}, "filter 'delta' from None to None"),
        ({"name": "numcodecs.delta", "configuration": {"dtype": None}}, "filter 'delta' from None to None"),
        ({"name": "numcodecs.delta", "configuration": {"dtype": "nonsense"}}, "from 'nonsense' to 'nonsense'"),
        ({"name": "numcodecs.delta", "configuration": {"dtype": "<i4", "astype": "<M8[s]"}}, "datetime64"),
        ({"name": "numcodecs.delta", "configuration": {"dtype": "<i4"}}, "does not name its byte order"),
    ],
)
def test_settings_that_make_no_filter(made, reason):
    with pytest.raises(UndecodableError, match=reason):
        read_array_filter(made, np.dtype("i4"), None if "order" in reason else "little")


@pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")
def test_a_broken_chunk_behind_a_filter_of_zarr_v3_is_named(tmp_path):
    array = with_filter(tmp_path / "a", "i4", [delta(dtype="<i4", astype="<i2"), *BEHIND["zstd"]])
    (tmp_path / "a/c/1/1").write_bytes(numcodecs.Zstd().encode(b"odd"))
    with pytest.raises(ChunkError, match=r"/a/c/1/1 cannot be read"):
        reference.execute(reference.make_job(array))
