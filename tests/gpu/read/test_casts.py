"""If this fails, elements are cast unlike NumPy does it, or differently on host and device."""

import itertools
import math

import numpy as np
import pytest
import zarr
from numcodecs import Delta

from linumpy.gpu.kernels import CUDA_TYPES, _with_headers
from linumpy.gpu.read.reader import Reader
from linumpy.gpu.read.scatter import Conversion, kernel_spec
from linumpy.gpu.rounding import cast_elements
from linumpy.gpu.zarr_io import read_zarr
from tests.support.budget import some
from tests.support.gpu.emulator import Kernel, emulated, library, needs_compiler

TYPES = CUDA_TYPES | {"b1": "bool_bits"}
REAL = sorted(TYPES)
INTEGERS = [one for one in REAL if one[0] in "iu"]
PAIRS = list(itertools.product(REAL, REAL))


def values_of(dtype):
    """Numbers around every limit, the special ones, and random bits."""
    dtype = np.dtype(dtype)
    if dtype.kind == "b":
        return np.tile([False, True], 20)
    around = [sign * 2**k + step for k in (0, 7, 8, 15, 16, 31, 32, 63, 64) for sign in (-1, 1) for step in (-1, 0, 1)]
    noise = np.random.default_rng(1).integers(0, 256, (64, dtype.itemsize), "u1").view(dtype)[:, 0]
    with np.errstate(all="ignore"):
        if dtype.kind == "f":
            some = [0.0, -0.0, 0.5, -0.5, 0.99, 1.5, -1.5, 254.9, 255.5, -128.9, 1802, 70000, 1e-30, 1e30, -1e30]
            exact = np.array([*map(float, around), *some, math.inf, -math.inf, math.nan]).astype(dtype)
        else:
            limits = np.iinfo(dtype)
            exact = np.array([n for n in [*around, 1802, 0] if limits.min <= n <= limits.max], dtype)
    return np.concatenate([exact, noise])


def expected(values, target):
    """By Python's whole numbers, element by element; floats by NumPy, which leaves nothing open there."""
    target = np.dtype(target)
    if target.kind not in "iu":
        with np.errstate(all="ignore"):
            return values.astype(target)
    limits = np.iinfo(target)
    bits = 8 * target.itemsize

    def one(value):
        if isinstance(value, float):
            if math.isnan(value):
                return 0
            whole = value if math.isinf(value) else int(value)
            return int(min(max(whole, limits.min), limits.max))
        return (int(value) - limits.min) % 2**bits + limits.min

    return np.array([one(value) for value in values.tolist()], target).reshape(values.shape)


def same(found, wanted):
    """Equal bits, but that NaN is NaN."""
    assert found.dtype == wanted.dtype
    if wanted.dtype.kind == "f":
        nan = np.isnan(wanted)
        return np.array_equal(np.isnan(found), nan) and found[~nan].tobytes() == wanted[~nan].tobytes()
    return found.tobytes() == wanted.tobytes()


def test_the_rule_in_numbers():
    assert cast_elements(np.array([1802, 300], "u2"), np.dtype("i1")).tolist() == [10, 44]
    some = np.array([1e9, -1e9, np.nan, np.inf, -1.9, 254.9], "f4")
    assert cast_elements(some, np.dtype("u1")).tolist() == [255, 0, 0, 255, 0, 254]
    assert cast_elements(some, np.dtype("i1")).tolist() == [127, -128, 0, 127, -1, 127]
    assert cast_elements(np.float32(1e9), np.dtype("i2"))[()] == 32767


@pytest.fixture(scope="module")
def casts():
    """The kernel's casts, all pairs of them in one library."""
    text = '#include "casts.cuh"\n'
    for source, target in PAIRS:
        into, of = TYPES[target], TYPES[source]
        text += f'extern "C" __global__ void cast_{source}_{target}({into} *out, const {of} *in, int n) {{\n'
        text += f"    for (int i = 0; i < n; ++i) out[i] = Cast<{into}, {of}>::of(in[i]);\n}}\n"
    names = tuple(f"cast_{source}_{target}" for source, target in PAIRS)
    return library(_with_headers(text, "linumpy.gpu.read.cuda"), (), names)


@needs_compiler
@pytest.mark.parametrize("source", REAL)
def test_casts_of_the_kernel(casts, source):
    values = values_of(source)
    for target in REAL:
        found = np.empty(len(values), target)
        Kernel(getattr(casts, f"emulate_cast_{source}_{target}"))((1,), (1,), (found, values, np.int32(len(values))))
        assert same(found, expected(values, target)), target


@needs_compiler
@pytest.mark.parametrize(("source", "target"), [("u2", "i1"), ("f4", "u1"), ("f8", "i8"), ("f2", "u2"), ("i8", "f4")])
@pytest.mark.parametrize("swapped", [False, True])
def test_the_kernel_as_it_is_shipped(source, target, swapped):
    """One box of one axis, every second element, and one that is filled."""
    values = values_of(source)
    stored = values.astype(np.dtype(source).newbyteorder()) if swapped else values
    conversion = Conversion(np.dtype(source), np.dtype(target), swapped)
    fill = conversion.fill_bytes(values[3]).view(np.int64)
    taken, out = len(values) // 2, np.zeros(len(values) // 2 + 5, target)
    headers = np.array([2, 1, *fill], np.int64)
    rows = np.array([[0, out.ctypes.data, 0, taken], [-1, out[taken:].ctypes.data, 0, 5]], np.int64)
    emulated(kernel_spec(conversion, 1, 1))((2,), (256,), (stored, headers, rows, np.uint32(1)))
    assert same(out[:taken], expected(values[: 2 * taken : 2], target))
    assert same(out[taken:], expected(np.repeat(values[3], 5), target))


@pytest.mark.parametrize(
    ("source", "target", "order"),
    some(
        [(*one, order) for one in PAIRS if one[0] != one[1] for order in "<>"],
        lambda source, target, order: (PAIRS.index((source, target)) % 2 == 0) == (order == "<"),
    ),
)
def test_every_path_of_the_host(tmp_path, source, target, order):
    values = values_of(source)
    stored = zarr.create_array(
        tmp_path / "a", shape=(len(values) + 8,), chunks=(16,), dtype=np.dtype(source).newbyteorder(order),
        fill_value=values[-1] if np.dtype(source).kind == "f" else values[1], compressors=None,
    )  # fmt: skip
    stored[: len(values)] = values
    wanted = expected(np.asarray(stored[...]).astype(source), target)
    assert same(read_zarr(tmp_path / "a", dtype=target, device="cpu"), wanted)
    with Reader(device="cpu") as reader:
        assert same(reader.submit(tmp_path / "a", dtype=target).result(), wanted)
        assert same(reader.submit(tmp_path / "a", slice(3, 9), dtype=target).result(), wanted[3:9])
        out = np.empty(len(wanted), target)
        reader.submit(tmp_path / "a", out=out).result()
        assert same(out, wanted)
        outs = list(np.empty((2, 20), target))
        for ticket in reader.submit_many(tmp_path / "a", np.array([[[0, 20]], [[5, 25]]]), outs=outs):
            ticket.result()
        assert same(outs[1], wanted[5:25])


@pytest.mark.gpu
@pytest.mark.parametrize("filters", [None, "left to zarr-python"])
@pytest.mark.parametrize("source", REAL)
def test_every_path_of_a_device(tmp_path, cupy, source, filters):
    from linumpy.gpu import read_zarr_to_gpu

    values = values_of(source)
    options = {"filters": [Delta(dtype=source)], "zarr_format": 2} if filters and source[0] in "iu" else {}
    stored = zarr.create_array(
        tmp_path / "a", shape=(len(values),), chunks=(16,), dtype=source, compressors=None, **options
    )
    stored[...] = values
    with Reader() as reader:
        for target in REAL:
            wanted, out = expected(np.asarray(stored[...]), target), cupy.empty(len(values), target)
            assert same(read_zarr_to_gpu(tmp_path / "a", dtype=target).get(), wanted)
            assert same(read_zarr_to_gpu(tmp_path / "a", out=out).get(), wanted)
            if not options:
                assert same(reader.submit(tmp_path / "a", dtype=target).result().get(), wanted)
