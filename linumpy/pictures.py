"""Pictures of sections and maps, with scale bars and units.

In: host arrays and spacings in µm. Out: figures, which :func:`save` writes as PNG, PDF or SVG.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_FOUND, _TRUE = "#ff7f0e", "#17becf"


def draw_section(
    section: np.ndarray,
    depths: np.ndarray,
    truth: np.ndarray | None,
    depth_spacing: float,
    lateral_spacing: float,
    position_um: float,
    *,
    source: str = "",
) -> Figure:
    """Draw an XZ section with the surface on it.

    Parameters
    ----------
    section : numpy.ndarray, (Z, X)
        Intensity; drawn as its logarithm.
    depths, truth : numpy.ndarray, (X,)
        Surface in voxels along Z; `truth` may be None.
    depth_spacing, lateral_spacing : float
        Voxel spacing along Z and X in µm.
    position_um : float
        Position of the section along Y in µm.
    source : str
        Name of the image, for the title.
    """
    depth, width = section.shape
    # Axes of about the shape of the section, so that voxels keep their aspect ratio.
    figure, axes = _figure(9, min(7.0, max(2.6, 7.4 * depth * depth_spacing / (width * lateral_spacing) + 0.9)))
    other = None if truth is None else (truth, "true surface")
    _add_section(axes, section, depths, other, (depth_spacing, lateral_spacing), position_um, ("Y", "X"))
    return _titled(figure, source)


def _add_section(
    axes: Axes,
    section: np.ndarray,
    depths: np.ndarray,
    other: tuple[np.ndarray, str] | None,
    spacing: tuple[float, float],
    position_um: float,
    names: tuple[str, str],
) -> None:
    """Draw a section with its surface, and another surface with its label."""
    depth, width = _extent(section.shape, spacing)
    shown = _logarithm(section)
    limits = percentiles(shown, (1, 99.8))
    add_image(axes, shown, (0, width, depth, 0), limits, "log₁₀ intensity", cmap="gray", aspect="auto")
    x = (np.arange(section.shape[1]) + 0.5) * spacing[1]
    if other is not None:
        axes.plot(x, (other[0] + 0.5) * spacing[0], color=_TRUE, lw=2.2, label=other[1])
    axes.plot(x, (depths + 0.5) * spacing[0], color=_FOUND, lw=1.1, label="surface found")
    title = f"{names[1]}Z section at {names[0]} = {position_um:g} µm"
    axes.set(xlabel=f"{names[1]} (µm)", ylabel="depth Z (µm)", title=title, xlim=(0, width), ylim=(depth, 0))
    axes.legend(loc="upper right", fontsize=8, framealpha=0.85)
    add_scale_bar(axes, width)


def draw_depth_map(depth_um: np.ndarray, spacing: tuple[float, ...], *, source: str = "") -> Figure:
    """Draw a map of depths.

    Parameters
    ----------
    depth_um : numpy.ndarray, (Y, X)
        Depth in µm.
    spacing : (float, float)
        Voxel spacing along Y and X in µm.
    source : str
        Name of the image, for the title.
    """
    height, width = _extent(depth_um.shape, spacing)
    figure, axes = _figure(7.2, min(9.0, max(3.0, 6 * height / width + 0.8)))
    _add_depth_map(axes, depth_um, spacing, "Depth of the tissue surface", ("Y", "X"))
    return _titled(figure, source)


def _add_depth_map(
    axes: Axes, depth_um: np.ndarray, spacing: tuple[float, ...], title: str, names: tuple[str, str]
) -> None:
    """Draw a map of depths with its colour bar."""
    height, width = _extent(depth_um.shape, spacing)
    limits = percentiles(depth_um, (0.5, 99.5))
    add_image(axes, depth_um, (0, width, height, 0), limits, "depth (µm)", aspect="auto")
    axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)", title=title)
    add_scale_bar(axes, width)


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
) -> Figure:
    """Draw a section of a mosaic with the surface on it, and the map of depths below.

    Parameters
    ----------
    section : numpy.ndarray, (Z, X)
        Intensity; drawn as its logarithm.
    depths : numpy.ndarray, (X,)
        Surface in voxels along Z.
    edge : numpy.ndarray, (X,)
        The edge itself in voxels along Z; drawn too if the surface has another definition.
    depth_um : numpy.ndarray, (Y, X)
        Depth of the surface in µm.
    spacing : (float, float, float)
        Voxel spacing (Z, Y, X) in µm.
    position_um : float
        Position of the section along Y in µm.
    names : (str, str)
        Names of the lateral axes.
    source : str
        Name of the image, for the title.
    """
    depth, (height, width) = section.shape[0] * spacing[0], _extent(depth_um.shape, spacing[1:])
    heights = [min(4.5, max(1.8, 7.4 * depth / width)), min(9.0, max(2.2, 7.4 * height / width))]
    figure, (above, below) = _figures(9, sum(heights) + 1.6, 2, height_ratios=heights)
    other = None if np.array_equal(depths, edge, equal_nan=True) else (edge, "edge")
    _add_section(above, section, depths, other, (spacing[0], spacing[2]), position_um, names)
    title = "Depth of the tissue surface (dashed: the section above)"
    _add_depth_map(below, depth_um, spacing[1:], title, names)
    below.axhline(position_um, color="white", lw=0.8, ls="--")
    return _titled(figure, source)


def draw_focal_curvature(
    mean_um: np.ndarray,
    focal_um: np.ndarray,
    tissue_um: np.ndarray,
    spacing: tuple[float, float],
    title: str,
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Figure:
    """Draw the surface of the mean tile, the focal curvature fitted to it, and both along the middle of the tile.

    Parameters
    ----------
    mean_um : numpy.ndarray, (height, width)
        Surface of the mean tile without its plane, in µm; NaN where unknown.
    focal_um, tissue_um : numpy.ndarray, (height, width)
        The fitted depths of the objective and of the tissue, in µm.
    spacing : (float, float)
        Lateral voxel spacing in µm.
    title : str
        Title of the map of the mean tile.
    names : (str, str)
        Names of the lateral axes.
    source : str
        Name of the image, for the title.
    """
    whole = focal_um + tissue_um
    shown = mean_um - np.nanmedian(mean_um - whole)  # the absolute depth of the mean tile has no meaning
    height, width = _extent(mean_um.shape, spacing)
    figure, panels = _figures(14, min(9.0, max(3.4, 4.0 * height / width + 0.9)), 1, 3, width_ratios=(1, 1, 1.15))
    of_tile = percentiles(shown, (0.5, 99.5))
    limits = float(min(of_tile[0], focal_um.min())), float(max(of_tile[1], focal_um.max()))
    for axes, values, label in zip(panels, (shown, focal_um), (title, "focal curvature, removed"), strict=False):
        add_image(axes, values, (0, width, height, 0), limits, "depth (µm)")
        axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)")
        axes.set_title(label, fontsize=9)
        add_scale_bar(axes, width)
    middle = mean_um.shape[0] // 2, mean_um.shape[1] // 2
    for axis, (name, step, color) in enumerate(zip(names, spacing, ("#d62728", "#1f77b4"), strict=True)):
        coordinates = (np.arange(mean_um.shape[axis]) + 0.5) * step
        along = [np.take(values, middle[1 - axis], axis=1 - axis) for values in (shown, whole, focal_um)]
        panels[2].plot(coordinates, along[0], ".", color=color, ms=2.5, alpha=0.5, label=f"mean tile along {name}")
        panels[2].plot(coordinates, along[1], "-", color=color, lw=1.6, label=f"fit along {name}: focal and tissue")
        panels[2].plot(coordinates, along[2], "--", color=color, lw=1.2, label=f"focal curvature along {name}")
    panels[2].invert_yaxis()
    panels[2].set(xlabel="position in the tile (µm)", ylabel="deeper than the middle (µm)")
    panels[2].set_title("through the middle of the tile", fontsize=9)
    panels[2].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return _titled(figure, source)


def draw_illumination(
    flat: np.ndarray,
    dark: np.ndarray,
    baseline: np.ndarray,
    spacing: tuple[float, float, float],
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Figure:
    """Draw the flat field of tiles at three depths, and its range and the brightness of the tiles along depth.

    Parameters
    ----------
    flat, dark : numpy.ndarray, (Z, Y, X)
        The fields: a factor, and an offset in units of intensity.
    baseline : numpy.ndarray, (N, Z)
        Brightness of the tiles.
    spacing : (float, float, float)
        Voxel spacing (Z, Y, X) in µm.
    names : (str, str)
        Names of the lateral axes.
    source : str
        Name of the image, for the title.
    """
    height, width = _extent(flat.shape[1:], spacing[1:])
    figure, panels = _figures(15, min(8.0, max(3.4, 3.0 * height / width + 1.2)), 1, 5)
    planes = [len(flat) // 6, len(flat) // 2, len(flat) - 1 - len(flat) // 6]
    shown = flat[planes]
    limits = float(shown.min()), float(max(shown.max(), shown.min() + 1e-3))
    for axes, plane, field in zip(panels, planes, shown, strict=False):
        add_image(axes, field, (0, width, height, 0), limits, "flat field")
        axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)")
        axes.set_title(f"depth {plane * spacing[0]:.4g} µm", fontsize=9)
        add_scale_bar(axes, width)
    depth = np.arange(len(flat)) * spacing[0]
    rows = flat.reshape(len(flat), -1)
    panels[3].fill_between(depth, *np.percentile(rows, (0, 100), axis=1), alpha=0.25, label="darkest to brightest")
    panels[3].fill_between(depth, *np.percentile(rows, (5, 95), axis=1), alpha=0.5, label="5 % to 95 % of the pixels")
    panels[3].set(xlabel="depth (µm)", ylabel="flat field")
    panels[4].fill_between(depth, baseline.min(0), baseline.max(0), alpha=0.25, label="darkest to brightest tile")
    panels[4].plot(depth, np.median(baseline, axis=0), label="median tile")
    panels[4].plot(depth, dark.mean(axis=(1, 2)), "--", label="dark field, mean")
    panels[4].set(xlabel="depth (µm)", ylabel="brightness (intensity)")
    for axes, title in zip(panels[3:], ("range of the flat field", "tiles"), strict=True):
        axes.set_title(title, fontsize=9)
        axes.legend(fontsize=7, loc="best")
    return _titled(figure, source)


def draw_map(
    values: np.ndarray,
    spacing: tuple[float, float],
    label: str,
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Figure:
    """Draw an image with a scale bar.

    Parameters
    ----------
    values : numpy.ndarray, (rows, columns)
        Values; those that are not finite stay blank.
    spacing : (float, float)
        Spacing of rows and columns in µm.
    label : str
        What the values are.
    names : (str, str)
        Names of both axes.
    source : str
        Name of the image, for the title.
    """
    height, width = _extent(values.shape, spacing)
    figure, axes = _figure(6.4, min(8.0, max(2.2, 5.2 * height / width + 0.8)))
    limits = percentiles(values, (0.5, 99.5))
    add_image(axes, values, (0, width, height, 0), limits, label, cmap="gray", aspect="auto")
    axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)")
    add_scale_bar(axes, width)
    return _titled(figure, source)


def draw_positions(
    corners: np.ndarray,
    present: np.ndarray,
    tile_shape: tuple[int, int],
    pairs: list[tuple[tuple[int, int], tuple[int, int], float, bool]],
    *,
    source: str = "",
) -> Figure:
    """Draw the outlines of tiles at their positions, and a line for each pair of neighbours.

    Parameters
    ----------
    corners : numpy.ndarray, (rows, columns, 2)
        First voxel of each tile, along both axes.
    present : numpy.ndarray of bool, (rows, columns)
        Missing tiles are dashed.
    tile_shape : (int, int)
        Voxels of a tile.
    pairs : list of ((int, int), (int, int), float, bool)
        Row and column of both tiles, the confidence, which chooses the colour, and whether the pair was rejected.
    source : str
        Name of the mosaic, for the title.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    size = corners.max(axis=(0, 1)) - corners.min(axis=(0, 1)) + tile_shape
    figure, axes = _figure(6.4, min(8.0, max(2.4, 5.2 * size[0] / size[1] + 0.8)))
    for place in np.ndindex(*present.shape):
        y, x = corners[place]
        line = "-" if present[place] else ":"
        axes.add_patch(Rectangle((x, y), tile_shape[1], tile_shape[0], fill=False, ec="#444444", ls=line, lw=0.8))
    colors = ScalarMappable(Normalize(0, 1), "viridis")
    for fixed, moving, confidence, rejected in pairs:
        (y0, x0), (y1, x1) = (corners[tile] + np.array(tile_shape) / 2 for tile in (fixed, moving))
        color: Any = "#d62728" if rejected else colors.to_rgba(np.array(confidence))
        axes.plot([x0, x1], [y0, y1], color=color, lw=2, ls="--" if rejected else "-")
    figure.colorbar(colors, ax=axes, label="confidence of a pair (red, dashed: rejected)", fraction=0.05, pad=0.02)
    low, high = corners.min(axis=(0, 1)), corners.max(axis=(0, 1)) + tile_shape
    margin = 0.02 * size.max()
    axes.set(xlim=(low[1] - margin, high[1] + margin), ylim=(high[0] + margin, low[0] - margin), aspect="equal")
    axes.set(xlabel="voxels along the second axis", ylabel="voxels along the first")
    return _titled(figure, source)


def percentiles(values: np.ndarray, shares: tuple[float, float]) -> tuple[float, float]:
    """Choose a colour range by percentiles of the finite values; (0, 1) if there are none."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, shares) if finite.size else (0.0, 1.0)
    return float(low), float(high)


def add_image(
    axes: Axes,
    values: np.ndarray,
    extent: tuple[float, float, float, float],
    limits: tuple[float, float],
    label: str,
    **options: Any,
) -> AxesImage:
    """Draw an image with its colour bar, which says how many values the colour limits clip.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Axes to draw on.
    values : numpy.ndarray, (rows, columns)
        Values; those that are not finite stay blank.
    extent : (float, float, float, float)
        Left, right, bottom and top.
    limits : (float, float)
        Values of the first and the last colour.
    label : str
        What the values are.
    **options
        Of ``imshow``.
    """
    image = axes.imshow(values, extent=extent, vmin=limits[0], vmax=limits[1], **options)
    clipped, arrows = clipping(values, limits)
    bar = axes.figure.colorbar(image, ax=axes, label=label, extend=arrows, fraction=0.05, pad=0.02)
    bar.ax.set_title(clipped, fontsize=7)
    return image


def clipping(values: np.ndarray, limits: tuple[float, float]) -> tuple[str, str]:
    """Say which share of the finite values lies outside of colour limits, as text and as the colour bar's arrows."""
    finite = values[np.isfinite(values)]
    below, above = (int(np.sum(outside)) / max(1, finite.size) for outside in (finite < limits[0], finite > limits[1]))
    shares = [f"{share:.2g} % {where}" for share, where in ((100 * above, "above"), (100 * below, "below")) if share]
    arrows = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return "\n".join(shares), arrows[below > 0, above > 0]


def _extent(shape: tuple[int, ...], spacing: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(n * s for n, s in zip(shape, spacing, strict=True))


def _logarithm(section: np.ndarray) -> np.ndarray:
    """Return the logarithm of intensities for display; non-positive ones are as dark as the darkest."""
    finite = np.where(np.isfinite(section), section, 0).astype(np.float64)
    positive = finite[finite > 0]
    floor = np.percentile(positive, 1) if positive.size else 1.0
    return np.log10(np.maximum(finite, floor))


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure, axes = _figures(width, height, 1)
    return figure, axes[0]


def _figures(width: float, height: float, rows: int, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # without a window system, for any backend of the caller's matplotlib
    return figure, list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=options).ravel())


def scale_bar_um(width_um: float) -> float:
    """Choose the length of a scale bar: 1, 2 or 5 times a power of ten, about a fifth of the picture."""
    wanted = width_um / 5
    power = 10.0 ** np.floor(np.log10(wanted))
    return float(max(step * power for step in (1, 2, 5) if step * power <= wanted))


def add_scale_bar(axes: Axes, width_um: float) -> None:
    """Draw a scale bar at the lower right of axes whose x is in µm.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Axes to draw on.
    width_um : float
        Width of the picture in µm.
    """
    from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

    length = scale_bar_um(width_um)
    label = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    bar = AnchoredSizeBar(axes.transData, length, label, "lower right", pad=0.5, sep=4, color="white", frameon=True)
    bar.patch.set(facecolor="black", alpha=0.55, edgecolor="none")
    axes.add_artist(bar)


def plain_text(name: str) -> str:
    """Escape a name for matplotlib, which takes what is between two dollar signs for a formula."""
    return name.replace("$", r"\$")


def _titled(figure: Figure, source: str) -> Figure:
    if source:
        figure.suptitle(plain_text(source), fontsize=9)
    return figure


def save(figure: Figure, path: str | Path, suffix: str = "") -> None:
    """Write a figure.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    path : str or Path
        The file to write.
    suffix : str
        ``".png"``, ``".pdf"`` or ``".svg"``; by default that of the path.
    """
    figure.savefig(path, dpi=150, format=(suffix or Path(path).suffix)[1:].lower())
