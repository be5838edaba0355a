"""Choose the backend of voxel operations.

In: a name (``"auto"``, ``"cuda"``, ``"cpu"``) or an array. Out: a :class:`~linumpy.voxel.backends.operations.Backend`,
SciPy's for NumPy arrays or Warp's for CuPy arrays. Errors: ``GpuUnavailableError`` names the missing part.
"""

from __future__ import annotations

import importlib.util
import logging

from linumpy.arrays import DeviceName
from linumpy.device import is_device_array, requested_kind, why_no_cuda
from linumpy.errors import GpuUnavailableError
from linumpy.packages import install_line
from linumpy.voxel.backends.operations import Backend

log = logging.getLogger(__name__)


def get_backend(kind: DeviceName | None = None, *, transfer: bool = True) -> Backend:
    """Choose a backend.

    Parameters
    ----------
    kind : {"auto", "cuda", "cpu"}, optional
        ``"cuda"`` is Warp on CuPy arrays, ``"cpu"`` SciPy on NumPy arrays. ``"auto"`` is ``"cuda"`` where that is
        available, else ``"cpu"``, with a log line that gives the reason. By default the value of the environment
        variable ``LINUMPY_DEVICE``, and without it ``"auto"``.
    transfer : bool
        Whether a backend on a GPU also takes NumPy arrays: each call copies them to the device once, and the result
        back once, which is logged once. So a script with NumPy arrays runs with and without a GPU. Without it such
        arrays are a ``TypeError``.

    Raises
    ------
    ValueError
        Another kind.
    GpuUnavailableError
        ``"cuda"`` where a device, CuPy or Warp is missing; the message contains the command that installs it.
    """
    requested = requested_kind(kind)
    if requested == "cpu":
        return Backend()
    missing = why_no_cuda() or why_no_warp()
    if missing is None:
        from linumpy.voxel.backends.by_warp import TransferBackend, WarpBackend

        return TransferBackend() if transfer else WarpBackend()
    if requested == "cuda":
        raise GpuUnavailableError(missing)
    log.info("voxel operations run on the CPU, by SciPy: %s", missing)
    return Backend()


def backend_of(array: object) -> Backend:
    """Return Warp's backend for a CuPy array, SciPy's for any other; ``GpuUnavailableError`` if Warp is missing.

    It does not take arrays in the other memory, and the mask of a mesh is in its memory.
    """
    return get_backend("cuda" if is_device_array(array) else "cpu", transfer=False)


def why_no_warp() -> str | None:
    """Return why Warp cannot be used; None if it can."""
    if importlib.util.find_spec("warp") is None:
        return f"Warp is not installed: {install_line('warp')}"
    try:
        import warp  # noqa: F401
    except Exception as error:
        return f"Warp cannot be imported ({error}): {install_line('warp')}"
    return None
