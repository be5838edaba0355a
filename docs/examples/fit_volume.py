#!/usr/bin/env python3
"""Fit a small coordinate network to a volume: f(x, y, z) → value, from random samples.

It takes the volume that ``linum-demo`` leaves, or any OME-Zarr image, and needs PyTorch.

    linum-demo
    python docs/examples/fit_volume.py demo-out/mosaic.ome.zarr
"""

from __future__ import annotations

import argparse
import math

import torch

from linumpy.device import resolve
from linumpy.sampling import create_sampler, sample_dataset


class Network(torch.nn.Module):
    """Sines and cosines of random frequencies, then three layers.

    Parameters
    ----------
    scale : float
        Standard deviation of the frequencies, in periods along an axis.
    width : int
        Features, and units of a layer.
    """

    def __init__(self, scale: float = 8.0, width: int = 128) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.randn(3, width // 2) * scale * 2 * math.pi)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
            torch.nn.Linear(width, 1),
        )  # fmt: skip

    def forward(self, coords: torch.Tensor) -> torch.Tensor:
        """Return values of shape (n, 1) at coordinates of shape (n, 3)."""
        phases = coords @ self.frequencies
        return self.layers(torch.cat([phases.sin(), phases.cos()], dim=1))


def fit(path: str, steps: int, batch_size: int) -> list[float]:
    """Train, print the error now and then, and return the mean squared error of each step."""
    device = "cuda" if resolve("auto").is_cuda else "cpu"
    torch.manual_seed(0)
    whole = create_sampler("zarr", device, source=path, seed=0)
    low, high = whole.value_range
    sampler = create_sampler("zarr", device, source=path, seed=0, range=(low, high))
    network = Network().to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
    errors = []
    for step, (coords, values) in enumerate(sample_dataset(sampler, batch_size, steps)):
        error = torch.nn.functional.mse_loss(network(coords), values)
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        errors.append(float(error.detach()))
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step:5}: error {math.sqrt(errors[-1]):.4f} of the range of values")
    return errors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", nargs="?", default="demo-out/mosaic.ome.zarr", help="OME-Zarr image. [%(default)s]")
    parser.add_argument("--steps", type=int, default=500, help="Training steps. [%(default)s]")
    parser.add_argument("--batch-size", type=int, default=2**16, help="Samples of a step. [%(default)s]")
    args = parser.parse_args()
    fit(args.path, args.steps, args.batch_size)
