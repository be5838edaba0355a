"""Images of VTK against what the vtk package itself wrote and read back (tests/data/write_vti.py)."""

import contextlib
import itertools
import os
import re
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from field_runs import decode, on_gpu

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.fields.vtk_images import open_vtk
from linumpy.sampling.files import vtk
from linumpy.sampling.files.vtk import read_vtk

DATA = Path(__file__).parents[2] / "data"
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
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vti")
    with zipfile.ZipFile(DATA / "vti.zip") as archive:
        archive.extractall(folder)
    return folder


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
def test_random_damage_gives_our_errors_or_values(files, tmp_path, seed):
    rng = np.random.default_rng(seed)
    for name in FILES:
        known = (files / name).read_bytes()
        if name.endswith("pvti"):
            continue
        for _ in range(6):
            content = bytearray(known)
            for place in rng.integers(0, len(content), 3):
                content[place] = rng.integers(256)
            (tmp_path / name).write_bytes(content)
            with contextlib.suppress(SourceError, UnsupportedLayoutError):
                read_vtk(tmp_path / name, "first")


def image(extent="0 1 0 1 0 1", whole=None, kind="Float32", form="ascii", text="1 2 3 4 5 6 7 8", more=""):
    return f"""<VTKFile type="ImageData" byte_order="LittleEndian"><ImageData WholeExtent="{whole or extent}">
<Piece Extent="{extent}"><PointData><DataArray type="{kind}" Name="a" format="{form}" {more}>{text}</DataArray>
</PointData></Piece></ImageData></VTKFile>"""


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is no VTK image, or truncated"),
        (b"\x93NUMPY", "is no VTK image, or truncated"),
        (b"<VTKFile/>", "is no VTK image|holds 'VTKFile'"),
        (image(extent="0 1 0 1 0"), "are not six whole numbers"),
        (image(extent="0 1 0 -1 0 1"), "no extent of an image"),
        (image(extent="0 1 0 1 0 99999999999"), "no extent of an image"),
        (image(extent="0 2147483647 0 2147483647 0 2147483647"), "has 8 numbers, where its extent needs"),
        (image(extent="0 1 0 1 0 2"), "has 8 numbers, where its extent needs 12"),
        (image(whole="0 1 0 1 0 2147483647"), "hold less than the 2147483648 × 2 × 2 voxels"),
        (image(text="1 2 3 4 5 6 7 x"), "could not convert"),
        (image(more='NumberOfComponents="-1"'), "has -1 components"),
        (image(kind="UInt8", text="1 2 3 4 5 6 7 999"), "out of|not representable|too large|cannot"),
        (image(kind="Float32", form="binary", text="!!!"), "array 'a':"),
        (image(form="binary", text="/////w=="), "4294967295 bytes are stored, where its extent needs 32"),
        (image(form="appended", more='offset="-1"'), "offset -1 is none of 0 bytes"),
        (image(kind="String"), "of type 'String'"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]>" + image(), "defines XML entities"),
        (LEGACY.replace("STRUCTURED_POINTS", "POLYDATA"), "'DATASET POLYDATA' is not read"),
        (LEGACY + "DIMENSIONS -1 2 2\n", "'-1 2 2' are not 3 positive"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 9\n", "does not fit DIM"),
        (LEGACY + "DIMENSIONS 2000000000 2000000000 2\nPOINT_DATA 8\n", "does not fit DIM"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a double\n1234", "64 bytes of values are needed"),
        (LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a bit\n1234", "values of type 'bit' are not read"),
    ],
)
def test_faulty_images(tmp_path, content, problem):
    (tmp_path / "a.vti").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises((SourceError, UnsupportedLayoutError), match=problem) as found:
        read_vtk(tmp_path / "a.vti")
    assert "a.vti" in str(found.value)


def test_binary_values_that_look_like_white_space(tmp_path):
    """No LOOKUP_TABLE, and values that begin with spaces and line ends."""
    values = np.array([0x20, 0x0A, 0x20, 0x0D, 0x09, 1, 0x20, 0x0A], np.uint8)
    head = LEGACY + "DIMENSIONS 2 2 2\nPOINT_DATA 8\nSCALARS a unsigned_char\n"
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
    content = (tmp_path / "a.vtk").read_text()
    (tmp_path / "a.vtk").write_text(f"{content.rstrip()}.5\n")
    with pytest.raises(SourceError, match="COLOR_SCALARS in text are numbers from 0 to 1"):
        read_vtk(tmp_path / "a.vtk")


def test_pieces_must_fill_the_whole(files, tmp_path):
    for file in files.glob("parallel_1*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (tmp_path / "parallel_1.pvti").read_text()
    sixth, seventh = re.findall("<Piece .*?/>", content)[6:]
    (tmp_path / "parallel_1.pvti").write_text(content.replace(seventh, sixth))
    with pytest.raises(SourceError, match="leave a part of the whole extent empty"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "parallel_1_6.vti"))
    with pytest.raises(SourceError, match=r"_6\.vti: its pieces hold less than the 4 × 5 × 5 voxels of '1 5 "):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "parallel_1_0.vti"))
    with pytest.raises(SourceError, match=r"parallel_1_0\.vti: its piece of extent '0 .*' lies outside of '1 5 "):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "nothing.vti"))
    with pytest.raises(SourceError, match=r"its piece 'nothing\.vti' cannot be read"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")


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
    return vti(shape, pieces, f'GhostLevel="{ghosts}"').replace("ImageData", "PImageData")


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


def test_links_to_pieces_are_followed_before_their_place_is_looked_at(outside):
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


def test_pieces_that_overlap_are_refused_before_any_is_read(tmp_path, monkeypatch):
    values = np.arange(6 * 7 * 8, dtype="i4").reshape(6, 7, 8)
    extent, content = piece(values, (0, 0, 0))
    (tmp_path / "one.vti").write_text(vti(values.shape, [content]))
    (tmp_path / "a.vti").write_text(vti(values.shape, [content] * 60))
    (tmp_path / "a.pvti").write_text(pvti(values.shape, [(extent, "one.vti")] * 60, 1))
    (tmp_path / "many.vti").write_text(vti(values.shape, [content] * 60))
    (tmp_path / "b.pvti").write_text(pvti(values.shape, [(extent, "many.vti")]))
    monkeypatch.setattr(vtk, "read_values", None)
    for name in ("a.vti", "a.pvti", "b.pvti"):
        with pytest.raises(SourceError, match=r"its 60 pieces overlap: .* where '0 7 0 6 0 5' has 336 points"):
            read_vtk(tmp_path / name)
    (tmp_path / "a.pvti").write_text(pvti(values.shape, [(extent, "one.vti")] * 70_000))
    with pytest.raises(SourceError, match="has 70000 pieces of an image; 1 to 65536 are read"):
        read_vtk(tmp_path / "a.pvti")


def test_one_piece_at_a_time_is_in_memory(tmp_path):
    """A small file of pieces that compress well takes little more than the image."""
    n, slabs = 65, 16
    raw = zlib.compress(bytes(5 * n * n * 8), 9)
    content = struct.pack("<4I", 1, 5 * n * n * 8, 0, len(raw)) + raw
    array = '<DataArray type="Float64" Name="a" format="appended" offset="0"/>'
    pieces = [
        f'<Piece Extent="0 {n - 1} 0 {n - 1} {4 * k} {4 * k + 4}"><PointData>{array}</PointData></Piece>'
        for k in range(slabs)
    ]
    head = vti((4 * slabs + 1, n, n), pieces).replace("<VTKFile", '<VTKFile compressor="vtkZLibDataCompressor"')
    head = head.replace("</VTKFile>", '<AppendedData encoding="raw">_')
    (tmp_path / "a.vti").write_bytes(head.encode() + content)
    tracemalloc.start()
    found = read_vtk(tmp_path / "a.vti")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (1, 65, 65, 65)
    assert not found.any()
    assert peak < 1.5 * found.nbytes


@pytest.mark.parametrize("number", ["²", "9" * 5000, "-1", "1.5", ""])
def test_numbers_that_are_none(tmp_path, number):
    (tmp_path / "a.vti").write_text(image(more=f'NumberOfComponents="{number}"'))
    with pytest.raises(SourceError, match="components; 1 to 64 are read"):
        read_vtk(tmp_path / "a.vti")
    (tmp_path / "a.vti").write_text(image().replace("<ImageData", f'<ImageData GhostLevel="{number}"'))
    with pytest.raises(SourceError, match=r"GhostLevel='.*' is no number of cells"):
        read_vtk(tmp_path / "a.vti")
    (tmp_path / "a.vtk").write_bytes((LEGACY + f"DIMENSIONS 2 2 {number}\n").encode("latin-1"))
    with pytest.raises(SourceError, match="are not 3 positive whole numbers"):
        read_vtk(tmp_path / "a.vtk")


@pytest.mark.gpu
def test_on_gpu(files):
    field = open_vtk(files / "parallel_0.pvti", "vector")
    coords = np.random.default_rng(8).random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(field, coords), decode(field, coords), atol=2e-3)
