"""Samples for radiance fields along rays that are drawn from posed images, or given.

In: images or rays, an occupancy grid, a box; all arrays NumPy's, or all CuPy's. Out: :class:`RaySamples` in the same
memory. On a device the counts stay there, too, so that nothing synchronizes. Rays are in the order of their indices on
the CPU, and with ``deterministic=True`` on a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from linumpy.arrays import Array, array_module, is_device_array
from linumpy.checks import integer
from linumpy.gpu.kernels import address_of
from linumpy.rays import launch
from linumpy.rays.arrays import are_on_device, as_array, check_array, check_cdf
from linumpy.rays.images import Images
from linumpy.rays.occupancy import OccupancyGrid
from linumpy.rays.pcg32 import PCG32
from linumpy.rays.setting import MOST_STEPS, make_setting

#: Maximum number of rays of a call: the kernel counts them in 26 bits.
_MAX_RAYS = 2**26 - 1
#: Arrays of :class:`RaySamples` with a row for each sample; the others have a row for each ray.
OF_SAMPLES = ("positions", "directions", "dt", "sample_max_level", "sample_extra")


@dataclass(frozen=True)
class RaySamples:
    """Samples of many rays, one ray after another.

    The samples of ray r are ``base[r] : base[r] + n_steps[r]``. On a device, arrays of samples have `max_samples` rows,
    of which `n_samples` are valid. Arrays of rays drawn on a device have a row for each requested ray, of which the
    first `n_rays` are valid, and the others have no samples. :meth:`trimmed` cuts the arrays to the valid rows. On the
    CPU all rows are valid. Arrays of given rays have a row for each given ray.

    Attributes
    ----------
    positions : (max_samples, 3) float32
        (x, y, z), in [0, 1] across the box.
    directions : (max_samples, 3) float32
        Unit vectors d as (d + 1) / 2.
    dt : (max_samples,) float32
        Lengths of the steps, in units of the box's longest edge.
    ray_indices : (rays,) uint32
        Index of each ray among all drawn or given rays; the random numbers of a drawn ray begin at 8 times the index.
    rays : (rays, 6) float32
        Origin and direction in the world's units; directions have length 1 unless ``unit_directions=False``.
        :func:`march` returns the given rays unchanged.
    n_steps : (rays,) int32
        Number of samples.
    base : (rays,) int64
        First sample.
    n_rays, n_samples : () uint64
        Number of kept rays, and of their samples. Rays are kept if they fit `max_samples`; drawn rays without samples,
        only with ``train_envmap=True``.
    max_level : (rays,) float32
        Fraction of the levels of a multiresolution encoding to use, in [0, 2); 1 or more means all levels. 1 without
        ``random_max_level=True``.
    extra : (rays, n_extra) float32
        Extra dimensions of the ray's image.
    image_indices : (rays,) int32
        Index of the ray's image.
    uv : (rays, 2) float32
        Position in the image, in [0, 1] along width and height.
    colors : (rays, 4) float32
        RGBA of the pixel, linear, premultiplied: the target of the ray.
    pdf : (rays, 2) float32
        Probability of the image, and of the position in it, relative to uniform drawing: 1 without distributions. A
        loss divided by the product of both has the same expectation as without distributions.
    sample_max_level : (max_samples,) float32
        `max_level` of each sample's ray; None without ``per_sample=True``.
    sample_extra : (max_samples, n_extra) float32
        `extra` of each sample's ray; None without ``per_sample=True``.
    n_dropped : () uint64
        Number of rays dropped because they did not fit `max_samples`.

    Attributes from `max_level` to `sample_extra` are None for given rays.
    """

    positions: Array
    directions: Array
    dt: Array
    ray_indices: Array
    rays: Array
    n_steps: Array
    base: Array
    n_rays: Array
    n_samples: Array
    max_level: Array | None = None
    extra: Array | None = None
    image_indices: Array | None = None
    uv: Array | None = None
    colors: Array | None = None
    pdf: Array | None = None
    sample_max_level: Array | None = None
    sample_extra: Array | None = None
    n_dropped: Array | None = None

    def trimmed(self) -> RaySamples:
        """Return views of the valid rows; given rays keep all rows. On a device, this synchronizes."""
        n_rays, n_samples = int(self.n_rays), int(self.n_samples)
        if self.max_level is None:
            n_rays = len(self.n_steps)  # given rays keep their rows
        counts = ("n_rays", "n_samples", "n_dropped")
        sizes = dict.fromkeys(OF_SAMPLES, n_samples)
        arrays = {}
        for name in (field.name for field in fields(self)):
            array = getattr(self, name)
            arrays[name] = array if array is None or name in counts else array[: sizes.get(name, n_rays)]
        return RaySamples(**arrays)


def generate_training_samples(
    rng: PCG32,
    images: Images,
    aabb: ArrayLike | None,
    grid: OccupancyGrid,
    *,
    n_rays: int,
    max_samples: int,
    cone_angle: float = 0.0,
    min_step: float | None = None,
    max_step: float | None = None,
    max_steps: int = MOST_STEPS,
    near: float = 0.0,
    image_cdf: Array | None = None,
    snap_to_pixel_centers: bool = False,
    random_max_level: bool = False,
    train_envmap: bool = False,
    unit_directions: bool = True,
    per_sample: bool = False,
    deterministic: bool = False,
) -> RaySamples:
    """Draw rays from images and find the samples along them that lie in occupied voxels.

    Ray i of the batch uses the random numbers 8 i to 8 i + 7 of `rng`, so a batch does not depend on its launch.

    Parameters
    ----------
    rng : PCG32
        The generator, which is advanced by 8 · `n_rays`.
    images : Images
        The images. If pixels are on a device, the work is done there.
    aabb : (2, 3) array-like or None
        Lower and upper corner (x, y, z) of the box in which rays are marched; by default mip 0 of the grid.
    grid : OccupancyGrid
        Occupied space; in the memory of the images.
    n_rays : int
        Number of rays to draw. The result omits rays of masked pixels and rays without samples.
    max_samples : int
        Maximum number of samples. The first ray that does not fit, and all rays after it, are dropped and counted.
    cone_angle : float
        Growth of steps with distance: a step at t is t · `cone_angle`, clipped to `min_step` and `max_step`. 0 for
        equal steps of `min_step`.
    min_step, max_step : float, optional
        Limits of steps in the world's units. By default `min_step` is √3 / 1024 of the grid's edge, and `max_step` is
        2^(mips - 1) times `min_step`.
    max_steps : int
        Maximum number of samples of a ray, up to 1024.
    near : float
        Minimum distance of samples from the origin of their ray.
    image_cdf : (n_images,) float32 array, optional
        Cumulative distribution of images, ending at 1; not checked on a device. By default uniform: ray i is drawn from
        image i · n_images / n_rays.
    snap_to_pixel_centers : bool
        Whether rays pass through pixel centres only.
    random_max_level : bool
        Whether each ray gets a random `max_level`, uniform in [0, 2), so that half of the rays use all levels.
    train_envmap : bool
        Whether rays without samples are kept.
    unit_directions : bool
        Whether the directions in :attr:`RaySamples.rays` have length 1. If not, they have the length that the lens or
        :attr:`Image.rays` gives them. A direction of a perspective lens then has the length 1 along the camera's axis,
        so that its length converts depths to distances. Samples are the same.
    per_sample : bool
        Whether `max_level` and `extra` are also returned for each sample.
    deterministic : bool
        Whether rays on a device are in the order of their indices, as they always are on the CPU.

    Returns
    -------
    RaySamples

    Raises
    ------
    ValueError
        A parameter is out of its range, `image_cdf` has another shape or dtype, or the box reaches beyond the grid.
    TypeError
        A number is no integer where one is needed. Of images, grid and `image_cdf`, some are on a device and some on
        the host.
    """
    n_rays, max_samples = integer("n_rays", n_rays, 0, _MAX_RAYS), integer("max_samples", max_samples, 0)
    image_cdf = as_array(image_cdf)
    if image_cdf is not None:
        check_array(image_cdf, np.float32, (len(images),), "image_cdf")
        check_cdf(image_cdf, "image_cdf")
    on_device = are_on_device(images=images.images[0].pixels, grid=grid.bits, image_cdf=image_cdf)
    setting = make_setting(grid.centre, grid.edge, grid.mips, aabb, cone_angle, min_step, max_step, max_steps, near)
    table, image_extra, linear = launch.tables(images)
    n_extra = image_extra.shape[1]
    arrays = launch.allocate(
        array_module(grid.bits), n_rays, max_samples, n_extra, from_images=True, per_sample=per_sample
    )
    batch = launch.batch_record(setting, grid, arrays, n_rays, max_samples)
    batch["images"], batch["image_extra"] = address_of(table), address_of(image_extra)
    batch["linear"] = address_of(linear)
    batch["image_cdf"] = 0 if image_cdf is None else address_of(image_cdf)
    batch["rng_state"], batch["rng_inc"], batch["image_shift"] = rng.state, rng.inc, rng.state >> 32
    batch["n_images"], batch["n_extra"] = len(images), n_extra
    batch["snap"], batch["random_level"], batch["keep_empty"] = snap_to_pixel_centers, random_max_level, train_envmap
    spec = launch.kernel_spec(
        images=True, grows=setting.grows, ordered=deterministic, weighted=image_cdf is not None or images.weighted,
        lengths=not unit_directions, per_sample=per_sample,
    )  # fmt: skip
    launch.run(spec, n_rays, batch, on_device=on_device)
    rng.advance(n_rays * launch.NUMBERS_PER_RAY)
    return _result(arrays, on_device=on_device)


def march(
    rays: Array,
    grid: OccupancyGrid,
    *,
    max_samples: int,
    aabb: ArrayLike | None = None,
    jitter: Array | None = None,
    cone_angle: float = 0.0,
    min_step: float | None = None,
    max_step: float | None = None,
    max_steps: int = MOST_STEPS,
    near: float = 0.0,
    deterministic: bool = False,
) -> RaySamples:
    """Find the samples along given rays that lie in occupied voxels.

    Parameters
    ----------
    rays : (n, 6) float32 array, C-contiguous
        Origins and directions (x, y, z), in the world's units. The length of a direction has no effect if it is between
        1e-18 and 1e18. With shorter or longer directions, and with values that are not finite, a ray has no samples or
        inexact samples.
    grid : OccupancyGrid
        Occupied space; in the memory of the rays.
    max_samples : int
        Maximum number of samples. The first ray that does not fit, and all rays after it, get no samples and are
        counted.
    jitter : (n,) float32 array, optional
        Fraction of a step, in [0, 1), by which the points of a ray are shifted; 0 by default. Not checked on a device.
    aabb, cone_angle, min_step, max_step, max_steps, near, deterministic
        As for :func:`generate_training_samples`. Without `deterministic` a device may write the samples of the rays in
        any order.

    Returns
    -------
    RaySamples
        Row r belongs to ray r, even without samples. Attributes that come from images are None.

    Raises
    ------
    ValueError, TypeError
        As for :func:`generate_training_samples`; also for rays of another shape or dtype.
    """
    rays, jitter = as_array(rays), as_array(jitter)
    if rays.ndim != 2:
        raise ValueError(f"rays of shape {rays.shape}: (n, 6) is needed, origins and directions")
    check_array(rays, np.float32, (len(rays), 6), "rays")
    if jitter is not None:
        check_array(jitter, np.float32, (len(rays),), "jitter")
        if not is_device_array(jitter):  # other values give samples outside of the box
            for number in np.flatnonzero(~((jitter >= 0) & (jitter < 1))):
                raise ValueError(f"jitter[{number}]={jitter[number]}: a value in [0, 1) is needed")
    max_samples, n_rays = integer("max_samples", max_samples, 0), integer("number of rays", len(rays), 0, _MAX_RAYS)
    setting = make_setting(grid.centre, grid.edge, grid.mips, aabb, cone_angle, min_step, max_step, max_steps, near)
    on_device, xp = are_on_device(rays=rays, grid=grid.bits, jitter=jitter), array_module(rays)
    arrays = launch.allocate(xp, n_rays, max_samples, 0, from_images=False)
    batch = launch.batch_record(setting, grid, arrays, n_rays, max_samples)
    batch["rays_in"], batch["jitter"] = address_of(rays), 0 if jitter is None else address_of(jitter)
    spec = launch.kernel_spec(images=False, grows=setting.grows, ordered=deterministic)
    launch.run(spec, n_rays, batch, on_device=on_device)
    numbers = xp.arange(n_rays, dtype=np.uint32)
    return _result(arrays | {"rays": rays, "ray_indices": numbers}, on_device=on_device)


def _result(arrays: dict[str, Array], *, on_device: bool) -> RaySamples:
    counts = arrays.pop("counts")
    found = RaySamples(n_rays=counts[1, ...], n_samples=counts[2, ...], n_dropped=counts[3, ...], **arrays)
    return found if on_device else found.trimmed()
