"""If this fails, what goes to another process arrives broken, or what cannot go does not say what to send."""

import copy
import pickle

import numpy as np
import pytest

from linumpy import stream
from linumpy.gpu import Reader
from linumpy.sampling import create_sampler
from linumpy.stream.errors import ShutdownError
from linumpy.voxel.session import VoxelSession
from linumpy.write.writer import OmeZarrWriter, write_omezarr

SHAPE = (24, 20, 16)


def values():
    return np.random.default_rng(0).integers(0, 60_000, SHAPE).astype("u2")


@pytest.fixture
def image(tmp_path):
    write_omezarr(tmp_path / "a", values(), (5, 5, 5), chunks=(8, 8, 8))
    return str(tmp_path / "a")


def batch_of(image, dtype="f32", parts=(), device="cpu"):
    config = stream.Config(
        batch_size=2, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 20, device=device, dtype=dtype
    )
    pipeline = stream.Pipeline(config)
    pipeline.push(stream.Sample(image, [(k, k + 8)] * 3, parts=parts) for k in range(4))
    return pipeline, pipeline.pop()


@pytest.fixture
def made(image, tmp_path):
    """Every kind of object that belongs to its process, by name."""
    pipeline, batch = batch_of(image)
    reader = Reader(device="cpu")
    grid = stream.CropGrid(image, (8, 8, 8))
    values().tofile(tmp_path / "raw")
    raw = {"filename": tmp_path / "raw", "dims": SHAPE[::-1], "dtype": "uint16", "n_channels": 1, "offset": 0}
    writer = OmeZarrWriter(tmp_path / "b", SHAPE, "f4", (5, 5, 5))
    yield {
        "Reader": reader,
        "Ticket": reader.submit(image),
        "Pipeline": pipeline,
        "Batch": batch,
        "Batches": pipeline.batches(),
        "Stitcher": stream.Stitcher(grid, np.zeros(SHAPE, "f4")),
        "OmeZarrWriter": writer,
        "Sampler": create_sampler("structuredRegular", "cpu", **raw),
        "VoxelSession": VoxelSession(np.zeros(SHAPE, bool), (0, 0, 0), 1),
    }
    pipeline.close()
    reader.close()


INSTEAD = {
    "Reader": "send the path of the array",
    "Ticket": "send the array that result() returns",
    "Pipeline": "send its config and the samples",
    "Batch": r"send its tensors \(batch.tensors\)",
    "Batches": "send the config and the samples of its pipeline",
    "Stitcher": "send predictions to the process that has it",
    "OmeZarrWriter": "send regions to the process that made it",
    "Sampler": "send the arguments of create_sampler",
    "VoxelSession": "send the path of the volume",
}


@pytest.mark.parametrize("name", INSTEAD)
def test_what_belongs_to_a_process_says_what_to_send(made, name):
    for send in (pickle.dumps, copy.deepcopy, lambda one: pickle.dumps([one], protocol=2)):
        with pytest.raises(TypeError, match=INSTEAD[name].replace("()", r"\(\)")) as caught:
            send(made[name])
        assert "\n" not in str(caught.value)
    assert type(made[name]).__name__.endswith(name)


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "stored"])
def test_a_tensor_takes_its_own_elements_along(image, dtype):
    """No more than these: it is a view of memory that holds several batches."""
    pipeline, batch = batch_of(image, dtype)
    with pipeline:
        (tensor,) = batch.tensors
        data = pickle.dumps(tensor)
        assert len(data) < tensor.array.nbytes + 500
        expected, name, shape = tensor.numpy(), tensor.dtype, tensor.shape
        batch.release()
        with pytest.raises(ShutdownError):
            pickle.dumps(tensor)
    again = pickle.loads(data)
    assert (again.dtype, again.shape) == (name, shape)
    assert np.array_equal(again.numpy(), expected)
    assert again.__dlpack_device__() == (1, 0)
    if dtype != "bf16":
        assert np.array_equal(np.from_dlpack(again), expected)


def test_the_tensors_of_all_parts_go_by_their_names(image):
    context = stream.Part("context", shape=(6, 6, 6))
    pipeline, batch = batch_of(image, parts=(context,))
    with pipeline:
        again = pickle.loads(pickle.dumps(batch.tensors))
        assert again._fields == batch.tensors._fields == ("image", "context")
        for one, two in zip(again, batch.tensors, strict=True):
            assert np.array_equal(one.numpy(), two.numpy())
        assert again.context.shape == (2, 6, 6, 6)


def test_what_describes_the_work_goes_as_it_is(image):
    """This is what the messages above name."""
    for one in (stream.Sample(image, [(0, 8)] * 3), list(stream.CropGrid(image, (8, 8, 8)))):
        assert pickle.loads(pickle.dumps(one)) == one
    sampler = stream.CropSampler([image], (8, 8, 8), length=5, seed=3)
    again = pickle.loads(pickle.dumps(sampler))
    assert [one.aabb for one in again] == [one.aabb for one in sampler]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_tensor_on_a_device_comes_back_in_host_memory(image, cupy, dtype):
    pipeline, batch = batch_of(image, dtype, device=0)
    with pipeline:
        (tensor,) = batch.tensors
        again = pickle.loads(pickle.dumps(tensor))
        assert again.__dlpack_device__() == (1, 0)
        assert again.dtype == tensor.dtype
        assert np.array_equal(again.numpy(), tensor.numpy())
