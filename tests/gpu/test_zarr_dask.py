"""If this fails, dask arrays of Zarr arrays give wrong blocks, or workers do."""

import itertools
import math
import os
import pickle
import shutil
import signal
import time

import dask
import numpy as np
import pytest
import zarr
from dask.utils import ensure_dict
from distributed import Client, LocalCluster
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from linumpy.errors import GpuUnavailableError, SourceError
from linumpy.gpu import zarr_dask, zarr_to_dask
from linumpy.gpu.oct.projection import project
from linumpy.io.layout import read_layout
from linumpy.io.ome import open_image
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr
from tests.support.stores import cases, same
from tests.support.stores import write as write_case


def volume(seed=0, shape=(30, 41, 52)):
    return np.random.default_rng(seed).integers(0, 60000, shape).astype("u2")


@pytest.fixture
def image(tmp_path):
    write_omezarr(tmp_path / "a", volume(), (10, 6, 5), chunks=(8, 10, 12), levels=2)
    return tmp_path / "a"


def inside(graph):
    """All that a graph holds, down to the last value."""
    yield graph
    if isinstance(graph, dict):
        graph = itertools.chain(graph.keys(), graph.values())
    elif hasattr(graph, "args") and hasattr(graph, "kwargs"):
        graph = [getattr(graph, "func", None), *graph.args, graph.kwargs]
    elif hasattr(graph, "value"):
        graph = [graph.value]
    elif isinstance(graph, zarr_dask.BlockReader):
        graph = [graph.path, graph.reader]
    elif not isinstance(graph, (list, tuple, set)):
        return
    for one in graph:
        yield from inside(one)


@given(case=cases(), data=st.data())
def test_every_array_comes_back(tmp_path_factory, case, data):
    array = write_case(case, tmp_path_factory.mktemp("dask") / "a")
    stored = array.shards or array.chunks
    chunks = tuple(s * data.draw(st.integers(1, 3)) for s in stored) if data.draw(st.booleans()) else None
    lazy = zarr_to_dask(array, chunks=chunks, device="cpu")
    assert lazy.dtype == array.dtype.newbyteorder("=")
    assert type(lazy._meta) is np.ndarray
    assert same(lazy.compute(scheduler="sync"), array[...])
    for sizes, s, n in zip(lazy.chunks, stored, array.shape, strict=True):
        assert all(size % s == 0 for size in sizes[:-1])
        assert sum(sizes) == n


def test_no_axes(tmp_path):
    zarr.create_array(tmp_path / "a", shape=(), chunks=(), dtype=">f8", zarr_format=2)[...] = -0.0
    assert same(zarr_to_dask(tmp_path / "a", device="cpu").compute(scheduler="sync"), np.array(-0.0))


def test_the_graph_holds_paths_and_corners_only(image):
    lazy = zarr_to_dask(zarr.open_group(image), device="cpu", chunks=(8, 10, 12))
    graph = ensure_dict(lazy.__dask_graph__())
    held = list(inside(graph))
    for one in held:
        assert not isinstance(one, (np.ndarray, zarr.Array, zarr.Group, zarr.abc.store.Store)), one
    assert held.count(str(image / "0")) == sum(isinstance(one, zarr_dask.BlockReader) for one in held) > 0
    assert lazy.npartitions == 4 * 5 * 5
    assert len(pickle.dumps(graph)) < 400 * lazy.npartitions


def test_names_go_by_what_is_read(image, tmp_path):
    name = zarr_to_dask(image, device="cpu").name
    assert zarr_to_dask(str(image), device="cpu").name == name
    assert zarr_to_dask(zarr.open_group(image), device="cpu").name == name
    assert zarr_to_dask(image, device="cpu", chunks=(8, 10, 12)).name != name
    assert zarr_to_dask(image, device="cpu", level=1).name != name
    write_omezarr(image, volume(1), (10, 6, 5), chunks=(8, 10, 12), levels=2, overwrite=True)
    assert zarr_to_dask(image, device="cpu").name != name


def test_spacing_and_axes_are_beside_it(image):
    beside = open_image(image)
    lazy = zarr_to_dask(image, level=1, device="cpu")
    assert lazy.shape == beside.levels[1].shape
    assert beside.spacing[1] == (20, 12, 10)
    assert len(beside.axes) == lazy.ndim


@pytest.mark.parametrize("shards", [None, (16, 20, 24)])
def test_blocks_without_a_wish_are_large_and_whole(tmp_path, shards, monkeypatch):
    array = zarr.create_array(tmp_path / "a", shape=(100, 100, 100), chunks=(8, 10, 12), shards=shards, dtype="u2")
    stored = shards or (8, 10, 12)
    layout = read_layout(array)
    for most in (1, 100_000, 10**9):
        monkeypatch.setattr(zarr_dask, "_BLOCK_NBYTES", most)
        block = zarr_dask.block_shape(layout, None)
        assert all(b % s == 0 for b, s in zip(block, stored, strict=True))
        assert block == stored or math.prod(map(min, block, layout.shape)) * 2 <= most
        # As large as fits: one axis doubled again would not.
        longer = [math.prod(min(b * (2 if i == a else 1), 100) for i, b in enumerate(block)) * 2 for a in range(3)]
        assert all(size > most or block[a] >= 100 for a, size in enumerate(longer))


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        (8.0, r"chunks=8.0: .* has 3 axes, each needs a size from 1 on"),
        (True, r"chunks=True: .* has 3 axes, each needs a size from 1 on"),
        ("auto", r"chunks='auto': .* has 3 axes, each needs a size from 1 on"),
        ((8, 10, 13), r"cut what is stored in pieces of \(8, 10, 12\): choose \(8, 10, 12\)"),
        (16, r"choose \(16, 20, 12\)"),
        ((8, 10), "has 3 axes"),
        ((8, 10, 0), "a size from 1 on"),
        ((8, 10, 1.5), "a size from 1 on"),
    ],
)
def test_blocks_that_do_not_fit(image, chunks, message):
    with pytest.raises(ValueError, match=message):
        zarr_to_dask(image, chunks=chunks, device="cpu")


def test_whole_axes(image):
    assert zarr_to_dask(image, chunks=-1, device="cpu").npartitions == 1
    assert zarr_to_dask(image, chunks=(-1, 10, 24), device="cpu").chunksize == (30, 10, 24)


def test_bad_sources(tmp_path):
    with pytest.raises(FileNotFoundError):
        zarr_to_dask(tmp_path / "nothing")
    memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(4,), dtype="u2")
    with pytest.raises(SourceError, match="not in a local folder"):
        zarr_to_dask(memory, device="cpu")


def test_a_gpu_is_asked_for_by_name(image):
    if zarr_dask.resolve("auto").is_cuda:
        pytest.skip("there is one")
    with pytest.raises(GpuUnavailableError):
        zarr_to_dask(image, device="cuda")
    assert type(zarr_to_dask(image)._meta) is np.ndarray


def test_without_dask_it_says_what_to_install(image, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "dask.array", None)
    with pytest.raises(ImportError, match=r'pip install "(dask\[array\]|\.\[dask\])'):
        zarr_to_dask(image, device="cpu")


def test_local_functions_work_block_by_block(image):
    data = volume().astype("f4")
    lazy = zarr_to_dask(image, chunks=(8, 10, 12), device="cpu").astype("f4")
    smooth = lazy.map_overlap(ndimage.gaussian_filter, depth=8, boundary="nearest", sigma=1.5, mode="nearest")
    assert np.allclose(smooth.compute(scheduler="sync"), ndimage.gaussian_filter(data, 1.5, mode="nearest"), rtol=1e-5)
    columns = zarr_to_dask(image, chunks=(-1, 10, 12), device="cpu")
    mean = columns.map_blocks(project, axis=0, drop_axis=0, dtype="f4")
    assert np.allclose(mean.compute(scheduler="sync"), data.mean(axis=0), rtol=1e-5)


@pytest.fixture(scope="module")
def client(dask_cluster):
    with dask.config.set({"distributed.comm.timeouts.connect": "10s"}), Client(dask_cluster) as client:
        client.wait_for_workers(2)
        yield client


OPTIONS = {"device": "cpu", "chunks": (8, 8, 8), "memory_bytes": 60_000, "mode": "nearest", "levels": 2}


def levels(folder):
    return [level[...].tobytes() for level in open_image(folder).levels]


def test_workers_read_what_they_need(image, client):
    lazy = zarr_to_dask(image, chunks=(8, 10, 12), device="cpu")
    assert np.array_equal(lazy.compute(), volume())
    assert np.array_equal(lazy[3:20, 5].max(axis=1).compute(), volume()[3:20, 5].max(axis=1))


def test_an_error_of_a_worker_names_it(image, client):
    lazy = zarr_to_dask(image, chunks=(8, 10, 12), device="cpu")
    shutil.rmtree(image)
    with pytest.raises(FileNotFoundError, match="there is no file or folder") as caught:
        lazy.compute(scheduler=client)
    (note,) = caught.value.__notes__
    assert any(note.startswith(f"on worker {address}, which needs") for address in client.nthreads())
    with pytest.raises(FileNotFoundError) as caught:
        lazy.compute(scheduler="sync")
    assert not hasattr(caught.value, "__notes__")


def test_workers_make_the_same_volume(image, tmp_path, client):
    resample_zarr(image, tmp_path / "one", 4.0, **OPTIONS)
    seen = []
    resample_zarr(image, tmp_path / "two", 4.0, distributed=client, progress=seen.append, **OPTIONS)
    assert levels(tmp_path / "two") == levels(tmp_path / "one")
    assert sum(seen) == len(levels(tmp_path / "one")[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "one", "two"]


def test_a_lost_worker_is_made_up_for(image, tmp_path, client):
    """A worker is killed while blocks are under way; the others make them, and its heir helps."""
    seen, killed = itertools.count(), []

    def kill(_):
        if next(seen) == 10:
            killed.append(min(client.run(os.getpid).values()))
            os.kill(killed[0], signal.SIGKILL)

    resample_zarr(image, tmp_path / "one", 4.0, **OPTIONS)
    resample_zarr(image, tmp_path / "two", 4.0, distributed=client, progress=kill, **OPTIONS)
    assert levels(tmp_path / "two") == levels(tmp_path / "one")
    assert killed
    client.wait_for_workers(2)
    assert killed[0] not in client.run(os.getpid).values()


class StopError(Exception):
    pass


def test_a_run_on_workers_is_resumed(image, tmp_path, client):
    """By one process; only the blocks that are not there are made."""

    def stop(_):
        if next(seen) == 10:
            raise StopError

    seen = itertools.count()
    with pytest.raises(StopError):
        resample_zarr(image, tmp_path / "b", 4.0, distributed=client, progress=stop, **OPTIONS)
    assert not (tmp_path / "b").exists()
    time.sleep(0.5)  # blocks that were under way on the workers
    (target,) = (tmp_path / ".b.unfinished").glob("image-*/0")
    journal = (tmp_path / ".b.unfinished" / "journal").read_text().splitlines()
    boxes = [line.split()[2:] for line in journal[1:] if line.split()[1] == "box"]
    assert len(boxes) == 11
    corner = tuple(slice(8 * a, 8 * a + 8) for a in map(int, boxes[0][:3]))
    marked = zarr.open_array(target, mode="r+")
    kept = marked[corner]
    marked[corner] = 77
    resample_zarr(image, tmp_path / "b", 4.0, **OPTIONS)
    resample_zarr(image, tmp_path / "one", 4.0, **OPTIONS)
    finished = zarr.open_array(tmp_path / "b" / "0", mode="r+")
    assert (finished[corner] == 77).all()
    finished[corner] = kept
    assert levels(tmp_path / "b")[0] == levels(tmp_path / "one")[0]


def test_a_source_in_memory_cannot_be_sent(tmp_path, client):
    memory = zarr.create_array(zarr.storage.MemoryStore(), shape=(4, 4), dtype="u2")
    with pytest.raises(SourceError, match="not in a local folder"):
        resample_zarr(memory, tmp_path / "b", 2.0, spacing=(1, 1), distributed=client, device="cpu")


def test_workers_without_a_gpu_say_so(image, tmp_path, client):
    if zarr_dask.resolve("auto").is_cuda:
        pytest.skip("there is one")
    with pytest.raises(GpuUnavailableError):
        resample_zarr(image, tmp_path / "b", 4.0, distributed=client, **OPTIONS | {"device": "cuda"})
    resample_zarr(image, tmp_path / "b", 4.0, distributed=client, **OPTIONS | {"device": "auto"})


@pytest.mark.gpu
@pytest.mark.parametrize("compressors", [None, "auto"])
def test_blocks_on_a_device(tmp_path, cupy, compressors):
    write_omezarr(tmp_path / "a", volume(), (10, 6, 5), chunks=(8, 10, 12), compressors=compressors)
    lazy = zarr_to_dask(tmp_path / "a", chunks=(16, 20, 24), device="cuda")
    assert isinstance(lazy._meta, cupy.ndarray)
    got = lazy.compute(scheduler="sync")
    assert isinstance(got, cupy.ndarray)
    assert np.array_equal(cupy.asnumpy(got), volume())
    assert float(lazy.astype("f8").mean().compute(scheduler="sync")) == pytest.approx(volume().mean())


@pytest.mark.gpu
def test_a_worker_with_a_gpu(image, tmp_path):
    """One process is enough: blocks are made on the device, and are those of one process without dask."""
    options = OPTIONS | {"device": "cuda", "memory_bytes": 3 * 2**20}
    resample_zarr(image, tmp_path / "one", 4.0, **options)
    with (
        LocalCluster(n_workers=1, threads_per_worker=1, processes=True, dashboard_address=None) as cluster,
        Client(cluster) as client,
    ):
        resample_zarr(image, tmp_path / "two", 4.0, distributed=client, **options)
    assert levels(tmp_path / "two") == levels(tmp_path / "one")
