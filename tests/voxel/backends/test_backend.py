"""If this fails, another backend is taken than was asked for, or Warp is imported unasked."""

import logging
import sys

import numpy as np
import pytest

from linumpy.errors import GpuUnavailableError
from linumpy.voxel.backends import choose as backends
from linumpy.voxel.backends.choose import backend_of, get_backend
from linumpy.voxel.backends.operations import Backend


def no_cuda(monkeypatch, missing="there is no GPU here"):
    monkeypatch.setattr(backends, "why_no_cuda", lambda: missing)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("LINUMPY_DEVICE", "cpu")
    assert get_backend().name == "cpu"
    no_cuda(monkeypatch)
    monkeypatch.setenv("LINUMPY_DEVICE", "cuda")
    with pytest.raises(GpuUnavailableError, match="there is no GPU here"):
        get_backend()
    assert get_backend("cpu").name == "cpu"
    monkeypatch.setenv("LINUMPY_DEVICE", "gpu")
    with pytest.raises(ValueError, match="LINUMPY_DEVICE='gpu'"):
        get_backend()


@pytest.mark.parametrize("kind", ["gpu", "", "CPU", "warp", 1])
def test_a_kind_that_is_unknown(kind):
    with pytest.raises(ValueError, match="unknown: choose one of auto, cuda, cpu"):
        get_backend(kind)


@pytest.mark.parametrize(("cuda", "warp"), [("no GPU", None), (None, "no Warp"), ("no GPU", "no Warp")])
def test_auto_falls_back_with_one_line(monkeypatch, caplog, cuda, warp):
    monkeypatch.delenv("LINUMPY_DEVICE", raising=False)
    no_cuda(monkeypatch, cuda)
    monkeypatch.setattr(backends, "why_no_warp", lambda: warp)
    with caplog.at_level(logging.INFO):
        assert get_backend("auto").name == "cpu"
    assert [record.getMessage() for record in caplog.records] == [
        f"voxel operations run on the CPU, by SciPy: {cuda or warp}"
    ]


def test_cuda_says_what_is_missing(monkeypatch):
    no_cuda(monkeypatch, None)
    real = backends.importlib.util.find_spec
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None if name == "warp" else real(name))
    with pytest.raises(GpuUnavailableError, match=r'Warp is not installed: pip install "(warp-lang|\.\[warp\])'):
        get_backend("cuda")


def test_a_warp_that_cannot_be_imported(monkeypatch):
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "warp", None)
    assert "Warp cannot be imported" in backends.why_no_warp()
    assert "pip install" in backends.why_no_warp()


def test_kernels_compile_for_a_gpu_and_fuse_no_multiply_add(tmp_path):
    """Warp's compiler for GPUs needs none; fused multiply-add would decide otherwise than NumPy where voxels touch."""
    wp = pytest.importorskip("warp", reason="Warp is not installed: pip install warp-lang")
    if not hasattr(wp, "compile_aot_module"):
        pytest.skip("this Warp compiles only for devices that are there")
    from linumpy.voxel.backends import warp_kernels, warp_mesh_kernels

    kernels = {**vars(warp_kernels), **vars(warp_mesh_kernels)}.values()
    for module in (warp_kernels, warp_mesh_kernels):
        wp.compile_aot_module(module, arch=90, module_dir=tmp_path, use_ptx=True)
    ptx = "".join(path.read_text() for path in tmp_path.glob("*.ptx"))
    assert ptx.count(".visible .entry") == sum(isinstance(one, wp.Kernel) for one in kernels)
    assert "mul.rn.f64" in ptx
    for entry in ptx.split(".visible .entry")[1:]:
        if "wind_open" not in entry.split("(")[0]:  # there CUDA's atan2 has some, and sums have a tolerance
            assert "fma.rn.f64" not in entry
            assert "fma.rn.f32" not in entry


@pytest.mark.gpu
def test_a_host_array_is_refused_on_a_device(cupy):
    pytest.importorskip("warp", reason="Warp is not installed: pip install warp-lang")
    from linumpy.voxel.backends.by_warp import WarpBackend

    assert isinstance(get_backend("cuda", transfer=False), WarpBackend)
    assert isinstance(backend_of(cupy.ones((1, 1, 1), bool)), WarpBackend)
    with pytest.raises(TypeError, match="on the host, but this backend is cuda:"):
        get_backend("cuda", transfer=False).fill_holes(np.ones((1, 1, 1), bool))
    with pytest.raises(TypeError, match="on the device, but this backend is cpu"):
        Backend().fill_holes(cupy.ones((1, 1, 1), bool))
