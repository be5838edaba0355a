"""If this fails, `stream.predict` writes other voxels than the model gives, or a stopped run is lost or mixed up."""

import contextlib
import functools
import itertools
import sys
import types

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import ndimage

from linumpy import stream
from linumpy.errors import MetadataError, ResumeError, SourceError
from linumpy.io.carried import Carried, LeadingAxis
from linumpy.io.ome import open_image
from linumpy.stream.prediction import name_of
from linumpy.write.writer import write_omezarr
from tests.support.budget import some
from tests.support.object_server import serve


def brain(path, shape, axes=None, chunks=None, **options):
    values = np.random.default_rng(0).integers(0, 60_000, shape).astype("u2")
    write_omezarr(path, values, (10, 6, 5), axes=axes, chunks=chunks, **options)
    return values


def smooth_and_steepest(batch):
    """Two channels, which depend on the neighbours within the crop, so that what crops overlap is seen."""
    first = batch[:, 0].astype("f8")
    size = (0,) + (3,) * (first.ndim - 1)
    smooth = np.stack([ndimage.uniform_filter(one, size[1:], mode="constant") for one in first])
    return np.stack([smooth, np.gradient(first, axis=-1)], axis=1).astype("f4")


def windows(size, kind):
    at = np.arange(size)
    shapes = {"linear": np.minimum(at + 1, size - at), "flat": np.ones(size)}
    shapes["gaussian"] = np.exp(-0.5 * ((at - (size - 1) / 2) / (size / 8)) ** 2)
    return shapes[kind].astype("f8")


def blended(model, values, crop, overlap, kind):
    """Every crop of a volume (channel, *space), predicted and averaged by its weights; in memory, in float64."""
    starts = [
        [*range(0, n - c, c - o), n - c] if c < n else [0]
        for n, c, o in zip(values.shape[1:], crop, overlap, strict=True)
    ]
    total, weights = 0.0, 0.0
    for corner in itertools.product(*starts):
        box = tuple(slice(a, a + c) for a, c in zip(corner, crop, strict=True))
        prediction = model(values[(None, slice(None), *box)].astype("f4"))[0]
        weight = np.ones(())
        for c in crop:
            weight = weight[..., None] * windows(c, kind)
        grown = np.zeros(prediction.shape[: -len(crop)] + values.shape[1:])
        share = np.zeros(values.shape[1:])
        grown[(..., *box)], share[box] = prediction * weight, weight
        total, weights = total + grown, weights + share
    return total / weights


@st.composite
def requests(draw):
    rank = draw(st.integers(2, 3))
    shape = tuple(draw(st.integers(6, 19)) for _ in range(rank))
    crop = tuple(draw(st.integers(3, n)) for n in shape)
    overlap = tuple(draw(st.integers(0, min(c - 1, 4))) for c in crop)
    chunks = tuple(draw(st.integers(2, 8)) for _ in range(rank))
    return shape, crop, overlap, chunks, draw(st.sampled_from(["linear", "gaussian", "flat"]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(request=requests(), batch_size=st.integers(1, 5))
def test_predictions_are_those_of_the_whole_volume_in_memory(tmp_path_factory, request, batch_size):
    shape, crop, overlap, chunks, window = request
    folder = tmp_path_factory.mktemp("case")
    values = np.random.default_rng(0).integers(0, 60_000, shape).astype("u2")
    write_omezarr(folder / "a", values, (10, 6, 5)[-len(shape) :], chunks=chunks)
    options = {"shape": crop, "overlap": overlap, "window": window, "channels": 2, "chunks": chunks, "device": "cpu"}
    made = [
        stream.predict(smooth_and_steepest, folder / "a", folder / name, batch_size=size, memory=most, **options)
        for name, size, most in (("many", batch_size, 1), ("one", 1, 2**30))
    ]
    many, one = (open_image(path).levels[0][...] for path in made)
    assert many.tobytes() == one.tobytes()  # whatever the columns and batches
    expected = blended(smooth_and_steepest, values[None], crop, overlap, window)
    np.testing.assert_allclose(many, expected, rtol=1e-5, atol=0.5)


@pytest.mark.needs_core
@pytest.mark.parametrize(
    ("stored", "channels", "most"),
    some(
        [({"compressors": None}, 1, 1.0), ({}, 1, 1.0), ({"shards": (16, 16, 16)}, 1, 1.3), ({}, 2, 1.0)],
        lambda stored, channels, most: stored == {},
    ),
    ids=["raw", "zstd", "shards", "channels"],
)
def test_each_chunk_of_a_server_is_fetched_once(tmp_path, stored, channels, most):
    """Crops overlap, and several batches are read at a time; of a shard, the index is fetched, too."""
    pytest.importorskip("obstore")
    folder = tmp_path / "served"
    folder.mkdir()
    shape, chunks = (40, 44, 48), (8, 8, 8)
    if channels > 1:
        values = brain(folder / "a", (channels, *shape), "czyx", (1, *chunks))
        of_voxels, chunk_count = "/0/c/", channels * 5 * 6 * 6
    else:
        values = np.random.default_rng(0).integers(0, 999, shape, "u2")
        zarr.create_array(folder / "a", data=values, chunks=chunks, **stored)
        of_voxels, chunk_count = "/c/", 5 * 6 * 6
    with serve(folder) as server:
        stream.predict(
            lambda batch: batch[:, 0], f"{server.url}/a", tmp_path / "b", shape=(12, 20, 14), overlap=5, batch_size=3,
            spacing=None if channels > 1 else (1, 1, 1), device="cpu",
        )  # fmt: skip
        fetched = [(path, part) for command, path, part in server.of(of_voxels) if command == "GET"]
    np.testing.assert_allclose(
        open_image(tmp_path / "b").levels[0][...], values[0] if channels > 1 else values, rtol=1e-6
    )
    assert len(set(fetched)) <= chunk_count
    assert len(fetched) <= most * len(set(fetched))


@pytest.mark.needs_core
def test_a_tenth_of_the_memory_of_a_slab_fetches_few_chunks_again_and_the_log_says_how_many(tmp_path, caplog):
    pytest.importorskip("obstore")
    (tmp_path / "served").mkdir()
    values = np.random.default_rng(0).integers(0, 999, (24, 256, 200), "u2")
    zarr.create_array(tmp_path / "served/a", data=values, chunks=(8, 8, 8))
    slab_nbytes = 8 * (16 + 8) * 256 * 200 + 3 * 32 * 25 * 2 * 8**3  # sums, and chunks
    options = {"shape": (16, 16, 16), "overlap": 4, "batch_size": 4, "spacing": (1, 1, 1), "device": "cpu"}
    with serve(tmp_path / "served") as server, caplog.at_level("INFO", "linumpy"):
        stream.predict(
            lambda batch: batch[:, 0], f"{server.url}/a", tmp_path / "b", chunks=(8, 8, 8), memory=slab_nbytes // 10,
            **options,
        )  # fmt: skip
        fetched = [path for command, path, _ in server.of("/c/") if command == "GET"]
    np.testing.assert_allclose(open_image(tmp_path / "b").levels[0][...], values, rtol=1e-6)
    assert len(set(fetched)) == 3 * 32 * 25 < len(fetched) < 1.5 * 3 * 32 * 25
    assert f"{len(fetched)} chunks fetched, 2400 needed" in caplog.text


def test_times_are_predicted_by_themselves_and_channels_together(tmp_path):
    carried = Carried(leading={"t": LeadingAxis(2.5, 10, "second"), "c": LeadingAxis()}, attributes={"stain": "none"})
    values = brain(tmp_path / "a", (2, 3, 8, 12, 10), axes="tczyx", carried=carried, origin=(100, -20, 3.5))

    def model(batch):
        assert batch.shape[1:] == (3, 4, 6, 10)
        return batch[:, 2] - batch[:, 0]

    options = {"shape": (4, 6, 10), "overlap": (1, 2, 0), "dtype": "i4", "levels": 2, "device": "cpu"}
    stream.predict(model, tmp_path / "a", tmp_path / "b", batch_size=3, **options)
    image = open_image(tmp_path / "b")
    np.testing.assert_array_equal(image.levels[0][...], values[:, 2].astype("i4") - values[:, 0])
    assert [axis.name for axis in image.axes] == ["t", "z", "y", "x"]
    assert (image.spacing[0], image.origin[0]) == ((10, 6, 5), (100, -20, 3.5))
    assert (image.scale[0][0], image.translation[0][0], image.axes[0].unit) == (2.5, 10, "second")
    attributes = image.group.attrs.asdict()
    assert attributes["stain"] == "none"
    assert attributes["linumpy"]["predicted"]["crop"] == [4, 6, 10]
    assert len(image.levels) == 2
    stream.predict(model, tmp_path / "a", tmp_path / "c", time=1, **{**options, "levels": 1})
    np.testing.assert_array_equal(open_image(tmp_path / "c").levels[0][...], image.levels[0][1])


def test_the_largest_channel_is_written_as_labels(tmp_path):
    values = brain(tmp_path / "a", (9, 20, 18))

    def model(batch):
        return np.stack([np.full_like(batch[:, 0], 20_000), batch[:, 0], 60_000 - batch[:, 0]], 1)

    options = {"shape": (4, 8, 8), "overlap": 2, "channels": 3, "argmax": True, "levels": 2}
    stream.predict(model, tmp_path / "a", tmp_path / "b", device="cpu", **options)
    labels = open_image(tmp_path / "b").levels[0]
    assert labels.dtype == np.uint8
    np.testing.assert_array_equal(labels[...], model(values[None, None].astype("f4"))[0].argmax(0))
    with pytest.raises(stream.InvalidArgument, match="channels="):
        stream.predict(model, tmp_path / "a", tmp_path / "c", shape=(4, 8, 8), argmax=True)


def test_an_image_smaller_than_a_crop_is_continued_and_levels_are_read(tmp_path):
    values = brain(tmp_path / "a", (5, 16, 18), levels=2)
    options = {"dtype": "u2", "device": "cpu"}
    stream.predict(lambda batch: batch[:, 0], tmp_path / "a", tmp_path / "b", shape=(8, 8, 8), **options)
    np.testing.assert_array_equal(open_image(tmp_path / "b").levels[0][...], values)
    options |= {"shape": (2, 8, 8), "overlap": (1, 4, 4), "level": 1}
    stream.predict(lambda batch: batch[:, 0], tmp_path / "a", tmp_path / "c", **options)
    source, made = open_image(tmp_path / "a"), open_image(tmp_path / "c")
    np.testing.assert_array_equal(made.levels[0][...], source.levels[1][...])
    assert (made.spacing[0], made.origin[0]) == (source.spacing[1], source.origin[1])
    array = zarr.open_array(tmp_path / "a/0", mode="r")
    with pytest.raises(MetadataError, match="spacing="):
        stream.predict(lambda batch: batch[:, 0], array, tmp_path / "d", shape=(4, 8, 8))
    options = {"shape": (4, 8, 8), "spacing": (3, 2, 1), "dtype": "u2", "device": "cpu"}
    stream.predict(lambda batch: batch[:, 0], array, tmp_path / "d.ozx", **options)
    assert (tmp_path / "d.ozx").is_file()
    np.testing.assert_array_equal(open_image(tmp_path / "d.ozx").levels[0][...], values)


class Model:
    """Doubles voxels, and fails at the batch with a number; it has parameters, as networks do."""

    def __init__(self, factor=2.0, fails_at=None):
        self.factor, self.fails_at, self.calls = factor, fails_at, 0

    def state_dict(self):
        return {"factor": np.array([self.factor])}

    def __call__(self, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ZeroDivisionError
        return batch * self.factor


@pytest.mark.parametrize("memory", [1, 2**30])
def test_a_stopped_run_goes_on(tmp_path, memory):
    values = brain(tmp_path / "a", (24, 16, 16))
    options = {"shape": (6, 8, 8), "overlap": 2, "channels": 1, "chunks": (4, 8, 8), "device": "cpu"}

    def run(model, out=tmp_path / "b", most=memory, **more):
        stream.predict(model, tmp_path / "a", out, memory=most, **{**options, **more})

    whole = Model()
    run(whole, tmp_path / "whole")
    with pytest.raises(ZeroDivisionError):
        run(Model(fails_at=whole.calls * 3 // 4))
    assert not (tmp_path / "b").exists()
    for other, name in ((Model(3.0), "model"), (Model(), "window")):
        with pytest.raises(ResumeError, match=name):
            run(other, **({"window": "flat"} if name == "window" else {}))
    last = Model()
    run(last, most=2**30)  # with other columns, too
    assert 0 < last.calls < whole.calls // 2 + 10
    found, expected = (open_image(tmp_path / name).levels[0][...] for name in ("b", "whole"))
    assert found.tobytes() == expected.tobytes()
    np.testing.assert_allclose(found[0], values * 2.0, rtol=1e-6)
    assert not list(tmp_path.glob(".b*"))
    with pytest.raises(FileExistsError):
        run(Model())


def test_wrong_predictions_are_refused_and_broken_chunks_named(tmp_path):
    brain(tmp_path / "a", (8, 16, 16), chunks=(4, 8, 8))
    options = {"shape": (4, 8, 8), "device": "cpu"}
    with pytest.raises(stream.InvalidArgument, match="channels="):
        stream.predict(lambda batch: batch, tmp_path / "a", tmp_path / "b", **options)
    with pytest.raises(TypeError, match="callable"):
        stream.predict(None, tmp_path / "a", tmp_path / "c", **options)
    with pytest.raises(ValueError, match="would replace the source"):
        stream.predict(lambda batch: batch[:, 0], tmp_path / "a", tmp_path / "a", overwrite=True, **options)
    # What was begun without a complete part does not stand in the way of another request.
    for result, name in ((lambda batch: batch[:, 0] * 1j, "complex"), (lambda batch: batch[:, 0].astype(str), "<U")):
        with pytest.raises(stream.InvalidArgument, match=name):
            stream.predict(result, tmp_path / "a", tmp_path / "b", model_name=name, **options)
    with pytest.raises(stream.InvalidArgument, match="channels=300"):
        stream.predict(len, tmp_path / "a", tmp_path / "e", channels=300, argmax=True, dtype="u1", **options)
    with pytest.raises(stream.InvalidArgument, match="chunks"):
        stream.predict(len, tmp_path / "a", tmp_path / "e", chunks=(4, 0, 8), **options)
    assert not list(tmp_path.glob(".e*"))
    (tmp_path / "a/0/c/1/1/1").write_bytes(b"short")
    with pytest.raises(stream.StreamError, match="c/1/1/1"):
        stream.predict(lambda batch: batch[:, 0], tmp_path / "a", tmp_path / "d", **options)


def test_an_array_of_another_store_is_read_where_it_can_be_opened_again(tmp_path):
    values = np.random.default_rng(0).integers(0, 60_000, (8, 9, 10)).astype("u2")
    with zarr.storage.ZipStore(tmp_path / "a b.zip", mode="w") as store:
        zarr.create_array(store, name="x y", data=values, chunks=(4, 4, 4))
    options = {"shape": (4, 4, 4), "spacing": (1, 1, 1), "device": "cpu"}
    with zarr.storage.ZipStore(tmp_path / "a b.zip", mode="r") as store:
        array = zarr.open_array(store, path="x y", mode="r")
        stream.predict(lambda batch: batch[:, 0], array, tmp_path / "b", **options)
    np.testing.assert_allclose(open_image(tmp_path / "b").levels[0][...], values, rtol=1e-6)
    array = zarr.create_array({}, data=values)
    with pytest.raises(SourceError, match=r"memory://.*second time"):
        stream.predict(lambda batch: batch[:, 0], array, tmp_path / "c", **options)


def test_a_module_of_pytorch_is_evaluated_without_gradients(tmp_path, monkeypatch):
    values = brain(tmp_path / "a", (8, 16, 16))
    torch = types.ModuleType("torch")
    torch.nn = types.SimpleNamespace(Module=type("Module", (), {}))
    torch.from_dlpack, torch.is_inference = np.from_dlpack, False

    @contextlib.contextmanager
    def inference_mode():
        torch.is_inference = True
        yield
        torch.is_inference = False

    torch.inference_mode = inference_mode

    class Net(torch.nn.Module):
        training = True

        def eval(self):
            self.training = False

        def train(self, mode):
            self.training = mode

        def state_dict(self):
            return {}

        def __call__(self, batch):
            assert torch.is_inference
            assert not self.training
            return batch[:, 0]

    monkeypatch.setitem(sys.modules, "torch", torch)
    net = Net()
    stream.predict(net, tmp_path / "a", tmp_path / "b", shape=(4, 8, 8), overlap=1, dtype="u2", device="cpu")
    np.testing.assert_array_equal(open_image(tmp_path / "b").levels[0][...], values)
    assert net.training


def test_models_are_told_apart_by_their_parameters():
    assert name_of(Model(2)) == name_of(Model(2)) != name_of(Model(3))
    assert name_of(smooth_and_steepest).endswith("smooth_and_steepest")
    assert name_of(Model(2).__call__) == name_of(Model(2).__call__) != name_of(Model(3).__call__)
    names = [name_of(functools.partial(smooth_and_steepest, one)) for one in (1, 2, Model(2), Model(2), Model(3))]
    assert len(set(names)) == 4
    assert names[2] == names[3]


@pytest.mark.gpu
def test_predictions_on_a_device_are_those_of_the_host(tmp_path):
    import cupy

    brain(tmp_path / "a", (2, 20, 40, 36), axes="czyx")
    options = {"shape": (8, 16, 16), "overlap": 4, "channels": 2, "batch_size": 3, "levels": 2}

    def model(batch):
        xp = cupy.get_array_module(batch)
        return xp.stack([batch.sum(axis=1), batch[:, 0] ** 0.5], axis=1)

    for device in ("cpu", "cuda"):
        stream.predict(model, tmp_path / "a", tmp_path / device, device=device, **options)
    for level in range(2):
        host, on_device = (open_image(tmp_path / name).levels[level][...] for name in ("cpu", "cuda"))
        np.testing.assert_allclose(on_device, host, rtol=1e-5)
