"""Time samples along rays, beside nerfacc on the same rays.

Timed are 262,144 rays through a grid of 128³ voxels, of which a random 10 % are occupied: given rays (march) and rays
drawn from 100 images of 800 × 800 pixels (generate), with samples in any order and in the order of the rays. nerfacc's
sampling() is the peer of `march`, if PyTorch and nerfacc are installed. The samples of the first 1000 rays are compared
with the CPU's, ray by ray.

For example:
  linum-benchmark rays --runs 30 --json rays.json
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.arrays import scaled, suite_of_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench, CannotRunError, Case, Check, peer_module
from linumpy.device import array_module, is_device_array, to_host
from linumpy.rays import PCG32, Image, Images, OccupancyGrid, RaySamples, generate_training_samples, march

_RAYS = 2**18
_OCCUPIED = 0.1
_STEP = 3**0.5 / 1024
#: Rows of the output for each ray.
_SAMPLES_PER_RAY = 96
#: Number of rays whose samples are compared with the CPU's.
_CHECKED = 1000


def _grids(xp: ModuleType) -> tuple[OccupancyGrid, OccupancyGrid]:
    """Return the same grid on the device and on the host."""
    density = (np.random.default_rng(0).random((1, 128, 128, 128)) < _OCCUPIED).astype(np.float32)
    host = OccupancyGrid.of(density)
    return OccupancyGrid(xp.asarray(host.density), xp.asarray(host.bits), host.centre, host.edge), host


def _given_rays(bench: Bench) -> Array:
    """Return rays from a sphere around the grid to points inside it."""
    rng, count = np.random.default_rng(1), scaled(_RAYS, bench, 256)
    origin = rng.normal(size=(count, 3))
    origin = 0.5 + 1.5 * origin / np.linalg.norm(origin, axis=1, keepdims=True)
    direction = 0.1 + 0.8 * rng.random((count, 3)) - origin
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return bench.xp.asarray(np.concatenate([origin, direction], axis=1).astype(np.float32))


def _images(bench: Bench) -> tuple[Images, Images]:
    """Return 100 cameras on a sphere around the grid, on the device and on the host."""
    rng, side = np.random.default_rng(2), scaled(800, bench)
    pixels = rng.integers(0, 255, (side, side, 4)).astype(np.uint8)
    on_device = bench.xp.asarray(pixels)
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


def _time(
    bench: Bench,
    name: str,
    call: Callable[..., RaySamples],
    check: Check,
    nerfacc: Callable[[Case], None] | None = None,
) -> None:
    """Time samples in any order and in the order of the rays."""
    samples = call(deterministic=False)
    text = f"{len(samples.n_steps)} rays, {int(samples.n_samples)} samples"
    rays = len(samples.n_steps) / 1e6
    del samples
    with bench.case(name, rays, unit="Mrays", description=text, by_events=True) as case:
        for title, ordered in (("linumpy", False), ("linumpy, in order", True)):
            case.time(title, partial(call, deterministic=ordered), check, warm_ups=3)
        if nerfacc is not None:
            with case.attempt("nerfacc"):
                nerfacc(case)


def _march(bench: Bench) -> None:
    (grid, host_grid), rays = _grids(bench.xp), _given_rays(bench)
    options: dict[str, Any] = {"max_samples": len(rays) * _SAMPLES_PER_RAY, "min_step": _STEP}

    def check(result: RaySamples) -> str:
        expected = march(to_host(rays[:_CHECKED]), host_grid, **options)
        return _first_rays_differ(result, to_host(expected.n_steps), to_host(expected.positions))

    _time(bench, "march", partial(march, rays, grid, **options), check, lambda case: _nerfacc(case, rays, host_grid))


def _generate(bench: Bench) -> None:
    (grid, host_grid), (images, host_images) = _grids(bench.xp), _images(bench)
    n_rays = scaled(_RAYS, bench, 256)
    options: dict[str, Any] = {"n_rays": n_rays, "max_samples": n_rays * _SAMPLES_PER_RAY, "min_step": _STEP}

    def call(*, deterministic: bool) -> RaySamples:
        return generate_training_samples(PCG32.seeded(1), images, None, grid, deterministic=deterministic, **options)

    def check(result: RaySamples) -> str:
        expected = generate_training_samples(PCG32.seeded(1), host_images, None, host_grid, **options)
        counts, first = np.zeros(_CHECKED, np.int64), expected.ray_indices < _CHECKED
        counts[expected.ray_indices[first]] = expected.n_steps[first]
        return _first_rays_differ(result, counts, to_host(expected.positions[: counts.sum()]))

    _time(bench, "generate_training_samples", call, check)


def _nerfacc(case: Case, rays: Array, grid: OccupancyGrid) -> None:
    """Time nerfacc's sampling of the same rays, an interval for each sample; it needs PyTorch and a GPU."""
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

    case.time("nerfacc", lambda: estimator.sampling(origin, direction, render_step_size=_STEP), check)


SUITE = suite_of_arrays(__doc__, {"march": _march, "generate": _generate}, runs=50)
