"""The images of a source with what is stored of them; what reading them found, as findings.

In: an open group or array. Out: :class:`Image`; array results and findings. Nodes that cannot be opened are findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zarr

from linumpy.arrays import to_host
from linumpy.errors import ChunkError, LinumpyError
from linumpy.gpu.read.reader import Reader
from linumpy.io.layout import read_layout
from linumpy.io.metadata import Node, member_names, open_member
from linumpy.io.ngff.axes import axes_of, compose_scales, datasets_of, mappings_in, transformations_of_levels
from linumpy.io.ngff.collection import image_paths, kind_of, ome_attributes
from linumpy.io.ngff.coordinate_systems import as_axes_and_scales
from linumpy.io.paths import METADATA_FILES
from linumpy.verification import levels as between
from linumpy.verification.chunks import LevelPlan
from linumpy.verification.findings import Finding, Proposal
from linumpy.verification.levels import Box, Link
from linumpy.verification.stored import Stored, grid_of, stored_chunks_of

#: Unknown ids of labels that are listed.
_MAX_IDS = 5


@dataclass(frozen=True, kw_only=True)
class Image:
    """Arrays that are read together: the levels of an image, finest first, or an array by itself.

    - `path`, `multiscale`: of the group below the source, and the number of the multiscale image in it.
    - `scale`, `translation`: of each level along all axes; empty where the metadata do not tell.
    - `stored`: for each level which chunks are stored.
    """

    path: str
    multiscale: int
    arrays: tuple[zarr.Array[Any], ...]
    levels: tuple[LevelPlan, ...]
    stored: tuple[Stored, ...]
    scale: tuple[tuple[float, ...], ...] = ()
    translation: tuple[tuple[float, ...], ...] = ()
    is_label: bool = False


def nodes_of(root: Node) -> tuple[dict[str, Node], list[Finding]]:
    """Return all groups and arrays by their paths below the source, and findings for those that cannot be opened."""
    nodes, findings, waiting = dict[str, Node](), list[Finding](), [("", root)]
    while waiting:
        path, node = waiting.pop()
        nodes[path] = node
        if isinstance(node, zarr.Array):
            continue
        for name in _members(node):
            below = f"{path}/{name}".lstrip("/")
            try:
                member = open_member(node, name)
            except (LinumpyError, OSError) as error:
                findings.append(_unreadable(below, error))
                continue
            if member is not None:
                waiting.append((below, member))
            elif name not in _named(node) and _has_objects(node, name):
                findings.append(_without_metadata(below))
    return dict(sorted(nodes.items())), findings


def _members(group: zarr.Group) -> list[str]:
    """Return the names of members: those that are stored, and those that metadata name."""
    listed = member_names(group) or ()
    shown = [name for name in listed if name not in METADATA_FILES and not name.startswith(".")]
    return list(dict.fromkeys([*shown, *_named(group)]))


def _named(group: zarr.Group) -> list[str]:
    """Return the paths of members that the NGFF metadata of a group name."""
    holder, names = ome_attributes(group), list[str]()
    multiscales = holder.get("multiscales")
    for multiscale in multiscales if isinstance(multiscales, list) else []:
        if isinstance(multiscale, Mapping):
            names += [str(dataset["path"]) for dataset in mappings_in(multiscale, "datasets") if "path" in dataset]
            names += ["labels"] if _has_labels(group) else []
    if kind_of(group) is not None and "plate" not in holder:
        names += image_paths(group)
    if isinstance(plate := holder.get("plate"), Mapping):
        names += [str(well["path"]) for well in mappings_in(plate, "wells") if "path" in well]
    return [name for name in dict.fromkeys(names) if name.strip("/") and "multiscales" not in name]


def _has_labels(group: zarr.Group) -> bool:
    try:
        return isinstance(open_member(group, "labels"), zarr.Group)
    except (LinumpyError, OSError):
        return True  # opening it says why


def _has_objects(group: zarr.Group, name: str) -> bool:
    """Return whether a member without metadata is a folder whose names look like chunks: numbers, or ``c``."""
    names = member_names(group, name) or ()
    return any(part == "c" or part.replace(".", "").isdecimal() for part in names)


def _unreadable(path: str, error: Exception) -> Finding:
    return Finding(
        "damaged", path, f"its metadata cannot be read: {error}",
        "nothing below it can be opened", "restore the metadata document from a copy, or write it again",
    )  # fmt: skip


def _without_metadata(path: str) -> Finding:
    return Finding(
        "damaged", path, "there are chunks and no metadata document",
        "no program can open this array", "restore its metadata document (zarr.json or .zarray), or delete it",
    )  # fmt: skip


def images_of(nodes: Mapping[str, Node]) -> tuple[list[Image], list[Finding], list[str]]:
    """Return the images among nodes, findings for arrays that no metadata name, and notes of what is not checked."""
    images, findings, notes, used = list[Image](), list[Finding](), list[str](), set[str]()
    for path, group in nodes.items():
        multiscales = ome_attributes(group).get("multiscales") if isinstance(group, zarr.Group) else None
        for number, multiscale in enumerate(multiscales if isinstance(multiscales, list) else []):
            paths = _level_paths(path, multiscale)
            arrays = {name: node for name in paths if isinstance(node := nodes.get(name), zarr.Array)}
            used.update(arrays)
            is_label = "image-label" in ome_attributes(group) or _parent(path).endswith("labels")
            scales = _scales(multiscale, path) if len(arrays) == len(paths) else ((), ())
            images += _readable(path, number, arrays, scales, is_label, notes)
    for path, node in nodes.items():
        if isinstance(node, zarr.Array) and path not in used:
            images += _readable(path, 0, {path: node}, ((), ()), False, notes)
            if isinstance(nodes.get(_parent(path)), zarr.Group) and "multiscales" in ome_attributes(
                nodes[_parent(path)]
            ):
                findings.append(_unnamed(path))
    return images, findings, notes


def _parent(path: str) -> str:
    return path.rpartition("/")[0] if path else "/"


def _level_paths(path: str, multiscale: Any) -> list[str]:
    datasets = mappings_in(multiscale, "datasets") if isinstance(multiscale, Mapping) else []
    return [f"{path}/{dataset['path']}".strip("/") for dataset in datasets if "path" in dataset]


def _unnamed(path: str) -> Finding:
    return Finding(
        "leftover", path, "the metadata of the image do not name this array",
        "it takes space, and programs do not show it: a level of an earlier pyramid, or of a writer that was stopped",
        "if it is a level, add it to the datasets of the multiscales; else delete it",
    )  # fmt: skip


def _scales(multiscale: Any, name: str) -> tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]]:
    """Return scales and translations of the levels; empty where the metadata do not tell them."""
    try:
        plain = as_axes_and_scales(multiscale, name)
        axes, datasets = axes_of(plain, name), datasets_of(plain, name)
        chains = transformations_of_levels(plain, datasets, False, name)
        scales, translations = zip(*(compose_scales(chain, len(axes), name) for chain in chains), strict=True)
    except (LinumpyError, ValueError, KeyError, TypeError, AttributeError):
        return (), ()  # a finding of the metadata
    return scales, translations


def _readable(
    path: str,
    number: int,
    arrays: Mapping[str, zarr.Array[Any]],
    scales: tuple[tuple[tuple[float, ...], ...], tuple[tuple[float, ...], ...]],
    is_label: bool,
    notes: list[str],
) -> Iterator[Image]:
    """Yield the image of those arrays that can be read, if there are any."""
    chosen = {}
    for name, array in arrays.items():
        if array.dtype.kind in "biufcV" and not array.dtype.hasobject:
            chosen[name] = array
        else:
            notes.append(f"{name or 'the source'}: {array.dtype} has elements of any length, which are not read")
    if not chosen:
        return
    layouts = [read_layout(array) for array in chosen.values()]
    grids = [grid_of(layout) for layout in layouts]
    named = zip(chosen.items(), layouts, grids, strict=True)
    stored = tuple(stored_chunks_of(array, name, layout, grid) for (name, array), layout, grid in named)
    for name, one in zip(chosen, stored, strict=True):
        if one.missing is None:
            notes.append(f"{name or 'the source'}: the store does not list its keys, so missing chunks are not counted")
    plans = zip(chosen, layouts, grids, strict=True)
    levels = tuple(LevelPlan(path=name, layout=layout, grid=grid) for name, layout, grid in plans)
    known = scales if len(chosen) == len(arrays) == len(scales[0]) else ((), ())
    yield Image(
        path=path, multiscale=number, arrays=tuple(chosen.values()), levels=levels, stored=stored,
        scale=known[0], translation=known[1], is_label=is_label,
    )  # fmt: skip


def reading(reader: Reader, plan: LevelPlan) -> Callable[[Box], np.ndarray | None]:
    """Return a function that reads a box of a level into host memory; chunks that cannot be read are zeros.

    The function returns None if none of them can be read.
    """

    def read(box: Box) -> np.ndarray | None:
        try:
            return np.asarray(to_host(reader.submit(plan.layout, box).result()))
        except ChunkError:
            voxels, is_read = np.zeros([part.stop - part.start for part in box], plan.layout.dtype), False
        for part in plan.grid.parts(box):
            with suppress(ChunkError):
                within = tuple(slice(p.start - b.start, p.stop - b.start) for p, b in zip(part, box, strict=True))
                voxels[within] = to_host(reader.submit(plan.layout, part).result())
                is_read = True
        return voxels if is_read else None

    return read


def linked(image: Image, reader: Reader) -> tuple[Image, list[Finding], list[Proposal]]:
    """Find out how each level was made of the finer one; return the image with links, and what is wrong with levels."""
    levels, findings, proposals = list(image.levels), list[Finding](), list[Proposal]()
    scale, translation = list(image.scale), list(image.translation)
    for number in range(1, len(levels)):
        fine, coarse = levels[number - 1], levels[number]
        if fine.layout.rank != coarse.layout.rank:
            continue
        link, problems = _link(image, number, reader, scale)
        findings += problems
        levels[number - 1] = replace(fine, link=link)
        if not scale or not link.offset:
            continue
        stated = [
            (b - a) / s for a, b, s in zip(translation[number - 1], translation[number], scale[number - 1], strict=True)
        ]
        # Some writers state scales that map the whole extent, n / m for n and m voxels, in place of the factor.
        extents = [n / m for n, m in zip(fine.layout.shape, coarse.layout.shape, strict=True)]
        measured = between.check_offset(link, stated, fine.layout.shape, coarse.layout.shape)
        steps = tuple(f * s for f, s in zip(link.factors, scale[number - 1], strict=True))
        ratios = [b / a for a, b in zip(scale[number - 1], scale[number], strict=True)]
        axes = zip(ratios, link.factors, extents, strict=True)
        is_scaled = link.method == "smooth" or all(
            min(f, e) <= r + 1e-3 * f and r - 1e-3 * f <= max(f, e) for r, f, e in axes
        )
        if measured is None and is_scaled:
            continue
        right = tuple(
            a + o * s for a, o, s in zip(translation[number - 1], measured or stated, scale[number - 1], strict=True)
        )
        findings.append(_misplaced(coarse.path, link, stated, measured, scale[number], steps, right))
        scale[number], translation[number] = (scale[number] if is_scaled else steps), right
        proposals.append(Proposal(image.path, image.multiscale, number, scale[number], right))
    return replace(image, levels=tuple(levels)), findings, proposals


def _link(image: Image, number: int, reader: Reader, scale: Sequence[tuple[float, ...]]) -> tuple[Link, list[Finding]]:
    """Return the link of a level to the finer one, and findings about its voxels."""
    fine, coarse = image.levels[number - 1], image.levels[number]
    shapes = fine.layout.shape, coarse.layout.shape
    ratios = [b / a if a else 1.0 for a, b in zip(scale[number - 1], scale[number], strict=True)] if scale else [
        n / max(m, 1) for n, m in zip(*shapes, strict=True)
    ]  # fmt: skip
    factors = between.factors_of(*shapes, ratios)
    if factors is None:
        sizes = " to ".join("×".join(map(str, shape)) for shape in shapes)
        return Link(factors=(), method="unknown", reason=f"{sizes} voxels are no whole factors"), []
    blocks = between.sample_blocks(reading(reader, fine), reading(reader, coarse), *shapes, factors)
    (link, samples), findings = between.find_link(blocks, factors), list[Finding]()
    if image.is_label and link.method not in ("stride", "picked") and (ids := between.ids_of_no_finer_level(samples)):
        findings.append(_averaged(coarse.path, fine.path, ids))
    elif link.method == "foreign" or (image.is_label and link.method == "unknown" and samples):
        findings.append(_foreign(coarse.path, fine.path))
    return link, findings


def _averaged(path: str, finer: str, ids: Sequence[Any]) -> Finding:
    shown = ", ".join(map(str, ids[:_MAX_IDS])) + (" …" if len(ids) > _MAX_IDS else "")
    return Finding(
        "suspicious", path, f"labels have {len(ids):,} ids in blocks where level {finer!r} has none of them: {shown}",
        "labels were averaged or interpolated: objects appear that do not exist",
        f"make this level again of level {finer!r}, by taking one voxel of each window",
    )  # fmt: skip


def _foreign(path: str, finer: str) -> Finding:
    return Finding(
        "suspicious", path, f"its voxels are not related to those of level {finer!r} where they were compared",
        "it shows something else than the finer level: a level of another image, or one that was not made again",
        f"make this level again of level {finer!r}",
    )  # fmt: skip


def _misplaced(
    path: str,
    link: Link,
    stated: Sequence[float],
    measured: Sequence[float] | None,
    scale: Sequence[float],
    steps: Sequence[float],
    translation: Sequence[float],
) -> Finding:
    texts, shown = [], [[float(f"{x:.9g}") for x in numbers] for numbers in (steps, translation)]
    if measured is not None:
        off = ", ".join(f"{(a - b) / f:+.3g}" for a, b, f in zip(stated, measured, link.factors, strict=True))
        texts.append(f"its metadata place it {off} of its voxels from where its voxels show ({link})")
    if not np.allclose(steps, scale, rtol=1e-3) and link.method != "smooth":
        texts.append(f"its scale is {list(scale)}, and its voxels show {list(steps)}")
    return Finding(
        "misplaced", path, "; ".join(texts),
        "the image seems to move when a viewer changes its resolution, and coordinates measured at this level are off",
        f"set its scale to {shown[0]} and its translation to {shown[1]}: `linum-verify SOURCE --repair --write` does",
    )  # fmt: skip
