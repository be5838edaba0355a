"""If this fails, a real volume (nilearn's MNI152 T1 template) does not come through the whole chain."""

import importlib.util
import os
from pathlib import Path

import numpy as np
import ome_zarr.format
import ome_zarr.writer
import pytest
import scipy.ndimage
import zarr

from linumpy.device import to_host
from linumpy.gpu.interpolation import resample_volume
from linumpy.io.ome import open_image, read_omezarr
from linumpy.write.writer import write_omezarr

_VARIABLE = "LINUMPY_MNI152"


@pytest.fixture(scope="module")
def template(request):
    """The template's voxels, from nilearn's wheel or from a file that they were saved to."""
    if os.environ.get(_VARIABLE):
        return np.load(os.environ[_VARIABLE]).astype(np.float32)
    found = importlib.util.find_spec("nilearn")
    if found is None:
        message = f"needs nilearn, or the template as .npy in {_VARIABLE}"
        (pytest.fail if request.config.getoption("--require-gpu") else pytest.skip)(message)
    import nibabel

    (file,) = Path(found.origin).parent.rglob("mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz")
    return np.asarray(nibabel.load(file).dataobj).astype(np.float32)


@pytest.fixture(scope="module")
def image(template, tmp_path_factory):
    """The template as ome-zarr-py writes it, in raw chunks that do not divide it."""
    folder = tmp_path_factory.mktemp("mni") / "mni152.ome.zarr"
    fmt = ome_zarr.format.FormatV05()
    group = zarr.open_group(folder, mode="w", zarr_format=fmt.zarr_format)
    ome_zarr.writer.write_multiscale(
        [template],
        group,
        fmt=fmt,
        axes="zyx",
        axes_units=dict.fromkeys("zyx", "millimeter"),
        coordinate_transformations=[[{"type": "scale", "scale": [1.0, 1.0, 1.0]}]],
        storage_options={"chunks": (64, 64, 64), "compressor": None},
    )
    return folder


def chain(image, out, read):
    array, spacing = read_omezarr(image)
    volume = read(array)
    resampled, reached = resample_volume(volume, spacing, 2000.0)
    write_omezarr(out, resampled, reached)
    return array, spacing, volume, resampled, reached


def compare(image, template, out, read):
    array, spacing, volume, resampled, reached = chain(image, out, read)
    assert spacing == (1000.0, 1000.0, 1000.0)
    assert array.compressors == ()
    assert np.array_equal(to_host(volume), template), "read: the voxels of the template"
    smooth = scipy.ndimage.gaussian_filter(
        template, [(n / m - 1) / 2 for n, m in zip(template.shape, resampled.shape, strict=True)], mode="nearest"
    )
    grid = [(np.arange(m) + 0.5) * n / m - 0.5 for n, m in zip(template.shape, resampled.shape, strict=True)]
    expected = scipy.ndimage.map_coordinates(smooth, np.meshgrid(*grid, indexing="ij"), order=1, mode="nearest")
    scale = float(template.max())
    assert np.allclose(to_host(resampled), expected, atol=1e-5 * scale), "resample: SciPy at the centres of the voxels"
    written = open_image(out)
    assert np.array_equal(written.levels[0][...], to_host(resampled)), "write: the same voxels"
    assert written.spacing == (pytest.approx(reached),)
    assert float(expected.std()) > 0.1 * scale, "a head, not nothing"


def test_the_chain_on_the_cpu(template, image, tmp_path):
    compare(image, template, tmp_path / "out", lambda array: np.asarray(array[...]))


@pytest.mark.gpu
def test_the_chain_on_the_gpu(template, image, tmp_path, cupy):
    from linumpy.gpu import read_zarr_to_gpu

    def read(array):
        volume, report = read_zarr_to_gpu(array, strict=True, return_report=True)
        assert isinstance(volume, cupy.ndarray)
        assert report.backend == "linumpy"
        return volume

    compare(image, template, tmp_path / "out", read)
