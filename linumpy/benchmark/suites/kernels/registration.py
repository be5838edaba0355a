"""Registration of pairs of slices, beside SimpleITK, which registers one pair on the CPU."""

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

#: Pairs at full scale, their size, and the promised error in pixels at the corners.
_PAIRS, _SIDE, _PIXELS = 20, 1024, 0.1


def known_pairs(
    count: int, side: int, *, noise: float = 0.3, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Make pairs of images of one structure, turned by up to 3° and shifted by up to 3 % of the side.

    Returns
    -------
    fixed, moving : numpy.ndarray of float32, (count, side, side)
        The moving images have another gain and offset; both have noise.
    matrices : numpy.ndarray, (count, 3, 3)
        From the fixed to the moving image, in pixels.
    """
    from scipy import ndimage

    rng, margin = np.random.default_rng(seed), side // 8
    fixed, moving, matrices = [], [], []
    for _ in range(count):
        whole = ndimage.gaussian_filter(rng.standard_normal((side + 2 * margin,) * 2), 2.5)
        whole /= whole.std()
        angle, shift = np.radians(rng.uniform(-3, 3)), rng.uniform(-0.03, 0.03, 2) * side
        matrix, centre = np.eye(3), (side - 1) / 2 * np.ones(2)
        matrix[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
        matrix[:2, 2] = centre - matrix[:2, :2] @ centre + shift
        back = np.linalg.inv(matrix)
        moved = ndimage.affine_transform(whole, back[:2, :2], back[:2, 2] + margin, (side, side))
        fixed.append(whole[margin:-margin, margin:-margin] + noise * rng.standard_normal((side, side)))
        moving.append(2 * (moved + noise * rng.standard_normal((side, side))) + 10)
        matrices.append(matrix)
    return np.array(fixed, np.float32), np.array(moving, np.float32), np.array(matrices)


def corner_errors(matrices: np.ndarray, truth: np.ndarray, side: int) -> np.ndarray:
    """Return the root mean square error of each pair at the corners, in pixels."""
    corners = np.array([[y, x, 1] for y in (0, side - 1) for x in (0, side - 1)]).T
    errors: np.ndarray = ((matrices - truth) @ corners)[:, :2]
    return np.sqrt((errors**2).sum(axis=1).mean(axis=1))


def by_simpleitk(fixed: np.ndarray, moving: np.ndarray) -> np.ndarray:
    """Register one pair by SimpleITK: correlation, B-splines, three resolutions; returns the matrix in pixels."""
    import SimpleITK as itk  # noqa: N813

    images = [itk.GetImageFromArray(image) for image in (fixed, moving)]
    method = itk.ImageRegistrationMethod()
    method.SetMetricAsCorrelation()
    method.SetOptimizerAsRegularStepGradientDescent(1.0, 1e-5, 300, relaxationFactor=0.7)
    method.SetOptimizerScalesFromPhysicalShift()
    method.SetShrinkFactorsPerLevel([4, 2, 1])
    method.SetSmoothingSigmasPerLevel([4, 2, 1])
    method.SetInterpolator(itk.sitkBSpline)
    transform = itk.CenteredTransformInitializer(
        *images, itk.Euler2DTransform(), itk.CenteredTransformInitializerFilter.GEOMETRY
    )
    method.SetInitialTransform(transform, inPlace=True)
    method.Execute(*images)
    # SimpleITK's coordinates have x first.
    points = [np.array(transform.TransformPoint(point))[::-1] for point in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0))]
    matrix = np.eye(3)
    matrix[:2, 2], matrix[:2, 0], matrix[:2, 1] = points[0], points[1] - points[0], points[2] - points[0]
    return matrix


def register_case(xp: ModuleType, scale: float) -> Case:
    """Describe the case: linumpy registers all pairs, and SimpleITK one of them."""
    count, side = scaled(_PAIRS, scale, 2), scaled(_SIDE, scale, 64)
    fixed, moving, truth = known_pairs(count, side)
    search, images = PairSearch(max_angle=6), [xp.asarray(stack) for stack in (fixed, moving)]

    def check(matrices: Array) -> str:
        worst = float(corner_errors(to_host(matrices), truth, side).max())
        return "" if worst <= _PIXELS else f"a corner is {worst:.2g} pixels off"

    @contextmanager
    def peer() -> Iterator[Prepared]:
        peer_module("SimpleITK")
        yield Prepared(lambda: by_simpleitk(fixed[0], moving[0]))

    case = kernel_case(
        "register-pairs", images[0], lambda: register_pairs(*images, search=search).matrices,
        lambda: None, check, fixed.nbytes + moving.nbytes, peer_share=1 / count, peer_name="SimpleITK",
    )  # fmt: skip
    return replace(case, entries=(case.entries[0], replace(case.entries[1], prepare=peer)))
