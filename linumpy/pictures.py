"""Pictures of sections and maps, with scale bars and units, as PNG.

In: host arrays and spacings in µm. Out: files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

_FOUND, _TRUE = "#ff7f0e", "#17becf"


def draw_section(
    path: str | Path,
    section: np.ndarray,
    found: np.ndarray,
    truth: np.ndarray | None,
    depth_spacing: float,
    lateral_spacing: float,
    place_um: float,
) -> None:
    """Draw an XZ section with the surface on it.

    Parameters
    ----------
    path : str or Path
        The PNG to write.
    section : numpy.ndarray, (Z, X)
        Intensity; drawn as its logarithm.
    found, truth : numpy.ndarray, (X,)
        Surface in voxels along Z; `truth` may be None.
    depth_spacing, lateral_spacing : float
        Voxel spacing along Z and X in µm.
    place_um : float
        Where along Y the section lies, in µm.
    """
    depth, width = section.shape
    extent = (0, width * lateral_spacing, depth * depth_spacing, 0)
    # Axes of about the shape of the section, so that voxels look as they are.
    figure, axes = _figure(9, min(7.0, max(2.6, 7.4 * depth * depth_spacing / (width * lateral_spacing) + 0.9)))
    shown = np.log10(np.maximum(section, np.percentile(section, 1)).astype(np.float64) + 1e-12)
    low, high = np.percentile(shown, (1, 99.8))
    image = axes.imshow(shown, cmap="gray", extent=extent, aspect="auto", vmin=low, vmax=high)
    x = (np.arange(width) + 0.5) * lateral_spacing
    if truth is not None:
        axes.plot(x, (truth + 0.5) * depth_spacing, color=_TRUE, lw=2.4, label="true surface")
    axes.plot(x, (found + 0.5) * depth_spacing, color=_FOUND, lw=1.1, label="surface found")
    axes.set(xlabel="X (µm)", ylabel="depth Z (µm)", title=f"XZ section at Y = {place_um:g} µm", xlim=extent[:2])
    axes.legend(loc="upper right", fontsize=8, framealpha=0.85)
    figure.colorbar(image, ax=axes, label="log₁₀ intensity", fraction=0.05, pad=0.02)
    add_scale_bar(axes, extent[1])
    _save(figure, path)


def draw_depth_map(path: str | Path, depth_um: np.ndarray, spacing: tuple[float, ...]) -> None:
    """Draw a map of depths.

    Parameters
    ----------
    path : str or Path
        The PNG to write.
    depth_um : numpy.ndarray, (Y, X)
        Depth in µm.
    spacing : (float, float)
        Voxel spacing along Y and X in µm.
    """
    height, width = (n * s for n, s in zip(depth_um.shape, spacing, strict=True))
    figure, axes = _figure(7.2, min(9.0, max(3.0, 6 * height / width + 0.8)))
    low, high = _limits(depth_um)
    image = axes.imshow(depth_um, cmap="viridis", extent=(0, width, height, 0), vmin=low, vmax=high)
    axes.set(xlabel="X (µm)", ylabel="Y (µm)", title="Depth of the tissue surface")
    figure.colorbar(image, ax=axes, label="depth (µm)", fraction=0.046, pad=0.03)
    add_scale_bar(axes, width)
    _save(figure, path)


def draw_surface(
    path: str | Path,
    section: np.ndarray,
    found: np.ndarray,
    edge: np.ndarray,
    depth_um: np.ndarray,
    spacing: tuple[float, float, float],
    place_um: float,
    names: tuple[str, str] = ("Y", "X"),
) -> None:
    """Draw a section of a mosaic with the surface on it, and the map of depths below.

    Parameters
    ----------
    path : str or Path
        The PNG to write.
    section : numpy.ndarray, (Z, X)
        Intensity; drawn as its logarithm.
    found : numpy.ndarray, (X,)
        Surface in voxels along Z.
    edge : numpy.ndarray, (X,)
        The edge itself in voxels along Z; drawn besides where the surface is defined otherwise.
    depth_um : numpy.ndarray, (Y, X)
        Depth of the surface in µm.
    spacing : (float, float, float)
        Voxel spacing (Z, Y, X) of what is given, in µm.
    place_um : float
        Where along Y the section lies, in µm.
    names : (str, str)
        Of the lateral axes.
    """
    depth, (height, width) = section.shape[0] * spacing[0], _extent(depth_um.shape, spacing[1:])
    heights = [min(4.5, max(1.8, 7.4 * depth / width)), min(9.0, max(2.2, 7.4 * height / width))]
    figure, (above, below) = _figures(9, sum(heights) + 1.6, 2, height_ratios=heights)
    shown = _logarithm(section)
    low, high = np.percentile(shown, (1, 99.8))
    image = above.imshow(shown, cmap="gray", extent=(0, width, depth, 0), aspect="auto", vmin=low, vmax=high)
    x = (np.arange(section.shape[1]) + 0.5) * spacing[2]
    if not np.array_equal(found, edge, equal_nan=True):
        above.plot(x, (edge + 0.5) * spacing[0], color=_TRUE, lw=2.0, label="edge")
    above.plot(x, (found + 0.5) * spacing[0], color=_FOUND, lw=1.1, label="surface found")
    title = f"{names[1]}Z section at {names[0]} = {place_um:g} µm"
    above.set(xlabel=f"{names[1]} (µm)", ylabel="depth Z (µm)", title=title, xlim=(0, width), ylim=(depth, 0))
    above.legend(loc="upper right", fontsize=8, framealpha=0.85)
    figure.colorbar(image, ax=above, label="log₁₀ intensity", fraction=0.05, pad=0.02)
    low, high = _limits(depth_um)
    extent = (0, width, height, 0)
    image = below.imshow(depth_um, cmap="viridis", extent=extent, aspect="auto", vmin=low, vmax=high)
    below.axhline(place_um, color="white", lw=0.8, ls="--")
    title = "Depth of the tissue surface (dashed: the section above)"
    below.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)", title=title)
    figure.colorbar(image, ax=below, label="depth (µm)", fraction=0.05, pad=0.02)
    for axes in (above, below):
        add_scale_bar(axes, width)
    _save(figure, path)


def draw_focal_curvature(
    path: str | Path,
    mean_um: np.ndarray,
    focal_um: np.ndarray,
    tissue_um: np.ndarray,
    spacing: tuple[float, float],
    title: str,
    names: tuple[str, str] = ("Y", "X"),
) -> None:
    """Draw the surface of the mean tile, the focal curvature fitted to it, and both along the middle of the tile.

    Parameters
    ----------
    path : str or Path
        The PNG to write.
    mean_um : numpy.ndarray, (height, width)
        Surface of the mean tile without its plane, in µm; NaN where unknown.
    focal_um, tissue_um : numpy.ndarray, (height, width)
        What is fitted: the objective's share and the tissue's, in µm.
    spacing : (float, float)
        Lateral voxel spacing in µm.
    title : str
        Of the map of the mean tile.
    names : (str, str)
        Of the lateral axes.
    """
    whole = focal_um + tissue_um
    shown = mean_um - np.nanmedian(mean_um - whole)  # where the mean tile lies along depth means nothing
    height, width = _extent(mean_um.shape, spacing)
    figure, panels = _figures(14, min(9.0, max(3.4, 4.0 * height / width + 0.9)), 1, 3, width_ratios=(1, 1, 1.15))
    limits = [np.nanpercentile(shown, 0.5), np.nanpercentile(shown, 99.5), focal_um.min(), focal_um.max()]
    for axes, values, label in zip(panels, (shown, focal_um), (title, "focal curvature, taken out"), strict=False):
        extent = (0, width, height, 0)
        image = axes.imshow(values, cmap="viridis", extent=extent, vmin=min(limits), vmax=max(limits))
        axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)")
        axes.set_title(label, fontsize=9)
        figure.colorbar(image, ax=axes, label="depth (µm)", fraction=0.046, pad=0.03)
        add_scale_bar(axes, width)
    middle = mean_um.shape[0] // 2, mean_um.shape[1] // 2
    for axis, (name, step, color) in enumerate(zip(names, spacing, ("#d62728", "#1f77b4"), strict=True)):
        place = (np.arange(mean_um.shape[axis]) + 0.5) * step
        along = [np.take(values, middle[1 - axis], axis=1 - axis) for values in (shown, whole, focal_um)]
        panels[2].plot(place, along[0], ".", color=color, ms=2.5, alpha=0.5, label=f"mean tile along {name}")
        panels[2].plot(place, along[1], "-", color=color, lw=1.6, label=f"fit along {name}: focal and tissue")
        panels[2].plot(place, along[2], "--", color=color, lw=1.2, label=f"focal alone along {name}")
    panels[2].invert_yaxis()
    panels[2].set(xlabel="place in the tile (µm)", ylabel="deeper than the middle (µm)")
    panels[2].set_title("through the middle of the tile", fontsize=9)
    panels[2].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    _save(figure, path)


def _limits(depth_um: np.ndarray) -> tuple[float, float]:
    """Choose the range of colours of a map of depths, of which some may be unknown."""
    known = depth_um[np.isfinite(depth_um)]
    low, high = np.percentile(known, (0.5, 99.5)) if known.size else (0.0, 1.0)
    return float(low), float(high)


def _extent(shape: tuple[int, ...], spacing: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(n * s for n, s in zip(shape, spacing, strict=True))


def _logarithm(section: np.ndarray) -> np.ndarray:
    """Logarithm of intensities to look at; what is not positive is as dark as the darkest."""
    finite = np.where(np.isfinite(section), section, 0).astype(np.float64)
    positive = finite[finite > 0]
    floor = np.percentile(positive, 1) if positive.size else 1.0
    return np.log10(np.maximum(finite, floor))


def _figure(width: float, height: float) -> tuple[Any, Any]:
    figure, axes = _figures(width, height, 1)
    return figure, axes[0]


def _figures(width: float, height: float, rows: int, columns: int = 1, **options: Any) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, whatever the caller's matplotlib is set to
    return figure, list(figure.subplots(rows, columns, squeeze=False, gridspec_kw=options).ravel())


def scale_bar_um(width_um: float) -> float:
    """Choose the length of a scale bar: 1, 2 or 5 times a power of ten, about a fifth of the picture."""
    wanted = width_um / 5
    power = 10.0 ** np.floor(np.log10(wanted))
    return float(max(step * power for step in (1, 2, 5) if step * power <= wanted))


def add_scale_bar(axes: Any, width_um: float) -> None:
    """Draw a scale bar at the lower right of axes whose x is in µm.

    Parameters
    ----------
    axes : matplotlib.axes.Axes
        What to draw on.
    width_um : float
        Width of the picture in µm.
    """
    from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

    length = scale_bar_um(width_um)
    label = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    bar = AnchoredSizeBar(axes.transData, length, label, "lower right", pad=0.5, sep=4, color="white", frameon=True)
    bar.patch.set(facecolor="black", alpha=0.55, edgecolor="none")
    axes.add_artist(bar)


def _save(figure: Any, path: str | Path) -> None:
    figure.savefig(path, dpi=150, format="png")
