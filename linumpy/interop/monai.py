"""A transform for MONAI that reads images, or regions of them, by linumpy: :class:`ReadZarrd`.

In: dictionaries with paths, and optionally regions. Out: the dictionaries with tensors in place of paths, channels
first, with their position (``affine`` in mm, as from MONAI's other readers). It needs MONAI and PyTorch. Errors: those
of :func:`linumpy.open_image` and :func:`linumpy.read_zarr`; ``ValueError`` for an image of several times of which none
is selected.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
from monai.config import KeysCollection
from monai.data import MetaTensor
from monai.transforms import MapTransform
from numpy.typing import DTypeLike

from linumpy.interop.channels import read_channels
from linumpy.interop.export import affine_in_mm
from linumpy.io.ngff.axes import Spacing
from linumpy.io.source import Source
from linumpy.io.volume import open_volumes
from linumpy.plan.region import normalize_region


class ReadZarrd(MapTransform):  # type: ignore[misc]
    """Replace the paths of OME-Zarr images in a dictionary by their voxels.

    Parameters
    ----------
    keys : str or sequence of str
        Keys of the paths.
    region_key : str
        Key of the region to read: slices along the axes of space in voxels of the level. From a dictionary without the
        key, whole images are read.
    level : int
        Resolution level; 0 is the finest.
    channel, time : int, optional
        The entry to select, counted from 0; by default all channels. An image of several times needs `time`.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of level 0 in µm, if the metadata have none.
    dtype : dtype
        Data type of the tensors.
    allow_missing_keys : bool
        Whether dictionaries may lack some of the keys.

    Examples
    --------
    >>> read = ReadZarrd(["image", "label"])  # doctest: +SKIP
    >>> read({"image": "a.ome.zarr", "label": "a-labels.ome.zarr", "region": np.s_[0:64, :128, :128]})  # doctest: +SKIP
    """

    def __init__(
        self,
        keys: KeysCollection,
        *,
        region_key: str = "region",
        level: int = 0,
        channel: int | None = None,
        time: int | None = None,
        spacing: Spacing | None = None,
        dtype: DTypeLike = np.float32,
        allow_missing_keys: bool = False,
    ) -> None:
        super().__init__(keys, allow_missing_keys)
        self.region_key, self.level, self.dtype = region_key, level, dtype
        self.channel, self.time, self.spacing = channel, time, spacing

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the dictionary with the images in place of their paths."""
        result = dict(data)
        for key in self.key_iterator(result):
            result[key] = self._read(result[key], result.get(self.region_key))
        return result

    def _read(self, path: Source, region: Any) -> MetaTensor:
        volumes = open_volumes(path, self.level, channel=self.channel, time=self.time, spacing=self.spacing)
        if "t" in volumes.leading:
            raise ValueError(f"{volumes.name} has {volumes.leading_shape[0]} times: choose by time=")
        box = normalize_region(region, volumes.first.shape)
        channels = read_channels(volumes, tuple(map(slice, box.start, box.stop)), self.dtype)
        affine = affine_in_mm(volumes)
        # The columns are in the order x, y, z; the axes of the tensor are z, y, x.
        affine[:, :3] = affine[:, 2::-1] if len(box.start) == 3 else affine[:, [1, 0, 2]]
        affine[:3, 3] += affine[:3, : len(box.start)] @ box.start
        meta = {"filename_or_obj": str(path), "spatial_shape": np.array(box.box_shape), "original_channel_dim": 0}
        return MetaTensor(channels, affine=affine, meta={**meta, "space": "RAS"})
