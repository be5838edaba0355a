"""Maps between the coordinate systems of several images of NGFF 0.6 (RFC-5), from their metadata and from scenes.

In: two images, or an image and the name of a coordinate system. Out: a map of points
(:data:`~linumpy.plan.grid.point_map.PointMap`) between their coordinate systems, composed of the fewest
transformations, each in a direction that can be computed. Errors: :class:`~linumpy.errors.MetadataError` for systems
that do not exist or that no transformation connects, and for transformations that cannot be read.

A scene is a group above images. Its metadata have transformations between its own coordinate systems and those of the
images. Systems of the same name in two images are taken as one system only if the caller names that system.

Format: https://ngff.openmicroscopy.org/0.6/, sections "scene" and "coordinateTransformations metadata".
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zarr
from zarr.storage import LocalStore, StorePath

from linumpy.errors import LinumpyError, MetadataError, SourceError
from linumpy.io.metadata import open_member
from linumpy.io.ngff.axes import (
    compose_scales,
    datasets_of,
    mappings_in,
    transformation_list,
    transformations_of_levels,
)
from linumpy.io.ngff.collection import ome_attributes
from linumpy.io.ngff.coordinate_systems import Axes, Multiscale, as_axes_and_scales, referred, systems_of
from linumpy.io.ngff.transformations import FIELDS, Transformation, TransformationReader, is_invertible
from linumpy.io.ome import OmeZarrImage
from linumpy.io.source import local_store, open_at
from linumpy.plan.grid.point_map import Field, PointMap, compose

#: Names of interpolations between the vectors of a field, and their spline orders.
INTERPOLATION = {"nearest": 0, "linear": 1, "cubic": 3}

Node = tuple[str, str | None]
"""A coordinate system: the location of the group that has it, and its name; the name is None before NGFF 0.6."""

#: Number of levels of groups above an image that are searched for scenes.
_LEVELS_ABOVE = 8


class MapReader(TransformationReader):
    """Reads transformations, and opens fields of vectors, of which no voxels are read.

    A field is an image, or an array with a coordinate system, with one axis of type displacement or coordinate for the
    components of the vectors.
    """

    def field(self, transform: Transformation, kind: str) -> Field:
        """Open a field of displacements or coordinates."""
        path, interpolation = transform.get("path"), transform.get("interpolation") or "linear"
        if not isinstance(path, str):
            raise self.error(transform, "has no path of an array")
        if interpolation not in INTERPOLATION:
            raise self.error(transform, f"has the interpolation {interpolation!r}: {', '.join(INTERPOLATION)} are read")
        for described, array in self._described(transform, path):
            field_name = f"{self.name}, field {path!r}"
            plain = as_axes_and_scales(described, field_name)
            axes = plain.get("axes")
            if not isinstance(axes, list) or len(axes) != array.ndim:
                continue
            components = [number for number, axis in enumerate(axes) if axis.get("type") == FIELDS[kind]]
            if len(components) != 1:
                raise self.error(
                    transform,
                    f"has the path {path!r}, whose axes are not one of type {FIELDS[kind]!r}, and others",
                )
            (chain,) = transformations_of_levels(plain, datasets_of(plain, field_name), False, field_name)
            scale, translation = compose_scales(chain, len(axes), field_name)
            kept = [number for number in range(len(axes)) if number != components[0]]
            field = Field(
                array, components[0], tuple(scale[n] for n in kept), tuple(translation[n] for n in kept),
                kind == "displacements", INTERPOLATION[interpolation],
            )  # fmt: skip
            if field.relative and field.outputs != field.inputs:
                raise self.error(transform, f"has {field.outputs} components at points of {field.inputs} coordinates")
            if not all(step > 0 for step in field.scale):
                raise self.error(transform, f"has the scale {field.scale}, which is not positive")
            return field
        raise self.error(transform, f"has the path {path!r}, and no metadata describe its axes")

    def _described(self, transform: Transformation, path: str) -> Iterator[tuple[Multiscale, zarr.Array]]:
        """Yield the array of a field, with metadata that describe its axes in the form of an image of one level.

        They are the metadata of the image at the path, of the array itself, or of a group above it.
        """
        node = self.open(transform, path)
        if isinstance(node, zarr.Group):
            for multiscale in mappings_in(ome_attributes(node), "multiscales"):
                finest = datasets_of(multiscale, self.name)[:1]
                for dataset in finest:
                    array = self.open(transform, posixpath.join(path, str(dataset["path"])))
                    if isinstance(array, zarr.Array):
                        yield {**multiscale, "datasets": finest}, array
            return
        own = ome_attributes(node)
        if "coordinateSystems" in own:
            transformations = own.get("coordinateTransformations") or [{"type": "identity"}]
            output = (
                {"name": own["coordinateSystems"][0].get("name")} if mappings_in(own, "coordinateSystems") else None
            )
            level = [{"output": output, **transform} for transform in transformations[:1]]
            yield {**own, "datasets": [{"path": path, "coordinateTransformations": level}]}, node
        parts = path.split("/")
        for count in range(len(parts) - 1, -1, -1):
            above = self.group if count == 0 else self.open(transform, "/".join(parts[:count]))
            group_metadata = ome_attributes(above) if isinstance(above, zarr.Group) else {}
            for multiscale in mappings_in(group_metadata, "multiscales"):
                for dataset in datasets_of(multiscale, self.name):
                    if dataset["path"] == "/".join(parts[count:]):
                        yield {**multiscale, "datasets": [dataset]}, node


@dataclass(frozen=True)
class Edge:
    """A transformation from the coordinate system `start` to `end`, in the metadata of `group`."""

    start: Node
    end: Node
    transformation: Transformation
    group: zarr.Group


@dataclass
class Graph:
    """The coordinate systems of images and scenes, with their axes, connected by transformations."""

    axes: dict[Node, Axes] = field(default_factory=dict)
    edges: list[Edge] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, image: OmeZarrImage) -> Node:
        """Add the systems of an image and of scenes above it; return the system that its levels are mapped to."""
        self._add_group(image.group)
        for above in _groups_above(image.group):
            self._add_group(above)
        multiscale = ome_attributes(image.group)["multiscales"][image.multiscale]
        systems = systems_of(multiscale, image.name)
        node = _location(image.group), systems.intrinsic if systems else None
        self.axes.setdefault(node, [{"name": axis.name, "type": axis.type, "unit": axis.unit} for axis in image.axes])
        return node

    def connected(self, node: Node) -> set[Node]:
        """Return a system, and all systems that transformations in either direction connect with it."""
        nodes = {node}
        while added := {n for e in self.edges if {e.start, e.end} & nodes for n in (e.start, e.end)} - nodes:
            nodes |= added
        return nodes

    def connected_names(self, node: Node) -> str:
        """Return the names of a system and of all systems connected with it, as text for messages."""
        return ", ".join(sorted({repr(name) for _, name in self.connected(node) if name is not None})) or "none"

    def _add_group(self, group: zarr.Group) -> None:
        location = _location(group)
        if location in self._seen:
            return
        self._seen.add(location)
        ome, name = ome_attributes(group), str(group.store_path)
        holders = [image for image in mappings_in(ome, "multiscales") if "axes" not in image]
        if isinstance(ome.get("scene"), Mapping):
            holders.append(ome["scene"])
        for holder in holders:
            for system in mappings_in(holder, "coordinateSystems"):
                if isinstance(system.get("axes"), list):
                    self.axes[location, referred(system)] = system["axes"]
            for transformation in transformation_list(holder, name):
                ends = [self._node(group, location, transformation.get(end)) for end in ("input", "output")]
                self.edges.append(Edge(ends[0], ends[1], transformation, group))

    def _node(self, group: zarr.Group, location: str, reference: object) -> Node:
        """Return the system that a reference in the metadata of a group names; add the group of that system."""
        path = reference.get("path") if isinstance(reference, Mapping) else None
        if not isinstance(path, str) or path in ("", "."):
            return location, referred(reference)
        try:
            image = open_member(group, path)
        except SourceError:
            image = None
        if isinstance(image, zarr.Group):
            self._add_group(image)
        return posixpath.normpath(posixpath.join(location, path)), referred(reference)

    def path(self, start: Node, goal: Callable[[Node], bool], same: str | None = None) -> tuple[Node, PointMap] | None:
        """Find the shortest path (breadth first) from a system to a goal, by transformations that can be computed.

        `same` is the name of coordinate systems that are taken as one system, wherever they are.
        """
        paths: dict[Node, list[tuple[Edge, bool]]] = {start: []}
        queue = [start]
        for node in queue:
            if goal(node):
                return node, self._read(paths[node])
            if node[1] is not None and node[1] == same:
                for other in [n for n in self.axes if n[1] == same and n not in paths]:
                    self._check_same(node, other)
                    paths[other] = paths[node]
                    queue.append(other)
            for edge in self.edges:
                for begin, end, inverse in ((edge.start, edge.end, False), (edge.end, edge.start, True)):
                    if begin == node and end not in paths and (not inverse or is_invertible(edge.transformation)):
                        paths[end] = [*paths[node], (edge, inverse)]
                        queue.append(end)
        return None

    def _read(self, path: list[tuple[Edge, bool]]) -> PointMap:
        """Compose the transformations of a path, of which each may be inverted."""
        steps: PointMap = ()
        for edge, inverse in path:
            begin, name = edge.end if inverse else edge.start, str(edge.group.store_path)
            if begin not in self.axes:
                raise MetadataError(f"{name}: the coordinate system {begin[1]!r} is not described")
            read = MapReader(edge.group, name).read
            steps = compose(steps, read(edge.transformation, len(self.axes[begin]), inverse))
        return steps

    def _check_same(self, node: Node, other: Node) -> None:
        """Raise for two systems of one name that have different axes."""
        axes, other_axes = ([(axis.get("name"), axis.get("unit")) for axis in self.axes[n]] for n in (node, other))
        if axes != other_axes:
            raise MetadataError(
                f"{node[0]} and {other[0]} both have a coordinate system {node[1]!r}, with different axes: "
                f"{axes} and {other_axes}"
            )


def map_between(begin: OmeZarrImage, end: OmeZarrImage, system: str | None = None) -> PointMap | None:
    """Return the map from points of one image to points of another, along the axes of the systems of their levels.

    - `system`: name of a coordinate system that both images are mapped to, and through which the map goes.

    Returns empty for the same image twice; None if `system` is None and nothing connects the images.
    """
    graph = Graph()
    first, last = graph.add(begin), graph.add(end)
    if first == last:
        return ()
    if system is None:
        path = graph.path(first, lambda node: node == last)
        if path is None and last in graph.connected(first):
            raise MetadataError(
                f"{begin.name} and {end.name} are connected by transformations that cannot be computed in this "
                "direction: a field of vectors has no inverse"
            )
        return path and path[1]
    to_system = graph.path(first, lambda node: node[1] == system)
    if to_system is None:
        raise _system_error(begin, system, graph.connected_names(first))
    from_system = graph.path(to_system[0], lambda node: node == last, system)
    if from_system is None:
        raise _system_error(end, system, graph.connected_names(last))
    return compose(to_system[1], from_system[1])


def map_from_system(system: str, end: OmeZarrImage) -> tuple[PointMap, Axes]:
    """Return the map from points of a coordinate system to points of an image, and the axes of the system."""
    graph = Graph()
    last = graph.add(end)
    for node in [node for node in graph.axes if node[1] == system]:
        path = graph.path(node, lambda node: node == last)
        if path is not None:
            return path[1], graph.axes[node]
    raise _system_error(end, system, graph.connected_names(last))


def _system_error(image: OmeZarrImage, system: str, connected: str) -> MetadataError:
    return MetadataError(
        f"{image.name}: no transformation that can be computed leads from or to a coordinate system {system!r}; it is "
        f"connected with {connected}"
    )


def _location(group: zarr.Group) -> str:
    """Return the location of a group: a folder, or a store and a path in it."""
    store = group.store
    root = str(Path(store.root).resolve()) if isinstance(store, LocalStore) else str(store)
    return posixpath.normpath(posixpath.join(root, group.path))


def _groups_above(group: zarr.Group) -> Iterator[zarr.Group]:
    """Yield the groups above a group that have a scene."""
    for number in range(1, _LEVELS_ABOVE + 1):
        try:
            if isinstance(group.store, LocalStore):
                folder = Path(_location(group)).parents[number - 1]
                if not (folder / "zarr.json").is_file():
                    continue
                above = open_at(StorePath(local_store(folder)))
            elif len(parts := group.path.split("/") if group.path else []) >= number:
                above = open_at(StorePath(group.store, "/".join(parts[:-number])))
            else:
                return
            if isinstance(above, zarr.Group) and isinstance(ome_attributes(above).get("scene"), Mapping):
                yield above
        except (OSError, LinumpyError, IndexError):  # no group is there
            continue
