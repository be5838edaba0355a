"""What compilers make of the kernels, kept in the temporary folder: each is compiled once, not in every process."""

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from concurrent.futures import Future
from pathlib import Path

FOLDER = Path(tempfile.gettempdir()) / f"linumpy-compiled-kernels-{os.getuid()}"


def already_compiled(specs):
    """Stands in for ``prepare_beside`` where kernels are loaded in another way."""
    future = Future()
    future.set_result(None)
    return future


@contextlib.contextmanager
def _locked(key):
    """Keep other processes from making the same thing at the same time."""
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    with open(FOLDER / f"lock-{key[:2]}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def kept(parts, suffix, make):
    """Return the file that ``make(path)`` writes; `parts` are texts that tell it from every other one."""
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    made = FOLDER / f"{key}{suffix}"
    if not made.exists():
        with _locked(key):
            if not made.exists():
                make(unfinished := FOLDER / f"{key}.part{suffix}")
                unfinished.rename(made)
    return made


def _run(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@functools.cache
def _precompiled(header, compiler):
    """Compile a header alone; returns the folder that the compiler then finds it in."""
    version = subprocess.run([compiler[0], "--version"], capture_output=True, text=True, check=True).stdout

    def make(path):
        path.mkdir(exist_ok=True)
        _run([*compiler, "-x", "c++-header", header, "-o", path / f"{header.name}.gch"])

    return kept([version, *compiler, header.read_text()], "", make)


@functools.cache
def linked_object(source, compiler):
    """Compile what several libraries are linked with, by its path; returns the path of the object."""
    parts = [*compiler, source.read_text(), source.with_suffix(".h").read_text()]
    return kept(parts, ".o", lambda path: _run([*compiler, "-c", source, "-o", path]))


#: GNU's gold, where it is installed, links a small library in a third of the time.
_LINKER = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []


def shared_library(program, header, compiler, defines=(), link=()):
    """Compile a C++ program that includes `header` first; returns the path of a shared library.

    Parsing the standard library takes most of the time, so the header is compiled once for all programs. `link` are
    objects, and options of the linker alone.
    """
    folder = _precompiled(header, compiler)

    def make(path):
        source, compiled = path.with_suffix(".cpp"), path.with_suffix(".o")
        source.write_text(f'#include "{header.name}"\n{program}')
        _run([*compiler, "-c", f"-I{folder}", f"-I{header.parent}", *defines, "-o", compiled, source])
        _run([compiler[0], "-shared", *_LINKER, "-o", path, compiled, *link])
        source.unlink()
        compiled.unlink()

    return kept([folder.name, program, *defines, *map(str, link)], ".so", make)
