"""Scenes for tests of linumpy.rays: images of every kind, and grids."""

import numpy as np
from scipy.spatial.transform import Rotation

from linumpy.rays import PCG32, Image, Images, OccupancyGrid, PixelCDF, generate_training_samples

CENTRE, EDGE = (0.5, -0.25, 1.0), 2.0
#: Larger than mip 0, inside mip 1.
BOX = [[-1.2, -1.5, -0.6], [2.1, 1.6, 2.9]]


def pose(rng, distance=3.0):
    """A camera somewhere around the grid that looks roughly at its centre."""
    direction = rng.normal(size=3)
    direction /= np.linalg.norm(direction)
    forward = direction + rng.normal(size=3) * 0.1
    forward /= np.linalg.norm(forward)
    right = np.cross([0.3, 1.0, 0.2], forward)
    right /= np.linalg.norm(right)
    return np.column_stack([right, np.cross(forward, right), forward, np.array(CENTRE) - distance * direction])


def moved(rng, start):
    turn = Rotation.from_rotvec(rng.normal(size=3) * 0.1).as_matrix() @ start[:, :3]
    return np.column_stack([turn, start[:, 3] + rng.normal(size=3) * 0.1])


def _pixels(rng, dtype, height=24, width=32):
    if dtype == "u1":
        pixels = rng.integers(0, 256, (height, width, 4)).astype("u1")
        pixels[rng.random((height, width)) < 0.1] = (255, 0, 255, 0)
        return pixels
    pixels = rng.random((height, width, 4)).astype(dtype)
    pixels[rng.random((height, width)) < 0.1, 0] = -1
    return pixels


def images(seed=0):
    """One image of each lens and format, with and without maps, moving cameras and distributions."""
    rng = np.random.default_rng(seed)
    kinds = [
        ("u1", "perspective", (), {}),
        ("f2", "opencv", (-0.1, 0.02, 0.001, 0.002), {"shutter": (0.0, 0.0, 1.0, 0.0)}),
        ("f4", "opencv_fisheye", (0.05, -0.01, 0.0, 0.0), {"shutter": (0.0, 0.0, 0.0, 1.0)}),
        ("u1", "ftheta", (0.0, 0.03, 1e-5), {"cdf": True}),
        ("f4", "equirectangular", (), {"focal": (20.0, 20.0), "alpha": "straight"}),
        ("u1", "latlong", (), {"distance": 0.4, "alpha": "premultiplied"}),
        ("f2", "orthographic", (), {"focal": (10.0, 10.0)}),
        ("f4", "perspective", (), {"distortion": True}),
        ("u1", "perspective", (), {"rays": "camera"}),
        ("f2", "perspective", (), {"rays": "world", "alpha": "straight", "shutter": (0.0, 0.0, 1.0, 0.0)}),
    ]
    scene = []
    for number, (dtype, lens, params, options) in enumerate(kinds):
        pixels, start = _pixels(rng, dtype), pose(rng, options.get("distance", 3.0))
        height, width = pixels.shape[:2]
        more = {}
        if "shutter" in options:
            more = {"end_pose": moved(rng, start), "shutter": options["shutter"]}
        if "cdf" in options:
            more["pixel_cdf"] = PixelCDF.from_weights(rng.random((7, 5)))
        if "distortion" in options:
            more["distortion"] = rng.normal(0, 0.01, (4, 6, 2)).astype("f4")
        if "rays" in options:
            rays = np.zeros((height, width, 6), "f4")
            rays[..., :3] = rng.normal(0, 0.1, (height, width, 3))
            rays[..., 3:] = rng.normal((0, 0, 2), 0.2, (height, width, 3))
            rays[:, ::7, 3:] = 0
            if options["rays"] == "world":
                rays[..., :3] += start[:, 3]
                rays[..., 3:] = rays[..., 3:] @ start[:, :3].T.astype("f4")
            more |= {"rays": rays, "rays_frame": options["rays"]}
        scene.append(
            Image(
                pixels, focal=options.get("focal", (40.0, 42.0)), principal=(15.5, 12.25), lens=lens,
                lens_params=params, start_pose=start, extra=(float(number), -1.5),
                alpha=options.get("alpha"), **more,
            )
        )  # fmt: skip
    return Images.of(scene)


def without_distributions(images):
    """Return the images whose pixels are drawn uniformly."""
    return Images.of([image for image in images.images if image.pixel_cdf is None])


def to_device(images, asarray):
    """The same images with their arrays on a device."""
    from dataclasses import replace

    on_device = []
    for image in images.images:
        arrays = {name: getattr(image, name) for name in ("pixels", "rays", "distortion")}
        arrays = {name: asarray(array) for name, array in arrays.items() if array is not None}
        if image.pixel_cdf is not None:
            arrays["pixel_cdf"] = PixelCDF(asarray(image.pixel_cdf.y), asarray(image.pixel_cdf.x))
        on_device.append(replace(image, **arrays))
    return Images.of(on_device)


def grid(kind="sparse", mips=2, seed=0):
    rng = np.random.default_rng(seed)
    if kind == "full":
        density = np.ones((mips, 128, 128, 128), "f4")
    elif kind == "empty":
        density = np.zeros((mips, 128, 128, 128), "f4")
    elif kind == "sparse":  # single voxels, some alone
        density = (rng.random((mips, 128, 128, 128)) < 0.03).astype("f4")
    else:  # blobs, with much empty space between them
        z, y, x = np.mgrid[:128, :128, :128]
        density = np.stack([np.sin(x / 9.0 + m) * np.sin(y / 11.0) * np.sin(z / 13.0) > 0.6 for m in range(mips)])
    return OccupancyGrid.of(density, centre=CENTRE, edge=EDGE)


def drawn_rays(scene, n, **options):
    """Rays drawn from images, without samples, and the moment in [0, 1) at which the shutter takes each."""
    found = generate_training_samples(
        PCG32.seeded(7, 3), Images.of(scene), None, grid("empty"), n_rays=n, max_samples=0, train_envmap=True, **options
    )
    times = PCG32.seeded(7, 3).numbers(found.ray_indices.astype(int), 8, 3)[2] >> 8
    return found, times / 2**24


class Foreign:
    """An array of another library, which only DLPack reads."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()
