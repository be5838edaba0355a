"""Time verifying images of three levels beside reading all their chunks by one Reader.

Images of 2048×1024×1024 uint16 (4.6 GiB) are made below --folder: raw and zstd, chunks of 64³ in shards of 256×512×512
and in files. "Reader" reads all levels in blocks of whole stored objects, 512 MiB ahead; "thorough" compares all voxels
of levels, and "linumpy" one of 4 along each axis. Each image must be sound, and a chunk of zeros must be found.

For example:
  linum-benchmark verify --folder /dev/shm
  linum-benchmark verify --folder /dev/shm --device cpu --scale 0.5
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections import deque
from dataclasses import replace
from functools import partial
from pathlib import Path

import zarr

import linumpy
from benchmarks.regions import ARRAYS
from linumpy.arrays import DeviceName
from linumpy.benchmark.timing import GIB, Bench, Suite
from linumpy.device import require_cuda
from linumpy.gpu import Reader
from linumpy.gpu.read.ticket import Ticket
from linumpy.plan.pyramid import grown, split
from linumpy.verification.findings import Verification

#: Bytes of a block, and of the blocks that are requested before the first one is awaited.
_BLOCK_NBYTES, _AHEAD_NBYTES = 32 * 2**20, 512 * 2**20


def _run(bench: Bench, args: argparse.Namespace) -> None:
    device: DeviceName = "cuda" if bench.on_gpu else "cpu"
    with bench.work_folder() as folder:
        for name in bench.only or tuple(ARRAYS):
            image = _make(folder, name, bench.scale)
            levels = [zarr.open_array(image / str(level), mode="r+") for level in range(3)]
            nbytes = sum(math.prod(level.shape) * 2 for level in levels)
            with bench.case(name, nbytes / GIB, description=f"{levels[0].shape} and two coarser levels") as case:
                case.time("Reader", partial(_read, levels, device))
                for row, thorough in (("linumpy", False), ("thorough", True)):
                    case.time(row, partial(_verify, image, device, thorough), _is_sound)
                levels[0][tuple(slice(n, 2 * n) for n in levels[0].chunks)] = 0
                case.time("a chunk of zeros", partial(_verify, image, device, False), _finds_zeros)
            shutil.rmtree(image)


def _make(folder: Path, name: str, scale: float) -> Path:
    spec = replace(ARRAYS[name], shape=(2048, 1024, 1024)).scaled(scale)
    plain = replace(spec, shards=None, codec="none").make(folder)
    image = folder / "image.ome.zarr"
    linumpy.convert_zarr(
        plain, image, spacing=(1.0, 1.0, 1.0), levels=3, chunks=spec.chunks, shards=spec.shards, codec=spec.codec,
        device="cpu",
    )  # fmt: skip
    shutil.rmtree(plain)
    return image


def _verify(image: Path, device: DeviceName, thorough: bool) -> Verification:
    return linumpy.verify(image, device=device, thorough=thorough, progress=int)


def _is_sound(result: Verification) -> str:
    return "" if result.sound else str(result.findings[0])


def _finds_zeros(result: Verification) -> str:
    chunks = [finding.chunk for finding in result.findings]
    return "" if (1, 1, 1) in chunks else f"the chunk of zeros is not found: {chunks}"


def _read(levels: list[zarr.Array], device: DeviceName) -> None:
    """Read all levels, 512 MiB ahead, as fast as one Reader does."""
    with Reader(device="cpu" if device == "cpu" else None) as reader:
        pending: deque[tuple[int, Ticket]] = deque()
        for level in levels:
            layout = reader.layout_of(level)
            step = grown(layout.object_shape, layout.shape, layout.dtype.itemsize, _BLOCK_NBYTES)
            for box in split(tuple(slice(0, n) for n in layout.shape), step):
                pending.append((math.prod(part.stop - part.start for part in box) * 2, reader.submit(layout, box)))
                while sum(nbytes for nbytes, _ in pending) > _AHEAD_NBYTES:
                    pending.popleft()[1].result()
        for _, ticket in pending:
            ticket.result()
        if device == "cuda":
            require_cuda().cuda.Device().synchronize()


SUITE = Suite(run=_run, help=__doc__, cases=tuple(ARRAYS))
