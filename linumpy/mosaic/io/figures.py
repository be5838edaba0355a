"""Pictures of the results of this package: surfaces, focal curvature, illumination, positions of tiles.

In: host arrays, and spacings in µm. Out: a :class:`linumpy.pictures.Picture`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from linumpy.pictures import Colors, Line, Panel, Picture, color_of, extent_um, percentiles

_SURFACE_COLOR, _OTHER_COLOR = "#ff7f0e", "#17becf"
_RED, _BLUE, _ORANGE, _PALE_RED, _PALE_BLUE = "#d62728", "#1f77b4", "#ff7f0e", "#ea9393", "#a8cbe4"
#: Approximate pixels of a plane from which percentiles are computed.
_PIXELS = 4096


def draw_section(
    section: np.ndarray,
    depths: np.ndarray,
    truth: np.ndarray | None,
    depth_spacing: float,
    lateral_spacing: float,
    position_um: float,
    *,
    source: str = "",
) -> Picture:
    """Draw an XZ section of a volume, and on it the surface that was found and, if it is known, the true surface.

    - `section` (Z, X): intensity; its logarithm is drawn.
    - `depths`, `truth` (X,): surface found and true surface, in voxels along Z; `truth` may be None.
    - `depth_spacing`, `lateral_spacing`: voxel spacing along Z and X in µm.
    - `position_um`: position of the section along Y in µm.
    - `source`: name of the image, for the title.
    """
    other = None if truth is None else (truth, "true surface")
    panel = _section(section, depths, other, (depth_spacing, lateral_spacing), position_um, ("Y", "X"), 6.0)
    return Picture(((panel,),), source)


def _section(
    section: np.ndarray,
    depths: np.ndarray,
    other: tuple[np.ndarray, str] | None,
    spacing: tuple[float, float],
    position_um: float,
    names: tuple[str, str],
    max_height: float,
) -> Panel:
    """Return a section with the surface found, and with `other`: another surface and its label.

    `names` are the names of the lateral axes: the axis that `position_um` is on, and the axis of the section.
    """
    depth, width = extent_um(section.shape, spacing)
    # Values below the first percentile of those above 0 are raised to it, since 0 has no logarithm.
    finite = np.where(np.isfinite(section), section, 0).astype(np.float64)
    positive = finite[finite > 0]
    shown = np.log10(np.maximum(finite, np.percentile(positive, 1) if positive.size else 1.0))
    x = (np.arange(section.shape[1]) + 0.5) * spacing[1]
    found = Line(x, (depths + 0.5) * spacing[0], _SURFACE_COLOR, "surface found")
    others = () if other is None else (Line(x, (other[0] + 0.5) * spacing[0], _OTHER_COLOR, other[1], width=4.0),)
    return Panel(
        title=f"{names[1]}Z section at {names[0]} = {position_um:g} µm",
        x_label=f"{names[1]} (µm)",
        y_label="depth Z (µm)",
        size=(7.2, min(max_height, max(1.8, 7.2 * depth / width))),
        x_limits=(0, width),
        y_limits=(0, depth),
        image=shown,
        colors=Colors(percentiles(shown, (1, 99.8)), "log₁₀ intensity", "gray"),
        lines=(*others, found),
        has_scale_bar=True,
    )


def draw_depth_map(depth_um: np.ndarray, spacing: tuple[float, ...], *, source: str = "") -> Picture:
    """Draw a map of depths.

    - `depth_um` (Y, X): depth in µm.
    - `spacing` (float, float): voxel spacing along Y and X in µm.
    - `source`: name of the image, for the title.
    """
    return Picture(((_depth_map(depth_um, spacing, "Depth of the tissue surface", ("Y", "X")),),), source)


def _depth_map(
    depth_um: np.ndarray, spacing: tuple[float, ...], title: str, names: tuple[str, str], lines: tuple[Line, ...] = ()
) -> Panel:
    extent = extent_um(depth_um.shape, spacing)
    size = 7.2, min(9.0, max(2.2, 7.2 * extent[0] / extent[1]))
    return _map_panel(depth_um, extent, percentiles(depth_um, (0.5, 99.5)), "depth (µm)", names, title, size, lines)


def _map_panel(
    values: np.ndarray,
    extent: tuple[float, ...],
    limits: tuple[float, float],
    label: str,
    names: tuple[str, str],
    title: str,
    size: tuple[float, float],
    lines: tuple[Line, ...] = (),
) -> Panel:
    """Return a map with a scale bar and a colour bar; `extent` is its height and width in µm."""
    return Panel(
        title=title,
        x_label=f"{names[1]} (µm)",
        y_label=f"{names[0]} (µm)",
        size=size,
        x_limits=(0, extent[1]),
        y_limits=(0, extent[0]),
        image=values,
        colors=Colors(limits, label),
        lines=lines,
        has_scale_bar=True,
    )


def draw_surface(
    section: np.ndarray,
    depths: np.ndarray,
    edge: np.ndarray,
    depth_um: np.ndarray,
    spacing: tuple[float, float, float],
    position_um: float,
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Picture:
    """Draw a section of a mosaic with the surface on it, and a map of depths below it.

    - `section`, `depths`, `position_um`, `source`: As for :func:`draw_section`.
    - `edge` (X,): depth of the edge in voxels along Z; it is drawn too if it differs from `depths`.
    - `depth_um` (Y, X): depth of the surface in µm.
    - `spacing` (float, float, float): voxel spacing (Z, Y, X) in µm.
    - `names` (str, str): names of the lateral axes, in the order of `depth_um`.
    """
    other = None if np.array_equal(depths, edge, equal_nan=True) else (edge, "edge")
    above = _section(section, depths, other, (spacing[0], spacing[2]), position_um, names, 4.5)
    here = Line(np.array(above.x_limits), np.full(2, position_um), "#ffffff", style="--", width=1.5)
    title = "Depth of the tissue surface (dashed: the section above)"
    return Picture(((above,), (_depth_map(depth_um, spacing[1:], title, names, (here,)),)), source)


def draw_focal_curvature(
    mean_um: np.ndarray,
    focal_um: np.ndarray,
    tissue_um: np.ndarray,
    spacing: tuple[float, float],
    title: str,
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Picture:
    """Draw maps of the mean tile's surface and of the fitted focal curvature, and profiles through the tile's middle.

    - `mean_um` (height, width): depth of the mean tile's surface less a plane, in µm; NaN where unknown. The figure
      subtracts the median distance from the fit.
    - `focal_um`, `tissue_um` (height, width): fitted depths of the focal curvature and of the curvature of the tissue,
      in µm.
    - `spacing` (float, float): lateral voxel spacing in µm.
    - `title`: title of the map of the mean tile.
    - `names` (str, str): names of the lateral axes.
    - `source`: name of the image, for the title.
    """
    fit = focal_um + tissue_um
    shown = mean_um - np.nanmedian(mean_um - fit)  # the absolute depth of the mean tile has no meaning
    height, width = extent_um(mean_um.shape, spacing)
    of_tile = percentiles(shown, (0.5, 99.5))
    limits = float(min(of_tile[0], focal_um.min())), float(max(of_tile[1], focal_um.max()))
    size = 3.8, min(8.0, max(1.8, 3.8 * height / width))
    maps = [
        _map_panel(values, (height, width), limits, "depth (µm)", names, text, size)
        for values, text in ((shown, title), (focal_um, "focal curvature, removed"))
    ]
    middle = mean_um.shape[0] // 2, mean_um.shape[1] // 2
    lines: list[Line] = []
    for axis, (name, step, colors) in enumerate(
        zip(names, spacing, ((_RED, _PALE_RED), (_BLUE, _PALE_BLUE)), strict=True)
    ):
        x = (np.arange(mean_um.shape[axis]) + 0.5) * step
        along = [np.take(values, middle[1 - axis], axis=1 - axis) for values in (shown, fit, focal_um)]
        lines += [
            Line(x, along[0], colors[1], f"mean tile along {name}", ".", 2.5),
            Line(x, along[1], colors[0], f"fit along {name}: focal and tissue"),
            Line(x, along[2], colors[0], f"focal curvature along {name}", "--"),
        ]
    profiles = _plot(
        lines, (0, max(height, width)), "position in the tile (µm)", "deeper than the middle (µm)",
        "through the middle of the tile", (4.8, size[1]), is_depth=True,
    )  # fmt: skip
    return Picture(((*maps, profiles),), source)


def _plot(
    lines: Sequence[Line],
    x_limits: tuple[float, float],
    x_label: str,
    y_label: str,
    title: str,
    size: tuple[float, float],
    *,
    is_depth: bool = False,
) -> Panel:
    """Return curves, with all their values between the limits of y; `is_depth` directs y downwards."""
    y = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    low, high = (float(y.min()), float(y.max())) if y.size else (0.0, 1.0)
    margin = 0.05 * (high - low) or 0.5
    top, bottom = (low - margin, high + margin) if is_depth else (high + margin, low - margin)
    return Panel(title, x_label, y_label, size, x_limits, (top, bottom), lines=tuple(lines))


def draw_illumination(
    flat: np.ndarray,
    dark: np.ndarray,
    baseline: np.ndarray,
    spacing: tuple[float, float, float],
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Picture:
    """Draw the flat field at three depths, and along depth its range and the brightness of the tiles.

    - `flat`, `dark` (Z, Y, X): the fields: a factor, and an offset in units of intensity.
    - `baseline` (N, Z): brightness of the tiles.
    - `spacing` (float, float, float): voxel spacing (Z, Y, X) in µm.
    - `names` (str, str): names of the lateral axes.
    - `source`: name of the image, for the title.
    """
    height, width = extent_um(flat.shape[1:], spacing[1:])
    size = 3.0, min(6.0, max(1.8, 3.0 * height / width))
    planes = [len(flat) // 6, len(flat) // 2, len(flat) - 1 - len(flat) // 6]
    shown = flat[planes]
    limits = float(shown.min()), float(max(shown.max(), shown.min() + 1e-3))
    maps = [
        _map_panel(field, (height, width), limits, "flat field", names, f"depth {plane * spacing[0]:.4g} µm", size)
        for plane, field in zip(planes, shown, strict=True)
    ]
    depth = np.arange(len(flat)) * spacing[0]
    rows = flat.reshape(len(flat), -1)
    most = np.percentile(rows[:, :: -(-rows.shape[1] // _PIXELS)], (5, 95), axis=1)
    limits = float(depth[0]), float(max(depth[-1], spacing[0]))
    field = _plot(
        [
            _area(depth, rows.min(axis=1), rows.max(axis=1), _PALE_BLUE, "darkest to brightest"),
            _area(depth, most[0], most[1], _BLUE, "5 % to 95 % of the pixels"),
        ],
        limits, "depth (µm)", "flat field", "range of the flat field", (5.0, size[1]),
    )  # fmt: skip
    tiles = _plot(
        [
            _area(depth, baseline.min(0), baseline.max(0), _PALE_BLUE, "darkest to brightest tile"),
            Line(depth, np.median(baseline, axis=0), _BLUE, "median tile"),
            Line(depth, dark.mean(axis=(1, 2)), _ORANGE, "dark field, mean", "--"),
        ],
        limits, "depth (µm)", "brightness (intensity)", "tiles", (5.0, size[1]),
    )  # fmt: skip
    return Picture((tuple(maps), (field, tiles)), source)


def _area(x: np.ndarray, low: np.ndarray, high: np.ndarray, color: str, label: str) -> Line:
    """Return the area between two curves."""
    return Line(np.concatenate([x, x[::-1]]), np.concatenate([low, high[::-1]]), color, label, "fill")


def draw_positions(
    corners: np.ndarray,
    present: np.ndarray,
    tile_shape: tuple[int, int],
    pairs: list[tuple[tuple[int, int], tuple[int, int], float, bool]],
    *,
    source: str = "",
) -> Picture:
    """Draw the outlines of tiles at their positions, and a line for each pair of neighbours.

    - `corners` (rows, columns, 2): first voxel of each tile, along both axes.
    - `present` (rows, columns): false for missing tiles, which are dotted.
    - `tile_shape` (int, int): voxels of a tile.
    - `pairs` (((int, int), (int, int), float, bool)): row and column of each of the two tiles, the confidence of the
      pair, which chooses the colour, and whether the pair was rejected.
    - `source`: name of the mosaic, for the title.
    """
    low, high = corners.min(axis=(0, 1)), corners.max(axis=(0, 1)) + tile_shape
    # Both axes have one scale; a short one is at least half as long as the other, for the labels.
    margins = 0.04 * float((high - low).max())
    longest = float((high - low).max()) + margins
    height, width = (max(longest / 2, float(length) + margins) for length in high - low)
    middle_y, middle_x = (float(middle) for middle in (low + high) / 2)
    outline = np.array([(0, 0), (0, 1), (1, 1), (1, 0), (0, 0)]) * tile_shape
    lines = []
    for tile in np.ndindex(*present.shape):
        y, x = (corners[tile] + outline).T
        lines.append(Line(x, y, "#444444", style="-" if present[tile] else ":", width=1.5))
    colors = Colors((0.0, 1.0), "confidence (red: rejected)")
    for fixed, moving, confidence, rejected in pairs:
        y, x = np.array([corners[tile] + np.array(tile_shape) / 2 for tile in (fixed, moving)]).T
        color = _RED if rejected else color_of(confidence, colors)
        lines.append(Line(x, y, color, style="--" if rejected else "-", width=4.0))
    panel = Panel(
        title="",
        x_label="voxels along the second axis",
        y_label="voxels along the first",
        size=(4.8 * width / longest, 4.8 * height / longest),
        x_limits=(middle_x - width / 2, middle_x + width / 2),
        y_limits=(middle_y - height / 2, middle_y + height / 2),
        colors=colors,
        lines=tuple(lines),
    )
    return Picture(((panel,),), source)
