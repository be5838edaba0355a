"""If this fails, crops of arrays of some format differ from zarr-python's."""

import logging
import warnings

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy import stream
from linumpy.write.writer import OmeZarrWriter, write_omezarr
from tests.support import stores
from tests.support.budget import examples
from tests.support.stream_arrays import make_array


@st.composite
def works(draw):
    """Arrays of one rank, and crops of one shape of them."""
    first = draw(stores.cases(max_elements=600))
    rank = len(first.shape)
    many = [first, *draw(st.lists(stores.cases(600).filter(lambda one: len(one.shape) == rank), max_size=2))]
    size = tuple(draw(st.integers(1, min(one.shape[axis] for one in many))) for axis in range(rank))
    crops = []
    for _ in range(draw(st.integers(1, 9))):
        number = draw(st.integers(0, len(many) - 1))
        start = [draw(st.integers(0, n - s)) for n, s in zip(many[number].shape, size, strict=True)]
        crops.append((number, tuple((a, a + s) for a, s in zip(start, size, strict=True))))
    return many, crops


@settings(max_examples=examples(90))
@given(
    works(), st.sampled_from(["f32", "f16", "bf16", "stored"]), st.integers(1, 4), st.integers(2, 4), st.integers(0, 3)
)
def test_crops_of_any_array(tmp_path_factory, work, dtype, batch_size, lookahead, held_most):
    cases, crops = work
    folder = tmp_path_factory.mktemp("arrays")
    arrays = [stores.write(one, folder / str(k)) for k, one in enumerate(cases)]
    one_dtype = len({np.dtype(one.dtype) for one in cases}) == 1
    if any(np.dtype(one.dtype).kind == "c" for one in cases) or not one_dtype:
        dtype = "stored" if one_dtype else dtype
        if any(np.dtype(one.dtype).kind == "c" for one in cases) and not one_dtype:
            return
    if not one_dtype and dtype == "stored":
        dtype = "f32"
    config = stream.Config(
        batch_size=batch_size, host_buffer_bytes=4 << 20, device_buffer_bytes=8 << 20, dtype=dtype, device="cpu",
        lookahead_batches=lookahead,
    )  # fmt: skip
    samples = [stream.Sample(folder / str(number), aabb) for number, aabb in crops]
    held, seen = [], []
    with stream.Pipeline(config) as pipeline:
        pipeline.push(iter(samples))
        for batch in pipeline.batches():
            held.append(batch)
            while len(held) > min(held_most, lookahead - 1):  # a consumer that holds some of the last batches
                seen.append(take(held.pop(0)))
        seen += [take(one) for one in held]
    found = np.concatenate(seen)
    assert len(found) == len(crops)
    for got, (number, aabb) in zip(found, crops, strict=True):
        assert_same(got, np.asarray(arrays[number][tuple(slice(*one) for one in aabb)]), dtype)


def take(batch):
    with batch:
        return batch.numpy()


def assert_same(got, stored, dtype):
    stored = stored.astype(stored.dtype.newbyteorder("="))
    with np.errstate(all="ignore"):
        if dtype == "bf16":
            import ml_dtypes

            expected = stored.astype("f4").astype(ml_dtypes.bfloat16).astype("f4")
        else:
            expected = stored.astype({"f32": "f4", "f16": "f2"}.get(dtype, stored.dtype))
    assert got.dtype == expected.dtype
    assert np.array_equal(got, expected, equal_nan=expected.dtype.kind in "fc")


def test_what_the_reader_does_not_take_is_read_by_zarr(tmp_path, pipeline, caplog):
    values = np.random.default_rng(0).integers(0, 999, (20, 20)).astype("i4")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_array(tmp_path / "a", values, (5, 5), compressors=[zarr.codecs.numcodecs.LZMA()])
    p = pipeline(batch_size=2)
    with caplog.at_level(logging.WARNING):
        p.push(stream.Sample(tmp_path / "a", ((k, k + 5), (2, 9))) for k in range(4))
        found = np.concatenate([take(batch) for batch in p.batches()])
    assert np.array_equal(found, [values[k : k + 5, 2:9] for k in range(4)])
    told = [one.message for one in caplog.records if "zarr-python" in one.message]
    assert len(told) == 1


def test_an_array_behind_a_url(pipeline):
    pytest.importorskip("fsspec")
    values = np.arange(600, dtype="u2").reshape(20, 30)
    store = zarr.storage.FsspecStore.from_url("memory://batches/a.zarr")
    try:
        zarr.create_array(store, shape=values.shape, dtype="u2", chunks=(8, 8))[...] = values
    except (TypeError, ValueError) as error:
        pytest.skip(f"this fsspec has no asynchronous memory file system: {error}")
    p = pipeline(batch_size=1)
    p.push(stream.Sample("memory://batches/a.zarr", ((3, 9), (5, 25))))
    assert np.array_equal(take(p.pop())[0], values[3:9, 5:25])


def test_levels_lie_around_the_same_centre(tmp_path, pipeline):
    values = np.random.default_rng(0).integers(0, 999, (32, 64, 64)).astype("u2")
    path = tmp_path / "v.ome.zarr"
    with OmeZarrWriter(path, values.shape, "u2", (4, 2, 2), chunks=(16, 16, 16), levels=3) as writer:
        writer[...] = values
    levels = [np.asarray(zarr.open_array(path / str(k), mode="r")) for k in range(3)]
    part = stream.Part("context", level=1, shape=(8, 16, 16))
    field = stream.Part("field", level=2)
    p = pipeline(batch_size=1, dtype="stored")
    p.push(stream.Sample(path, ((8, 16), (16, 32), (24, 40)), parts=(part, field)))
    with p.pop() as crops:
        assert np.array_equal(crops.image.numpy()[0], levels[0][8:16, 16:32, 24:40])
        assert np.array_equal(crops.context.numpy()[0], levels[1][2:10, 4:20, 8:24])
        assert np.array_equal(crops.field.numpy()[0], levels[2][2:4, 4:8, 6:10])
    q = pipeline(batch_size=1, dtype="stored")
    q.push(stream.Sample(path, ((8, 16), (16, 32), (24, 40)), level=1))
    assert np.array_equal(q.pop().numpy()[0], levels[1][4:8, 8:16, 12:20])


def test_spacing_comes_from_the_metadata(tmp_path, pipeline):
    values = np.random.default_rng(0).integers(0, 999, (16, 16, 16)).astype("u2")
    path = write_omezarr(tmp_path / "v.ome.zarr", values, (4, 2, 2), chunks=(16, 16, 16))
    options = {"batch_size": 1, "augment": stream.Augment(rotation=30), "pad": "edge"}
    crop = stream.Sample(path, ((4, 12), (4, 12), (4, 12)))
    plain = stream.Sample(make_array(tmp_path / "plain", values, (8, 8, 8)), crop.aabb)
    found = []
    for sample, more in ((crop, {}), (plain, {"spacing": (4, 2, 2)}), (plain, {"spacing": (2, 2, 2)})):
        p = pipeline(**options, **more)
        p.push(sample)
        found.append(take(p.pop()))
    assert np.array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
