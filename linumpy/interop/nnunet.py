"""A reader and writer of OME-Zarr for nnU-Net: :class:`OmeZarrIO`, which importing this module registers.

In: paths of images, such as ``*.ozx``. Out: arrays and spacing in mm as nnU-Net expects them, and segmentations as
OME-Zarr images with the spacing and origin of their image. It needs nnunetv2. Errors: those of
:func:`linumpy.open_image` and :func:`linumpy.read_zarr`; ``ValueError`` for images of several times, and for images of
one case that differ in shape or spacing.

nnU-Net's commands search for readers only in its own folder ``imageio``: they need a file there with
``from linumpy.interop.nnunet import OmeZarrIO``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from nnunetv2.imageio import reader_writer_registry
from nnunetv2.imageio.base_reader_writer import BaseReaderWriter

from linumpy.interop.channels import read_channels
from linumpy.io.volume import Volumes, open_volumes
from linumpy.write.writer import write_omezarr

#: Spacing along z that nnU-Net uses for images without that axis.
_SPACING_WITHOUT_Z = 999.0


class OmeZarrIO(BaseReaderWriter):  # type: ignore[misc]
    """Reads level 0 of OME-Zarr images with two or three axes of space, all channels; writes label images."""

    supported_file_endings = (".ozx", ".ome.zarr", ".zarr")

    def read_images(self, image_fnames: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
        """Read the channels of a case, from one or several images of the same grid.

        Returns: (1) The channels of all files. (2) ``"spacing"`` in mm along z, y, x, which along z is 999 for an image
        without that axis; and ``"linumpy"``, the spacing and origin in µm, for :meth:`write_seg`.
        """
        case = [open_volumes(path) for path in image_fnames]
        images = [_read(volumes) for volumes in case]
        for volumes, image in zip(case, images, strict=True):
            if image.shape[1:] != images[0].shape[1:] or not np.allclose(volumes.spacing, case[0].spacing):
                raise ValueError(f"{volumes.name} has another shape or spacing than {case[0].name}, of the same case")
        spacing = tuple(step / 1000 for step in case[0].spacing)
        spacing = spacing if len(spacing) == 3 else (_SPACING_WITHOUT_Z, *spacing)
        grid = {"spacing": case[0].spacing, "origin": case[0].origin}
        return np.concatenate(images), {"spacing": spacing, "linumpy": grid}

    def read_seg(self, seg_fname: str) -> tuple[np.ndarray, dict[str, Any]]:
        """Read a segmentation as float32, (1, z, y, x), and its properties; see :meth:`read_images`."""
        return self.read_images((seg_fname,))

    def write_seg(self, seg: np.ndarray, output_fname: str, properties: dict[str, Any]) -> None:
        """Write a segmentation, (z, y, x), as uint8 or uint16 with the spacing and origin of its image."""
        grid = properties["linumpy"]
        voxels = np.ascontiguousarray(seg[0] if len(grid["spacing"]) == 2 else seg)
        voxels = voxels.astype(np.uint8 if voxels.max(initial=0) < 256 else np.uint16)
        options = {"origin": grid["origin"], "downsampling": "label", "overwrite": True}
        write_omezarr(output_fname, voxels, grid["spacing"], **options)


def _read(volumes: Volumes) -> np.ndarray:
    """Read all channels of an image as float32, (channel, z, y, x)."""
    if "t" in volumes.leading:
        raise ValueError(f"{volumes.name} has {volumes.leading_shape[0]} times: nnU-Net's images have one")
    image = read_channels(volumes, tuple(slice(0, n) for n in volumes.first.shape), np.float32)
    return image if image.ndim == 4 else image[:, None]


# nnU-Net chooses a reader by the suffixes of files from this list, or by its name among the registry's attributes.
_others = [reader for reader in reader_writer_registry.LIST_OF_IO_CLASSES if reader.__name__ != OmeZarrIO.__name__]
reader_writer_registry.LIST_OF_IO_CLASSES[:] = [*_others, OmeZarrIO]
reader_writer_registry.OmeZarrIO = OmeZarrIO
