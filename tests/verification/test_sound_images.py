"""If this fails, linum-verify finds fault with sound images: of other writers, of any voxels, sizes and types."""

import itertools
import json

import numpy as np
import ome_zarr.format
import ome_zarr.scale
import ome_zarr.writer
import pytest
import zarr
from scipy import ndimage

import linumpy
from linumpy.write.writer import write_omezarr
from tests.support.other_writers import TENSORSTORE, old_stores, tensorstore_store

ngff_zarr = pytest.importorskip("ngff_zarr", reason="pip install ngff-zarr")

pytestmark = pytest.mark.filterwarnings("ignore")

FORMATS = {"0.4": ome_zarr.format.FormatV04(), "0.5": ome_zarr.format.FormatV05()}
UNITS = {"t": "second", "z": "micrometer", "y": "micrometer", "x": "micrometer"}
CHUNKS = (1, 1, 8, 16, 16)
SHAPES = {"zyx": (21, 34, 47), "yx": (75, 98), "tczyx": (2, 2, 9, 33, 40)}


def voxels(kind, shape, dtype="u2"):
    """Return tissue, noise and so on, of any type."""
    rng, dtype = np.random.default_rng(5), np.dtype(dtype)
    smooth = ndimage.gaussian_filter(rng.standard_normal(shape), [min(2, n / 8) for n in shape], mode="wrap")
    smooth *= 400 / (smooth.std() or 1)
    radius = sum(((place - n / 2) / (n / 2)) ** 2 for place, n in zip(np.indices(shape), shape, strict=True))
    values = {
        "tissue": smooth + rng.normal(1500, 20, shape),
        "background": (smooth + 1500) * (radius < 0.7),
        "noise": rng.uniform(0, 4000, shape),
        "sparse": 900.0 * (rng.random(shape) < 0.001),
        "constant": np.full(shape, 7.0),
        "zeros": np.zeros(shape),
        "ramp": 10.0 * np.indices(shape).sum(axis=0),
        "checkerboard": 1000.0 * (np.indices(shape).sum(axis=0) % 2),
        "labels": 7.0 * ndimage.label(smooth > 200)[0],
        "NaN": np.where(rng.random(shape) < 0.02, np.nan, smooth),
        "infinite": np.where(rng.random(shape) < 0.001, np.inf, smooth),
    }[kind]
    if dtype.kind not in "fc":
        values = np.nan_to_num(values, posinf=0)
    if dtype.kind == "b":
        return values > np.median(values)
    return values.clip(0 if dtype.kind == "u" else None, 250 if dtype.itemsize == 1 else None).astype(dtype)


def check(source, *expected):
    """Verify; compare what is found with parts of texts."""
    result = linumpy.verify(source, thorough=True, device="cpu", progress=lambda nbytes: None)
    found = "\n".join(map(str, result.findings))
    assert len(result.findings) == len(expected), found
    assert all(any(text in finding.what for finding in result.findings) for text in expected), found
    return result


KINDS = (
    "tissue", "background", "noise", "sparse", "constant", "zeros", "ramp", "checkerboard", "labels", "NaN", "infinite",
)  # fmt: skip
DTYPES = ("u2", "f4", "u1", "?", "i8", "f2", ">i4", "f8")


@pytest.mark.parametrize("downsampling", ["mean", "label", "nearest"])
@pytest.mark.parametrize("kind", KINDS)
def test_own_images(tmp_path, kind, downsampling):
    for number, dtype in enumerate(DTYPES):
        axes = [*SHAPES][number % 3]
        rank, spatial = len(axes), min(len(axes), 3)
        write_omezarr(
            tmp_path / dtype, voxels(kind, SHAPES[axes], dtype), (1.5, 2.0, 3.0)[-spatial:], axes=axes, levels=3,
            chunks=CHUNKS[-rank:], downsampling=downsampling, durable=False,
            ngff_version=("0.4", "0.5", "0.6")[number % 3],
        )  # fmt: skip
        assert not check(tmp_path / dtype).notes


def test_tiny_images(tmp_path):
    """One voxel, axes of one voxel, and axes shorter than factors."""
    for number, shape in enumerate([(1, 1, 1), (1, 1, 9), (1, 30, 1), (2, 3, 50), (5, 1, 33), (3, 3, 3)]):
        for kind in ("noise", "labels"):
            values, levels = voxels(kind, shape), min(3, max(shape).bit_length())
            write_omezarr(tmp_path / f"{kind}{number}", values, (1.0, 2.0, 30.0), levels=levels, durable=False)
            check(tmp_path / f"{kind}{number}")
            group = zarr.open_group(tmp_path / f"o{kind}{number}", mode="w", zarr_format=3)
            units = {axis: UNITS[axis] for axis in "zyx"}
            ome_zarr.writer.write_image(values, group, (2, 4), axes="zyx", axes_units=units, fmt=FORMATS["0.5"])
            check(tmp_path / f"o{kind}{number}")


@pytest.mark.parametrize("method", list(ome_zarr.scale.Methods))
@pytest.mark.parametrize("axes", list(SHAPES))
def test_images_of_ome_zarr_py(tmp_path, method, axes):
    """Scales of odd sizes are those of whole extents; its groups of labels of 0.5 have no version, as NGFF wants."""
    for number, kind in enumerate(("tissue", "background", "noise", "sparse", "constant")):
        version = ("0.4", "0.5")[number % 2]
        fmt, values = FORMATS[version], voxels(kind, SHAPES[axes])
        group = zarr.open_group(tmp_path / kind, mode="w", zarr_format=fmt.zarr_format)
        options = {
            "fmt": fmt,
            "axes": axes,
            "scale_factors": (2, 4),
            "storage_options": {"chunks": CHUNKS[-len(axes) :]},
        }
        units = {axis: UNITS[axis] for axis in axes if axis != "c"}
        ome_zarr.writer.write_image(values, group, method=method, axes_units=units, **options)
        ome_zarr.writer.write_labels(voxels("labels", SHAPES[axes]), group, name="cells", **options)
        result = check(tmp_path / kind, *(["ome has no version"] if version == "0.5" else []))
        assert ["have no unit" in note for note in result.notes] == [True]


METHODS = ("ITKWASM_GAUSSIAN", "ITKWASM_BIN_SHRINK", "ITKWASM_LABEL_IMAGE", "DASK_BIN_SHRINK")


@pytest.mark.parametrize("method", list(METHODS))
def test_images_of_ngff_zarr(tmp_path, method):
    for kind, axes in itertools.product(("tissue", "labels"), ("zyx", "yx")):
        version = {"zyx": "0.5", "yx": "0.6" if kind == "labels" else "0.4"}[axes]
        units = {axis: UNITS[axis] for axis in axes}
        image = ngff_zarr.to_ngff_image(voxels(kind, SHAPES[axes]), dims=list(axes), axes_units=units)
        levels = ngff_zarr.to_multiscales(image, [2, 4], method=ngff_zarr.Methods[method], chunks=16)
        ngff_zarr.to_ngff_zarr(str(tmp_path / f"{kind}{axes}"), levels, version=version)
        check(tmp_path / f"{kind}{axes}")


def test_arrays_of_other_writers(tmp_path):
    for name in TENSORSTORE:
        tensorstore_store(name, tmp_path / name)
        check(tmp_path / name)
    for _, folder, _ in old_stores(tmp_path / "old"):
        check(folder, "9 chunks are not stored")  # only the first 16 planes were written
    for number, dtype in enumerate(("?", "c8", "c16", ">f4", "f2", "i8")):
        options = {"shards": (16, 16)} if number % 2 else {}
        values = voxels("background", SHAPES["yx"], dtype)
        zarr.create_array(tmp_path / dtype, data=values, chunks=(8, 16), zarr_format=3, **options)
        check(tmp_path / dtype)


@pytest.mark.skipif("rectilinear_chunks" not in zarr.config.get("array"), reason="this zarr-python reads none")
def test_rectilinear_chunks(tmp_path):
    values = voxels("noise", (40, 33))
    zarr.create_array(tmp_path / "a", data=values, chunks=(10, 33), compressors=None)
    document = json.loads((tmp_path / "a/zarr.json").read_text())
    lengths = {"kind": "inline", "chunk_shapes": [[10, 10, 10, 10], [33]]}
    document["chunk_grid"] = {"name": "rectilinear", "configuration": lengths}
    (tmp_path / "a/zarr.json").write_text(json.dumps(document))
    check(tmp_path / "a")


def test_copies_and_resampled_images(tmp_path):
    write_omezarr(tmp_path / "i", voxels("tissue", SHAPES["zyx"]), (1.5, 2.0, 3.0), levels=3, origin=(1.0, -2.0, 3.0))
    linumpy.convert_zarr(tmp_path / "i", tmp_path / "4", ngff_version="0.4", codec="blosc:lz4")
    linumpy.convert_zarr(tmp_path / "i", tmp_path / "i.ozx")
    linumpy.resample_zarr(tmp_path / "i", tmp_path / "r", np.diag([0.8, 0.7, 0.9, 1.0]), levels=3)
    for name in ("4", "i.ozx", "r"):
        check(tmp_path / name)
