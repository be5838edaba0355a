"""If this fails, samplers of other fields, or batches for torch, are wrong."""

import sys
import types

import numpy as np
import pytest

from linumpy import sampling
from linumpy.sampling import create, create_sampler, sample_dataset
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.create import gradient_density
from linumpy.sampling.field import Field
from linumpy.sampling.sampler import Sampler
from tests.support.oracles.sampling_reference import independent

pytestmark = pytest.mark.needs_core


class Planes(Field):
    """Values that are known everywhere: x + 10 y, and z."""

    n_channels = 2
    value_range = (0.0, 11.0)

    def __init__(self, slope=10.0):
        self.slope = slope

    def decode(self, coords, out):
        assert coords.flags.c_contiguous
        assert out.flags.c_contiguous
        out[0] = coords[:, 0] + np.float32(self.slope) * coords[:, 1]
        out[1] = coords[:, 2]


def test_fields_are_derived():
    with pytest.raises(TypeError, match=r"field is a object; derive its class from linumpy\.sampling\.Field"):
        Sampler(object())
    with pytest.raises(TypeError, match="abstract"):
        type("NoDecode", (Field,), {})()


@pytest.mark.parametrize("order", ["iid", "binned", "stratified", "sobol"])
def test_any_field_is_sampled(order):
    sampler = Sampler(Planes(), seed=2, order=order)
    coords, values = sampler.sample(3000)
    assert np.array_equal(values[1], coords[:, 2])
    assert np.allclose(values[0], coords[:, 0] + 10 * coords[:, 1])
    if order == "iid":
        assert np.array_equal(coords, independent(key_of(2), np.arange(3000)))
    assert len(np.unique(np.concatenate([coords, sampler.sample(3000)[0]]), axis=0)) == 6000


def test_there_is_no_gradient_of_any_field():
    coords = np.zeros((5, 3), np.float32)
    with pytest.raises(ValueError, match="gradient: this field has none"):
        Sampler(Planes()).decode(coords, gradient=True)
    with pytest.raises(ValueError, match="gradient: this field has none"):
        sampling.decode(Sampler(Planes()), coords, np.empty((2, 5), np.float32), 5, np.empty((2, 3, 5), np.float32))


def test_the_samplers_importance_is_that_of_the_field():
    sampler = create_sampler("structuredRegular", "cpu", array=np.zeros((4, 4, 4), np.float32), importance="gradient")
    assert sampler.sample(10)[1].any() == np.False_


def test_voxels_of_nan_have_an_importance():
    voxels = np.full((4, 4, 4), np.float32(7))
    voxels[0, 1, 2] = np.nan
    coords, values = create_sampler("structuredRegular", "cpu", array=voxels, seed=1, importance="gradient").sample(999)
    assert np.isfinite(coords).all()
    assert 0 < np.isnan(values).sum() < 999


def test_the_gradient_of_labels_is_that_of_integers():
    class Labels(Planes):
        values_dtype = np.dtype(np.int32)

        def decode(self, coords, out):
            assert out.dtype == np.int32  # a kernel would write the bits of integers into a buffer of floats
            out[:] = np.int32(coords[:, 0] >= 0.5)

    density = gradient_density(Labels(), np, 16)
    assert density[..., 1:3].min() > 4 * density[..., [0, 3]].max()


@pytest.fixture
def other_format(monkeypatch):
    opener = create._of_program(lambda filename, slope=10.0: Planes(slope) if filename else None)
    monkeypatch.setitem(create._OPENERS, "openvdb", opener)


def test_formats_of_other_modules(other_format):
    sampler = create_sampler("openvdb", "cpu", filename="a", slope=3.0, seed=1, order="sobol")
    coords, values = sampler.sample(100)
    assert np.allclose(values[0], coords[:, 0] + 3 * coords[:, 1])
    assert sampler.value_range == (0, 11)
    with pytest.raises(TypeError, match="unknown argument 'range': type 'openvdb' takes filename, slope"):
        create_sampler("openvdb", "cpu", filename="a", range=(0, 1))
    with pytest.raises(TypeError, match="argument 'filename' is missing: type 'openvdb' takes filename, slope"):
        create_sampler("openvdb", "cpu")
    with pytest.raises(ValueError, match="does not take them"):
        create_sampler("openvdb", "cpu", filename="a", spline_order=3)
    with pytest.raises(ValueError, match="cuda, cpu"):
        create_sampler("openvdb", "out_of_core", filename="a")


class Tensor:
    """What the package uses of a tensor in host memory."""

    device = types.SimpleNamespace(type="cpu", index=None)

    def __init__(self, array):
        self.array = array
        self.dtype = f"torch.{array.dtype}"
        self.shape = array.shape

    T = property(lambda self: Tensor(self.array.T))

    def numel(self):
        return self.array.size

    def is_contiguous(self):
        return self.array.flags.c_contiguous

    def detach(self):
        return self

    def numpy(self):
        return self.array


@pytest.fixture
def torch(monkeypatch):
    """A module with the little of torch that batches need, since CI has none; the real one is used on a GPU machine."""
    made, data = types.ModuleType("torch"), types.ModuleType("torch.utils.data")
    made.Tensor, made.float32, made.int32 = Tensor, "float32", "int32"
    made.empty = lambda shape, dtype, device: Tensor(np.full(shape, -1, dtype))
    data.IterableDataset, data.get_worker_info = object, lambda: None
    made.utils = types.SimpleNamespace(data=data)
    for name, module in {
        "torch": made,
        "torch.utils": types.ModuleType("torch.utils"),
        "torch.utils.data": data,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def test_batches_for_torch(torch):
    batches = list(sample_dataset(Sampler(Planes(), seed=4), 50, batches=3))
    assert len(batches) == 3
    expected = Sampler(Planes(), seed=4).sample(150)
    for k, (coords, values) in enumerate(batches):
        assert np.array_equal(coords.array, expected[0][50 * k : 50 * k + 50])
        assert np.array_equal(values.array, expected[1][:, 50 * k : 50 * k + 50].T)
    endless = iter(sample_dataset(Sampler(Planes()), 7, order="sobol"))
    assert [next(endless)[0].array.shape for _ in range(5)] == [(7, 3)] * 5
    with pytest.raises(ValueError, match="batch_size=0"):
        sample_dataset(Sampler(Planes()), 0)


def test_worker_processes_are_refused(torch):
    torch.utils.data.get_worker_info = object
    dataset = sample_dataset(Sampler(Planes()), 7)
    with pytest.raises(RuntimeError, match="num_workers=0"):
        next(iter(dataset))


def test_tensors_that_are_not_contiguous(torch):
    sampler = Sampler(Planes())
    with pytest.raises(ValueError, match="coords is not C-contiguous"):
        sampling.sample(sampler, Tensor(np.empty((3, 5), np.float32)).T, Tensor(np.empty((2, 5), np.float32)), 5)
