"""If this fails, samples of adaptive grids differ from the sum over all cells."""

import numpy as np
import pytest

from linumpy.errors import SourceError
from linumpy.sampling.fields.amr import open_exabrick
from tests.support.gpu.field_runs import SIDES, decode, on_gpu


def write(folder, bricks, values):
    """Write bricks (size, lower, level, ids[x, y, z]) and values."""
    parts = []
    for size, lower, level, ids in bricks:
        parts += [*size, *lower, level, *np.asarray(ids).ravel(order="F")]
    np.array(parts, "<i4").tofile(folder / "a.bricks")
    np.asarray(values, "<f4").tofile(folder / "a.scalar")
    return folder / "a.bricks", folder / "a.scalar"


def random_mesh(rng, blocks=3):
    """Bricks of levels 0 to 2 that fill a box of blocks of 8 finest cells, each block cut anew; ids are shuffled."""
    bricks, total = [], 0
    for block in np.ndindex(blocks, blocks, 2):
        level = int(rng.integers(3))
        cells = 8 >> level
        cut = int(rng.integers(1, cells)) if cells > 2 else cells
        for start, stop in ((0, cut), (cut, cells)):
            if start < stop:
                size = (stop - start, cells, cells)
                lower = np.array(block) * 8 + [start << level, 0, 0] - 5
                bricks.append((size, lower, level, total + np.arange(np.prod(size)).reshape(size, order="F")))
                total += int(np.prod(size))
    order = rng.permutation(total)
    return [(size, lower, level, order[ids]) for size, lower, level, ids in bricks], total


def expected(bricks, values, points):
    """Slow and obvious: over all cells; float64. Points in units of the finest level."""
    sums = np.zeros((2, len(points)))
    for size, lower, level, ids in bricks:
        for cell in np.ndindex(*size):
            centre = lower + (np.array(cell) + 0.5) * 2**level
            weight = np.maximum(0, 1 - np.abs(points - centre) / 2**level).prod(1)
            sums += weight * np.array([[values[ids[cell]]], [1]])
    with np.errstate(invalid="ignore"):
        return sums[0] / sums[1]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(3))
def test_sum_over_all_cells(tmp_path, seed, side):
    rng = np.random.default_rng(seed)
    bricks, total = random_mesh(rng, 2)
    values = rng.standard_normal(total).astype(np.float32)
    field = open_exabrick(*write(tmp_path, bricks, values))
    coords = rng.random((700, 3), dtype=np.float32)
    coords[:4] = [[0, 0, 0], [1, 1, 1], [0.5, 0, 1], [0.25, 0.5, 0.5]]
    points = field.domain[0] + coords * (field.domain[1] - field.domain[0])
    np.testing.assert_allclose(decode(field, coords, side)[0], expected(bricks, values, points), atol=2e-5)
    assert field.value_range == (values.min(), values.max())


@pytest.mark.parametrize("side", SIDES)
def test_where_no_cell_reaches(tmp_path, side):
    bricks = [((1, 1, 1), (0, 0, 0), 0, [[[0]]]), ((1, 1, 1), (9, 9, 9), 0, [[[1]]])]
    files = write(tmp_path, bricks, [3, 4])
    coords = [[0.05, 0.05, 0.05], [0.5, 0.5, 0.5], [1, 1, 1], [0.149, 0.05, 0.05], [0.1501, 0.05, 0.05]]
    for background in (np.nan, -7):
        found = decode(open_exabrick(*files, background=background), coords, side)[0]
        np.testing.assert_array_equal(found, [3, background, 4, 3, background])


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ([], "holds no brick"),
        ([1, 1, 1, 0, 0, 0], "ends inside the header of record 0"),
        ([1, 1, 1, 0, 0, 0, 0, 5], "brick 0 has cell id 5, but scalar= holds 2 values"),
        ([1, 1, 1, 0, 0, 0, 0, -1], "cell id -1"),
        ([-1, 1, 1, 0, 0, 0, 0, 1], r"size \[-1, 1, 1\] and level 0"),
        ([0, 1, 1, 0, 0, 0, 0], r"size \[0, 1, 1\]"),
        ([1, 1, 1, 0, 0, 0, 99, 1], "level 99"),
        ([2, 2, 2, 0, 0, 0, 0, 1, 1], "8 ids, of which only 2 are there"),
        ([2**31 - 1, 2**31 - 1, 2**31 - 1, 0, 0, 0, 0, 1], "ids, of which only 1 are there"),
        ([1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 2**30, 0, 0, 0, 1], "2\\^24 at most"),
    ],
)
def test_faulty_bricks(tmp_path, numbers, problem):
    np.array(numbers, "<i4").tofile(tmp_path / "a.bricks")
    np.array([1, 2], "<f4").tofile(tmp_path / "a.scalar")
    with pytest.raises(SourceError, match=problem) as found:
        open_exabrick(tmp_path / "a.bricks", tmp_path / "a.scalar")
    assert "a.bricks" in str(found.value)


def test_cut_in_the_middle_of_a_number(tmp_path):
    files = write(tmp_path, [((1, 1, 1), (0, 0, 0), 0, [[[0]]])], [3])
    for file in files:
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        with pytest.raises(SourceError, match=f"{file.name}: has .* bytes, which are no whole number"):
            open_exabrick(*files)
        file.write_bytes(content)


@pytest.mark.gpu
@pytest.mark.sanitize
def test_on_gpu(tmp_path):
    rng = np.random.default_rng(9)
    bricks, total = random_mesh(rng)
    field = open_exabrick(*write(tmp_path, bricks, rng.standard_normal(total)))
    coords = rng.random((100_000, 3), dtype=np.float32)
    np.testing.assert_allclose(on_gpu(field, coords), decode(field, coords), atol=1e-4)
