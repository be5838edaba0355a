"""If this fails, a lens maps a pixel to a wrong ray, or back to another pixel."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from linumpy.rays.arithmetic import exp2, log2, sine_cosine
from linumpy.rays.cameras import world_rays
from linumpy.rays.images import LENSES, Image, Images, PixelCDF
from tests.support.oracles.slow_rays import world_ray

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


def rays(one, u, v, time=0.0):
    """Origins and directions in the world of places in an image."""
    images, n = Images.of([one]), len(u)
    u, v = u.astype("f4"), v.astype("f4")
    column, row = (u * SIZE[1]).astype(int), (v * SIZE[0]).astype(int)
    return world_rays(images, np.zeros(n, int), u, v, column, row, np.full(n, time, "f4"))[:2]


def places(n=400, seed=0):
    return np.random.default_rng(seed).random((2, n))


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
    u, v = places()
    origin, direction = rays(image(lens), u, v)
    assert np.allclose(np.linalg.norm(direction, axis=1), 1, atol=1e-6)
    x, y = project(lens, direction, origin)
    assert np.allclose(x, u.astype("f4") * SIZE[1], atol=2e-3)
    assert np.allclose(y, v.astype("f4") * SIZE[0], atol=2e-3)


FORMULAS = {
    "perspective": lambda x, y: (x, y, 1),
    "equirectangular": lambda x, y: (math.sin(x) * math.cos(y), math.sin(y), math.cos(x) * math.cos(y)),
    "orthographic": lambda x, y: (0, 0, 1),
}


@pytest.mark.parametrize("lens", FORMULAS)
def test_the_formula(lens):
    u, v = places(50, 1)
    one = image(lens)
    origin, direction = rays(one, u, v)
    for n in range(50):
        x = (u[n] * SIZE[1] - PRINCIPAL[0]) / one.focal[0]
        y = (v[n] * SIZE[0] - PRINCIPAL[1]) / one.focal[1]
        expected = np.array(FORMULAS[lens](x, y), float)
        assert np.allclose(direction[n], expected / np.linalg.norm(expected), atol=1e-6)
        assert np.allclose(origin[n], (x, y, 0) if lens == "orthographic" else 0, atol=1e-6)


def test_known_directions():
    middle = np.array([0.5])
    axis = rays(image("latlong"), middle, middle)[1][0]
    assert np.allclose(axis, (0, 0, 1), atol=1e-6)
    assert np.allclose(rays(image("latlong"), np.array([0.75]), middle)[1][0], (1, 0, 0), atol=1e-6)
    assert np.allclose(rays(image("latlong"), middle, np.array([0.999999]))[1][0], (0, 1, 0), atol=1e-4)
    # An equidistant fisheye: 90° from the axis at a distance of π/2 focal lengths.
    wide = image("opencv_fisheye", lens_params=(), focal=(20.0, 20.0), principal=(40.0, 30.0))
    u = np.array([(40 + 20 * math.pi / 2) / 80])
    assert np.allclose(rays(wide, u, middle)[1][0], (1, 0, 0), atol=1e-5)
    plain = image("ftheta", lens_params=(0.0, 0.05), principal=(40.0, 30.0))
    assert np.allclose(rays(plain, np.array([(40 + 20 * math.pi / 2) / 80]), middle)[1][0], (1, 0, 0), atol=1e-5)


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
    origin, direction = rays(one, np.array([0.01]), np.array([0.01]))
    assert np.allclose(origin[0], (1, 2, 3))
    assert np.allclose(direction[0], turn[:, 2], atol=1e-6)
    near = rays(one, np.array([0.5]), np.array([0.52]))[1][0]
    assert not np.allclose(near, turn[:, 2], atol=1e-6)


def test_a_distortion_map_moves_directions():
    # Linear along x and y, between cell centres: interpolation is exact.
    height, width = 6, 10
    y, x = np.mgrid[:height, :width] + 0.5
    map_ = np.stack([0.3 * x / width, 0.2 * y / height], axis=-1).astype("f4")
    u, v = 0.1 + 0.8 * places(50, 2)
    _, direction = rays(image("perspective", distortion=map_), u, v)
    px = (u * SIZE[1] - PRINCIPAL[0]) / FOCAL[0] + 0.3 * u
    py = (v * SIZE[0] - PRINCIPAL[1]) / FOCAL[1] + 0.2 * v
    assert np.allclose(direction[:, 0] / direction[:, 2], px, atol=1e-5)
    assert np.allclose(direction[:, 1] / direction[:, 2], py, atol=1e-5)
    # Beyond the outermost centres it goes on as there.
    corner = rays(image("perspective", distortion=map_), np.array([0.0]), np.array([0.0]))[1][0]
    assert np.allclose(corner[0] / corner[2], -PRINCIPAL[0] / FOCAL[0] + map_[0, 0, 0], atol=1e-5)


def test_rays_may_be_given_for_each_pixel():
    rng = np.random.default_rng(3)
    given = rng.normal(size=(*SIZE, 6)).astype("f4")
    given[5, 7, 3:] = 0
    given[5, 8, 1] = np.nan
    turn = Rotation.from_rotvec([0.1, 0.2, 0.3]).as_matrix()
    pose = np.column_stack([turn, [1, -1, 2]])
    one = image("perspective", rays=given, rays_frame="camera", start_pose=pose)
    column, row = np.array([3, 7, 8]), np.array([4, 5, 5])
    origin, direction = rays(one, (column + 0.5) / SIZE[1], (row + 0.5) / SIZE[0])
    o, d = given[4, 3, :3], given[4, 3, 3:]
    assert np.allclose(origin[0], turn @ o + pose[:, 3], atol=1e-5)
    assert np.allclose(direction[0], turn @ d / np.linalg.norm(d), atol=1e-6)
    for n in (1, 2):  # no direction, no origin
        assert np.allclose(origin[n], pose[:, 3])
        assert np.allclose(direction[n], turn[:, 2], atol=1e-6)


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
    u, v = places(20, 5)
    origin, direction = rays(one, u, v, time=0.7)
    local = rays(image("perspective"), u, v)[1].astype(float)
    # Half a turn has two shortest ways; either of them will do.
    ends = [pose(by * (1 - 1e-9)) for by in (angle, -angle)] if angle == math.pi else [pose(angle)]
    expected = [
        [world_ray(replace(one, end_pose=end), local[n], np.zeros(3), u[n], v[n], 0.7) for n in range(20)]
        for end in ends
    ]
    assert np.allclose(origin, [o for o, _ in expected[0]], atol=1e-5)
    assert any(np.allclose(direction, [d for _, d in one_way], atol=1e-5) for one_way in expected)


def test_elementary_functions():
    x = np.linspace(-50, 50, 100001).astype("f4")
    sine, cosine = sine_cosine(x)
    assert np.abs(sine - np.sin(x.astype(float))).max() < 6.1e-8
    assert np.abs(cosine - np.cos(x.astype(float))).max() < 6.1e-8
    y = np.linspace(-20, 20, 10001).astype("f4")
    assert np.allclose(exp2(y), 2.0 ** y.astype(float), rtol=4e-7)
    positive = np.geomspace(1e-6, 1e6, 10001).astype("f4")
    assert np.allclose(log2(positive), np.log2(positive.astype(float)), rtol=3e-7, atol=2e-7)


NAN = np.full((3, 4), np.nan)
MIRROR = np.diag([1, 1, -1]) @ np.eye(3, 4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"start_pose": NAN}, ValueError, "image 1: start_pose has values that are not finite"),
        ({"end_pose": NAN}, ValueError, "image 1: end_pose has values that are not finite"),
        (
            {"start_pose": 2 * np.eye(3, 4)},
            ValueError,
            "start_pose: its first three columns are not a rotation",
        ),
        ({"start_pose": MIRROR}, ValueError, "not a rotation"),
        ({"start_pose": np.eye(4)}, ValueError, r"image 1: start_pose of shape \(4, 4\)"),
        ({"lens": "pinhole"}, ValueError, "image 1: lens 'pinhole' is unknown; choose from perspective"),
        ({"lens": "opencv", "lens_params": (0,) * 5}, ValueError, "5 lens_params; the lens 'opencv' has 4"),
        ({"focal": (0.0, 1.0)}, ValueError, "image 1: focal"),
        ({"principal": (np.nan, 1.0)}, ValueError, "image 1: principal"),
        ({"shutter": (0.0,)}, ValueError, "image 1: shutter"),
        ({"rays": np.zeros((2, 2, 6), "f4")}, ValueError, "image 1: rays of float32"),
        ({"distortion": np.zeros((2, 2, 3), "f4")}, ValueError, "image 1: distortion"),
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
