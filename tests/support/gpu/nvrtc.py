"""Compile a kernel with NVRTC alone, no driver and no device; and what the compiled kernel says of shared memory."""

import re
import struct
import zlib

import pytest
from cuda.bindings import nvrtc

from tests.support import budget
from tests.support.gpu.compiled import kept

ARCHITECTURES = ("sm_80", "sm_90")


def compilations(specs):
    """Kernels and architectures, for ``parametrize``.

    The short run takes as many as hold each kernel, and of each source each value of each definition, each for one
    architecture: the same one for all kernels of a source and its options, because they share a compilation.
    """
    specs = list(dict.fromkeys(specs))
    shown = set(_cover(specs))
    return [_compilation(spec, one, spec in shown) for spec in specs for one in ARCHITECTURES]


def _cover(specs):
    """Of all that is not shown yet, take what shows the most next."""
    held = {spec: {(spec.source, *one) for one in (*spec.defines, ("", spec.name))} for spec in specs}
    missing = set().union(*held.values())
    while missing:
        spec = max(specs, key=lambda one: len(held[one] & missing))
        missing -= held[spec]
        yield spec


def _compilation(spec, architecture, shown):
    chosen = ARCHITECTURES[zlib.crc32(repr(spec.module).encode()) % len(ARCHITECTURES)]
    marks = [] if shown and architecture == chosen else pytest.mark.slow
    name = "-".join([spec.name, *(value for _, value in spec.defines), architecture])
    return pytest.param(spec, architecture, id=name, marks=marks)


def compile_kernel(spec, architecture):
    """Compile to machine code; raise with the compiler's log where that fails. Returns the code.

    The short run does not optimise, which takes a quarter of the time: errors, and what is declared, are the same.
    """
    text = spec.code
    version = nvrtc.nvrtcVersion()[1:]
    fast = [] if budget.SLOW or version < (13, 0) else ["--Ofast-compile=max"]
    options = (*spec.options, f"--gpu-architecture={architecture}", *fast)
    parts = [str(version), text, *options]
    made = kept(parts, ".cubin", lambda path: path.write_bytes(_compile(spec, text, options)[0]))
    return made.read_bytes()


def compile_with_ptx(spec, architecture):
    """Return machine code, and PTX as text."""
    return _compile(spec, spec.code, (*spec.options, f"--gpu-architecture={architecture}"))


def _compile(spec, text, options):
    error, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{spec.source}.cu".encode(), 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, error
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        log = b" " * size
        nvrtc.nvrtcGetProgramLog(program, log)
        raise AssertionError(f"{spec}, {options}:\n{log.decode()}")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    code = b" " * size
    nvrtc.nvrtcGetCUBIN(program, code)
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return code, ptx.decode()


def declared_shared(code, name):
    """Read how many bytes of shared memory a kernel declares, from its section of the ELF file."""
    (sections,) = struct.unpack_from("<Q", code, 0x28)
    size, count, names = struct.unpack_from("<HHH", code, 0x3A)
    heads = [struct.unpack_from("<IIQQQQ", code, sections + k * size) for k in range(count)]
    for at, _, _, _, _, nbytes in heads:
        begin = heads[names][4] + at
        if code[begin : code.index(b"\0", begin)].decode() == f".nv.shared.{name}":
            return nbytes
    return 0


_ACCESS = re.compile(r"\b(ld|st)\.(?:volatile\.)?shared\S*\s.*?\[(\w+(?:\+\d+)?)\]")
_BARRIER = re.compile(r"\bbar\.warp\.sync|\bbar\.|\bbarrier\.")


def raced_words(ptx, kernel):
    """Find shared memory that one of a warp's first lane and the others may read while the other one writes it.

    Where the ways of the first lane and the others part, each is followed to its next barrier. Addresses that PTX
    computes at run time are left out: the emulator sees those.
    """
    blocks, following = _flow(re.search(rf"\.entry {kernel}\(.*?\n{{\n(.*?)\n}}\n", ptx, re.DOTALL)[1])
    text = "\n".join(map("\n".join, blocks))
    thread = set(re.findall(r"mov\.u32\s+(%r\d+), %tid\.x", text))
    lane = thread | {to for to, of in re.findall(r"and\.b32\s+(%r\d+), (%r\d+), 31;", text) if of in thread}
    is_first = {to for to, of in re.findall(r"setp\.(?:eq|ne)\.\w+\s+(%p\d+), (%r\d+), 0;", text) if of in lane}
    found = set()
    for block, ways in zip(blocks, following, strict=True):
        branch = re.match(r"@!?(%p\d+) bra", block[-1]) if block else None
        if branch and branch[1] in is_first and len(ways) == 2:
            (read, written), (read_there, written_there) = (_until_barrier(blocks, following, way) for way in ways)
            found |= (written & read_there) | (written_there & read)
    return found


def _flow(body):
    """Part PTX into blocks, each with those that may follow it."""
    blocks, labels = [[]], {}
    for line in map(str.strip, body.splitlines()):
        label = re.match(r"(\$\w+):", line)
        if label:
            labels[label[1]] = len(blocks)
            blocks.append([])
            continue
        blocks[-1].append(line)
        if re.search(r"\b(bra|ret|exit)\b", line):
            blocks.append([])
    following = []
    for number, block in enumerate(blocks):
        last = block[-1] if block else ""
        target = re.search(r"\bbra(?:\.uni)?\s+(\$\w+)", last)
        goes_on = not re.match(r"bra|ret|exit", last) and number + 1 < len(blocks)
        following.append(([labels[target[1]]] if target else []) + [number + 1] * goes_on)
    return blocks, following


def _until_barrier(blocks, following, start):
    """Collect the words of shared memory that are read, and written, from a block on."""
    words, todo, seen = {"ld": set(), "st": set()}, [start], set()
    while todo:
        number = todo.pop()
        if number in seen:
            continue
        seen.add(number)
        for line in blocks[number]:
            if _BARRIER.search(line):
                break
            if access := _ACCESS.search(line):
                words[access[1]].add(access[2])
        else:
            todo += following[number]
    return words["ld"], words["st"]
