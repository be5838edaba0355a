"""Time corrections of intensity, beside the same functions on the CPU.

Timed are the illumination of 20 tiles of 200×512×512 float32 (4 GiB; the CPU takes one depth, and its time is scaled to
all), the attenuation of 200×1024×1024 float32 (the CPU takes a sixteenth) and the bias field of 128³ voxels. Each
result is checked against the field that the data were made with.

For example:
  linum-benchmark correction --only illumination --runs 5
"""

from __future__ import annotations

import numpy as np

from benchmarks.arrays import scaled, suite_of_arrays, time_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench
from linumpy.correction.attenuation import attenuation
from linumpy.correction.bias_field import BiasOptions, estimate_bias_field
from linumpy.correction.illumination import estimate_illumination
from linumpy.device import to_host


def _field(height: int, width: int) -> np.ndarray:
    """Return a smooth field of mean 1: float32, (height, width)."""
    v, u = np.meshgrid(np.linspace(-1, 1, height), np.linspace(-1, 1, width), indexing="ij")
    field = np.exp(-0.4 * (v**2 + u**2)) + 0.1 * u
    return np.asarray(field / field.mean(), np.float32)


def _illumination(bench: Bench) -> None:
    xp = bench.xp
    depths, side = scaled(200, bench), scaled(512, bench)
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
    time_arrays(
        bench, "illumination", tiles, tiles.nbytes, lambda: estimate_illumination(tiles).flat, check,
        peer=lambda: estimate_illumination(part).flat, peer_name="the CPU", share=1 / depths,
    )  # fmt: skip


def _attenuation(bench: Bench) -> None:
    xp = bench.xp
    depth, side = scaled(200, bench), scaled(1024, bench)
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
    time_arrays(
        bench, "attenuation", volume, 2 * volume.nbytes, lambda: attenuation(volume, 5.0), check,
        peer=lambda: attenuation(part, 5.0), peer_name="the CPU", share=part.size / volume.size,
    )  # fmt: skip


def _bias(bench: Bench) -> None:
    xp = bench.xp
    side = scaled(128, bench)
    rng, truth = np.random.default_rng(0), np.broadcast_to(_field(side, side), (side, side, side))
    tissue = np.kron(rng.choice([60.0, 110.0, 180.0], (4, 4, 4)), np.ones((-(-side // 4),) * 3))[:side, :side, :side]
    host = (tissue * truth * rng.normal(1, 0.02, truth.shape)).astype(np.float32)
    image, options = xp.asarray(host), BiasOptions(levels=3)

    def check(result: Array) -> str:
        ratio = to_host(result) / truth
        worst = float(ratio.std() / ratio.mean())
        return f"the bias field is wrong by {worst:.1%} RMS" if not worst < 0.1 else ""

    time_arrays(
        bench, "bias field", image, 2 * host.nbytes, lambda: estimate_bias_field(image, None, options), check,
        peer=lambda: estimate_bias_field(host, None, options), peer_name="the CPU",
    )  # fmt: skip


SUITE = suite_of_arrays(
    __doc__, {"illumination": _illumination, "attenuation": _attenuation, "bias-field": _bias}, runs=5
)
