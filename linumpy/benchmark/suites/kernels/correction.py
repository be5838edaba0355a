"""Corrections of intensity on the device, beside the same functions on the CPU, which may do a part of the work."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Makers, kernel_case, kernel_suite, scaled
from linumpy.correction.attenuation import attenuation
from linumpy.correction.bias_field import BiasOptions, estimate_bias_field
from linumpy.correction.illumination import estimate_illumination
from linumpy.device import to_host

_DESCRIPTION = """Time corrections of intensity on this GPU, beside the same function on the CPU.

Timed are the illumination of 20 tiles of 200×512×512 float32 (4 GiB; the CPU takes one depth, and its time is scaled to
all), the attenuation of 200×1024×1024 float32 (the CPU takes a sixteenth) and the bias field of 128³ voxels. Each
result is checked against the field that the data were made with.

For example:
  linum-benchmark correction --only illumination --runs 5
"""


def _field(height: int, width: int) -> np.ndarray:
    """Return a smooth field of mean 1: float32, (height, width)."""
    v, u = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    field = np.exp(-0.4 * (v**2 + u**2)) + 0.1 * u
    return np.asarray(field / field.mean(), np.float32)


def _illumination(xp: ModuleType, scale: float) -> Case:
    depths, side = scaled(200, scale), scaled(512, scale)
    rng, truth = np.random.default_rng(0), _field(side, side)
    tissue = xp.asarray(
        rng.normal(1, 0.1, (20, 1, side, side)).astype(np.float32) * rng.uniform(0.6, 1.4, (20, 1, 1, 1))
    )
    light = xp.exp(xp.linspace(0, -2, depths)).astype(np.float32)[:, None, None]
    tiles = (tissue * xp.asarray(truth)).astype(np.float32) * light

    def check(flat: Array) -> str:
        worst = float(xp.sqrt(((flat / xp.asarray(truth) - 1) ** 2).mean(axis=(1, 2)).max()))
        return f"a flat field is wrong by {worst:.1%} RMS" if not worst < 0.05 else ""

    part = to_host(tiles[:, :1])
    return kernel_case(
        "illumination", tiles, lambda: estimate_illumination(tiles).flat, lambda: estimate_illumination(part).flat,
        check, tiles.nbytes, peer_share=1 / depths, peer_name="CPU",
    )  # fmt: skip


def _attenuation(xp: ModuleType, scale: float) -> Case:
    depth, side = scaled(200, scale), scaled(1024, scale)
    truth = 2 * _field(side, side)  # 1/mm
    z = np.arange(depth, dtype=np.float32)[:, None, None]
    volume = xp.exp(-0.01 * xp.asarray(z) * xp.asarray(truth)).astype(np.float32)

    def check(result: Array) -> str:
        # The method assumes that no light comes from below the range, so µ is too large near the end of the range.
        step = 1 - xp.exp(-0.01 * xp.asarray(truth))
        share = 1 - xp.exp(-0.01 * xp.asarray(truth) * depth)
        first = xp.log1p(step / (share - step)) * 100
        worst = float(xp.abs(result[0] / first - 1).max())
        return f"an attenuation is wrong by {worst:.1%}" if not worst < 0.01 else ""

    part = to_host(volume[:, : side // 16])
    return kernel_case(
        "attenuation", volume, lambda: attenuation(volume, 5.0), lambda: attenuation(part, 5.0), check,
        2 * volume.nbytes, peer_share=part.size / volume.size, peer_name="CPU",
    )  # fmt: skip


def _bias(xp: ModuleType, scale: float) -> Case:
    side = scaled(128, scale)
    rng, truth = np.random.default_rng(0), np.broadcast_to(_field(side, side), (side, side, side))
    tissue = np.kron(rng.choice([60.0, 110.0, 180.0], (4, 4, 4)), np.ones((-(-side // 4),) * 3))[:side, :side, :side]
    host = (tissue * truth * rng.normal(1, 0.02, truth.shape)).astype(np.float32)
    image, options = xp.asarray(host), BiasOptions(levels=3)

    def check(result: Array) -> str:
        ratio = to_host(result) / truth
        worst = float(ratio.std() / ratio.mean())
        return f"the bias field is wrong by {worst:.1%} RMS" if not worst < 0.1 else ""

    return kernel_case(
        "bias-field", image, lambda: estimate_bias_field(image, None, options),
        lambda: estimate_bias_field(host, None, options), check, 2 * host.nbytes, peer_name="CPU",
    )  # fmt: skip


#: The cases, in order.
MAKERS: Makers = {"illumination": _illumination, "attenuation": _attenuation, "bias-field": _bias}

SUITE = kernel_suite("correction", _DESCRIPTION, MAKERS, 5, "Shrink every axis.")
