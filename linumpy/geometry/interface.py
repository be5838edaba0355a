"""The surface of the tissue: on the CPU or the GPU, the result where the input was.

In: a NumPy or CuPy volume. Out: for each A-line the voxel at which tissue begins.
"""

from __future__ import annotations

from typing import Any

from linumpy.device import is_device_array, require_cuda, to_host
from linumpy.gpu import interface


def find_tissue_interface(
    vol: Any,
    s_xy: int = 15,
    s_z: float = 2,
    use_log: bool = True,
    order: int = 1,
    detect_cutting_errors: bool = False,
    depth_axis: int = -1,
    *,
    use_gpu: bool | None = None,
) -> Any:
    """Find for each A-line the voxel at which tissue begins.

    Parameters
    ----------
    vol, s_xy, s_z, use_log, order, detect_cutting_errors, depth_axis
        As for :func:`linumpy.gpu.interface.find_tissue_interface`.
    use_gpu : bool, optional
        True computes on the GPU, False on the CPU; by default where the volume is.

    Returns
    -------
    numpy.ndarray or cupy.ndarray of int32, rank 2
        Voxels along depth; on the device if the volume is, else on the host.

    Raises
    ------
    GpuUnavailableError
        `use_gpu` is True and there is no CUDA device.
    """
    arguments = (s_xy, s_z, use_log, order, detect_cutting_errors, depth_axis)
    on_device = is_device_array(vol)
    if use_gpu is None or use_gpu == on_device:
        return interface.find_tissue_interface(vol, *arguments)
    if use_gpu:
        return to_host(interface.find_tissue_interface(require_cuda().asarray(vol), *arguments))
    return require_cuda().asarray(interface.find_tissue_interface(to_host(vol), *arguments))
