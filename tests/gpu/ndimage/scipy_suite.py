"""A plugin of pytest that puts linumpy's functions in the place of SciPy's, for SciPy's own tests of interpolation.

SciPy's wheel carries them; they are run from there, nothing of them is kept here::

    LINUMPY_SUITE=cupy pytest -p scipy_suite --pyargs scipy.ndimage.tests.test_interpolation \
        scipy.ndimage.tests.test_splines scipy.ndimage.tests.test_datatypes

with ``tests/gpu`` on ``PYTHONPATH``. ``LINUMPY_SUITE`` says where arrays go: ``cupy`` to a device and back for every
call, ``emulator`` to the kernels on the CPU, ``numpy`` to linumpy's functions as they are. What SciPy defaults to
(order 3) and takes by position is handed on by name, and a list as an image is made an array.
"""

import functools
import inspect
import os

import numpy as np
import pytest

SIDES = ("cupy", "emulator", "numpy")
NAMES = (
    *("spline_filter", "spline_filter1d", "geometric_transform", "map_coordinates"),
    *("affine_transform", "shift", "zoom", "rotate"),
)
#: What linumpy documents to be otherwise, by what its error says.
DOCUMENTED = {
    "test_map_coordinates_dts": "float32 images are sampled in float32, within 1e-5 of the range",
    "test_affine_transform_output_shape": "an output of another shape is a ValueError, where SciPy has a RuntimeError",
}
_inside = False


def _convert(value, side):
    """Bring what is an array to the device, which knows one order of bytes."""
    if side == "numpy":
        return value
    if isinstance(value, np.dtype):
        return value.newbyteorder("=")
    if not isinstance(value, np.ndarray):
        return value
    native = value.astype(value.dtype.newbyteorder("="))
    if side == "emulator":
        return native
    import cupy

    return cupy.asarray(native)


def _back(value):
    return value.get() if hasattr(value, "get") else value


def in_place_of(original, side):
    """Make a function that takes SciPy's arguments and calls linumpy's function of the same name."""
    from linumpy.gpu import interpolation

    ours = getattr(interpolation, original.__name__)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args, **options):
        global _inside
        if _inside:  # linumpy asks SciPy
            return original(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        names = dict(bound.arguments)
        image = _convert(np.asarray(names.pop("input")), side)
        if "coordinates" in names:
            names["coordinates"] = _convert(np.asarray(names["coordinates"]), side)
        output = names.get("output")
        names["output"] = _convert(output, side)
        _inside = True
        try:
            result = _back(ours(image, **names))
        finally:
            _inside = False
        if isinstance(output, np.ndarray) and result is not output:
            output[...] = result
            return output
        return result

    return call


@pytest.fixture(autouse=True)
def linumpy_in_place_of_scipy(monkeypatch):
    """Patch SciPy for the time of a test."""
    from scipy import ndimage

    side = os.environ.get("LINUMPY_SUITE", "")
    if side not in SIDES:
        raise pytest.UsageError(f"LINUMPY_SUITE={side!r}: choose one of {', '.join(SIDES)}")
    if side == "emulator":
        import on_cpu

        on_cpu.patch(monkeypatch)
    for name in NAMES:
        monkeypatch.setattr(ndimage, name, in_place_of(getattr(ndimage, name), side))


def pytest_collection_modifyitems(items):
    """Expect to fail what is documented."""
    for item in items:
        reason = DOCUMENTED.get(item.name.partition("[")[0])
        if reason:
            item.add_marker(pytest.mark.xfail(reason=reason))
