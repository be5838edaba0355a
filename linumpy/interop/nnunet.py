"""nnU-Net's reader and writer of images for OME-Zarr: :class:`OmeZarrIO`, which importing this module registers.

In: paths of images, such as ``*.ozx``. Out: arrays and spacing in mm as nnU-Net asks for them, and segmentations as
OME-Zarr labels with the spacing and origin of their image. It needs nnunetv2, which looks for readers in its own folder
``imageio``: its commands, which do not import this module, need a file there with ``from linumpy.interop.nnunet import
OmeZarrIO``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nnunetv2.imageio import reader_writer_registry
from nnunetv2.imageio.base_reader_writer import BaseReaderWriter

from linumpy.gpu.zarr_io import read_zarr
from linumpy.io.volume import Volumes, open_volumes
from linumpy.write.writer import write_omezarr

#: nnU-Net's spacing along the first axis of an image without one.
_NO_DEPTH = 999.0


class OmeZarrIO(BaseReaderWriter):  # type: ignore[misc]
    """Reads level 0 of OME-Zarr images of two or three axes of space, with all channels; writes label images."""

    supported_file_endings = (".ozx", ".ome.zarr", ".zarr")

    def read_images(self, image_fnames: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
        """Read the channels of a case.

        Returns
        -------
        images : numpy.ndarray of float32, (channel, z, y, x)
            The channels of all files.
        properties : dict
            ``"spacing"`` in mm along z, y, x; of a section 999 along z.
        """
        every = [open_volumes(path) for path in image_fnames]
        images = [_read(volumes, np.float32) for volumes in every]
        for volumes, image in zip(every, images, strict=True):
            if image.shape[1:] != images[0].shape[1:] or not np.allclose(volumes.spacing, every[0].spacing):
                raise ValueError(f"{volumes.name} has another shape or spacing than {every[0].name}, of the same case")
        return np.concatenate(images), _properties(every[0])

    def read_seg(self, seg_fname: str) -> tuple[np.ndarray, dict[str, Any]]:
        """Read a segmentation, (1, z, y, x); the second result as :meth:`read_images`."""
        return self.read_images((seg_fname,))

    def write_seg(self, seg: np.ndarray, output_fname: str, properties: dict[str, Any]) -> None:
        """Write a segmentation, (z, y, x), where its image lies."""
        grid = properties["linumpy"]
        voxels = np.ascontiguousarray(seg[0] if len(grid["spacing"]) == 2 else seg)
        voxels = voxels.astype(np.uint8 if voxels.max(initial=0) < 256 else np.uint16)
        options = {"origin": grid["origin"], "downsampling": "label", "overwrite": True}
        write_omezarr(output_fname, voxels, grid["spacing"], **options)


def _read(volumes: Volumes, dtype: Any) -> np.ndarray:
    """Read all channels of an image as (channel, z, y, x)."""
    if "t" in volumes.leading:
        raise ValueError(f"{volumes.name} has {volumes.leading_shape[0]} times: nnU-Net's images have one")
    every = volumes.volumes.values()
    image = np.stack(
        [
            read_zarr(one.array, region=one.region(tuple(slice(0, n) for n in one.shape)), dtype=dtype, device="cpu")
            for one in every
        ]
    )
    return image if image.ndim == 4 else image[:, None]


def _properties(volumes: Volumes) -> dict[str, Any]:
    spacing = tuple(step / 1000 for step in volumes.spacing)
    grid = {"spacing": volumes.spacing, "origin": volumes.origin}
    return {"spacing": spacing if len(spacing) == 3 else (_NO_DEPTH, *spacing), "linumpy": grid}


# By the names of files, and by its own name, which nnU-Net looks for in the modules of its folder.
_others = [one for one in reader_writer_registry.LIST_OF_IO_CLASSES if one.__name__ != OmeZarrIO.__name__]
reader_writer_registry.LIST_OF_IO_CLASSES[:] = [*_others, OmeZarrIO]
reader_writer_registry.OmeZarrIO = OmeZarrIO
