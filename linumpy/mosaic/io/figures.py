"""Figures of the estimates that the steps of this package make: focal curvature, illumination, positions of tiles.

In: host arrays, and spacings in µm. Out: figures, which :func:`linumpy.pictures.save` writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from linumpy.pictures import add_image, add_scale_bar, extent_um, new_figure, percentiles, titled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _draw_map(
    axes: Axes, values: np.ndarray, size: tuple[float, float], limits: tuple[float, float], label: str,
    names: tuple[str, str], title: str,
) -> None:  # fmt: skip
    """Draw a map of a tile with a scale bar; `size` is the height and the width of the tile in µm."""
    height, width = size
    add_image(axes, values, (0, width, height, 0), limits, label)
    axes.set(xlabel=f"{names[1]} (µm)", ylabel=f"{names[0]} (µm)")
    axes.set_title(title, fontsize=9)
    add_scale_bar(axes, width)


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
    """Draw maps of the mean tile's surface and of the fitted focal curvature, and profiles through the tile's middle.

    Parameters
    ----------
    mean_um : numpy.ndarray, (height, width)
        Depth of the mean tile's surface less a plane, in µm; NaN where unknown. The figure subtracts the median
        distance from the fit.
    focal_um, tissue_um : numpy.ndarray, (height, width)
        Fitted depths of the focal curvature and of the curvature of the tissue, in µm.
    spacing : (float, float)
        Lateral voxel spacing in µm.
    title : str
        Title of the map of the mean tile.
    names : (str, str)
        Names of the lateral axes.
    source : str
        Name of the image, for the title.
    """
    fit = focal_um + tissue_um
    shown = mean_um - np.nanmedian(mean_um - fit)  # the absolute depth of the mean tile has no meaning
    height, width = extent_um(mean_um.shape, spacing)
    figure, panels = new_figure(14, min(9.0, max(3.4, 4.0 * height / width + 0.9)), 1, 3, width_ratios=(1, 1, 1.15))
    of_tile = percentiles(shown, (0.5, 99.5))
    limits = float(min(of_tile[0], focal_um.min())), float(max(of_tile[1], focal_um.max()))
    for axes, values, label in zip(panels, (shown, focal_um), (title, "focal curvature, removed"), strict=False):
        _draw_map(axes, values, (height, width), limits, "depth (µm)", names, label)
    middle = mean_um.shape[0] // 2, mean_um.shape[1] // 2
    for axis, (name, step, color) in enumerate(zip(names, spacing, ("#d62728", "#1f77b4"), strict=True)):
        coordinates = (np.arange(mean_um.shape[axis]) + 0.5) * step
        along = [np.take(values, middle[1 - axis], axis=1 - axis) for values in (shown, fit, focal_um)]
        panels[2].plot(coordinates, along[0], ".", color=color, ms=2.5, alpha=0.5, label=f"mean tile along {name}")
        panels[2].plot(coordinates, along[1], "-", color=color, lw=1.6, label=f"fit along {name}: focal and tissue")
        panels[2].plot(coordinates, along[2], "--", color=color, lw=1.2, label=f"focal curvature along {name}")
    panels[2].invert_yaxis()
    panels[2].set(xlabel="position in the tile (µm)", ylabel="deeper than the middle (µm)")
    panels[2].set_title("through the middle of the tile", fontsize=9)
    panels[2].legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return titled(figure, source)


def draw_illumination(
    flat: np.ndarray,
    dark: np.ndarray,
    baseline: np.ndarray,
    spacing: tuple[float, float, float],
    names: tuple[str, str] = ("Y", "X"),
    *,
    source: str = "",
) -> Figure:
    """Draw the flat field at three depths, and along depth its range and the brightness of the tiles.

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
    height, width = extent_um(flat.shape[1:], spacing[1:])
    figure, panels = new_figure(15, min(8.0, max(3.4, 3.0 * height / width + 1.2)), 1, 5)
    planes = [len(flat) // 6, len(flat) // 2, len(flat) - 1 - len(flat) // 6]
    shown = flat[planes]
    limits = float(shown.min()), float(max(shown.max(), shown.min() + 1e-3))
    for axes, plane, field in zip(panels, planes, shown, strict=False):
        title = f"depth {plane * spacing[0]:.4g} µm"
        _draw_map(axes, field, (height, width), limits, "flat field", names, title)
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
    return titled(figure, source)


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
        False for missing tiles, which are dotted.
    tile_shape : (int, int)
        Voxels of a tile.
    pairs : list of ((int, int), (int, int), float, bool)
        Row and column of each of the two tiles, the confidence of the pair, which chooses the colour, and whether the
        pair was rejected.
    source : str
        Name of the mosaic, for the title.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    size = corners.max(axis=(0, 1)) - corners.min(axis=(0, 1)) + tile_shape
    figure, (axes,) = new_figure(6.4, min(8.0, max(2.4, 5.2 * size[0] / size[1] + 0.8)))
    for tile in np.ndindex(*present.shape):
        y, x = corners[tile]
        line = "-" if present[tile] else ":"
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
    return titled(figure, source)
