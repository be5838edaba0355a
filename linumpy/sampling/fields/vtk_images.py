"""Sample images of VTK, one or several timesteps.

In: paths. Out: a field over the box of an array's voxels, which are the points of the image for an array of points, and
the cells for an array of cells. Voxel centres lie at (i + 0.5) / N, also if voxels are points. Channels are the
components of the array in the first file, then those in the next.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import numpy as np

from linumpy.arrays import Array
from linumpy.device import is_device_array
from linumpy.errors import SourceError
from linumpy.sampling.field import Field
from linumpy.sampling.files.vtk import read_vtk
from linumpy.sampling.host import HostVolume
from linumpy.sampling.volume import KEPT, DeviceVolume
from linumpy.sampling.voxel_field import finite_range

Path = str | os.PathLike[str]


def open_vtk(files: Path | Sequence[Path], field: str | None = None) -> ImageField:
    """Open an array of one or several images.

    `files`: ``.vti``, ``.vtr``, ``.vts``, their parallel kinds, or legacy ``.vtk`` files, in the order of time; all
    with as many voxels and components. `field`: name of the array in each file; by default the active scalars, or the
    first array.
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not paths:
        raise SourceError("files= names no file")
    steps = [read_vtk(path, field) for path in paths]
    for path, step in zip(paths, steps, strict=True):
        if step.shape != steps[0].shape:
            raise SourceError(
                f"{os.fspath(path)}: has (components, z, y, x) {step.shape}, but {os.fspath(paths[0])} {steps[0].shape}"
            )
    return ImageField(np.concatenate(steps))


class ImageField(Field):
    """Voxels of an image as a field.

    `voxels`, (C, Z, Y, X), lie in host memory; dtypes that kernels do not sample have become float32. Channels are the
    components of all timesteps.
    """

    def __init__(self, voxels: np.ndarray) -> None:
        self.voxels = voxels if voxels.dtype.str[1:] in KEPT else voxels.astype(np.float32)
        self.n_channels = len(voxels)
        self.value_range = finite_range(self.voxels)
        self._host = HostVolume(self.voxels, value_range=self.value_range)
        self._devices: dict[int, DeviceVolume] = {}
        self._lock = threading.Lock()

    def decode(self, coords: Array, out: Array) -> None:
        """Evaluate the field by trilinear interpolation; see :class:`linumpy.sampling.field.Field`."""
        if is_device_array(coords):
            self._on_device(int(coords.device.id)).decode(coords, out)  # type: ignore[attr-defined]  # of CuPy's array
        else:
            self._host.decode(coords, out)

    def _on_device(self, device: int) -> DeviceVolume:
        import cupy

        with self._lock, cupy.cuda.Device(device):
            if device not in self._devices:
                volume = DeviceVolume(cupy.asarray(self.voxels), value_range=self.value_range)
                cupy.cuda.get_current_stream().synchronize()  # once, so that other streams may read it
                self._devices[device] = volume
            return self._devices[device]
