"""Random samples of volumes: pairs of coordinates and values, millions of them per millisecond on a GPU.

>>> from linumpy.sampling import create_sampler
>>> sampler = create_sampler("zarr", "cuda", source="brain.ome.zarr", seed=1)  # doctest: +SKIP
>>> coords, values = sampler.sample(2**22)  # doctest: +SKIP

Coordinates are float32 of shape (count, 3), in order (x, y, z), in [0, 1]. Values are float32, int32 for labels, of
shape (channels, count). The centre of voxel i of N lies at (i + 1/2) / N. On a device, work is queued on CuPy's current
stream, or on torch's current stream if an argument is a torch tensor.
"""

from linumpy.sampling.create import create_sampler
from linumpy.sampling.field import Field
from linumpy.sampling.sampler import decode, sample, sample_dataset

__all__ = ["Field", "create_sampler", "decode", "sample", "sample_dataset"]
