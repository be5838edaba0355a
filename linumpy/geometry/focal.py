"""Focal curvature of the objective in each tile of a mosaic: detection from the tissue surface, and correction.

The focal plane of an objective is slightly curved, so a flat surface looks like a bowl, the same in every tile.

In: the surface of a mosaic and the shape of a tile, or a mosaic. Out: a :class:`FocalCurvature`; the mosaic without
focal curvature, in the memory of the input. In the code v and u are coordinates in a tile, from -1 to 1, and the form
of a curvature is the three coefficients of v², v u and u².
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from linumpy.arrays import Array, DeviceName
from linumpy.device import array_module, is_device_array, require_cuda, to_host, transfers
from linumpy.gpu.kernels import Uploaded, current_queue, uploaded
from linumpy.gpu.oct.shift import shift_along_depth

#: Iterations of reweighting, and Huber's threshold of the residual in robust standard deviations.
_ROUNDS, _HUBER = 8, 1.345
#: A tile is used if the surface is known in at least this share of it.
_MIN_KNOWN = 0.25
#: Maximum voxels of the surface that are fitted, approximately; small tiles have at least 8 along each axis.
_SAMPLES = 2**22


@dataclass(frozen=True, kw_only=True)
class FocalCurvature:
    """Depth that the objective adds to the surface, as a quadratic form of the coordinates in the tile.

    Let v and u be coordinates along the first and the second lateral axis, from -1 at the first voxel of a tile to 1 at
    the last. The surface looks deeper by ``vv v² + vu v u + uu u²`` than at the middle of the tile.

    - `tile_shape` (int, int): voxels of a tile along the lateral axes.
    - `rms`: root mean square of the residual when the mean tile is fitted, in voxels.
    - `tissue` (float, float, float): the same three coefficients for the curvature of the tissue itself, which is not
      corrected.
    """

    tile_shape: tuple[int, int]
    vv: float
    vu: float
    uu: float
    rms: float
    tiles: int
    tissue: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def depth(self) -> np.ndarray:
        """Return the added depth at each A-line of a tile: float64, (height, width), voxels along depth."""
        return self._form(self.vv, self.vu, self.uu)

    def tissue_depth(self) -> np.ndarray:
        """Return the depth of the tissue's own curvature at each A-line of a tile, as :meth:`depth`."""
        return self._form(*self.tissue)

    def _form(self, vv: float, vu: float, uu: float) -> np.ndarray:
        v, u = (_line(np, n) for n in self.tile_shape)
        v, u = v[:, None], u[None, :]
        return vv * v**2 + vu * v * u + uu * u**2


def detect_focal_curvature(surface: Array, tile_shape: tuple[int, int]) -> FocalCurvature:
    """Find the focal curvature from the surface of a mosaic.

    A quadratic is fitted to each tile (robustly: iteratively reweighted least squares, weights of Huber, Robust
    Statistics, 1981). Its plane is subtracted from the tile. A second quadratic is fitted to the mean tile, the median
    over tiles, and contains focal curvature and the curvature of the tissue itself. The latter follows from the planes:
    the slope of curved tissue changes from tile to tile by ``2 vv (tile step)``, whereas focal curvature has the same
    slope in every tile. The median of these changes gives the curvature of the tissue, which is subtracted. Along an
    axis of one tile, tissue is assumed to be flat. The estimate is multiplied by 1 less the ratio of its squared
    standard error over tiles to its square, or by 0: to correct a random curvature would be worse than nothing.

    - `surface` (height, width): depth of the surface in voxels, by
      :func:`linumpy.geometry.interface.find_tissue_interface`. Negative and non-finite values are unknown. The first
      tile begins at its first voxel; incomplete tiles at the end are ignored.
    - `tile_shape` (int, int): voxels of a tile along both axes.

    Returns: Its numbers are on the host.

    Raises `ValueError`: a map that is not of rank 2 or not of real numbers; no complete tile, or none with a known
    surface in a quarter of its voxels; tiles of less than three voxels along an axis.

    Eight numbers are copied to the host, which waits for the device.
    """
    if surface.ndim != 2 or surface.dtype.kind not in "iuf":
        raise ValueError(f"a surface of shape {surface.shape}, {surface.dtype}: a map (height, width) is needed")
    height, width = (int(n) for n in tile_shape)
    if min(height, width) < 3:
        raise ValueError(f"tile_shape={tuple(tile_shape)}: curvature needs tiles of at least 3 voxels along each axis")
    grid = surface.shape[0] // height, surface.shape[1] // width
    if not all(grid):
        raise ValueError(f"a surface of {surface.shape} holds no complete tile of {height} × {width} voxels")
    xp = array_module(surface)
    total = grid[0] * grid[1] * height * width
    step = max(1, min(round((total / _SAMPLES) ** 0.5), min(height, width) // 8))  # between fitted voxels
    complete = surface[: grid[0] * height, : grid[1] * width].reshape(grid[0], height, grid[1], width)
    tiles = complete[:, ::step, :, ::step].astype(np.float64).transpose(0, 2, 1, 3).reshape(grid[0] * grid[1], -1)
    valid = xp.isfinite(tiles) & (tiles >= 0)
    is_used = valid.mean(axis=1) >= _MIN_KNOWN
    terms = _terms(xp, height, width, step)
    fitted = _robust_fit(xp, terms, tiles, valid & is_used[:, None])
    without_planes = xp.where(valid & is_used[:, None], tiles - fitted[:, :3] @ terms[:3], np.nan)
    mean = _nanmedian(xp, without_planes, axis=0)
    mean_known = xp.isfinite(mean)
    mean_fit = _robust_fit(xp, terms, mean[None], mean_known[None])[0]
    residual = xp.where(mean_known, mean - mean_fit @ terms, 0)
    rms = xp.sqrt((residual**2).sum() / xp.maximum(mean_known.sum(), 1))
    of_tiles = xp.where(is_used[:, None], fitted[:, 1:], np.nan)
    tissue = _tissue_curvature(xp, of_tiles[:, :2].reshape(*grid, 2), (height, width))
    focal = mean_fit[3:] - tissue
    focal *= _share_told(xp, focal, of_tiles[:, 2:])
    result = xp.concatenate([focal, tissue, xp.stack([rms, is_used.sum().astype(np.float64)])])
    vv, vu, uu, *of_tissue, rms, tiles_used = (float(number) for number in to_host(result))
    if not tiles_used:
        raise ValueError(f"the surface is known in less than {_MIN_KNOWN:.0%} of every tile: nothing to fit")
    return FocalCurvature(
        tile_shape=(height, width),
        vv=vv,
        vu=vu,
        uu=uu,
        rms=rms,
        tiles=int(tiles_used),
        tissue=(of_tissue[0], of_tissue[1], of_tissue[2]),
    )


def mean_tile(surface: Array, tile_shape: tuple[int, int], *, most: int = 2**24) -> Array:
    """Return the mean tile of a mosaic: the median over tiles of the surface without its plane.

    - `surface`, `tile_shape`: As for :func:`detect_focal_curvature`.
    - `most`: maximum voxels of the surface to use, approximately; of more tiles only every n-th is used.

    Returns: In voxels along depth; its median is 0. NaN where the surface is known in no tile that is used. In the
    memory of the surface.
    """
    height, width = (int(n) for n in tile_shape)
    grid = surface.shape[0] // height, surface.shape[1] // width
    xp = array_module(surface)
    complete = surface[: grid[0] * height, : grid[1] * width].reshape(grid[0], height, grid[1], width)
    tiles = complete.transpose(0, 2, 1, 3).reshape(-1, height, width)
    tiles = tiles[:: max(1, tiles.shape[0] * height * width // most)].astype(np.float64)
    valid = xp.isfinite(tiles) & (tiles >= 0)
    valid &= valid.mean(axis=(1, 2), keepdims=True) >= _MIN_KNOWN
    step = max(1, min(height, width) // 64)  # the planes do not need every A-line
    sample, known = (values[:, ::step, ::step].reshape(len(tiles), -1) for values in (tiles, valid))
    planes = _robust_fit(xp, _terms(xp, height, width, step), sample, known)[:, :3] @ _terms(xp, height, width, 1)[:3]
    mean = _nanmedian(xp, xp.where(valid, tiles - planes.reshape(tiles.shape), np.nan), axis=0)
    return mean - _nanmedian(xp, mean.reshape(-1), axis=0)


def correct_focal_curvature(
    vol: Array,
    curvature: FocalCurvature,
    *,
    depth_axis: int = 0,
    origin: tuple[int, int] = (0, 0),
    interpolate: bool = False,
    wrap: bool = False,
    fill_value: float | None = None,
    device: DeviceName | None = None,
) -> Array:
    """Remove the focal curvature from a mosaic, or a part of it.

    Each A-line is shifted towards the surface by the curvature at its coordinates in its tile, so that a flat surface
    becomes flat; the middle of a tile is not shifted.

    - `vol`: the mosaic or a part of it, of real numbers.
    - `origin` (int, int): lateral offset of the volume's first A-line in the mosaic.
    - `interpolate`: whether to shift by fractions of voxels, with linear interpolation along depth. Otherwise shifts
      are rounded to whole voxels, and the values of voxels do not change.
    - `wrap`: whether voxels that leave at one end enter at the other; otherwise missing voxels are filled.
    - `fill_value`: value of missing voxels. By default the nearest measured voxel of the A-line is repeated: it makes
      no edge that would disturb surface detection. :func:`measured_planes` returns the measured voxels.
    - `device`: where to compute; by default where the volume lies.

    Returns: Of the shape and dtype of `vol`, in its memory.

    Raises `ValueError`, `TypeError`: As :func:`linumpy.gpu.oct.shift.shift_along_depth`. `GpuUnavailableError`:
    `device` is ``"cuda"``, and there is no CUDA device.
    """
    transfer, back = transfers(vol, device)
    moved = transfer(vol)
    form = curvature.vv, curvature.vu, curvature.uu
    queue = current_queue() if is_device_array(moved) else None
    shifts = _shifts(tuple(curvature.tile_shape), form, interpolate, queue).get()
    out = shift_along_depth(moved, shifts, depth_axis=depth_axis, origin=origin, wrap=wrap, fill_value=fill_value)
    return back(out)  # type: ignore[no-any-return]


def measured_planes(
    curvature: FocalCurvature,
    lateral_shape: tuple[int, int],
    planes: int,
    *,
    origin: tuple[int, int] = (0, 0),
    interpolate: bool = False,
    within: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the measured voxels of each A-line after :func:`correct_focal_curvature` without `wrap`.

    - `curvature`, `origin`, `interpolate`: As for :func:`correct_focal_curvature`.
    - `lateral_shape` (int, int): a-lines of the volume along its lateral axes.
    - `planes`: voxels of the volume along depth.
    - `within` (numpy.ndarray, numpy.ndarray): measured voxels before the correction, as this function returns them; by
      default all.

    Returns: The voxels from `first` to before `stop` are measured, all others were filled; `stop` equals `first` for an
    A-line without measured voxels.
    """
    tile = tuple(curvature.tile_shape)
    form = curvature.vv, curvature.vu, curvature.uu
    shifts = _shifts(tile, form, interpolate, None).get()
    # A voxel is computed from the planes at floor(shift) and, with fractions, ceil(shift).
    offsets = [np.clip(f(shifts), -planes, planes).astype(np.int32) for f in (np.floor, np.ceil)]
    index = np.ix_(*((np.arange(n) + b) % size for n, b, size in zip(lateral_shape, origin, tile, strict=True)))
    if within is None:
        first, stop = (np.clip(begin - offset, 0, planes) for begin, offset in zip((0, planes), offsets, strict=True))
        return first[index], np.maximum(stop, first)[index]
    first, stop = (np.clip(begin - offset[index], 0, planes) for begin, offset in zip(within, offsets, strict=True))
    return first, np.maximum(stop, first)


@functools.lru_cache(maxsize=8)
def _shifts(
    tile_shape: tuple[int, int],
    form: tuple[float, float, float],
    interpolate: bool,
    queue: tuple[int, int, int] | None,
) -> Uploaded:
    """Return the shift of each A-line of a tile; cached, because all slabs of a mosaic use the same shifts."""
    vv, vu, uu = form
    depth = FocalCurvature(tile_shape=tile_shape, vv=vv, vu=vu, uu=uu, rms=0.0, tiles=0).depth()
    shifts = depth.astype(np.float32) if interpolate else np.floor(depth + 0.5).astype(np.int32)
    shifts.setflags(write=False)
    return Uploaded(shifts, None) if queue is None else uploaded(require_cuda().asarray(shifts))


def _line(xp: ModuleType, n: int) -> Array:
    """Return coordinates along an axis of a tile, from -1 to 1."""
    return xp.arange(n, dtype=np.float64) / max(1, n - 1) * 2 - 1


def _terms(xp: ModuleType, height: int, width: int, step: int) -> Array:
    """Return the terms of a quadratic at every step-th A-line, a row for each term: 1, v, u, v², v u, u²."""
    v, u = xp.meshgrid(_line(xp, height)[::step], _line(xp, width)[::step], indexing="ij")
    v, u = v.reshape(-1), u.reshape(-1)
    return xp.stack([xp.ones_like(v), v, u, v * v, v * u, u * u])


def _robust_fit(xp: ModuleType, terms: Array, values: Array, valid: Array) -> Array:
    """Fit all terms to each row of values; return their coefficients, (rows, terms)."""
    count = terms.shape[0]
    products = (terms[:, None, :] * terms[None, :, :]).reshape(count * count, -1)
    values = xp.where(valid, values, 0)
    weights = valid.astype(np.float64)
    # Too small to change the fit, and large enough that a row without voxels has the solution 0.
    ridge = 1e-9 * xp.eye(count)
    for _ in range(_ROUNDS):
        matrix = (weights @ products.T).reshape(-1, count, count) + ridge
        fit = xp.linalg.solve(matrix, ((weights * values) @ terms.T)[:, :, None])[:, :, 0]
        residual = xp.abs(values - fit @ terms)
        scale = 1.4826 * _nanmedian(xp, xp.where(valid, residual, np.nan), axis=1)[:, None]
        limit = _HUBER * xp.maximum(xp.nan_to_num(scale), 1e-6)
        weights = valid * (limit / xp.maximum(residual, limit))
    return fit


def _share_told(xp: ModuleType, focal: Array, of_tiles: Array) -> Array:
    """Return the share of an estimate to keep: 1 less the ratio of its squared standard error to its square, or 0.

    The standard error follows from the spread of the coefficients of the tiles, (tiles, 3). Of a single tile it is
    unknown, and the estimate is kept.
    """
    count = (~xp.isnan(of_tiles[:, 0])).sum()
    spread = 1.4826 * _nanmedian(xp, xp.abs(of_tiles - _nanmedian(xp, of_tiles, axis=0)), axis=0)
    # Variances of v², v u and u² over a tile weight the coefficients, so that squares are those of a depth.
    weights = xp.asarray([4 / 45, 1 / 9, 4 / 45])
    noise = xp.nan_to_num((weights * spread**2).sum()) / xp.maximum(count, 1)
    return xp.clip(1 - noise / xp.maximum((weights * focal**2).sum(), 1e-12), 0, 1)


def _tissue_curvature(xp: ModuleType, slopes: Array, tile_shape: tuple[int, int]) -> Array:
    """Compute the tissue's curvature (v², v u, u²) from how slopes, (rows, columns, 2), change from tile to tile."""
    step_v, step_u = (2 * n / (n - 1) for n in tile_shape)  # from tile to tile, in v and u
    zero = xp.zeros(1)
    along_v, along_u = xp.diff(slopes, axis=0).reshape(-1, 2), xp.diff(slopes, axis=1).reshape(-1, 2)
    vv = along_v[:, 0] / (2 * step_v)
    uu = along_u[:, 1] / (2 * step_u)
    vu = xp.concatenate([along_v[:, 1] / step_v, along_u[:, 0] / step_u])
    # Without neighbouring tiles the curvature is 0.
    return xp.stack([xp.nan_to_num(_nanmedian(xp, term if term.size else zero, axis=0)) for term in (vv, vu, uu)])


def _nanmedian(xp: ModuleType, values: Array, axis: int) -> Array:
    """Return the median of all values but NaN, and NaN without any; as NumPy's ``nanmedian``, without a warning."""
    ordered = xp.sort(values, axis=axis)  # NaN goes last
    count = (~xp.isnan(ordered)).sum(axis=axis, keepdims=True)
    size = ordered.shape[axis]
    low, high = (xp.clip(index, 0, size - 1) for index in ((count - 1) // 2, count // 2))
    middle = (xp.take_along_axis(ordered, low, axis) + xp.take_along_axis(ordered, high, axis)) / 2
    return xp.where(count > 0, middle, np.nan).squeeze(axis)
