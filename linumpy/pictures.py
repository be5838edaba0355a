"""Figures of sections and maps, with scale bars and units.

In: host arrays, and spacings in µm. Out: matplotlib figures, which :func:`save` writes as PNG, PDF or SVG.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

_SURFACE_COLOUR, _OTHER_COLOUR = "#ff7f0e", "#17becf"


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
    """Draw an XZ section of a volume, and on it the surface that was found and, if it is known, the true surface.

    Parameters
    ----------
    section : numpy.ndarray, (Z, X)
        Intensity; its logarithm is drawn.
    depths, truth : numpy.ndarray, (X,)
        Surface found and true surface, in voxels along Z; `truth` may be None.
    depth_spacing, lateral_spacing : float
        Voxel spacing along Z and X in µm.
    position_um : float
        Position of the section along Y in µm.
    source : str
        Name of the image, for the title.
    """
    depth, width = section.shape
    # The panel has about the aspect ratio of the section in µm, within limits of its height.
    figure, (axes,) = new_figure(9, min(7.0, max(2.6, 7.4 * depth * depth_spacing / (width * lateral_spacing) + 0.9)))
    other = None if truth is None else (truth, "true surface")
    _add_section(axes, section, depths, other, (depth_spacing, lateral_spacing), position_um, ("Y", "X"))
    return titled(figure, source)


def _add_section(
    axes: Axes,
    section: np.ndarray,
    depths: np.ndarray,
    other: tuple[np.ndarray, str] | None,
    spacing: tuple[float, float],
    position_um: float,
    names: tuple[str, str],
) -> None:
    """Draw a section with the surface found, and with `other`: another surface and its label.

    `names` are the names of the lateral axes: the axis that `position_um` is on, and the axis of the section.
    """
    depth, width = extent_um(section.shape, spacing)
    shown = _logarithm(section)
    limits = percentiles(shown, (1, 99.8))
    add_image(axes, shown, (0, width, depth, 0), limits, "log₁₀ intensity", cmap="gray", aspect="auto")
    x = (np.arange(section.shape[1]) + 0.5) * spacing[1]
    if other is not None:
        axes.plot(x, (other[0] + 0.5) * spacing[0], color=_OTHER_COLOUR, lw=2.2, label=other[1])
    axes.plot(x, (depths + 0.5) * spacing[0], color=_SURFACE_COLOUR, lw=1.1, label="surface found")
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
    height, width = extent_um(depth_um.shape, spacing)
    figure, (axes,) = new_figure(7.2, min(9.0, max(3.0, 6 * height / width + 0.8)))
    _add_depth_map(axes, depth_um, spacing, "Depth of the tissue surface", ("Y", "X"))
    return titled(figure, source)


def _add_depth_map(
    axes: Axes, depth_um: np.ndarray, spacing: tuple[float, ...], title: str, names: tuple[str, str]
) -> None:
    """Draw a map of depths with a colour bar; `names` are the names of its two axes."""
    height, width = extent_um(depth_um.shape, spacing)
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
    """Draw a section of a mosaic with the surface on it, and a map of depths below it.

    Parameters
    ----------
    section, depths, position_um, source
        As for :func:`draw_section`.
    edge : numpy.ndarray, (X,)
        Depth of the edge in voxels along Z; it is drawn too if it differs from `depths`.
    depth_um : numpy.ndarray, (Y, X)
        Depth of the surface in µm.
    spacing : (float, float, float)
        Voxel spacing (Z, Y, X) in µm.
    names : (str, str)
        Names of the lateral axes, in the order of `depth_um`.
    """
    depth, (height, width) = section.shape[0] * spacing[0], extent_um(depth_um.shape, spacing[1:])
    heights = [min(4.5, max(1.8, 7.4 * depth / width)), min(9.0, max(2.2, 7.4 * height / width))]
    figure, (above, below) = new_figure(9, sum(heights) + 1.6, 2, height_ratios=heights)
    other = None if np.array_equal(depths, edge, equal_nan=True) else (edge, "edge")
    _add_section(above, section, depths, other, (spacing[0], spacing[2]), position_um, names)
    title = "Depth of the tissue surface (dashed: the section above)"
    _add_depth_map(below, depth_um, spacing[1:], title, names)
    below.axhline(position_um, color="white", lw=0.8, ls="--")
    return titled(figure, source)


def percentiles(values: np.ndarray, percents: tuple[float, float]) -> tuple[float, float]:
    """Return two percentiles of the finite values, as colour limits; (0, 1) without finite values."""
    finite = values[np.isfinite(values)]
    low, high = np.percentile(finite, percents) if finite.size else (0.0, 1.0)
    return float(low), float(high)


def add_image(
    axes: Axes,
    values: np.ndarray,
    extent: tuple[float, float, float, float],
    limits: tuple[float, float],
    label: str,
    **options: Any,
) -> AxesImage:
    """Draw an image with a colour bar, whose title is the share of values that the colour limits clip.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        Axes to draw on.
    values : numpy.ndarray, (rows, columns)
        Values; pixels of values that are not finite stay blank.
    extent : (float, float, float, float)
        Left, right, bottom and top, in the units of the axes.
    limits : (float, float)
        Values of the first and the last colour.
    label : str
        Label of the colour bar.
    **options
        Options of ``imshow``.
    """
    image = axes.imshow(values, extent=extent, vmin=limits[0], vmax=limits[1], **options)
    clipped, arrows = clipping(values, limits)
    bar = axes.figure.colorbar(image, ax=axes, label=label, extend=arrows, fraction=0.05, pad=0.02)
    bar.ax.set_title(clipped, fontsize=7)
    return image


def clipping(values: np.ndarray, limits: tuple[float, float]) -> tuple[str, str]:
    """Return the share of finite values outside of colour limits as text, and the option `extend` of ``colorbar``."""
    finite = values[np.isfinite(values)]
    below, above = (int(np.sum(outside)) / max(1, finite.size) for outside in (finite < limits[0], finite > limits[1]))
    lines = [f"{share:.2g} % {side}" for share, side in ((100 * above, "above"), (100 * below, "below")) if share]
    arrows = {(False, False): "neither", (True, False): "min", (False, True): "max", (True, True): "both"}
    return "\n".join(lines), arrows[below > 0, above > 0]


def extent_um(shape: tuple[int, ...], spacing: tuple[float, ...]) -> tuple[float, ...]:
    """Return the length of an image along each axis in µm."""
    return tuple(n * s for n, s in zip(shape, spacing, strict=True))


def _logarithm(section: np.ndarray) -> np.ndarray:
    """Return the logarithm of intensities for display; lower values are raised to the first percentile above 0."""
    finite = np.where(np.isfinite(section), section, 0).astype(np.float64)
    positive = finite[finite > 0]
    floor = np.percentile(positive, 1) if positive.size else 1.0
    return np.log10(np.maximum(finite, floor))


def empty_figure(width: float, height: float) -> Figure:
    """Return a figure of a size in inches that has no window, whichever backend matplotlib uses."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def new_figure(
    width: float, height: float, rows: int = 1, columns: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """Return a figure without a window, and its empty panels row by row.

    Parameters
    ----------
    width, height : float
        Size in inches.
    rows, columns : int
        Numbers of rows and columns of panels.
    **options
        Options of matplotlib's ``GridSpec``.
    """
    figure = empty_figure(width, height)
    return figure, list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=options).ravel())


def scale_bar_um(width_um: float) -> float:
    """Return the length of a scale bar in µm: 1, 2 or 5 times a power of ten, at most a fifth of the picture."""
    max_length = width_um / 5
    power = 10.0 ** np.floor(np.log10(max_length))
    return float(max(step * power for step in (1, 2, 5) if step * power <= max_length))


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
    """Escape a name for matplotlib, which reads text between two dollar signs as a formula."""
    return name.replace("$", r"\$")


def titled(figure: Figure, source: str) -> Figure:
    """Write the name of the image, `source`, above a figure unless the name is empty; return the figure."""
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
        ``".png"``, ``".pdf"`` or ``".svg"``; by default the suffix of the path.
    """
    figure.savefig(path, dpi=150, format=(suffix or Path(path).suffix)[1:].lower())
