"""If this fails, ZIP files are not opened, or an error does not name the file (oracles: zarr-python, zipfile)."""

import gzip
import os
import pickle
import re
import threading
import zipfile

import nibabel
import numpy as np
import pytest
import tifffile
import zarr
from zarr.storage import ZipStore

from linumpy import stream
from linumpy.errors import SourceError
from linumpy.gpu.zarr_io import plan_zarr_read, read_zarr
from linumpy.io.ome import open_image, read_omezarr
from linumpy.io.open import open_source
from linumpy.io.paths import METADATA_FILES
from linumpy.io.source import local_path, open_node
from linumpy.io.stores.zips import ArchiveStore
from linumpy.resample.identity import identify_data
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from tests.support.zips import central_of, patch, zip_folder

VALUES = np.random.default_rng(1).integers(0, 999, (20, 24, 28)).astype("u2")


@pytest.fixture(params=["0.5", "0.4"])
def image(request, tmp_path):
    path = tmp_path / "image.ome.zarr"
    write_omezarr(path, VALUES, (1, 2, 3), levels=2, chunks=(8, 8, 8), ngff_version=request.param)
    return path


@pytest.fixture(params=[zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def file(request, image, tmp_path):
    return zip_folder(image, tmp_path / "image.zip", request.param)


def test_all_calls_open_a_zip_file(image, file, tmp_path):
    assert np.array_equal(read_zarr(file, device="cpu"), VALUES)
    assert np.array_equal(read_zarr(f"{file}/0", region=(slice(3, 9),), device="cpu"), VALUES[3:9])
    assert np.array_equal(read_zarr(f"file://{file}/1", device="cpu"), read_zarr(image, level=1, device="cpu"))
    assert open_image(file).spacing == open_image(image).spacing
    array, spacing = read_omezarr(str(file), 1)
    assert (array.shape, spacing) == ((10, 12, 14), (2, 4, 6))
    assert plan_zarr_read(file).layout.shape == VALUES.shape
    resample_zarr(file, tmp_path / "from_zip.ome.zarr", 2.0, device="cpu")
    resample_zarr(image, tmp_path / "from_folder.ome.zarr", 2.0, device="cpu")
    got, expected = (read_zarr(tmp_path / f"from_{name}.ome.zarr", device="cpu") for name in ("zip", "folder"))
    assert np.array_equal(got, expected)


def test_the_group_in_a_zip_file_lists_what_zarr_lists(file):
    group, by_zarr = open_node(file), zarr.open_group(ZipStore(file, read_only=True), mode="r")
    assert sorted(group) == sorted(by_zarr)
    assert group.attrs.asdict() == by_zarr.attrs.asdict()
    assert np.array_equal(group["0"][2:5, :, 3], VALUES[2:5, :, 3])


def test_an_image_below_the_root_is_opened_by_its_path(image, tmp_path):
    file = zip_folder(image, tmp_path / "b.zip", prefix="some/image.ome.zarr/")
    assert np.array_equal(read_zarr(f"{file}/some/image.ome.zarr", device="cpu"), VALUES)
    with pytest.raises(SourceError, match=r"b\.zip has no Zarr array or group at its root: name one of .*/some/image"):
        open_node(file)
    with pytest.raises(SourceError, match=r"b\.zip/none' is neither a Zarr array nor a Zarr group"):
        open_node(f"{file}/none")
    with pytest.raises(SourceError, match=r"is no path in"):
        open_node(f"{file}/some/../..")


@pytest.mark.parametrize("nbytes", [0, 10, 5000])
def test_a_file_that_is_no_zip_file_is_named(tmp_path, nbytes):
    (tmp_path / "a.ozx").write_bytes(b"\x9d" * nbytes)
    for path in (tmp_path / "a.ozx", tmp_path / "a.ozx" / "0"):
        with pytest.raises(SourceError, match=r"a\.ozx is no ZIP file"):
            open_node(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: tifffile.imwrite(path, VALUES), "a TIFF file, not Zarr: linumpy.convert_zarr"),
        (lambda path: tifffile.imwrite(path, VALUES, bigtiff=True), "a TIFF file"),
        (lambda path: tifffile.imwrite(path, VALUES, byteorder=">"), "a TIFF file"),
        (lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(90)), "an HDF5 file"),
        (lambda path: path.write_bytes(bytes(512) + b"\x89HDF\r\n\x1a\n" + bytes(90)), "an HDF5 file"),
        (lambda path: path.write_bytes(nibabel.Nifti1Image(VALUES, np.eye(4), dtype="u2").to_bytes()), "a NIfTI file"),
        (lambda path: path.write_bytes(nibabel.Nifti2Image(VALUES, np.eye(4), dtype="u2").to_bytes()), "a NIfTI file"),
        (lambda path: path.write_bytes(gzip.compress(b"voxels")), "a file compressed by gzip, as NIfTI files"),
        (lambda path: path.write_bytes(b"ZISRAWFILE" + bytes(90)), "a CZI file, not Zarr: bioformats2raw"),
        (lambda path: path.write_bytes(b"NRRD0004\ntype: short\n"), "an NRRD file"),
        (lambda path: np.save(path.open("wb"), VALUES), "a NumPy file"),
        (lambda path: path.write_text("Dear colleague,\n"), "a text file, not Zarr"),
    ],
)
def test_a_file_of_another_format_is_named(tmp_path, make, message):
    path = tmp_path / "brain.dat"
    make(path)
    for ask in (open_node, open_image, lambda path: open_node(f"{path}/0")):
        with pytest.raises(SourceError, match=rf"brain\.dat is {re.escape(message)}"):
            ask(path)


def test_a_metadata_file_is_named(image):
    files = [file for file in image.rglob("*") if file.name in METADATA_FILES]
    assert len(files) > 1
    for file in files:
        with pytest.raises(SourceError, match=rf"{file.name} is a metadata file of Zarr: pass the folder"):
            open_node(file)


def test_a_file_that_is_cut_off_is_named(file):
    whole = file.read_bytes()
    with zipfile.ZipFile(file) as archive:
        begin = archive.start_dir
    for size in (len(whole) - 1, len(whole) - 30, begin + 50, begin, begin // 2):
        file.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=r"image\.zip is no ZIP file, or one that is cut off"):
            open_node(file)


def test_an_encrypted_file_is_named(file):
    with zipfile.ZipFile(file) as archive:
        name = archive.namelist()[0]
    patch(file, central_of(file, name) + 8, b"\x01\x00")
    with pytest.raises(SourceError, match=r"image\.zip is an encrypted ZIP file"):
        open_node(file)


def test_entries_that_overlap_are_refused(file):
    with zipfile.ZipFile(file) as archive:
        first, second = sorted(archive.infolist(), key=lambda entry: entry.header_offset)[:2]
    patch(file, central_of(file, second.filename) + 42, (first.header_offset + 7).to_bytes(4, "little"))
    with pytest.raises(SourceError, match=r"image\.zip is a damaged ZIP file: its entries overlap"):
        open_node(file)


def test_a_zip_file_without_an_array_is_named(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")
    with pytest.raises(SourceError, match=r"a\.zip is a ZIP file without a Zarr array or group"):
        open_node(tmp_path / "a.zip")


def test_a_method_that_is_not_read_is_named(image, tmp_path):
    file = zip_folder(image, tmp_path / "l.zip", zipfile.ZIP_LZMA)
    with pytest.raises((SourceError, OSError), match=r"l\.zip.* is compressed by lzma"):
        read_zarr(file, device="cpu")


def test_the_store_is_read_only_and_may_be_pickled(file):
    array = open_source(file)
    with pytest.raises(ValueError, match="read-only"):
        array[...] = 0
    again = pickle.loads(pickle.dumps(array))
    assert np.array_equal(again[...], VALUES)
    assert ArchiveStore(file) == ArchiveStore(str(file))
    assert np.array_equal(open_source(local_path(array))[...], VALUES)
    before = identify_data(array)
    os.utime(file, ns=(1, 1))
    assert identify_data(array) != before


def test_threads_and_child_processes_read_one_array(file):
    array, results = open_source(file), []
    threads = [threading.Thread(target=lambda: results.append(np.array_equal(array[...], VALUES))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8
    child = os.fork()
    if not child:
        store = array.store
        name = next(name for name in store.directory.names if name.startswith("0/") and name[-1] == "0")
        with zipfile.ZipFile(file) as archive:
            os._exit(0 if store.read(name) == archive.read(name) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_batches_are_streamed_from_a_zip_file(file):
    boxes = [(2, 10), (3, 11), (4, 12)], [(0, 8), (0, 8), (5, 13)]
    source = [stream.Sample(path, box) for path, box in zip((str(file), f"{file}/0"), boxes, strict=True)]
    memory = {"host_buffer_bytes": 4 << 20, "device_buffer_bytes": 1 << 24}
    config = stream.Config(dtype="stored", batch_size=2, device="cpu", **memory)
    with stream.Pipeline(config) as pipeline:
        pipeline.push(source)
        with pipeline.pop() as tensor:
            got = tensor.numpy()
    assert np.array_equal(got[0], VALUES[2:10, 3:11, 4:12])
    assert np.array_equal(got[1], VALUES[:8, :8, 5:13])


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no file or folder .*none\.ozx"):
        open_node(tmp_path / "none.ozx")
