"""Volumes of the sampler's tests, and their values by SciPy."""

import numpy as np
from scipy import ndimage

from linumpy.gpu.philox import philox

DIMS = (19, 14, 9)  # x, y, z


def truth(voxels, coords, order, low_high=None):
    """SciPy in double precision, of exact coordinates."""
    voxels = voxels.astype(np.float64)
    if low_high:
        low, high = low_high
        voxels = np.clip((voxels - low) / (high - low), 0, 1) if high > low else voxels * 0
    shape = np.array(voxels.shape[1:])
    position = coords[:, ::-1].astype(np.float64) * shape - 0.5
    if order == 0:
        at = np.clip(np.floor(position + 0.5), 0, shape - 1).astype(int)
        return voxels[:, *at.T]
    position = np.clip(position, 0, shape - 1).T
    return np.stack([ndimage.map_coordinates(channel, position, order=order, mode="mirror") for channel in voxels])


def voxels_of(dtype, channels=1, dims=DIMS, seed=0):
    values = np.random.default_rng(seed).normal(60, 25, (channels, *dims[::-1]))
    return np.clip(values, 0, 120).astype({"float": "f4", "double": "f8"}.get(dtype, dtype))


def raw_file(folder, dtype="uint16", channels=1, offset=0, big=False, dims=DIMS):
    voxels = voxels_of(dtype, channels, dims)
    path = folder / "volume.raw"
    path.write_bytes(b"x" * offset + voxels.astype(voxels.dtype.newbyteorder(">" if big else "<")).tobytes())
    kwargs = {"filename": path, "dims": list(dims), "dtype": dtype, "n_channels": channels, "offset": offset}
    return voxels, kwargs | {"is_big_endian": big}


def independent(key, index):
    """Coordinates of independent samples, from the words of the generator."""
    index = np.asarray(index, np.uint64)
    words = philox((index & np.uint64(0xFFFFFFFF), index >> np.uint64(32), 0, 0), key)
    return np.stack([(word >> np.uint64(8)) * 2.0**-24 for word in words[:3]], 1).astype(np.float32)
