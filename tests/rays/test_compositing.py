"""If this fails, volume rendering, or its gradient, differs from the definition."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from linumpy.rays import composite, composite_backward, compositing
from tests.support.gpu.emulator import emulated, needs_compiler


def case(seed=0, counts=(0, 1, 31, 32, 33, 100, 0, 7), gap=3):
    """Rays whose samples lie in any order, with others between them that belong to none."""
    rng = np.random.default_rng(seed)
    counts = np.array(counts, "i4")
    order, base, at = rng.permutation(len(counts)), np.zeros(len(counts), "i8"), 2
    for ray in order:
        base[ray] = at
        at += counts[ray] + gap
    rgb_sigma = rng.random((at, 4)).astype("f4")
    rgb_sigma[:, 3] *= 3
    return rgb_sigma, (rng.random(at) * 0.2).astype("f4"), base, counts


def slow(rgb_sigma, dt, base, n_steps):
    out = np.zeros((len(base), 4))
    for ray, (begin, count) in enumerate(zip(base, n_steps, strict=True)):
        through = 1.0
        for k in range(begin, begin + count):
            alpha = 1 - math.exp(-float(rgb_sigma[k, 3]) * float(dt[k]))
            out[ray, :3] += through * alpha * rgb_sigma[k, :3].astype(float)
            through *= 1 - alpha
        out[ray, 3] = 1 - through
    return out


def slow_gradient(arrays, to):
    """Central differences in float64."""
    rgb_sigma, dt, base, n_steps = arrays
    grad = np.zeros(rgb_sigma.shape)
    for index in np.ndindex(rgb_sigma.shape):
        values = []
        for by in (1e-5, -1e-5):
            moved = rgb_sigma.astype(float)
            moved[index] += by
            values.append((slow(moved, dt, base, n_steps) * to).sum())
        grad[index] = (values[0] - values[1]) / 2e-5
    return grad


@pytest.fixture(params=["cpu", pytest.param("kernel", marks=needs_compiler)])
def side(request, monkeypatch):
    if request.param == "kernel":
        monkeypatch.setattr(compositing, "load", emulated)
        monkeypatch.setattr(compositing, "are_on_device", lambda **_: True)
        monkeypatch.setattr(compositing, "address_of", lambda _: 0)
    return request.param


def test_rendered_as_defined(side):
    arrays = case()
    rgba = composite(*arrays)
    assert rgba.dtype == np.float32
    assert np.allclose(rgba, slow(*arrays), atol=1e-6)


def test_opaque_samples_hide_what_is_behind_them(side):
    rgb_sigma, dt, base, n_steps = case(1, (50, 40), 0)
    for value in (1e10, 1e30, np.inf):
        rgb_sigma[base[0] + 20, 3] = value
        rgb_sigma[base[1] + 33, 3] = value
        rgba = composite(rgb_sigma, dt, base, n_steps)
        assert np.allclose(rgba, slow(rgb_sigma, dt, base, n_steps), atol=1e-6)
        assert np.allclose(rgba[:, 3], 1)


def test_the_gradient(side):
    arrays = case(2, (0, 1, 5, 40), 1)
    to = np.random.default_rng(3).normal(size=(4, 4)).astype("f4")
    grad = composite_backward(*arrays, composite(*arrays), to)
    assert np.allclose(grad, slow_gradient(arrays, to), atol=2e-6)
    owned = np.zeros(len(grad), bool)
    for begin, count in zip(arrays[2], arrays[3], strict=True):
        owned[begin : begin + count] = True
    assert not grad[~owned].any()


def test_nothing_to_render(side):
    empty = np.zeros((0, 4), "f4"), np.zeros(0, "f4")
    assert composite(*empty, np.zeros(0, "i8"), np.zeros(0, "i4")).shape == (0, 4)
    assert not composite(*empty, np.zeros(3, "i8"), np.zeros(3, "i4")).any()


def test_many_rays_are_rendered_block_by_block(monkeypatch):
    arrays = case(4, np.random.default_rng(4).integers(0, 20, 50))
    whole = composite(*arrays)
    to = np.ones((50, 4), "f4")
    gradient = composite_backward(*arrays, whole, to)
    monkeypatch.setattr(compositing, "_BLOCK_SAMPLES", 60)
    assert np.array_equal(composite(*arrays), whole)
    assert np.array_equal(composite_backward(*arrays, whole, to), gradient)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: np.zeros((9, 3), "f4")}, r"rgb_sigma of float32 \(9, 3\): float32 \(9, 4\)"),
        ({1: np.zeros(9)}, r"dt of float64 \(9,\): float32"),
        ({2: np.zeros(4, "i4")}, "base of int32"),
        ({3: np.zeros(3, "i4")}, r"n_steps of int32 \(3,\): int32 \(4,\)"),
        ({0: np.zeros((9, 8), "f4")[:, ::2]}, "C-contiguous"),
        ({2: np.full(4, 8), 3: np.array([0, 1, 2, 0], "i4")}, "ray 2 has 2 samples from 8 on, but there are 9"),
        ({2: np.array([0, -1, 0, 0]), 3: np.ones(4, "i4")}, "ray 1 has 1 samples from -1 on"),
        ({3: np.array([0, 0, 0, -2], "i4")}, "ray 3 has -2 samples"),
        ({0: np.zeros((0, 4), "f4"), 1: np.zeros(0, "f4"), 3: np.ones(4, "i4")}, "ray 0 has 1 samples .* there are 0"),
    ],
)
def test_bad_input(change, message):
    arrays = [np.zeros((9, 4), "f4"), np.zeros(9, "f4"), np.zeros(4, "i8"), np.zeros(4, "i4")]
    for place, value in change.items():
        arrays[place] = value
    with pytest.raises(ValueError, match=message):
        composite(*arrays)


def test_lists_are_no_arrays():
    with pytest.raises(TypeError, match="rgb_sigma is list: a NumPy or CuPy array of float32 is needed"):
        composite([[1, 1, 1, 1]], [1], [0], [1])


class Tensor:
    """Of torch, as far as arguments are looked at."""

    def __init__(self, device="cpu"):
        self.device = device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "rgb_sigma of torch, dt of numpy, base of numpy, n_steps of numpy: pass all as tensors"),
        ({1: Tensor(), 2: Tensor()}, "rgb_sigma, dt, base of torch, n_steps of numpy: pass all"),
        ({0: np.zeros((9, 4), "f4"), 3: Tensor()}, "n_steps of torch, rgb_sigma of numpy, dt of numpy"),
        (
            {1: Tensor("cuda:0"), 2: Tensor(), 3: Tensor()},
            "rgb_sigma on cpu, dt on cuda:0, base on cpu, n_steps on cpu: move all to one device",
        ),
    ],
)
def test_arrays_of_torch_and_numpy_do_not_mix(monkeypatch, change, message):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    arrays = [Tensor(), np.zeros(9, "f4"), np.zeros(4, "i8"), np.zeros(4, "i4")]
    for place, value in change.items():
        arrays[place] = value
    with pytest.raises(TypeError, match=message):
        composite(*arrays)


@pytest.mark.sanitize
def test_the_same_on_a_device(device):
    cupy = device
    arrays = case(5, np.random.default_rng(5).integers(0, 300, 500))
    to = np.random.default_rng(6).normal(size=(500, 4)).astype("f4")
    expected = composite(*arrays)
    there = [cupy.asarray(one) for one in arrays]
    rgba = composite(*there)
    assert isinstance(rgba, cupy.ndarray)
    assert np.allclose(rgba.get(), expected, atol=3e-6)
    grad = composite_backward(*there, rgba, cupy.asarray(to))
    assert np.allclose(grad.get(), composite_backward(*arrays, expected, to), atol=3e-6)


def torch_gradient(device):
    torch = pytest.importorskip("torch")
    arrays = case(7, (3, 0, 40))
    tensors = [torch.from_numpy(one).to(device) for one in arrays]
    tensors[0].requires_grad_()
    rgba = composite(*tensors)
    to = np.random.default_rng(8).normal(size=(3, 4)).astype("f4")
    (rgba * torch.from_numpy(to).to(device)).sum().backward()
    assert rgba.device.type == device
    expected = composite(*arrays)
    assert np.allclose(rgba.detach().cpu(), expected, atol=1e-6)
    gradient = tensors[0].grad.cpu().numpy()
    assert np.allclose(gradient, composite_backward(*arrays, expected, to), atol=2e-6)


def test_torch_on_the_cpu():
    torch_gradient("cpu")


@pytest.mark.gpu
def test_torch_on_a_device(cupy):
    torch_gradient("cuda")
