"""Show a volume: the section through a voxel across each axis, with scale bars.

In: an array in host or device memory, or an image on disk, of which only the shown planes of a coarse level are read.
Out: a figure, and in a notebook sliders that move the voxel. Errors: those of :func:`show`.
"""

from __future__ import annotations

import io
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import zarr

from linumpy.arrays import Array
from linumpy.device import is_device_array, to_host
from linumpy.errors import RegionError
from linumpy.io.ngff.axes import Placement
from linumpy.io.ome import OmeZarrImage, open_image
from linumpy.io.source import Source, open_node, with_options
from linumpy.io.volume import Volume, as_volume, select_volumes
from linumpy.pictures import clipping, percentiles, scale_bar_label, scale_bar_um

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

#: Maximum voxels along the longest axis of the level that is shown by default.
_SHOWN_VOXELS = 1024
#: Percentiles of the shown voxels that are drawn black and white.
_WINDOW = (0.5, 99.5)

ReadPlane = Callable[[tuple[int | slice, ...]], np.ndarray]
"""Reads a section into host memory: an index for each axis, an int for the axis that is cut."""


@dataclass(frozen=True)
class _ShownVolume:
    """A volume of three axes, or an image of two, whose sections are read one by one.

    - `axes`: names of the axes, such as ``"zyx"``.
    - `spacing`: voxel spacing in µm; None if it is unknown.
    """

    name: str
    axes: str
    shape: tuple[int, ...]
    spacing: tuple[float, ...] | None
    read: ReadPlane

    def __str__(self) -> str:
        steps = "" if self.spacing is None else f", {' × '.join(f'{step:g}' for step in self.spacing)} µm"
        return f"{self.name}: {' × '.join(map(str, self.shape))} ({self.axes}){steps}"


class Sections:
    """The picture that :func:`show` makes.

    Attributes
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    position : tuple of int
        The voxel through which the sections go.
    """

    def __init__(
        self, figure: Figure, volume: _ShownVolume, position: tuple[int, ...], limits: tuple[float, float] | None
    ) -> None:
        self.figure = figure
        self._volume = volume
        self._limits = limits
        self.move(position)

    def __repr__(self) -> str:
        return f"Sections of {self._volume} at {self.position}"

    def move(self, position: Sequence[int]) -> None:
        """Draw the sections through another voxel into the figure.

        Parameters
        ----------
        position : sequence of int
            One index for each axis.

        Raises
        ------
        RegionError
            The voxel is outside of the volume.
        """
        voxel, shape = tuple(map(operator.index, position)), self._volume.shape
        if len(voxel) != len(shape) or not all(0 <= i < n for i, n in zip(voxel, shape, strict=True)):
            raise RegionError(f"position={voxel} is outside of {self._volume}")
        self.position = voxel
        _draw(self.figure, self._volume, self.position, self._limits)

    def save(self, path: str | Path) -> None:
        """Write the figure as PNG, PDF or SVG, by the suffix of the path."""
        self.figure.savefig(path, dpi=150)

    def _png(self) -> bytes:
        file = io.BytesIO()
        self.figure.savefig(file, format="png", dpi=90)
        return file.getvalue()


def show(
    source: Source | Array | OmeZarrImage,
    spacing: Sequence[float] | None = None,
    *,
    level: int | None = None,
    time: int = 0,
    channel: int = 0,
    position: Sequence[int] | None = None,
    limits: tuple[float, float] | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Sections:
    """Show the sections through one voxel of a volume, across each of its axes.

    A notebook shows them at once, with a slider for each axis if ipywidgets is installed. Elsewhere matplotlib opens a
    window if it can (``matplotlib.pyplot.show()`` keeps the window open at the end of a script).

    Parameters
    ----------
    source : array, str, Path, zarr.Group, zarr.Array or OmeZarrImage
        A volume of three axes or an image of two: a NumPy array; a CuPy array, whose shown planes are copied to the
        host; or an OME-Zarr image or Zarr array, whose shown planes are read.
    spacing : sequence of float, optional
        Voxel spacing in µm along each axis, of an OME-Zarr image for level 0; by default the spacing in its metadata.
        It is not used for an open :class:`~linumpy.io.ome.OmeZarrImage`. If the spacing is unknown, axes are in voxels
        and there is no scale bar.
    level : int, optional
        Resolution level of an OME-Zarr image; by default the finest level with at most 1024 voxels along each axis, or
        the coarsest.
    time, channel : int
        Entries of the axes t and c of an OME-Zarr image.
    position : sequence of int, optional
        Voxel of that level through which the sections go; by default the middle.
    limits : (float, float), optional
        Values that are drawn black and white; by default percentiles of the shown planes. The colour bar says which
        share of the values is beyond them.
    storage_options : mapping, optional
        Options for a URL, as for :func:`linumpy.open_image`.

    Returns
    -------
    Sections
        With ``figure``, ``move(position)`` and ``save(path)``.

    Raises
    ------
    ValueError
        An array without voxels, of other than two or three axes, or of other than bool, integers or floats; a
        `spacing`, `level`, `time`, `channel` or `limits` that does not fit.
    RegionError
        `position` is outside of the volume.
    FileNotFoundError, SourceError, MetadataError, TypeError
        As :func:`linumpy.open_image` and :func:`linumpy.read_zarr`.
    ImportError
        matplotlib is not installed.

    Examples
    --------
    >>> import linumpy
    >>> linumpy.show("brain.ome.zarr").save("brain.pdf")  # doctest: +SKIP
    """
    volume = _open_source(source, spacing, level, {"time": time, "channel": channel}, storage_options)
    middle = tuple(n // 2 for n in volume.shape) if position is None else tuple(position)
    if limits is not None and not (len(limits) == 2 and -np.inf < limits[0] <= limits[1] < np.inf):
        raise ValueError(f"limits={limits}: pass the values of black and of white, of which the first is not larger")
    figure, has_window = _figure(volume)
    sections = Sections(figure, volume, middle, limits)
    if _in_notebook():
        _display(sections)
    elif has_window:
        figure.show()
    return sections


def _open_source(
    source: Source | Array | OmeZarrImage,
    spacing: Sequence[float] | None,
    level: int | None,
    entries: dict[str, int],
    storage_options: Mapping[str, Any] | None,
) -> _ShownVolume:
    if not isinstance(source, OmeZarrImage) and not is_device_array(source) and not isinstance(source, np.ndarray):
        node = open_node(with_options(source, storage_options))
        source = node if isinstance(node, zarr.Array) else open_image(node, spacing=spacing)
    if isinstance(source, OmeZarrImage):
        if level is None:  # the finest level that is small enough to show, or the coarsest
            small_levels = (n for n, array in enumerate(source.levels) if max(array.shape) <= _SHOWN_VOXELS)
            level = next(small_levels, len(source.levels) - 1)
        volumes, kinds = select_volumes(source, level, **entries), {axis.type for axis in source.axes}
        chosen = [
            f"{_name(source.name)}, level {level}",
            *(f"{kind} {n}" for kind, n in entries.items() if kind in kinds),
        ]
        spacing = volumes.placement.spacing if isinstance(volumes.placement, Placement) else None
        return _of_volume(volumes.first, ", ".join(chosen), volumes.axes, spacing)
    if level:
        raise ValueError(f"level={level}, but a single array has no levels")
    if isinstance(source, zarr.Array):
        return _of_volume(as_volume(source), _name(source.store_path), "", spacing)
    source = cast("Array", source)
    side = "GPU" if is_device_array(source) else "host"
    return _checked_volume(
        f"array on the {side}", "", source.shape, source.dtype, spacing, lambda index: to_host(source[index])
    )


def _of_volume(volume: Volume, name: str, axes: str, spacing: Sequence[float] | None) -> _ShownVolume:
    from linumpy.gpu.zarr_io import read_zarr

    return _checked_volume(
        name, axes, volume.shape, volume.dtype, spacing,
        lambda index: read_zarr(volume.array, region=volume.region(index), device="cpu"),
    )  # fmt: skip


def _checked_volume(
    name: str, axes: str, shape: Sequence[int], dtype: np.dtype, spacing: Sequence[float] | None, read: ReadPlane
) -> _ShownVolume:
    shape = tuple(int(n) for n in shape)
    if len(shape) not in (2, 3) or 0 in shape:
        raise ValueError(f"{name} of shape {shape}: pass a volume of three axes, or an image of two, with voxels")
    if dtype.kind not in "buif":
        raise ValueError(f"{name} is of {dtype}: pass a volume of booleans, integers or floats")
    if spacing is not None:
        spacing = tuple(float(step) for step in spacing)
        if len(spacing) != len(shape) or not all(0 < step < np.inf for step in spacing):
            raise ValueError(f"spacing={spacing}: pass {len(shape)} positive numbers of µm")
    return _ShownVolume(name, axes or "zyx"[-len(shape) :], shape, spacing, read)


def _name(path: object) -> str:
    """Return the last part of a path or URL."""
    return PurePosixPath(str(path).partition("?")[0]).name


def _figure(volume: _ShownVolume) -> tuple[Figure, bool]:
    """Return an empty figure with about the aspect ratio of the sections, and whether it has a window."""
    from matplotlib import pyplot
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height, width = _sizes(volume)[-2:]
    depth = _sizes(volume)[0] if len(volume.shape) == 3 else 0.0
    scale = 8.5 / (width + depth)
    size = 10.5, min(10.0, max(3.2, scale * (height + depth) + 1.2))
    if not _in_notebook():
        figure = pyplot.figure(figsize=size, layout="constrained")
        if figure.canvas.required_interactive_framework is not None:
            return figure, True
        pyplot.close(figure)
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)  # no window, whichever backend matplotlib uses
    return figure, False


def _sizes(volume: _ShownVolume) -> tuple[float, ...]:
    """Return the drawn length of each axis in µm or voxels; short axes are drawn as an eighth of the longest axis."""
    steps = volume.spacing or (1.0,) * len(volume.shape)
    sizes = tuple(n * step for n, step in zip(volume.shape, steps, strict=True))
    return tuple(max(size, max(sizes) / 8) for size in sizes)


def _draw(figure: Figure, volume: _ShownVolume, position: tuple[int, ...], limits: tuple[float, float] | None) -> None:
    """Draw the section of the last two axes, and the other sections beside and below it, with a common edge."""
    rank = len(volume.shape)
    # The axis that each section cuts: axis 0, then axis 2 for the section beside it, then axis 1 for that below it.
    cuts = [0, 2, 1] if rank == 3 else [None]
    sections = []
    for cut in cuts:
        section = volume.read(tuple(position[axis] if axis == cut else slice(None) for axis in range(rank)))
        sections.append(np.asarray(section).astype(np.float64))
    shown = np.concatenate([section.ravel() for section in sections])
    limits = percentiles(shown, _WINDOW) if limits is None else limits
    figure.clear()
    sizes = _sizes(volume)
    if rank == 3:
        grid = figure.add_gridspec(2, 2, width_ratios=(sizes[2], sizes[0]), height_ratios=(sizes[1], sizes[0]))
        *panels, corner = (figure.add_subplot(grid[cell]) for cell in ((0, 0), (0, 1), (1, 0), (1, 1)))
        corner.set_axis_off()
    else:
        panels = [figure.add_subplot()]
    for cut, section, axes in zip(cuts, sections, panels, strict=True):
        is_transposed = cut == 2  # so that its rows are the rows of the section on its left
        rows, columns = (axis for axis in range(rank) if axis != cut)
        rows, columns = (columns, rows) if is_transposed else (rows, columns)
        oriented = section.T if is_transposed else section
        image = _draw_section(axes, oriented, volume, (rows, columns), cut, position, limits)
    clipped, arrows = clipping(shown, limits)
    if rank == 3:
        location: dict[str, Any] = {"cax": corner.inset_axes((0.1, 0.5, 0.8, 0.1)), "orientation": "horizontal"}
    else:
        location = {"ax": panels, "fraction": 0.05, "pad": 0.02}
    bar = figure.colorbar(image, extend=arrows, **location)
    bar.ax.set_title(clipped, fontsize=8)
    bar.ax.tick_params(labelsize=8)
    figure.suptitle(str(volume).replace("$", r"\$"), fontsize=9)  # text between two dollars would be a formula


def _draw_section(
    axes: Axes,
    section: np.ndarray,
    volume: _ShownVolume,
    shown: tuple[int, int],
    cut: int | None,
    position: tuple[int, ...],
    limits: tuple[float, float],
) -> AxesImage:
    """Draw a section whose rows and columns are the axes `shown`, with lines through the voxel `position`."""
    steps = volume.spacing or (1.0,) * len(volume.shape)
    unit = "voxels" if volume.spacing is None else "µm"
    (row, column), names = shown, volume.axes.upper()
    height, width = (volume.shape[axis] * steps[axis] for axis in shown)
    extent = (0, width, height, 0)
    image = axes.imshow(section, cmap="gray", extent=extent, aspect="auto", vmin=limits[0], vmax=limits[1])
    axes.set(xlabel=f"{names[column]} ({unit})", ylabel=f"{names[row]} ({unit})")
    if cut is not None:
        centre = f"{(position[cut] + 0.5) * steps[cut]:g} µm" if volume.spacing else position[cut]
        axes.set_title(f"{names[cut]} = {centre}", fontsize=9)
        axes.axhline((position[row] + 0.5) * steps[row], color="#17becf", lw=0.6)
        axes.axvline((position[column] + 0.5) * steps[column], color="#17becf", lw=0.6)
    if volume.spacing is not None:
        add_scale_bar(axes, width)
    return image


def add_scale_bar(axes: Axes, width_um: float) -> None:
    """Draw a scale bar at the lower right of axes whose x is in µm."""
    from mpl_toolkits.axes_grid1.anchored_artists import AnchoredSizeBar

    length = scale_bar_um(width_um)
    label = scale_bar_label(length)
    bar = AnchoredSizeBar(axes.transData, length, label, "lower right", pad=0.5, sep=4, color="white", frameon=True)
    bar.patch.set(facecolor="black", alpha=0.55, edgecolor="none")
    axes.add_artist(bar)


def _in_notebook() -> bool:
    """Return whether this process is a Jupyter kernel, which shows objects that are displayed."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    return hasattr(get_ipython(), "kernel")


def _display(sections: Sections) -> None:
    from IPython import display

    try:
        shown = sliders(sections)
    except ImportError:
        shown = display.Image(sections._png())
    display.display(shown)


def sliders(sections: Sections) -> Any:
    """Return the widget of a notebook, a slider for each axis above the picture; ``ImportError`` without ipywidgets."""
    import ipywidgets

    volume = sections._volume
    picture = ipywidgets.Image(value=sections._png(), format="png")
    controls = [
        ipywidgets.IntSlider(index, 0, n - 1, description=name, continuous_update=False)
        for name, n, index in zip(volume.axes, volume.shape, sections.position, strict=True)
    ]

    def move(_: object) -> None:
        sections.move([control.value for control in controls])
        picture.value = sections._png()

    for control in controls:
        control.observe(move, names="value")
    return ipywidgets.VBox([ipywidgets.HBox(controls), picture])
