"""If this fails, arrays of VTK files are read otherwise than the vtk package wrote them (tests/data/write_vti.py)."""

import contextlib
import itertools
import os
import re
import sys
from urllib.parse import quote

import numpy as np
import pytest

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling import create_sampler
from linumpy.sampling.files.vtk import read_header, read_vtk
from tests.support.gpu.field_runs import decode, on_gpu


def open_vtk(files, field=None, device="cpu"):
    return create_sampler("vtkm", device, files=files, field=field).field


pytest.importorskip("vtkmodules", reason="vtk is not installed: pip install vtk")

NAMES = [
    *("ascii_none_64_false_false", "binary_none_32_false_false", "binary_zlib_64_true_false"),
    *("binary_lz4_32_false_false", "binary_lzma_64_false_false", "appended_none_64_false_false"),
    *("appended_none_32_true_true", "appended_zlib_64_false_true", "appended_lz4_64_true_false"),
    *("appended_lzma_32_false_false", "flat"),
]
FILES = [
    *(f"{name}.vti" for name in NAMES),
    *("parallel_0.pvti", "parallel_1.pvti"),
    "legacy_ascii.vtk",
    "legacy_binary.vtk",
]

LEGACY = "# vtk DataFile Version 3.0\n\nBINARY\nDATASET STRUCTURED_POINTS\n"


@pytest.fixture(scope="module")
def files(extracted):
    return extracted("vti.zip")


@pytest.mark.parametrize("name", FILES)
def test_as_vtk_reads_them(files, name):
    truth = np.load(files / "truth.npz")
    for field in ("first", "active", "vector", "cell"):
        found, expected = read_vtk(files / name, field), truth[f"{name}/{field}"]
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_array_equal(found, expected)
        assert found.dtype.isnative
    if not name.startswith("legacy"):  # whose active array is the one that comes first
        np.testing.assert_array_equal(read_vtk(files / name), truth[f"{name}/active"])
    with pytest.raises(SourceError, match=r"has no array 'other'; its arrays are \["):
        read_vtk(files / name, "other")


def test_components_and_timesteps_are_channels(files):
    names = [files / "parallel_0.pvti", files / "parallel_1.pvti"]
    field = open_vtk(names, "vector")
    truth = np.load(files / "truth.npz")
    voxels = np.concatenate([truth[f"{name.name}/vector"] for name in names])
    assert field.n_channels == 6
    assert field.value_range == (voxels.astype(np.float32).min(), voxels.astype(np.float32).max())
    z, y, x = np.indices(voxels.shape[1:])
    centres = np.stack([x, y, z], -1).reshape(-1, 3)
    coords = (centres + 0.5) / voxels.shape[:0:-1]
    np.testing.assert_allclose(decode(field, coords), voxels.reshape(6, -1), rtol=1e-4, atol=1e-3)
    single = open_vtk(str(names[0]), "vector")
    np.testing.assert_array_equal(decode(single, coords), decode(field, coords)[:3])
    with pytest.raises(SourceError, match=r"flat\.vti: has \(components, z, y, x\) \(1, 1, 4, 5\), but"):
        open_vtk([names[0], files / "flat.vti"])
    with pytest.raises(SourceError, match="files= names no file"):
        open_vtk([])


@pytest.mark.parametrize("name", FILES)
def test_truncated_anywhere(files, tmp_path, name):
    """Never other values than those of the whole file, and never another error than ours."""
    content = (files / name).read_bytes()
    whole = read_vtk(files / name, "first")
    for size in np.linspace(0, len(content) - 1, 40).astype(int):
        for other in files.glob("parallel*.vti") if name.endswith("pvti") else ():
            (tmp_path / other.name).write_bytes(other.read_bytes())
        (tmp_path / name).write_bytes(content[:size])
        try:
            found = read_vtk(tmp_path / name, "first")
        except (SourceError, UnsupportedLayoutError):
            continue
        np.testing.assert_array_equal(found, whole)


@pytest.mark.parametrize("seed", range(3))
def test_random_damage_of_headers_gives_our_errors(files, tmp_path, seed):
    """VTK may end the process on damaged values; extents are read by linumpy."""
    rng = np.random.default_rng(seed)
    for name in FILES[:-2]:
        known = (files / name).read_bytes()
        for _ in range(6):
            content = bytearray(known)
            for position in rng.integers(0, min(2000, len(content)), 3):
                content[position] = rng.integers(256)
            (tmp_path / name).write_bytes(content)
            with contextlib.suppress(SourceError, UnsupportedLayoutError):
                read_header(str(tmp_path / name)).check_filled(False)


def image(extent="0 1 0 1 0 1", whole=None, kind="Float32", form="ascii", text="1 2 3 4 5 6 7 8", more=""):
    return f"""<VTKFile type="ImageData" byte_order="LittleEndian"><ImageData WholeExtent="{whole or extent}">
<Piece Extent="{extent}"><PointData><DataArray type="{kind}" Name="a" format="{form}" {more}>{text}</DataArray>
</PointData></Piece></ImageData></VTKFile>"""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is no VTK image, or truncated"),
        (b"\x93NUMPY", "is no VTK image, or truncated"),
        (b"<VTKFile/>", "holds 'VTKFile', and only ImageData"),
        (b"<VTKFile type='PolyData'/>", "holds 'PolyData', and only ImageData"),
        (image().replace("<ImageData ", "<Other ").replace("/ImageData", "/Other"), "has no image"),
        (image(extent="0 1 0 1 0"), "are not six whole numbers"),
        (image(extent="0 1 0 -1 0 1"), "no extent of an image"),
        (image(extent="0 1 0 1 0 99999999999"), "no extent of an image"),
        (image(extent=f"0 {2**31 - 1} 0 {2**31 - 1} 0 1"), "more than this machine has bytes of memory"),
        (image(extent="0 1 0 1 0 2"), "VTK cannot read it: Error reading extent"),
        (image(whole="0 1 0 1 0 3"), "its pieces leave a part of '0 1 0 1 0 3' empty"),
        (image(extent="0 1 0 1 0 1", whole="0 1 0 1 1 2"), "extent '0 1 0 1 0 1' lies outside of '0 1 0 1 1 2'"),
        (image(text="1 2 3 4 5 6 7 x"), "VTK cannot read it: Error reading extent"),
        (image(form="binary", text="/////w=="), "VTK cannot read it: "),
        (image(form="appended", more='offset="-1"'), "VTK cannot read it: "),
        (LEGACY.replace("BINARY", "OTHER"), "VTK cannot read it: Unrecognized file type"),
        (LEGACY.replace("STRUCTURED_POINTS", "POLYDATA") + "POINTS 1 float\n123456789012", "holds vtkPolyData, and"),
        (LEGACY + "DIMENSIONS -1 2 2\n", "its extent .* is empty"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 9\n", "Number of points don't match"),
        (LEGACY + "DIMENSIONS 2000000000 2000000000 2\nPOINT_DATA 8\n", "more than this machine has bytes of memory"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a double\nLOOKUP_TABLE default\n1234", "VTK cannot read it"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a bit\nLOOKUP_TABLE default\n1", "type 'bit', not numbers"),
    ],
)
def test_faulty_images(tmp_path, content, problem):
    (tmp_path / "a.vti").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((SourceError, UnsupportedLayoutError), match=problem) as found:
        read_vtk(tmp_path / "a.vti")
    assert "a.vti" in str(found.value)


def test_binary_values_that_look_like_white_space(tmp_path):
    values = np.array([0x20, 0x0A, 0x20, 0x0D, 0x09, 1, 0x20, 0x0A], np.uint8)
    head = LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a unsigned_char\nLOOKUP_TABLE default\n"
    (tmp_path / "a.vtk").write_bytes(head.encode() + values.tobytes() + b"\n")
    np.testing.assert_array_equal(read_vtk(tmp_path / "a.vtk").ravel(), values)


def legacy_file(path, arrays, binary, shape=(2, 3, 4)):
    """Write arrays of points as vtkStructuredPointsWriter does: bytes as colours, names in percent-encoding."""
    z, y, x = shape
    head = LEGACY if binary else LEGACY.replace("BINARY", "ASCII")
    content = f"{head}FIELD FieldData 1\nTimeValue 1 1 double\n".encode()
    content += (np.array([0.5], ">f8").tobytes() if binary else b"0.5") + b"\n"
    content += f"DIMENSIONS {x} {y} {z}\nSPACING 1 1 1\nORIGIN 0 0 0\nPOINT_DATA {x * y * z}\n".encode()
    for name, values in arrays.items():
        flat, components = np.moveaxis(values, 0, -1).ravel(), len(values)
        if values.dtype == np.uint8:
            content += f"COLOR_SCALARS {quote(name)} {components}\n".encode()
            text = " ".join(f"{one / 255:g}" for one in flat)
        else:
            content += f"SCALARS {quote(name)} float {components}\nLOOKUP_TABLE default\n".encode()
            text = " ".join(map(str, flat))
        content += (flat.astype(flat.dtype.newbyteorder(">")).tobytes() if binary else text.encode()) + b"\n"
    path.write_bytes(content)


@pytest.mark.parametrize("binary", [False, True])
def test_bytes_and_names_with_spaces_as_vtk_writes_them(tmp_path, binary):
    rng = np.random.default_rng(3)
    arrays = {
        "oct": rng.integers(0, 256, (1, 2, 3, 4), "u1"),
        "rgb ä %": rng.integers(0, 256, (3, 2, 3, 4), "u1"),
        "my oct": rng.random((1, 2, 3, 4), "f4"),
    }
    legacy_file(tmp_path / "a.vtk", arrays, binary)
    for name, values in arrays.items():
        found = read_vtk(tmp_path / "a.vtk", name)
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(read_vtk(tmp_path / "a.vtk"), arrays["oct"])
    np.testing.assert_array_equal(read_vtk(tmp_path / "a.vtk", "my%20oct"), arrays["my oct"])
    with pytest.raises(SourceError, match=r"its arrays are \['oct', 'rgb ä %', 'my oct'\]"):
        read_vtk(tmp_path / "a.vtk", "other")


def test_every_byte_is_read_from_text(tmp_path):
    values = np.arange(256, dtype="u1").reshape(1, 4, 8, 8)
    legacy_file(tmp_path / "a.vtk", {"a": values}, False, (4, 8, 8))
    np.testing.assert_array_equal(read_vtk(tmp_path / "a.vtk"), values)


def test_pieces_must_fill_the_whole(files, tmp_path):
    for file in files.glob("parallel_1*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (tmp_path / "parallel_1.pvti").read_text()
    sixth, seventh = re.findall("<Piece .*?/>", content)[6:]
    (tmp_path / "parallel_1.pvti").write_text(content.replace(seventh, sixth))
    with pytest.raises(SourceError, match="VTK cannot read it: No available piece provides data"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "parallel_1_6.vti"))
    with pytest.raises(SourceError, match=r"VTK cannot read it: .* is outside the whole extent"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "parallel_1_0.vti"))
    with pytest.raises(SourceError, match=r"VTK cannot read it: .* is outside the whole extent"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "nothing.vti"))
    with pytest.raises(SourceError, match=r"its piece 'nothing\.vti' cannot be read"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")


@pytest.mark.parametrize("source", ["a.pvti", "b.pvti"])
def test_a_file_that_names_itself_as_a_piece(tmp_path, source):
    """A .pvti file whose piece is the file itself, or one whose piece is the first file again."""
    for name, named in (("a.pvti", source), ("b.pvti", "a.pvti")):
        (tmp_path / name).write_text(pvti((2, 3, 4), [("0 3 0 2 0 1", named)]))
    with pytest.raises(SourceError, match=rf"a\.pvti: its piece '{source}' has pieces in other files, and is not read"):
        read_vtk(tmp_path / "a.pvti")


def piece(values, begin):
    """One piece of a .vti file whose voxels are points, as text."""
    extent = " ".join(f"{b} {b + n - 1}" for b, n in zip(begin[::-1], values.shape[::-1], strict=True))
    text = " ".join(map(str, values.ravel()))
    array = f'<DataArray type="Int32" Name="a" format="ascii">{text}</DataArray>'
    return extent, f'<Piece Extent="{extent}"><PointData>{array}</PointData></Piece>'


def vti(shape, pieces, more=""):
    whole = " ".join(f"0 {n - 1}" for n in shape[::-1])
    return (
        f'<VTKFile type="ImageData" byte_order="LittleEndian"><ImageData WholeExtent="{whole}" {more}>'
        f"{''.join(pieces)}</ImageData></VTKFile>"
    )


def pvti(shape, sources, ghosts=0):
    pieces = [f'<Piece Extent="{extent}" Source="{source}"/>' for extent, source in sources]
    arrays = '<PPointData><PDataArray type="Int32" Name="a"/></PPointData>'
    return vti(shape, [arrays, *pieces], f'GhostLevel="{ghosts}"').replace("ImageData", "PImageData")


def cuts(rng, n, ghosts):
    """Ranges of points that share their ends, and so many more where they meet."""
    inner = (
        np.sort(rng.choice(np.arange(1, n - 1), min(n - 2, int(rng.integers(0, 4))), replace=False)) if n > 2 else []
    )
    ends = [0, *inner, n - 1]
    return [(max(0, a - ghosts), min(n, b + 1 + ghosts)) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(12))
def test_random_pieces_are_put_together(tmp_path, seed):
    rng = np.random.default_rng(seed)
    shape = tuple(int(n) for n in rng.integers(1, 12, 3))
    values, ghosts = rng.integers(-1000, 1000, shape).astype("i4"), int(rng.integers(0, 3))
    boxes = list(itertools.product(*(cuts(rng, n, ghosts) for n in shape)))
    pieces = [piece(values[tuple(slice(*one) for one in box)], [a for a, _ in box]) for box in boxes]
    (tmp_path / "in").mkdir()
    sources = [(extent, f"in/{number}.vti") for number, (extent, _) in enumerate(pieces)]
    for (_, source), (_, content) in zip(sources, pieces, strict=True):
        (tmp_path / source).write_text(vti(shape, [content]))
    (tmp_path / "a.pvti").write_text(pvti(shape, sources, ghosts))
    assert np.array_equal(read_vtk(tmp_path / "a.pvti")[0], values)
    (tmp_path / "a.vti").write_text(vti(shape, [content for _, content in pieces], f'GhostLevel="{ghosts}"'))
    assert np.array_equal(read_vtk(tmp_path / "a.vti")[0], values)


def test_pieces_of_files_that_hold_more(tmp_path):
    """Both pieces are parts of one file, whose own pieces begin before them and end behind them."""
    values = np.arange(2 * 3 * 8, dtype="i4").reshape(2, 3, 8)
    inner = [piece(values[..., a:b], (0, 0, a))[1] for a, b in ((0, 4), (3, 8))]
    (tmp_path / "in.vti").write_text(vti(values.shape, inner))
    (tmp_path / "a.pvti").write_text(pvti(values.shape, [("0 2 0 2 0 1", "in.vti"), ("2 7 0 2 0 1", "in.vti")]))
    assert np.array_equal(read_vtk(tmp_path / "a.pvti")[0], values)


def test_pieces_that_share_no_points(tmp_path):
    values = np.arange(2 * 3 * 8, dtype="i4").reshape(2, 3, 8)
    for width in (1, 2, 4):
        parts = [piece(values[..., x : x + width], (0, 0, x))[1] for x in range(0, 8, width)]
        (tmp_path / "a.vti").write_text(vti(values.shape, parts))
        assert np.array_equal(read_vtk(tmp_path / "a.vti")[0], values)


@pytest.fixture
def outside(tmp_path):
    """An index in a folder, and a good piece beside that folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    values = np.arange(8, dtype="i4").reshape(2, 2, 2)
    extent, content = piece(values, (0, 0, 0))
    (tmp_path / "good.vti").write_text(vti(values.shape, [content]))

    def index(source):
        (folder / "a.pvti").write_text(pvti(values.shape, [(extent, source)]))
        return read_vtk(folder / "a.pvti")

    return folder, values, index


@pytest.mark.parametrize("source", ["/dev/zero", "/dev/stdin", "../good.vti", "", ".", "..", "a/../../good.vti"])
def test_pieces_lie_below_the_folder_of_their_index(outside, source):
    _, _, index = outside
    with pytest.raises(SourceError, match=r"a\.pvti: its piece '.*' (lies outside of the folder|cannot be read: )"):
        index(source)
    with pytest.raises(SourceError, match="lies outside of the folder"):
        index(str(outside[0].parent / "good.vti"))


def test_links_to_pieces_are_followed_before_their_folder_is_checked(outside):
    folder, values, index = outside
    (folder / "link.vti").symlink_to("../good.vti")
    (folder / "zero.vti").symlink_to("/dev/zero")
    (folder / "up").symlink_to("..")
    for source in ("link.vti", "zero.vti", "up/good.vti"):
        with pytest.raises(SourceError, match=f"its piece '{source}' lies outside of the folder of this file"):
            index(source)
    (folder / "in").mkdir()
    (folder / "in/good.vti").write_bytes((folder.parent / "good.vti").read_bytes())
    (folder / "near.vti").symlink_to("in/good.vti")
    for source in ("in/good.vti", "near.vti", str(folder / "in/good.vti"), "in/../near.vti"):
        assert np.array_equal(index(source)[0], values)
    (folder.parent / "other").symlink_to(folder)
    assert np.array_equal(read_vtk(folder.parent / "other/a.pvti")[0], values)


def test_a_pipe_is_no_piece(outside):
    folder, _, index = outside
    os.mkfifo(folder / "pipe.vti")
    with pytest.raises(SourceError, match=r"its piece 'pipe\.vti' cannot be read: it is no regular file"):
        index("pipe.vti")


def test_cells_that_no_piece_holds(tmp_path):
    """Pieces that share no points hold all points, and not the cells between the pieces."""
    values = np.arange(2 * 3 * 8, dtype="i4").reshape(2, 3, 8)
    parts = [piece(values[..., x : x + 4], (0, 0, x))[1] for x in (0, 4)]
    cells = '<CellData><DataArray type="Int32" Name="cell" format="ascii">1 2 3 4 5 6</DataArray></CellData></Piece>'
    (tmp_path / "a.vti").write_text(vti(values.shape, [one.replace("</Piece>", cells) for one in parts]))
    np.testing.assert_array_equal(read_vtk(tmp_path / "a.vti", "a")[0], values)
    with pytest.raises(SourceError, match=r"leave a part of '.*' empty"):
        read_vtk(tmp_path / "a.vti", "cell")


def text_grid(kind, coordinates, values, cells=None, precision=64):
    """A rectilinear (three lines of coordinates) or structured (points, (Z, Y, X, 3)) grid as text."""
    extent = " ".join(f"0 {n - 1}" for n in values.shape[::-1])

    def array(name, numbers, components=1, precision=64):
        text = " ".join(map(repr, np.ravel(numbers).tolist()))
        attributes = f'Name="{name}" format="ascii" NumberOfComponents="{components}"'
        return f'<DataArray type="Float{precision}" {attributes}>{text}</DataArray>'

    if kind == "RectilinearGrid":
        where = (
            "<Coordinates>"
            + "".join(array(n, line, 1, precision) for n, line in zip("xyz", coordinates, strict=True))
            + "</Coordinates>"
        )
    else:
        where = "<Points>" + array("p", coordinates, 3, precision) + "</Points>"
    data = f"<PointData>{array('a', values)}</PointData>"
    if cells is not None:
        data += f"<CellData>{array('c', cells)}</CellData>"
    return (
        f'<VTKFile type="{kind}" version="1.0" byte_order="LittleEndian"><{kind} WholeExtent="{extent}">'
        f'<Piece Extent="{extent}">{data}{where}</Piece></{kind}></VTKFile>'
    )


def even_axes(shape, scale=(0.5, -2.0, 1e-3), origin=(-7.0, 3e6, 0.1)):
    """Coordinates along x, y, z; y falls."""
    return [o + s * np.arange(n) for o, s, n in zip(origin, scale, shape[::-1], strict=True)]


def as_points(axes):
    z, y, x = np.meshgrid(*axes[::-1], indexing="ij")
    return np.stack([x, y, z], -1)


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 3, 2), (2, 2, 2), (1, 1, 1)])
def test_evenly_spaced_grids_are_images(tmp_path, shape):
    rng = np.random.default_rng(1)
    values, cells = rng.random(shape), rng.random([max(1, n - 1) for n in shape])
    axes = [line.astype(np.float32).astype(float) for line in even_axes(shape)]
    (tmp_path / "a.vtr").write_text(text_grid("RectilinearGrid", axes, values, cells, 32))
    (tmp_path / "a.vts").write_text(text_grid("StructuredGrid", as_points(axes), values, cells, 32))
    for name in ("a.vtr", "a.vts"):
        np.testing.assert_array_equal(read_vtk(tmp_path / name), values[None])
        np.testing.assert_array_equal(read_vtk(tmp_path / name, "c"), cells[None])
    coords = (rng.random((50, 3)) * 0.5 + 0.25).astype(np.float32)
    assert np.array_equal(decode(open_vtk(tmp_path / "a.vtr"), coords), decode(open_vtk(tmp_path / "a.vts"), coords))


@pytest.mark.parametrize("axis", range(3))
def test_grids_that_are_not_evenly_spaced(tmp_path, axis):
    shape = (4, 5, 6)
    axes, name = even_axes(shape), "XYZ"[axis]
    steps = np.abs(np.diff(axes[axis]))
    axes[axis][-1] += (axes[axis][-1] - axes[axis][-2]) * 0.5
    for kind, ending, where in (("RectilinearGrid", "vtr", axes), ("StructuredGrid", "vts", as_points(axes))):
        (tmp_path / f"a.{ending}").write_text(text_grid(kind, where, np.zeros(shape)))
        apart = f"{steps[0]:g} to {steps[0] * 1.5:g} apart along {name}, and only even"
        with pytest.raises(UnsupportedLayoutError, match=rf"a\.{ending}: its points are {re.escape(apart)}"):
            read_vtk(tmp_path / f"a.{ending}")
    points = as_points(even_axes(shape))
    points[2, 3, 4, axis] += steps[0] / 100
    (tmp_path / "a.vts").write_text(text_grid("StructuredGrid", points, np.zeros(shape)))
    with pytest.raises(UnsupportedLayoutError, match=rf"a\.vts: {name} of its points changes along another axis"):
        read_vtk(tmp_path / "a.vts")


def vtk_grid(kind, values):
    from vtkmodules import vtkCommonDataModel
    from vtkmodules.util.numpy_support import numpy_to_vtk
    from vtkmodules.vtkCommonCore import vtkPoints

    grid, axes = getattr(vtkCommonDataModel, kind)(), even_axes(values.shape)
    grid.SetDimensions(*values.shape[::-1])
    if kind == "vtkRectilinearGrid":
        for name, line in zip("XYZ", axes, strict=True):
            getattr(grid, f"Set{name}Coordinates")(numpy_to_vtk(line, deep=True))
    else:
        points = vtkPoints()
        points.SetData(numpy_to_vtk(as_points(axes).reshape(-1, 3), deep=True))
        grid.SetPoints(points)
    array = numpy_to_vtk(values.ravel(), deep=True)
    array.SetName("my a")
    grid.GetPointData().SetScalars(array)
    return grid


@pytest.mark.parametrize(
    ("kind", "module", "writer", "name"),
    [
        ("vtkRectilinearGrid", "vtkIOXML", "vtkXMLRectilinearGridWriter", "a.vtr"),
        ("vtkStructuredGrid", "vtkIOXML", "vtkXMLStructuredGridWriter", "a.vts"),
        ("vtkRectilinearGrid", "vtkIOParallelXML", "vtkXMLPRectilinearGridWriter", "a.pvtr"),
        ("vtkStructuredGrid", "vtkIOParallelXML", "vtkXMLPStructuredGridWriter", "a.pvts"),
        ("vtkRectilinearGrid", "vtkIOLegacy", "vtkRectilinearGridWriter", "r.vtk"),
        ("vtkStructuredGrid", "vtkIOLegacy", "vtkStructuredGridWriter", "s.vtk"),
    ],
)
def test_grids_that_vtk_writes(tmp_path, kind, module, writer, name):
    values = np.random.default_rng(2).integers(0, 1000, (5, 4, 6)).astype(np.int16)
    made = getattr(__import__(f"vtkmodules.{module}", fromlist=[writer]), writer)()
    made.SetFileName(str(tmp_path / name))
    made.SetInputData(vtk_grid(kind, values))
    if name.startswith("a.p"):
        made.SetNumberOfPieces(2)
        made.SetStartPiece(0)
        made.SetEndPiece(1)
    assert made.Write() == 1
    found = read_vtk(tmp_path / name, "my a")
    assert found.dtype == np.int16
    np.testing.assert_array_equal(found[0], values)


def test_without_the_vtk_package(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "vtkmodules", None)
    with pytest.raises(SourceError, match=r"flat\.vti: is read by vtk, which is not installed: pip install .*vtk"):
        read_vtk(files / "flat.vti")
    with pytest.raises(FileNotFoundError):
        read_vtk(files / "nothing.vti")


@pytest.mark.gpu
def test_on_gpu(files):
    host, device = (open_vtk(files / "parallel_0.pvti", "vector", device) for device in ("cpu", "cuda"))
    coords = np.random.default_rng(8).random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(device, coords), decode(host, coords), atol=2e-3)
