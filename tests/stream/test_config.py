"""If this fails, samples, limits or dtypes are taken for something else than users wrote."""

import dataclasses
import pickle
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from linumpy import stream
from linumpy.errors import ChunkError, LinumpyError
from linumpy.stream.errors import as_stream_error

NEEDED = {"batch_size": 8, "host_buffer_bytes": 1 << 20, "device_buffer_bytes": 1 << 20}


@pytest.mark.parametrize(
    ("name", "least"),
    [("batch_size", 1), ("host_buffer_bytes", 2**20), ("device_buffer_bytes", 1), ("lookahead_batches", 2),
     ("n_io_threads", 1), ("n_compute_threads", 0), ("n_zarrs_meta_cache", 1), ("max_gpu_memory_bytes", 0)],
)  # fmt: skip
def test_numbers_that_are_too_small(name, least):
    with pytest.raises(ValueError, match=rf"^{name} must be >= {least} \(got {least - 1}\)$"):
        stream.Config(**{**NEEDED, name: least - 1})
    for wrong in (True, 1.5, "8", None):
        with pytest.raises(TypeError, match=f"{name} must be an int"):
            stream.Config(**{**NEEDED, name: wrong})
    assert getattr(stream.Config(**{**NEEDED, name: np.int64(1 << 30)}), name) == 1 << 30 or name.startswith("max")


def test_a_configuration_is_a_frozen_record():
    cfg = stream.Config(**NEEDED, dtype="bf16")
    assert cfg.dtype is stream.Dtype.BF16
    other = dataclasses.replace(cfg, batch_size=3)
    assert (other.batch_size, other.dtype) == (3, stream.Dtype.BF16)
    with pytest.raises(dataclasses.FrozenInstanceError):
        cfg.batch_size = 2
    with pytest.raises(TypeError):
        stream.Config(8, 1, 1)
    with pytest.raises(ValueError, match="batch_size must be >= 1"):
        dataclasses.replace(cfg, batch_size=0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"pad": "mirror"}, "pad must be one of"), ({"on_error": "stop"}, "on_error must be"),
     ({"rank": 2, "world_size": 2}, r"rank must be < world_size \(got 2 of 2\)"),
     ({"spacing": (1, 0, 1)}, "spacing must be positive"), ({"dtype": "f8"}, "dtype must be one of f32, f16, bf16"),
     ({"augment": stream.Augment()}, "augment needs pad"), ({"device": "gpu"}, "device .* must be an int"),
     ({"max_gpu_memory_bytes": 5}, "max_gpu_memory_bytes must be >= .* = 2097152"),
     ({"seed": 2**64}, f"seed must be < {2**64}"), ({"epoch": 2**70}, "epoch must be <"),
     ({"pad_value": "x"}, "pad_value must be a number"), ({"pad_value": None}, "pad_value must be a number"),
     ({"pad_value": True}, "pad_value must be a number"), ({"spacing": 5}, "spacing must hold µm for each axis"),
     ({"spacing": "123"}, "spacing must hold µm"), ({"spacing": ()}, "spacing must be positive"),
     ({"spacing": ("a",)}, "spacing must be a number"), ({"dtype": float}, "dtype must be one of"),
     ({"dtype": np.float64}, "dtype must be one of"), ({"pad": ["edge"]}, "pad must be one of"),
     ({"pad": np.array(["edge"])}, "pad must be one of"), ({"augment": "flip"}, "augment must be an Augment"),
     ({"device": True}, "device .* must be an int"), ({"batch_size": np.True_}, "batch_size must be an int"),
     ({"origin": (np.nan,)}, "origin must be finite"), ({"origin": ()}, "origin must be finite"),
     ({"origin": (1, 2), "spacing": (1,)}, "differ in their number of axes")],
)  # fmt: skip
def test_what_a_configuration_refuses(wrong, message):
    with pytest.raises(stream.InvalidArgument, match=message) as caught:
        stream.Config(**{**NEEDED, **wrong})
    assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)


def test_the_chunk_cache_obeys_the_cap():
    options = {**NEEDED, "cache_bytes": 10 << 20}
    assert stream.Config(**options).allowed_cache_bytes == 10 << 20
    assert stream.Config(**options, max_gpu_memory_bytes=5 << 20).allowed_cache_bytes == 3 << 20


@pytest.mark.parametrize(
    ("names", "dtype"),
    [(("f32", "float32", "torch.float32", np.float32, np.dtype("f4")), stream.Dtype.F32),
     (("f16", "half", np.float16), stream.Dtype.F16),
     (("bf16", "BFloat16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16)), stream.Dtype.BF16),
     (("stored", stream.Dtype.STORED), stream.Dtype.STORED)],
)  # fmt: skip
def test_names_of_dtypes(names, dtype):
    assert {stream.Dtype.coerce(name) for name in names} == {dtype}


def test_samples_are_equal_however_spelled():
    spelled = [
        stream.Sample("a.zarr", np.s_[:64, 1:256, -3:256]),
        stream.Sample(Path("a.zarr"), [(0, 64), [1, 256], (-3, 256)]),
        stream.Sample(uri="a.zarr", aabb=np.array([[0, 64], [1, 256], [-3, 256]]), index=5),
        stream.Sample("a.zarr", (slice(np.int32(0), 64, 1), (1, 256), (-3, 256))),
    ]
    assert len(set(spelled)) == 1
    assert spelled[2].aabb == ((0, 64), (1, 256), (-3, 256))
    assert str(spelled[0]) == "a.zarr[0:64, 1:256, -3:256]"


@pytest.mark.parametrize(
    ("aabb", "error", "message"),
    [(("5", (0, 2)), TypeError, r"^aabb axis 0: expected slice, \(start, stop\) tuple or int; got str$"),
     (((0, 2), (1, 2, 3)), TypeError, "aabb axis 1: expected"),
     ((slice(0, 4, 2),), ValueError, r"aabb axis 0: slice\(0, 4, 2\) has a step"),
     (((0, 2), slice(4, None)), ValueError, r"aabb axis 1: slice\(4, None, None\) is open"),
     ((True, (0, 2)), TypeError, "aabb axis 0: expected .* got bool"),
     (((0, 2), (3, 3)), ValueError, r"aabb axis 1: start must be < stop; got \(3, 3\)"),
     (((0, 2.5),), TypeError, "aabb axis 0: start and stop must be ints"),
     ((range(2),), TypeError, "aabb axis 0: expected .* got range"),
     ((b"ab",), TypeError, "aabb axis 0: expected .* got bytes"),
     (((False, 5),), TypeError, "aabb axis 0: start and stop must be ints"),
     (np.array([[False, True]]), TypeError, "aabb axis 0: start and stop must be ints"),
     (((0, 2**53),), ValueError, r"aabb axis 0: start and stop must be from -2\*\*52 to 2\*\*52"),
     (((-(2**53), 0),), ValueError, "aabb axis 0: start and stop must be from"),
     ((), TypeError, "aabb must hold"), ("ab", TypeError, "aabb must hold"), (7, TypeError, "aabb must hold")],
)  # fmt: skip
def test_boxes_that_are_refused(aabb, error, message):
    with pytest.raises(error, match=message):
        stream.Sample("a", aabb)


def test_parts_that_are_refused():
    box = ((0, 1),)
    with pytest.raises(ValueError, match=r"different names \(got image, image\)"):
        stream.Sample("a", box, parts=[stream.Part("image")])
    for wrong in (
        {"name": "a b"},
        {"name": "_a"},
        {"name": "class"},
        {"name": "a", "kind": "mask"},
        {"name": "a", "level": -1},
        {"name": "a", "spacing": (1, 1, 1)},
    ):
        with pytest.raises(stream.InvalidArgument, match=r"must be|are parameters of Config"):
            stream.Part(**wrong)
    with pytest.raises(TypeError, match="uri must be a path"):
        stream.Sample(3, box)
    with pytest.raises(ValueError, match="an empty string"):
        stream.Sample("", box)
    for shape in (3, "12", (2.0,), ()):
        with pytest.raises((TypeError, ValueError), match="shape must"):
            stream.Part("a", shape=shape)
    for parts in (["labels"], stream.Part("labels"), None):
        with pytest.raises(TypeError, match="parts must be a sequence of Parts"):
            stream.Sample("a", box, parts=parts)


@pytest.mark.parametrize("name", ["index", "epoch"])
def test_numbers_of_samples_that_are_refused(name):
    assert getattr(stream.Sample("a", ((0, 1),), **{name: np.uint64(2**64 - 1)}), name) == 2**64 - 1
    for wrong, error in ((-1, ValueError), (2**64, ValueError), (1.0, TypeError), ("1", TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"^{name} must be"):
            stream.Sample("a", ((0, 1),), **{name: wrong})


def test_records_go_to_other_processes():
    part = stream.Part("labels", "l.zarr", kind="labels", shape=np.array([1, 2]))
    sample = stream.Sample("a", np.s_[0:4, 0:5], parts=[part], index=3)
    config = stream.Config(**NEEDED, augment=stream.Augment(rotation=5, elastic=(5, 1)), pad="edge", dtype="bf16")
    for one in (sample, part, config):
        again = pickle.loads(pickle.dumps(one))
        assert (again, hash(again)) == (one, hash(one))
    assert pickle.loads(pickle.dumps(sample)).index == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"gamma": (0.5, 2)}, "need intensity_range"), ({"scale": (0, 1)}, "scale must be > 0"),
     ({"flip": "zq"}, "flip must name axes"), ({"elastic": (0, 1)}, "elastic spacing must be > 0"),
     ({"rotation": ((0, 1),)}, "rotation must be a number or three"), ({"noise": -1}, "noise must be >= 0"),
     ({"contrast": (2, 1), "intensity_range": (0, 1)}, "low <= high"),
     ({"intensity_range": (1, 1)}, "low < high"), ({"scale": [(1, 2)] * 2}, "scale must be"),
     ({"scale": 2.0}, "scale must be"), ({"scale": None}, "scale must be"), ({"scale": ()}, "scale must be"),
     ({"rotation": None}, "rotation must be"), ({"shear": "x"}, "shear must be"), ({"flip": None}, "flip must name"),
     ({"elastic": 5.0}, r"elastic must be an Elastic or \(spacing, sigma\)"), ({"elastic": (1, 2, 3)}, "elastic must"),
     ({"translation": (1, 2)}, "translation must be a number or three"), ({"translation": "x"}, "translation must"),
     ({"gamma": 2, "intensity_range": (0, 1)}, "gamma must be"), ({"noise": "x"}, "noise must be"),
     ({"blur": float("nan")}, "blur must be"), ({"intensity_range": 5}, "intensity_range must be")],
)  # fmt: skip
def test_augmentations_that_are_refused(wrong, message):
    with pytest.raises(stream.InvalidArgument, match=message):
        stream.Augment(**wrong)


BUILTINS = {
    stream.TryAgain: BlockingIOError, stream.InvalidArgument: ValueError, stream.NotFound: FileNotFoundError,
    stream.DtypeMismatch: TypeError, stream.RankMismatch: ValueError, stream.StorageError: OSError,
    stream.DecodeError: OSError, stream.NativeCudaError: RuntimeError, stream.OutOfMemory: MemoryError,
    stream.ShutdownError: RuntimeError,
}  # fmt: skip


def test_every_error_has_a_status_of_its_own_and_a_builtin():
    assert {kind.status for kind in BUILTINS} == set(stream.Status) - {stream.Status.OK}
    stages = ("pop", "argument", "open", "plan", "plan", "read", "decode", "device", "memory", "close")
    sample = stream.Sample("a", ((0, 1),))
    for (kind, builtin), stage in zip(BUILTINS.items(), stages, strict=True):
        error = kind("went wrong", sample)
        assert error.what == stage
        assert isinstance(error, (stream.StreamError, LinumpyError))
        assert isinstance(error, builtin)
        assert (error.detail, str(error)) == ("went wrong", "went wrong (sample a[0:1])")
        assert kind("went wrong", what="a stage").what == "a stage"
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.detail, again.sample, again.what) == (kind, "went wrong", sample, error.what)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(FileNotFoundError("x"), stream.NotFound), (ChunkError("x"), stream.DecodeError),
     (MemoryError("x"), stream.OutOfMemory), (PermissionError("x"), stream.StorageError),
     (ValueError("x"), stream.InvalidArgument), (KeyError("x"), stream.InvalidArgument),
     (OverflowError("x"), stream.InvalidArgument), (RuntimeError("x"), stream.StorageError)],
)  # fmt: skip
def test_errors_of_reads_are_translated(error, kind):
    made = as_stream_error(error)
    assert type(made) is kind
    assert made.__cause__ is error


def test_bytes_that_cannot_be_read_are_no_error_of_decoding():
    for cause, kind in (
        (PermissionError(13, "Permission denied"), stream.StorageError),
        (OSError("Not a gzipped file"), stream.DecodeError),
        (ValueError("corrupt"), stream.DecodeError),
    ):
        error = ChunkError("x")
        error.__cause__ = cause
        assert type(as_stream_error(error)) is kind
