"""If this fails, volumes from files of other programs are opened as another type."""

import numpy as np
import pytest

from linumpy.sampling import create_sampler

pytestmark = pytest.mark.needs_core


@pytest.fixture(scope="module")
def files(extracted):
    folder = extracted("vdb.zip", "vti.zip")
    np.array([2, 1, 1, 0, 0, 0, 0, 0, 1], "<i4").tofile(folder / "a.bricks")
    np.array([0, 0, 0, 0, 1, 1, 1, 0, 1, 0, 0, 1, 1, 0, 1], "<i4").tofile(folder / "a.grids")
    np.array([3, 4], "<f4").tofile(folder / "a.scalar")
    return folder


def arguments(files, kind):
    return {
        "openvdb": {"filename": files / "float_blosc_mask.vdb", "field": "density"},
        "vtkm": {"files": [files / "parallel_0.pvti"], "field": "vector"},
        "exabrick": {"bricks": files / "a.bricks", "scalar": files / "a.scalar"},
        "exastitch": {"grids": files / "a.grids", "scalar": files / "a.scalar", "background": 0.0},
    }[kind]


def check(files, kind, device):
    if kind == "vtkm":
        pytest.importorskip("vtkmodules", reason="vtk is not installed: pip install vtk")
    sampler = create_sampler(kind, device, seed=5, **arguments(files, kind))
    coords, values = sampler.sample(1000)
    assert sampler.n_channels() == (3 if kind == "vtkm" else 1)
    assert values.shape == (sampler.n_channels(), 1000)
    low, high = sampler.value_range
    found = values if isinstance(values, np.ndarray) else values.get()
    assert low - 1e-4 <= found.min() < found.max() <= high + 1e-4
    again = sampler.decode(coords)
    np.testing.assert_allclose(again if isinstance(again, np.ndarray) else again.get(), found)


@pytest.mark.parametrize("kind", ["openvdb", "vtkm", "exabrick", "exastitch"])
def test_on_the_host(files, kind):
    check(files, kind, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["openvdb", "vtkm", "exabrick", "exastitch"])
def test_on_gpu(files, kind):
    check(files, kind, "cuda")
