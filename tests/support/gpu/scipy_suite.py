"""A plugin of pytest that runs SciPy's or CuPy's tests of interpolation with linumpy's functions in place of theirs.

SciPy's wheel carries its tests; they are run from there, nothing of them is kept here::

    LINUMPY_SUITE=cupy pytest -p tests.support.gpu.scipy_suite --pyargs scipy.ndimage.tests.test_interpolation \
        scipy.ndimage.tests.test_splines scipy.ndimage.tests.test_datatypes

with the repository on ``PYTHONPATH``. ``LINUMPY_SUITE`` says where arrays go: ``cupy`` to a
device and back for every call, ``emulator`` to the kernels on the CPU, ``numpy`` to linumpy's functions as they are.
What SciPy defaults to (order 3) and takes by position is handed on by name, and a list as an image is made an array.

``cupyx`` is for CuPy's tests, which compare ``cupyx.scipy.ndimage`` with SciPy: linumpy's functions replace the former.
CuPy's wheel does not carry them, its source distribution and repository do
(``tests/cupyx_tests/scipy_tests/ndimage_tests/test_interpolation.py``)::

    LINUMPY_SUITE=cupyx LINUMPY_SUITE_PART=1/3 pytest -p tests.support.gpu.scipy_suite -n 14 \
        --dist loadgroup -m "not slow" --import-mode=importlib -c /dev/null test_interpolation.py

Tests of one order and mode run in one process, which compiles what they need once, and a part of the suite is a part of
these pairs. Arguments that linumpy does not have (``texture_memory``) are left out, and its ``ValueError`` and
``TypeError`` count as the ``RuntimeError`` that SciPy and CuPy raise for some arguments.
"""

import functools
import inspect
import os

import numpy as np
import pytest

SIDES = ("cupy", "emulator", "numpy", "cupyx")
NAMES = (
    *("spline_filter", "spline_filter1d", "geometric_transform", "map_coordinates"),
    *("affine_transform", "shift", "zoom", "rotate"),
)
#: What linumpy documents to be otherwise, by side, and by the name of a test or its class.
DOCUMENTED = {
    "test_map_coordinates_dts": "float32 images are sampled in float32, within 1e-5 of the range",
    "test_affine_transform_output_shape": "an output of another shape is a ValueError, where SciPy has a RuntimeError",
}
DOCUMENTED_CUPYX = {
    "test_invalid_texture_arguments": "there is no sampling by textures",
    "TestInterpolationInvalidCval": "NaN and infinity as cval are cast to integers, where CuPy refuses them",
}
#: What only CuPy's functions take.
_ONLY_CUPYX = ("texture_memory", "float64_coords")
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


class RefusedError(ValueError, TypeError, RuntimeError):
    """What linumpy refuses, whichever error a test waits for."""


def in_place_of_cupyx(original):
    """Make a function that takes CuPy's arguments and calls linumpy's function of the same name."""
    from linumpy.gpu import interpolation

    ours = getattr(interpolation, original.__name__)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args, **options):
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        names = {name: value for name, value in bound.arguments.items() if name not in _ONLY_CUPYX}
        image = names.pop("input")
        try:
            return ours(image, **names)
        except (ValueError, TypeError) as error:
            raise RefusedError(str(error)) from error

    return call


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
def linumpy_in_place(monkeypatch):
    """Patch SciPy, or CuPy, for the time of a test."""
    side = _side()
    if side == "cupyx":
        import cupyx.scipy.ndimage as theirs

        for name in NAMES:
            if hasattr(theirs, name):  # CuPy has no geometric_transform
                monkeypatch.setattr(theirs, name, in_place_of_cupyx(getattr(theirs, name)))
        return
    from scipy import ndimage

    if side == "emulator":
        from tests.support.gpu import on_cpu

        on_cpu.patch(monkeypatch)
    for name in NAMES:
        monkeypatch.setattr(ndimage, name, in_place_of(getattr(ndimage, name), side))


def _side():
    side = os.environ.get("LINUMPY_SUITE", "")
    if side not in SIDES:
        raise pytest.UsageError(f"LINUMPY_SUITE={side!r}: choose one of {', '.join(SIDES)}")
    return side


def _asked_part():
    """Read ``LINUMPY_SUITE_PART``, such as ``1/3``; by default all is one part."""
    asked = os.environ.get("LINUMPY_SUITE_PART", "1/1")
    part, _, parts = asked.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise pytest.UsageError(f"LINUMPY_SUITE_PART={asked!r}: a part of how many is needed, such as 1/3")
    return int(part), int(parts)


def _group_of(item):
    """Name what tests share their kernels with: those of their order and mode, by CuPy's way to parametrize."""
    callspec = getattr(item, "callspec", None)
    given = callspec.params.get("_cupy_testing_param", {}) if callspec else {}
    return f"{given.get('order')}-{given.get('mode')}"


def in_part(groups, part, parts):
    """Choose a part, counted from 1, of groups that are about equally large."""
    return set(sorted(set(groups))[part - 1 :: parts])


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config, items):
    """Expect to fail what is documented; and of CuPy's tests choose a part, a group for each order and mode."""
    is_cupyx = _side() == "cupyx"
    reasons = DOCUMENTED_CUPYX if is_cupyx else DOCUMENTED
    for item in items:
        names = (item.name.partition("[")[0], item.cls.__name__ if item.cls else "")
        for reason in filter(None, map(reasons.get, names)):
            item.add_marker(pytest.mark.xfail(reason=reason))
    if not is_cupyx:
        return
    groups = [_group_of(item) for item in items]
    chosen = in_part(groups, *_asked_part())
    for item, group in zip(items, groups, strict=True):
        item.add_marker(pytest.mark.xdist_group(group))
    others = [item for item, group in zip(items, groups, strict=True) if group not in chosen]
    if others:
        config.hook.pytest_deselected(items=others)
    items[:] = [item for item, group in zip(items, groups, strict=True) if group in chosen]
