"""Write the files of vti.zip with the vtk package 9.7, and truth.npz: the arrays as that package reads them back."""

import zipfile
from pathlib import Path

import numpy as np
import vtk
from vtk.util.numpy_support import numpy_to_vtk, vtk_to_numpy

RNG = np.random.default_rng(7)


def image(extent=(2, 7, -1, 3, 0, 3), dtype=np.float32):
    made = vtk.vtkImageData()
    made.SetExtent(*extent)
    made.SetSpacing(0.5, 1, 2)
    nx, ny, nz = made.GetDimensions()
    points = nx * ny * nz
    cells = max(1, nx - 1) * max(1, ny - 1) * max(1, nz - 1)

    def add(group, name, count, components, kind):
        values = RNG.standard_normal((count, components)) * 100
        values = values.astype(kind) if np.dtype(kind).kind == "f" else values.astype(np.int64).astype(kind)
        array = numpy_to_vtk(values, deep=True)
        array.SetName(name)
        group.AddArray(array)

    add(made.GetPointData(), "first", points, 1, dtype)
    add(made.GetPointData(), "active", points, 1, dtype)
    add(made.GetPointData(), "vector", points, 3, np.float64)
    add(made.GetCellData(), "cell", cells, 2, np.uint16)
    made.GetPointData().SetActiveScalars("active")
    made.GetPointData().SetActiveVectors("vector")
    return made


def arrays(made):
    nx, ny, nz = made.GetDimensions()
    found = {}
    for group, shape in (
        (made.GetPointData(), (nz, ny, nx)),
        (made.GetCellData(), tuple(max(1, n - 1) for n in (nz, ny, nx))),
    ):
        for number in range(group.GetNumberOfArrays()):
            values = vtk_to_numpy(group.GetArray(number)).reshape(*shape, -1)
            found[group.GetArrayName(number)] = np.moveaxis(values, 3, 0)
    return found


def write_xml(path, made, mode, compressor, header=64, big=False, encode=False):
    writer = vtk.vtkXMLImageDataWriter()
    writer.SetFileName(str(path))
    writer.SetInputData(made)
    {
        "ascii": writer.SetDataModeToAscii,
        "binary": writer.SetDataModeToBinary,
        "appended": writer.SetDataModeToAppended,
    }[mode]()
    writer.SetEncodeAppendedData(encode)
    writer.SetCompressorType(getattr(vtk.vtkXMLWriter, compressor))
    writer.SetHeaderType(writer.UInt64 if header == 64 else writer.UInt32)
    (writer.SetByteOrderToBigEndian if big else writer.SetByteOrderToLittleEndian)()
    writer.SetBlockSize(240)  # several blocks
    assert writer.Write() == 1
    reader = vtk.vtkXMLImageDataReader()
    reader.SetFileName(str(path))
    reader.Update()
    return arrays(reader.GetOutput())


def write_legacy(path, made, binary):
    writer = vtk.vtkStructuredPointsWriter()
    writer.SetFileName(str(path))
    writer.SetInputData(made)
    (writer.SetFileTypeToBinary if binary else writer.SetFileTypeToASCII)()
    assert writer.Write() == 1
    reader = vtk.vtkStructuredPointsReader()
    reader.SetFileName(str(path))
    reader.ReadAllScalarsOn()
    reader.ReadAllVectorsOn()
    reader.Update()
    return arrays(reader.GetOutput())


def write_parallel(folder, made, ghosts):
    """Write eight pieces that overlap by their outer points, and by `ghosts` cells more."""
    name, pieces = f"parallel_{ghosts}", []
    extent = made.GetExtent()
    halves = [
        ((low, (low + high) // 2 + ghosts), ((low + high) // 2 - ghosts, high))
        for low, high in np.reshape(extent, (3, 2))
    ]
    for number, corner in enumerate(np.ndindex(2, 2, 2)):
        cut = vtk.vtkExtractVOI()
        cut.SetInputData(made)
        cut.SetVOI(*[one for half, side in zip(halves, corner, strict=True) for one in half[side]])
        cut.Update()
        write_xml(folder / f"{name}_{number}.vti", cut.GetOutput(), "appended", "ZLIB")
        where = " ".join(map(str, cut.GetOutput().GetExtent()))
        pieces.append(f'<Piece Extent="{where}" Source="{name}_{number}.vti"/>')
    whole = " ".join(map(str, extent))
    (folder / f"{name}.pvti").write_text(
        f"""<?xml version="1.0"?>
<VTKFile type="PImageData" version="0.1" byte_order="LittleEndian">
<PImageData WholeExtent="{whole}" GhostLevel="{ghosts}" Origin="0 0 0" Spacing="0.5 1 2">
<PPointData Scalars="active"><PDataArray type="Float32" Name="first"/><PDataArray type="Float32" Name="active"/>
<PDataArray type="Float64" Name="vector" NumberOfComponents="3"/></PPointData>
<PCellData><PDataArray type="UInt16" Name="cell" NumberOfComponents="2"/></PCellData>
{"".join(pieces)}
</PImageData></VTKFile>
"""
    )
    reader = vtk.vtkXMLPImageDataReader()
    reader.SetFileName(str(folder / f"{name}.pvti"))
    reader.Update()
    return arrays(reader.GetOutput())


def main():
    folder = Path("vti")
    folder.mkdir()
    truth = {}
    cases = [
        ("ascii", "NONE", 64, False, False),
        ("binary", "NONE", 32, False, False),
        ("binary", "ZLIB", 64, True, False),
    ]
    cases += [
        ("binary", "LZ4", 32, False, False),
        ("appended", "NONE", 64, False, False),
        ("appended", "NONE", 32, True, True),
    ]
    cases += [("appended", "ZLIB", 64, False, True), ("appended", "LZ4", 64, True, False)]
    cases += [("appended", "LZMA", 32, False, False), ("binary", "LZMA", 64, False, False)]
    for number, case in enumerate(cases):
        kind = [np.float32, np.int16, np.uint8, np.int64, np.float64][number % 5]
        name = "_".join(map(str, case)).lower() + ".vti"
        truth[name] = write_xml(folder / name, image(dtype=kind), *case)
    truth["flat.vti"] = write_xml(folder / "flat.vti", image((0, 4, 0, 3, 5, 5)), "appended", "ZLIB")
    for binary in (False, True):
        name = f"legacy_{'binary' if binary else 'ascii'}.vtk"
        truth[name] = write_legacy(folder / name, image(dtype=np.int32), binary)
    whole = image((0, 5, -3, 2, 1, 4))
    for ghosts in (0, 1):
        truth[f"parallel_{ghosts}.pvti"] = write_parallel(folder, whole, ghosts)
    flat = {f"{file}/{name}": values for file, found in truth.items() for name, values in found.items()}
    np.savez_compressed(folder / "truth.npz", **flat)
    with zipfile.ZipFile("vti.zip", "w", zipfile.ZIP_LZMA) as archive:
        for file in sorted(folder.iterdir()):
            archive.write(file, file.name)


if __name__ == "__main__":
    main()
