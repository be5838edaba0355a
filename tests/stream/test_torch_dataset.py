"""If this fails, the dataset for PyTorch gives other batches than the pipeline."""

import importlib.util
import itertools
import sys
import types

import numpy as np
import pytest

from linumpy import stream
from tests.support.stream_arrays import make_array

HAS_TORCH = importlib.util.find_spec("torch") is not None


@pytest.fixture
def crops(tmp_path):
    values = np.random.default_rng(0).integers(0, 999, (12, 12, 12)).astype("u2")
    path = make_array(tmp_path / "a.zarr", values, (4, 4, 4))
    samples = [stream.Sample(path, [(k, k + 4)] * 3, parts=()) for k in range(8)]
    return samples, np.stack([values[k : k + 4, k : k + 4, k : k + 4] for k in range(8)]).astype("f4")


def config(**options):
    return stream.Config(batch_size=2, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 20, device="cpu", **options)


@pytest.fixture
def stub(monkeypatch):
    """The parts of PyTorch that the dataset uses; tensors are NumPy arrays."""
    worker = types.SimpleNamespace(info=None)
    data = types.ModuleType("torch.utils.data")
    data.IterableDataset = type("IterableDataset", (), {})
    data.get_worker_info = lambda: worker.info
    utils, torch = types.ModuleType("torch.utils"), types.ModuleType("torch")
    utils.dlpack = types.SimpleNamespace(from_dlpack=np.from_dlpack)
    utils.data, torch.utils = data, utils
    for name, module in (("torch", torch), ("torch.utils", utils), ("torch.utils.data", data)):
        monkeypatch.setitem(sys.modules, name, module)
    return worker


def test_it_yields_every_batch_in_each_iteration(stub, crops):
    samples, expected = crops
    dataset = stream.torch_dataset(config(), samples)
    for _ in range(2):
        assert np.array_equal(np.concatenate([one.copy() for one in dataset]), expected)


def test_parts_come_as_a_dict(stub, crops):
    samples, expected = crops
    part = stream.Part("labels", kind="labels")
    pairs = [stream.Sample(one.uri, one.aabb, parts=(part,)) for one in samples]
    first = next(iter(stream.torch_dataset(config(), pairs)))
    assert list(first) == ["image", "labels"]
    assert np.array_equal(first["labels"], expected[:2].astype("u2"))
    assert first["labels"].dtype == np.uint16


def test_the_dataset_resumes_from_a_state(stub, crops):
    samples, expected = crops
    dataset = stream.torch_dataset(config(), samples)
    with pytest.raises(RuntimeError, match="no iteration"):
        dataset.state_dict()
    running = iter(dataset)
    next(running)
    next(running)
    state = dataset.state_dict()
    running.close()
    later = stream.torch_dataset(config(), samples)
    for wrong in (None, {}, [1]):
        with pytest.raises(stream.InvalidArgument, match="state must be what"):
            later.load_state_dict(wrong)
    later.load_state_dict(state)
    assert np.array_equal(np.concatenate([one.copy() for one in later]), expected[4:])


@pytest.mark.parametrize("kind", ["sampler", "list"])
def test_each_iteration_is_the_next_epoch_and_resumes(stub, crops, kind):
    """Another augmentation, and of a sampler other crops; also where a state is loaded in the middle, or at an end."""
    samples, _ = crops
    options = {"augment": stream.Augment(flip="zyx", noise=(1, 9)), "pad": "edge", "epoch": 5}

    def made():
        sampler = stream.CropSampler([samples[0].uri], (4, 4, 4), length=8, seed=1)
        return stream.torch_dataset(config(**options), sampler if kind == "sampler" else samples)

    dataset, states, expected = made(), [], []
    for _ in range(3):
        for batch in dataset:
            expected.append(batch.tobytes())
            states.append(dataset.state_dict())
    assert len(set(expected)) == len(expected) == 12
    assert [one["epoch"] for one in states] == [5] * 4 + [6] * 4 + [7] * 4
    for stop in (1, 5, 7):
        later = made()
        later.load_state_dict(states[stop - 1])
        found = [batch.tobytes() for _ in range(3 - stop // 4) for batch in later]
        assert found == expected[stop:]
    again = made()
    again.set_epoch(6)
    if kind == "list":
        assert [batch.tobytes() for batch in again] == expected[4:8]
    else:
        again.set_epoch(1)
        assert [batch.tobytes() for batch in again] == expected[4:8]
    assert again.state_dict()["batch_id"] == 4


def test_workers_are_refused(stub, crops):
    stub.info = object()
    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(iter(stream.torch_dataset(config(), crops[0])))


@pytest.mark.skipif(not HAS_TORCH, reason="needs PyTorch, which the test environment does not install")
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_with_pytorch(crops, dtype):
    import torch
    from torch.utils.data import DataLoader

    samples, expected = crops
    for rank in range(2):
        dataset = stream.torch_dataset(config(dtype=dtype, rank=rank, world_size=2), samples)
        loader = DataLoader(dataset, batch_size=None, num_workers=0)
        batches = [one.clone() for one in loader]
        assert batches[0].dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
        wanted = torch.from_numpy(expected[rank::2]).to(batches[0].dtype)
        assert torch.equal(torch.cat(batches), wanted)


@pytest.mark.gpu
def test_with_pytorch_on_a_gpu(crops, cupy):
    torch = pytest.importorskip("torch")
    samples, expected = crops
    endless = itertools.islice(itertools.cycle(samples), 400)
    settings = stream.Config(batch_size=2, host_buffer_bytes=64 << 20, device_buffer_bytes=1 << 20, dtype="bf16")
    side = torch.cuda.Stream()
    with stream.Pipeline(settings) as pipeline, torch.cuda.stream(side):
        pipeline.push(endless)
        sums = []
        for batch in pipeline.batches():
            with batch as tensor:
                crop = torch.from_dlpack(tensor)
            torch.cuda._sleep(200_000)  # the consumer's work is still queued when the storage is given back
            sums.append(crop.float().sum(dim=(1, 2, 3)))
            del crop
        found = torch.cat(sums).cpu().numpy()
    bf16 = torch.from_numpy(expected).to(torch.bfloat16).float().sum(dim=(1, 2, 3)).numpy()
    assert np.allclose(found.reshape(-1, 8), bf16[None], rtol=1e-6)
