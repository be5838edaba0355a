"""Time the work on tissue, beside the same work written with CuPy's array functions.

Timed are the tissue interface (200×1024×1024 float32; depth first, depth last as a view of that, depth last in
memory) and its edge, the Z overlap (41 candidates of 512×512), the mean projection along Z (512³ uint16), the
correction of focal curvature (the peer rolls A-line after A-line; 256 of them are timed), the tiles of a mosaic grid at
twice their voxel spacing (16 of 128³ uint16; the peer filters and interpolates one after another) and the rigid
registration of 20 pairs of 1024² float32 (SimpleITK registers one pair on the CPU). Times of a part of the work are
scaled to all. Surfaces are checked against SciPy, correlations against the definition.

For example:
  linum-benchmark tissue
  linum-benchmark tissue --only interface-depth-first mean-projection --runs 50 --json tissue.json
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np

from benchmarks.arrays import ndimage_of, scaled, suite_of_arrays, time_arrays
from linumpy.arrays import Array
from linumpy.benchmark.timing import Bench, peer_module
from linumpy.device import array_module, to_host
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature
from linumpy.gpu.oct.correlation import central_half, overlap_correlations
from linumpy.gpu.oct.projection import project
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.gpu.oct.surface import find_tissue_interface
from linumpy.gpu.oct.surface_filters import SurfaceOptions, interface_by_filters
from linumpy.plan.grid.tile_grid import TileAxis
from linumpy.registration.pairs import register_pairs
from linumpy.testing.synthetic import MosaicSpec, block


def oct_volume(bench: Bench, dtype: str = "float32") -> Array:
    """Make an OCT mosaic of shape (200, 1024, 1024) times the scale, of 4 × 4 copies of a synthetic tile."""
    depth, side = scaled(200, bench), scaled(256, bench)
    spec = MosaicSpec(tiles=(1, 1), tile_shape=(depth, side, side), dtype=dtype, water_um=depth * 1.5)  # type: ignore[arg-type]
    return bench.xp.tile(bench.xp.asarray(block(spec, (0, 0, 0), spec.shape)), (1, 4, 4))


def _in_layout(bench: Bench, layout: str) -> tuple[Array, int]:
    """Return a mosaic and its depth axis: depth ``"first"``, ``"last"`` in memory, or last in a ``"view"``."""
    xp, vol = bench.xp, oct_volume(bench)
    if layout == "first":
        return vol, 0
    view = xp.moveaxis(vol, 0, -1)
    return (view if layout == "view" else xp.ascontiguousarray(view)), -1


def _corner_differs(
    vol: Array, options: SurfaceOptions, surface: Array, differ: Callable[[np.ndarray, np.ndarray], str]
) -> str:
    """Compare the surface of a corner of 2 × 2 tiles with the CPU's, without the rim, which other tiles change."""
    side = 2 * (vol.shape[1] // 4)
    corner = vol[:, :side, :side] if options.depth_axis == 0 else vol[:side, :side]
    rim = max(1, side - 8)
    expected = interface_by_filters(to_host(corner), options)[0][:rim, :rim]
    return differ(to_host(surface)[:rim, :rim], expected)


def _interface(bench: Bench, layout: str) -> None:
    vol, axis = _in_layout(bench, layout)
    options = SurfaceOptions(depth_axis=axis)

    def peer() -> Array:
        return _chain_depth_first(vol) if axis == 0 else interface_by_filters(vol, options)[0]

    def check(surface: Array) -> str:
        wrong = _corner_differs(vol, options, surface, _surfaces_differ)
        return wrong or _surfaces_differ(to_host(surface), to_host(peer()))

    ours = lambda: find_tissue_interface(vol, depth_axis=axis)  # noqa: E731
    time_arrays(bench, f"interface, depth {layout}", vol, vol.nbytes, ours, check, peer=peer)


def _edge(bench: Bench) -> None:
    """Time the edge of tissue; the peer is linumpy's own voxel of the steepest rise."""
    vol = oct_volume(bench)
    options = SurfaceOptions(depth_axis=0, edge=True, min_contrast=0)

    def edges_differ(edges: np.ndarray, expected: np.ndarray) -> str:
        differs = ~np.isclose(edges, expected, atol=0.01, equal_nan=True)
        return f"{int(differs.sum())} of {differs.size} edges differ" if differs.mean() > 0.001 else ""

    time_arrays(
        bench, "interface, edge", vol, vol.nbytes,
        lambda: find_tissue_interface(vol, depth_axis=0, definition="edge", min_contrast=0),
        lambda surface: _corner_differs(vol, options, surface, edges_differ),
        peer=lambda: find_tissue_interface(vol, depth_axis=0), peer_name="steepest rise",
    )  # fmt: skip


def _chain_depth_first(vol: Array, s_xy: int = 15, s_z: float = 2) -> Array:
    """Find the surface by filters along the axes of `vol`, depth first: memory is then read in order."""
    xp, ndimage = array_module(vol), ndimage_of(vol)
    values = xp.log(xp.where(vol > 0, vol, np.float32(1)).astype(np.float32))
    smooth = ndimage.uniform_filter(values, (1, s_xy, s_xy))
    surface = ndimage.gaussian_filter1d(smooth, s_z, axis=0, order=1).argmax(axis=0)
    return xp.minimum(xp.ceil(surface + s_z / 2), vol.shape[0] - 1).astype(np.int32)


def _surfaces_differ(surface: np.ndarray, expected: np.ndarray) -> str:
    difference = np.abs(surface.astype(np.int64) - expected)
    if (difference > 0).mean() > 1e-3:
        return f"{(difference > 0).mean():.2%} of A-lines differ"
    return f"an A-line differs by {difference.max()} voxels" if difference.max() > 1 else ""


def _overlap(bench: Bench) -> None:
    xp, rng = bench.xp, np.random.default_rng(0)
    side, middle, reach = scaled(1024, bench), scaled(80, bench), 20 if bench.scale == 1 else 5
    planes = max(scaled(128, bench), middle + reach)
    shared = xp.asarray(rng.gamma(2.0, 40.0, (middle, side, side)).astype(np.float32))
    fixed, moving = (xp.tile(shared[:1], (planes, 1, 1)) for _ in range(2))
    fixed[-middle:], moving[:middle] = shared, shared * np.float32(0.5) + np.float32(3)
    candidates = list(range(middle - reach, middle + reach + 1))
    centres = central_half(fixed), central_half(moving)

    def peer() -> np.ndarray:
        return np.array([_pearson(xp, *centres, n) for n in candidates])

    def check(result: Array) -> str:
        correlations = to_host(result)
        best = candidates[int(correlations.argmax())]
        if best != middle:
            return f"an overlap of {best}, not {middle}"
        worst = float(np.abs(correlations - peer()).max())
        return f"correlations differ by {worst:.2g}" if worst > 1e-4 else ""

    nbytes = 2 * 4 * max(candidates) * centres[0].shape[1] * centres[0].shape[2]
    time_arrays(
        bench, "Z overlap", centres[0], nbytes, lambda: overlap_correlations(*centres, candidates), check, peer=peer
    )


def _pearson(xp: ModuleType, fixed: Array, moving: Array, n: int) -> float:
    """Compute the correlation of one overlap of contiguous copies, which CuPy sums far faster than views."""
    a, b = xp.ascontiguousarray(fixed[-n:]), xp.ascontiguousarray(moving[:n])
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / xp.sqrt((a * a).sum() * (b * b).sum()))


def _projection(bench: Bench) -> None:
    shape = (scaled(512, bench),) * 3
    plane = np.random.default_rng(0).integers(0, 65536, shape[1:], np.uint16)
    vol = bench.xp.arange(shape[0], dtype=np.uint16)[:, None, None] * np.uint16(97) + bench.xp.asarray(plane)

    def check(result: Array) -> str:
        worst = float(abs(result - vol.mean(axis=0, dtype=np.float64)).max())
        return f"means differ by {worst:.2g}" if worst > 0.01 else ""

    nbytes = vol.nbytes + 4 * shape[1] * shape[2]
    time_arrays(bench, "mean along Z", vol, nbytes, lambda: project(vol, 0), check, peer=lambda: vol.mean(axis=0))


def _focal(bench: Bench, dtype: str) -> None:
    vol = oct_volume(bench, dtype)
    side = vol.shape[1] // 4
    curvature = FocalCurvature(tile_shape=(side, side), vv=4.0, vu=0.5, uu=3.0, rms=0.0, tiles=16)
    shifts = np.floor(curvature.depth() + 0.5).astype(int)
    rolled = min(vol.shape[2], 256)  # A-lines

    def peer() -> Array:
        out = vol[:, 0].copy()
        for x in range(rolled):
            out[:, x] = bench.xp.roll(vol[:, 0, x], -int(shifts[0, x % side]))
        return out

    def check(result: Array) -> str:
        depth = vol.shape[0]
        rows, columns = slice(side - 1, side + 2), slice(None)
        lines, corrected = (to_host(array[:, rows, columns]) for array in (vol, result))
        in_tile = np.ix_(np.arange(rows.start, rows.stop) % side, np.arange(lines.shape[2]) % side)
        index = np.arange(depth)[:, None, None] + shifts[in_tile]
        expected = np.take_along_axis(lines, np.clip(index, 0, depth - 1), axis=0)
        wrong = corrected != expected
        return f"{wrong.mean():.2%} of the voxels differ" if wrong.any() else ""

    time_arrays(
        bench, f"focal curvature, {dtype}", vol, 2 * vol.nbytes, lambda: correct_focal_curvature(vol, curvature), check,
        peer=peer, share=rolled / (vol.shape[1] * vol.shape[2]),
    )  # fmt: skip


def _tiles(bench: Bench) -> None:
    xp, count, side = bench.xp, 4, scaled(128, bench)
    part = tuple(TileAxis(n, side, side // 2) for n in (side, count * side, count * side))
    rng = np.random.default_rng(0)
    vol = xp.asarray(rng.integers(0, 60000, [axis.size for axis in part], np.uint16))
    indices = itertools.product((0,), range(count), range(count))
    boxes = [tuple(slice(i * side, (i + 1) * side) for i in index) for index in indices]

    def peer() -> Array:
        ndimage = ndimage_of(vol)
        out = xp.empty([axis.new_size for axis in part], vol.dtype)
        new = part[0].new_tile
        for box in boxes:
            smooth = ndimage.gaussian_filter(vol[box].astype(np.float32), part[0].sigma, mode="nearest")
            new_box = tuple(slice(axis.start // side * new, axis.stop // side * new) for axis in box)
            scales, offset = xp.full(3, part[0].factor), [part[0].offset] * 3
            tile = ndimage.affine_transform(smooth, scales, offset, (new,) * 3, order=1, mode="nearest")
            out[new_box] = xp.rint(tile)
        return out

    def check(result: Array) -> str:
        first = resample_tiles(to_host(vol[boxes[0]]), [replace(axis, size=side) for axis in part])
        corner = to_host(result[tuple(slice(0, n) for n in first.shape)])
        worst = max(
            int(np.abs(corner.astype(int) - first).max()),
            int(np.abs(to_host(result).astype(int) - to_host(peer())).max()),
        )
        return f"a voxel differs by {worst}" if worst > 1 else ""

    ours = lambda: resample_tiles(vol, part)  # noqa: E731
    time_arrays(bench, "tiles to twice the spacing", vol, vol.nbytes * 9 // 8, ours, check, peer=peer)


# ---- registration of all pairs of slices in one batch; SimpleITK registers one pair on the CPU


def known_pairs(
    count: int, side: int, *, noise: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make pairs of synthetic images: the moving image is rotated by up to 3° and shifted by up to 3 % of the side.

    Returns: (1) Moving images have a gain of 2 and an offset of 10; each image has noise of its own. (2) Map (y, x, 1)
    of the fixed image to the moving image, in pixels.
    """
    from scipy import ndimage

    rng, margin = np.random.default_rng(seed), side // 8
    fixed, moving, matrices = [], [], []
    for _ in range(count):
        texture = ndimage.gaussian_filter(rng.standard_normal((side + 2 * margin,) * 2), 2.5)
        texture /= texture.std()
        angle, shift = np.radians(rng.uniform(-3, 3)), rng.uniform(-0.03, 0.03, 2) * side
        matrix, centre = np.eye(3), (side - 1) / 2 * np.ones(2)
        matrix[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        matrix[:2, 2] = centre - matrix[:2, :2] @ centre + shift
        inverse = np.linalg.inv(matrix)
        moved = ndimage.affine_transform(texture, inverse[:2, :2], inverse[:2, 2] + margin, (side, side))
        fixed.append(texture[margin:-margin, margin:-margin] + noise * rng.standard_normal((side, side)))
        moving.append(2 * (moved + noise * rng.standard_normal((side, side))) + 10)
        matrices.append(matrix)
    return np.array(fixed, np.float32), np.array(moving, np.float32), np.array(matrices)


def corner_errors(matrices: np.ndarray, truth: np.ndarray, side: int) -> np.ndarray:
    """Return, for each pair, the RMS distance in pixels between estimated and true positions of the four corners."""
    corners = np.array([[y, x, 1] for y in (0, side - 1) for x in (0, side - 1)]).T
    errors: np.ndarray = ((matrices - truth) @ corners)[:, :2]
    return np.sqrt((errors**2).sum(axis=1).mean(axis=1))


def by_simpleitk(fixed: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """Register one pair by SimpleITK, rigidly: correlation as metric, B-spline interpolation, three pyramid levels.

    Returns the matrix that maps (y, x, 1), in pixels.
    """
    sitk = peer_module("SimpleITK")

    images = [sitk.GetImageFromArray(image) for image in (fixed, moving)]
    method = sitk.ImageRegistrationMethod()
    method.SetMetricAsCorrelation()
    method.SetOptimizerAsRegularStepGradientDescent(1.0, 1e-5, 300, relaxationFactor=0.7)
    method.SetOptimizerScalesFromPhysicalShift()
    method.SetShrinkFactorsPerLevel([4, 2, 1])
    method.SetSmoothingSigmasPerLevel([4, 2, 1])
    method.SetInterpolator(sitk.sitkBSpline)
    transform = sitk.CenteredTransformInitializer(
        *images, sitk.Euler2DTransform(), sitk.CenteredTransformInitializerFilter.GEOMETRY
    )
    method.SetInitialTransform(transform, inPlace=True)
    method.Execute(*images)
    # SimpleITK has x first: reverse to (y, x).
    points = [np.array(transform.TransformPoint(point))[::-1] for point in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0))]
    matrix = np.eye(3)
    matrix[:2, 2], matrix[:2, 0], matrix[:2, 1] = points[0], points[1] - points[0], points[2] - points[0]
    return matrix


def _register(bench: Bench) -> None:
    count, side = scaled(20, bench, 2), scaled(1024, bench, 64)
    fixed, moving, truth = known_pairs(count, side)
    images = [bench.xp.asarray(stack) for stack in (fixed, moving)]

    def check(matrices: Array) -> str:
        worst = float(corner_errors(to_host(matrices), truth, side).max())
        return "" if worst <= 0.1 else f"corners are {worst:.2g} pixels off (RMS)"

    time_arrays(
        bench, f"{count} pairs of slices", images[0], fixed.nbytes + moving.nbytes,
        lambda: register_pairs(*images, max_angle=6).matrices, check,
        peer=lambda: by_simpleitk(fixed[0], moving[0]), peer_name="SimpleITK", share=1 / count,
    )  # fmt: skip


SUITE = suite_of_arrays(
    __doc__,
    {
        "interface-depth-first": partial(_interface, layout="first"),
        "interface-depth-last-view": partial(_interface, layout="view"),
        "interface-depth-last": partial(_interface, layout="last"),
        "interface-edge": _edge,
        "z-overlap": _overlap,
        "mean-projection": _projection,
        "focal-float32": partial(_focal, dtype="float32"),
        "focal-uint16": partial(_focal, dtype="uint16"),
        "resample-tiles": _tiles,
        "register-pairs": _register,
    },
)
