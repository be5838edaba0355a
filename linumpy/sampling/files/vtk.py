"""Read images of VTK by the ``vtk`` package: ``.vti``, ``.vtr``, ``.vts``, their parallel kinds, and legacy ``.vtk``.

In: a path and the name of an array. Out: the array's values, (components, Z, Y, X). An array of points has a voxel for
each point, an array of cells for each cell. Rectilinear and structured grids must have evenly spaced points along each
axis.
"""

from __future__ import annotations

import math
import os
import re
import stat
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import ArrayLike

from linumpy.device import machine_memory
from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.packages import install_line
from linumpy.sampling.files.binary import no_such_error
from linumpy.sampling.volume import KEPT

#: A reader, a data set or an array of the vtk package, which is imported only when a file is read.
VtkObject: TypeAlias = Any

#: Messages of VTK about legacy files whose values are complete: they are ignored.
_HARMLESS = ("No spacing read", "No origin read", "Not all meta data was read")
#: Tolerance of even spacing: largest distance of a point from its position on an even grid, in steps of the grid. If
#: float32 rounds coordinates by more, the tolerance is the rounding error, up to a quarter of a step.
_UNEVEN = 1e-3
_KINDS = ("vtkImageData", "vtkRectilinearGrid", "vtkStructuredGrid")
#: Kinds of files of XML; those whose pieces are in other files begin with a P.
_XML_KINDS = ("ImageData", "RectilinearGrid", "StructuredGrid")
_RESAMPLE = "resample it in VTK, such as by vtkResampleToImage"
#: All threads share VTK's window for messages; it is replaced while a file is read.
_messages_lock = threading.Lock()


def open_vtk(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], field: str | None = None) -> np.ndarray:
    """Read an array of one or several images: voxels (C, Z, Y, X) of a dtype that kernels sample.

    `files`: images in the order of time, all with as many voxels and components. `field`: name of the array in each
    file; by default the active scalars, or the first array. Channels are the components of the array in the first file,
    then those in the next.
    """
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    if not paths:
        raise SourceError("files= names no file")
    steps = [read_vtk(path, field) for path in paths]
    for path, step in zip(paths, steps, strict=True):
        if step.shape != steps[0].shape:
            raise SourceError(
                f"{os.fspath(path)}: has (components, z, y, x) {step.shape}, but {os.fspath(paths[0])} {steps[0].shape}"
            )
    voxels = np.concatenate(steps)
    return voxels if voxels.dtype.str[1:] in KEPT else voxels.astype(np.float32)


def read_vtk(path: str | os.PathLike[str], field: str | None = None) -> np.ndarray:
    """Read an array (components, Z, Y, X), by default the active scalars or the first; arrays of points come first."""
    name = os.fspath(path)
    with open(name, "rb") as file:
        is_legacy = file.read(20).lower().startswith(b"# vtk datafile")
    try:
        import vtkmodules
    except ImportError as error:
        raise SourceError(f"{name}: is read by vtk, which is not installed: {install_line('vtk')}") from error
    del vtkmodules
    from vtkmodules.util.numpy_support import vtk_to_numpy

    header = None if is_legacy else read_header(name)
    grid = _read_grid(name, is_legacy)
    if grid.IsA("vtkRectilinearGrid"):
        for axis in "XYZ":
            _check_even(name, axis, vtk_to_numpy(getattr(grid, f"Get{axis}Coordinates")()))
    elif grid.IsA("vtkStructuredGrid"):
        _check_structured(name, grid)
    return _values(name, grid, header, field)


def _read_grid(name: str, is_legacy: bool) -> VtkObject:
    """Read a ``vtkDataSet``; a message that VTK writes meanwhile becomes an error."""
    from vtkmodules.vtkCommonCore import vtkOutputWindow, vtkStringOutputWindow
    from vtkmodules.vtkIOXML import vtkXMLGenericDataObjectReader

    reader = _legacy_reader() if is_legacy else vtkXMLGenericDataObjectReader()
    reader.SetFileName(name)
    messages = vtkStringOutputWindow()
    with _messages_lock:
        window = vtkOutputWindow.GetInstance()
        vtkOutputWindow.SetInstance(messages)
        try:
            reader.UpdateInformation()
            _check_size(name, reader)
            reader.Update()
        finally:
            vtkOutputWindow.SetInstance(window)
    for message in re.split(r"(?:ERROR|Warning): In ", messages.GetOutput())[1:]:
        text = " ".join(message.split("\n", 1)[-1].split())
        if not any(harmless in text for harmless in _HARMLESS):
            raise SourceError(f"{name}: VTK cannot read it: {re.sub(r'^[ (]*vtk[^:]*: ', '', text)}")
    grid = reader.GetOutputDataObject(0)
    if grid is None or not any(map(grid.IsA, _KINDS)):
        kind = "no data set" if grid is None else grid.GetClassName()
        raise UnsupportedLayoutError(f"{name}: holds {kind}, and only {', '.join(_KINDS)} are read")
    return grid


def _legacy_reader() -> VtkObject:
    from vtkmodules.vtkIOLegacy import vtkDataSetReader

    reader = vtkDataSetReader()
    for kind in ("Scalars", "ColorScalars", "Vectors", "Normals", "TCoords", "Tensors", "Fields"):
        getattr(reader, f"ReadAll{kind}On")()
    return reader


def _check_size(name: str, reader: VtkObject) -> None:
    """Refuse an empty extent, and one of more points than memory has bytes: VTK would end the process."""
    from vtkmodules.vtkCommonExecutionModel import vtkStreamingDemandDrivenPipeline

    key, information = vtkStreamingDemandDrivenPipeline.WHOLE_EXTENT(), reader.GetOutputInformation(0)
    if not information.Has(key):
        return
    extent = information.Get(key)
    shape = shape_of(extent[::2], extent[1::2], False)
    if min(shape) < 1:
        raise SourceError(f"{name}: its extent {extent} is empty")
    if math.prod(shape) > machine_memory():
        text = " × ".join(map(str, shape))
        raise SourceError(f"{name}: says that it has {text} points, more than this machine has bytes of memory")


def _check_structured(name: str, grid: VtkObject) -> None:
    from vtkmodules.util.numpy_support import vtk_to_numpy

    points = vtk_to_numpy(grid.GetPoints().GetData()).reshape(*_shape(grid, False), 3)
    lines = [np.moveaxis(points[..., number], 2 - number, 2) for number in range(3)]
    tolerances = [_check_even(name, axis, along[0, 0]) for axis, along in zip("XYZ", lines, strict=True)]
    for axis, along, tolerance in zip("XYZ", lines, tolerances, strict=True):
        if not np.abs(along - along[0, 0]).max() <= (tolerance or max(tolerances)):
            raise UnsupportedLayoutError(
                f"{name}: {axis} of its points changes along another axis of the grid, so it is no image; {_RESAMPLE}"
            )


def _check_even(name: str, axis: str, coordinates: np.ndarray) -> float:
    """Refuse points that are not evenly spaced along an axis; return the tolerance, 0 for a single point."""
    points = coordinates.astype(np.float64)
    if len(points) == 1:
        return 0.0
    even = np.linspace(points[0], points[-1], len(points))
    step = float(abs(even[1] - even[0]))
    rounding = float(np.abs(points).max()) * 2.0**-22 if coordinates.dtype == np.float32 else 0.0
    tolerance = min(max(_UNEVEN * step, rounding), step / 4)
    if not (step > 0 and np.abs(points - even).max() <= tolerance):
        steps = np.abs(np.diff(points))
        raise UnsupportedLayoutError(
            f"{name}: its points are {steps.min():g} to {steps.max():g} apart along {axis}, and only even distances "
            f"are read; {_RESAMPLE}"
        )
    return tolerance


def _values(name: str, grid: VtkObject, header: Header | None, field: str | None) -> np.ndarray:
    from vtkmodules.util.numpy_support import vtk_to_numpy

    array, of_cells = _choose_array(name, grid, field)
    if header is not None:
        header.check_filled(of_cells)
    if not array.IsA("vtkDataArray") or array.IsA("vtkBitArray"):
        kind = array.GetDataTypeAsString()
        raise UnsupportedLayoutError(f"{name}: array {array.GetName()!r} holds values of type {kind!r}, not numbers")
    values = vtk_to_numpy(array).reshape(*_shape(grid, of_cells), array.GetNumberOfComponents())
    return np.ascontiguousarray(np.moveaxis(values, 3, 0))


def _shape(grid: VtkObject, of_cells: bool) -> tuple[int, ...]:
    extent = grid.GetExtent()
    return shape_of(extent[::2], extent[1::2], of_cells)


def _choose_array(name: str, grid: VtkObject, field: str | None) -> tuple[VtkObject, bool]:
    """Return an array, and whether it has a value for each cell; active scalars come first, then arrays of points."""
    arrays = []
    for of_cells, group in ((False, grid.GetPointData()), (True, grid.GetCellData())):
        for number in range(group.GetNumberOfArrays()):
            array = group.GetAbstractArray(number)
            arrays.append((array, of_cells, array is group.GetScalars()))
    allowed = None if field is None else {field, unquote(field)}
    for array, of_cells, _ in sorted(arrays, key=lambda entry: not entry[2]):
        if allowed is None or array.GetName() in allowed:
            return array, of_cells
    raise no_such_error("array", field, [array.GetName() for array, *_ in arrays], name)


@dataclass(frozen=True)
class Header:
    """The pieces of a file."""

    name: str  # path of the file, for errors
    extent: np.ndarray  # first and last point of the image along x, y, z: (2, 3) int64
    #: Extents of the pieces, and the headers of their files where the pieces are files.
    pieces: list[tuple[np.ndarray, Header | None]]

    def check_filled(self, of_cells: bool, box: np.ndarray | None = None) -> None:
        """Refuse pieces that do not cover the image or, of a piece in a file, `box`: ``SourceError``."""
        low, high = self.extent if box is None else box
        covered = np.zeros(shape_of(low, high, of_cells), bool)
        for extent, inner in self.pieces:
            first, last = np.maximum(extent[0], low), np.minimum(extent[1], high)
            if (first <= last).all():
                start = (first - low)[::-1]
                covered[tuple(map(slice, start, start + shape_of(first, last, of_cells)))] = True
            if inner is not None:
                inner.check_filled(of_cells, extent)
        if not covered.all():
            raise SourceError(f"{self.name}: its pieces leave a part of {_text(np.stack([low, high]))} empty")


def shape_of(first: ArrayLike, last: ArrayLike, of_cells: bool) -> tuple[int, ...]:
    """Return the numbers of values (Z, Y, X) between two points (x, y, z); a flat box has a layer of cells."""
    points = (np.asarray(last) - np.asarray(first) + 1).tolist()
    return tuple(max(1, n - 1) if of_cells else n for n in reversed(points))


def read_header(path: str, image: Element | None = None) -> Header:
    """Read the extents of a file and of the files of its pieces; `image` is the file, if it was parsed before."""
    image = _read_image(path) if image is None else image
    whole = _extent(path, image, "WholeExtent")
    pieces: list[tuple[np.ndarray, Header | None]] = []
    for piece in image.findall("Piece"):
        extent = _extent(path, piece, "Extent")
        if (extent[0] < whole[0]).any() or (extent[1] > whole[1]).any():
            raise SourceError(f"{path}: its piece of extent {_text(extent)} lies outside of {_text(whole)}")
        pieces.append((extent, _piece_header(path, piece) if image.tag.startswith("P") else None))
    return Header(path, whole, pieces)


def _read_image(path: str) -> Element:
    """Parse a file without its appended data, which is no XML."""
    with open(path, "rb", opener=_open_regular) as file:
        content = file.read()
    head, separator, _ = content.partition(b"<AppendedData")
    try:
        root = ElementTree.fromstring(head + b"</VTKFile>" if separator else content)
    except ElementTree.ParseError as error:
        raise SourceError(f"{path}: is no VTK image, or truncated: {error}") from error
    kind = root.get("type", root.tag)
    if kind.removeprefix("P") not in _XML_KINDS:
        raise UnsupportedLayoutError(f"{path}: holds {kind!r}, and only {', '.join(_XML_KINDS)} are read")
    image = root.find(kind)
    if image is None:
        raise SourceError(f"{path}: has no image; the file is truncated or damaged")
    return image


def _extent(name: str, element: Element, key: str) -> np.ndarray:
    """Return the first and last point along x, y, z: (2, 3)."""
    text = element.get(key, "")
    try:
        extent = np.array([int(number) for number in text.split()], np.int64).reshape(3, 2).T
    except (ValueError, OverflowError) as error:
        raise SourceError(f"{name}: {key}={text!r} are not six whole numbers") from error
    if (extent[1] < extent[0]).any() or np.abs(extent).max() >= 2**31:
        raise SourceError(f"{name}: {key}={text!r} is no extent of an image")
    return extent


def _piece_header(index: str, piece: Element) -> Header:
    """Read the header of a piece: a regular file below the folder of the `index` that names it, links resolved."""
    source, folder = piece.get("Source", ""), os.path.realpath(os.path.dirname(index))
    path = os.path.realpath(os.path.join(folder, source))
    if os.path.commonpath([folder, path]) != folder:
        raise SourceError(f"{index}: its piece {source!r} lies outside of the folder of this file, and is not read")
    try:
        image = _read_image(path)
    except OSError as error:
        raise SourceError(f"{index}: its piece {source!r} cannot be read: {error}") from error
    if image.tag.startswith("P"):
        raise SourceError(f"{index}: its piece {source!r} has pieces in other files, and is not read")
    return read_header(path, image)


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file; a FIFO is refused without waiting for its writer."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no FIFOs
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError("it is no regular file")


def _text(extent: np.ndarray) -> str:
    return repr(" ".join(map(str, extent.T.ravel())))
