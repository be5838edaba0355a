"""The engine ``"linumpy"`` of xarray: OME-Zarr images and Zarr arrays as datasets, read when their values are used.

In: a source. Out: a dataset with the variable ``image``, in host or device memory once it is read, and coordinates in
µm along the axes of space; or a tree with a dataset for each resolution level. Variables of arrays in local folders
hold only the path of the array, so that they can be sent to other processes. Errors: those of
:func:`linumpy.open_image` and :func:`linumpy.read_zarr`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray
import zarr
from xarray.backends import BackendArray, BackendEntrypoint
from xarray.core import indexing

from linumpy.arrays import DeviceName, ReadDevice
from linumpy.device import resolve
from linumpy.gpu.read.request import check_elements
from linumpy.interop.channels import channel_names
from linumpy.interop.outer import LazyArray
from linumpy.io.carried import other_attributes
from linumpy.io.layout import read_layout
from linumpy.io.ngff.axes import Spacing
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ome import OmeZarrImage, check_level, open_image
from linumpy.io.open import checked_level, open_source
from linumpy.io.source import Source, folder_of, open_node

log = logging.getLogger(__name__)

#: Name of the variable.
VARIABLE = "image"


class LazyZarrArray(LazyArray, BackendArray):
    """An array whose regions are read when xarray indexes it."""

    def __getitem__(self, key: indexing.ExplicitIndexer) -> Any:
        # xarray's adapter fails for empty slices with a negative step.
        if isinstance(key, (indexing.BasicIndexer, indexing.OuterIndexer)):
            return super().__getitem__(key.tuple)
        outer = indexing.IndexingSupport.OUTER
        return indexing.explicit_indexing_adapter(key, self.shape, outer, super().__getitem__)


class LinumpyBackend(BackendEntrypoint):
    """Opens OME-Zarr images and Zarr arrays for xarray."""

    description = "OME-Zarr images and Zarr arrays, read by linumpy into host or GPU memory"
    open_dataset_parameters = ("filename_or_obj", "drop_variables", "level", "spacing", "device")
    supports_groups = True

    def open_dataset(  # type: ignore[override]
        self,
        filename_or_obj: Source,
        *,
        drop_variables: str | Iterable[str] | None = None,
        level: int = 0,
        spacing: Spacing | None = None,
        device: int | DeviceName = "cpu",
    ) -> xarray.Dataset:
        """Open a resolution level of an image, or a single array; see :func:`xarray.open_dataset`.

        - `filename_or_obj` (Store, str): an OME-Zarr image, or an array of zarr format 2 or 3, which gets no
          coordinates.
        - `drop_variables`: variables and coordinates to leave out.
        - `level`: resolution level of an image; 0 is the finest.
        - `spacing`: voxel spacing of level 0 in µm, as for :func:`linumpy.open_image`.
        - `device` ("cpu", "cuda", "auto"): memory of the values: ``"cpu"`` for NumPy arrays; ``"cuda"`` for CuPy arrays
          on the current CUDA device, or its number for another device; ``"auto"`` for the current CUDA device if there
          is one, else the CPU. Coordinates are NumPy arrays. A CUDA device cannot be combined with `chunks`, for which
          xarray makes NumPy arrays: :func:`linumpy.gpu.zarr_to_dask` makes blocks on a device.

        Raises `FileNotFoundError`, `SourceError`, `MetadataError`, `ValueError`, `TypeError`, `GpuUnavailableError`: As
        :func:`linumpy.open_image` and :func:`linumpy.read_zarr`. An image without a unit of length needs `spacing`; a
        single array does not take it.
        """
        source, level = _expanded(filename_or_obj), checked_level(level)
        node = open_node(source)
        if not isinstance(node, zarr.Array):
            image = open_image(node, spacing=spacing)
            check_level(level, len(image.levels), image.name)
            return _without(_level_dataset(image, level, _device(device)), drop_variables)
        if spacing is not None:
            raise ValueError(f"spacing={spacing!r}: {node.store_path} is a single array, which has no coordinates")
        array = open_source(node, level)
        attributes = {key: value for key, value in array.attrs.items() if key != "_ARRAY_DIMENSIONS"}
        variable = _variable(array, _dimensions(array), attributes, _device(device))
        return _without(xarray.Dataset({VARIABLE: variable}), drop_variables)

    def open_datatree(  # type: ignore[override]
        self,
        filename_or_obj: Source,
        *,
        drop_variables: str | Iterable[str] | None = None,
        spacing: Spacing | None = None,
        device: int | DeviceName = "cpu",
    ) -> xarray.DataTree:
        """Open all levels of an image, as nodes ``"0"`` for the finest, ``"1"``, …; see :func:`xarray.open_datatree`.

        - `filename_or_obj`, `drop_variables`, `spacing`, `device`: As for :meth:`open_dataset`.
        """
        datasets = self.open_groups_as_dict(
            filename_or_obj, drop_variables=drop_variables, spacing=spacing, device=device
        )
        return xarray.DataTree.from_dict(datasets)

    def open_groups_as_dict(  # type: ignore[override]
        self,
        filename_or_obj: Source,
        *,
        drop_variables: str | Iterable[str] | None = None,
        spacing: Spacing | None = None,
        device: int | DeviceName = "cpu",
    ) -> dict[str, xarray.Dataset]:
        """Open all levels of an image by their paths in the tree; see :meth:`open_datatree`."""
        image = open_image(_expanded(filename_or_obj), spacing=spacing)
        target = _device(device)
        datasets = {"/": xarray.Dataset(attrs=other_attributes(image.group))}
        for level in range(len(image.levels)):
            datasets[f"/{level}"] = _without(_level_dataset(image, level, target), drop_variables)
        return datasets


def _expanded(source: Source) -> Source:
    """Replace the ``~`` of a path by the home folder, as xarray's own engines do."""
    return os.path.expanduser(source) if isinstance(source, (str, os.PathLike)) else source


def _without(dataset: xarray.Dataset, names: str | Iterable[str] | None) -> xarray.Dataset:
    dropped = [names] if isinstance(names, str) else list(names or ())
    return dataset.drop_vars(dropped, errors="ignore")


def _level_dataset(image: OmeZarrImage, level: int, device: ReadDevice) -> xarray.Dataset:
    """Make the dataset of one resolution level."""
    array, names = image.levels[level], tuple(axis.name for axis in image.axes)
    multiscale = ome_attributes(image.group)["multiscales"][0]
    title = multiscale.get("name")
    variable = _variable(array, names, {"long_name": title} if isinstance(title, str) and title else {}, device)
    coordinates = {}
    for axis, name in enumerate(names):
        if (coordinate := _coordinate(image, level, axis)) is not None:
            coordinates[name] = coordinate
    return xarray.Dataset({VARIABLE: variable}, coords=coordinates, attrs=other_attributes(image.group))


def _coordinate(image: OmeZarrImage, level: int, number: int) -> xarray.Variable | None:
    """Return the coordinates along one axis; None for channels without names and for axes of other types."""
    axis, size = image.axes[number], image.levels[level].shape[number]
    steps = np.arange(size, dtype=np.float64)
    if axis.type == "space":
        spatial = image.spatial_axes.index(number)
        origin, spacing = image.origin[level][spatial], image.spacing[level][spatial]
        return xarray.Variable(axis.name, origin + spacing * steps, {"units": "µm"})
    if axis.type == "time" or (axis.type is None and axis.name.lower() == "t"):
        values = image.translation[level][number] + image.scale[level][number] * steps
        return xarray.Variable(axis.name, values, {"units": axis.unit} if isinstance(axis.unit, str) else {})
    if axis.type == "channel" or (axis.type is None and axis.name.lower() == "c"):
        names = channel_names(ome_attributes(image.group).get("omero"))
        return xarray.Variable(axis.name, np.array(names)) if len(names) == size else None
    return None


def _dimensions(array: zarr.Array) -> tuple[str, ...]:
    """Return the names of the axes of a single array: from its metadata if all differ, or else ``dim_0`` and so on."""
    named = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS")
    names = tuple(named) if isinstance(named, (list, tuple)) else ()
    if len(names) == array.ndim == len(set(names)) and all(isinstance(name, str) and name for name in names):
        return names
    return tuple(f"dim_{number}" for number in range(array.ndim))


def _device(device: int | DeviceName) -> ReadDevice:
    """Return the memory to read into, as :func:`linumpy.interop.outer.read_outer` takes it, for an option `device`."""
    resolved = resolve(device) if isinstance(device, str) else resolve("cuda", device)
    return "cpu" if resolved.index is None else resolved.index


def _variable(
    array: zarr.Array, dimensions: tuple[str, ...], attributes: Mapping[str, object], device: ReadDevice
) -> xarray.Variable:
    """Return the variable of an array; with ``chunks={}`` its blocks are whole stored objects: chunks or shards."""
    layout = read_layout(array)
    check_elements(layout)
    if layout.unsupported is not None:
        log.warning("%s: read by zarr-python, not by linumpy's reader: %s", layout.name, layout.unsupported)
    folder = folder_of(array)
    lazy = indexing.LazilyIndexedArray(LazyZarrArray(array if folder is None else str(folder), layout, device))
    block_shape = [max(1, min(sizes)) for sizes in zip(layout.object_shape, layout.shape, strict=True)]
    blocks = dict(zip(dimensions, block_shape, strict=True))
    return xarray.Variable(dimensions, lazy, attributes, {"preferred_chunks": blocks}, fastpath=True)
