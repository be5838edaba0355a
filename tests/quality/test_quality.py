"""If this fails, thresholds, masks of tissue or figures of merit of slices are wrong."""

import numpy as np
import pytest
from scipy import ndimage
from skimage import filters

from linumpy.device import to_host
from linumpy.quality.findings import Finding, merged
from linumpy.quality.measures import sharpness, step_outliers
from linumpy.quality.thresholds import li_threshold, otsu_threshold
from linumpy.quality.tissue import tissue_mask


def intensities(seed, dtype):
    rng = np.random.default_rng(seed)
    classes = np.where(
        rng.random((40, 50)) < rng.uniform(0.1, 0.9), rng.gamma(3, 5, (40, 50)), rng.gamma(40, 4, (40, 50))
    )
    return classes.clip(0, 250).astype(dtype)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", ["u1", "i2", "f4", "f8"])
def test_thresholds_are_those_of_scikit_image(seed, dtype):
    values = intensities(seed, dtype)
    assert otsu_threshold(values) == pytest.approx(filters.threshold_otsu(values), rel=1e-6)
    tolerance = 0.5 if values.dtype.kind in "iu" else 1e-4
    expected = filters.threshold_li(values, tolerance=tolerance)
    assert li_threshold(values, tolerance=tolerance) == pytest.approx(expected, rel=1e-6)
    assert np.array_equal(values > li_threshold(values), values > filters.threshold_li(values))


def test_thresholds_of_odd_values():
    values = intensities(1, "f4")
    with_holes = np.concatenate([values.ravel(), np.array([np.nan, np.inf, -np.inf], "f4")])
    assert otsu_threshold(with_holes) == otsu_threshold(values)
    assert li_threshold(with_holes) == li_threshold(values)
    for find in (otsu_threshold, li_threshold):
        assert find(np.full(9, 3, "u2")) == 3
        with pytest.raises(ValueError, match="no finite"):
            find(np.full(3, np.nan))
        with pytest.raises(TypeError, match="threshold"):
            find(np.ones(3, bool))


def test_sharpness_falls_with_blur_and_not_with_gain():
    image = np.random.default_rng(3).gamma(4, 10, (1, 60, 60))
    blurred = [ndimage.gaussian_filter(image[0], sigma) for sigma in (0, 0.5, 1, 2)]
    found = sharpness(np.array([*blurred, 7 * image[0]]))
    assert (np.diff(found[:4]) < 0).all()
    assert found[4] == pytest.approx(found[0])
    slope = np.tile(np.arange(8.0), (1, 8, 1))  # one a pixel: an energy of 1 inside
    inner = np.zeros(slope.shape, bool)
    inner[:, 1:-1, 1:-1] = True
    assert sharpness(slope, inner)[0] == pytest.approx(1 / 3.5**2)
    assert np.isnan(sharpness(np.zeros((1, 4, 4)))[0])


def test_values_far_from_their_neighbours():
    """Neither a trend, a step nor noise makes an outlier; a value by itself does, also beside one that is unknown."""
    rng, wrong, found = np.random.default_rng(7), 0, 0
    for _ in range(50):
        values = np.linspace(1, rng.uniform(1, 2), 12) * rng.uniform(0.95, 1.05, 12)
        wrong += step_outliers(values).any()
        values[6:] *= 3
        wrong += step_outliers(values)[[5, 6]].any()
        values[3] *= rng.choice([0.4, 2.5])
        values[2] = np.nan
        found += step_outliers(values)[3]
    assert wrong <= 2
    assert found >= 47
    assert not step_outliers(np.array([1.0, 9, 1, np.nan, 1])).any(), "four values do not tell"


def test_findings_of_one_text_are_joined():
    found = [Finding("dark", stages=("focal",), slices=(n,)) for n in (3, 0, 1, 2, 7)]
    found += [Finding("dark", stages=("stitch",), slices=(n,)) for n in (7, 3, 2, 1, 0)] + [
        Finding("late", stages=(), slices=(4, 5))
    ]
    assert [str(one) for one in merged(found)] == ["focal, stitch, slices 0 to 3 and 7: dark", "slices 4 and 5: late"]


def test_tissue_is_found():
    rng = np.random.default_rng(4)
    z, y, x = np.ogrid[:18, :60, :60]
    true = ((y - 30) ** 2 + (x - 30) ** 2 < 20**2) & (z >= 4)
    hole = (y - 30) ** 2 + (x - 30) ** 2 + (z - 10) ** 2 < 9
    volume = np.where(true & ~hole, 1000.0, 20.0) * rng.gamma(8, 1 / 8, true.shape)
    volume[0, 50, 50] = np.nan
    volume[2, 3:5, 3:5] = 1e4  # a speck
    for method in ("otsu", "li"):
        mask = tissue_mask(volume, method=method)
        assert (mask != true).mean() < 0.03
        assert mask[10, 30, 30]
        assert not mask[2, 3, 3]
    assert not tissue_mask(np.zeros((2, 5, 5))).any()
    with pytest.raises(ValueError, match="otsu, li"):
        tissue_mask(volume, method="mean")


def test_the_same_where_the_array_is(xp):
    values = intensities(5, "f4")
    on_device = xp.asarray(values)
    assert otsu_threshold(on_device) == pytest.approx(otsu_threshold(values), rel=1e-5)
    assert li_threshold(on_device) == pytest.approx(li_threshold(values), rel=1e-5)
    a = np.random.default_rng(6).gamma(4, 10, (3, 40, 50))
    np.testing.assert_allclose(to_host(sharpness(xp.asarray(a))), sharpness(a), rtol=1e-9)


@pytest.mark.gpu
def test_the_device_finds_the_tissue_that_the_host_finds(cupy):
    pytest.importorskip("warp")
    a = np.random.default_rng(6).gamma(4, 10, (2, 3, 40, 50))[0]
    mask = tissue_mask(cupy.asarray(a))
    assert (cupy.asnumpy(mask) != tissue_mask(a)).mean() < 1e-3
