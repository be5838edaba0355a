"""Images of VTK against what the vtk package itself wrote and read back (tests/data/write_vti.py)."""

import contextlib
import zipfile
from pathlib import Path

import numpy as np
import pytest
from field_runs import decode, on_gpu

from linumpy.errors import SourceError, UnsupportedLayoutError
from linumpy.sampling.fields.vtk_images import open_vtk
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


def test_pieces_must_fill_the_whole(files, tmp_path):
    for file in files.glob("parallel_1*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    content = (tmp_path / "parallel_1.pvti").read_text()
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "parallel_1_6.vti"))
    with pytest.raises(SourceError, match="leave a part of the whole extent empty"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")
    (tmp_path / "parallel_1.pvti").write_text(content.replace("parallel_1_7.vti", "nothing.vti"))
    with pytest.raises(SourceError, match=r"its piece 'nothing\.vti' cannot be read"):
        read_vtk(tmp_path / "parallel_1.pvti", "first")


@pytest.mark.gpu
def test_on_gpu(files):
    field = open_vtk(files / "parallel_0.pvti", "vector")
    coords = np.random.default_rng(8).random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(field, coords), decode(field, coords), atol=2e-3)
