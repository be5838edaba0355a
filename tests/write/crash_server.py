"""Runs jobs that write, each in a forked process, under ``crash_shim.c``: imports are paid for once.

In: lines of JSON with a job and what shall happen at which call. Out: a line of JSON for each, with how the process
ended and what it told. Nothing here starts a thread: only then is a fork of it whole.
"""

import contextlib
import ctypes
import importlib
import json
import logging
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import numpy as np

from linumpy.io.output.files import replacing
from linumpy.resample.blocks import pipeline
from linumpy.resample.convert_zarr import convert_zarr
from linumpy.resample.resample_zarr import resample_zarr
from linumpy.write.writer import OmeZarrWriter
from tests.support.script_runs import load

SHIM = ctypes.CDLL(None)
SHIM.crash_trace.restype = ctypes.c_char_p
SCRIPT = load("linum_resample_mosaic_grid")
# What the jobs import when they run: a forked process would import it each time.
for name in (
    "numpy.random",
    "scipy.ndimage",
    "scipy.sparse",
    "tqdm",
    "linumpy.mosaic.grid",
    "linumpy.gpu.oct.resample_tiles",
    "multiprocessing.synchronize",
    "zarrs.pipeline",
):
    with contextlib.suppress(ImportError):  # zarrs need not be installed
        importlib.import_module(name)
MODES = {"off": 0, "kill": 1, "full": 2, "interrupt": 3, "terminate": 4, "short": 5, "broken": 6, "few": 0}
SECONDS = 60


def voxels(seed, shape):
    return np.random.default_rng(seed).integers(0, 60000, shape).astype("u2")


def write(place, *, codec="none", seed=1, overwrite=False):
    data, options = voxels(seed, (8, 16, 24)), {"chunks": (8, 8, 8), "levels": 2, "overwrite": overwrite}
    if codec == "shards":
        options |= {"chunks": (4, 4, 4), "shards": (8, 8, 8)}
    codec = "zstd" if codec == "shards" else codec
    with OmeZarrWriter(place, data.shape, "u2", (1, 1, 1), codec=codec, **options) as target:
        for y in range(0, 16, 8):
            target[:, y : y + 8] = data[:, y : y + 8]


def resample(place, *, source, overwrite=False):
    """Tell how many blocks were made."""
    made, real = [0], pipeline.write_block

    def count(*block):
        made[0] += 1
        return real(*block)

    pipeline.write_block = count
    options = {"chunks": (8, 8, 8), "levels": 2, "device": "cpu", "memory_bytes": 20_000, "progress": int}
    resample_zarr(source, place, 1.0, overwrite=overwrite, **options)
    return made[0]


def convert(place, *, source, overwrite=False):
    options = {"chunks": (4, 4, 4), "shards": (8, 8, 8), "codec": "zstd", "device": "cpu", "memory_bytes": 20_000}
    convert_zarr(source, place, overwrite=overwrite, **options)


def script(place, *, source, overwrite=False):
    options = ["--resolution", "4", "--tile-shape", "6", "6", "--device", "cpu", "--levels", "2"]
    words = [source, place, *options, *["--overwrite"] * overwrite]
    if code := SCRIPT.main([str(word) for word in words]):
        raise SystemExit(code)


def file(place, *, seed=1, overwrite=False):
    with replacing(place, overwrite=overwrite) as temporary:
        temporary.write_bytes(voxels(seed, (100,)).tobytes())


JOBS = {"write": write, "resample": resample, "script": script, "file": file, "convert": convert}


def run(asked):
    """In the forked process: do the job, and tell how it went."""
    told = {"error": None, "made": None}
    letter, occurrence = asked["start"]
    mode, nth, without_exchange = MODES[asked["mode"]], ctypes.c_long(asked["nth"]), int(asked["without_exchange"])
    SHIM.crash_arm(mode, nth, without_exchange, ctypes.c_char(letter.encode()), ctypes.c_long(occurrence))
    if asked["mode"] == "few":
        used = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + asked["nth"], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        told["made"] = JOBS[asked["job"]](Path(asked["place"]), **asked["options"])
    except SystemExit as error:
        told["error"] = f"SystemExit: {error}"
    except BaseException as error:
        told["error"] = f"{type(error).__name__}: {error}"
    return told | {"trace": SHIM.crash_trace().decode()}


def serve(asked):
    """Fork, wait, and tell: the exit status (negative: the signal) and what the process told."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.close(ours)
        os.dup2(os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(2, 1)
        with contextlib.suppress(BrokenPipeError):
            os.write(theirs, json.dumps(run(asked)).encode())
        os._exit(0)
    os.close(theirs)
    limit = time.monotonic() + SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > limit:
            os.kill(child, 9)
            os.waitpid(child, 0)
            os.close(ours)
            return {"status": "hangs"}
        time.sleep(0.002)
    with os.fdopen(ours, "rb") as pipe:
        text = pipe.read()
    return {"status": os.waitstatus_to_exitcode(ended[1]), **(json.loads(text) if text else {})}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING)
    out = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), file=out, flush=True)
