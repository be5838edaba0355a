"""If this fails, samplers as users make them give wrong samples, or take wrong arguments."""

import contextlib
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from linumpy import sampling
from linumpy.sampling import create_sampler, threads
from linumpy.sampling.coordinates.generator import key_of
from linumpy.sampling.paging.slabs import SlabVolume
from linumpy.sampling.volume import DeviceVolume
from tests.support.oracles.ray_scenes import Foreign
from tests.support.oracles.sampling_reference import DIMS, independent, raw_file, truth, voxels_of

pytestmark = pytest.mark.needs_core

DTYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "float", "double"]
HOST = ["cpu", "openvkl", "virtual_memory", "out_of_core"]
SLABS = {name: {} for name in HOST} | {"out_of_core": {"num_blocks": 4, "num_concurrent_blocks": 2}}


def check(sampler, voxels, low_high=None, count=3000, order=None):
    coords, values = sampler.sample(count, order)
    assert coords.shape == (count, 3)
    assert coords.dtype == values.dtype == np.float32
    assert values.shape == (len(voxels), count)
    span = 1 if low_high else np.ptp(voxels.astype(float))
    expected = truth(voxels, coords, 1, low_high)
    assert np.abs(values - expected).max() < 1e-6 * span + 1e-7 * abs(expected).max()
    outside = np.random.default_rng(0).uniform(-0.2, 1.2, (500, 3)).astype(np.float32)
    assert np.abs(sampler.decode(outside) - truth(voxels, outside, 1, low_high)).max() < 1e-6 * span + 1e-5
    return coords, values


@pytest.mark.parametrize("device", HOST)
@pytest.mark.parametrize(
    ("dtype", "channels", "offset", "big"),
    [
        *[(dtype, 1, 0, False) for dtype in DTYPES],
        *[(dtype, 2, 13, True) for dtype in DTYPES],
    ],
)
def test_raw_files(device, dtype, channels, offset, big, tmp_path):
    voxels, kwargs = raw_file(tmp_path, dtype, channels, offset, big)
    sampler = create_sampler("structuredRegular", device, seed=4, range=(10, 90), **kwargs)
    coords, _ = check(sampler, voxels, (10, 90))
    assert sampler.n_channels() == channels
    assert sampler.value_range == (0, 1)
    if device in ("cpu", "openvkl", "virtual_memory"):
        assert np.array_equal(coords, independent(key_of(4), np.arange(3000)))


@pytest.mark.parametrize("device", HOST)
@pytest.mark.parametrize("low_high", [(10, 90), (5, 5)])
def test_voxels_that_are_not_finite(device, low_high, tmp_path):
    voxels, kwargs = raw_file(tmp_path, "float")
    voxels[0, 2, 3, 4], voxels[0, 6, 7, 8], voxels[0, 4, 9, 15] = np.inf, -np.inf, np.nan
    voxels.tofile(kwargs["filename"])
    coords, values = create_sampler("structuredRegular", device, range=low_high, **kwargs).sample(20_000)
    unknown = np.zeros_like(voxels)
    unknown[np.isnan(voxels)] = 1
    beside = truth(unknown, coords, 1) > 0
    assert beside.any()
    assert np.isnan(values[beside]).all()
    expected = truth(np.nan_to_num(voxels, nan=0, posinf=1e6, neginf=-1e6), coords, 1, low_high)
    assert np.abs(values - expected)[~beside].max() < 1e-6


def test_the_range_of_values_is_that_of_the_numbers():
    voxels = voxels_of("float")
    voxels[0, 0, 0, 0] = np.nan
    known = float(np.nanmin(voxels)), float(np.nanmax(voxels))
    assert create_sampler("structuredRegular", "cpu", array=voxels).value_range == known
    assert DeviceVolume(voxels, layout="rows").value_range == known
    nothing = np.full_like(voxels, np.nan)
    assert np.isnan(create_sampler("structuredRegular", "cpu", array=nothing).value_range).all()


def test_one_line_is_printed(tmp_path, capsys):
    _, kwargs = raw_file(tmp_path)
    create_sampler("structuredRegular", "virtual_memory", range=(0, 9), **kwargs)
    create_sampler("structuredRegular", "out_of_core", range=(0, 9), num_blocks=3, **kwargs)
    lines, nbytes = capsys.readouterr().out.splitlines(), 19 * 14 * 9 * 2
    assert len(lines) == 2
    for line in lines:
        assert str(kwargs["filename"]) in line
        assert f"19 × 14 × 9 uint16, {nbytes} bytes from byte {kwargs['offset']}, range 0 to 9" in line
    assert "1 of 1 slabs" in lines[1]


@pytest.mark.parametrize("function", [sampling.decode, sampling.sample])
def test_pointers_by_the_names_of_the_interface(function):
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0], seed=3)
    other = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0], seed=3)
    coords, right_coords = (np.full((5, 3), 0.3, np.float32) for _ in range(2))
    values, right = np.empty((1, 5), np.float32), np.empty((1, 5), np.float32)
    with pytest.warns(FutureWarning, match=r"(coords|values)_ptr= is called (coords|values)= now"):
        function(sampler, coords_ptr=coords.ctypes.data, values_ptr=values.ctypes.data, count=5)
    function(other, right_coords, right, 5)
    assert np.array_equal(values, right)
    assert np.array_equal(coords, right_coords)


@pytest.mark.parametrize("spline_order", [0, 1, 3])
def test_orders_of_the_spline(spline_order):
    voxels = voxels_of("float")
    sampler = create_sampler("structuredRegular", "cpu", array=voxels[0], spline_order=spline_order)
    coords, values = sampler.sample(500)
    assert np.abs(values - truth(voxels, coords, spline_order)).max() < 1e-3
    if spline_order:
        values, slopes = sampler.decode(coords, gradient=True)
        assert slopes.shape == (1, 3, 500)
        slopes = np.zeros((1, 3, 500), np.float32)
        sampling.decode(sampler, coords, values, 500, gradient=slopes)
        assert slopes.any()


def test_labels():
    labels = np.random.default_rng(0).integers(0, 2**31, DIMS[::-1], np.uint32)
    sampler = create_sampler("structuredRegular", "cpu", array=labels, labels=True)
    coords, values = sampler.sample(200)
    assert values.dtype == np.int32
    assert np.array_equal(values, truth(labels[None], coords, 0))
    with pytest.raises(ValueError, match=r"-2\*\*31 to 2\*\*31 - 1"):
        create_sampler("structuredRegular", "cpu", array=labels + np.uint32(2**31), labels=True)


@pytest.mark.parametrize("order", ["iid", "stratified", "sobol"])
def test_the_stream_of_a_seed(order):
    voxels = voxels_of("float")
    one, other = (create_sampler("structuredRegular", "cpu", array=voxels, seed=9, order=order) for _ in range(2))
    coords, values = one.sample(1000)
    parts = [other.sample(count) for count in (1, 0, 400, 599)]
    assert np.array_equal(coords, np.concatenate([part[0] for part in parts]))
    assert np.array_equal(values, np.concatenate([part[1] for part in parts], 1))
    assert len(np.unique(np.concatenate([coords, one.sample(1000)[0]]), axis=0)) == 2000


def test_binned_is_in_the_order_of_boxes():
    voxels = voxels_of("float", dims=(70, 50, 60))
    sampler = create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order="binned")
    coords, _ = check(sampler, voxels, count=20_000)
    steps = np.abs(np.diff(coords, axis=0)).max(1)
    iid = np.abs(np.diff(sampler.sample(20_000, "iid")[0], axis=0)).max(1)
    assert np.median(steps) < 0.5 * np.median(iid)
    # Parts of one window are the window.
    whole = create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order="binned").sample(1000)
    piecewise = create_sampler("structuredRegular", "cpu", array=voxels, seed=1, order="binned", window=1000)
    parts = [piecewise.sample(count) for count in (300, 699, 501)]
    for k, axis in ((0, 0), (1, 1)):
        assert np.array_equal(np.concatenate([part[k] for part in parts], axis).take(range(1000), axis), whole[k])


def test_masks_and_importance():
    voxels = voxels_of("float")
    mask = np.random.default_rng(1).random((5, 6, 7)) > 0.8
    coords, values = create_sampler("structuredRegular", "cpu", array=voxels, mask=mask).sample(4000)
    at = np.floor(coords[:, ::-1].astype(np.float64) * mask.shape).astype(int)
    assert mask[*at.T].all()
    assert np.abs(values - truth(voxels, coords, 1)).max() < 1e-4
    density = np.zeros((2, 1, 1))
    density[1] = 1
    coords, _ = create_sampler("structuredRegular", "cpu", array=voxels, importance=density).sample(100)
    assert coords[:, 2].min() >= 0.5
    edge = np.zeros((1, 40, 40, 40), np.float32)
    edge[..., 20:] = 1
    coords, _ = create_sampler("structuredRegular", "cpu", array=edge, importance="gradient", seed=0).sample(4000)
    assert (np.abs(coords[:, 0] - 0.5) < 0.06).mean() > 0.5
    with pytest.raises(ValueError, match="one of them"):
        create_sampler("structuredRegular", "cpu", array=edge, mask=mask, importance=density)
    with pytest.raises(ValueError, match="choose 'iid' or 'binned'"):
        create_sampler("structuredRegular", "cpu", array=edge, mask=mask, order="sobol")


def test_arrays_of_the_caller_are_filled():
    voxels = voxels_of("float", channels=2)
    sampler = create_sampler("structuredRegular", "cpu", array=voxels, seed=3)
    coords, values = np.full((50, 3), -1, np.float32), np.full((2, 50), -1, np.float32)
    sampling.sample(sampler, coords, values, 50)
    again = create_sampler("structuredRegular", "cpu", array=voxels, seed=3)
    guarded = [np.full(8 + n + 8, -7, np.float32) for n in (150, 100)]
    sampling.sample(again, *(one[8:].ctypes.data for one in guarded), 50)
    for mine, one in zip((coords, values), guarded, strict=True):
        assert np.array_equal(mine.reshape(-1), one[8:-8])
        assert (one[:8] == -7).all()
        assert (one[-8:] == -7).all()
    other = np.empty((2, 50), np.float32)
    sampling.decode(sampler, coords.ctypes.data, other.ctypes.data, 50)
    assert np.array_equal(other, values)
    half = np.empty((2, 50), np.float16)
    sampling.decode(sampler, coords, half, 50)
    assert np.array_equal(half, values.astype(np.float16))
    sampling.sample(sampler, coords, values, np.int64(50))
    sampling.sample(sampler, np.empty((0, 3), np.float32), np.empty((2, 0), np.float32), 0)


def test_dlpack():
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0], seed=3)
    coords, values = np.empty((50, 3), np.float32), np.empty((1, 50), np.float32)
    sampling.sample(sampler, Foreign(coords), Foreign(values), 50)
    assert np.array_equal(values, sampler.decode(coords))
    array = Foreign(voxels_of("float")[0])
    assert np.array_equal(create_sampler("structuredRegular", "cpu", array=array, seed=3).sample(50)[1], values)


F4 = np.float32


@pytest.mark.parametrize(
    ("coords", "values", "count", "error", "text"),
    [
        (np.empty((5, 3), F4), np.empty((1, 5), F4), -1, ValueError, "count=-1"),
        (np.empty((5, 3), F4), np.empty((1, 5), F4), 2**33 + 1, ValueError, "8589934592"),
        (np.empty((5, 3), F4), np.empty((1, 5), F4), 5.0, TypeError, r"count=5\.0"),
        (np.empty((4, 3), F4), np.empty((1, 5), F4), 5, ValueError, r"coords has shape \(4, 3\)"),
        (np.empty((5, 3), F4), np.empty((2, 5), F4), 5, ValueError, r"values has shape \(2, 5\)"),
        (np.empty((5, 3)), np.empty((1, 5), F4), 5, TypeError, "coords has dtype float64"),
        (np.empty((5, 3), F4), np.empty((1, 5), np.int32), 5, TypeError, "values has dtype int32"),
        (np.empty((3, 5), F4).T, np.empty((1, 5), F4), 5, ValueError, "coords is not C-contiguous"),
        (np.broadcast_to(F4(0), (5, 3)), np.empty((1, 5), F4), 5, ValueError, "coords"),
        ([[0.0] * 3] * 5, np.empty((1, 5), F4), 5, TypeError, "coords is a list"),
        (0, np.empty((1, 5), F4), 5, ValueError, "coords is the pointer 0x0"),
        (2, np.empty((1, 5), F4), 5, ValueError, "address of 60 bytes of float32"),
    ],
)
def test_arguments_that_do_not_fit(coords, values, count, error, text):
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0])
    with pytest.raises(error, match=text):
        sampling.sample(sampler, coords, values, count)


class OnDevice:
    """A DLPack array of a CUDA device, of which only the kind of memory is known."""

    def __dlpack__(self, **options):
        raise BufferError

    def __dlpack_device__(self):
        return 2, 0


@pytest.mark.parametrize(
    ("coords", "error", "text"),
    [
        (2**64, ValueError, "coords is the pointer 0x10000000000000000"),
        (2**64 - 4, ValueError, "coords is the pointer 0xfffffffffffffffc"),
        (-4, ValueError, "coords is the pointer -0x4"),
        (OnDevice(), ValueError, "coords lies in the memory of a device; this sampler works in host memory"),
    ],
)
def test_memory_that_cannot_be_used(coords, error, text):
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0])
    with pytest.raises(error, match=text):
        sampling.decode(sampler, coords, np.empty((1, 5), F4), 5)


def test_subclasses_of_arrays_are_seen_as_arrays():
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0])
    coords = np.random.default_rng(0).random((5, 3), F4)
    assert np.array_equal(sampler.decode(np.ma.masked_array(coords)), sampler.decode(coords))
    with pytest.warns(PendingDeprecationWarning):
        matrix = np.matrix(coords)
    assert np.array_equal(sampler.decode(matrix), sampler.decode(coords))
    with pytest.raises(TypeError, match="array is a masked array"):
        create_sampler("structuredRegular", "cpu", array=np.ma.masked_array(ARRAY, ARRAY == 0))


def test_read_only_arrays():
    sampler = create_sampler("structuredRegular", "cpu", array=voxels_of("float")[0])
    coords = np.zeros((5, 3), F4)
    coords.flags.writeable = False
    with pytest.raises(ValueError, match="coords is read-only"):
        sampling.sample(sampler, coords, np.empty((1, 5), F4), 5)
    sampling.decode(sampler, coords, np.empty(5, F4), 5)


ARRAY = np.zeros((4, 4, 4), F4)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        (("cube", "cpu"), {}, ValueError, "structuredRegular, zarr"),
        (("zarr", "out_of_core"), {}, ValueError, "cuda, cuda_out_of_core, cpu"),
        (("structuredRegular", "cpu"), {"arrays": 1}, TypeError, "unknown argument 'arrays'.*filename, dims.*array"),
        (("structuredRegular", "cpu"), {}, ValueError, "filename and array: give one"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "dims": [4, 4, 4]}, ValueError, "describe a file"),
        (("structuredRegular", "cpu"), {"array": ARRAY[0]}, ValueError, r"shape \(4, 4\)"),
        (("structuredRegular", "cpu"), {"array": ARRAY.astype("c8")}, ValueError, "complex64"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "range": (2, 1)}, ValueError, r"range=\(2, 1\)"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "range": (0, np.inf)}, ValueError, "finite"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "order": "random"}, ValueError, "order='random'"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "interpolation": "fast"}, ValueError, "interpolation='fast'"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "spline_order": 2}, ValueError, "spline_order=2"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "layout": "cells"}, ValueError, "layout"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "range": (-1.7e308, 1.7e308)}, ValueError, "range="),
        (("structuredRegular", "cpu"), {"array": ARRAY, "range": (0, 1e-310)}, ValueError, "range="),
        (("structuredRegular", "cpu"), {"array": ARRAY, "range": (1e300, 1e300)}, ValueError, "range="),
        (("structuredRegular", "cpu"), {"array": ARRAY, "mask": ARRAY * np.nan}, ValueError, "mask holds NaN"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "spacing": (1, 2)}, ValueError, "spacing"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "window": 0}, ValueError, "window=0"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "window": 1.5, "order": "binned"}, TypeError, "window=1.5"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "strata": "2"}, TypeError, "strata='2'"),
        ((["zarr"], "cpu"), {}, ValueError, r"type=\['zarr'\]"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "strata": 3, "order": "stratified"}, ValueError, "strata=3"),
        (("structuredRegular", "cpu"), {"array": ARRAY, "labels": True}, ValueError, "give integers"),
        (("zarr", "cpu"), {"labels": True, "spline_order": 3}, ValueError, "spline_order=3 with labels"),
        (("exastitch", "cpu"), {"labels": True}, ValueError, "spline_order and labels"),
        (("structuredRegular", "virtual_memory"), {"array": ARRAY}, TypeError, "unknown argument 'array'"),
    ],
)
def test_samplers_that_cannot_be_made(args, kwargs, error, text):
    with pytest.raises(error, match=text):
        create_sampler(*args, **kwargs).sample(1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"dims": [19, 14]}, "dims="),
        ({"dims": [0, 1, 1]}, "dims="),
        ({"dims": [-19, 14, 9]}, "dims="),
        ({"dims": [19.5, 14, 9]}, "dims="),
        ({"dims": [2**24, 1, 1]}, "dims=16777216"),
        ({"dims": [2**24 - 1, 1, 1]}, "has 4788 bytes"),
        ({"dims": [19, 14, 10]}, "has 4788 bytes"),
        ({"offset": 2}, "has 4788 bytes"),
        ({"dims": [True, 14, 9]}, "dims="),
        ({"offset": -2}, "offset=-2"),
        ({"offset": 0.5}, r"offset=0\.5"),
        ({"offset": None}, "offset=None"),
        ({"n_channels": 0}, "n_channels=0"),
        ({"n_channels": 1.5}, r"n_channels=1\.5"),
        ({"n_channels": None}, "n_channels=None"),
        ({"dtype": "uint64"}, "dtype='uint64'"),
        ({"dtype": "nothing"}, "dtype='nothing'"),
        ({"dtype": None}, "dims="),
        ({"range": None}, "range"),
    ],
)
@pytest.mark.parametrize("device", ["virtual_memory", "out_of_core"])
def test_files_that_do_not_fit(device, change, text, tmp_path):
    _, kwargs = raw_file(tmp_path)
    with pytest.raises((ValueError, TypeError), match=text):
        create_sampler("structuredRegular", device, **({"range": (0, 1)} | kwargs | change))


@pytest.mark.parametrize("device", HOST)
def test_a_file_that_is_not_there(device, tmp_path):
    with pytest.raises(FileNotFoundError):
        create_sampler("structuredRegular", device, range=(0, 1), **(raw_file(tmp_path)[1] | {"filename": "/nowhere"}))


def run_in_child(function):
    """Run in a forked child; returns how the child ended."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # a child that waits for ever is a failure, not a test that does not end
        with contextlib.suppress(BaseException):
            os._exit(0 if function() else 1)
        os._exit(2)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks in processes with threads, which are the subject
@pytest.mark.parametrize("device", HOST)
def test_a_forked_child_goes_on(device, tmp_path, monkeypatch):
    monkeypatch.setattr(
        SlabVolume.__init__, "__kwdefaults__", SlabVolume.__init__.__kwdefaults__ | {"slab_nbytes": 512}
    )
    voxels, kwargs = raw_file(tmp_path)
    sampler = create_sampler("structuredRegular", device, range=(0, 99), seed=2, **kwargs, **SLABS[device])
    count = 2**17
    sampler.sample(count)

    def go_on():
        coords, values = sampler.sample(count)
        return np.abs(values - truth(voxels, coords, 1, (0, 99))).max() < 1e-6

    assert run_in_child(go_on) == 0
    assert go_on()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_mapped_file_that_was_shortened_is_an_error(tmp_path):
    _, kwargs = raw_file(tmp_path, dims=(50, 50, 50))
    sampler = create_sampler("structuredRegular", "virtual_memory", range=(0, 99), **kwargs)

    def go_on():
        os.truncate(kwargs["filename"], 5000)
        for call in (lambda: sampler.sample(100), lambda: sampler.decode(np.zeros((1, 3), F4))):
            with pytest.raises(OSError, match=r"250000 bytes .* has 5000 now.*volume\.raw"):
                call()
        return True

    assert run_in_child(go_on) == 0


def test_a_file_that_is_shortened_while_it_is_read_is_an_error(tmp_path, monkeypatch):
    _, kwargs = raw_file(tmp_path)
    size = os.path.getsize(kwargs["filename"])
    os.truncate(kwargs["filename"], 1000)
    monkeypatch.setattr(os.path, "getsize", lambda path: size)  # as it was when it was looked at
    with pytest.raises(OSError, match=r"1000 bytes of voxels .* instead of 4788.*volume\.raw"):
        create_sampler("structuredRegular", "cpu", **kwargs)


def test_threads_that_fail_write_nothing_afterwards():
    began, go = threading.Barrier(3), threading.Event()
    written = []

    def part(begin, end):
        began.wait(10)
        if begin == 0:
            raise ValueError("the first part fails")
        go.wait(10)
        written.append(begin)

    threading.Timer(0.05, go.set).start()
    pool = ThreadPoolExecutor(3)
    with pytest.raises(ValueError, match="first part"):
        threads.run_parts(pool, part, [(0, 1), (1, 2), (2, 3)])
    assert sorted(written) == [1, 2]


def test_samples_do_not_depend_on_threads(monkeypatch):
    voxels = voxels_of("float")
    many = create_sampler("structuredRegular", "cpu", array=voxels, seed=0).sample(50_000)
    monkeypatch.setattr(threads.in_threads, "__defaults__", (1000,))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(7)))
    few = create_sampler("structuredRegular", "cpu", array=voxels, seed=0).sample(50_000)
    assert np.array_equal(many[0], few[0])
    assert np.array_equal(many[1], few[1])
