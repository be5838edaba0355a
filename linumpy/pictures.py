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


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)  # no window system, whatever the caller's matplotlib is set to
    return figure, figure.add_subplot()


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
