"""If this fails, crops lie outside of arrays, come too often or too seldom, or do not cover a grid."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from linumpy import stream
from linumpy.io.ome import open_image
from linumpy.write.writer import OmeZarrWriter
from tests.support.stream_arrays import make_array


def labels():
    values = np.zeros((24, 32, 40), "u1")
    values[2:6, 3:6, 4:8] = 1  # 48 voxels in one chunk
    values[16:24, 24:32, 32:40] = 2  # 512 in another
    values[9, 9, 9] = 7
    return values


@pytest.fixture
def arrays(tmp_path):
    make_array(tmp_path / "labels", labels(), (8, 8, 8))
    make_array(tmp_path / "a", np.zeros((24, 32, 40), "u2"), (8, 8, 8))
    make_array(tmp_path / "b", np.zeros((12, 16, 20), "u2"), (8, 8, 8))
    return tmp_path


def test_uniform_crops_lie_inside_and_reach_all_positions(arrays):
    sampler = stream.CropSampler([arrays / "a", arrays / "b"], (10, 10, 10), seed=3)
    crops = list(itertools.islice(sampler, 4000))
    shapes = {str(arrays / "a"): (24, 32, 40), str(arrays / "b"): (12, 16, 20)}
    count = Counter(one.uri for one in crops)
    assert 0.08 < count[str(arrays / "b")] / 4000 < 0.145  # 1 to 8
    for uri, shape in shapes.items():
        for axis, n in enumerate(shape):
            starts = [one.aabb[axis][0] for one in crops if one.uri == uri]
            assert (min(starts), max(starts)) == (0, n - 10)
    assert all(stop - start == 10 for one in crops for start, stop in one.aabb)


def test_crops_depend_on_seed_epoch_and_index_alone(arrays):
    sampler = stream.CropSampler([arrays / "a"], (4, 4, 4), length=50, epochs=3, seed=1)
    assert len(sampler) == 150
    backwards = [sampler.sample_at(k) for k in reversed(range(150))]
    straight = list(sampler)
    assert backwards == straight[::-1]
    later = stream.CropSampler([arrays / "a"], (4, 4, 4), length=50, epoch=2, seed=1)
    found = list(later)
    assert found == straight[100:]
    assert [one.index for one in found] == list(range(50))
    assert {one.epoch for one in found} == {2}
    assert straight[:50] != straight[50:100]
    assert list(stream.CropSampler([arrays / "a"], (4, 4, 4), length=150, seed=2)) != straight


def test_each_iteration_is_the_next_epoch(arrays):
    """Or the next `epochs`; `set_epoch` is for callers who count, and what goes on is not changed by it."""
    sampler = stream.CropSampler([arrays / "a"], (4, 4, 4), length=20, epochs=2, seed=1)
    expected = [list(stream.CropSampler([arrays / "a"], (4, 4, 4), length=20, epoch=k, seed=1)) for k in range(6)]
    assert list(sampler) == expected[0] + expected[1]
    running = iter(sampler)
    first = next(running)
    assert list(sampler) == expected[4] + expected[5]
    sampler.set_epoch(1)
    assert [first, *running] == expected[2] + expected[3]
    assert [sampler.sample_at(k) for k in (0, 39)] == [expected[1][0], expected[2][-1]]
    assert sampler.epoch == 1
    assert list(sampler) == expected[1] + expected[2]
    endless = stream.CropSampler([arrays / "a"], (4, 4, 4), seed=1)
    assert [next(iter(endless)) for _ in range(3)] == [one[0] for one in expected[:3]]
    for wrong, error in ((-1, ValueError), (2**64 - 1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="epoch must be"):
            sampler.set_epoch(wrong)
    last = stream.CropSampler([arrays / "a"], (4, 4, 4), length=1, epoch=2**64 - 2)
    list(last)
    with pytest.raises(stream.InvalidArgument, match="epoch must be <"):
        list(last)


def taken(p):
    """The values and samples of each batch."""
    for batch in p.batches():
        with batch as tensor:
            found = tensor.numpy().tobytes(), batch.samples
        yield found


@pytest.mark.parametrize("same_objects", [True, False])
def test_states_hold_the_epochs_of_several_samplers(arrays, pipeline, same_objects):
    def made():
        return [stream.CropSampler([arrays / name], (4, 4, 4), length=7, seed=2, epoch=3) for name in "ab"]

    def pushed(p, first, second):
        for one in (first, second, [stream.Sample(arrays / "a", ((0, 4),) * 3)] * 3, first, first, second):
            p.push(one)

    samplers = made()
    p = pipeline(batch_size=4)
    pushed(p, *samplers)
    expected = [samples for _, samples in list(taken(p))]
    assert sorted({(one.uri, one.epoch) for samples in expected for one in samples if one.epoch is not None}) == [
        (str(arrays / "a"), 3), (str(arrays / "a"), 4), (str(arrays / "a"), 5),
        (str(arrays / "b"), 3), (str(arrays / "b"), 4),
    ]  # fmt: skip
    for stop in (1, 3, 5, 8):
        samplers = made()
        p = pipeline(batch_size=4)
        pushed(p, *samplers)
        first = [samples for _, samples in itertools.islice(taken(p), stop)]
        state = p.state_dict()
        q = pipeline(batch_size=4)
        q.load_state_dict(state)
        pushed(q, *(samplers if same_objects else made()))
        assert first + [samples for _, samples in list(taken(q))] == expected
        if same_objects:
            assert [one.epoch for one in samplers] == [6, 5]


def test_volumes_are_drawn_by_weight(arrays):
    volumes = [stream.Volume(str(arrays / "a"), weight=1), stream.Volume(str(arrays / "b"), weight=3)]
    never = stream.Volume(str(arrays / "labels"), weight=0)
    drawn = Counter(one.uri for one in itertools.islice(stream.CropSampler([*volumes, never], (4, 4, 4)), 2000))
    assert 0.7 < drawn[str(arrays / "b")] / 2000 < 0.8
    assert never.uri not in drawn


def test_histograms_count_the_voxels_of_each_class(arrays, tmp_path):
    made = stream.Histogram.of(arrays / "labels")
    assert made.classes.tolist() == [1, 2, 7]
    assert dict(zip(made.cells.tolist(), made.counts.tolist(), strict=True)) == {
        0: [48, 0, 0],
        1 * 20 + 1 * 5 + 1: [0, 0, 1],
        2 * 20 + 3 * 5 + 4: [0, 512, 0],
    }
    made.save(tmp_path / "h.npz")
    again = stream.Histogram.load(tmp_path / "h.npz")
    assert np.array_equal(again.counts, made.counts)
    assert (again.shape, again.cell, again.grid) == (made.shape, made.cell, made.grid)
    image = stream.Histogram.of(arrays / "labels", threshold=1.5, cell=(24, 32, 40))
    assert image.counts.tolist() == [[513]]
    with pytest.raises(stream.InvalidArgument, match="pass threshold="):
        stream.Histogram.of(make_array(tmp_path / "f", np.zeros(3, "f4")))


def classes_of(sampler, count):
    values = labels()
    found = Counter()
    for sample in itertools.islice(sampler, count):
        middle = [(a + b) // 2 for a, b in sample.aabb]
        cell = values[tuple(slice(m // 8 * 8, m // 8 * 8 + 8) for m in middle)]
        found[int(cell.max())] += 1
    return {kind: n / count for kind, n in found.items()}


def test_foreground_is_drawn_as_often_as_cells_hold_it(arrays):
    volume = stream.Volume(str(arrays / "a"), histogram=stream.Histogram.of(arrays / "labels"))
    drawn = classes_of(stream.CropSampler([volume], (2, 2, 2), mode="foreground"), 1000)
    assert 0.85 < drawn[2] < 0.95
    assert 0.05 < drawn[1] < 0.13
    half = classes_of(stream.CropSampler([volume], (2, 2, 2), mode="foreground", foreground=0.5), 1000)
    assert half[0] > 0.4


def test_classes_are_drawn_equally_often_or_by_weight(arrays):
    volume = stream.Volume(str(arrays / "a"), histogram=stream.Histogram.of(arrays / "labels"))
    drawn = classes_of(stream.CropSampler([volume], (2, 2, 2), mode="balanced"), 1500)
    assert all(abs(drawn[kind] - 1 / 3) < 0.06 for kind in (1, 2, 7))
    weights = stream.CropSampler([volume], (2, 2, 2), mode="balanced", class_weights={1: 3, 7: 1})
    drawn = classes_of(weights, 1000)
    assert set(drawn) == {1, 7}
    assert 0.7 < drawn[1] < 0.8


def test_cells_larger_than_crops_are_told(arrays, caplog):
    for cell, is_told in ((4, False), (5, True)):
        caplog.clear()
        histogram = stream.Histogram.of(arrays / "labels", cell=(cell, 4, 4))
        stream.CropSampler([stream.Volume(str(arrays / "a"), histogram=histogram)], (2, 2, 2), mode="balanced")
        assert ("crops of (2, 2, 2) may miss their class in cells of (5, 4, 4)" in caplog.text) == is_told


@pytest.mark.parametrize("shape", [(24, 32), (1, 24, 32, 40), (24, 32, 39), (40, 32, 24), (10, 10, 10), (25, 32, 40)])
def test_histograms_of_other_arrays_are_refused(arrays, shape):
    made = stream.Histogram.of(make_array(arrays / "other", np.ones(shape, "u1")))
    volume = stream.Volume(str(arrays / "a"), histogram=made)
    for mode in ("foreground", "balanced", "uniform"):
        problem = re.escape(
            f"of an array of {shape}, does not fit {arrays / 'a'} of (24, 32, 40): pass the histogram of"
        )
        with pytest.raises(stream.InvalidArgument, match=problem):
            stream.CropSampler([volume], (2, 2, 2), mode=mode)


def test_histograms_of_levels_and_of_finer_labels_fit(arrays):
    for factor in range(1, 41):
        for way in ("floor", "ceil"):
            shape = [max(1, int(getattr(np, way)(n / factor))) for n in (24, 32, 40)]
            many = [n * factor for n in (24, 32, 40)]
            for one in (shape, many):
                fake = stream.Histogram(tuple(one), tuple(one), np.array([1]), np.array([0]), np.array([[5]]))
                volume = stream.Volume(str(arrays / "a"), histogram=fake)
                crop = stream.CropSampler([volume], (2, 2, 2), mode="foreground").sample_at(0)
                assert all(0 <= a < b <= n for (a, b), n in zip(crop.aabb, (24, 32, 40), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": (8, 8)}, r"cells of \(8, 8\) do not fit an array of \(24, 32, 40\)"),
        ({"cell": (8, 8, 0)}, "do not fit"),
        ({"cells": np.array([60])}, r"cells must be numbers from 0 to 59, for a grid of \(3, 4, 5\)"),
        ({"cells": np.array([-1])}, "cells must be numbers from 0 to 59"),
        ({"counts": np.array([[1, 2]])}, r"counts must be \(1, 1\) numbers \(cells, classes\) of 0 or more"),
        ({"counts": np.array([[-1]])}, "of 0 or more"),
    ],
)
def test_histograms_that_hold_together(change, message):
    values = {"shape": (24, 32, 40), "cell": (8, 8, 8), "classes": np.array([1])}
    values |= {"cells": np.array([3]), "counts": np.array([[1]])} | change
    with pytest.raises(stream.InvalidArgument, match=f"histogram: .*{message}"):
        stream.Histogram(**values)


def test_foreground_from_the_histogram_of_a_coarse_level(arrays):
    coarse = make_array(arrays / "coarse", labels()[::4, ::4, ::4], (2, 2, 2))
    volume = stream.Volume(str(arrays / "a"), histogram=stream.Histogram.of(coarse))
    assert classes_of(stream.CropSampler([volume], (2, 2, 2), mode="foreground"), 300).get(0, 0) == 0


def test_what_a_sampler_refuses(arrays):
    a = arrays / "a"
    for options, message in (
        ({"shape": (25, 4, 4)}, "do not lie in"),
        ({"shape": (4, 4)}, "has 2 axes"),
        ({"mode": "foreground"}, "needs the histogram"),
        ({"mode": "any"}, "mode must be"),
        ({"foreground": 2}, "foreground must be"),
        ({"length": 0}, "length must be"),
        ({"volumes": []}, "at least one"),
        ({"shape": (4.0, 4, 4)}, "shape must be an int"),
        ({"shape": ()}, "shape must hold"),
        ({"seed": -1}, "seed must be >= 0"),
        ({"seed": 2**64}, "seed must be <"),
        ({"seed": "1"}, "seed must be an int"),
        ({"epoch": -1}, "epoch must be >= 0"),
        ({"epoch": 2**64 - 1, "epochs": 2}, "epochs must be <"),
        ({"length": 2.0}, "length must be an int"),
        ({"class_weights": {1: 1.0}}, "class_weights do nothing in mode 'uniform': pass mode='balanced'"),
        ({"class_weights": {}, "mode": "foreground"}, "class_weights do nothing in mode 'foreground'"),
        ({"foreground": 0.5}, "foreground=0.5 does nothing in mode 'uniform'"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            stream.CropSampler(**{"volumes": [a], "shape": (4, 4, 4), **options})


def test_class_weights_of_classes_that_are_not_there(arrays):
    volume = stream.Volume(str(arrays / "a"), histogram=stream.Histogram.of(arrays / "labels"))
    for wrong, named in (({3: 1.0}, "3"), ({1: 1.0, "2": 1.0}, "'2'"), ({0: 1.0, 9: 1.0}, "0, 9")):
        with pytest.raises(stream.InvalidArgument, match=rf"^class_weights has {named}, .* the classes 1, 2, 7$"):
            stream.CropSampler([volume], (2, 2, 2), mode="balanced", class_weights=wrong)


def test_crops_beyond_the_last_one(arrays):
    sampler = stream.CropSampler([arrays / "a"], (4, 4, 4), length=3, epochs=2)
    for index in (-1, 6):
        with pytest.raises(IndexError, match=f"crop {index}: there are 6"):
            sampler.sample_at(index)
    with pytest.raises(IndexError, match="crop -1"):
        stream.CropSampler([arrays / "a"], (4, 4, 4)).sample_at(-1)


def test_a_histogram_leaves_the_background_out(arrays):
    made = stream.Histogram.of(arrays / "labels", background=1)
    assert (made.background, made.classes.tolist()) == (1, [0, 2, 7])
    assert made.counts.sum() == labels().size - 48


def test_a_sampler_resumes_without_drawing_what_was_read(arrays, pipeline):
    sampler = stream.CropSampler([arrays / "a"], (4, 4, 4), length=40)
    drawn = []
    original, sampler.sample_at = sampler.sample_at, lambda index: (drawn.append(index), original(index))[1]
    p = pipeline(batch_size=4, rank=1, world_size=2)
    p.load_state_dict({**p.state_dict(), "position": 24, "batch_id": 3})
    p.push(sampler)
    found = [(batch.batch_id, batch.samples) for batch in released(p)]
    assert drawn == list(range(25, 40, 2))
    assert found == [(3, tuple(map(original, drawn[:4]))), (4, tuple(map(original, drawn[4:])))]


def released(p):
    for batch in p.batches():
        batch.release()
        yield batch


@pytest.mark.parametrize("window", ["linear", "gaussian", "flat"])
@pytest.mark.parametrize("order", ["forwards", "shuffled"])
def test_a_stitched_volume_is_the_volume(arrays, tmp_path, pipeline, window, order):
    values = np.random.default_rng(0).random((24, 32, 40)).astype("f4")
    path = make_array(tmp_path / "v", values, (8, 8, 8))
    grid = stream.CropGrid(path, (10, 12, 40), (4, 3, 0))
    crops = list(grid)
    if order == "shuffled":
        np.random.default_rng(1).shuffle(crops)
    p = pipeline(batch_size=3)
    p.push(crops if order == "shuffled" else grid)
    options = {"chunks": (8, 8, 8)}
    with (
        OmeZarrWriter(tmp_path / "out.ome.zarr", values.shape, "f4", (1, 1, 1), **options) as writer,
        stream.Stitcher(grid, writer, window=window, planes=8) as stitcher,
    ):
        for batch in p.batches():
            with batch as crops_:
                stitcher.add(batch.samples, np.from_dlpack(crops_))
    assert np.allclose(open_image(tmp_path / "out.ome.zarr").levels[0][...], values, atol=1e-6)


def test_predictions_are_blended_by_their_weights():
    out = np.zeros(10, "f4")
    grid = stream.CropGrid("unused", (6,), 2, volume=(10,))
    assert grid.starts == [[0, 4]]
    with stream.Stitcher(grid, out) as stitcher:
        stitcher.add(list(grid), np.stack([np.zeros(6), np.ones(6)]))
    assert np.allclose(out, [0, 0, 0, 0, 1 / 3, 2 / 3, 1, 1, 1, 1])


def test_crops_larger_than_the_volume_are_cut(tmp_path):
    out = np.zeros((3, 9), "u1")
    grid = stream.CropGrid("unused", (4, 5), 1, volume=(3, 9))
    stitcher = stream.Stitcher(grid, out)
    stitcher.add(list(grid), np.full((len(grid), 4, 5), 300.0))
    stitcher.close()
    assert (out == 255).all()


def test_what_a_stitcher_refuses():
    grid = stream.CropGrid("unused", (4,), 0, volume=(8,))
    first, second = grid
    stitcher = stream.Stitcher(grid, np.zeros(8))
    stitcher.add([first], np.zeros((1, 4)))
    with pytest.raises(stream.InvalidArgument, match="was added already"):
        stitcher.add([first], np.zeros((1, 4)))
    with pytest.raises(stream.InvalidArgument, match="is no crop of the grid"):
        stitcher.add([stream.Sample("unused", ((1, 5),), index=1)], np.zeros((1, 4)))
    with pytest.raises(stream.InvalidArgument, match="expected"):
        stitcher.add([second], np.zeros((1, 5)))
    with pytest.raises(stream.InvalidArgument, match="1 of 2 crops were never added"):
        stitcher.__exit__(None)
    with pytest.raises(stream.InvalidArgument, match="overlap along axis 0"):
        stream.CropGrid("unused", (4,), 4, volume=(8,))
    for overlap in (-1, 1.0, (1, 1)):
        with pytest.raises((ValueError, TypeError), match="overlap"):
            stream.CropGrid("unused", (4,), overlap, volume=(8,))
    for overlap in (np.int64(2), [2], np.array([2])):
        assert stream.CropGrid("unused", (4,), overlap, volume=(8,)).starts == [[0, 2, 4]]
    with pytest.raises(TypeError, match="shape must be an int"):
        stream.CropGrid("unused", (4.5,), volume=(8,))
