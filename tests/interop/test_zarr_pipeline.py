"""If this fails, `linumpy.accelerate()` changes values, dtypes or errors of zarr-python's arrays."""

import pickle
import threading
from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from zarr.codecs import BloscCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.codec_pipeline import BatchedCodecPipeline

import linumpy
from linumpy.errors import ChunkError
from linumpy.gpu.read.reader import Reader
from linumpy.interop.zarr_pipeline import LinumpyCodecPipeline
from tests.support.budget import examples
from tests.support.stores import encoded_cases, write

pytestmark = pytest.mark.needs_core

PATH = "codec_pipeline.path"


@contextmanager
def counted():
    """Count how many reads the core and zarr's own pipeline do."""
    counts = {"core": 0, "zarr": 0}

    def counting(name, function):
        def call(*args, **options):
            counts[name] += 1
            return function(*args, **options)

        return call

    with (
        patch.object(Reader, "submit", counting("core", Reader.submit)),
        patch.object(Reader, "submit_many", counting("core", Reader.submit_many)),
        patch.object(BatchedCodecPipeline, "read", counting("zarr", BatchedCodecPipeline.read)),
    ):
        yield counts


def outcome(function):
    """The values, or the error, of a call."""
    try:
        return function()
    except Exception as error:
        return error


def assert_same(mine, own):
    if isinstance(own, Exception):
        assert (type(mine), str(mine)) == (type(own), str(own))
        return
    assert (type(mine), mine.dtype, mine.shape) == (type(own), own.dtype, own.shape)
    if isinstance(own, np.ndarray):
        assert mine.flags.f_contiguous == own.flags.f_contiguous
    assert mine.tobytes() == own.tobytes()


@st.composite
def selections(draw, shape):
    """A method of zarr.Array, and what it selects."""
    rank = len(shape)

    def bounds(n):
        return st.builds(slice, st.none() | st.integers(-n, n), st.none() | st.integers(-n, n))

    def steps(n):
        return st.builds(slice, st.integers(0, n), st.none() | st.integers(0, n), st.integers(1, n + 1))

    def one(n):
        return st.integers(-n, n - 1)

    def indices(n):
        return st.lists(one(n), min_size=1, max_size=6).map(np.array)

    def flags(n):
        return st.lists(st.booleans(), min_size=n, max_size=n).map(lambda flags: np.array(flags, bool))

    kind = draw(st.sampled_from(["basic", "steps", "orthogonal", "points", "mask", "block"]))
    if kind == "basic":
        return "get_basic_selection", tuple(draw(bounds(n) | one(n)) for n in shape)
    if kind == "steps":
        return "get_basic_selection", tuple(draw(bounds(n) | one(n) | steps(n)) for n in shape)
    if kind == "orthogonal":
        return "get_orthogonal_selection", tuple(draw(bounds(n) | one(n) | indices(n) | flags(n)) for n in shape)
    if kind == "points":
        count = draw(st.integers(1, 6))
        points = tuple(np.array([draw(one(n)) for _ in range(count)]) for n in shape)
        return "get_coordinate_selection", points
    if kind == "mask":
        seed = draw(st.integers(0, 2**32 - 1))
        return "get_mask_selection", np.random.default_rng(seed).random(shape) < draw(st.sampled_from([0.02, 0.5, 1]))
    return "get_block_selection", draw(st.integers(0, 1)) if rank == 1 else (0, slice(None))


@settings(max_examples=examples(160), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), case=encoded_cases(1000), order=st.sampled_from("CF"))
def test_any_selection_is_that_of_zarr(tmp_path_factory, data, case, order):
    folder = tmp_path_factory.mktemp("case") / "array"
    write(case, folder)
    own = zarr.open_array(folder, mode="r", config={"order": order})
    with linumpy.accelerate():
        mine = zarr.open_array(folder, mode="r", config={"order": order})
        for _ in range(3):
            method, selection = data.draw(selections(case.shape))
            with counted() as counts:
                found = outcome(lambda: getattr(mine, method)(selection))  # noqa: B023
            assert_same(found, outcome(lambda: getattr(own, method)(selection)))  # noqa: B023
            if case.shards is None or method == "get_block_selection":
                assert counts["zarr"] == 0


def test_a_selection_is_one_job_of_the_core(tmp_path):
    values = np.arange(20 * 30 * 40, dtype="u2").reshape(20, 30, 40)
    for name, options in {"a": {}, "b": {"shards": (16, 16, 16)}, "c": {"zarr_format": 2, "order": "F"}}.items():
        path = tmp_path / "group/0" / name
        zarr.create_array(path, shape=values.shape, chunks=(8, 8, 8), dtype="u2", **options)[...] = values
        with linumpy.accelerate(), counted() as counts:
            array = zarr.open_array(tmp_path, path=f"group/0/{name}", mode="r")
            np.testing.assert_array_equal(array[3:17, 5, 7:40], values[3:17, 5, 7:40])
            assert counts == {"core": 1, "zarr": 0}


def test_a_relative_store_is_found_from_the_working_directory_of_each_read(tmp_path, monkeypatch):
    for name, value in (("a", 1), ("b", 2)):
        zarr.create_array(tmp_path / name / "x", shape=4, chunks=2, dtype="u1")[...] = value
    monkeypatch.chdir(tmp_path / "a")
    with linumpy.accelerate(), counted() as counts:
        array = zarr.open_array("x", mode="r")
        np.testing.assert_array_equal(array[...], 1)
        monkeypatch.chdir(tmp_path / "b")
        np.testing.assert_array_equal(array[...], 2)
        assert counts == {"core": 2, "zarr": 0}


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "array"
    values = np.arange(20 * 30, dtype="u2").reshape(20, 30)
    zarr.create_array(path, shape=(20, 30), chunks=(8, 8), dtype="u2", compressors=ZstdCodec())[...] = values
    return path, values


def test_what_the_core_does_not_read_is_read_by_zarr(tmp_path, image):
    path, values = image
    in_memory, fields = {}, tmp_path / "fields"
    structured = np.zeros(6, [("a", "u2"), ("b", "f4")])
    structured["a"] = range(6)
    cases = {
        "memory": (in_memory, np.arange(6)),
        "strings": (tmp_path / "strings", np.array(["a", "bc", ""], dtype=np.dtypes.StringDType())),
        "dates": (tmp_path / "dates", np.arange(6).astype("M8[s]")),
        "fields": (fields, structured),
    }
    for name, (store, stored) in cases.items():
        with linumpy.accelerate(), counted() as counts:
            options = {"zarr_format": 2} if name == "fields" else {}
            array = zarr.create_array(store, name=name, shape=stored.shape, chunks=(2,), dtype=stored.dtype, **options)
            array[...] = stored
            np.testing.assert_array_equal(zarr.open_array(store, path=name, mode="r")[...], stored)
            assert counts["core"] == 0
            assert counts["zarr"] > 0
    with linumpy.accelerate(), counted() as counts:
        np.testing.assert_array_equal(zarr.create_array({}, shape=(), dtype="f4", fill_value=3)[...], 3)
        array = zarr.open_array(path, mode="r")
        out = default_buffer_prototype().nd_buffer.from_numpy_array(np.zeros((20, 30), "f8"))
        array.get_basic_selection(out=out)  # zarr casts
        np.testing.assert_array_equal(out.as_numpy_array(), values)
        assert counts["core"] == 0
        out = default_buffer_prototype().nd_buffer.from_numpy_array(np.zeros((40, 30), "u2")[::2])
        array.get_basic_selection(out=out)
        np.testing.assert_array_equal(out.as_numpy_array(), values)
        assert counts["core"] == 1


def test_errors_are_those_of_zarr_and_name_the_chunk(image):
    path, _ = image
    own = zarr.open_array(path, mode="r")
    with linumpy.accelerate():
        mine = zarr.open_array(path, mode="r")
        (path / "c/0/1").unlink()  # missing: the fill value
        assert_same(mine[...], own[...])
        for faulty in (b"", b"nothing", (path / "c/1/1").read_bytes()[:-3]):
            (path / "c/1/1").write_bytes(faulty)
            error, expected = outcome(lambda: mine[...]), outcome(lambda: own[...])
            assert isinstance(expected, Exception)
            assert_same(error, expected)
            assert any("c/1/1" in note for note in error.__notes__)
            assert_same(mine[:8], own[:8])
        assert_same(outcome(lambda: mine[30:, 50]), outcome(lambda: own[30:, 50]))
        strict = zarr.config.get("array.read_missing_chunks", None)
        if strict is not None:
            with zarr.config.set({"array.read_missing_chunks": False}):
                error = outcome(lambda: zarr.open_array(path, mode="r")[:8])
            assert type(error).__name__ == "ChunkNotFoundError"


def test_a_fault_that_zarr_does_not_notice_is_an_error(tmp_path):
    """numcodecs compares the size of a Blosc chunk with no header: of one that was cut off it returns other memory."""
    path = tmp_path / "a"
    array = zarr.create_array(path, shape=(32, 32), chunks=(16, 16), dtype="u2", compressors=BloscCodec(cname="lz4"))
    array[...] = np.random.default_rng(0).integers(0, 2**16, array.shape)  # stored as they are
    chunk = path / "c/1/0"
    whole = chunk.read_bytes()
    chunk.write_bytes(whole[:-20])
    assert not isinstance(outcome(lambda: zarr.open_array(path, mode="r")[...]), Exception)
    with linumpy.accelerate():
        mine = zarr.open_array(path, mode="r")
        with pytest.raises(ChunkError, match=r"c/1/0 cannot be decoded"):
            mine[...]
        assert_same(mine[:16], array[:16])
        chunk.write_bytes(whole)
        assert_same(mine[...], array[...])


def test_an_array_is_written_and_resized_as_before(tmp_path, image):
    path, _ = image
    twin = tmp_path / "twin"
    own = zarr.create_array(twin, shape=(20, 30), chunks=(8, 8), dtype="u2", compressors=ZstdCodec())
    own[...] = zarr.open_array(path, mode="r")[...]
    with linumpy.accelerate():
        mine = zarr.open_array(path, mode="r+")
        for array in (mine, own):
            array[3:11, 5] = 7  # cuts chunks
            array.set_mask_selection(np.arange(600).reshape(20, 30) % 7 == 0, 1)
            array.resize((29, 33))
            array[21:, 31:] = 9
        assert_same(mine[...], own[...])
        assert_same(mine.oindex[[0, 28], :], own.oindex[[0, 28], :])
        for array in (mine, own):
            array.resize((10, 10))
            array.append(np.full((9, 10), 3, "u2"))
        assert_same(mine[...], own[...])
    files = sorted(file.relative_to(path) for file in path.rglob("*") if file.is_file())
    assert files == sorted(file.relative_to(twin) for file in twin.rglob("*") if file.is_file())
    assert all((path / file).read_bytes() == (twin / file).read_bytes() for file in files)


def test_it_ends_with_its_block_and_can_be_undone(image):
    path, values = image
    before = zarr.config.get(PATH)
    with linumpy.accelerate():
        array = zarr.open_array(path, mode="r")
    assert zarr.config.get(PATH) == before
    with counted() as counts:
        np.testing.assert_array_equal(array[...], values)
    assert counts == {"core": 0, "zarr": 1}
    outer = linumpy.accelerate()
    with linumpy.accelerate() as inner:
        outer.undo()
        outer.undo()
        with counted() as counts:
            np.testing.assert_array_equal(array[...], values)
        assert counts == {"core": 1, "zarr": 0}
        inner.undo()
        assert zarr.config.get(PATH) == before
    with linumpy.accelerate(), zarr.config.set({PATH: before}):
        assert not isinstance(zarr.open_array(path, mode="r").async_array.codec_pipeline, LinumpyCodecPipeline)
    assert zarr.config.get(PATH) == before
    with linumpy.accelerate():
        zarr.config.set({PATH: before})  # another one's choice stays
    assert zarr.config.get(PATH) == before


@pytest.mark.parametrize("outer_ends", ["in the block", "after the block", "before the inner one"])
def test_a_pipeline_that_a_block_configures_ends_with_the_block(image, outer_ends):
    """The pipeline that an inner acceleration replaces is not configured for the process after the outer one."""
    path, values = image
    before, other = zarr.config.get(PATH), f"{__name__}.OtherPipeline"
    zarr.registry.register_pipeline(OtherPipeline)
    outer = linumpy.accelerate()
    with zarr.config.set({PATH: other}):
        inner = linumpy.accelerate()
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[...], values)
        if outer_ends != "before the inner one":
            inner.undo()
            assert zarr.config.get(PATH) == other
            assert isinstance(zarr.open_array(path, mode="r").async_array.codec_pipeline, OtherPipeline)
        if outer_ends == "in the block":
            outer.undo()
            assert zarr.config.get(PATH) == other
    if outer_ends != "in the block":  # which else leaves what the block found
        outer.undo()
        inner.undo()
        assert zarr.config.get(PATH) == before
    zarr.config.set({PATH: before})


class OtherPipeline(BatchedCodecPipeline):
    pass


def test_threads_switch_it_on_and_off_and_read_at_the_same_time(image):
    path, values = image
    before, errors = zarr.config.get(PATH), []

    def work(seed):
        try:
            for number in range(15):
                with linumpy.accelerate():
                    array = zarr.open_array(path, mode="r")
                    assert isinstance(array.async_array.codec_pipeline, LinumpyCodecPipeline)
                    start = (seed + number) % 20
                    np.testing.assert_array_equal(array[start:, :11], values[start:, :11])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert zarr.config.get(PATH) == before


def test_arrays_can_be_pickled(image):
    path, values = image
    with linumpy.accelerate():
        array = zarr.open_array(path, mode="r")
        np.testing.assert_array_equal(array[1:3], values[1:3])
        copy = pickle.loads(pickle.dumps(array))
        assert copy == array
        with counted() as counts:
            np.testing.assert_array_equal(copy[...], values)
        assert counts["core"] == 1
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(array))[...], values)
    assert isinstance(array.async_array.codec_pipeline.fallback, BatchedCodecPipeline)


def test_without_the_core_it_says_that_nothing_changes(image, monkeypatch, caplog):
    path, values = image
    monkeypatch.setenv("LINUMPY_CORE", "0")
    with linumpy.accelerate(), counted() as counts:
        np.testing.assert_array_equal(zarr.open_array(path, mode="r")[...], values)
        assert counts["core"] == 0
    assert "no native core" in caplog.text
