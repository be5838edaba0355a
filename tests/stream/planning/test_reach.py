"""If this fails, an augmented crop holds values of uninitialised memory, or reads more than it needs."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from linumpy import stream
from linumpy.core import native
from linumpy.gpu.read.engines import by_zarr
from linumpy.io.zarr_mode import read_chunks_on_host
from linumpy.stream.batches import submitter as submitter_module
from linumpy.stream.batches.memory import Memory
from linumpy.stream.config import Part
from linumpy.stream.planning import reach as reach_module
from linumpy.stream.planning.reach import with_needed, with_regions
from linumpy.stream.planning.samples import plan_sample
from linumpy.stream.reading import arrays
from linumpy.stream.resampling import resample as resample_module
from linumpy.stream.resampling.on_host import fill_row
from linumpy.write.writer import write_omezarr
from tests.support.budget import examples, matrix
from tests.support.gpu.emulator import emulated, needs_compiler
from tests.support.stream_arrays import array_info, make_array, small_config, staged

PADS = ["constant", "edge", "reflect"]
DTYPES = ["u2", "f4", "i2", "f8", "f2", "u1"]


def drawn_augment(rng):
    """Anything from flips alone to strong displacements, which may fold the crop over itself."""
    options = {"flip": "zyx"}
    if rng.random() < 0.8:
        options["rotation"] = float(rng.choice([10, 45, 180]))
    if rng.random() < 0.5:
        options["scale"] = [(0.5, 2.0)] * 3
    if rng.random() < 0.5:
        options["shear"] = 0.4
    if rng.random() < 0.6:
        options["elastic"] = (float(rng.uniform(3, 30)), float(rng.choice([0.5, 2, 8])))
    if rng.random() < 0.5:
        options["translation"] = 15.0
    return stream.Augment(**options)


def drawn_batch(seed, pad):
    """Draw a batch of crops with labels: parts, reads that are cut, and reads that are not."""
    rng = np.random.default_rng(seed)
    rank = int(rng.choice([2, 3, 3, 3, 4]))
    space = min(rank, 3)
    size = tuple(int(n) for n in rng.choice([1, 2, 5, 9, 14, 23], space))
    lead = (int(rng.integers(1, 3)),) * (rank - space)
    spacing = tuple(rng.choice([1.0, 1.0, 2.5, 4.0], space))
    dtype = DTYPES[seed % len(DTYPES)]
    target = ["f32", "stored"][seed // 2 % 2]
    settings_ = small_config(augment=drawn_augment(rng), pad=pad, seed=seed, pad_value=3, dtype=target)
    reads, shapes = [], None
    for row in range(int(rng.integers(1, 4))):
        shape = (*lead, *(int(n) for n in rng.choice([1, 7, 20, 40, 75], space)))
        chunk = tuple(int(min(n, c)) for n, c in zip(shape, rng.choice([1, 2, 3, 5, 8, 16], rank), strict=True))
        infos = [array_info((rng.random(shape) * 200).astype(kind), chunk, spacing) for kind in (dtype, "u4")]
        start = rng.integers(-30, 60, space)
        aabb = [*((0, n) for n in lead), *((int(a), int(a + n)) for a, n in zip(start, size, strict=True))]
        sample = stream.Sample("a", aabb, parts=(Part("m", kind="labels"),))
        shapes, whole = plan_sample(sample, infos, settings_, row, row, 0)
        reads += whole
    reads = with_regions(reads, pad)
    return shapes, with_needed(reads, shapes, pad), reads


def garbage(rng, shape, dtype):
    """NaN or any numbers, in place of what is not read."""
    if dtype.kind == "f":
        return rng.choice(np.array([np.nan, np.inf, 1e4], dtype), shape)
    return np.full(shape, np.iinfo(dtype).max, dtype)


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32), st.sampled_from(PADS))
def test_no_voxel_depends_on_what_is_not_read(seed, pad):
    rng = np.random.default_rng(seed)
    shapes, cut, whole = drawn_batch(seed, pad)
    for number, (some, all_) in enumerate(zip(cut, whole, strict=True)):
        part = shapes[number % 2]
        got, expected = (np.zeros(part.shape, part.element) for _ in range(2))
        fill_row(expected, part, staged(all_), pad, 3.0)
        fill_row(got, part, staged(some, functools.partial(garbage, rng)), pad, 3.0)
        assert got.tobytes() == expected.tobytes()


@needs_compiler
@pytest.mark.parametrize("seed", range(9))
def test_no_voxel_of_the_kernel_depends_on_what_is_not_read(monkeypatch, seed):
    monkeypatch.setattr(resample_module, "load", emulated)
    rng, pad = np.random.default_rng(seed), PADS[seed % 3]
    shapes, cut, whole = drawn_batch(seed, pad)
    for part in range(2):
        shape = shapes[part]
        got, expected = (np.zeros((len(whole) // 2, *shape.shape), shape.element) for _ in range(2))
        resample_module.launch(expected, shape, [staged(one) for one in whole[part::2]], pad, 3.0)
        some = [staged(one, functools.partial(garbage, rng)) for one in cut[part::2]]
        resample_module.launch(got, shape, some, pad, 3.0)
        assert got.tobytes() == expected.tobytes()


@settings(max_examples=examples(200))
@given(st.integers(0, 2**32), st.sampled_from(PADS))
def test_boxes_are_whole_chunks_of_the_region_and_meet_nowhere(seed, pad):
    _, cut, _ = drawn_batch(seed, pad)
    for read in cut:
        if read.needed is None:
            continue
        axes = read.needed.shape[1]
        region, chunk = np.array(read.region)[-axes:], np.array(read.info.chunk_shape)[-axes:]
        seen = np.zeros(region[:, 1] - region[:, 0], int)
        for box in read.needed:
            for (a, b), (start, stop), size in zip(box, region, chunk, strict=True):
                assert start <= a < b <= stop
                assert a == start or a % size == 0
                assert b == stop or b % size == 0
            seen[tuple(slice(a - s, b - s) for (a, b), s in zip(box, region[:, 0], strict=True))] += 1
        assert seen.max() == 1
        assert 0 < seen.sum() < seen.size
        lead = np.prod([stop - start for start, stop in read.region[:-axes]], dtype=int)
        assert read.read_nbytes == lead * seen.sum() * read.info.dtype.itemsize
        assert read.stage_nbytes >= lead * seen.size * read.info.dtype.itemsize


def chunks_of(read):
    """Count the chunks that a read touches."""
    boxes = [read.region] if read.needed is None else read.needed.tolist()
    return sum(
        int(np.prod([(b - 1) // size - a // size + 1 for (a, b), size in zip(box, read.info.chunk_shape, strict=True)]))
        for box in boxes
    )


def test_a_third_of_the_chunks_of_the_boxes_is_not_read():
    """Of the crops that the benchmark augments; of a crop that is turned by 45 degrees, half."""
    values = np.broadcast_to(np.uint16(1), (512, 512, 512))
    info = array_info(values, (32, 64, 64), (1.0, 1.0, 1.0))
    rng = np.random.default_rng(0)
    aabbs = [[(int(a), int(a) + 128) for a in rng.integers(0, 384, 3)] for _ in range(32)]
    for augment, most in (
        (stream.Augment(rotation=20, scale=(0.8, 1.25), flip="zyx", elastic=(32.0, 3.0)), 0.66),
        (stream.Augment(rotation=((0, 0), (45, 45), (45, 45))), 0.6),
        (stream.Augment(flip="zyx"), 1.0),
    ):
        settings_ = small_config(augment=augment, pad="reflect")
        planned = [plan_sample(stream.Sample("a", one), [info], settings_, k, k, 0) for k, one in enumerate(aabbs)]
        reads = with_regions([one for _, reads in planned for one in reads], "reflect")
        cut = with_needed(reads, planned[0][0], "reflect")
        share = sum(map(chunks_of, cut)) / sum(map(chunks_of, reads))
        assert share <= most
        assert share > 0.9 * most
        assert sum(1 if one.needed is None else len(one.needed) for one in cut) < 16 * len(cut)


AUGMENT = stream.Augment(rotation=180, scale=(0.7, 1.3), shear=0.2, flip="zyx", elastic=(20.0, 2.0))


def run(paths, pad, **options):
    """Serve crops with labels and a coarser level; return all batches of all parts."""
    config = stream.Config(
        device="cpu", batch_size=4, host_buffer_bytes=4 << 20, device_buffer_bytes=1 << 26, augment=AUGMENT, pad=pad,
        pad_value=5, seed=2, **options,
    )  # fmt: skip
    image, labels = paths
    parts = (Part("labels", labels, kind="labels"), Part("context", level=1, shape=(24, 24, 24)))
    rng = np.random.default_rng(0)
    found = []
    with stream.Pipeline(config) as p:
        p.push(
            stream.Sample(image, [(int(a), int(a) + 24) for a in rng.integers(-6, 60, 3)], parts=parts)
            for _ in range(12)
        )
        for batch in p.batches():
            with batch as tensors:
                found += [np.from_dlpack(one).copy() for one in tensors]
        return found, p.stats


@pytest.fixture(scope="module", params=[pytest.param("u2", marks=pytest.mark.slow), "f4"])
def images(request, tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(3)
    values = (rng.random((75, 83, 70)) * 60_000).astype(request.param)
    write_omezarr(folder / "a.ome.zarr", values, spacing=(1.0, 1.0, 1.0), chunks=(8, 8, 8), levels=2)
    write_omezarr(folder / "m.ome.zarr", values.astype("u2")[::2], spacing=(2.0, 1.0, 1.0), chunks=(4, 8, 8), levels=1)
    return str(folder / "a.ome.zarr"), str(folder / "m.ome.zarr")


@pytest.fixture
def poisoned(monkeypatch):
    """Fill the memory of staged crops with bytes that are NaN, before crops are read there; list the sizes."""
    filled, original = [], Memory.take_stage

    def take_stage(self, nbytes, batch_id):
        offset = original(self, nbytes, batch_id)
        if offset is not None:
            self.array(offset, (nbytes,), np.dtype("u1"))[...] = 0xFF
            filled.append(nbytes)
        return offset

    monkeypatch.setattr(Memory, "take_stage", take_stage)
    return filled


READERS = ["core", "no core", "zarr-python"]


@pytest.mark.parametrize(("pad", "reader"), matrix(PADS, READERS))
def test_batches_are_those_of_whole_boxes(images, poisoned, monkeypatch, pad, reader):
    read = []
    if reader == "core" and (why := native.why_no_core()):
        pytest.skip(why)
    if reader == "no core":
        monkeypatch.setenv("LINUMPY_CORE", "0")
    if reader == "zarr-python":

        def read_one(source, region):
            read.append(np.prod([one.stop - one.start for one in region]))
            return read_chunks_on_host(source, region)

        monkeypatch.setattr(by_zarr, "read_chunks_on_host", read_one)
        take_nothing(monkeypatch)
    got, stats = run(images, pad)
    assert len(poisoned) == 3
    voxels = sum(read)
    with monkeypatch.context() as patch:
        patch.setattr(reach_module, "needed_boxes", lambda reads, shape, pad: [None] * len(reads))
        expected, whole = run(images, pad)
    assert [one.tobytes() for one in got] == [one.tobytes() for one in expected]
    assert stats.plan.output_bytes < 0.9 * whole.plan.output_bytes
    if reader == "zarr-python":
        assert 0 < voxels < 0.9 * (sum(read) - voxels)


def take_nothing(monkeypatch):
    """Let every array be one that zarr-python reads."""
    original = arrays.open_info

    def opened(key, config):
        info = original(key, config)
        return replace(info, source=replace(info.source, unsupported="the test says so"), look=None)

    monkeypatch.setattr(arrays, "open_info", opened)


@pytest.mark.needs_core
def test_the_bytes_of_the_chunks_that_are_needed_are_read_once(tmp_path, pipeline, monkeypatch):
    """One crop: chunks that several crops need are read once or more, as it happens."""
    values = np.random.default_rng(0).integers(0, 60_000, (64, 64, 64)).astype("u2")
    path = make_array(tmp_path / "a.zarr", values, (8, 8, 8))
    p, seen = pipeline(batch_size=1, augment=AUGMENT, pad="reflect", spacing=(1, 1, 1)), []

    def planned(*arguments):
        seen.extend(with_needed(*arguments))
        return seen

    monkeypatch.setattr(submitter_module, "with_needed", planned)
    p.push(stream.Sample(path, ((20, 50),) * 3))
    p.pop().release()
    (read,) = seen
    files, chunks = 0, 0
    for box in read.needed.tolist():
        for at in np.ndindex(*((b - 1) // 8 - a // 8 + 1 for a, b in box)):
            names = [str(a // 8 + k) for (a, _), k in zip(box, at, strict=True)]
            files += (tmp_path / "a.zarr" / "c").joinpath(*names).stat().st_size
            chunks += 1
    assert p.stats.io.input_bytes == files
    assert chunks < 0.9 * np.prod([(b - 1) // 8 - a // 8 + 1 for a, b in read.region])


def test_an_error_is_that_of_a_chunk_that_is_needed(tmp_path, pipeline):
    """A broken chunk in a corner of the box, which the turned crop does not reach, does not matter."""
    values = np.random.default_rng(0).integers(0, 99, (4, 64, 64)).astype("u2")
    path = make_array(tmp_path / "a.zarr", values, (4, 4, 4))
    turn = stream.Augment(rotation=((45, 45), (0, 0), (0, 0)))
    options = {"batch_size": 2, "augment": turn, "pad": "edge", "spacing": (1, 1, 1)}
    crops = [stream.Sample(path, ((0, 4), (16, 48), (16, 48)))] * 2
    for chunk, is_needed in (("0/2/2", False), ("0/8/8", True)):
        file = tmp_path / "a.zarr" / "c" / chunk
        stored = file.read_bytes()
        file.write_bytes(b"broken")
        p = pipeline(**options)
        p.push(crops)
        if is_needed:
            with pytest.raises(stream.StreamError):
                p.pop()
        else:
            p.pop().release()
        file.write_bytes(stored)
