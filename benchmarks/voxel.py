"""Time voxel operations by Warp, beside CuPy or a simpler method, and SciPy on the host.

Timed are a boolean operation on two masks of 1024³ voxels (beside CuPy's logical functions), 1000 capsules removed from
512³ voxels in one pass (beside a launch for each), a dilation by a ball of radius 10 (beside
cupyx.scipy.ndimage.binary_dilation) and the voxelization of a sphere of a million triangles to 512³ voxels, from its
vertices on the device to the mask. linumpy's SciPy backend does a part of the work on one core (boolean operations: in
16 threads); its time is scaled to all of the work on 16 cores, as if no time were lost by dividing it.

For example:
  linum-benchmark voxel
  linum-benchmark voxel --only ball mesh --runs 50 --json voxel.json
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.arrays import ndimage_of, suite_of_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import GIB, Bench, CannotRunError, Work
from linumpy.device import to_host
from linumpy.voxel.backends.choose import why_no_warp
from linumpy.voxel.backends.operations import Backend
from linumpy.voxel.grid import VoxelGrid, make_grid
from linumpy.voxel.mesh import ORIENTED, TriangleMesh, make_mesh

if TYPE_CHECKING:
    from linumpy.voxel.backends.by_warp import WarpBackend

_CORES = 16
_PITCH = (1.0, 1.0, 1.0)
_ORIGIN = (0.0, 0.0, 0.0)


def _backend(bench: Bench) -> WarpBackend:
    missing = why_no_warp()
    if missing is not None:
        raise CannotRunError(missing)
    from linumpy.voxel.backends.by_warp import WarpBackend

    return WarpBackend(bench.device)


def _side(bench: Bench) -> int:
    return max(32, round(512 * bench.scale) // 16 * 16)


def _differing(wrong: Array, text: str = "voxels differ") -> str:
    """Return a message with the number of wrong voxels; empty if none is wrong."""
    count = int(wrong.sum())
    return f"{count} {text}" if count else ""


def _time(bench: Bench, name: str, nbytes: float, text: str, works: Sequence[Work], scipy: Work) -> None:
    """Time a case; `share` of SciPy's row is the part of the work that 16 cores would do in the time of its call."""
    with bench.case(name, nbytes / GIB, description=text, by_events=True) as case:
        for work in (*works, replace(scipy, name=f"SciPy, {_CORES} cores", share=min(1.0, scipy.share))):
            case.time_in_turns(work)


def _random(xp: ModuleType, side: int, part: float, seed: int) -> Array:
    """Make a random mask; all planes are copies of one random plane, shifted along both axes."""
    plane = xp.asarray(np.random.default_rng(seed).random((side, side)) < part)
    return xp.stack([xp.roll(plane, (37 * z, 101 * z), axis=(0, 1)) for z in range(side)])


def _boolean(bench: Bench) -> None:
    # Large masks: for smaller ones, a part of the time is Warp's launch.
    xp, backend, side = bench.xp, _backend(bench), 2 * _side(bench)
    a, b = (_random(xp, side, 0.5, seed) for seed in (0, 1))
    out = xp.empty_like(a)
    left, right = (to_host(mask[: side // 4]) for mask in (a, b))
    into, step = np.empty_like(left), -(-len(left) // _CORES)
    parts = [slice(first, first + step) for first in range(0, len(left), step)]

    def scipy() -> Array:
        with ThreadPoolExecutor(_CORES) as pool:
            list(pool.map(lambda s: Backend().boolean("subtract", left[s], right[s], out=into[s]), parts))
        return into

    ours = Work(
        name="linumpy", call=lambda: backend.boolean("subtract", a, b, out=out),
        check=lambda result: _differing(result != (a & ~b)),
    )  # fmt: skip
    cupy = Work(name="CuPy", call=lambda: xp.logical_and(a, xp.logical_not(b)))
    share = len(left) / side
    _time(bench, "subtract", 3 * a.nbytes, f"{side}³ bool", [ours, cupy], Work(name="", call=scipy, share=share))


def _tracks(side: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make capsules whose length is about a tenth of the volume's side; return starts, ends and radii."""
    rng = np.random.default_rng(0)
    start = rng.uniform(0, side, (count, 3))
    return start, start + rng.normal(0, side / 20, (count, 3)), rng.uniform(2, 6, count) * side / 512 + 1


def _capsules(bench: Bench) -> None:
    xp, backend, side = bench.xp, _backend(bench), _side(bench)
    count, peer_count = 1000, 50
    start, end, radius = _tracks(side, count)
    mask, planes = xp.ones((side,) * 3, bool), max(1, side // _CORES)
    part = np.ones((planes, side, side), bool)

    def ours() -> Array:
        backend.subtract_swept_capsule(mask, start, end, radius, pitch=_PITCH)
        return mask

    def peer() -> Array:
        for k in range(peer_count):
            backend.subtract_swept_capsule(mask, start[k], end[k], radius[k], pitch=_PITCH)
        return mask

    def scipy() -> np.int64 | Array:
        return Backend().subtract_swept_capsule(part, start, end, radius, pitch=_PITCH)

    def check(result: Array) -> str:
        first = side // 2
        expected = np.ones((min(planes, 8), side, side), bool)
        Backend().subtract_swept_capsule(expected, start, end, radius, pitch=_PITCH, z_offset=first)
        wrong = to_host(result[first : first + len(expected)]) != expected
        return _differing(wrong, "voxels differ from SciPy's backend")

    works = [
        Work(name="linumpy", call=ours, check=check, before=lambda: mask.fill(True)),
        Work(name="one launch each", call=peer, before=lambda: mask.fill(True), share=peer_count / count),
    ]
    work = Work(name="", call=scipy, share=_CORES * planes / side)
    _time(bench, "1000 capsules", mask.nbytes, f"{side}³ bool", works, work)


def _ball(bench: Bench) -> None:
    xp, backend, side = bench.xp, _backend(bench), _side(bench)
    radius = 10 if bench.scale == 1 else 4
    mask = _random(xp, side, 2e-4, 0)
    width, planes = 2 * radius + 1, 4
    z, y, x = np.indices((width,) * 3) - radius
    structure = xp.asarray(x * x + y * y + z * z <= radius * radius)
    peer_planes = max(width, side // 16)
    part, small = xp.ascontiguousarray(mask[:peer_planes]), to_host(mask[:planes])

    def check(result: Array) -> str:
        deep = 3 * radius + 4
        expected = Backend().dilate(to_host(mask[:deep, :160, :160]), radius=radius, pitch=_PITCH)
        box = tuple(slice(0, min(n, side) - (0 if n >= side else radius)) for n in (deep, 160, 160))
        return _differing(to_host(result[box]) != expected[box], "voxels differ from SciPy's backend")

    dilation = ndimage_of(mask).binary_dilation
    works = [
        Work(name="linumpy", call=lambda: backend.dilate(mask, radius=radius, pitch=_PITCH), check=check),
        Work(
            name="CuPy", call=lambda: dilation(part, structure, brute_force=True), share=min(1.0, peer_planes / side)
        ),
    ]  # fmt: skip
    scipy = lambda: Backend().dilate(small, radius=radius, pitch=_PITCH)  # noqa: E731
    work = Work(name="", call=scipy, share=_CORES * planes / side)
    _time(bench, f"dilation by a ball of {radius}", 2 * mask.nbytes, f"{side}³ bool", works, work)


def sphere_mesh(xp: ModuleType, triangles: int, radius: float, centre: float) -> tuple[Array, Array]:
    """Make a sphere of about `triangles` triangles, on a grid of angles, closed at the poles: vertices and faces."""
    rings = max(3, round((triangles / 4) ** 0.5))
    around = 2 * rings
    theta, phi = xp.linspace(0, np.pi, rings + 1)[1:-1, None], xp.arange(around) * (2 * np.pi / around)
    wave = (xp.sin(theta) * xp.cos(phi), xp.sin(theta) * xp.sin(phi), xp.cos(theta) + 0 * phi)
    poles = xp.asarray([(0.0, 0.0, 1.0), (0.0, 0.0, -1.0)])
    points = xp.concatenate([xp.stack(wave, axis=-1).reshape(-1, 3), poles]) * radius + centre
    index = xp.arange((rings - 1) * around).reshape(rings - 1, around)
    beside, below, count = xp.roll(index, -1, axis=1), index[1:], index.size
    a, b, c, d = (corner.ravel() for corner in (index[:-1], beside[:-1], below, beside[1:]))
    top = xp.stack([xp.full(around, count), index[0], beside[0]], axis=1)
    bottom = xp.stack([index[-1], xp.full(around, count + 1), beside[-1]], axis=1)
    middle = xp.concatenate([xp.stack([a, c, b], axis=1), xp.stack([b, c, d], axis=1)])
    return points, xp.concatenate([top, middle, bottom])


def _mesh(bench: Bench) -> None:
    xp, backend, side = bench.xp, _backend(bench), _side(bench)
    planes = max(1, side // _CORES)
    radius, centre = 0.45 * side, 0.5 * side + 0.123
    points, faces = sphere_mesh(xp, max(500, round(1e6 * bench.scale**3)), radius, centre)
    box = ((0.0, 0.0, 0.0), (float(side),) * 3)
    grid = make_grid((planes, side, side), _ORIGIN, _PITCH, side // 2)
    margin = 10 * radius / len(faces) * 4  # the largest distance of the triangles from the sphere
    whole = make_mesh(np, to_host(points), to_host(faces), grid)
    small = TriangleMesh(whole.corners[::_CORES], whole.bits, ORIENTED)

    def check(result: Array) -> str:
        axis = xp.arange(side) + 0.5 - centre
        length = xp.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
        clear = xp.abs(length - radius) > margin
        return _differing(clear & (result != (length < radius)), "voxels are on the wrong side of a sphere")

    def scipy() -> Array:
        return Backend().voxelize(small, VoxelGrid((planes, side, side), _ORIGIN, _PITCH, side // 2))

    ours = Work(name="linumpy", call=lambda: backend.voxelize_mesh(points, faces, box, _PITCH), check=check)
    work = Work(name="", call=scipy, share=_CORES * planes / side)
    _time(bench, f"a mesh of {len(faces)} triangles", side**3, f"{side}³ bool", [ours], work)


SUITE = suite_of_arrays(__doc__, {"boolean": _boolean, "capsules": _capsules, "ball": _ball, "mesh": _mesh})
