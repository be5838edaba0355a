"""If this fails, a decoder's library that is missing or unusable costs more than its codecs, or nobody is told.

Each case runs in a process of its own, since a library stays loaded.
"""

import json
import os
import shutil
import subprocess
import sys

import numcodecs
import numpy as np
import pytest
import zarr

from linumpy.core import native
from tests.support.budget import first
from tests.support.script_runs import ROOT, environment

pytestmark = pytest.mark.skipif(native.why_no_core() is not None, reason=str(native.why_no_core()))

CODECS = {
    "zstd": numcodecs.Zstd(1),
    "blosc-zstd": numcodecs.Blosc("zstd", 1, 1),
    "lz4": numcodecs.LZ4(),
    "gzip": numcodecs.GZip(1),
    "raw": None,
}
FUNCTIONS = {
    "zstd": "ZSTD_createDCtx ZSTD_freeDCtx ZSTD_decompressDCtx ZSTD_isError ZSTD_getErrorName ZSTD_getFrameContentSize "
    "ZSTD_findFrameCompressedSize",
    "lz4": "LZ4_decompress_safe",
    "inflate": "inflate inflateEnd uncompress zError",
}
OLD = {
    "zstd": ("int ZSTD_versionNumber(void) { return 10308; }", "version 1.3.8 is older than 1.4.0"),
    "lz4": ("int LZ4_versionNumber(void) { return 10801; }", "version 1.8.1 is older than 1.8.3"),
    "inflate": (
        'const char *zlibVersion(void) { return "1.2.8"; } int inflateInit2_(void) { return 0; }',
        "version 1.2.8 is older than 1.2.11",
    ),
}
#: Reads the arrays of a folder by each way, after the files of decoders were replaced, and prints what came of it.
CHILD = """
import json, sys
import numpy as np, zarr
import linumpy
from linumpy.core import native
from linumpy.errors import ChunkError, UnsupportedLayoutError
from linumpy.gpu import Reader, read_zarr

folder, files, prefix = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
sys.prefix = prefix or sys.prefix
for name, file in files.items():
    native.DECODERS[name] = native.DECODERS[name]._replace(file=file)
found = {}
for name in ("zstd", "blosc-zstd", "lz4", "gzip", "raw"):
    path = f"{folder}/{name}"
    values, report = read_zarr(path, device="cpu", return_report=True)
    strict = ""
    try:
        read_zarr(path, device="cpu", strict=True)
    except UnsupportedLayoutError as error:
        strict = str(error)
    with Reader(device="cpu") as reader:
        ticket = reader.submit(path)
        same = np.array_equal(ticket.result(), values)
        job = [ticket.report.backend, ticket.report.fallback]
    with linumpy.accelerate():
        same &= np.array_equal(zarr.open_array(path)[...], values)
    found[name] = [values.sum().item() if same else None, report.backend, report.fallback, strict, job]
try:
    found["mixed"] = read_zarr(f"{folder}/mixed", device="cpu").sum().item()
except ChunkError as error:
    found["mixed"] = str(error)
library = native.library()
print(json.dumps([found, library.opened, library.missing]))
"""


@pytest.fixture(scope="module")
def arrays(tmp_path_factory):
    """Arrays of one content and each codec; "mixed" has chunks of zstd where the metadata say lz4."""
    folder = tmp_path_factory.mktemp("arrays")
    values = np.random.default_rng(0).integers(0, 99, (8, 9, 10)).astype("u2")
    made = {**CODECS, "mixed": numcodecs.Blosc("zstd", 1, 1)}
    for name, codec in made.items():
        array = zarr.create_array(
            folder / name, shape=values.shape, chunks=(4, 5, 6), dtype="u2", zarr_format=2, compressors=codec
        )
        array[...] = values
    metadata = folder / "mixed/.zarray"
    metadata.write_text(metadata.read_text().replace('"zstd"', '"lz4"'))
    return folder, values.sum().item()


def read_all(folder, files=(), prefix="", **more):
    """Run the child; return what it prints, and its standard error."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(folder), json.dumps(dict(files)), str(prefix)],
        capture_output=True, text=True, timeout=200, env=environment(**more),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return *json.loads(done.stdout), done.stderr


def compiled(path, source):
    """Compile a library from C."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("a library is compiled, and there is no compiler")
    path.parent.mkdir(exist_ok=True)
    command = [compiler, "-xc", "-", "-shared", "-fPIC", "-o", str(path)]
    subprocess.run(command, input=source, text=True, check=True, capture_output=True)


def check(arrays, read, decoder, reason):
    """Check that the codecs of one decoder are left to zarr-python, all others are not, and the reason is told."""
    found, opened, missing, stderr = read
    of_decoder = {"zstd": ["zstd", "blosc-zstd"], "lz4": ["lz4"], "inflate": ["gzip"]}[decoder]
    assert set(missing) == {decoder}
    assert set(opened) == set(native.DECODERS) - {decoder}
    for name in CODECS:
        total, backend, fallback, strict, job = found[name]
        assert total == arrays[1], name
        if name not in of_decoder:
            assert backend == job[0] == "linumpy", name
            assert strict == job[1] == "", name
            continue
        assert backend == job[0] == "zarr-python"
        for text in (fallback, strict, job[1]):
            assert "cannot be loaded" in text
            assert reason in text
            assert f"zarr-python decodes {native.DECODERS[decoder].codecs}, slowly" in text
            assert f"apt install {native.DECODERS[decoder].package}" in text
    lines = [line for line in stderr.splitlines() if reason in line and "read by zarr-python" not in line]
    assert len(lines) == 1, stderr  # by Reader and accelerate() together
    if decoder == "zstd":
        assert found["mixed"].startswith("chunk (")
        assert "libzstd cannot be loaded: " in found["mixed"]
        assert reason in found["mixed"]
    else:
        assert decoder == "lz4" or found["mixed"] == arrays[1]


@pytest.mark.parametrize("decoder", first(["zstd", "lz4", "inflate"]))
def test_absent_library(arrays, decoder):
    read = read_all(arrays[0], {decoder: "libabsent.so.1"})
    check(arrays, read, decoder, "libabsent.so.1: cannot open shared object file")


@pytest.mark.parametrize("decoder", [pytest.param("zstd", marks=pytest.mark.slow), "lz4"])
def test_text_in_place_of_a_library(arrays, tmp_path, decoder):
    file = tmp_path / native.DECODERS[decoder].file
    file.write_text("no library\n")
    check(arrays, read_all(arrays[0], LD_LIBRARY_PATH=str(tmp_path)), decoder, f"{file}: file too short")


@pytest.mark.parametrize(
    "decoder", ["zstd", *(pytest.param(name, marks=pytest.mark.slow) for name in ("lz4", "inflate"))]
)
def test_old_library(arrays, tmp_path, decoder):
    source, reason = OLD[decoder]
    path = tmp_path / native.DECODERS[decoder].file
    compiled(path, source + "".join(f"void {name}(void) {{}}" for name in FUNCTIONS[decoder].split()))
    check(arrays, read_all(arrays[0], {decoder: str(path)}), decoder, f"{path}: {reason}")


def test_library_without_a_function(arrays, tmp_path):
    path = tmp_path / "libzstd.so.1"
    compiled(path, "int ZSTD_versionNumber(void) { return 10507; } void ZSTD_createDCtx(void) {}")
    read = read_all(arrays[0], LD_LIBRARY_PATH=str(tmp_path))
    check(arrays, read, "zstd", f"{path}: it has no ZSTD_freeDCtx")


def test_zlib_with_another_record(arrays, tmp_path):
    source = 'const char *zlibVersion(void) { return "1.9"; } int inflateInit2_(void) { return -6; }'
    compiled(
        tmp_path / "libz.so.1", source + "".join(f"void {name}(void) {{}}" for name in FUNCTIONS["inflate"].split())
    )
    read = read_all(arrays[0], {"inflate": str(tmp_path / "libz.so.1")})
    check(arrays, read, "inflate", "version 1.9 has another interface")


def test_environment_of_python(arrays, tmp_path):
    """As with conda: the folder of the environment has the libraries, those that are no libraries are passed over."""
    path = native.library().opened["zstd"].split(", version ")[0]
    (tmp_path / "lib").mkdir()
    shutil.copy(path, tmp_path / "lib/libzstd.so.1")
    (tmp_path / "lib/liblz4.so.1").write_text("no library")
    found, opened, missing, _ = read_all(arrays[0], prefix=tmp_path)
    assert opened["zstd"].startswith(f"{tmp_path}/lib/libzstd.so.1, version 1.")
    assert opened["lz4"] == native.library().opened["lz4"]
    assert missing == {}
    assert all(found[name][:2] == [arrays[1], "linumpy"] for name in CODECS)
    assert found["mixed"] == arrays[1]


def test_gpu_info_names_the_libraries(tmp_path):
    (tmp_path / "liblz4.so.1").write_text("no library\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/linum.py"), "gpu-info"],
        capture_output=True, text=True, timeout=200, env=environment(LD_LIBRARY_PATH=str(tmp_path)),
    )  # fmt: skip
    assert f"zstd        {native.library().opened['zstd']}\n" in done.stdout
    assert f"zlib, gzip  {native.library().opened['inflate']}\n" in done.stdout
    assert f"lz4         liblz4.so.1 cannot be loaded ({tmp_path}/liblz4.so.1: file too short)" in done.stdout
