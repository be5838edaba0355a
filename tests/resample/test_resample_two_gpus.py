"""If this fails, workers with a GPU each make another volume than one, or lose blocks with a worker."""

import itertools
import os
import signal
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("distributed")

from distributed import Client, Nanny, Scheduler, SpecCluster

from linumpy.io.ome import open_image
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import write_omezarr


def visible(count):
    """Names of GPUs as CUDA_VISIBLE_DEVICES takes them, of those that this process sees."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if not names else names.split(",")[:count]


@contextmanager
def workers_by_environment(names):
    """A worker for each GPU, in a process whose environment names that one."""
    options = [{"nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": name}} for name in names]
    workers = {number: {"cls": Nanny, "options": one} for number, one in enumerate(options)}
    scheduler = {"cls": Scheduler, "options": {"dashboard": False, "host": "127.0.0.1"}}
    with SpecCluster(scheduler=scheduler, workers=workers) as cluster, Client(cluster) as client:
        client.wait_for_workers(len(names))
        yield client


@contextmanager
def workers_by_dask_cuda(names):
    dask_cuda = pytest.importorskip("dask_cuda")
    with dask_cuda.LocalCUDACluster(n_workers=len(names), dashboard_address=None) as cluster, Client(cluster) as client:
        client.wait_for_workers(len(names))
        yield client


def gpu_of_environment():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def test_each_worker_is_told_its_gpu(tmp_path):
    """The cluster of the tests below; on the CPU its workers make the volume, too."""
    write_omezarr(tmp_path / "a", np.random.default_rng(0).integers(0, 99, (24, 24, 24)).astype("u2"), (5, 5, 5))
    options = {"device": "cpu", "chunks": (8, 8, 8), "progress": int}
    with workers_by_environment(["0", "1"]) as client:
        assert sorted(client.run(gpu_of_environment).values()) == ["0", "1"]
        resample_zarr(tmp_path / "a", tmp_path / "two", 7.0, distributed=client, **options)
    resample_zarr(tmp_path / "a", tmp_path / "one", 7.0, **options)
    assert np.array_equal(open_image(tmp_path / "two").levels[0][...], open_image(tmp_path / "one").levels[0][...])


def bus_id():
    import cupy

    return cupy.cuda.Device().pci_bus_id


@pytest.mark.gpu
@pytest.mark.parametrize("lost", [False, True], ids=["both stay", "one is lost"])
@pytest.mark.parametrize("start", [workers_by_environment, workers_by_dask_cuda])
def test_two_gpus_make_what_one_makes(tmp_path, cupy, start, lost):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip(f"needs two GPUs: this machine shows {cupy.cuda.runtime.getDeviceCount()}")
    image = np.random.default_rng(0).integers(0, 60000, (160, 192, 224)).astype("u2")
    write_omezarr(tmp_path / "a", image, (5, 5, 5), chunks=(64, 64, 64))
    options = {"mode": "nearest", "chunks": (32, 32, 32), "levels": 2, "device": "cuda", "memory_bytes": 4 * 2**20}
    resample_zarr(tmp_path / "a", tmp_path / "one", 7.3, progress=int, **options)
    seen, killed = itertools.count(), []
    with start(visible(2)) as client:
        devices = client.run(bus_id)
        assert len(set(devices.values())) == 2

        def kill(_):
            if lost and next(seen) == 5:
                killed.append(min(client.run(os.getpid).values()))
                os.kill(killed[0], signal.SIGKILL)

        resample_zarr(tmp_path / "a", tmp_path / "two", 7.3, distributed=client, progress=kill, **options)
    assert bool(killed) == lost
    for two, one in zip(open_image(tmp_path / "two").levels, open_image(tmp_path / "one").levels, strict=True):
        assert np.array_equal(two[...], one[...])
    assert not list((tmp_path / "two").rglob("*.partial"))
