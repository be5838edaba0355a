"""Typical mistakes of callers, which type checkers must find; checked by ``.ci/typed.py``, and never run."""

import numpy as np

import linumpy
from linumpy import OmeZarrWriter, convert_zarr, read_zarr, read_zarr_to_gpu, resample_zarr, stream
from linumpy.geometry.interface import find_tissue_interface
from linumpy.gpu import Reader

linumpy.read_zar_to_gpu("a.zarr")  # mistake
linumpy.gpu.read_zar("a.zarr")  # mistake
linumpy.stream.Loader()  # mistake
read_zarr(3.5)  # mistake
read_zarr("a.zarr", device="gpu")  # mistake
read_zarr("a.zarr", region="0:5")  # mistake
shape = read_zarr("a.zarr", return_report=True).shape  # mistake
read_zarr_to_gpu("a.zarr", backend="gds")  # mistake
shapes = read_zarr_to_gpu("a.zarr", device=[0, 1]).shape  # mistake
resample_zarr("a.zarr", "b.zarr", 25.0, device="gpu")  # mistake
convert_zarr("a.zarr", "b.zarr", ngff_version=0.5)  # mistake
OmeZarrWriter("b.zarr", (8, 8, 8), "u2", 25.0)  # mistake
find_tissue_interface(np.zeros((4, 4, 4)), definition="border", depth_axis=0)  # mistake
find_tissue_interface(np.zeros((4, 4, 4)), depth_axis=0, definition="edge", return_confidence=True).mean()  # mistake
Reader("cuda")  # mistake
Reader("cpu").submit("a.zarr", "0:5")  # mistake
stream.Sample("a.zarr", "0:5")  # mistake
stream.Config(batch_size="4", host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 20)  # mistake
stream.Config(batch_size=4, host_buffer_bytes=1 << 20, device_buffer_bytes=1 << 20, on_error="ignore")  # mistake

linumpy.stream.CropGrid("a.zarr", (8, 8, 8))
voxels: np.ndarray = read_zarr("a.zarr", region=np.s_[:5, ..., 3], device="cpu")
stream.Sample("a.zarr", np.s_[:5, 0:4, 3])
both: list[np.ndarray] = read_zarr_to_gpu("a.zarr", device=[0, 1])
