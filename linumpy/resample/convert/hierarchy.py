"""Plan the copy of a Zarr hierarchy: the same groups and arrays, with other chunks, shards or codecs.

Arrays beside images that are no images, such as tables, are copied as they are. Errors: ``ValueError`` for sizes that
do not fit, :class:`~linumpy.errors.SourceError` for images whose elements are not numbers,
:class:`~linumpy.errors.MetadataError` for coordinates that the version cannot express.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import zarr
from zarr.core.sync import sync

from linumpy.arrays import is_small
from linumpy.errors import SourceError
from linumpy.io.codecs import encoding_like, zarr_codecs
from linumpy.io.metadata import Node, open_members, open_optional
from linumpy.io.ngff.axes import mappings_in
from linumpy.io.ngff.collection import image_paths, ome_attributes
from linumpy.io.ngff.coordinate_systems import as_axes_and_scales
from linumpy.io.ngff.versions import in_version
from linumpy.io.output.objects import Target, writable_store
from linumpy.io.paths import has_dots
from linumpy.io.source import describe_source
from linumpy.io.zarr_mode import host_zarr_context
from linumpy.plan.codecs import DEFAULT_CODEC, Encoding, parse_codec
from linumpy.plan.crops import propose
from linumpy.resample.convert.members import Members, copy_files, keys_of, members_of
from linumpy.write.new_image import ZARR_FORMATS

log = logging.getLogger(__name__)

#: Maximum number of arrays that a message lists.
_LISTED_ARRAYS = 8


@dataclass(frozen=True)
class Storage:
    """How arrays of the copy are stored. None means as in the source; chunks without shards mean no shards.

    - `chunks`, `shards`: sizes along the last axes; they are 1 along other axes.
    - `crop`: voxels along the last axes of the crops for which chunks and shards are chosen where `chunks` is None.
    """

    chunks: tuple[int, ...] | None = None
    shards: tuple[int, ...] | None = None
    codec: str | None = None
    crop: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ArrayCopy:
    """An array of the copy; `chunks` and `encoding` are of (inner) chunks.

    - `names`: names of the axes, for the metadata of zarr v3.
    - `order`: for each axis of the copy its index among the axes of the source, whose other axes have one entry; None
      if the axes are the same.
    """

    path: str
    source: zarr.Array
    chunks: tuple[int, ...]
    shards: tuple[int, ...] | None
    encoding: Encoding
    names: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Voxels of the copy."""
        return _in_order(self.source.shape, self.order)

    @property
    def source_stored(self) -> tuple[int, ...]:
        """Shape of a shard of the source, or else of a chunk, along the axes of the copy."""
        return _in_order(self.source.shards or self.source.chunks, self.order)

    @property
    def dtype(self) -> np.dtype:
        """Data type of a voxel, in this machine's byte order."""
        return np.dtype(self.source.dtype).newbyteorder("=")

    @property
    def nbytes(self) -> int:
        """Bytes of the voxels."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def stored(self) -> tuple[int, ...]:
        """Shape of a shard, or else of a chunk."""
        return self.shards or self.chunks

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of shards, or else of chunks, along each axis."""
        return tuple(-(-n // s) for n, s in zip(self.shape, self.stored, strict=True))


def _in_order(values: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    return tuple(values) if order is None else tuple(values[axis] for axis in order)


@dataclass(frozen=True)
class Hierarchy:
    """The copy of a group.

    - `groups`, `kept`: attributes of each group, and the arrays that are copied as they are, by their paths.
    - `files`: paths of the files that do not belong to Zarr.
    - `dropped`: descriptions of metadata that the copy's version of NGFF cannot hold.
    """

    group: zarr.Group
    zarr_format: Literal[2, 3]
    groups: Mapping[str, dict[str, Any]]
    arrays: tuple[ArrayCopy, ...]
    kept: Mapping[str, zarr.Array]
    files: tuple[str, ...]
    dropped: tuple[str, ...]

    def create(self, folder: Target) -> None:
        """Make the copy, without chunks of arrays to convert, and copy the files that do not belong to Zarr."""
        with host_zarr_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # zarr warns of codecs that are not in the specification
            groups = {}
            for path in sorted(self.groups, key=lambda path: path.count("/") + bool(path)):
                attributes = self.groups[path]
                groups[path] = zarr.create_group(
                    writable_store(folder / path), zarr_format=self.zarr_format, attributes=attributes,
                )  # fmt: skip
            for array in self.arrays:
                parent, _, name = array.path.rpartition("/")
                _create_array(groups[parent], name, array, self.zarr_format)
            for path, kept in self.kept.items():
                parent, _, name = path.rpartition("/")
                if kept.metadata.zarr_format == self.zarr_format:
                    copy_files(self.group, keys_of(self.group, path), folder)
                else:
                    _rewrite_array(groups[parent], name, kept, self.zarr_format)
        copy_files(self.group, self.files, folder)


def _create_array(group: zarr.Group, name: str, array: ArrayCopy, zarr_format: int) -> None:
    source = array.source
    options = _array_options(source, array.names, zarr_format)
    if zarr_format == 3:
        options["shards"] = array.shards
    group.create_array(
        name, dtype=array.dtype, chunks=array.chunks, fill_value=0 if source.fill_value is None else source.fill_value,
        compressors=zarr_codecs(array.encoding, zarr_format), **options,
    )  # fmt: skip


def _rewrite_array(group: zarr.Group, name: str, source: zarr.Array, zarr_format: int) -> None:
    """Write an array that is not converted in the other Zarr format, by zarr-python and in memory: it is a table."""
    try:
        options = _array_options(source, None, zarr_format)
        new = group.create_array(
            name, dtype=source.dtype, chunks=source.chunks, fill_value=source.fill_value, **options
        )  # fmt: skip
        if new.size:
            new[...] = source[...]
    except Exception as error:  # what zarr-python raises depends on the data type
        raise SourceError(
            f"{describe_source(source)} cannot be written in zarr v{zarr_format}: {error}. Keep the NGFF version, or "
            "remove this array"
        ) from error


def _array_options(source: zarr.Array, names: tuple[str, ...] | None, zarr_format: int) -> dict[str, Any]:
    """Return the options of ``create_array`` that hold shape, attributes and names of the axes of an array."""
    options: dict[str, Any] = {"chunk_key_encoding": {"name": "v2", "separator": "/"}}
    if zarr_format == 3:
        own = getattr(source.metadata, "dimension_names", None) or source.attrs.get("_ARRAY_DIMENSIONS")
        options = {"dimension_names": own or names}
    attributes = {k: v for k, v in source.attrs.asdict().items() if zarr_format == 2 or k != "_ARRAY_DIMENSIONS"}
    return {"shape": source.shape, "attributes": attributes, **options}


def plan_hierarchy(group: zarr.Group, storage: Storage, ngff_version: str | None) -> Hierarchy:
    """Plan the copy of a group with all its members."""
    name, members = describe_source(group), _members(group)
    nodes = members.nodes  # sorted: a stopped run identifies arrays by their order
    arrays = {path: node for path, node in nodes.items() if isinstance(node, zarr.Array)}
    if not arrays:
        raise SourceError(f"{name} holds no arrays to convert")
    # Some writers put attributes of NGFF 0.4, which is for zarr v2, into zarr v3: the format of the source counts.
    zarr_format = ZARR_FORMATS[ngff_version] if ngff_version is not None else group.metadata.zarr_format
    groups, dropped = {}, []
    for path, node in nodes.items():
        if isinstance(node, zarr.Group):
            attributes = node.attrs.asdict()
            if ngff_version is not None:
                attributes, lost = in_version(attributes, ngff_version, f"{name}/{path}".rstrip("/"))
                dropped += lost
            groups[path] = attributes
    names = dict(_axis_names(nodes))
    # Chunks for the axes of images do not fit tables of fewer axes.
    rank = max(len(storage.chunks or ()), len(storage.shards or ())) if names else 0
    kept = {
        path: array
        for path, array in arrays.items()
        if path not in names and (array.ndim < rank or _why_not_converted(array))
    }
    if len(kept) == len(arrays):
        kept = {}  # plan_array raises the error
    if kept:
        listed = ", ".join(list(kept)[:_LISTED_ARRAYS]) + (" …" if len(kept) > _LISTED_ARRAYS else "")
        log.warning("%s: copied as they are, since they hold no voxels to convert: %s", name, listed)
    copies = []
    for path, array in arrays.items():
        if path not in kept:
            space = sum(name.lower() in ("z", "y", "x") for name in names.get(path, ()))
            copy = plan_array(path, array, storage, zarr_format, space=space)
            copies.append(replace(copy, names=names.get(path)))
    return Hierarchy(
        group=group, zarr_format=zarr_format, groups=groups, arrays=tuple(copies), kept=kept, files=members.files,
        dropped=tuple(dict.fromkeys(dropped)),
    )  # fmt: skip


def _why_not_converted(array: zarr.Array) -> str:
    """Return why an array has no voxels, which are numbers of 1 to 8 bytes; empty if it has."""
    dtype = np.dtype(array.dtype)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or is_small(dtype):
        return f"is of {dtype}: arrays of bool, integers and floats of up to 8 bytes are converted"
    return "" if array.ndim and 0 not in array.shape else f"has shape {array.shape}, without voxels to convert"


def _members(group: zarr.Group) -> Members:
    """List the members of a group, or what the metadata name if the store of the group does not list its keys."""
    members = members_of(group)
    if members is not None:
        return members
    log.warning("%s: its store does not list it, so what its metadata name is copied", describe_source(group))
    nodes = dict(sorted(_named_nodes(group)))
    files = [f"{path}/METADATA.ome.xml" for path in nodes if path.rpartition("/")[2] == "OME"]
    prefix = f"{group.path}/".lstrip("/")
    return Members(nodes, tuple(file for file in files if sync(group.store.exists(f"{prefix}{file}"))))


def _named_nodes(group: zarr.Group) -> Iterator[tuple[str, Node]]:
    """Yield a group, and the groups and arrays that its metadata and theirs name, with the groups between them."""
    yield "", group
    ome = ome_attributes(group)
    named = [path for key in ("multiscales", "plate", "well", "scene") for path in _paths_in(ome.get(key))]
    named += [] if "multiscales" in ome else image_paths(group)
    parts = [path.strip("/").split("/") for path in named]
    paths = sorted({"/".join(names[: count + 1]) for names in parts for count in range(len(names))} - {""})
    optional = "labels" if "multiscales" in ome else "OME"  # NGFF defines it beside those named
    nodes = dict(zip(paths, open_members(group, paths), strict=True)) | {optional: open_optional(group, optional)}
    for path, node in nodes.items():
        if node is not None:
            yield path, node
        if isinstance(node, zarr.Group):
            yield from ((f"{path}/{below}", inner) for below, inner in _named_nodes(node) if below)


def _axis_names(nodes: Mapping[str, Node]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the path of each resolution of an image, and the names of its axes."""
    for path, node in nodes.items():
        for image in mappings_in(ome_attributes(node), "multiscales") if isinstance(node, zarr.Group) else []:
            plain = as_axes_and_scales(image, describe_source(node))
            axes = [axis.get("name") if isinstance(axis, Mapping) else axis for axis in plain.get("axes", ())]
            if axes and all(isinstance(axis, str) for axis in axes):
                for dataset in image.get("datasets", ()):
                    yield f"{path}/{dataset['path']}".lstrip("/"), tuple(map(str, axes))


def _paths_in(metadata: Any) -> Iterator[str]:
    """Yield the paths in metadata of NGFF, except those that lead out of the group."""
    if isinstance(metadata, Mapping):
        path = metadata.get("path")
        if isinstance(path, str) and not has_dots(path):
            yield path
    children = metadata.values() if isinstance(metadata, Mapping) else metadata if isinstance(metadata, list) else ()
    for child in children:
        yield from _paths_in(child)


def plan_array(
    path: str,
    array: zarr.Array,
    storage: Storage,
    zarr_format: int,
    *,
    order: tuple[int, ...] | None = None,
    space: int = 0,
) -> ArrayCopy:
    """Choose chunks, shards and encoding of one array of the copy.

    `order` is as in :class:`ArrayCopy`; `space` is the number of axes of space, each of which needs a size.
    """
    name = describe_source(array)
    if why_not := _why_not_converted(array):
        raise SourceError(f"{name} {why_not}")
    shape = _in_order(array.shape, order)
    shards = _along_last(storage.shards, len(shape), space, "shards", name)
    chunks = _along_last(storage.chunks, len(shape), space, "chunks", name)
    if (crop := _along_last(storage.crop, len(shape), space, "crop", name)) is not None and chunks is None:
        chunks, proposed = propose(shape, array.dtype.itemsize, crop)
        shards = proposed if shards is None and zarr_format == 3 else shards
    if shards is None and chunks is None and zarr_format == 3:
        shards = array.shards
    if shards is not None and zarr_format == 2:
        raise ValueError(f"shards={storage.shards}: NGFF 0.4 is zarr v2, which has none; leave them out, or pass 0.5")
    chunks = chunks or _in_order(array.chunks, order)
    if shards is None:
        chunks = tuple(map(min, chunks, shape))
    elif any(s % c for s, c in zip(shards, chunks, strict=True)):
        raise ValueError(f"shards={shards} are no whole numbers of chunks={chunks} of {name}: pass both")
    return ArrayCopy(path, array, chunks, shards, _encoding(array, storage.codec, zarr_format), order=order)


def _along_last(sizes: Sequence[int] | None, rank: int, space: int, label: str, name: str) -> tuple[int, ...] | None:
    """Check sizes along the last axes of an array, at least those of space, and prepend ones for the other axes."""
    if sizes is None:
        return None
    if not sizes or len(sizes) > rank or min(sizes) < 1:
        raise ValueError(f"{label}={tuple(sizes)}: {name} has {rank} axes, each of which takes a size from 1 on")
    if len(sizes) < space:
        raise ValueError(f"{label}={tuple(sizes)}: {name} has {space} axes of space, each of which takes a size")
    return (1,) * (rank - len(sizes)) + tuple(sizes)


def _encoding(array: zarr.Array, codec: str | None, zarr_format: int) -> Encoding:
    if codec is not None:
        return parse_codec(codec, array.dtype.itemsize)
    encoding = encoding_like(array)
    if encoding is None:
        log.warning("%s: its codecs have no name; the copy has %r", describe_source(array), DEFAULT_CODEC)
        encoding = parse_codec(DEFAULT_CODEC, array.dtype.itemsize)
    return replace(encoding, checksum=False) if zarr_format == 2 else encoding
