"""The tissue surface of a mosaic of any size, from disk to disk.

In: an OME-Zarr mosaic. Out: a map of depths as OME-Zarr, and a picture of it. The mosaic is cut into columns, boxes of
the whole depth. Each column is read with a margin of half the width of the lateral mean, so that the map has no seams.
While one column is processed, the next is read and the map of the last is written.

The map has the lateral axes, spacing and origin of the mosaic, so a viewer aligns both. Its values are depths in µm as
float32, whatever the resolution of the mosaic. Divided by the spacing along depth they are whole voxels, unless
``definition="edge"``. In the logarithm, a voxel that the surface cuts through is more like tissue than its share of
tissue, so that the edge lies up to half a voxel too high, in resampled voxels for instance. That distance is measured
in a few columns, in which the edge is compared with the mean intensity, and is added to the map.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Unpack

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import to_host
from linumpy.geometry.interface import find_tissue_interface
from linumpy.gpu.oct.surface_filters import log_of_zero, log_statistics
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.step import ImageOptions, Step
from linumpy.mosaic.io.tiles import Box, box_nbytes, read_box
from linumpy.mosaic.options import SurfaceMethod
from linumpy.pictures import Picture

log = logging.getLogger(__name__)

#: Maximum voxels of a picture along an axis.
_PICTURE_VOXELS = 1024


def find_mosaic_surface(
    source: str | Path,
    output: str | Path,
    method: SurfaceMethod | None = None,
    *,
    level: int = 0,
    overlay: str | Path | None = None,
    **common: Unpack[ImageOptions],
) -> None:
    """Find the tissue surface of an OME-Zarr mosaic and write it as a map.

    Parameters
    ----------
    source : str or Path
        The mosaic: axes z, y and x in any order, and t and c.
    output : str or Path
        The map to write: an OME-Zarr image of float32, depth in µm from the mosaic's first voxel, with a map for each
        time and channel.
    method : SurfaceMethod, optional
        Parameters of the surface detection.
    level : int
        Resolution level of the mosaic.
    overlay : str or Path, optional
        A PNG, PDF or SVG to write: a section with the surface, and the map. Of several times or channels one must be
        selected. Not together with `distributed`, because this process can draw only voxels that it reads itself.
    **common
        :class:`~linumpy.mosaic.io.step.ImageOptions`, which also says what is raised.
    """
    method = method or SurfaceMethod()
    step = Step(output, **common)
    image = step.open(source, level, picture=overlay)
    if overlay is not None:
        if step.distributed is not None:
            raise ValueError("overlay= is drawn of voxels that this process reads: not together with distributed=")
        image.only("a picture shows one volume")
    first, second = image.lateral_axes
    unit = np.float32(image.spacing[image.depth_axis])
    zero_logs = {entries: zero_log_of(image, method, entries) for entries in image.volumes}
    offsets = {entries: edge_offset(image, method, entries, zero_log) for entries, zero_log in zero_logs.items()}
    with (
        step.work() as work,
        # omero has the display settings of intensities, and the map has depths.
        step.map_writer(image, work, finest=level == 0, dropped=("omero",)) as writer,
    ):
        sketch, device = None if overlay is None else _Sketch(work.xp, image, method), work.device
        size = step.column(image, work)
        log.info("%s: %s voxels in columns of %s", image.name, image.array.shape, size)

        def find(part: tuple[tuple[int, ...], Box], read: tuple[Array, tuple[slice, slice]]) -> Array:
            entries, box = part
            column, inside = read
            surface = surface_of(column, method, image.depth_axis, zero_logs[entries])[inside]
            if sketch is not None:
                sketch.add((box[first], box[second]), column, inside, surface)
            depth = surface.astype(np.float32)
            # 0 means that tissue begins at or before the first voxel.
            return (depth + np.float32(offsets[entries]) * (depth > 0)) * unit

        work(
            image.boxes(size),
            lambda part: read_column(image, part[1], method.s_xy // 2, device, part[0]),
            find,
            lambda part, depth: writer.write((*part[0], part[1][first], part[1][second]), depth),
            done=lambda part: step.advance(box_nbytes(image.array, part[1])),
        )
        if sketch is not None and overlay is not None:
            step.draw(sketch.picture(), overlay)


def read_column(
    image: MosaicImage, box: Box, rim: int, device: DeviceName, entries: tuple[int, ...] = ()
) -> tuple[Array, tuple[slice, slice]]:
    """Read a box of a mosaic as :meth:`MosaicImage.read_filled`, with a margin of `rim` voxels along the lateral axes.

    Returns: (1) The box with its margin, as far as the mosaic has it. (2) The lateral voxels of the box in `column`.
    """
    with_margin, inside = list(box), []
    for axis in image.lateral_axes:
        begin, end = max(0, box[axis].start - rim), min(image.array.shape[axis], box[axis].stop + rim)
        with_margin[axis] = slice(begin, end)
        inside.append(slice(box[axis].start - begin, box[axis].stop - begin))
    return image.read_filled(tuple(with_margin), device, entries), (inside[0], inside[1])


def zero_log_of(image: MosaicImage, method: SurfaceMethod, entries: tuple[int, ...] = ()) -> float | None:
    """Choose the value that replaces the logarithm of non-positive voxels, for all columns of a volume.

    It is computed from the positive voxels of five columns.

    Returns: None (the surface detection then chooses) without `use_log`, and if the five columns have no positive
    voxel. For ``"linumpy"`` also None, unless voxels are floats, some are not positive, and the mean logarithm of the
    positive ones is below 0: detection would take 0 as the logarithm of the others, which is brighter than tissue. A
    log line (warning) says so.
    """
    if not method.use_log or (method.definition == "linumpy" and image.array.dtype.kind != "f"):
        return None
    sample = np.concatenate([lines.reshape(-1, lines.shape[-1]) for lines in _samples(image, entries)])[None]
    count, mean, _ = log_statistics(np, sample)
    if not count or (method.definition == "linumpy" and (mean >= 0 or not (sample <= 0).any())):
        return None
    if method.definition == "linumpy":
        log.warning(
            "%s: most voxels are below 1, and some are 0 or below, which definition 'linumpy' would treat as 1, the "
            "brightest. They are treated as the darkest instead",
            image.name,
        )
    return float(log_of_zero(np, sample))


def _samples(image: MosaicImage, entries: tuple[int, ...]) -> list[np.ndarray]:
    """Return five columns of a volume, of up to 32 × 32 A-lines, with depth last."""
    columns = []
    for parts in ((2, 2), (1, 1), (1, 3), (3, 1), (3, 3)):  # in quarters of the lateral axes
        box = [slice(0, n) for n in image.array.shape]
        for axis, part in zip(image.lateral_axes, parts, strict=True):
            begin = image.array.shape[axis] * part // 4 // image.array.chunks[axis] * image.array.chunks[axis]
            box[axis] = slice(begin, min(begin + min(32, image.array.chunks[axis]), image.array.shape[axis]))
        columns.append(np.moveaxis(to_host(read_box(image.volumes[entries], tuple(box), "cpu")), image.depth_axis, -1))
    return columns


def edge_offset(
    image: MosaicImage, method: SurfaceMethod, entries: tuple[int, ...] = (), zero_log: float | None = None
) -> float:
    """Measure how far the edge of the logarithm lies above that of intensity, in voxels.

    It is the median over five columns; 0 for other surfaces, and where no column shows it.
    """
    if method.definition != "edge" or not method.use_log:
        return 0.0
    found = []
    for column in _samples(image, entries):
        surface = surface_of(column, method, 2, zero_log)
        offset = _offset_of(column.reshape(-1, column.shape[-1]), surface.ravel())
        found += [] if offset is None else [offset]
    return float(np.clip(np.median(found), -0.5, 0.5)) if found else 0.0


def _offset_of(lines: np.ndarray, edges: np.ndarray) -> float | None:
    """Measure the distance from edges to that of the mean A-line, aligned at the edges; None if it is unclear.

    With water on one side and tissue that is attenuated exponentially on the other, the sum of the shares of tissue
    across an edge is its distance from the last voxel, however it is blurred.
    """
    above, below, deep = 4, 3, 8  # voxels above the edge, below it, and of the tissue
    whole = np.floor(np.where(np.isfinite(edges), edges, 0) + 0.5).astype(int)
    valid = np.isfinite(edges) & (whole >= above) & (whole + deep < lines.shape[1])
    if valid.sum() < 64:
        return None
    planes = np.arange(-above, deep)
    profile = lines[valid][np.arange(valid.sum())[:, None], whole[valid][:, None] + planes].mean(axis=0, dtype=float)
    water, tissue = profile[:2].mean(), profile[planes >= below - 1]
    if not (tissue > 2 * water).all():
        return None
    slope, level = np.polyfit(planes[planes >= below - 1], np.log(tissue - water), 1)
    across = (planes >= -below) & (planes < below)
    share = (profile[across] - water) / np.exp(level + slope * planes[across])
    return float(below - 0.5 - share.sum() - (edges - whole)[valid].mean())


def surface_of(column: Array, method: SurfaceMethod, depth_axis: int, zero_log: float | None = None) -> Array:
    """Find the surface of a column, in voxels from its first plane: int32, or float32 for an edge.

    The map is in the memory (host or device) of the column.
    """
    return find_tissue_interface(
        column, method.s_xy, method.s_z, method.use_log, detect_cutting_errors=method.detect_cutting_errors,
        depth_axis=depth_axis, definition=method.definition, min_contrast=method.min_contrast,
        zero_log=zero_log,
    )  # fmt: skip


class _Sketch:
    """Collects the data of the picture, subsampled to its pixels, on the host or the device.

    - `surface` (rows, columns): the map.
    - `section` (Z, columns): voxels along the lateral row `row`.
    - `line`, `edge` (columns,): the surface along that row: by the chosen method, and as an edge.
    - `steps`: voxels from one pixel to the next, along the lateral axes.
    """

    def __init__(self, xp: ModuleType, image: MosaicImage, method: SurfaceMethod) -> None:
        self.image, shape = image, image.lateral_shape
        self.steps = [-(-n // _PICTURE_VOXELS) for n in shape]
        self.row = shape[0] // 2
        rows, columns = (-(-n // step) for n, step in zip(shape, self.steps, strict=True))
        self.surface = xp.zeros((rows, columns), np.float32)
        self.line = xp.zeros(columns, np.float32)
        self.edge = xp.zeros(columns, np.float32)
        self.method = method
        self.section = xp.zeros((image.array.shape[image.depth_axis], columns), image.array.dtype.newbyteorder("="))

    def add(self, lateral: tuple[slice, slice], column: Array, inside: tuple[slice, slice], surface: Array) -> None:
        """Copy the voxels of a column that the picture shows."""
        # The first voxel of the column that is shown, and the pixels of the column.
        begin = [-extent.start % step for extent, step in zip(lateral, self.steps, strict=True)]
        shown = [
            slice(-(-extent.start // step), -(-extent.stop // step))
            for extent, step in zip(lateral, self.steps, strict=True)
        ]
        self.surface[shown[0], shown[1]] = surface[begin[0] :: self.steps[0], begin[1] :: self.steps[1]]
        if lateral[0].start <= self.row < lateral[0].stop:
            row = self.row - lateral[0].start
            self.line[shown[1]] = surface[row, begin[1] :: self.steps[1]]
            line = inside[0].start + row
            edges = self._edges(column, line)[inside[1]]
            self.edge[shown[1]] = edges[begin[1] :: self.steps[1]]
            voxels = column[tuple(line if k == self.image.lateral_axes[0] else slice(None) for k in range(3))]
            voxels = voxels if self.image.depth_axis < self.image.lateral_axes[1] else voxels.T
            self.section[:, shown[1]] = voxels[:, inside[1]][:, begin[1] :: self.steps[1]]

    def _edges(self, column: Array, row: int) -> Array:
        """Find the edges along a row of a column, from the rows of its lateral mean."""
        first, half = self.image.lateral_axes[0], self.method.s_xy
        rows = slice(max(0, row - half), min(column.shape[first], row + half + 1))
        slab = column[tuple(rows if axis == first else slice(None) for axis in range(3))]
        depths = surface_of(slab, replace(self.method, definition="edge"), self.image.depth_axis)
        return depths[row - rows.start]

    def picture(self) -> Picture:
        """Return the picture."""
        from linumpy.mosaic.io.figures import draw_surface

        unit, lateral = self.image.spacing[self.image.depth_axis], self.image.lateral_spacing
        names = self.image.lateral_names.upper()
        return draw_surface(
            to_host(self.section),
            to_host(self.line),
            to_host(self.edge),
            to_host(self.surface) * unit,
            (unit, lateral[0] * self.steps[0], lateral[1] * self.steps[1]),
            self.row * lateral[0],
            (names[0], names[1]),
            source=PurePosixPath(self.image.name).name,
        )
