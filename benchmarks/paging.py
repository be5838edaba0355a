"""Time samples of a volume on disk, with a quarter of its bytes in memory.

A volume of --gib GiB is written to --folder, raw and, if there is a GPU, as zstd in 64³ chunks. On the host the raw
file is sampled, beside four calls of pread a point. Some thousand samples are checked in double precision.

For example:
  linum-benchmark paging --gib 8 --folder /scratch --json paging.json
"""

from __future__ import annotations

import argparse
import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import zarr

from benchmarks.sampling import CHECKED, PRECISION, Samples, truth_at
from linumpy import cli
from linumpy.benchmark.timing import GIB, Bench, Suite
from linumpy.device import usable_cores
from linumpy.sampling import create_sampler

#: Points of the peer that reads each point's voxels from the file, and points of one task of a thread.
_PREAD_SAMPLES, _PREAD_BATCH = 2**17, 2**13


@dataclass(frozen=True, kw_only=True)
class Larger:
    """A volume on disk (uint16), which repeats one layer of 64 planes; a call draws `batch` samples.

    The caller removes the folder. `planes` is the number of voxels along z, `side` the number along y and along x.
    """

    folder: Path
    planes: int
    side: int = 1024
    batch: int = 2**22

    @cached_property
    def layer(self) -> np.ndarray:
        """The 64 planes; half of the bits of a voxel are random, so that zstd compresses the planes to about half."""
        return np.random.default_rng(0).integers(0, 60000, (64, self.side, self.side), np.uint16) >> 8 << 8

    @property
    def shape(self) -> tuple[int, int, int]:
        """Voxels along z, y and x."""
        return self.planes, self.side, self.side

    def wrong(self, coords: np.ndarray, values: np.ndarray) -> str:
        """Return why values (voxels divided by 60000) are not samples of the volume; empty if they are."""
        volume = _Repeated(self.layer, self.planes)
        step = max(1, len(coords) // CHECKED)
        error = float(np.abs(truth_at(np, volume, coords[::step]) / 60000 - values[:, ::step]).max())
        return "" if error < PRECISION else f"off by {error:.1e} of the range"


class _Repeated:
    """The repeated layer, for :func:`truth_at`, which indexes (C, Z, Y, X)."""

    def __init__(self, layer: np.ndarray, planes: int) -> None:
        self._layer, self.shape = layer, (1, planes, *layer.shape[1:])

    def __getitem__(self, index: tuple[slice, np.ndarray, np.ndarray, np.ndarray]) -> np.ndarray:
        _, z, y, x = index
        return self._layer[z % 64, y, x][None]


def _on_the_host(bench: Bench, order: str, raw: Path, volume: Larger) -> None:
    sampler = create_sampler(
        "structuredRegular", "out_of_core", filename=raw, dims=list(volume.shape[::-1]), dtype="uint16",
        range=(0, 60000), seed=1, order=order,
    )  # fmt: skip
    samples = sampler.sample(volume.batch)
    count = min(volume.batch, _PREAD_SAMPLES)

    def ours() -> Samples:
        sampler.sample_into(*samples, volume.batch)
        return samples

    def four_preads() -> Samples:
        coords = rng.random((count, 3), np.float32)
        values = np.empty((1, count), np.float32)

        def part(begin: int) -> None:
            end = begin + _PREAD_BATCH
            values[0, begin:end] = _by_pread(file.fileno(), volume.shape, coords[begin:end])

        list(pool.map(part, range(0, count, _PREAD_BATCH)))
        return coords, values

    with bench.case(f"out_of_core, {order}", volume.batch / 1e6, unit="10⁶ samples") as case:
        case.time("linumpy", ours, lambda result: volume.wrong(*result))
        with raw.open("rb") as file, ThreadPoolExecutor(usable_cores()) as pool:
            rng, share = np.random.default_rng(1), count / volume.batch
            case.time("4 preads a point", four_preads, lambda result: volume.wrong(*result), share=share)


def _by_pread(file: int, shape: tuple[int, int, int], coords: np.ndarray) -> np.ndarray:
    """Interpolate between voxels that are read two at a time; return the values divided by 60000."""
    size = np.array(shape)
    position = np.clip(coords[:, ::-1].astype(np.float64) * size - 0.5, 0, size - 1)
    cell = np.minimum(position.astype(np.int64), np.maximum(size - 2, 0))
    rows = [(cell[:, 0] + k) * size[1] + cell[:, 1] + j for k in (0, 1) for j in (0, 1)]
    offsets = np.stack([(row * size[2] + cell[:, 2]) * 2 for row in rows], 1).reshape(-1).tolist()
    voxels = np.frombuffer(b"".join([os.pread(file, 4, offset) for offset in offsets]), "<u2")
    values = voxels.reshape(-1, 2, 2, 2).astype(np.float64)
    for axis in range(3):
        fraction = (position - cell)[:, axis].reshape(-1, *[1] * (2 - axis))
        values = values[:, 0] * (1 - fraction) + values[:, 1] * fraction
    return (values / 60000).astype(np.float32)


def _on_the_device(bench: Bench, order: str, window: int, volume: Larger) -> None:
    import cupy

    batch = volume.batch
    options: dict[str, Any] = {"ahead" if order == "iid" else "window": window}
    sampler = create_sampler(
        "zarr", "cuda_out_of_core", source=volume.folder / "volume.zarr", seed=1, order=order, range=(0, 60000),
        cache_bytes=math.prod(volume.shape) * 2 // 4, **options,
    )  # fmt: skip
    coords, values = cupy.empty((batch, 3), np.float32), cupy.empty((1, batch), np.float32)

    def call() -> Samples:
        for _ in range(window // batch):
            sampler.sample_into(coords, values, batch)
        return coords, values

    text = f"{window} samples in batches of {batch}; a cache of a quarter of the volume"
    with bench.case(f"cuda_out_of_core, {order}", window / 1e9, unit="10⁹ samples", description=text) as case:
        case.time("linumpy", call, lambda result: volume.wrong(result[0].get(), result[1].get()), warm_ups=0)


def _run(bench: Bench, args: argparse.Namespace) -> None:
    planes = max(1, round(args.gib * bench.scale * GIB / (2 * 1024 * 1024 * 64))) * 64
    with bench.work_folder() as folder:
        volume = Larger(folder=folder, planes=planes, batch=max(2**16, int(2**22 * bench.scale)))
        raw, layer = folder / "volume.raw", volume.layer
        with raw.open("wb") as file:
            for _ in range(0, planes, 64):
                file.write(layer.data)
        for order in ("iid", "binned"):
            _on_the_host(bench, order, raw, volume)
        if bench.on_gpu:
            array = zarr.create_array(folder / "volume.zarr", shape=volume.shape, chunks=(64, 64, 64), dtype=np.uint16)
            for z in range(0, planes, 64):
                array[z : z + 64] = layer
            for order, window in (("iid", 2**29), ("binned", 2**33)):
                _on_the_device(bench, order, window, volume)


SUITE = Suite(
    run=_run,
    help=__doc__,
    runs=3,
    options=[cli.Option("--gib", type=float, default=8.0, metavar="GIB", help="Size of the volume. [%(default)s]")],
)
