"""A case of the suite ``tissue``: linumpy registers all pairs of slices in one batch, SimpleITK one pair on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.benchmark.cases import Case, Prepared, kernel_case, peer_module, scaled
from linumpy.device import to_host
from linumpy.registration.pairs import PairSearch, register_pairs

#: Number of pairs and side of the images at scale 1; maximum RMS error of a pair at the corners, in pixels.
_PAIR_COUNT, _SIDE, _MAX_CORNER_RMS = 20, 1024, 0.1


def known_pairs(
    count: int, side: int, *, noise: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make pairs of synthetic images: the moving image is rotated by up to 3° and shifted by up to 3 % of the side.

    Returns
    -------
    fixed, moving : numpy.ndarray of float32, (count, side, side)
        Moving images have a gain of 2 and an offset of 10; each image has noise of its own.
    matrices : numpy.ndarray, (count, 3, 3)
        Map (y, x, 1) of the fixed image to the moving image, in pixels.
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
    import SimpleITK as sitk  # noqa: N813

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


def register_case(xp: ModuleType, scale: float) -> Case:
    """Make the case ``register-pairs``; the result of SimpleITK is not checked."""
    count, side = scaled(_PAIR_COUNT, scale, 2), scaled(_SIDE, scale, 64)
    fixed, moving, truth = known_pairs(count, side)
    search, images = PairSearch(max_angle=6), [xp.asarray(stack) for stack in (fixed, moving)]

    def check(matrices: Array) -> str:
        worst = float(corner_errors(to_host(matrices), truth, side).max())
        return (
            "" if worst <= _MAX_CORNER_RMS else f"corners are {worst:.2g} pixels off (RMS), more than {_MAX_CORNER_RMS}"
        )

    @contextmanager
    def peer() -> Iterator[Prepared]:
        peer_module("SimpleITK")
        yield Prepared(lambda: by_simpleitk(fixed[0], moving[0]))

    # The peer of `kernel_case` is a placeholder: SimpleITK may be missing, which `prepare` reports.
    case = kernel_case(
        "register-pairs", images[0], lambda: register_pairs(*images, search=search).matrices,
        lambda: None, check, fixed.nbytes + moving.nbytes, peer_share=1 / count, peer_name="SimpleITK",
    )  # fmt: skip
    return replace(case, entries=(case.entries[0], replace(case.entries[1], prepare=peer)))
