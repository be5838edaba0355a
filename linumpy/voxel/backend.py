"""What a backend of voxel operations offers, and which one is chosen.

In: a name (``"auto"``, ``"cuda"``, ``"cpu"``) or an array. Out: a :class:`Backend`. A backend computes where its arrays
are: SciPy's on NumPy arrays, Warp's on CuPy arrays; neither copies masks between host and device.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Protocol

from linumpy.arrays import Array
from linumpy.device import install_line, is_device_array, requested_kind, why_no_cuda
from linumpy.errors import GpuUnavailableError
from linumpy.voxel.grid import Grid
from linumpy.voxel.mesh import Mesh
from linumpy.voxel.scipy_backend import ScipyBackend

log = logging.getLogger(__name__)


class Backend(Protocol):
    """Operations on bool volumes (Z, Y, X); positions and sizes are in (x, y, z) µm.

    The methods are described in :class:`linumpy.voxel.operations.Operations`.
    """

    name: str

    @property
    def xp(self) -> Any:
        """The array module: NumPy or CuPy."""

    def boolean(self, operation: str, a: Array, b: Array, out: Array | None = None) -> Array:
        """Combine two masks."""

    def dilate(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None, border_value: bool = False
    ) -> Array:
        """Dilate a mask."""

    def erode(
        self, mask: Array, structure: Any = None, *, radius: Any = None, pitch: Any = None, border_value: bool = False
    ) -> Array:
        """Erode a mask."""

    def open(
        self,
        mask: Array,
        structure: Any = None,
        *,
        radius: Any = None,
        pitch: Any = None,
        border_value: bool | None = None,
    ) -> Array:
        """Erode, then dilate."""

    def close(
        self,
        mask: Array,
        structure: Any = None,
        *,
        radius: Any = None,
        pitch: Any = None,
        border_value: bool | None = None,
    ) -> Array:
        """Dilate, then erode."""

    def fill_holes(self, mask: Array) -> Array:
        """Fill what a mask encloses."""

    def subtract_swept_capsule(
        self, mask: Array, p0: Any, p1: Any, radius: Any, *, pitch: Any, origin: Any = (0, 0, 0), z_offset: int = 0
    ) -> Any:
        """Remove, in place, the voxels in capsules."""

    def subtract_swept_polyline(
        self, mask: Array, points: Any, radius: Any, *, pitch: Any, origin: Any = (0, 0, 0), z_offset: int = 0
    ) -> Any:
        """Remove, in place, the voxels along a polyline."""

    def voxelize_mesh(self, vertices: Any, triangles: Any, bbox: Any, pitch: Any, fill_holes: bool = True) -> Array:
        """Make a mask of a mesh."""

    def voxelize(self, mesh: Mesh, grid: Grid, *, fill_holes: bool = True) -> Array:
        """Make a mask of a mesh that is checked already."""

    def distance_transform(self, mask: Array, pitch: Any) -> Array:
        """Return distances to the nearest false voxel."""

    def connected_components(self, mask: Array, connectivity: int = 6) -> tuple[Array, int]:
        """Number the connected parts."""

    def marching_cubes(self, mask: Array, pitch: Any, origin: Any = (0, 0, 0)) -> tuple[Array, Array]:
        """Return the surface as a mesh."""


def get_backend(kind: str | None = None) -> Backend:
    """Choose what computes.

    Parameters
    ----------
    kind : {"auto", "cuda", "cpu"}, optional
        ``"cuda"`` is Warp on CuPy arrays, ``"cpu"`` SciPy on NumPy arrays. ``"auto"`` takes the first where it is
        available, and else the second, with one log line that gives the reason. By default the environment variable
        ``LINUMPY_DEVICE``, and without it ``"auto"``.

    Raises
    ------
    ValueError
        Another kind.
    GpuUnavailableError
        ``"cuda"`` where a device, CuPy or Warp is missing; the message has the line that installs it.
    """
    requested = requested_kind(kind)
    if requested == "cpu":
        return ScipyBackend()
    missing = why_no_cuda() or why_no_warp()
    if missing is None:
        from linumpy.voxel.warp_backend import WarpBackend

        return WarpBackend()
    if requested == "cuda":
        raise GpuUnavailableError(missing)
    log.info("voxel operations run on the CPU, by SciPy: %s", missing)
    return ScipyBackend()


def backend_of(array: Any) -> Backend:
    """Return the backend that works where an array is: Warp's for CuPy arrays, SciPy's for any other."""
    return get_backend("cuda" if is_device_array(array) else "cpu")


def why_no_warp() -> str | None:
    """Say why Warp cannot be used; None if it can."""
    if importlib.util.find_spec("warp") is None:
        return f"Warp is not installed: {install_line('warp')}"
    try:
        import warp  # noqa: F401
    except Exception as error:
        return f"Warp cannot be imported ({error}): {install_line('warp')}"
    return None
