"""What is timed of voxel operations by Warp, beside CuPy or the plain way to do it, and SciPy on the host.

In: an array module and a scale. Out: :class:`Case` records, made one after another so that only one is in memory. With
NumPy Warp's CPU device computes. SciPy's backend does a part of the work on one core (of a boolean operation in 16
threads); its time is what 16 cores would take for all of it if nothing were lost by dividing the work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np

from linumpy.benchmark.kernels import kernel_case
from linumpy.benchmark.runner import CannotRunError, Case, Entry, Mark, ready
from linumpy.device import to_host
from linumpy.voxel.backend import why_no_warp
from linumpy.voxel.grid import VoxelGrid, make_grid
from linumpy.voxel.mesh import ORIENTED, TriangleMesh, make_mesh
from linumpy.voxel.scipy_backend import ScipyBackend

_CORES = 16
_PITCH = (1.0, 1.0, 1.0)
_ORIGIN = (0.0, 0.0, 0.0)
#: Ratio to SciPy on 16 cores that each case should reach.
_OF_SCIPY = 50.0


def _backend(xp: ModuleType) -> Any:
    missing = why_no_warp()
    if missing is not None:
        raise CannotRunError(missing)
    from linumpy.voxel.warp_backend import WarpBackend

    return WarpBackend("cpu" if xp is np else "cuda")


def _side(scale: float) -> int:
    return max(32, round(512 * scale) // 16 * 16)


def _with_scipy(case: Case, call: Callable[[], Any], share: float) -> Case:
    """Add SciPy, which does a share of the work that 16 cores would do in the same time."""
    title = f"SciPy, {_CORES} cores"
    entry = Entry("scipy", title, ready(call), max_seconds=4.0, share=min(1.0, share))
    mark = Mark(_OF_SCIPY, ("scipy",), f"× {title}")
    return replace(case, entries=(*case.entries, entry), marks=(*case.marks, mark))


def _random(xp: ModuleType, side: int, part: float, seed: int) -> Any:
    """Make a random mask, a plane after another that is moved along both axes."""
    plane = xp.asarray(np.random.default_rng(seed).random((side, side)) < part)
    return xp.stack([xp.roll(plane, (37 * z, 101 * z), axis=(0, 1)) for z in range(side)])


def _boolean(xp: ModuleType, scale: float) -> Case:
    # as many bytes as the copy beside it: of smaller masks Warp's launch takes a part of the time
    backend, side = _backend(xp), 2 * _side(scale)
    a, b = (_random(xp, side, 0.5, seed) for seed in (0, 1))
    out = xp.empty_like(a)
    left, right = (to_host(one[: side // 4]) for one in (a, b))
    into, step = np.empty_like(left), -(-len(left) // _CORES)
    parts = [slice(first, first + step) for first in range(0, len(left), step)]

    def scipy() -> Any:
        with ThreadPoolExecutor(_CORES) as pool:
            list(pool.map(lambda one: ScipyBackend().boolean("subtract", left[one], right[one], out=into[one]), parts))
        return into

    def check(found: Any) -> str:
        wrong = int((found != (a & ~b)).sum())
        return f"{wrong} voxels differ" if wrong else ""

    case = kernel_case(
        "boolean", a.shape, "bool",
        lambda: backend.boolean("subtract", a, b, out=out),
        lambda: xp.logical_and(a, xp.logical_not(b)),
        check, 3 * int(a.nbytes), copy_reach=0.8,
    )  # fmt: skip
    return _with_scipy(case, scipy, len(left) / side)


def _tracks(side: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make capsules of about a tenth of the volume's length."""
    rng = np.random.default_rng(0)
    start = rng.uniform(0, side, (count, 3))
    return start, start + rng.normal(0, side / 20, (count, 3)), rng.uniform(2, 6, count) * side / 512 + 1


def _capsules(xp: ModuleType, scale: float) -> Case:
    backend, side = _backend(xp), _side(scale)
    count, alone = 1000, 50
    start, end, radius = _tracks(side, count)
    mask, planes = xp.ones((side,) * 3, bool), max(1, side // _CORES)
    part = np.ones((planes, side, side), bool)

    def ours() -> Any:
        backend.subtract_swept_capsule(mask, start, end, radius, pitch=_PITCH)
        return mask

    def peer() -> Any:
        for one in range(alone):
            backend.subtract_swept_capsule(mask, start[one], end[one], radius[one], pitch=_PITCH)
        return mask

    def scipy() -> Any:
        return ScipyBackend().subtract_swept_capsule(part, start, end, radius, pitch=_PITCH)

    def check(found: Any) -> str:
        first = side // 2
        right = np.ones((min(planes, 8), side, side), bool)
        ScipyBackend().subtract_swept_capsule(right, start, end, radius, pitch=_PITCH, z_offset=first)
        wrong = int((to_host(found[first : first + len(right)]) != right).sum())
        return f"{wrong} voxels differ from SciPy's backend" if wrong else ""

    case = kernel_case(
        "1000 capsules", mask.shape, "bool", ours, peer, check, int(mask.nbytes), 20.0,
        peer_share=alone / count, peer_name="one launch each",
    )  # fmt: skip
    entries = tuple(_starting_with(entry, lambda: mask.fill(True)) for entry in case.entries)
    case = replace(case, entries=entries)
    return _with_scipy(case, scipy, _CORES * planes / side)


def _starting_with(entry: Entry, before: Callable[[], object]) -> Entry:
    """Have an entry that changes its array begin with the same one in each run."""
    prepare = entry.prepare

    def prepared() -> Any:
        with prepare() as made:
            return ready(made.call, made.check, before=before)()

    return replace(entry, prepare=prepared)


def _ball(xp: ModuleType, scale: float) -> Case:
    backend, side = _backend(xp), _side(scale)
    radius = 10 if scale == 1 else 4
    mask = _random(xp, side, 2e-4, 0)
    width, planes = 2 * radius + 1, 4
    z, y, x = np.indices((width,) * 3) - radius
    structure = xp.asarray(x * x + y * y + z * z <= radius * radius)
    peer_planes = max(width, side // 16)
    if xp is np:
        from scipy import ndimage
    else:
        from cupyx.scipy import ndimage
    part, small = xp.ascontiguousarray(mask[:peer_planes]), to_host(mask[:planes])

    def check(found: Any) -> str:
        deep = 3 * radius + 4
        right = ScipyBackend().dilate(to_host(mask[:deep, :160, :160]), radius=radius, pitch=_PITCH)
        place = tuple(slice(0, min(n, side) - (0 if n >= side else radius)) for n in (deep, 160, 160))
        wrong = int((to_host(found[place]) != right[place]).sum())
        return f"{wrong} voxels differ from SciPy's backend" if wrong else ""

    case = kernel_case(
        f"dilation by a ball of {radius}", mask.shape, "bool",
        lambda: backend.dilate(mask, radius=radius, pitch=_PITCH),
        lambda: ndimage.binary_dilation(part, structure, brute_force=True),
        check, 2 * int(mask.nbytes), 10.0, peer_share=min(1.0, peer_planes / side),
    )  # fmt: skip
    return _with_scipy(case, lambda: ScipyBackend().dilate(small, radius=radius, pitch=_PITCH), _CORES * planes / side)


def sphere_mesh(xp: ModuleType, triangles: int, radius: float, centre: float) -> tuple[Any, Any]:
    """Make a sphere of about so many triangles: a grid of angles, closed at its poles and where it meets itself."""
    rings = max(3, round((triangles / 4) ** 0.5))
    around = 2 * rings
    theta, phi = xp.linspace(0, np.pi, rings + 1)[1:-1, None], xp.arange(around) * (2 * np.pi / around)
    wave = (xp.sin(theta) * xp.cos(phi), xp.sin(theta) * xp.sin(phi), xp.cos(theta) + 0 * phi)
    poles = xp.asarray([(0.0, 0.0, 1.0), (0.0, 0.0, -1.0)])
    points = xp.concatenate([xp.stack(wave, axis=-1).reshape(-1, 3), poles]) * radius + centre
    here = xp.arange((rings - 1) * around).reshape(rings - 1, around)
    beside, below, count = xp.roll(here, -1, axis=1), here[1:], here.size
    a, b, c, d = (one.ravel() for one in (here[:-1], beside[:-1], below, beside[1:]))
    top = xp.stack([xp.full(around, count), here[0], beside[0]], axis=1)
    bottom = xp.stack([here[-1], xp.full(around, count + 1), beside[-1]], axis=1)
    middle = xp.concatenate([xp.stack([a, c, b], axis=1), xp.stack([b, c, d], axis=1)])
    return points, xp.concatenate([top, middle, bottom])


def _mesh(xp: ModuleType, scale: float) -> Case:
    backend, side = _backend(xp), _side(scale)
    planes = max(1, side // _CORES)
    radius, centre = 0.45 * side, 0.5 * side + 0.123
    points, faces = sphere_mesh(xp, max(500, round(1e6 * scale**3)), radius, centre)
    box = ((0.0, 0.0, 0.0), (float(side),) * 3)
    grid = make_grid((planes, side, side), _ORIGIN, _PITCH, side // 2)
    flat = 10 * radius / len(faces) * 4  # how far triangles lie below the sphere, at most
    whole = make_mesh(np, to_host(points), to_host(faces), grid)
    small = TriangleMesh(whole.corners[::_CORES], whole.bits, ORIENTED)

    def check(found: Any) -> str:
        axis = xp.arange(side) + 0.5 - centre
        length = xp.sqrt(axis[:, None, None] ** 2 + axis[:, None] ** 2 + axis**2)
        clear = xp.abs(length - radius) > flat
        wrong = int((clear & (found != (length < radius))).sum())
        return f"{wrong} voxels are on the wrong side of a sphere" if wrong else ""

    def scipy() -> Any:
        return ScipyBackend().voxelize(small, VoxelGrid((planes, side, side), _ORIGIN, _PITCH, side // 2))

    nbytes = side**3
    case = kernel_case(
        "a mesh of 10^6 triangles", (side,) * 3, "bool",
        lambda: backend.voxelize_mesh(points, faces, box, _PITCH),
        lambda: backend.voxelize(make_mesh(xp, points, faces, grid), make_grid((side,) * 3, _ORIGIN, _PITCH)),
        check, nbytes, peer_name="in two steps",
    )  # fmt: skip
    limit = Mark(nbytes / 2**30 / 0.3, label="GiB/s (0.3 s)")
    case = replace(case, entries=case.entries[:1], marks=(limit,))
    return _with_scipy(case, scipy, _CORES * planes / side)


#: In their order.
MAKERS: dict[str, Callable[[ModuleType, float], Case]] = {
    "boolean": _boolean,
    "capsules": _capsules,
    "ball": _ball,
    "mesh": _mesh,
}
