"""Cut surfaces of slices, and faces: projections of the planes that two slices share.

In: opened slices. Out: a plane through the cut surface of each slice; faces, which are images of some planes of a
slice, averaged along Z and over blocks of A-lines. Planes of a face are counted from the cut surface. Voxels that are
0, not finite or filled by focal correction are not valid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

import numpy as np

from linumpy.arrays import Array
from linumpy.device import array_module, to_host
from linumpy.mosaic.io.image import MosaicImage
from linumpy.mosaic.io.tiles import Box, read_box
from linumpy.mosaic.options import SurfaceMethod
from linumpy.mosaic.surface import surface_of, zero_log_of
from linumpy.progress import progress_bar
from linumpy.registration.pairs import block_means
from linumpy.registration.robust import robust_deviation
from linumpy.resample.tile_work import TileWork

#: Maximum number of columns along Y and X in which the surface is searched, and their width in voxels.
_COLUMNS, _WIDTH = 5, 48
#: Approximate bytes of the voxels of a face that are read at once.
_TILE_BYTES = 2**26

#: Minimum number of planes of a face, if the slices have as many.
_MIN_PLANES = 4
#: Values of a face below this fraction of its median count as that, because their logarithm would be mostly noise.
_DARKEST = 0.05

#: Coordinates: numbers, or arrays of NumPy or CuPy.
_Coordinate = TypeVar("_Coordinate", float, np.ndarray, Array)


@dataclass(frozen=True)
class CutSurface:
    """The plane at which a slice begins: A-line (y, x) begins at ``first + slopes[0] * y + slopes[1] * x`` along Z.

    - `first`: depth at the first A-line, in voxels along Z.
    - `slopes` (float, float): voxels along Z for each voxel along Y and X.
    """

    first: float = 0.0
    slopes: tuple[float, float] = (0.0, 0.0)

    def at(self, y: _Coordinate, x: _Coordinate) -> _Coordinate:
        """Return the depth of the surface at voxels `y` and `x`, in voxels."""
        return self.first + self.slopes[0] * y + self.slopes[1] * x


@dataclass(frozen=True)
class Face:
    """Planes of a slice, counted from its cut surface.

    - `number`: index of the slice among all slices.
    - `start`, `stop`: first plane, and the plane after the last one.
    """

    number: int
    start: int
    stop: int


def find_surfaces(images: Sequence[MosaicImage], method: SurfaceMethod, work: TileWork) -> list[CutSurface]:
    """Fit a plane through the cut surface of each slice, from columns (boxes of the whole depth) spread over the slice.

    If no surface is found, the slice begins at its first plane.
    """
    device = work.device  # The functions below are sent to workers, which `work` cannot be.
    points: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {number: [] for number in range(len(images))}
    zero_logs = [zero_log_of(image, method) for image in images]

    def read(name: tuple[int, Box]) -> Array:
        number, box = name
        return images[number].read_filled(box, device)

    def find(name: tuple[int, Box], column: Array) -> tuple[np.ndarray, np.ndarray]:
        number, box = name
        depths = to_host(surface_of(column, method, 0, zero_logs[number])).astype(np.float64)
        y, x = np.meshgrid(*(np.arange(e.start, e.stop, dtype=np.float64) for e in box[1:]), indexing="ij")
        is_found = np.isfinite(depths)
        return np.array([y[is_found], x[is_found]]), depths[is_found]

    columns = [(n, box) for n, image in enumerate(images) for box in _columns(image)]
    with progress_bar("surfaces", len(columns), "column") as advance:
        work(
            columns, read, find, lambda name, samples: points[name[0]].append(samples), done=lambda _: advance(1)
        )  # fmt: skip
    return [
        _plane(np.concatenate([p for p, _ in samples], axis=1), np.concatenate([d for _, d in samples]))
        for samples in points.values()
    ]


def _columns(image: MosaicImage) -> list[Box]:
    """Choose columns of whole depth, spread over a slice."""
    depth, *sizes = image.array.shape
    out = []
    counts = [min(_COLUMNS, -(-n // _WIDTH)) for n in sizes]
    for row in range(counts[0]):
        for column in range(counts[1]):
            begins = [(n - min(n, _WIDTH)) * k // max(1, m - 1) if m > 1 else (n - min(n, _WIDTH)) // 2
                      for n, k, m in zip(sizes, (row, column), counts, strict=True)]  # fmt: skip
            lateral = (slice(b, min(b + _WIDTH, n)) for b, n in zip(begins, sizes, strict=True))
            out.append((slice(0, depth), *lateral))
    return out


def _plane(points: np.ndarray, depths: np.ndarray) -> CutSurface:
    """Fit a plane; A-lines whose surface is far from it, as in agarose or bubbles, get little weight."""
    if not len(depths):
        return CutSurface()
    # Normal equations take a tenth of the time of lstsq on all points; centred coordinates keep them well conditioned.
    middle = points.mean(axis=1)
    terms = np.stack([np.ones(len(depths)), *(points - middle[:, None])])
    weights, fit = np.ones(len(depths)), np.zeros(len(terms))
    for _ in range(20):
        weighted = terms * weights
        fit = np.linalg.lstsq(weighted @ terms.T, weighted @ depths, rcond=None)[0]
        distances = np.abs(depths - fit @ terms)
        spread = max(robust_deviation(distances), 0.25)
        weights = 1 / (1 + (distances / (2 * spread)) ** 2) ** 2
    return CutSurface(float(fit[0] - fit[1:] @ middle), (float(fit[1]), float(fit[2])))


def read_faces(
    images: Sequence[MosaicImage], surfaces: Sequence[CutSurface], faces: Sequence[Face], factor: int, work: TileWork
) -> dict[Face, np.ndarray]:
    """Read faces: the mean of the valid voxels of each block of `factor` × `factor` A-lines is a pixel.

    A pixel is NaN unless half of its A-lines are valid; an A-line is valid if half of its voxels in the planes are.
    """
    out = {
        face: np.full([n // factor for n in images[face.number].array.shape[1:]], np.nan, np.float32) for face in faces
    }
    names = [(face, box) for face in faces for box in _tiles(images[face.number], surfaces[face.number], face, factor)]
    device = work.device

    def average(name: tuple[Face, Box], voxels: Array) -> np.ndarray:
        face, box = name
        xp = array_module(voxels)
        z, y, x = (line.astype(np.float32) for line in xp.ogrid[box])
        depth = z - surfaces[face.number].at(y, x)
        # The share of each voxel that lies in the planes of the face, which begin at another depth in each A-line.
        half = np.float32(0.5)
        share = xp.minimum(depth + half, face.stop - half) - xp.maximum(depth - half, face.start - half)
        valid = images[face.number].valid_voxels(box, voxels)
        share = xp.where(valid, xp.clip(share, 0, 1), 0).astype(np.float32)
        total = share.sum(axis=0)
        is_valid_line = total * 2 >= face.stop - face.start
        line = (xp.where(valid, voxels, 0) * share).sum(axis=0) / xp.maximum(total, half)
        line = xp.where(is_valid_line, line, np.float32(np.nan))
        means, valid = block_means(line[None], (factor, factor))
        return to_host(xp.where(valid, means, np.float32(np.nan))[0])

    def keep(name: tuple[Face, Box], means: np.ndarray) -> None:
        face, box = name
        pixels = tuple(
            slice(e.start // factor, e.start // factor + n) for e, n in zip(box[1:], means.shape, strict=True)
        )
        out[face][pixels] = means

    def read(name: tuple[Face, Box]) -> Array:
        return read_box(images[name[0].number].array, name[1], device)

    with progress_bar("faces", len(names), "tile") as advance:
        work(names, read, average, keep, done=lambda _: advance(1))
    return out


def _tiles(image: MosaicImage, surface: CutSurface, face: Face, factor: int) -> list[Box]:
    """Cut a face into boxes of whole pixels, each with the planes of the face in these A-lines."""
    depth, *sizes = image.array.shape
    planes = face.stop - face.start + 2
    side = max(1, math.isqrt(_TILE_BYTES // (planes * image.array.dtype.itemsize)))
    steps = [max(factor, min(max(side // c, 1) * c, n) // factor * factor)
             for c, n in zip(image.array.chunks[1:], sizes, strict=True)]  # fmt: skip
    out: list[Box] = []
    for y in range(0, sizes[0] // factor * factor, steps[0]):
        for x in range(0, sizes[1] // factor * factor, steps[1]):
            rows, columns = slice(y, min(y + steps[0], sizes[0])), slice(x, min(x + steps[1], sizes[1]))
            corners = [surface.at(j, i) for j in (y, rows.stop - 1) for i in (x, columns.stop - 1)]
            begin = max(0, math.floor(min(corners)) + face.start)
            end = min(depth, math.ceil(max(corners)) + face.stop + 1)
            if begin < end:
                out.append((slice(begin, end), rows, columns))
    return out


def logarithm(face: np.ndarray) -> np.ndarray:
    """Return the logarithm of a face: shadows and gains, which are factors, become terms that can be subtracted."""
    positive = face[face > 0]
    darkest = _DARKEST * float(np.median(positive)) if positive.size else 1.0
    return np.log(np.maximum(face, np.float32(darkest)))


def stacked(
    faces: Sequence[np.ndarray], offsets: Sequence[Sequence[int]], shape: Sequence[int], xp: ModuleType
) -> Array:
    """Return images of one shape, each with a face at its offset and NaN around it, in the memory of `xp`."""
    out = np.full((len(faces), *shape), np.nan, np.float32)
    for image, face, (y, x) in zip(out, faces, offsets, strict=True):
        image[y : y + face.shape[0], x : x + face.shape[1]] = face
    return xp.asarray(out)


def planes_of(
    pairs: Sequence[tuple[int, int]], numbers: Sequence[int], depths: Sequence[int], interval: float, rim: int,
    max_planes: int,
) -> list[tuple[Face, Face]]:  # fmt: skip
    """Plan the faces of each pair: planes that show the same tissue or, if too few do, the nearest planes.

    - `pairs` (int, int): indices of the two slices among all slices.
    - `numbers`, `depths`: number of each slice, and how many of its planes below the cut surface are used.
    - `interval`: number of planes that are cut off between slices of consecutive numbers.
    - `rim`: number of planes that are left out below a cut surface.
    - `max_planes`: maximum number of planes of a face. Of the shared planes the uppermost are taken: deeper planes show
      more shadows of the tissue above, which displace the match.

    Returns: Planes of the fixed and of the moving slice of each pair.
    """
    out = []
    for fixed, moving in pairs:
        min_planes = max(1, min(_MIN_PLANES, max_planes, depths[fixed] - rim, depths[moving] - rim))
        first = round(interval * (numbers[moving] - numbers[fixed]))
        shared = min(depths[fixed] - first, depths[moving])
        if shared - rim >= min_planes:
            shared = min(shared, rim + max_planes)
            out.append((Face(fixed, first + rim, first + shared), Face(moving, rim, shared)))
        else:
            out.append((Face(fixed, depths[fixed] - min_planes, depths[fixed]), Face(moving, rim, rim + min_planes)))
    return out
