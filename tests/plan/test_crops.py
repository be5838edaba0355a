"""If this fails, costs of crops, or the chunks proposed for them, are off from what a store counts."""

import itertools
import json
import math

import numpy as np
import pytest
import zarr
from scipy.stats import qmc
from zarr.storage import MemoryStore, WrapperStore

from linumpy.gpu import Reader
from linumpy.io.layout import read_layout, stored_chunks
from linumpy.io.ome import open_image
from linumpy.plan.crops import crop_cost, propose, table
from linumpy.write.writer import write_omezarr
from tests.support.object_server import serve
from tests.support.script_runs import load
from tests.support.stream_arrays import make_array


def cost_of(shape, chunk, crop):
    array = zarr.create_array(MemoryStore(), shape=shape, chunks=chunk, dtype="u2")
    return crop_cost(read_layout(array), crop, stored_chunks(array))


@pytest.mark.parametrize(
    ("shape", "chunk", "crop"),
    [((20, 21), (4, 5), (3, 7)), ((9, 30), (4, 30), (9, 2)), ((40,), (3,), (5,)), ((7, 8), (7, 8), (7, 8))],
)
def test_chunks_of_a_crop_are_those_counted(shape, chunk, crop):
    counts = [
        math.prod((a + s - 1) // c - a // c + 1 for a, s, c in zip(start, crop, chunk, strict=True))
        for start in itertools.product(*(range(n - s + 1) for n, s in zip(shape, crop, strict=True)))
    ]
    found = cost_of(shape, chunk, crop)
    assert found.chunks == pytest.approx(np.mean(counts))
    assert found.decoded == pytest.approx(found.chunks * math.prod(chunk) / math.prod(crop))


class Counting(WrapperStore):
    """Counts the bytes of chunks, without shard indexes."""

    nbytes = 0

    async def get(self, key, prototype, byte_range=None):
        found = await super().get(key, prototype, byte_range)
        if found is not None and not key.endswith(("json", "array")) and "Suffix" not in type(byte_range).__name__:
            self.nbytes += len(found)
        return found


LAYOUTS = [
    {"chunks": (16, 12, 16)},
    {"chunks": (16, 16, 16), "compressors": None},
    {"chunks": (9, 20, 16), "zarr_format": 2},
    {"chunks": (16, 20, 16), "zarr_format": 2, "order": "F", "compressors": None},
    {"chunks": (8, 8, 8), "shards": (32, 16, 32)},
    {"chunks": (8, 8, 8), "shards": (32, 32, 32), "compressors": None},
    {"chunks": (20, 20, 20), "shards": (40, 60, 40)},
]


@pytest.mark.needs_core
@pytest.mark.parametrize("number", range(len(LAYOUTS)))
def test_costs_are_within_five_percent_of_a_store_that_counts(number):
    layout, crop = LAYOUTS[number], ((12, 20, 9), (25, 7, 30))[number % 2]
    shape = (50, 70, 80)
    values = (np.random.default_rng(0).integers(0, 200, shape) + np.arange(80)).astype("u2")
    store = Counting(MemoryStore())
    array = zarr.create_array(store, data=values, **layout)
    found = crop_cost(read_layout(array), crop, stored_chunks(array))
    last = np.subtract(shape, crop)
    anywhere = np.floor(qmc.Sobol(3, seed=1).random(256) * (last + 1)).astype(int).tolist()
    on_grid = itertools.product(*([*range(0, n, c), n] for n, c in zip(last.tolist(), crop, strict=True)))
    cases = (
        (anywhere, 256 * math.prod(crop), found.fetched, found.decoded),
        (list(on_grid), math.prod(shape), found.grid_fetched, found.grid_decoded),
    )
    for starts, useful, fetched, decoded in cases:
        with Reader(device="cpu") as reader:
            store.nbytes = 0
            for start in starts:
                reader.submit(array, tuple(slice(a, a + c) for a, c in zip(start, crop, strict=True))).result()
            counted = reader.stats().chunks * math.prod(layout["chunks"])
        assert fetched == pytest.approx(store.nbytes / useful / 2, rel=0.05)
        assert decoded == pytest.approx(counted / useful, rel=0.03)


@pytest.mark.needs_core
def test_costs_of_a_server_with_a_cache_and_without(tmp_path):
    pytest.importorskip("obstore")
    shape, crop = (40, 60, 60), (12, 12, 12)
    values = np.random.default_rng(0).integers(0, 999, shape, "u2")
    array = zarr.create_array(tmp_path / "a", data=values, chunks=(10, 10, 10), shards=(20, 20, 20))
    found = crop_cost(read_layout(array), crop, stored_chunks(array))
    anywhere = np.floor(qmc.Sobol(3, seed=1).random(256) * (np.subtract(shape, crop) + 1)).astype(int).tolist()
    on_grid = list(itertools.product((0, 12, 24, 28), (0, 12, 24, 36, 48), (0, 12, 24, 36, 48)))
    cases = (
        (anywhere, 0, found.fetched * 256 * 12**3), (on_grid, 0, found.grid_fetched * values.size),
        (on_grid, 2**24, found.cached_fetched * values.size),
    )  # fmt: skip
    for starts, cache_bytes, expected in cases:
        with serve(tmp_path) as server, Reader(device="cpu", cache_bytes=cache_bytes) as reader:
            layout = reader.layout_of(f"{server.url}/a")
            for start in starts:
                reader.submit(layout, tuple(slice(a, a + 12) for a in start)).result()
            parts = [part.removeprefix("bytes=").split("-") for _, _, part in server.of("/c/") if part]
        nbytes = [int(b) - int(a) + 1 for a, b in parts if a]
        assert sum(n for n in nbytes if n != layout.shard.index_nbytes) == pytest.approx(2 * expected, rel=0.05)


def test_proposed_chunks_decode_less_and_fill_shards():
    found = cost_of((512, 1024, 1024), (8, 1024, 1024), (64, 64, 64))
    assert found.proposed_decoded < found.decoded / 10
    again = cost_of((512, 1024, 1024), found.proposed_chunk, (64, 64, 64))
    assert again.decoded == pytest.approx(found.proposed_decoded)
    assert again.proposed_chunk == again.chunk
    assert "better: chunks" in table([found])
    assert "better" not in table([again])
    rng = np.random.default_rng(1)
    for _ in range(50):
        shape = rng.integers(1, 3000, rng.integers(1, 5)).tolist()
        crop = [int(rng.integers(1, n + 1)) for n in shape]
        chunk, shard = propose(shape, 2, crop)
        assert all(s % c == 0 for s, c in zip(shard, chunk, strict=True))
        assert math.prod(shard) * 2 <= max(64 * 2**20, math.prod(chunk) * 2)
        assert chunk == tuple(shape) or 2**16 <= math.prod(chunk) * 2 < 2**18


@pytest.mark.parametrize("crop", [(4, 4), (0, 4, 4), (600, 4, 4)])
def test_crops_that_do_not_fit(crop):
    with pytest.raises(ValueError, match=r"axes|do not lie"):
        cost_of((512, 64, 64), (8, 8, 8), crop)


def test_linum_stream_info(tmp_path, capsys):
    path = make_array(tmp_path / "a.zarr", np.zeros((16, 16, 16), "u1"), (8, 8, 8))
    main = load("linum_stream_info").main
    assert main([path, "--crop", "4", "4", "4", "--crop", "16", "16", "16", "--json", str(tmp_path / "t.json")]) == 0
    assert "4×4×4" in capsys.readouterr().out
    rows = json.loads((tmp_path / "t.json").read_text())
    assert (rows[1]["chunks"], rows[1]["decoded"]) == (8.0, 1.0)
    assert main([path, "--crop", "4", "4"]) == 2
    assert "has 2 axes" in capsys.readouterr().err


def test_linum_convert_for_crops(tmp_path, capsys):
    values = np.random.default_rng(0).integers(0, 999, (70, 140, 150), "u2")
    write_omezarr(tmp_path / "a", values, (1, 1, 1), chunks=(4, 140, 150), levels=2)
    main = load("linum_convert").main
    assert main([str(tmp_path / "a"), str(tmp_path / "b"), "--for", "crops:16,32,32"]) == 0
    assert "better: chunks" in capsys.readouterr().out
    levels = open_image(tmp_path / "b").levels
    np.testing.assert_array_equal(levels[0][...], values)
    for level in levels:
        assert (level.chunks, level.shards) == propose(level.shape, 2, (16, 32, 32))
    options = [str(tmp_path / "a"), str(tmp_path / "c"), "--for", "crops:16,32,32"]
    assert main([*options, "--chunks", "35", "70", "50", "--ngff-version", "0.4"]) == 0
    assert open_image(tmp_path / "c").levels[0].chunks == (35, 70, 50)
    assert main([*options[:1], str(tmp_path / "d"), *options[2:], "--ngff-version", "0.4"]) == 0
    assert open_image(tmp_path / "d").levels[0].chunks == propose(values.shape, 2, (16, 32, 32))[0]
    for wrong in ("crop:1,2,3", "crops:0,1,2", "crops:", "crops:1,2"):
        with pytest.raises(SystemExit) if wrong != "crops:1,2" else pytest.MonkeyPatch.context():
            assert main([*options[:1], str(tmp_path / "e"), "--for", wrong]) == 2
        assert "crop" in capsys.readouterr().err


def test_huge_crops_are_costed_in_seconds_and_columns_stay_apart():
    """Reads are planned for part of a crop of many chunks, in whose middle chunks cost the same."""
    layout = {"shape": (2**17,) * 3, "chunks": (64,) * 3, "shards": (1024,) * 3, "dtype": "u1"}
    array = zarr.create_array(MemoryStore(), **layout)
    rows = [crop_cost(read_layout(array), crop, stored_chunks(array)) for crop in ((1, 2**14, 2**14), (2**17,) * 3)]
    assert rows[0].fetched == pytest.approx(64 * (1 + 63 / 2**14) ** 2, rel=0.02)
    assert rows[1].fetched == pytest.approx(1, rel=0.02)
    assert table(rows).split("\n")[1].split()[1:4] == ["1×16384×16384", "64×64×64", "1024×1024×1024"]
