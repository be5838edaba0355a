"""If this fails, samples along rays differ from the definition, ray after ray."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare

from linumpy.rays import PCG32, Image, Images, OccupancyGrid, PixelCDF, generate_training_samples, march
from tests.support.oracles.ray_scenes import BOX, CENTRE, EDGE, Foreign, drawn_rays, grid, images, pose
from tests.support.oracles.slow_rays import (
    SlowPcg32,
    color_of,
    distances,
    float32_samples,
    mip_of,
    pixel_of,
    voxel_of,
    world_ray,
)

pytestmark = pytest.mark.needs_core
F = np.float32
SCALE = 128 / EDGE


def generate(rng=None, scene=None, grid_=None, box=BOX, **options):
    options = {"n_rays": 180, "max_samples": 10**6, "min_step": 0.008} | options
    return generate_training_samples(
        PCG32.seeded(7, 3) if rng is None else rng,
        images() if scene is None else scene,
        box,
        grid() if grid_ is None else grid_,
        **options,
    )


def numbers_of(seed, stream, count):
    slow = SlowPcg32(seed, stream)
    return [[slow.unit() for _ in range(8)] for _ in range(count)]


def camera_rays(scene, snap):
    """Rays in the cameras' axes, by index, directions as long as they are; lenses have tests of their own."""
    still = [replace(one, start_pose=np.eye(3, 4), end_pose=None) for one in scene.images]
    found, _ = drawn_rays(still, 180, snap_to_pixel_centers=snap, unit_directions=False)
    return dict(zip(found.ray_indices.tolist(), found.rays.astype(float), strict=True))


@pytest.mark.parametrize("snap", [False, True])
def test_pixels_colors_and_rays_are_those_of_the_definition(snap):
    scene, n = images(), 180
    options = {"snap_to_pixel_centers": snap, "train_envmap": True, "random_max_level": True}
    found, as_long = generate(**options), generate(unit_directions=False, **options)
    kept, local = [], camera_rays(scene, snap)
    for i, (u, v, time, _, level) in enumerate(row[:5] for row in numbers_of(7, 3, n)):
        number = i * len(scene) // n % len(scene)
        one = scene.images[number]
        column, row, u, v, pdf = pixel_of(one, u, v, snap)
        rgba = color_of(one.pixels[row, column], one.alpha)
        if rgba is None:
            continue
        at = len(kept)
        kept.append(i)
        assert found.image_indices[at] == number
        assert np.allclose(found.uv[at], (u, v), atol=1e-6)
        assert np.allclose(found.colors[at], rgba, atol=1e-6)
        assert np.allclose(found.pdf[at], (1, pdf), rtol=1e-5)
        assert found.max_level[at] == 2 * level
        assert found.extra[at].tolist() == [number, -1.5]
        o, d = local[i][:3], local[i][3:]
        origin, direction = o, d
        if one.rays is None or one.rays_frame == "camera" or not one.rays[row, column, 3:].any():
            origin, direction = world_ray(one, d, o, u, v, float(time))
        assert np.allclose(found.rays[at, :3], origin, atol=1e-5)
        assert np.allclose(found.rays[at, 3:], direction / np.linalg.norm(direction), atol=1e-5)
        assert np.allclose(as_long.rays[at], [*origin, *direction], rtol=1e-5, atol=1e-5)
    assert not np.array_equal(as_long.rays, found.rays)
    assert np.array_equal(as_long.positions, found.positions)
    assert np.array_equal(as_long.directions, found.directions)
    assert found.ray_indices.tolist() == kept
    assert found.n_rays == len(kept) < n


def float32_box(origin, direction, jitter, step):
    """Where a ray's points begin, and where it leaves the box, in float32; rays in the grid's coordinates."""
    low, high = ((np.array(BOX) - CENTRE) * SCALE).astype("f4")
    enter, leave = F(0), F(1e30)
    for axis in range(3):
        if direction[axis] == 0:
            if not low[axis] <= origin[axis] <= high[axis]:
                return F(0), F(0)
            continue
        a, b = (low[axis] - origin[axis]) / direction[axis], (high[axis] - origin[axis]) / direction[axis]
        enter, leave = max(enter, min(a, b)), min(leave, max(a, b))
    return (enter + jitter * step, leave) if enter < leave else (F(0), F(0))


@pytest.mark.parametrize("kind", ["sparse", "blobs"])
def test_samples_of_equal_steps_are_those_of_the_definition_bit_for_bit(kind):
    grid_ = grid(kind)
    found = generate(grid_=grid_, train_envmap=True)
    occupied = np.stack([grid_.occupied(mip) for mip in range(2)])
    numbers = numbers_of(7, 3, 180)
    low, step = ((np.array(BOX[0]) - CENTRE) * SCALE).astype("f4"), F(0.008)
    per_box = (1 / ((np.array(BOX[1]) - BOX[0]) * SCALE)).astype("f4")
    rows = range(0, int(found.n_rays), 4)
    for row in rows:
        origin = (found.rays[row, :3] - np.array(CENTRE, "f4")) * F(SCALE)
        direction = found.rays[row, 3:] * F(SCALE)
        start, leave = float32_box(origin, direction, numbers[found.ray_indices[row]][3], step)
        expected = float32_samples(occupied, origin, direction, start, step, leave, 1024)
        assert found.n_steps[row] == len(expected)
        mine = slice(found.base[row], found.base[row] + found.n_steps[row])
        t = start + np.array(expected, "f4") * step
        positions = ((origin + t[:, None] * direction) - low) * per_box
        assert np.array_equal(found.positions[mine], np.clip(positions, 0, 1))
        assert (found.dt[mine] == step * F(1 / 3.5)).all()
        assert np.allclose(found.directions[mine] * 2 - 1, found.rays[row, 3:], atol=1e-6)
    assert found.n_steps[rows].max() > 10


def all_and_found(grid_, **options):
    """All points of the rays in the box, and which of them are samples in a grid."""
    full = generate(grid_=grid("full"), train_envmap=True, **options)
    part = generate(grid_=grid_, train_envmap=True, **options)
    is_found = np.zeros(int(full.n_samples), bool)
    for row in range(int(full.n_rays)):
        every = full.positions[full.base[row] : full.base[row] + full.n_steps[row]]
        some = part.positions[part.base[row] : part.base[row] + part.n_steps[row]]
        index = {tuple(p): k for k, p in enumerate(every.tolist())}
        for p in some.tolist():
            is_found[full.base[row] + index[tuple(p)]] = True
    return full, is_found


@pytest.mark.parametrize("cone", [0.0, 1 / 100, 1 / 20])
def test_exactly_the_points_in_occupied_voxels_are_samples(cone):
    grid_ = grid("sparse", mips=3, seed=5)
    full, is_found = all_and_found(grid_, cone_angle=cone, max_step=0.1, n_rays=40)
    assert full.n_samples > 1000
    occupied = np.stack([grid_.occupied(mip) for mip in range(3)])
    positions = (np.array(BOX[0]) + full.positions.astype(float) * np.ptp(BOX, axis=0) - CENTRE) * SCALE
    unclear, seen = 0, set()
    for position, dt, found in zip(positions, full.dt.astype(float) * 3.5 * SCALE, is_found, strict=True):
        mip = mip_of(position, dt, 3)
        edge = np.abs(position / 2.0**mip - np.rint(position / 2.0**mip)).min()
        if edge < 1e-4 or abs(math.log2(dt) - round(math.log2(dt))) < 1e-5:
            unclear += 1  # so near to a boundary that rounding decides
            continue
        x, y, z = (voxel_of(c, mip) for c in position)
        assert found == occupied[mip, z, y, x]
        seen.add((mip, bool(found)))
    assert unclear < 0.02 * len(is_found)
    assert seen >= {(mip, found) for mip in (range(1, 3) if cone else range(2)) for found in (False, True)}


def test_steps_grow_with_distance():
    cone, shortest, longest = 1 / 50, 0.03, 0.07
    full = generate(grid_=grid("full", mips=3), cone_angle=cone, min_step=shortest, max_step=longest)
    lengths = []
    for row in range(int(full.n_rays)):
        mine = slice(full.base[row], full.base[row] + full.n_steps[row])
        world = np.array(BOX[0]) + full.positions[mine].astype(float) * np.ptp(BOX, axis=0)
        t = (world - full.rays[row, :3]) @ full.rays[row, 3:].astype(float)
        dt = full.dt[mine].astype(float) * 3.5
        assert np.allclose(dt, np.clip(t * cone, shortest, longest), rtol=1e-4, atol=1e-6)
        # Where steps begin and cease to grow, their sum and the sequence differ in second order.
        assert np.allclose(t, distances(t[0], len(t), cone, shortest, longest), atol=0.03 * longest)
        lengths.extend(dt)
    lengths = np.array(lengths)
    share = [np.mean(one) for one in (lengths < shortest * 1.001, lengths > longest * 0.999)]
    assert all(0.001 < one < 0.6 for one in share), share


# Known scenes: a grid over [0, 1]³ with steps of 1/64.
STEP = {"min_step": 1 / 64, "max_samples": 10**5}


def unit(kind="full", seed=0):
    one = grid(kind, mips=1, seed=seed)
    return OccupancyGrid(one.density, one.bits, (0.5, 0.5, 0.5), 1.0)


def steps_of(*rays, grid_=None, **options):
    return march(np.array(rays, "f4"), unit() if grid_ is None else grid_, **(STEP | options)).n_steps.tolist()


def test_the_number_of_steps_of_a_full_grid():
    across = (-1, 0.5, 0.5, 1, 0, 0)
    inside = (0.5, 0.5, 0.5, 1, 0, 0)
    away = (-1, 0.5, 0.5, -1, 0, 0)
    beside = (-1, 1.5, 0.5, 1, 0, 0)
    assert steps_of(across, inside, away, beside) == [64, 32, 0, 0]
    assert steps_of(across, inside, jitter=np.array([0.5, 0.5], "f4")) == [64, 32]
    assert steps_of((-1, 0.5, 0.5, 10, 0, 0), (-1, 0.5, 0.5, 1e-3, 0, 0)) == [64, 64]  # any length
    assert steps_of(across, near=1.5) == [32]
    assert steps_of(across, max_steps=10) == [10]
    assert steps_of(across, min_step=1 / 4096) == [1024]
    assert steps_of(across, aabb=[[0.25, 0, 0], [0.5, 1, 1]]) == [16]
    rng = np.random.default_rng(0)
    rays = np.concatenate([rng.normal(0.5, 2, (200, 3)), rng.random((200, 3))], axis=1).astype("f4")
    rays[:, 3:] -= rays[:, :3]
    found = march(rays, unit(), **STEP).n_steps
    o, d = rays[:, :3].astype(float), rays[:, 3:].astype(float)
    d /= np.linalg.norm(d, axis=1)[:, None]
    low, high = np.sort([(0 - o) / d, (1 - o) / d], axis=0)
    length = (high.min(axis=1) - low.max(axis=1).clip(0)) * 64
    clear = np.abs(length - np.rint(length)) > 1e-3
    assert np.array_equal(found[clear], np.ceil(length[clear]))
    assert clear.sum() > 190


def test_rays_that_graze_the_box():
    corner = (-1, 0, 0.5, 1, -1, 0)  # its line meets no point of the box
    only_a_corner = (0, 2, 0.5, 1, -1, 0)
    in_a_face, in_an_edge = (1, 0.5, -1, 0, 0, 1), (1, 1, -1, 0, 0, 1)
    just_beyond = (np.nextafter(F(1), F(2)), 0.5, -1, 0, 0, 1)
    assert steps_of(corner, only_a_corner, in_a_face, in_an_edge, just_beyond) == [0, 0, 64, 64, 0]


@pytest.mark.parametrize("axis", range(3))
def test_a_ray_along_a_voxel_edge_sees_the_voxels_above_it(axis):
    one = unit("sparse", seed=3)
    occupied = one.occupied().transpose(2, 1, 0)  # (x, y, z)
    rays, expected = [], []
    for j, k in np.random.default_rng(4).integers(0, 128, (40, 2)):
        origin, direction = np.zeros(3), np.zeros(3)
        sides = [a for a in range(3) if a != axis]
        origin[sides], origin[axis], direction[axis] = (j / 128, k / 128), -1, 1
        rays.append([*origin, *direction])
        line = np.moveaxis(occupied, axis, 0)[:, j, k]
        expected.append(2 * int(line.sum()))  # two points in each voxel, one of them at its beginning
    assert steps_of(*rays, grid_=one, min_step=1 / 256) == expected
    assert max(expected) > 4


def test_rays_without_a_direction_or_an_origin_have_no_samples():
    bad = [(0.5, 0.5, 0.5, 0, 0, 0), (np.nan, 0, 0, 1, 0, 0), (0, 0, 0, np.nan, 1, 0), (np.inf, 0, 0, -1, 0, 0)]
    assert steps_of(*bad, (0.5, 0.5, 0.5, np.inf, 0, 0), (0.5, 0.5, 0.5, 1, 0, 0)) == [0, 0, 0, 0, 0, 32]


def test_a_ray_from_very_far():
    assert steps_of((-1e6, 0.5, 0.5, 1, 0, 0))[0] in range(1, 129)
    assert steps_of((-1e20, 0.5, 0.5, 1, 0, 0)) == [0]


def test_what_does_not_fit_is_dropped_as_a_whole():
    every = generate()
    first = 80 + int(np.argmax(every.n_steps[80:] > 5))  # that does not fit
    limit = int(every.base[first]) + 5
    some = generate(max_samples=limit)
    assert some.n_rays == first
    assert some.n_samples == every.base[first] <= limit
    assert some.n_dropped == every.n_rays - first
    for name in ("positions", "rays", "n_steps", "colors"):
        whole = getattr(every, name)
        assert np.array_equal(getattr(some, name), whole[: len(getattr(some, name))])
    rays = np.tile(F([-1, 0.5, 0.5, 1, 0, 0]), (4, 1))
    given = march(rays, unit(), min_step=1 / 64, max_samples=130)
    assert given.n_steps.tolist() == [64, 64, 0, 0]
    assert (given.n_rays, given.n_samples, given.n_dropped) == (2, 128, 2)


def test_empty_rays_are_kept_for_an_environment_map():
    empty = grid("empty")
    assert generate(grid_=empty).n_rays == 0
    kept = generate(grid_=empty, train_envmap=True)
    assert kept.n_rays > 100
    assert kept.n_samples == 0
    assert not kept.n_steps.any()


def test_a_batch_follows_from_the_generator_alone():
    rng = PCG32.seeded(7, 3)
    first, second = generate(rng), generate(rng)
    assert not np.array_equal(first.uv, second.uv)
    again = PCG32.seeded(7, 3)
    again.advance(180 * 8)
    assert np.array_equal(generate(again).positions, second.positions)
    assert again == rng


def noise_images(sizes, cdf=None):
    return Images.of([
        Image(np.zeros((*size, 4), "f4"), start_pose=pose(np.random.default_rng(0)), pixel_cdf=cdf) for size in sizes
    ])  # fmt: skip


def drawn(scene, n_rays=40000, **options):
    return generate(scene=scene, grid_=grid("empty", mips=1), box=None, n_rays=n_rays, train_envmap=True, **options)


def pixels_of(found, width, height):
    column, row = (found.uv * (width, height)).astype(int).T
    return np.bincount(row * width + column, minlength=width * height)


@pytest.mark.parametrize("snap", [False, True])
def test_pixels_are_drawn_uniformly(snap):
    counts = pixels_of(drawn(noise_images([(10, 20)]), snap_to_pixel_centers=snap), 20, 10)
    assert chisquare(counts).pvalue > 1e-3


def test_pixels_are_drawn_by_their_weights():
    weights = np.random.default_rng(1).random((6, 8)) ** 3
    weights[2], weights[:, 3], weights[0, 0] = 0, 0, 0
    found = drawn(noise_images([(12, 16)], PixelCDF.from_weights(weights)))
    fine = np.kron(weights, np.full((2, 2), 0.25)).ravel() / weights.sum()  # each cell covers 2 × 2 pixels
    counts = pixels_of(found, 16, 12)
    pixel = ((found.uv * (16, 12)).astype(int) * (1, 16)).sum(axis=1)
    assert np.allclose(found.pdf, np.stack([np.ones(len(pixel)), fine[pixel] * 12 * 16], axis=1), rtol=1e-4, atol=1e-4)
    assert counts[fine == 0].sum() == 0
    assert chisquare(counts[fine > 0], fine[fine > 0] * counts.sum()).pvalue > 1e-3


def test_images_are_shared_by_neighbours_or_drawn_by_their_weights():
    scene = noise_images([(4, 5)] * 7)
    found = drawn(scene, 700)
    assert found.image_indices.tolist() == [i // 100 for i in range(700)]
    share = np.array([0.3, 0.0, 0.2, 0.1, 0.25, 0.05, 0.1])
    cdf = np.cumsum(share).astype("f4")
    cdf[-1] = 1
    found = drawn(scene, image_cdf=cdf)
    assert np.allclose(found.pdf, np.stack([7 * share[found.image_indices], np.ones(40000)], axis=1), rtol=1e-5)
    counts = np.bincount(found.image_indices, minlength=7)
    # Of low discrepancy: far nearer to what is expected than random numbers come.
    assert np.abs(counts - share * 40000).max() < 20
    rng, sums, empty = PCG32.seeded(1), np.zeros(7), grid("empty", mips=1)
    for _ in range(400):
        one = generate(rng, scene, empty, None, n_rays=5, train_envmap=True, image_cdf=cdf)
        sums += np.bincount(one.image_indices, minlength=7)
    assert chisquare(sums[share > 0], share[share > 0] * 2000).pvalue > 1e-3


@pytest.mark.parametrize("snap", [False, True])
def test_dividing_by_the_densities_undoes_the_distributions(snap):
    """A loss over pixels has the same mean however they are drawn."""
    rng = np.random.default_rng(2)
    scene = Images.of([
        Image(rng.random((6, 9, 4)).astype("f4"), pixel_cdf=PixelCDF.from_weights(0.1 + rng.random((4, 5))))
        for _ in range(3)
    ])  # fmt: skip
    cdf = np.array([0.2, 0.9, 1], "f4")
    found = drawn(scene, 200_000, image_cdf=cdf, snap_to_pixel_centers=snap)
    mean = np.mean([one.pixels for one in scene.images])
    values = found.colors.mean(axis=1)
    assert abs((values / found.pdf.prod(axis=1)).mean() - mean) < 0.01
    assert abs((1 / found.pdf.prod(axis=1)).mean() - 1) < 0.01


def test_the_last_cell_takes_what_rounding_left_of_1():
    """Otherwise numbers above the end of a distribution would be drawn with a density of 0."""
    end = np.float32(1 - 9e-6)
    cdf = PixelCDF(np.array([0.5, end], "f4"), np.array([[end, end], [1, 1]], "f4"))
    found = drawn(noise_images([(2, 2)], cdf), 500_000)
    assert (found.pdf > 0).all()
    assert np.isfinite(found.uv).all()
    assert np.allclose(found.pdf[found.uv[:, 0] > 0.5, 1], 4 * 0.5 * 9e-6, rtol=0.1)
    assert (found.uv[:, 0] > 0.5).any()


@pytest.mark.parametrize(
    ("dtype", "pixel", "alpha", "color"),
    [
        ("u1", (255, 128, 0, 128), None, (0.50196, 0.10835, 0, 0.50196)),
        ("u1", (255, 128, 0, 128), "straight", (0.50196, 0.10835, 0, 0.50196)),
        ("u1", (255, 128, 0, 128), "premultiplied", (1, 0.21586, 0, 0.50196)),
        ("u1", (255, 128, 0, 0), None, (0, 0, 0, 0)),
        ("f4", (1, 0.5, 0, 0.5), None, (1, 0.5, 0, 0.5)),
        ("f4", (1, 0.5, 0, 0.5), "straight", (0.5, 0.25, 0, 0.5)),
        ("f2", (1, 0.5, 0, 0.5), "straight", (0.5, 0.25, 0, 0.5)),
    ],
)
def test_colors_are_multiplied_by_alpha_once(dtype, pixel, alpha, color):
    pixels = np.full((2, 3, 4), pixel, dtype)
    found = drawn(Images.of([Image(pixels, alpha=alpha)]), 10)
    assert np.allclose(found.colors, color, atol=1e-5)


def test_half_of_the_rays_use_all_levels():
    level = drawn(noise_images([(4, 5)]), random_max_level=True).max_level
    assert (level.min() >= 0) & (level.max() < 2)
    assert abs((level >= 1).mean() - 0.5) < 0.01
    assert chisquare(np.histogram(level, 20, (0, 2))[0]).pvalue > 1e-3
    assert (drawn(noise_images([(4, 5)]), 50).max_level == 1).all()


def test_levels_and_extra_dimensions_of_samples_are_those_of_their_rays():
    options = {"random_max_level": True, "max_samples": 1500}
    found = generate(per_sample=True, **options)
    assert found.n_dropped > 0
    ray = np.repeat(np.arange(int(found.n_rays)), found.n_steps)
    assert np.array_equal(found.sample_max_level, found.max_level[ray])
    assert np.array_equal(found.sample_extra, found.extra[ray])
    assert len(found.sample_extra) == len(found.dt) > 1000
    without = generate(**options)
    assert without.sample_max_level is without.sample_extra is None
    assert np.array_equal(without.positions, found.positions)


def test_given_rays_of_pixels_are_in_the_world_and_leave_poses_alone():
    rng = np.random.default_rng(5)
    given = rng.normal(size=(3, 4, 6)).astype("f4")
    given[0, 0, 3:], given[1, 1, 0] = 0, np.nan
    start, end = pose(rng), pose(rng)
    one = Image(np.ones((3, 4, 4), "f4"), rays=given, start_pose=start, end_pose=end, shutter=(0.5, 0, 0, 0))
    found = drawn(Images.of([one]), 200, unit_directions=False)
    row, column = (found.uv[:, ::-1] * (3, 4)).astype(int).T
    bad = (row == column) & (row < 2)
    assert 10 < bad.sum() < 100
    assert np.allclose(found.rays[~bad], given[row, column][~bad], rtol=1e-6)
    axis = np.array(world_ray(one, np.array([0.0, 0, 1]), np.zeros(3), 0, 0, 0)).ravel()
    assert np.allclose(found.rays[bad], axis, atol=1e-5)
    moved = drawn(Images.of([replace(one, rays_frame="camera")]), 200, unit_directions=False)
    assert np.array_equal(moved.uv, found.uv)
    for at in np.flatnonzero(~bad)[:20]:
        o, d = given[row[at], column[at]].astype(float).reshape(2, 3)
        assert np.allclose(moved.rays[at], np.array(world_ray(one, d, o, 0, 0, 0)).ravel(), atol=1e-5)


def test_one_image_of_many_more_than_rays():
    scene = noise_images([(2, 2)] * 9)
    assert drawn(scene, 3).image_indices.tolist() == [0, 3, 6]
    assert drawn(scene, 0).n_rays == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"box": [[0, 0, 0], [9, 1, 1]]}, "aabb=.* reaches beyond the occupancy grid.*more mips"),
        ({"box": [[0, 0, 0], [1, 0, 1]]}, "a lower and a higher corner"),
        ({"box": [[0, 0, np.nan], [1, 1, 1]]}, "a lower and a higher corner"),
        ({"cone_angle": 2.0}, "cone_angle=2.0"),
        ({"cone_angle": 1e-9}, "cone_angle=1e-09"),
        ({"min_step": 0.0}, "min_step=0"),
        ({"min_step": 1e-9}, "min_step=1e-09: the box is .* steps across"),
        ({"max_step": 1e-3}, "max_step=0.001"),
        ({"max_steps": 1025}, "max_steps=1025"),
        ({"near": -1.0}, "near=-1.0"),
        ({"n_rays": -1}, "n_rays=-1"),
        ({"max_samples": -1}, "max_samples=-1"),
        ({"n_rays": 2.5}, "n_rays=2.5: an integer from 0 up to"),
        ({"n_rays": True}, "n_rays=True: an integer"),
        ({"max_samples": 1e6}, "max_samples=1000000.0: an integer from 0 on"),
        ({"max_steps": 1.5}, "max_steps=1.5: an integer from 1 up to 1024"),
        ({"image_cdf": np.linspace(0, 0.5, 10, dtype="f4")}, "image_cdf: .* end at 1"),
        ({"image_cdf": np.full(10, np.nan, "f4")}, "image_cdf: a cumulative distribution"),
        ({"image_cdf": np.array([0, 0.5, 0.4, 0.6, 0.7, 0.8, 0.9, 1, 1, 1], "f4")}, "image_cdf: .* must not decrease"),
        ({"image_cdf": np.ones(3, "f4")}, r"image_cdf of float32 \(3,\): float32 \(10,\)"),
    ],
)
def test_bad_input(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        generate(grid_=grid("empty"), **options)


@pytest.mark.parametrize(
    ("rays", "message"),
    [
        (np.zeros((3, 6)), "rays of float"),
        (np.zeros((3, 5), "f4"), "rays of float"),
        (np.zeros((3, 12), "f4")[:, ::2], "rays of float"),
        (np.zeros(6, "f4"), r"rays of shape .*: \(n, 6\) is needed"),
    ],
)
def test_bad_rays(rays, message):
    with pytest.raises(ValueError, match=message):
        march(rays, unit("empty"), max_samples=1)


@pytest.mark.parametrize("part", [-0.01, 1.0, -5.0, np.nan, np.inf])
def test_jitter_is_a_part_of_a_step(part):
    """Otherwise points outside of the box would be samples at its faces."""
    rays, jitter = np.array([(-1, 0.5, 0.5, 1, 0, 0)] * 3, "f4"), np.array([0, part, 0.5], "f4")
    with pytest.raises(ValueError, match=r"jitter\[1\]=.*: a value in \[0, 1\) is needed"):
        march(rays, unit(), jitter=jitter, **STEP)


def test_points_are_shifted_by_their_jitter():
    rays = np.array([(-1, 0.5, 0.5, 1, 0, 0)] * 2, "f4")
    plain, moved = (march(rays, unit(), jitter=part, **STEP) for part in (None, np.array([0, 0.25], "f4")))
    shifts = (moved.positions - plain.positions).reshape(2, 64, 3)
    np.testing.assert_allclose(shifts, np.broadcast_to([[[0, 0, 0]], [[0.25 / 64, 0, 0]]], shifts.shape), atol=1e-6)


def test_numbers_of_numpy_are_numbers():
    """An unsigned state of 64 bits does not fit NumPy's integers, so these are no part of its arithmetic."""
    wanted = PCG32.seeded(2**40, 3)
    rng = PCG32.seeded(np.int64(2**40), np.uint8(3))
    assert rng == wanted
    for one, kind in ((rng, np.int64), (wanted, int)):
        generate_training_samples(one, images(), BOX, grid("empty"), n_rays=kind(50), max_samples=kind(10))
    assert rng == wanted


def test_arrays_of_other_libraries_come_in_by_dlpack():
    rays = np.array([(-1, 0.5, 0.5, 1, 0, 0)], "f4")
    found = march(Foreign(rays), unit(), jitter=Foreign(np.array([0.5], "f4")), **STEP)
    assert found.n_steps.tolist() == [64]
    assert np.shares_memory(found.rays, rays)
    scene = images()
    foreign = Images.of([replace(one, pixels=Foreign(one.pixels)) for one in scene.images])
    assert np.array_equal(generate(scene=foreign).positions, generate().positions)
