"""Compile a kernel with NVRTC alone: no driver, no device."""

import zlib

import pytest
from compiled import kept
from cuda.bindings import nvrtc

from linumpy.gpu.kernels import source_text

ARCHITECTURES = ("sm_80", "sm_90")


def compilations(specs):
    """Kernels and architectures, for ``parametrize``.

    The short run takes of every kernel as many as hold each value of each definition, each for one architecture: the
    same one for all kernels of a source and its options, because they share a compilation.
    """
    specs = list(dict.fromkeys(specs))
    shown = set(_cover(specs))
    return [_compilation(spec, one, spec in shown) for spec in specs for one in ARCHITECTURES]


def _cover(specs):
    seen = set()
    for spec in specs:
        held = {(spec.source, spec.name, *definition) for definition in (*spec.defines, ("", ""))}
        if held - seen:
            yield spec
        seen |= held


def _compilation(spec, architecture, shown):
    chosen = ARCHITECTURES[zlib.crc32(repr((spec.source, spec.options)).encode()) % len(ARCHITECTURES)]
    marks = [] if shown and architecture == chosen else pytest.mark.slow
    name = "-".join([spec.name, *(value for _, value in spec.defines), architecture])
    return pytest.param(spec, architecture, id=name, marks=marks)


def compile_kernel(spec, architecture):
    """Compile to machine code; raise with the compiler's log where that fails. Returns the code."""
    text = source_text(spec.source)
    options = (*spec.options, f"--gpu-architecture={architecture}")
    version = ".".join(map(str, nvrtc.nvrtcVersion()))
    made = kept([version, text, *options], ".cubin", lambda path: path.write_bytes(_compile(spec, text, options)))
    return made.read_bytes()


def _compile(spec, text, options):
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{spec.source}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"{spec}, {options[-1]}:\n{log.decode()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code
