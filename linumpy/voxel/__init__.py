"""Masks of voxels: boolean operations, morphology, electrode tracks, meshes; Warp on the GPU, SciPy on the CPU.

Bool volumes are (Z, Y, X); positions and sizes of voxels are (x, y, z) in µm, radii in µm. :func:`get_backend` chooses
the library that computes; :class:`VoxelSession` applies operations slab by slab to volumes larger than memory. The
package can be imported without Warp and CuPy.
"""

from linumpy.voxel.backends.choose import Backend, backend_of, get_backend
from linumpy.voxel.element import Element, ball
from linumpy.voxel.session import Flushed, VoxelSession

__all__ = ["Backend", "Element", "Flushed", "VoxelSession", "backend_of", "ball", "get_backend"]
