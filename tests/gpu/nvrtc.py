"""Compile a kernel with NVRTC alone: no driver, no device."""

from cuda.bindings import nvrtc

from linumpy.gpu.kernels import source_text


def compile_kernel(spec, architecture):
    """Compile to machine code; raise with the compiler's log where that fails. Returns the code."""
    text = source_text(spec.source).encode()
    error, program = nvrtc.nvrtcCreateProgram(text, f"{spec.source}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    options = [option.encode() for option in (*spec.options, f"--gpu-architecture={architecture}")]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"{spec} for {architecture}:\n{log.decode()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code
