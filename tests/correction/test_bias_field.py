"""If this fails, images are divided by a wrong bias field."""

import numpy as np
import pytest
import scipy.ndimage

from linumpy.correction.bias_field import BiasOptions, estimate_bias_field
from linumpy.device import to_host

SHORT = BiasOptions(levels=3, iterations=15)


def phantom(shape=(20, 28, 32), seed=0):
    """Three tissues under a smooth field of 22 %; zeros around."""
    rng = np.random.RandomState(seed)
    structure = scipy.ndimage.gaussian_filter(rng.rand(*shape), 3)
    structure = (structure - structure.mean()) / structure.std()
    tissue = np.select([structure > 0.5, structure > -0.4], [180.0, 110.0], 60.0)
    *_, y, x = np.meshgrid(*(np.linspace(-1, 1, n) for n in shape), indexing="ij")
    mask = sum(np.meshgrid(*(np.linspace(-1, 1, n) ** 2 for n in shape), indexing="ij")) < 1.2
    log = 0.35 * x - 0.25 * y**2 + 0.2 * x * y + 0.15 * np.sin(2 * y)
    bias = np.exp(log - log[mask].mean())
    return (tissue * bias * (1 + 0.03 * rng.randn(*shape)) * mask).astype("f4"), bias, mask


def error(found, truth, mask):
    return float(np.sqrt(np.mean((found / truth - 1)[mask] ** 2)))


def test_the_field_is_that_of_simpleitk():
    itk = pytest.importorskip("SimpleITK")
    image, bias, mask = phantom()
    n4 = itk.N4BiasFieldCorrectionImageFilter()
    n4.SetMaximumNumberOfIterations([SHORT.iterations] * SHORT.levels)
    whole = itk.GetImageFromArray(image)
    n4.Execute(whole, itk.GetImageFromArray(mask.astype("u1")))
    theirs = np.exp(itk.GetArrayFromImage(n4.GetLogBiasFieldAsImage(whole)))
    theirs /= np.exp(np.log(theirs)[mask].mean())
    found = estimate_bias_field(image, mask, SHORT)
    assert error(found, theirs, mask) < 0.002
    assert error(found, bias, mask) < 0.02
    assert error(np.ones_like(bias), bias, mask) > 0.15
    assert abs(np.log(found)[mask].mean()) < 1e-4


def test_of_the_reduced_image_and_of_planes():
    image, bias, mask = phantom((40, 57, 63))
    assert error(estimate_bias_field(image, None, BiasOptions(shrink=2, levels=3)), bias, mask) < 0.02
    plane, bias, mask = phantom((120, 140), seed=1)
    plane[50:60, 50:60] = np.nan
    assert error(estimate_bias_field(plane), bias, mask) < 0.01
    spoilt = np.where(mask, plane, 1e6)  # the mask leaves it out
    assert error(estimate_bias_field(spoilt, mask), bias, mask) < 0.01


@pytest.mark.parametrize("value", [0.0, 3.0, np.nan, -1.0])
def test_nothing_to_find(value):
    assert np.array_equal(estimate_bias_field(np.full((6, 7), value, "f4")), np.ones((6, 7)))
    assert np.array_equal(estimate_bias_field(np.full((1, 1, 1), value, "f4")), np.ones((1, 1, 1)))


def test_what_is_refused():
    for bad in (np.ones(3), np.ones((0, 3)), np.ones((2, 2), complex)):
        with pytest.raises(ValueError, match="axes"):
            estimate_bias_field(bad)
    with pytest.raises(ValueError, match="mask"):
        estimate_bias_field(np.ones((3, 3)), np.ones((2, 2), bool))
    with pytest.raises(ValueError, match="bins=1"):
        BiasOptions(bins=1)


def test_the_same_where_the_array_is(xp):
    image, _, mask = phantom()
    options = BiasOptions(levels=2, iterations=5, shrink=2)
    host, device = (estimate_bias_field(one.asarray(image), one.asarray(mask), options) for one in (np, xp))
    assert isinstance(device, xp.ndarray)
    assert np.allclose(to_host(device), host, rtol=1e-3)
