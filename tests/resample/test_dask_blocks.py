"""If this fails, local functions on blocks of `zarr_to_dask` differ from those on the whole."""

import dask.array as da
import numpy as np
import pytest
from scipy import ndimage

from linumpy.device import to_host
from linumpy.gpu import zarr_to_dask
from linumpy.gpu.interpolation import resize, spline_filter
from linumpy.gpu.oct.projection import project
from linumpy.write.writer import write_omezarr

SHAPE = (40, 48, 36)


def volume():
    return np.random.default_rng(0).integers(0, 60000, SHAPE).astype("u2")


@pytest.fixture
def image(tmp_path):
    write_omezarr(tmp_path / "a", volume(), (10, 6, 5), chunks=(8, 12, 12), levels=2)
    return tmp_path / "a"


def computed(lazy, device):
    """The blocks put together, which lie where they were made."""
    got = lazy.compute(scheduler="sync")
    assert isinstance(got, type(lazy._meta))
    assert isinstance(got, np.ndarray) == (device == "cpu")
    assert got.shape == lazy.shape
    assert got.dtype == lazy.dtype
    return to_host(got)


@pytest.mark.parametrize("order", [0, 1])
def test_resize_by_a_whole_factor(image, device, order):
    lazy = zarr_to_dask(image, device=device, chunks=(16, 24, 12))

    def half(block):
        return resize(block, [n // 2 for n in block.shape], order=order, anti_aliasing=False)

    chunks = tuple(tuple(n // 2 for n in sizes) for sizes in lazy.chunks)
    meta = half(lazy._meta.__class__((2, 2, 2), lazy.dtype))[:0, :0, :0]
    got = computed(lazy.map_blocks(half, chunks=chunks, meta=meta), device)
    assert np.allclose(got, half(volume()), rtol=1e-6)


def test_resize_that_smooths_takes_a_halo(image, device):
    """A Gaussian of half a voxel ends after two, a whole number of the voxels that come out."""
    lazy = zarr_to_dask(image, device=device, chunks=(16, 24, 12))

    def half(block):
        small = resize(block, [n // 2 for n in block.shape], mode="symmetric")
        return small[1:-1, 1:-1, 1:-1]  # the halo

    chunks = tuple(tuple(n // 2 for n in sizes) for sizes in lazy.chunks)
    meta = lazy._meta.astype("f4")
    small = da.map_overlap(half, lazy, depth=2, boundary="reflect", trim=False, chunks=chunks, meta=meta)
    expected = resize(volume(), [n // 2 for n in SHAPE], mode="symmetric")
    assert np.allclose(computed(small, device), expected, rtol=1e-5)


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("statistic", ["mean", "max"])
def test_projections_along_a_whole_axis(image, device, axis, statistic):
    chunks = [8, 12, 12]
    chunks[axis] = -1
    lazy = zarr_to_dask(image, device=device, chunks=chunks)
    assert lazy.numblocks[axis] == 1
    flat = lazy._meta.sum(axis=axis).astype("f4" if statistic == "mean" else "u2")
    got = lazy.map_blocks(project, axis=axis, statistics=statistic, drop_axis=axis, meta=flat)
    assert got.npartitions > 1
    assert np.allclose(computed(got, device), project(volume(), axis, statistic), rtol=1e-6)


def test_a_filter_with_a_halo(image, device):
    """A spline's filter has forgotten the cut after 16 voxels; in float32."""
    lazy = zarr_to_dask(image, device=device, chunks=(24, 24, 36))
    meta = lazy._meta.astype("f4")

    def filtered(block):
        return spline_filter(block, output=np.float32)

    got = computed(lazy.map_overlap(filtered, depth=(16, 16, 0), boundary="none", meta=meta), device)
    whole = filtered(volume())
    assert np.abs(got - whole).max() < 1e-5 * whole.max()
    alone = computed(lazy.map_blocks(filtered, meta=meta), device)
    assert np.abs(alone - whole).max() > 1e-2 * whole.max()  # the halo is needed


def test_a_filter_of_scipy_with_a_halo(image):
    lazy = zarr_to_dask(image, device="cpu", chunks=(16, 24, 12)).astype("f4")
    got = lazy.map_overlap(ndimage.gaussian_filter, sigma=1.0, depth=4, boundary="reflect", meta=lazy._meta)
    assert np.allclose(computed(got, "cpu"), ndimage.gaussian_filter(volume().astype("f4"), 1.0), rtol=1e-5)
