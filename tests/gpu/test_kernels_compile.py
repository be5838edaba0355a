"""If this fails, a CUDA source does not compile for some type, rank or architecture."""

import contextlib
import importlib.resources
import itertools
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest

import linumpy
from linumpy.gpu import kernels
from linumpy.gpu.codecs import decode, encode
from linumpy.gpu.ndimage import correlate, nearest
from linumpy.gpu.oct import blend
from linumpy.gpu.read.scatter import _CUDA_TYPES, Conversion, kernel_spec
from linumpy.plan.codecs import DecodeChain, Encoding
from linumpy.plan.decode import launches
from linumpy.plan.decode.launches import DecodeLaunch
from linumpy.plan.decode.workspace import padded_nbytes, plan_workspace
from linumpy.plan.encode.chunks import plan_encoding
from tests.gpu.ndimage import test_general, test_sampling, test_splines
from tests.support import budget
from tests.support.budget import matrix
from tests.support.gpu.decoders import KERNELS, kernel_specs
from tests.support.gpu.mutants import CHAINS
from tests.support.gpu.nvrtc import compilations, compile_kernel, compile_with_ptx, declared_shared, raced_words


def spec(source, target=None, *, rank=3, unit=4, swapped=False):
    return kernel_spec(Conversion(np.dtype(source), np.dtype(target or source), swapped), rank, unit)


def allowed(source, target):
    return np.dtype(source).kind != "c" or np.dtype(target).kind in "cb"


def specs():
    copies = [spec("u1", rank=rank, unit=unit) for rank in range(1, 7) for unit in (1, 2, 4, 8, 16)]
    swaps = [spec(one, rank=rank, swapped=True) for one, rank in zip(_CUDA_TYPES, itertools.cycle(range(1, 7)))]
    # The types that a cast meets, each with the others once; all pairs take minutes and differ in nothing but names.
    pairs = [p for p in itertools.product(_CUDA_TYPES, ["b1", "u2", "i8", "f2", "f4", "f8", "c8"]) if allowed(*p)]
    casts = [spec(*pair, swapped=pair[0] != "b1") for pair in pairs if pair[0] != pair[1]]
    bfloat16 = [
        kernel_spec(Conversion(np.dtype(one), np.dtype("u2"), one != "b1", bfloat16=True), 3, 2)
        for one in _CUDA_TYPES
        if np.dtype(one).kind != "c"
    ]
    samplers = [*test_sampling.specs(), *test_sampling.stacks(), *test_splines.specs(), *test_general.specs()]
    lines = [nearest.kernel_spec(itemsize) for itemsize in (1, 2, 4, 8, 16)]
    lines += [correlate.kernel_spec(np.dtype(dtype)) for dtype in ("f4", "f8")]
    blends = [blend.kernel_spec(np.dtype(dtype)) for dtype in ("u1", "u2", "f4")]
    return [*copies, *swaps, *casts, *bfloat16, *samplers, *lines, *blends]


@pytest.mark.parametrize(("one", "architecture"), compilations(specs()))
def test_kernels_compile(one, architecture):
    code = compile_kernel(one, architecture)
    assert code[:4] == b"\x7fELF"
    assert one.name.encode() in code


@pytest.mark.parametrize(
    ("decoder", "architecture"), matrix(sorted({(source, team) for source, _, team in KERNELS}), ["sm_75", "sm_90"])
)
def test_decoders_compile(decoder, architecture):
    source, team = decoder
    names = [kernel for of, kernel, its_team in KERNELS if (of, its_team) == (source, team)]
    code, ptx = compile_with_ptx(
        decode.kernel_spec(DecodeLaunch(source, names[0], (1,), 32, (), team=team)), architecture
    )
    for name in names:
        assert name.encode() in code
        # What is planned beside a ring; else what a kernel has without asking for it.
        has_ring = team and source != "zstd_cells"
        assert declared_shared(code, name) <= (launches._STATIC_NBYTES if has_ring else 48 * 1024)
        # The compiler may load for all lanes what the source reads in one: zstd_entropy's state was such a word.
        assert not raced_words(ptx, name)


def encoders():
    """Name the kernels of every source of the encoders, and the shared memory that each asks for."""
    codecs = [("zstd", "", "none"), ("lz4", "", "none"), ("blosc", "lz4", "bit"), ("blosc", "zstd", "byte")]
    found = {}
    presets = ("fast", "small") if budget.SLOW else ("fast",)  # which differ in numbers
    for (compressor, inner, shuffle), preset in itertools.product(codecs, presets):
        for launch in plan_encoding(2, 3 * 10**5, Encoding(compressor, inner, preset, shuffle, 2)).launches:
            spec = encode.kernel_spec(launch)
            found.setdefault((spec.source, spec.defines), {})[spec] = launch.shared
    return found


ENCODERS = encoders()


@pytest.mark.parametrize(("encoder", "architecture"), matrix(ENCODERS, ["sm_75", "sm_90"]))
def test_encoders_compile(encoder, architecture):
    kernels = ENCODERS[encoder]
    code, ptx = compile_with_ptx(next(iter(kernels)), architecture)
    for spec, shared in kernels.items():
        assert spec.name.encode() in code
        assert declared_shared(code, spec.name) + shared <= 64 * 1024  # what Turing has
        assert not raced_words(ptx, spec.name)


def test_words_that_lanes_race_for_are_found():
    ptx = """
.entry guilty(
)
{
	mov.u32 	%r1, %tid.x;
	setp.ne.s32 	%p1, %r1, 0;
	@%p1 bra 	$L__1;
	st.shared.u32 	[state+4], %r2;
$L__1:
	ld.shared.u32 	%r3, [state+4];
	bar.warp.sync 	-1;
	ret;

}
"""
    assert raced_words(ptx, "guilty") == {"state+4"}
    innocent = ptx.replace("$L__1:\n", "$L__1:\n	bar.warp.sync 	-1;\n")
    assert not raced_words(innocent, "guilty")


def all_launches(limits):
    for name, (chain, _) in CHAINS.items():
        for chunks, nbytes in itertools.product((1, 20, 200), (100, 9000, 100_000, 2**24)):
            decoded = chunks * padded_nbytes(chain, nbytes)
            sizes = {"stored_nbytes": decoded, "decoded_nbytes": decoded, "words_nbytes": 0, "pool_nbytes": decoded}
            space = plan_workspace(chain, chunks=chunks, **sizes)
            yield name, launches.plan_launches(chain, space, 0, 0, chunks, nbytes, limits)
            if chain.compressor == "zstd" and decoded < 2**26:
                space = plan_workspace(chain, chunks=chunks, group_nbytes=2**20, **sizes)
                yield name, launches.plan_launches(chain, space, 0, 0, chunks, nbytes, limits)


@pytest.mark.parametrize("kib", [64, 96, 99, 163, 227])
def test_blocks_fit_devices_with_less_shared_memory(kib):
    limits, rings, kernels = launches.DeviceLimits(40, kib * 1024), set(), set()
    for name, planned in all_launches(limits):
        for one in planned:
            kernels.add((one.source, one.kernel, one.team))
            assert one.shared + launches._STATIC_NBYTES * (one.shared > 0) <= kib * 1024, (name, one)
            assert one.shared == 0 or one.shared >= 8192
            rings.add(one.shared)
    longest = max(2**k for k in range(18) if 2**k + launches._STATIC_NBYTES <= kib * 1024)
    assert max(rings) == longest
    assert kernels == set(KERNELS)
    if kib >= 163:  # as on an H200, for which they were chosen
        assert rings == {0} | {2**k for k in range(13, 18)}


def test_every_source_is_compiled_somewhere():
    sources = {file.name for file in Path(linumpy.__file__).parent.rglob("*.cu")}
    # Compiled in the tests of their packages.
    interpolation = {
        "points.cu",
        "affine.cu",
        "cells.cu",
        "resize.cu",
        "spline.cu",
        "general.cu",
        "take.cu",
        "correlate.cu",
    }
    elsewhere = {
        "surface.cu",
        "surface_march.cu",
        "blend.cu",
        "projection.cu",
        "gather.cu",
        *("composite.cu", "trace.cu", "augment.cu"),
        *("amr.cu", "boxes.cu", "draw.cu", "pack.cu", "pages.cu", "sample.cu", "sample_boxes.cu", "umesh.cu", "vdb.cu"),
    } | interpolation
    codecs = {source for source, _, _ in KERNELS} | {source for source, _ in ENCODERS}
    assert sources == {"scatter.cu"} | elsewhere | {f"{source}.cu" for source in codecs}


def test_resampling_asks_nothing_of_cupyx():
    folder = Path(str(importlib.resources.files("linumpy.gpu")))
    every = {file.name: file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    assert "dispatch.py" in every
    # Pinned memory, and the filters that find a surface inside a mask.
    others = {"device.py", "direct.py", "surface_filters.py"}
    assert {name for name, text in every.items() if "cupyx" in text} <= others


def test_kernels_of_several_sources_are_compiled_side_by_side(monkeypatch):
    """Three modules are compiled by three threads at the same time, each once, and not again."""
    compiled, met, held = [], threading.Barrier(3), threading.local()

    class RawModule:
        def __init__(self, code, options):
            assert held.device == 0
            self.module = (code, options)

        def get_function(self, name):
            if self.module not in [module for module, _ in compiled]:
                met.wait(timeout=20)
            compiled.append((self.module, name))
            return name

    @contextlib.contextmanager
    def use(device):
        held.device = device
        yield

    cuda = types.SimpleNamespace(Device=use, runtime=types.SimpleNamespace(getDevice=lambda: 0))
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(RawModule=RawModule, cuda=cuda))
    for cached in (kernels._load, kernels._prepare):
        cached.cache_clear()
    try:
        specs = kernel_specs(DecodeChain("zstd", decoded_checksum=True))
        names = ["zstd_frames", "zstd_entropy", "zstd_execute", "check_streams", "check_crc32c"]
        assert [spec.name for spec in specs] == names
        for _ in range(2):
            kernels.prepare(specs)
        held.device = 0
        assert [kernels.load(spec) for spec in specs] == names
        assert sorted(name for _, name in compiled) == sorted(names)
    finally:
        for cached in (kernels._load, kernels._prepare):
            cached.cache_clear()


def test_a_broken_source_is_noticed():
    from linumpy.gpu.kernels import KernelSpec

    with pytest.raises(AssertionError, match="RANK"):
        compile_kernel(KernelSpec("scatter", "scatter", (("COPY_UNIT", "4"),), "linumpy.gpu.read.cuda"), "sm_90")
