"""If this fails, metadata of arrays are opened too often, or are old."""

import json
import shutil
import threading
import time
import warnings

import numpy as np
import pytest
import zarr

from linumpy import stream
from linumpy.stream.reading import arrays
from linumpy.write.writer import write_omezarr
from tests.support.stream_arrays import make_array

BOX = ((0, 4), (0, 4))


@pytest.fixture
def paths(tmp_path):
    return [make_array(tmp_path / str(k), np.full((4, 4), k, "u1")) for k in range(8)]


@pytest.fixture
def opened(monkeypatch):
    """Paths in the order in which they are opened; those that are held wait."""
    state = {"paths": [], "held": set(), "go": threading.Event(), "changed": threading.Condition()}
    original = arrays.open_info

    def open_info(key, config):
        with state["changed"]:
            state["paths"].append(key.uri)
            state["changed"].notify_all()
        if key.uri in state["held"]:
            assert state["go"].wait(30)
        return original(key, config)

    monkeypatch.setattr(arrays, "open_info", open_info)
    yield state
    state["go"].set()


def test_arrays_of_all_batches_of_the_lookahead_are_opened_at_the_same_time(paths, pipeline, opened):
    """Though nothing of the first batch is known yet."""
    opened["held"] = set(paths[:6])
    p = pipeline(batch_size=2, lookahead_batches=3, n_io_threads=6)
    p.push(stream.Sample(path, BOX) for path in paths)
    with opened["changed"]:
        assert opened["changed"].wait_for(lambda: len(opened["paths"]) == 6, timeout=30)
        assert set(opened["paths"]) == set(paths[:6])  # and no more than the lookahead
    opened["go"].set()
    found = [int(crop[0, 0]) for batch in p.batches() for crop in batch.numpy()]
    assert found == list(range(8))


def test_no_more_arrays_are_opened_at_a_time_than_threads_are_asked_for(paths, pipeline, opened):
    opened["held"] = set(paths)
    p = pipeline(batch_size=4, n_io_threads=2)
    p.push(stream.Sample(path, BOX) for path in paths)
    with opened["changed"]:
        assert opened["changed"].wait_for(lambda: len(opened["paths"]) == 2, timeout=30)
        assert not opened["changed"].wait_for(lambda: len(opened["paths"]) > 2, timeout=0.2)
    opened["go"].set()
    assert sum(len(batch) for batch in p.batches()) == 8


def test_the_cache_keeps_the_last_arrays_and_counts(paths, pipeline, opened):
    order = [0, 1, 2, 0, 1, 3, 0, 2, 2, 4]  # with 3 kept: the use of an array keeps it longer than others
    misses = [0, 1, 2, 3, 2, 4]
    p = pipeline(batch_size=1, n_zarrs_meta_cache=3)
    p.push(stream.Sample(paths[k], BOX) for k in order)
    assert [int(batch.numpy()[0, 0, 0]) for batch in p.batches()] == order
    assert sorted(opened["paths"]) == sorted(paths[k] for k in misses)
    assert (p.stats.zarr_meta_misses, p.stats.zarr_meta_hits) == (len(misses), len(order) - len(misses))


def test_parts_of_one_array_open_it_once(paths, pipeline, opened):
    p = pipeline(batch_size=1)
    p.push(stream.Sample(paths[1], BOX, parts=[stream.Part("labels", kind="labels"), stream.Part("other", paths[2])]))
    with p.pop() as parts:
        assert [int(one.numpy()[0, 0, 0]) for one in parts] == [1, 1, 2]
    assert sorted(opened["paths"]) == paths[1:3]
    assert (p.stats.zarr_meta_misses, p.stats.zarr_meta_hits) == (2, 1)


def test_an_array_that_could_not_be_opened_is_looked_for_again(tmp_path, pipeline):
    p = pipeline(batch_size=1)
    p.push(iter([stream.Sample(tmp_path / "later", BOX)]))
    with pytest.raises(stream.NotFound):
        p.pop()
    with pytest.raises(stream.NotFound):
        p.push(stream.Sample(tmp_path / "later", BOX))
    make_array(tmp_path / "later", np.full((4, 4), 9, "u1"))
    p.push(stream.Sample(tmp_path / "later", BOX))
    assert (p.pop().numpy() == 9).all()


def rewritten(path, values, **options):
    shutil.rmtree(path, ignore_errors=True)
    options = {"shape": values.shape, "chunks": values.shape, "dtype": values.dtype, "compressors": None, **options}
    zarr.create_array(path, **options)[...] = values


ROWS = np.arange(16, dtype="u2").reshape(4, 4)
CHANGES = {
    "codec": {"compressors": zarr.codecs.ZstdCodec()},
    "byte order": {"serializer": zarr.codecs.BytesCodec(endian="big")},
    "axis order": {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
    "chunks": {"chunks": (2, 4)},
    "shards": {"chunks": (2, 2), "shards": (4, 4)},
    "format": {"zarr_format": 2},
    "larger": {"shape": (8, 4)},
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("known", ["reader", "zarr-python"])
def test_an_array_that_is_written_anew_is_read_as_it_is_now(tmp_path, pipeline, change, known):
    """Under the same path, while the pipeline has its metadata; and written back again."""
    path, values = tmp_path / "a", ROWS.copy()
    first = {"compressors": zarr.codecs.numcodecs.BZ2()} if known == "zarr-python" else {}
    p = pipeline(batch_size=1, dtype="stored")
    sample = stream.Sample(path, BOX)
    for turn, options in enumerate((first, CHANGES[change], first)):
        now = values + np.uint16(100 * turn)
        shape = options.get("shape", now.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rewritten(path, np.resize(now, shape), **options)
            p.push(sample)
            with p.pop() as batch:
                assert np.array_equal(batch.numpy()[0], zarr.open_array(path, mode="r")[:4])


def test_other_dtypes_and_shapes_under_a_path_are_errors_of_their_samples(tmp_path, pipeline):
    p = pipeline(batch_size=1, dtype="stored")
    sample = stream.Sample(tmp_path / "a", BOX)
    rewritten(tmp_path / "a", ROWS)
    p.push(sample)
    p.pop().release()
    for dtype in ("f2", "i2", "u4"):
        rewritten(tmp_path / "a", ROWS.astype(dtype))
        p.push(iter([sample]))
        with pytest.raises(stream.DtypeMismatch, match=f"dtype {np.dtype(dtype)}, uint16 in the first"):
            p.pop()
    rewritten(tmp_path / "a", ROWS[:2])
    p.push(iter([sample]))
    with pytest.raises(stream.InvalidArgument, match="with 2 voxels"):
        p.pop()


def test_another_fill_value_and_another_dtype_that_is_cast(tmp_path, pipeline):
    p = pipeline(batch_size=1, dtype="f32")
    sample = stream.Sample(tmp_path / "a", BOX)
    for dtype, fill in (("u2", 3), ("u2", 4), ("i2", -5), ("f8", 0.5)):
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        zarr.create_array(tmp_path / "a", shape=(4, 4), chunks=(4, 4), dtype=dtype, fill_value=fill)
        p.push(sample)
        with p.pop() as batch:
            assert np.unique(batch.numpy()).tolist() == [fill]


@pytest.mark.parametrize("level", [0, 1])
def test_an_image_that_is_written_anew_is_read_as_it_is_now(tmp_path, pipeline, level):
    """Its group says where levels lie, and each level how it is stored."""
    path = tmp_path / "i.ome.zarr"
    p = pipeline(batch_size=1, dtype="stored", pad="constant")
    for turn, (spacing, chunks) in enumerate((((1, 1), None), ((1, 1), (2, 2)), ((1, 2), None))):
        values = np.arange(64, dtype="u2").reshape(8, 8) + 1000 * turn
        write_omezarr(path, values, spacing, chunks=chunks, levels=2, overwrite=True)
        if turn == 2:  # one file of the two
            document = json.loads((path / "zarr.json").read_text())
            datasets = document["attributes"]["ome"]["multiscales"][0]["datasets"]
            datasets[1]["coordinateTransformations"] = [
                {"type": "scale", "scale": [4, 4]}, {"type": "translation", "translation": [1.5, 1]},
            ]  # fmt: skip
            (path / "zarr.json").write_text(json.dumps(document))
        p.push(stream.Sample(path, ((0, 4), (0, 4)), parts=(stream.Part("c", level=level, shape=(1, 1)),)))
        with p.pop() as parts:
            assert np.array_equal(parts.image.numpy()[0], values[:4, :4])
            held = zarr.open_array(path / str(level), mode="r")[...]
            at = {0: (2, 2), 1: (0 if turn == 2 else 1, 1)}[level]
            assert parts.c.numpy()[0, 0, 0] == held[at]


def test_a_generator_may_write_what_it_yields(tmp_path, pipeline):
    """Within one batch, too: arrays are looked at for each sample."""
    p = pipeline(batch_size=3)
    popped = threading.Event()

    def written():
        for n in (1, 2, 3):
            rewritten(tmp_path / str(n), np.full((4, 4), n, "u1"), chunks=(4, 4) if n < 3 else (2, 2))
            yield stream.Sample(tmp_path / str(n), BOX)
        assert popped.wait(20)
        for n in (1, 2, 3):
            rewritten(tmp_path / str(n), np.full((4, 4), 9 + n, "u1"), chunks=(1, 4))
            yield stream.Sample(tmp_path / str(n), BOX)

    p.push(written())
    found = p.batches()
    assert next(found).numpy()[:, 0, 0].tolist() == [1, 2, 3]
    popped.set()
    assert next(found).numpy()[:, 0, 0].tolist() == [10, 11, 12]


def test_an_array_that_is_written_anew_while_it_is_being_opened(tmp_path, pipeline, monkeypatch):
    """For an earlier sample, with metadata that are the old ones; or while the batch waits for memory."""
    path, begun, go = tmp_path / "a", threading.Event(), threading.Event()
    original = arrays.open_info

    def open_info(key, config):
        info = original(key, config)
        begun.set()
        assert go.wait(20)
        return info

    monkeypatch.setattr(arrays, "open_info", open_info)
    rewritten(path, ROWS)
    p = pipeline(batch_size=1, dtype="stored", device_buffer_bytes=2 * 512)
    p.push(iter([stream.Sample(path, BOX)]))
    assert begun.wait(20)
    rewritten(path, ROWS + np.uint16(7), chunks=(1, 4))
    p.push(iter([stream.Sample(path, BOX)]))
    go.set()
    held = [p.pop(), p.pop()]
    assert all(np.array_equal(batch.numpy()[0], ROWS + 7) for batch in held)
    p.push(stream.Sample(path, BOX))
    p.flush()  # returns when the third batch waits for memory
    rewritten(path, ROWS + np.uint16(9), chunks=(2, 2), compressors=zarr.codecs.ZstdCodec())
    for batch in held:
        batch.release()
    assert np.array_equal(p.pop().numpy()[0], ROWS + 9)


def test_an_array_that_is_made_while_it_is_looked_for(tmp_path, pipeline, monkeypatch):
    """The sample that was pushed before it was there fails, the other one does not."""
    path, begun, go = tmp_path / "a", threading.Event(), threading.Event()
    original = arrays.open_info

    def open_info(key, config):
        try:
            return original(key, config)
        finally:
            begun.set()
            assert go.wait(20)

    monkeypatch.setattr(arrays, "open_info", open_info)
    p = pipeline(batch_size=1, dtype="stored")
    p.push(iter([stream.Sample(path, BOX)]))
    assert begun.wait(20)
    rewritten(path, ROWS)
    p.push(iter([stream.Sample(path, BOX)]))
    wait_for(lambda: p._producer.sources.hits == 1)
    go.set()
    with pytest.raises(stream.NotFound):
        p.pop()
    assert np.array_equal(p.pop().numpy()[0], ROWS)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_paths_are_those_of_the_folder_in_which_they_were_pushed(tmp_path, pipeline, monkeypatch):
    for k in (1, 2):
        make_array(tmp_path / str(k) / "a.zarr", np.full((4, 4), k, "u1"))
        make_array(tmp_path / str(k) / "labels", np.full((4, 4), 10 * k, "u1"))
    sample = stream.Sample("a.zarr", BOX, parts=(stream.Part("labels", "./labels", kind="labels"),))
    p = pipeline(batch_size=1, lookahead_batches=2)
    held = []
    for k in (1, 2, 1):
        monkeypatch.chdir(tmp_path / str(k))
        p.push(sample)
        p.push(sample for _ in range(5))  # pulled after the next change of the folder
    for number, batch in enumerate(p.batches()):
        with batch as parts:
            held.append((int(parts.image.numpy()[0, 0, 0]), int(parts.labels.numpy()[0, 0, 0])))
        assert batch.samples == (sample,), number
    assert held == [(1, 10)] * 6 + [(2, 20)] * 6 + [(1, 10)] * 6


def test_samplers_keep_the_folder_in_which_they_were_made(tmp_path, pipeline, monkeypatch):
    for k in (1, 2):
        make_array(tmp_path / str(k) / "a.zarr", np.full((4 * k, 4), k, "u1"))
    monkeypatch.chdir(tmp_path / "1")
    crops = (stream.CropSampler(["a.zarr"], (2, 2), length=4), stream.CropGrid("a.zarr", (2, 2)))
    monkeypatch.chdir(tmp_path / "2")
    p = pipeline(batch_size=8)
    for one in crops:
        p.push(one)
    assert (next(p.batches()).numpy() == 1).all()


def test_a_url_of_a_file_is_a_path(tmp_path, pipeline):
    make_array(tmp_path / "a b", np.full((4, 4), 5, "u1"))
    p = pipeline(batch_size=1)
    for uri in (f"file://{tmp_path}/a b", f"file://{tmp_path}/a%20b", tmp_path / "a b"):
        p.push(stream.Sample(uri, BOX))
        assert (p.pop().numpy() == 5).all()
    assert (p.stats.zarr_meta_misses, p.stats.zarr_meta_hits) == (1, 2)
