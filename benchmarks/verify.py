"""Time verifying images of three levels beside reading all their chunks by one Reader.

Images of 512×1024×1024 uint16 at scale 1 are made below --folder: raw and zstd, chunks of 64³ in shards of 256×512×512
and in files. "Reader" reads all levels in blocks of whole stored objects, 512 MiB ahead; "thorough" compares all voxels
of levels, and "linumpy" one of 4 along each axis. Each image must be sound, and a chunk of zeros must be found.

For example:
  linum-benchmark verify --folder /dev/shm --scale 2
  linum-benchmark verify --folder /dev/shm --device cpu --scale 0.5
"""

from __future__ import annotations

import argparse
import math
import shutil
from collections import deque
from pathlib import Path

import zarr

import linumpy
from benchmarks.regions import ARRAYS, SHARD
from linumpy.arrays import DeviceName
from linumpy.benchmark.timing import GIB, Bench, Suite
from linumpy.device import require_cuda
from linumpy.gpu import Reader
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
                case.time("Reader", lambda levels=levels: _read(levels, device))
                for row, thorough in (("linumpy", False), ("thorough", True)):
                    case.time(
                        row, lambda image=image, thorough=thorough: _verify(image, device, thorough),
                        lambda result: "" if result.sound else str(result.findings[0]),
                    )  # fmt: skip
                _lose_chunk(levels[0])
                case.time("a chunk of zeros", lambda image=image: _verify(image, device, False), _finds_zeros)
            shutil.rmtree(image)


def _make(folder: Path, name: str, scale: float) -> Path:
    spec = ARRAYS[name]
    plain = ARRAYS["raw files"].scaled(scale).make(folder)
    image = folder / "image.ome.zarr"
    linumpy.convert_zarr(
        plain, image, spacing=(1.0, 1.0, 1.0), levels=3, chunks=spec.chunks, codec=spec.codec or "none", device="cpu",
        shards=None if spec.shards is None else SHARD,
    )  # fmt: skip
    shutil.rmtree(plain)
    return image


def _verify(image: Path, device: DeviceName, thorough: bool) -> Verification:
    return linumpy.verify(image, device=device, thorough=thorough, progress=int)


def _lose_chunk(array: zarr.Array) -> None:
    array[64:128, 64:128, 64:128] = 0


def _finds_zeros(result: Verification) -> str:
    chunks = [finding.chunk for finding in result.findings]
    return "" if (1, 1, 1) in chunks else f"the chunk of zeros is not found: {chunks}"


def _read(levels: list[zarr.Array], device: DeviceName) -> None:
    """Read all levels, 512 MiB ahead, as fast as one Reader does."""
    with Reader(device=device) as reader:
        pending: deque[tuple[int, object]] = deque()
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
