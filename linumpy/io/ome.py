"""OME-Zarr images: resolution levels, axes, and voxel spacing in µm. And groups of images, such as plates.

Formats: https://ngff.openmicroscopy.org/0.4/ and https://ngff.openmicroscopy.org/0.5/, sections "multiscales", "plate"
and "well"; https://ngff.openmicroscopy.org/rfc/5/ for 0.6.
"""

from __future__ import annotations

import html
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import zarr

from linumpy.errors import LinumpyError, MetadataError, SourceError
from linumpy.io.layout import read_layout
from linumpy.io.metadata import member_names, open_member, open_members
from linumpy.io.ngff.axes import (
    Axis,
    Placement,
    Spacing,
    Unplaced,
    axes_of,
    compose_scales,
    datasets_of,
    place_levels,
    spatial_axes_of,
    transformations_of_levels,
)
from linumpy.io.ngff.collection import image_paths, kind_of, ome_attributes, why_not_image
from linumpy.io.ngff.coordinate_systems import TurnedLevelError, as_axes_and_scales, order_of_axes, with_unit_steps
from linumpy.io.ngff.versions import image_version
from linumpy.io.paths import METADATA_FILES, has_dots
from linumpy.io.source import Source, open_node, with_options
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.plan.read import format_nbytes, format_shape, html_table

log = logging.getLogger(__name__)

#: Maximum number of voxels of a level of which a plane is read for a picture; maximum side of the picture.
_THUMBNAIL_VOXELS, _THUMBNAIL_PIXELS = 2**24, 256


@dataclass(frozen=True)
class OmeZarrImage:
    """An OME-Zarr image.

    An image without units of length can be opened. Reading :attr:`spacing` or :attr:`origin` then raises a
    `MetadataError`, unless the caller passed the spacing; nothing else needs units.

    Attributes
    ----------
    name : str
        Path or URL of the image, for messages.
    version : str
        Version of NGFF.
    axes : tuple of Axis
        In the order of the arrays' axes.
    levels : tuple of zarr.Array[Any]
        Finest first.
    placements : tuple of Placement or Unplaced
        For each level, along the axes of type space, the voxel spacing and the position of the first voxel in µm; or
        why they are unknown.
    linumpy : mapping
        linumpy's own metadata: the group's attribute ``"linumpy"``, empty without one.
    scale, translation : tuple of tuple of float
        For each level the step between voxels and the position of the first voxel along all axes, in the units of the
        axes.
    group : zarr.Group
        The group of the image.
    multiscale : int
        Number of the multiscale image in the group.
    """

    name: str
    version: str
    axes: tuple[Axis, ...]
    levels: tuple[zarr.Array[Any], ...]
    placements: tuple[Placement | Unplaced, ...]
    linumpy: Mapping[str, Any]
    scale: tuple[tuple[float, ...], ...]
    translation: tuple[tuple[float, ...], ...]
    group: zarr.Group
    multiscale: int = 0

    @property
    def spacing(self) -> tuple[tuple[float, ...], ...]:
        """For each level the voxel spacing in µm along the axes of type space; `MetadataError` if it is unknown."""
        return tuple(placement.spacing for placement in self.placements)

    @property
    def origin(self) -> tuple[tuple[float, ...], ...]:
        """For each level the position of the first voxel's centre in µm along the axes of type space.

        Raises
        ------
        MetadataError
            The position is unknown.
        """
        return tuple(placement.origin for placement in self.placements)

    @property
    def system_order(self) -> tuple[int, ...]:
        """For each axis of the image's coordinate system the axis of the arrays; they differ only in NGFF 0.6."""
        multiscale = ome_attributes(self.group)["multiscales"][self.multiscale]
        return tuple(range(len(self.axes))) if "axes" in multiscale else order_of_axes(multiscale, self.name)

    @property
    def spatial_axes(self) -> tuple[int, ...]:
        """Indices of the axes of type space."""
        return spatial_axes_of(self.axes)

    def __str__(self) -> str:
        rows = [
            f"level {number}: {format_shape(array.shape)} {array.dtype}, {self._spacing_text(number)}"
            for number, array in enumerate(self.levels)
        ]
        return "\n".join([self._heading(), *rows])

    def _repr_html_(self) -> str:
        rows = [["level", "voxels", "dtype", "spacing", "chunks", "codecs", "decoded"]]
        for number, array in enumerate(self.levels):
            layout, voxels = read_layout(array), format_shape(array.shape)
            shard = f" in {format_shape(layout.object_shape)}" if layout.shard else ""
            chunks, codecs = format_shape(layout.chunk_shape) + shard, " → ".join(layout.codecs) or "none"
            spacing, size = self._spacing_text(number), format_nbytes(array.size * array.dtype.itemsize)
            rows.append([str(number), voxels, str(array.dtype), spacing, chunks, codecs, size])
        return f"<p>{html.escape(self._heading())}</p>{html_table(rows)}{_thumbnail(self)}"

    def _heading(self) -> str:
        axes = ", ".join(f"{axis.name} ({axis.unit or axis.type or 'no unit'})" for axis in self.axes)
        return f"{self.name} (NGFF {self.version}), axes {axes}"

    def _spacing_text(self, level: int) -> str:
        placement, unit = self.placements[level], "µm"
        if isinstance(placement, Placement):
            spacing = placement.spacing
        else:
            spacing, unit = tuple(self.scale[level][axis] for axis in self.spatial_axes), "(no unit)"
        return f"{' × '.join(f'{step:g}' for step in spacing)} {unit}"


def _thumbnail(image: OmeZarrImage) -> str:
    """Return a picture of the middle plane of a coarse level as HTML; empty if all are large, or it is broken."""
    from PIL import Image

    from linumpy.pictures import colored, data_url, percentiles, png

    shown = image.spatial_axes[-2:]
    fitting = [array for array in image.levels if 0 < array.size <= _THUMBNAIL_VOXELS and array.dtype.kind in "biuf"]
    if not fitting or len(shown) < 2:
        return ""
    wide = [array for array in fitting if max(array.shape[axis] for axis in shown) >= _THUMBNAIL_PIXELS // 2]
    array = wide[-1] if wide else fitting[0]
    middle = [n // 2 if axis in image.spatial_axes else 0 for axis, n in enumerate(array.shape)]
    index = tuple(slice(None) if axis in shown else i for axis, i in enumerate(middle))
    try:
        plane = read_chunks_on_host(array, index).astype(float)
    except (LinumpyError, OSError):
        return ""  # the table is shown all the same
    step = -(-max(plane.shape) // _THUMBNAIL_PIXELS)
    pixels = Image.fromarray(colored(plane[::step, ::step], percentiles(plane, (0.5, 99.5))))
    return f"<img alt='the middle plane of a coarse level' src='{data_url(png(pixels))}'>"


def read_omezarr(
    path: str | Path | zarr.Group, level: int = 0, *, spacing: Spacing | None = None
) -> tuple[zarr.Array[Any], tuple[float, ...] | None]:
    """Open one resolution level of an OME-Zarr image.

    The array keeps all axes of the image, such as t and c; :func:`linumpy.io.volume.open_volumes` selects from them.

    Parameters
    ----------
    path : str, Path or zarr.Group
        The image.
    level : int
        Resolution level; 0 is the finest.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of level 0 in µm along the axes of type space, if the metadata has none or a wrong one.

    Returns
    -------
    array : zarr.Array[Any]
        The level; no voxels are read.
    spacing : tuple of float or None
        Voxel spacing of the level in µm along its axes of type space; None if the metadata has no unit of length and
        the caller passes no spacing.

    Raises
    ------
    FileNotFoundError, SourceError, MetadataError, ValueError
        As :func:`open_image`; a level that does not exist is a `SourceError`.
    """
    image = open_image(path, spacing=spacing)
    check_level(level, len(image.levels), image.name)
    placement = image.placements[level]
    return image.levels[level], placement.spacing if isinstance(placement, Placement) else None


def open_level(group: zarr.Group, level: int) -> zarr.Array[Any]:
    """Open one resolution level of an OME-Zarr group, without reading its axes and units."""
    group = _image_group(group)
    name = str(group.store_path)
    datasets = datasets_of(_multiscale(group)[2], name)
    check_level(level, len(datasets), name)
    path = str(datasets[level]["path"])
    return _array(group, path, open_member(group, path))


def open_image(
    source: Source,
    *,
    spacing: Spacing | None = None,
    multiscale: int | str = 0,
    storage_options: Mapping[str, Any] | None = None,
) -> OmeZarrImage:
    """Open an OME-Zarr image.

    Parameters
    ----------
    source : str, Path or zarr.Group
        Path or URL of an image, such as ``"plate.zarr/B/03/0"`` of a plate, or its group. A group that bioformats2raw
        wrote is accepted if it has one image.
    spacing : sequence of float, or mapping of axis names to float, optional
        Voxel spacing of level 0 in µm along the axes of type space. The metadata then needs no units; the spacing of
        the other levels follows from their scales relative to level 0. The first voxel of level 0 keeps its position if
        the metadata has a unit of length; without one, positions are in the unit of the spacing. With neither, the
        image opens, and its spacing and origin are a `MetadataError` that names the axis.
    multiscale : int or str
        Number or name of the multiscale image, if the group has several.
    storage_options : mapping, optional
        Options for a URL, as obstore's ``from_url`` takes them, such as ``{"skip_signature": True}``: see
        docs/remote.md.

    Raises
    ------
    FileNotFoundError
        The path does not exist.
    SourceError
        The path is no OME-Zarr image. Or it is a plate, a well, labels, a scene or a group of bioformats2raw with
        several images, which the message lists and :func:`open_images` opens. Or there is no such multiscale image, or
        no array of a level.
    MetadataError
        The axes are not described; a transformation is missing or cannot be read.
    ValueError
        `spacing` does not fit the axes of type space; `storage_options` for a path that is no URL.
    """
    source = with_options(source, storage_options)
    group = _image_group(source if isinstance(source, zarr.Group) else _open_group(source))
    version, number, described = _multiscale(group, multiscale)
    name = str(group.store_path)
    turned = ""
    try:
        described = as_axes_and_scales(described, name)
    except TurnedLevelError as error:  # voxels can be read
        described, turned = with_unit_steps(described, name), str(error)
    axes = axes_of(described, name)
    datasets = datasets_of(described, name)
    paths = [str(dataset["path"]) for dataset in datasets]
    nodes = open_members(group, paths)
    levels = tuple(_array(group, path, node) for path, node in zip(paths, nodes, strict=True))
    if not levels:
        raise SourceError(f"{name}: the multiscale image names no datasets")
    for array in levels:
        if array.ndim != len(axes):
            raise MetadataError(f"{name}: {array.path} has {array.ndim} axes, but the metadata names {len(axes)}")
    chains = transformations_of_levels(described, datasets, spacing is not None, name)
    steps, origins = zip(*(compose_scales(chain, len(axes), name) for chain in chains), strict=True)
    placements = place_levels(steps, origins, axes, spacing, name)
    if turned and (spacing is None or len(levels) > 1):
        advice = "an array of one level, with its spacing=" if len(levels) > 1 else "spacing="
        placements = (Unplaced(f"{turned}; pass {advice} in µm along the array's own axes"),) * len(levels)
    attribute = group.attrs.get("linumpy")
    own_metadata = attribute if isinstance(attribute, Mapping) else {}
    return OmeZarrImage(name, version, axes, levels, placements, own_metadata, steps, origins, group, number)


@dataclass(frozen=True)
class Images:
    """The images of a plate, a well, a collection of bioformats2raw, a group of labels or a scene, opened on demand.

    ``images["B/03/0"]`` opens an image, or raises a `SourceError` if there is none. Iterating gives the paths in the
    order of the metadata.

    Attributes
    ----------
    name : str
        Path or URL of the group.
    kind : str
        Kind of the group in words, such as ``"a plate"``.
    group : zarr.Group
        The group.
    """

    name: str
    kind: str
    group: zarr.Group

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Paths of the images in the group, which for a plate takes reading the metadata of each well."""
        return tuple(image_paths(self.group))

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, path: str) -> OmeZarrImage:
        image = open_member(self.group, path) if isinstance(path, str) and path.strip("/") else None
        if isinstance(image, zarr.Group):
            return open_image(image)
        if path in self.paths:
            raise SourceError(f"no image {path!r}: the metadata of {self.name} name it, but no group is stored there")
        raise SourceError(f"no image {path!r}: {why_not_image(self.group, self.kind)}")


def open_images(source: str | Path | zarr.Group) -> Images:
    """Open a group of images: a plate, a well, a collection of bioformats2raw, labels or a scene.

    Parameters
    ----------
    source : str, Path or zarr.Group
        The group.

    Returns
    -------
    Images
        ``open_images("plate.zarr")["B/03/0"]`` is ``open_image("plate.zarr/B/03/0")``.

    Raises
    ------
    FileNotFoundError
        The path does not exist.
    SourceError
        The path is an image, or is no group whose metadata names images.
    """
    group = source if isinstance(source, zarr.Group) else _open_group(source)
    kind = kind_of(group)
    if kind is None:
        is_image = "multiscales" in ome_attributes(group)
        problem = "is an image: open_image opens it" if is_image else "has no metadata that names images"
        raise SourceError(f"{group.store_path} {problem}")
    return Images(str(group.store_path), kind, group)


def level_transforms(
    group: zarr.Group,
) -> tuple[tuple[Axis, ...], tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Read scales and translations of the levels of an OME-Zarr group, along all axes in their units, and the axes."""
    group = _image_group(group)
    name = str(group.store_path)
    multiscale = as_axes_and_scales(_multiscale(group)[2], name)
    axes, datasets = axes_of(multiscale, name), datasets_of(multiscale, name)
    chains = transformations_of_levels(multiscale, datasets, False, name)
    scales, translations = zip(*(compose_scales(chain, len(axes), name) for chain in chains), strict=True)
    return axes, scales, translations


def _open_group(path: Source) -> zarr.Group:
    node = open_node(path)
    if isinstance(node, zarr.Array):
        raise SourceError(f"{node.store_path} is a single array, not an OME-Zarr image: pass the group above it")
    return node


def _image_group(group: zarr.Group) -> zarr.Group:
    """Return the group of an image: the group itself, or the one image of a group that bioformats2raw wrote."""
    kind = kind_of(group)
    if kind is None:
        return group
    paths = list(itertools.islice(image_paths(group), 2))
    if "bioformats2raw" not in kind or len(paths) != 1:
        raise SourceError(why_not_image(group, kind))
    image = open_member(group, paths[0])
    if not isinstance(image, zarr.Group):
        raise SourceError(f"{group.store_path}: the image {paths[0]!r} that its metadata names does not exist")
    log.info("%s holds one image, %s", group.store_path, paths[0])
    return image


def check_level(level: int, count: int, name: str) -> None:
    """Raise `SourceError` for a resolution level that an image of `count` levels does not have."""
    if isinstance(level, bool) or not isinstance(level, int) or not 0 <= level < count:
        raise SourceError(f"{name} has no resolution level {level!r}: it has {count}, numbered from 0 for the finest")


def _multiscale(group: zarr.Group, wanted: int | str = 0) -> tuple[str, int, Mapping[str, Any]]:
    """Return the NGFF version of a group, and the number and the metadata of the wanted multiscale image."""
    holder = ome_attributes(group)
    multiscales = holder.get("multiscales")
    if not isinstance(multiscales, list) or not multiscales or not all(isinstance(m, Mapping) for m in multiscales):
        members, holds = member_names(group), ""
        if members is not None:
            shown = [name for name in members if name not in METADATA_FILES][:8]
            holds = f"; it holds {', '.join(shown) or 'nothing'}"
        raise SourceError(f"{group.store_path} is a Zarr group but no OME-Zarr image{holds}")
    names = [multiscale.get("name") for multiscale in multiscales]
    number = names.index(wanted) if isinstance(wanted, str) and wanted in names else wanted
    if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(names):
        listed = ", ".join(f"{n}{'' if name is None else f' {name!r}'}" for n, name in enumerate(names))
        raise SourceError(f"{group.store_path} has no multiscale image {wanted!r}: it has {listed}")
    version = image_version(group.attrs.asdict(), multiscales[number], str(group.store_path))
    return version, number, multiscales[number]


def _array(group: zarr.Group, path: str, node: zarr.Array[Any] | zarr.Group | None) -> zarr.Array[Any]:
    """Return the array of a resolution level, the member of a group at `path`."""
    if has_dots(path):
        raise MetadataError(f"{group.store_path}: the path {path!r} of a resolution level may not leave the image")
    if node is None:
        raise SourceError(f"{group.store_path}: the resolution level {path!r} does not exist")
    if not isinstance(node, zarr.Array):
        raise SourceError(f"{group.store_path}: the resolution level {path!r} is not an array")
    return node
