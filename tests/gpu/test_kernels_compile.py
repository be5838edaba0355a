"""Every CUDA source compiles, for every type and rank, with NVRTC and no GPU."""

import importlib.resources
import itertools

import numpy as np
import pytest
from nvrtc import compilations, compile_kernel

from linumpy.gpu import decode
from linumpy.gpu.scatter import _CUDA_TYPES, Conversion, kernel_spec
from linumpy.plan.launches import KERNELS, Launch
from linumpy.plan.scatter import ScatterTable


def table(rank, unit=4):
    return ScatterTable(unit, (1,) * rank, (1,) * rank, np.zeros((1, 2 + rank), np.int64))


def spec(source, target=None, *, rank=3, unit=4, swapped=False):
    return kernel_spec(Conversion(np.dtype(source), np.dtype(target or source), swapped), table(rank, unit))


def allowed(source, target):
    return np.dtype(source).kind != "c" or np.dtype(target).kind in "cb"


def specs():
    copies = [spec("u1", rank=rank, unit=unit) for rank in range(1, 7) for unit in (1, 2, 4, 8, 16)]
    swaps = [spec(one, rank=rank, swapped=True) for one, rank in zip(_CUDA_TYPES, itertools.cycle(range(1, 7)))]
    # The types that a cast meets, each with the others once; all pairs take minutes and differ in nothing but names.
    pairs = [p for p in itertools.product(_CUDA_TYPES, ["b1", "u2", "f2", "f4", "f8", "c8"]) if allowed(*p)]
    casts = [spec(*pair, swapped=pair[0] != "b1") for pair in pairs if pair[0] != pair[1]]
    return list(dict.fromkeys([*copies, *swaps, *casts]))


@pytest.mark.parametrize(("one", "architecture"), compilations(specs()))
def test_scatter_compiles(one, architecture):
    code = compile_kernel(one, architecture)
    assert code[:4] == b"\x7fELF"
    assert b"scatter" in code


def decoders():
    return [decode.kernel_spec(Launch(source, kernel, (1,), 32, (), team=team)) for source, kernel, team in KERNELS]


@pytest.mark.parametrize(("one", "architecture"), compilations(decoders()))
def test_decoders_compile(one, architecture):
    assert one.name.encode() in compile_kernel(one, architecture)


def test_every_source_is_compiled_here():
    sources = {
        file.name for file in importlib.resources.files("linumpy.gpu.cuda").iterdir() if file.name.endswith(".cu")
    }
    # Compiled in the tests of their rooms.
    interpolation = {"points.cu", "affine.cu", "cells.cu", "resize.cu", "spline.cu", "texture.cu"}
    elsewhere = {"interface.cu", "interface_march.cu", "projection.cu", "gather.cu"} | interpolation
    assert sources == {"scatter.cu"} | elsewhere | {f"{source}.cu" for source, _, _ in KERNELS}


def test_a_broken_source_is_noticed():
    from linumpy.gpu.kernels import KernelSpec

    with pytest.raises(AssertionError, match="RANK"):
        compile_kernel(KernelSpec("scatter", "scatter", (("COPY_UNIT", "4"),)), "sm_90")
