"""If this fails, estimates of what is read beside crops are off from counting."""

import itertools
import json
import math

import numpy as np
import pytest

from linumpy.stream.crops.survey import amplification
from tests.support.script_runs import load
from tests.support.stream_arrays import array_info, make_array


def info(shape, chunk, dtype="u2"):
    return array_info(np.broadcast_to(np.zeros((), dtype), shape), chunk)


def counted(shape, chunk, crop):
    """Chunks of all crops, averaged."""
    total = count = 0
    for start in itertools.product(*(range(n - s + 1) for n, s in zip(shape, crop, strict=True))):
        total += math.prod((a + s - 1) // c - a // c + 1 for a, s, c in zip(start, crop, chunk, strict=True))
        count += 1
    return total / count


@pytest.mark.parametrize(
    ("shape", "chunk", "crop"),
    [((20, 21), (4, 5), (3, 7)), ((9, 30), (4, 30), (9, 2)), ((40,), (3,), (5,)), ((7, 8), (7, 8), (7, 8))],
)
def test_chunks_of_a_crop_are_those_counted(shape, chunk, crop):
    found = amplification(info(shape, chunk), crop)
    exact = counted(shape, chunk, crop)
    assert found.chunks == pytest.approx(exact)
    assert found.factor == pytest.approx(found.chunks * math.prod(chunk) / math.prod(crop))


def test_better_chunks_read_less():
    found = amplification(info((512, 1024, 1024), (8, 1024, 1024)), (64, 64, 64))
    assert found.better_factor < found.factor / 10
    again = amplification(info((512, 1024, 1024), found.better_chunk), (64, 64, 64))
    assert again.factor == pytest.approx(found.better_factor)
    assert again.better_chunk == again.chunk


@pytest.mark.parametrize("crop", [(4, 4), (0, 4, 4), (600, 4, 4)])
def test_crops_that_do_not_fit(crop):
    with pytest.raises(ValueError, match=r"axes|do not lie"):
        amplification(info((512, 64, 64), (8, 8, 8)), crop)


def test_linum_stream_info(tmp_path, capsys):
    path = make_array(tmp_path / "a.zarr", np.zeros((16, 16, 16), "u1"), (8, 8, 8))
    main = load("linum_stream_info").main
    assert main([path, "--crop", "4", "4", "4", "--crop", "16", "16", "16", "--json", str(tmp_path / "t.json")]) == 0
    assert "4×4×4" in capsys.readouterr().out
    rows = json.loads((tmp_path / "t.json").read_text())
    assert (rows[1]["chunks"], rows[1]["factor"]) == (8.0, 1.0)
    assert main([path, "--crop", "4", "4"]) == 2
    assert "has 2 axes" in capsys.readouterr().err
