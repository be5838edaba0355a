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
    _scale_bar(axes, extent[1])
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
    low, high = np.percentile(depth_um, (0.5, 99.5))
    image = axes.imshow(depth_um, cmap="viridis", extent=(0, width, height, 0), vmin=low, vmax=high)
    axes.set(xlabel="X (µm)", ylabel="Y (µm)", title="Depth of the tissue surface")
    figure.colorbar(image, ax=axes, label="depth (µm)", fraction=0.046, pad=0.03)
    _scale_bar(axes, width)
    _save(figure, path)


def draw_surface(
    path: str | Path,
    section: np.ndarray,
    found: np.ndarray,
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
    above.plot(x, (found + 0.5) * spacing[0], color=_FOUND, lw=1.1, label="surface found")
    title = f"{names[1]}Z section at {names[0]} = {place_um:g} µm"
    above.set(xlabel=f"{names[1]} (µm)", ylabel="depth Z (µm)", title=title, xlim=(0, width), ylim=(depth, 0))
    above.legend(loc="upper right", fontsize=8, framealpha=0.85)
    figure.colorbar(image, ax=above, label="log₁₀ intensity", fraction=0.05, pad=0.02)
    low, high = np.percentile(depth_um, (0.5, 99.5))
    extent = (0, width, height, 0)
    image = below.imshow(depth_um, cmap="viridis", extent=extent, aspect="auto", vmin=low, vmax=high)
    below.axhline(place_um, color="white", lw=0.8, ls="--")
    title = "Depth of the tissue surface (dashed: the section above)"
    below.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)", title=title)
    figure.colorbar(image, ax=below, label="depth (µm)", fraction=0.05, pad=0.02)
    for axes in (above, below):
        _scale_bar(axes, width)
    _save(figure, path)


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


def _scale_bar(axes: Any, width_um: float) -> None:
    from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

    length = scale_bar_um(width_um)
    label = f"{length / 1000:g} mm" if length >= 1000 else f"{length:g} µm"
    bar = AnchoredSizeBar(axes.transData, length, label, "lower right", pad=0.5, sep=4, color="white", frameon=True)
    bar.patch.set(facecolor="black", alpha=0.55, edgecolor="none")
    axes.add_artist(bar)


def _save(figure: Any, path: str | Path) -> None:
    figure.savefig(path, dpi=150, format="png")
