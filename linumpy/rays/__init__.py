"""Training samples along rays for radiance fields: rays drawn from posed images and marched through an occupancy grid.

CuPy in, CuPy out; NumPy in, NumPy out, with the same random numbers and the same samples. Points are ordered (x, y, z).
"""

from linumpy.rays.compositing import composite, composite_backward
from linumpy.rays.images import Image, Images, PixelCDF
from linumpy.rays.occupancy import OccupancyGrid
from linumpy.rays.pcg32 import PCG32
from linumpy.rays.samples import RaySamples, generate_training_samples, march

__all__ = [
    "PCG32",
    "Image",
    "Images",
    "OccupancyGrid",
    "PixelCDF",
    "RaySamples",
    "composite",
    "composite_backward",
    "generate_training_samples",
    "march",
]
