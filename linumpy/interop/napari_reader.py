"""Plugin for napari: OME-Zarr images as multiscale layers, of which napari reads only the shown planes.

In: a path that napari opens. Out: a layer for the image, which napari splits by channels, and a layer for each of its
label images. Scales and positions are in µm, or in the units of the axes if the image has no unit of length. Voxels are
dask arrays of NumPy blocks, whose graphs hold the path of a local array, or else the open array. The manifest is
``napari.yaml``, an entry point of the package. napari itself is not imported, dask inside functions. Errors: those of
:func:`linumpy.open_image`; ``ImportError`` without dask; when voxels are read, those of :func:`linumpy.read_zarr`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import zarr

from linumpy.errors import LinumpyError
from linumpy.interop.channels import channel_settings
from linumpy.interop.outer import LazyArray
from linumpy.io.carried import carried_from
from linumpy.io.layout import read_layout
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import Placement
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.source import path_of, written
from linumpy.io.volume import select_volumes
from linumpy.packages import needs

if TYPE_CHECKING:
    from dask.array import Array as DaskArray

#: Size in bytes up to which dask joins whole chunks into a block.
_BLOCK_NBYTES = 16 * 2**20


def lazy_dask_array(array: zarr.Array) -> DaskArray:
    """Return a dask array of NumPy blocks; a slice of it reads only its own voxels."""
    with needs("dask", "dask"):
        import dask
        import dask.array as da
    lazy = LazyArray(path_of(array) or array, read_layout(array))
    token = dask.base.tokenize(str(array.store_path), repr(array.metadata.to_dict()), written(array))
    with dask.config.set({"array.chunk-size": _BLOCK_NBYTES}):
        meta = np.empty((0,) * lazy.ndim, lazy.dtype)
        return da.from_array(lazy, chunks="auto", name=f"linumpy-{token}", asarray=False, meta=meta)


Paths = str | os.PathLike[str] | Sequence[str]
"""One or several paths, as napari passes them."""
Layer = tuple[list[Any], dict[str, Any], str]
"""Dask arrays of the resolution levels, parameters of the layer, and its type: ``"image"`` or ``"labels"``."""


def get_reader(path: Paths) -> Callable[[Paths], list[Layer]] | None:
    """Return the function that reads paths, if all of them are images that linumpy opens; otherwise None."""
    try:
        for image_path in _paths(path):
            open_image(image_path)
    except (LinumpyError, OSError, ValueError):
        return None
    return read_layers


def read_layers(path: Paths) -> list[Layer]:
    """Return the layers of one or several images."""
    return [layer for image_path in _paths(path) for layer in _layers(open_image(image_path))]


def _paths(path: Paths) -> list[str]:
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    return [os.path.expanduser(os.fspath(image_path)) for image_path in paths]


def _layers(image: OmeZarrImage) -> list[Layer]:
    """Return the layer of an image, and the layers of its label images."""
    carried = carried_from(select_volumes(image))
    name = carried.name or os.path.basename(image.name.rstrip("/"))
    layers = [_layer(image, name, "image" if carried.image_label is None else "labels")]
    for label in carried.labels:
        group = open_member(image.group, f"labels/{label}")
        assert isinstance(group, zarr.Group)
        layers.append(_layer(open_image(group), label, "labels"))
    return layers


def _layer(image: OmeZarrImage, name: str, kind: str) -> Layer:
    """Return the layer of one image; napari splits images, but not labels, by channels."""
    channel_axis = next((n for n, axis in enumerate(image.axes) if axis.type == "channel"), None)
    is_split = kind == "image" and channel_axis is not None
    kept = [n for n in range(len(image.axes)) if not (is_split and n == channel_axis)]
    scale, translate, units = list(image.scale[0]), list(image.translation[0]), [axis.unit for axis in image.axes]
    if isinstance(image.placements[0], Placement):
        for number, axis in enumerate(image.spatial_axes):
            scale[axis], translate[axis] = image.spacing[0][number], image.origin[0][number]
            units[axis] = "micrometer"
    parameters: dict[str, Any] = {
        "scale": [scale[n] for n in kept],
        "translate": [translate[n] for n in kept],
        "axis_labels": [image.axes[n].name for n in kept],
        "units": [units[n] or "pixel" for n in kept],
        "multiscale": True,
        "metadata": {"path": image.name},
    }
    data = [lazy_dask_array(array) for array in image.levels]
    if not is_split:
        return data, {"name": name, **parameters}, kind
    assert channel_axis is not None
    count = image.levels[0].shape[channel_axis]
    return data, {"channel_axis": channel_axis, **parameters, **_channel_parameters(image, name, count)}, kind


def _channel_parameters(image: OmeZarrImage, name: str, count: int) -> dict[str, Any]:
    """Return names of the channels, and colours and contrast limits if omero's metadata have them for all channels."""
    channels = channel_settings(ome_attributes(image.group).get("omero"))
    if len(channels) != count:
        return {"name": [f"{name} {number}" for number in range(count)]}
    names = [str(channel.get("label", f"{name} {number}")) for number, channel in enumerate(channels)]
    parameters: dict[str, Any] = {"name": names}
    colors, windows = [channel.get("color") for channel in channels], [channel.get("window") for channel in channels]
    if all(isinstance(color, str) and len(color) == 6 for color in colors):
        parameters["colormap"] = [f"#{color}" for color in colors]
    if all(isinstance(window, Mapping) and {"start", "end"} <= window.keys() for window in windows):
        parameters["contrast_limits"] = [[window["start"], window["end"]] for window in windows]  # type: ignore[index]
    return parameters
