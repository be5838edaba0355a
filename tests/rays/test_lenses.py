"""If this fails, a lens maps a pixel to a wrong ray, or back to another pixel."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from linumpy.rays.images import LENSES, Image, Images, PixelCDF
from tests.support.oracles.ray_scenes import drawn_rays
from tests.support.oracles.slow_rays import world_ray

pytestmark = pytest.mark.needs_core

SIZE = (60, 80)
FOCAL, PRINCIPAL = (70.0, 65.0), (39.0, 31.5)
PARAMS = {
    "opencv": (-0.21, 0.06, 0.004, -0.003),
    "opencv_fisheye": (0.08, -0.03, 0.01, -0.002),
    "ftheta": (0.0, 0.016, 1e-5, 2e-7, -1e-9),
}


def image(lens, **options):
    options = {"lens_params": PARAMS.get(lens, ()), "focal": FOCAL, "principal": PRINCIPAL} | options
    if lens == "equirectangular":
        options["focal"] = (20.0, 25.0)
    return Image(np.zeros((*SIZE, 4), "u1"), lens=lens, **options)


def ray_at(one, column, row):
    """Origin and direction of the ray through the centre of a pixel."""
    weights = np.zeros(one.pixels.shape[:2])
    weights[row, column] = 1
    found, _ = drawn_rays([replace(one, pixel_cdf=PixelCDF.from_weights(weights))], 1, snap_to_pixel_centers=True)
    assert np.allclose(found.uv[0] * one.pixels.shape[1::-1], (column + 0.5, row + 0.5), atol=1e-3)
    return found.rays[0, :3], found.rays[0, 3:]


def rays_of(one, n=400):
    """Origins, directions and places of rays through random places of an image."""
    found, _ = drawn_rays([one], n)
    return found.rays[:, :3], found.rays[:, 3:], *found.uv.astype(float).T


def project(lens, direction, origin):
    """From a direction in the camera's axes back to the pixel, in float64; OpenCV's documentation, and geometry."""
    x, y, z = direction.T.astype(float)
    k, (fx, fy), (cx, cy) = PARAMS.get(lens), FOCAL, PRINCIPAL
    if lens in ("perspective", "opencv"):
        x, y = x / z, y / z
        if lens == "opencv":
            r2 = x * x + y * y
            radial = 1 + k[0] * r2 + k[1] * r2**2
            x, y = (
                x * radial + 2 * k[2] * x * y + k[3] * (r2 + 2 * x * x),
                y * radial + k[2] * (r2 + 2 * y * y) + 2 * k[3] * x * y,
            )
    elif lens in ("opencv_fisheye", "ftheta"):
        side, theta = np.hypot(x, y), np.arctan2(np.hypot(x, y), z)
        if lens == "opencv_fisheye":
            r = theta * (1 + k[0] * theta**2 + k[1] * theta**4 + k[2] * theta**6 + k[3] * theta**8)
        else:
            r = np.array([_root(k, one) for one in theta])
            fx = fy = 1.0
        x, y = x / side * r, y / side * r
    elif lens == "orthographic":
        assert np.allclose(direction, (0, 0, 1))
        x, y = origin.T[:2]
    else:
        longitude, latitude = np.arctan2(x, z), np.arcsin(y)
        if lens == "latlong":
            return (longitude / (2 * math.pi) + 0.5) * SIZE[1], (latitude / math.pi + 0.5) * SIZE[0]
        x, y, (fx, fy) = longitude, latitude, (20.0, 25.0)
    return x * fx + cx, y * fy + cy


def _root(k, theta):
    """The smallest distance at which the polynomial reaches an angle."""
    roots = np.roots([*k[:0:-1], k[0] - theta])
    return min(r.real for r in roots if abs(r.imag) < 1e-9 and r.real >= 0)


@pytest.mark.parametrize("lens", LENSES)
def test_the_inverse_gives_the_pixel_back(lens):
    origin, direction, u, v = rays_of(image(lens))
    assert len(u) == 400
    assert np.allclose(np.linalg.norm(direction, axis=1), 1, atol=1e-6)
    x, y = project(lens, direction, origin)
    assert np.allclose(x, u * SIZE[1], atol=2e-3)
    assert np.allclose(y, v * SIZE[0], atol=2e-3)


def test_known_directions():
    whole = Image(np.zeros((61, 82, 4), "u1"), lens="latlong")
    assert np.allclose(ray_at(replace(whole, pixels=np.zeros((61, 81, 4), "u1")), 40, 30)[1], (0, 0, 1), atol=1e-6)
    assert np.allclose(ray_at(whole, 61, 30)[1], (1, 0, 0), atol=1e-6)
    high = replace(whole, pixels=np.zeros((2001, 3, 4), "u1"))
    assert np.allclose(ray_at(high, 1, 2000)[1], (0, 1, 0), atol=1e-3)
    # 90° from the axis, 30 pixels from the principal point: an equidistant fisheye, and a lens with that polynomial.
    quarter, options = math.pi / 2, {"principal": (40.5, 30.5), "lens_params": ()}
    wide = image("opencv_fisheye", **options | {"focal": (30 / quarter, 30 / quarter)})
    assert np.allclose(ray_at(wide, 70, 30)[1], (1, 0, 0), atol=1e-5)
    plain = image("ftheta", **options | {"lens_params": (0.0, quarter / 30)})
    assert np.allclose(ray_at(plain, 70, 30)[1], (1, 0, 0), atol=1e-5)


INVALID = {
    "opencv": image("opencv", lens_params=(-2.0, 0.0, 0.0, 0.0), focal=(20.0, 20.0)),
    "opencv_fisheye": image("opencv_fisheye", lens_params=(-1.0, 0.0, 0.0, 0.0), focal=(20.0, 20.0)),
    "ftheta": image("ftheta", lens_params=(0.0, 1.0)),
    "equirectangular": Image(np.zeros((*SIZE, 4), "u1"), focal=(5.0, 5.0), lens="equirectangular"),
}


@pytest.mark.parametrize("lens", INVALID)
def test_where_a_lens_has_no_ray_it_is_the_cameras_axis(lens):
    turn = Rotation.from_rotvec([0.3, -0.5, 0.2]).as_matrix()
    one = replace(INVALID[lens], start_pose=np.column_stack([turn, [1, 2, 3]]))
    origin, direction = ray_at(one, 0, 0)
    assert np.allclose(origin, (1, 2, 3))
    assert np.allclose(direction, turn[:, 2], atol=1e-6)
    near = ray_at(one, 40, 31)[1]
    assert not np.allclose(near, turn[:, 2], atol=1e-6)


def test_a_distortion_map_moves_directions():
    # Linear along x and y, between cell centres: interpolation is exact.
    height, width = 6, 10
    y, x = np.mgrid[:height, :width] + 0.5
    map_ = np.stack([0.3 * x / width, 0.2 * y / height], axis=-1).astype("f4")
    one = image("perspective", distortion=map_)
    _, direction, u, v = rays_of(one)
    inner = (np.abs(u - 0.5) < 0.4) & (np.abs(v - 0.5) < 0.4)
    px = (u * SIZE[1] - PRINCIPAL[0]) / FOCAL[0] + 0.3 * u
    py = (v * SIZE[0] - PRINCIPAL[1]) / FOCAL[1] + 0.2 * v
    assert inner.sum() > 200
    assert np.allclose((direction[:, 0] / direction[:, 2])[inner], px[inner], atol=1e-5)
    assert np.allclose((direction[:, 1] / direction[:, 2])[inner], py[inner], atol=1e-5)
    # Beyond the outermost centres it goes on as there.
    corner = ray_at(one, 0, 0)[1]
    assert np.allclose(corner[0] / corner[2], (0.5 - PRINCIPAL[0]) / FOCAL[0] + map_[0, 0, 0], atol=1e-5)


def test_rays_may_be_given_for_each_pixel():
    rng = np.random.default_rng(3)
    given = rng.normal(size=(*SIZE, 6)).astype("f4")
    given[5, 7, 3:] = 0
    given[5, 8, 1] = np.nan
    turn = Rotation.from_rotvec([0.1, 0.2, 0.3]).as_matrix()
    pose = np.column_stack([turn, [1, -1, 2]])
    one = image("perspective", rays=given, rays_frame="camera", start_pose=pose)
    origin, direction = ray_at(one, 3, 4)
    o, d = given[4, 3, :3], given[4, 3, 3:]
    assert np.allclose(origin, turn @ o + pose[:, 3], atol=1e-5)
    assert np.allclose(direction, turn @ d / np.linalg.norm(d), atol=1e-6)
    for column in (7, 8):  # no direction, no origin
        origin, direction = ray_at(one, column, 5)
        assert np.allclose(origin, pose[:, 3])
        assert np.allclose(direction, turn[:, 2], atol=1e-6)


@pytest.mark.parametrize("angle", [1e-4, 0.4, 2.0, 3.14, math.pi])
@pytest.mark.parametrize("shutter", [(0.2, 0.5, 0.3, 0.0), (0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 0.0)])
def test_a_moving_camera_is_interpolated_by_slerp(angle, shutter):
    rng = np.random.default_rng(4)
    first = Rotation.from_rotvec(rng.normal(size=3))
    axis = rng.normal(size=3)
    axis /= np.linalg.norm(axis)

    def pose(by):
        return np.column_stack([(first * Rotation.from_rotvec(axis * by)).as_matrix(), [2, 0, 3]])

    start = np.column_stack([first.as_matrix(), [1, 2, 3]])
    one = image("perspective", start_pose=start, end_pose=pose(angle), shutter=shutter)
    found, times = drawn_rays([one], 20)
    local = drawn_rays([image("perspective")], 20)[0].rays[:, 3:].astype(float)
    # Half a turn has two shortest ways; either of them will do.
    ends = [pose(by * (1 - 1e-9)) for by in (angle, -angle)] if angle == math.pi else [pose(angle)]
    expected = [
        [world_ray(replace(one, end_pose=end), local[n], np.zeros(3), *found.uv[n], times[n]) for n in range(20)]
        for end in ends
    ]
    assert np.allclose(found.rays[:, :3], [o for o, _ in expected[0]], atol=1e-5)
    assert any(np.allclose(found.rays[:, 3:], [d for _, d in one_way], atol=1e-5) for one_way in expected)


NAN = np.full((3, 4), np.nan)
MIRROR = np.diag([1, 1, -1]) @ np.eye(3, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start_pose": NAN}, ValueError, "image 1: start_pose has values that are not finite"),
        ({"end_pose": NAN}, ValueError, "image 1: end_pose has values that are not finite"),
        ({"start_pose": 2 * np.eye(3, 4)}, ValueError, "start_pose: its first three columns are not a rotation"),
        ({"start_pose": MIRROR}, ValueError, "not a rotation"),
        ({"start_pose": np.eye(4)}, ValueError, r"image 1: start_pose of shape \(4, 4\)"),
        ({"lens": "pinhole"}, ValueError, "image 1: lens 'pinhole' is unknown; choose from perspective"),
        ({"lens": "opencv", "lens_params": (0,) * 5}, ValueError, "5 lens_params; the lens 'opencv' has 4"),
        ({"focal": (0.0, 1.0)}, ValueError, "image 1: focal"),
        ({"principal": (np.nan, 1.0)}, ValueError, "image 1: principal"),
        ({"shutter": (0.0,)}, ValueError, "image 1: shutter"),
        ({"rays": np.zeros((2, 2, 6), "f4")}, ValueError, "image 1: rays of float32"),
        ({"distortion": np.zeros((2, 2, 3), "f4")}, ValueError, "image 1: distortion"),
        ({"alpha": "none"}, ValueError, "image 1: alpha='none' is unknown; choose from 'straight', 'premultiplied'"),
        ({"rays_frame": "image"}, ValueError, "image 1: rays_frame='image' is unknown; choose from 'world', 'camera'"),
        ({"extra": (1.0,)}, ValueError, "extra: its length differs between images"),
        ({"extra": ("a",)}, ValueError, "image 1: extra=.*: a tuple of finite numbers is needed"),
        ({"extra": (np.nan,)}, ValueError, "image 1: extra=.*: a tuple of finite numbers"),
        ({"extra": 3.0}, ValueError, "image 1: extra=3.0: a tuple of finite numbers"),
        ({"pixel_cdf": PixelCDF(np.array([0.5], "f4"), np.ones((1, 1), "f4"))}, ValueError, "image 1: pixel_cdf.y: "),
        ({"pixel_cdf": PixelCDF(np.ones(1, "f4"), np.array([[1, 0.5]], "f4"))}, ValueError, "image 1: pixel_cdf.x: "),
        ({"pixels": np.zeros((5, 5, 3), "u1")}, ValueError, r"image 1: pixels of shape \(5, 5, 3\)"),
        ({"pixels": np.zeros((5, 5, 4), "u2")}, TypeError, "image 1: pixels of uint16"),
        ({"pixels": np.zeros((5, 9, 4), "u1")[:, ::2]}, ValueError, "image 1: pixels: a C-contiguous array"),
    ],
)
def test_bad_images(options, error, message):
    good = image("perspective")
    with pytest.raises(error, match=message):
        Images.of([good, Image(**{"pixels": good.pixels, **options})])


@pytest.mark.parametrize("none", [[], Image(np.zeros((5, 5, 4), "u1"))])
def test_no_images(none):
    with pytest.raises(ValueError, match="a sequence of at least one Image"):
        Images.of(none)


@pytest.mark.parametrize("weights", [np.ones(3), np.ones((0, 3)), np.ones((1, 2, 3))])
def test_weights_of_other_rank(weights):
    with pytest.raises(ValueError, match=r"weights of shape .*: \(height, width\) is needed"):
        PixelCDF.from_weights(weights)
