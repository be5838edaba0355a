"""Volume rendering of samples along rays, and its gradient.

In: colour and density of samples, and the range of samples of each ray. Out: RGBA of each ray, or the gradient of a
loss. CuPy in, CuPy out; NumPy in, NumPy out; torch tensors through an autograd function.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from linumpy.arrays import Array, array_module
from linumpy.gpu.kernels import KernelSpec, address_of, int64, load
from linumpy.rays.arrays import are_on_device, check_array

_THREADS = 128
_DTYPES = {"rgb_sigma": np.float32, "dt": np.float32, "base": np.int64, "n_steps": np.int32}


def composite(rgb_sigma: Array, dt: Array, base: Array, n_steps: Array) -> Array:
    """Render rays: each sample replaces a fraction 1 - exp(-sigma · dt) of the light behind it by its own colour.

    Parameters
    ----------
    rgb_sigma : (n_samples, 4) float32
        Colour and density of each sample; densities are per unit of `dt`.
    dt : (n_samples,) float32
        Lengths of steps, such as :attr:`RaySamples.dt <linumpy.rays.RaySamples.dt>`.
    base : (n_rays,) int64
        First sample of each ray. Values on a device are not checked.
    n_steps : (n_rays,) int32
        Number of samples of each ray; a ray without samples becomes 0.

    Returns
    -------
    (n_rays, 4) float32
        Premultiplied RGBA: colour, and 1 minus the transmittance. The result is an array of NumPy, CuPy or torch, as
        all arguments are; in torch, it has a gradient with respect to `rgb_sigma`.

    Raises
    ------
    ValueError
        Other shapes or dtypes, arrays that are not C-contiguous, samples that do not exist (checked only on the host),
        or a device address of `rgb_sigma` that is not a multiple of 16.
    TypeError
        Some arrays are on a device and some on the host, or only some are torch's.
    """
    if _are_tensors(rgb_sigma=rgb_sigma, dt=dt, base=base, n_steps=n_steps):
        return _torch_function().apply(rgb_sigma, dt, base, n_steps)
    on_device = _checked_on_device(rgb_sigma, dt, base, n_steps)
    if not on_device:
        return _forward_on_cpu(*map(np.asarray, (rgb_sigma, dt, base, n_steps)))
    rgba = array_module(rgb_sigma).empty((len(base), 4), np.float32)
    _launch("composite", len(base), (rgb_sigma, dt, base, n_steps, rgba))
    return rgba


def composite_backward(
    rgb_sigma: Array, dt: Array, base: Array, n_steps: Array, rgba: Array, grad_rgba: Array
) -> Array:
    """Return the gradient of a loss with respect to `rgb_sigma`.

    Parameters
    ----------
    rgb_sigma, dt, base, n_steps
        As for :func:`composite`.
    rgba : (n_rays, 4) float32
        The result of :func:`composite`.
    grad_rgba : (n_rays, 4) float32
        Gradient of the loss with respect to `rgba`.

    Returns
    -------
    (n_samples, 4) float32
        Gradient of each sample; 0 for samples of no ray.

    Raises
    ------
    ValueError, TypeError
        As for :func:`composite`.
    """
    on_device = _checked_on_device(rgb_sigma, dt, base, n_steps)
    shape = (len(base), 4)
    for name, array in (("rgba", rgba), ("grad_rgba", grad_rgba)):
        check_array(array, np.float32, shape, name)
    are_on_device(rgb_sigma=rgb_sigma, rgba=rgba, grad_rgba=grad_rgba)
    if not on_device:
        return _backward_on_cpu(*map(np.asarray, (rgb_sigma, dt, base, n_steps, grad_rgba)))
    grad = array_module(rgb_sigma).zeros(rgb_sigma.shape, np.float32)
    _launch("composite_backward", len(base), (rgb_sigma, dt, base, n_steps, rgba, grad_rgba, grad))
    return grad


def _are_tensors(**arrays: object) -> bool:
    """Return whether all arrays are torch's, on one device; raise TypeError where only some are."""
    torch = sys.modules.get("torch")
    tensors = {name: array for name, array in arrays.items() if torch is not None and isinstance(array, torch.Tensor)}
    others = {name: type(array) for name, array in arrays.items() if name not in tensors}
    if tensors and others:
        types = ", ".join(f"{name} of {kind.__module__.partition('.')[0]}" for name, kind in others.items())
        raise TypeError(
            f"{', '.join(tensors)} of torch, {types}: pass all as tensors; torch.from_dlpack(array) copies nothing"
        )
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise TypeError(f"{listed}: move all to one device")
    return bool(tensors)


def _checked_on_device(rgb_sigma: Array, dt: Array, base: Array, n_steps: Array) -> bool:
    """Check the arrays; return whether they are on a device."""
    arrays = {"rgb_sigma": rgb_sigma, "dt": dt, "base": base, "n_steps": n_steps}
    shapes = {"rgb_sigma": (len(dt), 4), "dt": (len(dt),), "base": (len(base),), "n_steps": (len(base),)}
    for name, array in arrays.items():
        check_array(array, _DTYPES[name], shapes[name], name)
    on_device = are_on_device(**arrays)
    if not on_device:
        wrong = np.flatnonzero((n_steps < 0) | ((n_steps > 0) & ((base < 0) | (base > len(dt) - n_steps))))
        if len(wrong):
            ray = wrong[0]
            raise ValueError(f"ray {ray} has {n_steps[ray]} samples from {base[ray]} on, but there are {len(dt)}")
    if on_device and address_of(rgb_sigma) % 16:
        raise ValueError("rgb_sigma: the address of the array is not a multiple of 16: pass a copy")
    return on_device


def kernel_spec(name: str) -> KernelSpec:
    """Return the specification of a kernel of composite.cu."""
    return KernelSpec("composite", name, (("THREADS", str(_THREADS)),), "linumpy.rays.cuda")


def _launch(name: str, n_rays: int, arrays: tuple[Array, ...]) -> None:
    if n_rays:
        load(kernel_spec(name))((-(-n_rays * 32 // _THREADS),), (_THREADS,), (*arrays, *int64(n_rays)))


#: Maximum number of samples that are processed together.
_BLOCK_SAMPLES = 2**22


def _blocks(n_steps: np.ndarray) -> Iterator[slice]:
    """Divide rays into blocks that have at most :data:`_BLOCK_SAMPLES` samples when padded to rows of equal length."""
    step = max(1, _BLOCK_SAMPLES // max(1, int(n_steps.max(initial=0))))
    for begin in range(0, len(n_steps), step):
        yield slice(begin, begin + step)


@dataclass(frozen=True)
class _Rows:
    """Samples of some rays, a row for each ray, padded by samples without density."""

    index: np.ndarray  # of each sample among all samples
    exists: np.ndarray  # False for padding
    color: np.ndarray
    weight: np.ndarray  # of the color of each sample in the color of its ray
    after: np.ndarray  # transmittance after each sample


def _rows(rgb_sigma: np.ndarray, dt: np.ndarray, base: np.ndarray, n_steps: np.ndarray) -> _Rows:
    column = np.arange(max(1, int(n_steps.max(initial=0))))
    exists = column < n_steps[:, None]
    index = np.where(exists, base[:, None] + column, 0)
    samples = np.where(exists[..., None], rgb_sigma[index], 0).astype(np.float64)
    tau = samples[..., 3] * np.where(exists, dt[index], 0)
    after = np.exp(-np.cumsum(tau, axis=1))
    before = np.concatenate([np.ones((len(base), 1)), after[:, :-1]], axis=1)
    return _Rows(index, exists, samples[..., :3], before * -np.expm1(-tau), after)


def _forward_on_cpu(rgb_sigma: np.ndarray, dt: np.ndarray, base: np.ndarray, n_steps: np.ndarray) -> np.ndarray:
    rgba = np.zeros((len(base), 4), np.float32)
    for block in _blocks(n_steps) if len(dt) else ():
        rows = _rows(rgb_sigma, dt, base[block], n_steps[block])
        rgba[block, :3] = np.einsum("rs,rsc->rc", rows.weight, rows.color)
        rgba[block, 3] = 1 - rows.after[:, -1]
    return rgba


def _backward_on_cpu(
    rgb_sigma: np.ndarray, dt: np.ndarray, base: np.ndarray, n_steps: np.ndarray, grad_rgba: np.ndarray
) -> np.ndarray:
    grad = np.zeros(rgb_sigma.shape, np.float32)
    for block in _blocks(n_steps) if len(dt) else ():
        rows = _rows(rgb_sigma, dt, base[block], n_steps[block])
        grad_ray = grad_rgba[block].astype(np.float64)
        projected = np.einsum("rsc,rc->rs", rows.color, grad_ray[:, :3])
        contribution = rows.weight * projected
        remaining = contribution.sum(axis=1, keepdims=True) - np.cumsum(contribution, axis=1)
        transmitted = rows.after[:, -1:] * grad_ray[:, 3:]
        values = np.empty((*contribution.shape, 4))
        values[..., :3] = rows.weight[..., None] * grad_ray[:, None, :3]
        values[..., 3] = dt[rows.index] * (rows.after * projected - remaining + transmitted)
        grad[rows.index[rows.exists]] = values[rows.exists]
    return grad


@functools.cache
def _torch_function() -> Any:
    """Define the autograd function; on a device it uses torch's current stream."""
    import torch

    def on_stream(work: Any, *tensors: Any) -> Any:
        tensors = tuple(tensor.detach() for tensor in tensors)
        if not tensors[0].is_cuda:
            return torch.from_numpy(work(*(tensor.numpy() for tensor in tensors)))
        import cupy

        stream = torch.cuda.current_stream(tensors[0].device)
        with cupy.cuda.Device(tensors[0].device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
            return torch.from_dlpack(work(*(cupy.from_dlpack(tensor) for tensor in tensors)))

    class Composite(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, rgb_sigma: Any, dt: Any, base: Any, n_steps: Any) -> Any:
            tensors = [tensor.contiguous() for tensor in (rgb_sigma, dt, base, n_steps)]
            rgba = on_stream(composite, *tensors)
            ctx.save_for_backward(*tensors, rgba)
            return rgba

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, grad_rgba: Any) -> Any:
            saved = ctx.saved_tensors
            return on_stream(composite_backward, *saved, grad_rgba.contiguous()), None, None, None

    return Composite
