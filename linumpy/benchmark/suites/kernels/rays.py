"""Samples along rays; one case has nerfacc beside it, if it is installed.

Each case has 262 144 rays through a grid of 128³ voxels, of which a random 10 % are occupied. The rays are given or
drawn from images; samples are in any order, or in the order of the rays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import (
    KERNEL_WARM_UPS,
    CannotRunError,
    Case,
    Check,
    Entry,
    Makers,
    Mark,
    Prepared,
    kernel_suite,
    peer_module,
    ready,
    scaled,
)  # fmt: skip
from linumpy.device import array_module, is_device_array, to_host
from linumpy.rays import PCG32, Image, Images, OccupancyGrid, RaySamples, generate_training_samples, march
from linumpy.rays.cameras import draw_rays
from linumpy.rays.marching import find_samples, point_at, positions_of, to_grid
from linumpy.rays.setting import MOST_STEPS, make_setting

_DESCRIPTION = """Time samples along rays, beside nerfacc on the same rays, on this machine's GPU.

Timed are 262 144 rays through a grid of 128³ voxels, of which 10 % are occupied: given rays (march) and rays drawn from
100 images of 800 × 800 pixels (generate), with samples in any order or in the order of the rays. The peer of
`march` is nerfacc's sampling(), if PyTorch and nerfacc are installed. Before timing, the samples of the first 1000 rays
are compared with the CPU's, ray by ray; a wrong result has no time. Times are medians, by CUDA events after warm-ups.

For example:
  linum-benchmark rays
  linum-benchmark rays --only march march-ordered --runs 50 --json rays.json
"""

_RAYS = 2**18
_OCCUPIED = 0.1
_STEP = 3**0.5 / 1024
#: Rows of the output for each ray.
_SAMPLES_PER_RAY = 96
#: Number of rays whose samples are compared with the CPU's.
_CHECKED = 1000
#: Rays and samples per second to reach; fraction of its unordered case's rate that an ordered case must reach.
_RAYS_PER_SECOND, _SAMPLES_PER_SECOND, _ORDERED = 200e6, 13e9, 1 / 1.2


def _grids(xp: ModuleType) -> tuple[OccupancyGrid, OccupancyGrid]:
    """Return the same grid on the device and on the host."""
    density = (np.random.default_rng(0).random((1, 128, 128, 128)) < _OCCUPIED).astype(np.float32)
    host = OccupancyGrid.of(density)
    return OccupancyGrid(xp.asarray(host.density), xp.asarray(host.bits), host.centre, host.edge), host


def _given_rays(xp: ModuleType, scale: float) -> Array:
    """Return rays from a sphere around the grid to points inside it."""
    rng, count = np.random.default_rng(1), scaled(_RAYS, scale, 256)
    origin = rng.normal(size=(count, 3))
    origin = 0.5 + 1.5 * origin / np.linalg.norm(origin, axis=1, keepdims=True)
    direction = 0.1 + 0.8 * rng.random((count, 3)) - origin
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return xp.asarray(np.concatenate([origin, direction], axis=1).astype(np.float32))


def _images(xp: ModuleType, scale: float) -> tuple[Images, Images]:
    """Return 100 cameras on a sphere around the grid, on the device and on the host."""
    rng, side = np.random.default_rng(2), scaled(800, scale)
    pixels = rng.integers(0, 255, (side, side, 4)).astype(np.uint8)
    on_device = xp.asarray(pixels)
    sides: tuple[list[Image], list[Image]] = ([], [])
    for _ in range(100):
        forward = rng.normal(size=3)
        forward /= np.linalg.norm(forward)
        right = np.cross((0.36, 0.8, 0.48), forward)
        right /= np.linalg.norm(right)
        pose = np.column_stack([right, np.cross(forward, right), forward, 0.5 - 1.5 * forward])
        for images, array in zip(sides, (on_device, pixels), strict=True):
            images.append(Image(array, focal=(1.5 * side, 1.5 * side), start_pose=pose))
    return Images.of(sides[0]), Images.of(sides[1])


def _first_rays_differ(result: RaySamples, counts: np.ndarray, positions: np.ndarray) -> str:
    """Compare the first rays with the numbers of samples and the positions that the host computes, ray by ray."""
    n_rays = len(result.n_steps) if result.max_level is None else int(result.n_rays)
    numbers = to_host(result.ray_indices[:n_rays])
    rows = np.flatnonzero(numbers < len(counts))
    rows = rows[np.argsort(numbers[rows])]
    steps, base = to_host(result.n_steps)[rows], to_host(result.base)[rows]
    all_steps = np.zeros(len(counts), np.int64)
    all_steps[numbers[rows]] = steps
    if not np.array_equal(all_steps, counts):
        return f"{int((all_steps != counts).sum())} of {len(counts)} rays have another number of samples"
    index = np.repeat(base - (np.cumsum(steps) - steps), steps) + np.arange(steps.sum())
    ours = to_host(result.positions[array_module(result.positions).asarray(index)])
    worst = float(np.abs(ours - positions).max(initial=0))
    return f"a position differs by {worst:.2g}" if not worst < 1e-5 else ""


def _case(
    name: str, call: Callable[[], RaySamples], check: Check, *, ordered: bool, third: Entry | None = None
) -> Case:
    samples = call()
    n_rays, n_samples, all_rays = int(samples.n_rays), int(samples.n_samples), len(samples.n_steps)
    nbytes = n_samples * 28 + n_rays * (12 if samples.max_level is None else 80)
    del samples
    # Marks are in rays and samples per second, but the runner compares bytes per second.
    per_ray, per_sample = all_rays / nbytes * 2**30, n_samples / nbytes * 2**30
    marks: tuple[Mark, ...] = (
        Mark(_RAYS_PER_SECOND / per_ray, (), "GiB/s: 200 Mrays/s"),
        Mark(_SAMPLES_PER_SECOND / per_sample, (), "GiB/s: 13 Gsamples/s"),
    )
    if ordered:
        marks = (Mark(_ORDERED, (f"{name.removesuffix('-ordered')}/linumpy",), "× any order"),)
    rates = f"1 GiB/s is {per_ray / 1e6:.4g} Mrays/s, {per_sample / 1e9:.4g} Gsamples/s"
    return Case(
        name,
        nbytes,
        (Entry("linumpy", "linumpy", ready(call, check), "ours", KERNEL_WARM_UPS), *([third] if third else [])),
        (f"{all_rays} rays, {n_samples} samples; {rates}",),
        {"rays": all_rays, "samples": n_samples},
        marks,
        clock="device",
    )


def _march(xp: ModuleType, scale: float, *, ordered: bool) -> Case:
    (grid, host_grid), rays = _grids(xp), _given_rays(xp, scale)
    options: dict[str, Any] = {"max_samples": len(rays) * _SAMPLES_PER_RAY, "min_step": _STEP}

    def check(result: RaySamples) -> str:
        expected = march(to_host(rays[:_CHECKED]), host_grid, **options)
        return _first_rays_differ(result, to_host(expected.n_steps), to_host(expected.positions))

    call = partial(march, rays, grid, deterministic=ordered, **options)
    if ordered:
        return _case("march-ordered", call, check, ordered=True)
    third = Entry("nerfacc", "nerfacc sampling()", lambda: _nerfacc(rays, host_grid), warm_ups=KERNEL_WARM_UPS)
    return _case("march", call, check, ordered=False, third=third)


def _generate(xp: ModuleType, scale: float, *, ordered: bool) -> Case:
    (grid, host_grid), (images, host_images) = _grids(xp), _images(xp, scale)
    n_rays = scaled(_RAYS, scale, 256)
    options: dict[str, Any] = {"n_rays": n_rays, "max_samples": n_rays * _SAMPLES_PER_RAY, "min_step": _STEP}

    def call() -> RaySamples:
        return generate_training_samples(PCG32.seeded(1), images, None, grid, deterministic=ordered, **options)

    def check(result: RaySamples) -> str:
        drawn = draw_rays(PCG32.seeded(1), host_images, n_rays, image_cdf=None, snap=False)
        setting = make_setting(host_grid.centre, host_grid.edge, 1, None, 0, _STEP, None, MOST_STEPS, 0)
        first = (array[:_CHECKED] for array in (drawn.origin, drawn.direction, drawn.jitter, drawn.unmasked))
        grid_rays = to_grid(setting, *first)
        samples = find_samples(setting, to_host(host_grid.bits), grid_rays)
        t = point_at(setting, grid_rays.start[samples.ray], samples.point)
        positions = (positions_of(grid_rays, samples.ray, t) - setting.box[0]) * setting.per_box
        return _first_rays_differ(result, samples.count, positions.clip(0, 1))

    name = "generate-ordered" if ordered else "generate"
    return _case(name, call, check, ordered=ordered)


@contextmanager
def _nerfacc(rays: Array, grid: OccupancyGrid) -> Iterator[Prepared]:
    """Prepare nerfacc's sampling of the same rays, an interval for each sample; it needs PyTorch and a GPU."""
    nerfacc, torch = (peer_module(name, "pip install torch nerfacc") for name in ("nerfacc", "torch"))
    if not is_device_array(rays) or not torch.cuda.is_available():
        raise CannotRunError("nerfacc samples on a GPU only")
    estimator = nerfacc.OccGridEstimator(roi_aabb=[0, 0, 0, 1, 1, 1], resolution=128, levels=1).cuda()
    estimator.binaries = torch.from_numpy(grid.occupied().transpose(2, 1, 0).copy())[None].cuda()  # axes (x, y, z)
    all_rays = torch.from_dlpack(rays)
    origin, direction = all_rays[:, :3].contiguous(), all_rays[:, 3:].contiguous()
    expected = int(march(to_host(rays[:_CHECKED]), grid, max_samples=_CHECKED * 1024, min_step=_STEP).n_samples)

    def check(result: Any) -> str:
        count = int((result[0] < _CHECKED).sum())
        return "" if abs(count - expected) < 0.02 * expected else f"{count} samples of the first rays, not {expected}"

    yield Prepared(lambda: estimator.sampling(origin, direction, render_step_size=_STEP), check)


#: The cases, in order.
MAKERS: Makers = {
    "march": partial(_march, ordered=False),
    "march-ordered": partial(_march, ordered=True),
    "generate": partial(_generate, ordered=False),
    "generate-ordered": partial(_generate, ordered=True),
}

SUITE = kernel_suite("rays", _DESCRIPTION, MAKERS, 50, "Part of the rays.")
