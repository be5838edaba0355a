"""If this fails, masks of tissue or figures of merit of slices are wrong."""

import numpy as np
import pytest
from scipy import ndimage
from skimage import filters

from linumpy.quality.findings import Finding, merged, step_outliers
from linumpy.quality.images import sharpness, tissue_mask
from linumpy.quality.stack_parts import Match, of_matches


def test_sharpness_falls_with_blur_and_not_with_gain():
    image = np.random.default_rng(3).gamma(4, 10, (60, 60))
    everywhere = np.ones(image.shape, bool)
    blurred = [ndimage.gaussian_filter(image, sigma) for sigma in (0, 0.5, 1, 2)]
    found = [sharpness(one, everywhere) for one in (*blurred, 7 * image)]
    assert (np.diff(found[:4]) < 0).all()
    assert found[4] == pytest.approx(found[0]) == sharpness(image, ~everywhere)
    slope = np.tile(np.arange(8.0), (8, 1))  # one a pixel: an energy of 1 inside
    inner = np.zeros(slope.shape, bool)
    inner[1:-1, 1:-1] = True
    assert sharpness(slope, inner) == pytest.approx(1 / 3.5**2)
    assert np.isnan(sharpness(np.zeros((4, 4)), inner[:4, :4]))


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


def test_across_a_missing_slice_neighbours_need_not_match():
    bad = Match(correlation=0.01, is_bad=True)
    found = of_matches({(0, 1): Match(correlation=0.9), (1, 3): bad, (3, 4): bad})
    assert [one.slices for one in found] == [(3, 4)]


def test_tissue_is_found_by_the_threshold_of_scikit_image():
    rng = np.random.default_rng(4)
    y, x = np.ogrid[:60, :60]
    true = (y - 30) ** 2 + (x - 30) ** 2 < 20**2
    projection = np.where(true, 1000.0, 20.0) * rng.gamma(80, 1 / 80, true.shape)
    projection[3, 3:5], projection[50, 50] = 1e4, 0  # a speck, and a voxel without a logarithm
    mask = tissue_mask(projection)
    assert (mask != true).mean() < 0.03
    assert not mask[3, 3]
    projection[50, 50] = projection[projection > 0].min()
    smooth = ndimage.gaussian_filter(np.log(projection.astype("f4")), 1.0)
    assert not (tissue_mask(projection) & (smooth <= filters.threshold_otsu(smooth))).any()
    assert not tissue_mask(np.zeros((5, 5))).any()
