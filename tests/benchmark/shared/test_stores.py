"""If this fails, the benchmark makes other stores than it says, or does not find arrays that are there."""

import hashlib
import shutil
from dataclasses import replace

import numpy as np
import pytest
import tensorstore
import zarr

from linumpy.benchmark.cases import Mark
from linumpy.benchmark.shared import stores as cases
from linumpy.benchmark.shared.stores import StoreSpec, generate, open_stored
from linumpy.benchmark.suites.reading import SUITES
from linumpy.errors import SourceError
from linumpy.write.writer import write_omezarr

SPEC = StoreSpec("small", (20, 24, 28), (8, 8, 8), "uint16")


def digest(folder):
    found = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        found.update(str(file.relative_to(folder)).encode() + file.read_bytes())
    return found.hexdigest()


def by_tensorstore(path):
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(path)}}
    return np.asarray(tensorstore.open(spec, open=True).result().read().result())


@pytest.mark.parametrize("codec", ["none", "zstd", "blosc"])
@pytest.mark.parametrize("shards", [None, (16, 16, 16)])
def test_a_store_is_what_its_description_says(tmp_path, codec, shards):
    spec = StoreSpec("a", (20, 24, 28), (8, 8, 8), "uint16", shards=shards, codec=codec)
    case = generate(spec, tmp_path)
    data = by_tensorstore(case.path)  # neither written nor read by what the benchmark uses
    assert data.shape == case.shape == spec.shape
    assert data.dtype == case.dtype == np.uint16
    assert (case.chunks, case.shards) == ((8, 8, 8), shards)
    assert case.nbytes == data.nbytes == spec.nbytes
    assert np.count_nonzero(data) > 0.8 * data.size
    assert case.chunk_files == (8 if shards else 3 * 3 * 4)
    assert {"none": "none", "zstd": "zstd", "blosc": "blosc(lz4, shuffle)"}[codec] in case.codecs
    sizes = [file.stat().st_size for file in case.path.rglob("*") if file.is_file() and file.name != "zarr.json"]
    assert case.stored_bytes == sum(sizes)
    assert case.ratio == pytest.approx(data.nbytes / sum(sizes))


def test_a_compressed_store_states_the_ratio_it_reached(tmp_path):
    case = generate(StoreSpec("z", (64, 128, 128), (32, 64, 64), "uint16", codec="zstd"), tmp_path)
    assert case.ratio == pytest.approx(3, rel=0.15)
    assert "OCT-like" in case.data


def test_an_existing_store_is_never_overwritten(tmp_path):
    case = generate(SPEC, tmp_path)
    before = digest(case.path)
    with pytest.raises(FileExistsError, match=case.path.name):
        generate(SPEC, tmp_path, seed=1)
    assert digest(case.path) == before


@pytest.mark.parametrize("kind", ["file", "folder", "dangling link"])
def test_neither_is_anything_else_of_that_name(tmp_path, kind):
    path = tmp_path / SPEC.file_name
    make = {"file": path.touch, "folder": path.mkdir, "dangling link": lambda: path.symlink_to(tmp_path / "nowhere")}
    make[kind]()
    with pytest.raises(FileExistsError, match="not overwritten"):
        generate(SPEC, tmp_path)
    assert path.is_symlink() or path.exists()
    assert list(tmp_path.iterdir()) == [path]


def test_a_store_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    def breaks(*args):
        raise OSError("disk on fire")

    monkeypatch.setattr(cases, "random_voxels", breaks)
    with pytest.raises(OSError, match="disk on fire"):
        generate(SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_writing(tmp_path, monkeypatch):
    full = shutil._ntuple_diskusage(10**9, 10**9, 5)
    monkeypatch.setattr(cases.shutil, "disk_usage", lambda folder: full)
    with pytest.raises(OSError, match=f"{SPEC.nbytes:,} bytes to write at most, 5 bytes free"):
        generate(SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codec": "lzma"}, "'lzma' is unknown"),
        ({"shape": (0, 2, 2)}, "every axis"),
        ({"shape": ()}, "every axis"),
        ({"chunks": (8, 8)}, "needs 3 sizes"),
        ({"chunks": (8, 0, 8)}, "from 1 on"),
        ({"shards": (16, 16, 12)}, "no multiple"),
        ({"dtype": "wool"}, "'wool' is unknown"),
        ({"dtype": "U5"}, "bool, integers"),
    ],
)
def test_a_description_that_makes_no_array_is_refused(change, message):
    wanted = {"name": "x", "shape": (20, 24, 28), "chunks": (8, 8, 8), "dtype": "uint16"}
    with pytest.raises(ValueError, match=message):
        StoreSpec(**{**wanted, **change})


def test_a_region_that_is_not_in_the_array_is_refused():
    with pytest.raises(ValueError, match="does not lie in shape"):
        StoreSpec("x", (8, 8), (4, 4), "uint16", region=((0, 8), (4, 9)))


def test_marks_of_descriptions():
    base = StoreSpec("x", (8,), (4,), "uint16", reach=0.5)
    assert base.mark == Mark(0.5, ("flat",), "× flat")
    assert replace(base, reach_of="rate").mark == Mark(0.5)
    assert replace(base, reach_of="host").mark.of == ("zarr-numpy", "tensorstore", "zarrs")
    assert replace(base, reach_of="whole").mark.of == ("whole/linumpy-auto",)
    assert replace(base, reach=None).mark is None
    names = [spec.name for spec in SUITES["codecs"]]
    (part,) = [spec for spec in SUITES["codecs"] if spec.region]
    assert names.index(part.reach_of) < names.index(part.name)


def test_descriptions_that_differ_have_names_that_differ():
    base = {"name": "x", "shape": (32, 32), "chunks": (8, 8), "dtype": "uint16"}
    others = [{}, {"shape": (32, 33)}, {"chunks": (8, 4)}, {"dtype": "int16"}, {"shards": (16, 16)}, {"codec": "zstd"}]
    assert len({StoreSpec(**{**base, **one}).file_name for one in others}) == len(others)


def test_the_raw_suite_is_the_one_of_the_contract():
    raw = SUITES["raw"]
    assert [spec.reach for spec in raw] == [0.85, 0.4, 0.8, 0.8]
    assert [round(spec.nbytes / 2**30, 1) for spec in raw] == [2.0, 1.0, 1.0, 1.9]
    assert [spec.chunks for spec in raw] == [(128,) * 3, (64,) * 3, (64,) * 3, (256,) * 3]
    assert [spec.dtype for spec in raw] == ["float32", "uint16", "uint16", "float32"]
    assert [spec.shards for spec in raw] == [None, None, (256, 512, 512), None]
    assert any(size % 256 for size in raw[3].shape)


@pytest.mark.parametrize("spec", SUITES["raw"], ids=lambda spec: spec.name)
def test_a_scaled_case_keeps_its_numbers_of_chunks(spec):
    def numbers(one, sizes):
        return [-(-extent // size) for extent, size in zip(one.shape, sizes, strict=True)]

    small = spec.scaled(1 / 16)
    assert small.nbytes < spec.nbytes / 4000
    assert numbers(small, small.chunks) == numbers(spec, spec.chunks)
    if spec.shards:
        assert numbers(small, small.shards) == numbers(spec, spec.shards)
    assert small.reach is None
    assert spec.scaled(1) is spec


def test_an_array_of_the_users_is_described(tmp_path):
    array = zarr.create_array(
        tmp_path / "a.zarr", name="in/side", shape=(9, 9), chunks=(4, 4), dtype=">f4", zarr_format=2
    )
    array[:5] = 1
    case = open_stored(str(tmp_path / "a.zarr/in/side"))
    assert (case.shape, case.chunks, case.zarr_format, case.name) == ((9, 9), (4, 4), 2, "side")
    assert case.dtype == np.dtype("f4")
    assert case.path == tmp_path / "a.zarr/in/side"
    assert case.chunk_files == 6  # the last row of chunks was never written
    assert case.shards is None


@pytest.mark.parametrize("shuffle", ["shuffle", "bitshuffle"])
def test_the_settings_of_blosc_are_named_in_both_formats(tmp_path, shuffle):
    import numcodecs

    number = {"shuffle": 1, "bitshuffle": 2}[shuffle]
    old = zarr.create_array(
        tmp_path / "v2", shape=(8,), chunks=(8,), dtype="u2", zarr_format=2,
        compressors=numcodecs.Blosc("zstd", 1, number), filters=None,
    )  # fmt: skip
    new = zarr.create_array(
        tmp_path / "v3", shape=(8,), chunks=(8,), dtype="u2",
        compressors=zarr.codecs.BloscCodec(cname="zstd", shuffle=shuffle),
    )  # fmt: skip
    assert {open_stored(one.store.root).codecs for one in (old, new)} == {f"blosc(zstd, {shuffle})"}


def test_what_cannot_be_timed_says_why(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        open_stored(tmp_path / "nowhere")
    empty = zarr.create_array(tmp_path / "empty", shape=(0, 3), chunks=(1, 1), dtype="u1")
    with pytest.raises(SourceError, match="nothing to time"):
        open_stored(empty.store.root)
    words = zarr.create_array(tmp_path / "words", shape=(3,), chunks=(3,), dtype="U4", zarr_format=2)
    with pytest.raises(ValueError, match="bool, integers"):
        open_stored(words.store.root)


def test_a_level_is_named_with_its_image(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_omezarr("brain.ome.zarr", np.ones((4, 4), "u2"), (1, 1))
    for source in ("brain.ome.zarr", tmp_path / "brain.ome.zarr"):
        assert open_stored(source).name == "brain.ome.zarr/0"
    assert open_stored("brain.ome.zarr/0").name == "0"
