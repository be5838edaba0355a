"""If this fails, `resample_zarr` takes more memory than it may."""

import tracemalloc

import numpy as np
import pytest

from linumpy.io.ome import open_image
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr

MIB = 2**20


def volume(shape, dtype="u2"):
    return np.random.default_rng(0).integers(0, 60000, shape).astype(dtype)


def halves(folder, smooth):
    """What SciPy makes of the image in memory, at half its resolution."""
    from scipy import ndimage

    image = open_image(folder).levels[0][...].astype("f8")
    if smooth:
        image = ndimage.gaussian_filter(image, 0.5, mode="nearest")
    shape = tuple(n // 2 for n in image.shape)
    return ndimage.affine_transform(image, [2.0] * 3, 0.5, shape, order=1, mode="nearest")


@pytest.mark.parametrize(
    ("order", "smooth", "compressors"),
    [
        (1, True, None),
        pytest.param(1, False, None, marks=pytest.mark.slow),
        pytest.param(0, True, "auto", marks=pytest.mark.slow),
    ],
)
def test_in_host_memory(tmp_path, order, smooth, compressors):
    """Far less than source and result; what is taken beyond the limit is what the documentation says."""
    image = volume((256, 256, 384))
    write_omezarr(tmp_path / "a", image, (5, 5, 5), chunks=(64, 64, 64), compressors=compressors)
    nbytes, limit = image.nbytes, 24 * MIB
    del image
    options = {"order": order, "chunks": (32, 32, 32), "device": "cpu", "memory_bytes": limit}
    options |= {"anti_aliasing": smooth}
    tracemalloc.start()
    try:
        resample_zarr(tmp_path / "a", tmp_path / "b", 10.0, levels=2, progress=int, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit + 16 * MIB + 10 * 64**3 * 2
    assert peak < nbytes
    if order == 1:
        assert np.abs(open_image(tmp_path / "b").levels[0][...] - halves(tmp_path / "a", smooth)).max() <= 0.51


@pytest.mark.gpu
@pytest.mark.parametrize("compressors", [None, "auto"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(
    ("order", "dtype", "mode"),
    [(0, "u1", "constant"), (1, "u2", "nearest"), (1, "f8", "nearest"), (3, "u2", "nearest"), (3, "f4", "constant")],
)
def test_on_a_device(tmp_path, cupy, order, dtype, mode, compressors, smooth):
    """The pool gives no byte more; chunks that the end cuts, and a coarser level, are made within it, too."""
    image = volume((201, 251, 255)) if dtype != "u1" else volume((201, 251, 255)) >> 8
    write_omezarr(tmp_path / "a", image.astype(dtype), (5, 5, 5), chunks=(64, 64, 64), compressors=compressors)
    limit = 64 * MIB
    chunks = (24, 24, 24) if smooth and order == 3 else (48, 48, 48)  # the box is larger, and in floats
    options = {"order": order, "mode": mode, "chunks": chunks, "levels": 2, "anti_aliasing": smooth}
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    before, old = pool.total_bytes(), pool.get_limit()
    pool.set_limit(size=before + limit)
    try:
        resample_zarr(tmp_path / "a", tmp_path / "b", 9.7, device="cuda", memory_bytes=limit, **options)
        assert pool.total_bytes() - before <= limit
    finally:
        pool.set_limit(size=old)
    resample_zarr(tmp_path / "a", tmp_path / "c", 9.7, device="cpu", **options)
    for got, expected in zip(open_image(tmp_path / "b").levels, open_image(tmp_path / "c").levels, strict=True):
        difference = np.abs(got[...].astype("f8") - expected[...])
        if order == 0:
            assert (difference > 0).mean() < 1e-3  # of an odd number of voxels no place is half-way
        else:
            assert difference.max() <= (1 if dtype[0] == "u" else 60000 * 1e-5)
