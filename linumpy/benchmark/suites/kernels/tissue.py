"""Work on tissue. The peer of most cases is the same work written with CuPy's array functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Makers, kernel_case, kernel_suite, scaled
from linumpy.benchmark.suites.kernels.registration import register_case
from linumpy.device import array_module, to_host
from linumpy.geometry.focal import FocalCurvature, correct_focal_curvature
from linumpy.gpu.oct.correlation import central_half, overlap_correlations
from linumpy.gpu.oct.projection import project
from linumpy.gpu.oct.resample_tiles import resample_tiles
from linumpy.gpu.oct.surface import find_tissue_interface
from linumpy.gpu.oct.surface_filters import SurfaceOptions, interface_by_filters, ndimage_module
from linumpy.plan.grid.tile_grid import TileAxis
from linumpy.testing.synthetic import MosaicSpec, block

_DESCRIPTION = """Time the work on tissue, beside the same work written with CuPy's array functions, on this GPU.

Timed are the tissue interface (200×1024×1024 float32; depth first, depth last as a view of that, depth last in
memory), the Z overlap (41 candidates of 512×512; the peer with views, as one writes it, and with contiguous copies),
the mean projection along Z (512³ uint16), the correction of focal curvature (the peer rolls A-line after A-line; 256
of them are timed, and their time is scaled to all), the tiles of a mosaic grid at twice their voxel spacing (16 of 128³
uint16; the peer filters and interpolates one after another) and the rigid registration of 20 pairs of 1024² float32
(the peer is SimpleITK on the CPU; one pair is timed, and its time is scaled to all).

Each result is checked first: surfaces against SciPy on the CPU, correlations against the definition, and so on. A wrong
result is reported as WRONG and has no time. Times are medians, by CUDA events after warm-ups; × is the peer's time
divided by linumpy's; "× copy" is the rate of the minimum of bytes to read and write, relative to a plain copy.

For example:
  linum-benchmark tissue
  linum-benchmark tissue --only interface-depth-first mean-projection --runs 50 --json tissue.json
"""


def oct_volume(xp: ModuleType, scale: float, dtype: str = "float32") -> Array:
    """Make an OCT mosaic of shape (200, 1024, 1024) times the scale, of 4 × 4 copies of a synthetic tile."""
    depth, side = scaled(200, scale), scaled(256, scale)
    spec = MosaicSpec(tiles=(1, 1), tile_shape=(depth, side, side), dtype=dtype, water_um=depth * 5 * 0.3)
    return xp.tile(xp.asarray(block(spec, (0, 0, 0), spec.shape)), (1, 4, 4))


def _in_layout(xp: ModuleType, scale: float, layout: str) -> tuple[Array, int]:
    """Return a mosaic and its depth axis: depth ``"first"``, ``"last"`` in memory, or last in a ``"view"``."""
    vol = oct_volume(xp, scale)
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


def _interface(xp: ModuleType, scale: float, layout: str) -> Case:
    vol, axis = _in_layout(xp, scale, layout)
    options = SurfaceOptions(depth_axis=axis)

    def check(surface: Array) -> str:
        wrong = _corner_differs(vol, options, surface, _surfaces_differ)
        return wrong or _surfaces_differ(to_host(surface), to_host(peer()))

    def peer() -> Array:
        return _chain_depth_first(vol) if axis == 0 else interface_by_filters(vol, options)[0]

    name = {"first": "interface-depth-first", "view": "interface-depth-last-view", "last": "interface-depth-last"}
    ours = lambda: find_tissue_interface(vol, depth_axis=axis)  # noqa: E731
    return kernel_case(name[layout], vol, ours, peer, check, vol.nbytes, 10.0 if layout == "first" else 20.0)


def _edge(xp: ModuleType, scale: float, layout: str) -> Case:
    """Make the case of the surface's edge; the peer, linumpy's steepest rise, may be 1.3 times as fast."""
    vol, axis = _in_layout(xp, scale, layout)
    options = SurfaceOptions(depth_axis=axis, edge=True, min_contrast=0)

    def edges_differ(edges: np.ndarray, expected: np.ndarray) -> str:
        differs = ~np.isclose(edges, expected, atol=0.01, equal_nan=True)
        return f"{int(differs.sum())} of {differs.size} edges differ" if differs.mean() > 0.001 else ""

    return kernel_case(
        f"interface-edge-{layout}", vol,
        lambda: find_tissue_interface(vol, depth_axis=axis, definition="edge", min_contrast=0),
        lambda: find_tissue_interface(vol, depth_axis=axis),
        lambda surface: _corner_differs(vol, options, surface, edges_differ),
        vol.nbytes, 1 / 1.3, peer_name="steepest rise",
    )  # fmt: skip


def _chain_depth_first(vol: Array, s_xy: int = 15, s_z: float = 2) -> Array:
    """Find the surface by filters along the axes of `vol`, depth first: memory is then read in order."""
    xp, ndimage = array_module(vol), ndimage_module(vol)
    values = xp.log(xp.where(vol > 0, vol, np.float32(1)).astype(np.float32))
    smooth = ndimage.uniform_filter(values, (1, s_xy, s_xy))
    surface = ndimage.gaussian_filter1d(smooth, s_z, axis=0, order=1).argmax(axis=0)
    return xp.minimum(xp.ceil(surface + s_z / 2), vol.shape[0] - 1).astype(np.int32)


def _surfaces_differ(surface: np.ndarray, expected: np.ndarray) -> str:
    difference = np.abs(surface.astype(np.int64) - expected)
    if (difference > 0).mean() > 1e-3:
        return f"{(difference > 0).mean():.2%} of A-lines differ"
    return f"an A-line differs by {difference.max()} voxels" if difference.max() > 1 else ""


def _overlap(xp: ModuleType, scale: float, *, contiguous: bool) -> Case:
    rng = np.random.default_rng(0)
    side, middle, reach = scaled(1024, scale), scaled(80, scale), 20 if scale == 1 else 5
    planes = max(scaled(128, scale), middle + reach)
    shared = xp.asarray(rng.gamma(2.0, 40.0, (middle, side, side)).astype(np.float32))
    fixed, moving = (xp.tile(shared[:1], (planes, 1, 1)) for _ in range(2))
    fixed[-middle:], moving[:middle] = shared, shared * np.float32(0.5) + np.float32(3)
    candidates = list(range(middle - reach, middle + reach + 1))
    centres = central_half(fixed), central_half(moving)

    def peer() -> np.ndarray:
        return np.array([_pearson(xp, *centres, n, contiguous=contiguous) for n in candidates])

    def check(result: Array) -> str:
        correlations = to_host(result)
        best = candidates[int(correlations.argmax())]
        if best != middle:
            return f"an overlap of {best}, not {middle}"
        worst = float(np.abs(correlations - peer()).max())
        return f"correlations differ by {worst:.2g}" if worst > 1e-4 else ""

    return kernel_case(
        "z-overlap-contiguous" if contiguous else "z-overlap", centres[0],
        lambda: overlap_correlations(*centres, candidates), peer, check,
        2 * 4 * max(candidates) * centres[0].shape[1] * centres[0].shape[2], None if contiguous else 300.0,
    )  # fmt: skip


def _pearson(xp: ModuleType, fixed: Array, moving: Array, n: int, *, contiguous: bool) -> float:
    """Compute the correlation of one overlap of views, or of contiguous copies, which CuPy sums far faster."""
    a, b = fixed[-n:], moving[:n]
    if contiguous:
        a, b = xp.ascontiguousarray(a), xp.ascontiguousarray(b)
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / xp.sqrt((a * a).sum() * (b * b).sum()))


def _projection(xp: ModuleType, scale: float) -> Case:
    shape = (scaled(512, scale),) * 3
    plane = np.random.default_rng(0).integers(0, 65536, shape[1:], np.uint16)
    vol = xp.arange(shape[0], dtype=np.uint16)[:, None, None] * np.uint16(97) + xp.asarray(plane)

    def check(result: Array) -> str:
        worst = float(xp.abs(result - vol.mean(axis=0, dtype=np.float64)).max())
        return f"means differ by {worst:.2g}" if worst > 0.01 else ""

    nbytes = vol.nbytes + 4 * shape[1] * shape[2]
    return kernel_case("mean-projection", vol, lambda: project(vol, 0), lambda: vol.mean(axis=0), check, nbytes, 2.5)


def _focal(xp: ModuleType, scale: float, dtype: str) -> Case:
    vol = oct_volume(xp, scale, dtype)
    side = vol.shape[1] // 4
    curvature = FocalCurvature(tile_shape=(side, side), vv=4.0, vu=0.5, uu=3.0, rms=0.0, tiles=16)
    shifts = np.floor(curvature.depth() + 0.5).astype(int)
    rolled = min(vol.shape[2], 256)  # A-lines

    def peer() -> Array:
        out = vol[:, 0].copy()
        for x in range(rolled):
            out[:, x] = xp.roll(vol[:, 0, x], -int(shifts[0, x % side]))
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

    return kernel_case(
        f"focal-{dtype}", vol, lambda: correct_focal_curvature(vol, curvature), peer, check, 2 * vol.nbytes,
        peer_share=rolled / (vol.shape[1] * vol.shape[2]), copy_reach=0.5,
    )  # fmt: skip


def _tiles(xp: ModuleType, scale: float) -> Case:
    count, side = 4, scaled(128, scale)
    part = resampled_part((side, count * side, count * side), side)
    rng = np.random.default_rng(0)
    vol = xp.asarray(rng.integers(0, 60000, [axis.size for axis in part], np.uint16))
    indices = itertools.product((0,), range(count), range(count))
    boxes = [tuple(slice(i * side, (i + 1) * side) for i in index) for index in indices]

    def peer() -> Array:
        ndimage = ndimage_module(vol)
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

    return kernel_case("resample-tiles", vol, lambda: resample_tiles(vol, part), peer, check, vol.nbytes * 9 // 8)


def resampled_part(shape: tuple[int, ...], side: int) -> tuple[TileAxis, ...]:
    """Return the axes of a volume that is cut into cubic tiles, with half the voxels along each axis in the result."""
    return tuple(TileAxis(n, side, side // 2) for n in shape)


#: The cases, in order.
MAKERS: Makers = {
    "interface-depth-first": partial(_interface, layout="first"),
    "interface-depth-last-view": partial(_interface, layout="view"),
    "interface-depth-last": partial(_interface, layout="last"),
    "interface-edge-first": partial(_edge, layout="first"),
    "interface-edge-last": partial(_edge, layout="last"),
    "z-overlap": partial(_overlap, contiguous=False),
    "z-overlap-contiguous": partial(_overlap, contiguous=True),
    "mean-projection": _projection,
    "focal-float32": partial(_focal, dtype="float32"),
    "focal-uint16": partial(_focal, dtype="uint16"),
    "resample-tiles": _tiles,
    "register-pairs": register_case,
}

SUITE = kernel_suite("tissue", _DESCRIPTION, MAKERS, 20, "Shrink every axis.")
