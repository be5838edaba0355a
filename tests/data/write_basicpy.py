"""Makes basicpy.npz: the flat field that basicpy finds in ``tiles(seed)``, as means over 4 × 4 pixels.

Run once, in an environment of its own: pip install basicpy==2.0.0 scipy; python tests/data/write_basicpy.py
"""

from pathlib import Path

import numpy as np
from scipy.ndimage import gaussian_filter

SEEDS = (0, 1)


def tiles(seed, count=20, size=128, texture=0.05):
    """Make tiles (count, size, size) with fibres and speckle, and their flat field."""
    rng = np.random.RandomState(seed)  # its numbers stay the same in all versions of NumPy
    v, u = np.meshgrid(np.linspace(-1, 1, size), np.linspace(-1, 1, size), indexing="ij")
    flat = np.exp(-0.7 * ((v - 0.2) ** 2 + 0.8 * (u + 0.1) ** 2)) + 0.1 * u
    flat /= flat.mean()

    def field(sigma):
        values = gaussian_filter(rng.rand(size, size), sigma)
        return (values - values.mean()) / values.std()

    made = []
    for _ in range(count):
        tissue = np.exp(texture * field(6) + 0.1 * field(1)) * (0.6 + 0.8 * rng.rand())
        tissue += 1.5 * (field(3) > 1.5)
        made.append(100 * tissue * flat + 2 * rng.randn(size, size))
    return np.asarray(made, np.float32), flat.astype(np.float32)


def reduced(field):
    return field.reshape(32, 4, 32, 4).mean(axis=(1, 3)).astype(np.float32)


if __name__ == "__main__":
    from basicpy import BaSiC

    fields = []
    for seed in SEEDS:
        basic = BaSiC()
        basic.fit(tiles(seed)[0])
        fields.append(reduced(basic.flatfield / basic.flatfield.mean()))
    np.savez_compressed(Path(__file__).with_name("basicpy.npz"), flat=np.stack(fields))
