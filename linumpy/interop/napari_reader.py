"""napari's plugin: OME-Zarr images as multiscale layers, which are read plane by plane when they are shown.

In: a path that napari opens. Out: layers, as tuples of dask arrays for each resolution, their parameters and their
type: one for the image, which napari splits by channels, and one for each of its label images. Scales are in µm. The
manifest is ``napari.yaml``, an entry point of the package. napari itself is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zarr

from linumpy.errors import LinumpyError
from linumpy.interop.lazy import lazy_dask_array
from linumpy.io.carried import carried_from
from linumpy.io.ngff.axes import Placement
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.volume import select_volumes

Layer = tuple[list[Any], dict[str, Any], str]
"""Arrays of the resolutions, parameters of the layer, and its type."""


def get_reader(path: str | os.PathLike[str] | Sequence[str]) -> Callable[[Any], list[Layer]] | None:
    """Say whether a path is an image that linumpy opens: the function that reads it, or None.

    Parameters
    ----------
    path : str, path or sequence of these
        As napari passes it. Of several paths each must be an image.
    """
    try:
        for one in _paths(path):
            open_image(one)
    except (LinumpyError, OSError, ValueError):
        return None
    return read_layers


def read_layers(path: str | os.PathLike[str] | Sequence[str]) -> list[Layer]:
    """Return the layers of one or several images."""
    return [layer for one in _paths(path) for layer in _layers(open_image(one))]


def _paths(path: Any) -> list[str]:
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    return [os.path.expanduser(os.fspath(one)) for one in paths]


def _layers(image: OmeZarrImage) -> list[Layer]:
    carried = carried_from(select_volumes(image))
    name = carried.name or os.path.basename(image.name.rstrip("/"))
    layers = [_layer(image, name, "image" if carried.image_label is None else "labels")]
    for label in carried.labels:
        group = image.group[f"labels/{label}"]
        assert isinstance(group, zarr.Group)
        layers.append(_layer(open_image(group), label, "labels"))
    return layers


def _layer(image: OmeZarrImage, name: str, kind: str) -> Layer:
    channels = next((n for n, axis in enumerate(image.axes) if axis.type == "channel"), None)
    split = kind == "image" and channels is not None
    kept = [n for n in range(len(image.axes)) if not (split and n == channels)]
    scale, translate, units = list(image.scale[0]), list(image.translation[0]), [axis.unit for axis in image.axes]
    if isinstance(image.placements[0], Placement):
        for number, axis in enumerate(image.spatial_axes):
            scale[axis], translate[axis] = image.spacing[0][number], image.origin[0][number]
            units[axis] = "micrometer"
    about: dict[str, Any] = {
        "scale": [scale[n] for n in kept],
        "translate": [translate[n] for n in kept],
        "axis_labels": [image.axes[n].name for n in kept],
        "units": [units[n] or "pixel" for n in kept],
        "multiscale": True,
        "metadata": {"path": image.name},
    }
    data = [lazy_dask_array(array) for array in image.levels]
    if not split:
        return data, {"name": name, **about}, kind
    assert channels is not None
    count = image.levels[0].shape[channels]
    return data, {"channel_axis": channels, **about, **_channels(image, name, count)}, kind


def _channels(image: OmeZarrImage, name: str, count: int) -> dict[str, Any]:
    """Return the name, colour and contrast limits of each channel that omero's metadata have for all of them."""
    omero = ome_attributes(image.group).get("omero")
    listed = omero.get("channels") if isinstance(omero, Mapping) else None
    every = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    if len(every) != count:
        return {"name": [f"{name} {number}" for number in range(count)]}
    about: dict[str, Any] = {"name": [str(one.get("label", f"{name} {n}")) for n, one in enumerate(every)]}
    colors, windows = [one.get("color") for one in every], [one.get("window") for one in every]
    if all(isinstance(color, str) and len(color) == 6 for color in colors):
        about["colormap"] = [f"#{color}" for color in colors]
    if all(isinstance(window, Mapping) and {"start", "end"} <= window.keys() for window in windows):
        about["contrast_limits"] = [[window["start"], window["end"]] for window in windows]  # type: ignore[index]
    return about
