"""Posed images to train from: pixels, lens, pose and the distribution of pixels.

In: arrays of NumPy, or of CuPy. Out: :class:`Image` records, and :class:`Images`, a set of images with the table that
kernels read. Cameras look along +Z; +X is to the right of the image, +Y down (as in OpenCV). Points and directions are
ordered (x, y, z); images (row, column). Errors name the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from linumpy.arrays import Array, array_module, is_device_array, to_host
from linumpy.gpu.kernels import Uploaded, address_of, uploaded
from linumpy.rays.arrays import as_array, check_cdf

#: Lenses by name, with the maximum number of parameters of each.
LENSES = {
    "perspective": 0, "opencv": 4, "opencv_fisheye": 4, "ftheta": 5, "equirectangular": 0, "latlong": 0,
    "orthographic": 0,
}  # fmt: skip
LENS_NUMBERS = {name: number for number, name in enumerate(LENSES)}
_FORMATS = {"uint8": 0, "float16": 1, "float32": 2}
_ALPHAS = ("straight", "premultiplied")
_FRAMES = ("world", "camera")
#: The record of an image in kernels: ``struct Image`` of camera.cuh.
RECORD = np.dtype(
    [
        *((name, "u8") for name in ("pixels", "rays", "distortion", "cdf_y", "cdf_x")),
        *((name, "i4") for name in ("width", "height", "format", "lens")),
        *((name, "i4") for name in ("map_width", "map_height", "cdf_width", "cdf_height")),
        *((name, "i4") for name in ("straight", "rays_in_camera")),
        *(("focal", "f4", 2), ("principal", "f4", 2), ("lens_params", "f4", 6), ("shutter", "f4", 4)),
        *(
            ("rotation", "f4", (3, 3)),
            ("translation", "f4", 3),
            ("motion", "f4", 3),
            ("axis", "f4", 3),
            ("angle", "f4"),
        ),
    ],
    align=True,
)


@dataclass(frozen=True)
class PixelCDF:
    """Cumulative distributions of pixels, such as from :meth:`from_weights`.

    The distribution has h · w cells, which divide the image evenly; they need not be the pixels of the image.

    Attributes
    ----------
    y : (h,) float32
        Cumulative marginal distribution of rows of cells, ending at 1.
    x : (h, w) float32
        Cumulative distribution of cells in each row, each row ending at 1.
    """

    y: Array
    x: Array

    @classmethod
    def from_weights(cls, weights: Array) -> PixelCDF:
        """Make distributions in proportion to weights (h, w), which are at least 0 and not all 0.

        Weights of NumPy or CuPy give distributions in the same memory.

        Raises
        ------
        ValueError
            Weights of another number of axes, or of wrong values; values on a device are not checked.
        """
        weights = as_array(weights)
        if weights.ndim != 2 or not weights.size:
            raise ValueError(f"weights of shape {weights.shape}: (height, width) is needed")
        xp = array_module(weights)
        weights = weights.astype(np.float64)
        rows = weights.sum(axis=1)
        total = rows.sum()
        if xp is np and not (np.isfinite(total) and total > 0 and weights.min() >= 0):
            raise ValueError("weights must be finite, not negative, and not all 0")
        x = xp.cumsum(weights, axis=1) / xp.where(rows > 0, rows, 1)[:, None]
        y = xp.cumsum(rows) / total
        x[:, -1] = 1
        y[-1] = 1
        return cls(y.astype(np.float32), xp.ascontiguousarray(x.astype(np.float32)))


@dataclass(frozen=True)
class Image:
    """One posed image.

    Attributes
    ----------
    pixels : (height, width, 4) array
        RGBA. uint8: colours encoded by sRGB, alpha linear; the bytes 255, 0, 255, 0 (0x00FF00FF as a number) mask a
        pixel. float16 or float32: linear; a negative red masks a pixel. Masked pixels have no ray.
    focal : (float, float)
        Focal lengths (x, y) in pixels; for an orthographic lens pixels per unit of length, for an equirectangular lens
        pixels per radian.
    principal : (float, float), optional
        Principal point (x, y) in pixels, where the centre of the first pixel is (0.5, 0.5); by default the middle of
        the image.
    lens : str
        ``"perspective"``, ``"opencv"`` (k1, k2, p1, p2), ``"opencv_fisheye"`` (k1 to k4), ``"ftheta"`` (angle from the
        axis in rad as a polynomial of the distance r from the principal point in pixels: c0 + c1 r + … + c4 r⁴),
        ``"equirectangular"`` (longitude and latitude are (pixel - principal) / focal), ``"latlong"`` (the whole sphere
        over the image), ``"orthographic"``. Latitude grows downwards. A pixel for which the lens has no ray gets the
        camera's axis.
    lens_params : tuple of float
        Parameters of the lens; missing parameters are 0.
    start_pose, end_pose : (3, 4) array
        Pose of the camera when the shutter opens, and when it closes: rotation and translation from camera to world.
        Without `end_pose` the camera does not move.
    shutter : (float, float, float, float)
        The pose of a ray is interpolated at ``s0 + s1 u + s2 v + s3 t`` between start (0) and end (1): u, v in [0, 1]
        across the image (rolling shutter), t random in [0, 1) (motion blur). Rotations are interpolated by slerp,
        translations linearly.
    rays : (height, width, 6) array, optional
        float32: origin and direction (x, y, z) of the ray of each pixel, in place of lens and distortion. A pixel whose
        ray is not finite, or has a direction of length 0, gets the camera's axis.
    rays_frame : {"world", "camera"}
        The coordinate system of `rays`: the world's, independent of poses and shutter, or the camera's.
    distortion : (h, w, 2) array, optional
        float32: added to x and y of the directions of the lens, interpolated linearly over the image.
    pixel_cdf : PixelCDF, optional
        Distribution from which pixels are drawn; uniform by default.
    extra : tuple of float
        Extra dimensions, such as an appearance code; as many for all images.
    alpha : {"straight", "premultiplied"}, optional
        Whether linear colours must still be multiplied by alpha, or were multiplied already (for bytes: before the
        encoding by sRGB). By default straight for uint8, as in PNG files, and premultiplied for floats.
    """

    pixels: Array
    focal: tuple[float, float] = (1.0, 1.0)
    principal: tuple[float, float] | None = None
    lens: str = "perspective"
    lens_params: tuple[float, ...] = ()
    start_pose: Array = field(default_factory=lambda: np.eye(3, 4))
    end_pose: Array | None = None
    shutter: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
    rays: Array | None = None
    distortion: Array | None = None
    pixel_cdf: PixelCDF | None = None
    extra: tuple[float, ...] = ()
    rays_frame: str = "world"
    alpha: str | None = None


@dataclass(frozen=True)
class Images:
    """A set of checked images, with the table that kernels read.

    Attributes
    ----------
    images : tuple of Image
        The images. Pixels, rays, distortions and distributions are all NumPy's, or all CuPy's.
    table : numpy.ndarray of RECORD
        The table, always on the host: a record for each image, with addresses of arrays, poses and numbers.
    """

    images: tuple[Image, ...]
    table: np.ndarray

    @classmethod
    def of(cls, images: Sequence[Image]) -> Images:
        """Check images and make their table.

        Raises
        ------
        ValueError
            No images; arrays of another shape, or not C-contiguous; a pose that is not finite or no rotation; numbers
            out of range; an unknown lens, frame or kind of alpha; extra dimensions that differ in number.
        TypeError
            Pixels of another dtype; some arrays are on a device and some on the host.
        """
        if isinstance(images, Image) or not images:
            raise ValueError("images: a sequence of at least one Image is needed")
        table = np.zeros(len(images), RECORD)
        images = [_with_arrays(image) for image in images]
        for number, image in enumerate(images):
            _fill(table[number], image, f"image {number}")
        on_device = {is_device_array(array) for image in images for array in _arrays(image)}
        if len(on_device) > 1:
            raise TypeError("images: some arrays are on a device and some on the host; move all to one of them")
        lengths = {len(image.extra) for image in images}
        if len(lengths) > 1:
            raise ValueError(f"extra: its length differs between images ({', '.join(map(str, sorted(lengths)))})")
        return cls(tuple(images), table)

    def __len__(self) -> int:
        return len(self.images)

    @property
    def on_device(self) -> bool:
        """Whether pixels are on a device."""
        return is_device_array(self.images[0].pixels)

    @cached_property
    def weighted(self) -> bool:
        """Whether any image has a distribution of pixels."""
        return any(image.pixel_cdf is not None for image in self.images)

    @property
    def extra(self) -> np.ndarray:
        """Extra dimensions of all images, (n_images, n_extra) float32, on the host."""
        return np.array([image.extra for image in self.images], np.float32).reshape(len(self), -1)

    @cached_property
    def uploads(self) -> Uploaded:
        """The table and the extra dimensions on the device; copied once."""
        import cupy

        table = cupy.asarray(self.table.view(np.uint8))
        return uploaded((table, cupy.asarray(self.extra)))


def _with_arrays(image: Image) -> Image:
    """Return an image whose arrays are NumPy's or CuPy's."""
    cdf = image.pixel_cdf
    return replace(
        image,
        pixels=as_array(image.pixels),
        rays=as_array(image.rays),
        distortion=as_array(image.distortion),
        pixel_cdf=None if cdf is None else PixelCDF(as_array(cdf.y), as_array(cdf.x)),
    )


def _arrays(image: Image) -> list[Array]:
    cdf = [] if image.pixel_cdf is None else [image.pixel_cdf.y, image.pixel_cdf.x]
    return [array for array in (image.pixels, image.rays, image.distortion, *cdf) if array is not None]


def _fill(row: np.void, image: Image, name: str) -> None:
    """Check an image, and fill its record in the table."""
    pixels = image.pixels
    if pixels.ndim != 3 or pixels.shape[2] != 4 or not pixels.size:
        raise ValueError(f"{name}: pixels of shape {pixels.shape}; (height, width, 4) is needed")
    if str(pixels.dtype) not in _FORMATS:
        raise TypeError(f"{name}: pixels of {pixels.dtype}; uint8, float16 or float32 is needed")
    height, width = pixels.shape[:2]
    row["width"], row["height"], row["format"] = width, height, _FORMATS[str(pixels.dtype)]
    row["pixels"] = _address(pixels, f"{name}: pixels")
    _check_choice(image.alpha, (*_ALPHAS, None), f"{name}: alpha")
    row["straight"] = image.alpha == "straight" or (image.alpha is None and pixels.dtype == np.uint8)
    try:
        extra = np.asarray(image.extra, np.float64)
    except (TypeError, ValueError):
        extra = np.array(np.nan)
    if extra.ndim != 1 or not np.isfinite(extra).all():
        raise ValueError(f"{name}: extra={image.extra!r}: a tuple of finite numbers is needed")
    start = _pose(image.start_pose, f"{name}: start_pose")
    end = start if image.end_pose is None else _pose(image.end_pose, f"{name}: end_pose")
    row["rotation"], row["translation"] = start[:, :3], start[:, 3]
    row["motion"] = end[:, 3] - start[:, 3]
    row["axis"], row["angle"] = _axis_angle(start[:, :3].T @ end[:, :3])
    _fill_lens(row, image, name)
    _fill_maps(row, image, name)


def _check_choice(value: str | None, choices: tuple[str | None, ...], name: str) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(map(repr, choices))}")


def _fill_lens(row: np.void, image: Image, name: str) -> None:
    if image.lens not in LENSES:
        raise ValueError(f"{name}: lens {image.lens!r} is unknown; choose from {', '.join(LENSES)}")
    if len(image.lens_params) > LENSES[image.lens]:
        raise ValueError(
            f"{name}: {len(image.lens_params)} lens_params; the lens {image.lens!r} has {LENSES[image.lens]}"
        )
    height, width = image.pixels.shape[:2]
    principal = (width / 2, height / 2) if image.principal is None else image.principal
    for key, given, size in (
        ("focal", image.focal, 2),
        ("principal", principal, 2),
        ("shutter", image.shutter, 4),
        ("lens_params", (*image.lens_params, *[0.0] * (6 - len(image.lens_params))), 6),
    ):
        values = np.asarray(given, np.float64)
        if values.shape != (size,) or not np.isfinite(values).all():
            raise ValueError(f"{name}: {key}={values.tolist()}; {size} finite numbers are needed")
        row[key] = values
    if not np.all(row["focal"] > 0):
        raise ValueError(f"{name}: focal={row['focal'].tolist()}; focal lengths are positive")
    row["lens"] = LENS_NUMBERS[image.lens]


def _fill_maps(row: np.void, image: Image, name: str) -> None:
    height, width = image.pixels.shape[:2]
    _check_choice(image.rays_frame, _FRAMES, f"{name}: rays_frame")
    row["rays_in_camera"] = image.rays_frame == "camera"
    if image.rays is not None:
        _check_floats(image.rays, (height, width, 6), f"{name}: rays")
        row["rays"] = _address(image.rays, f"{name}: rays")
    if image.distortion is not None:
        shape = image.distortion.shape
        _check_floats(image.distortion, (*shape[:2], 2), f"{name}: distortion")
        row["map_height"], row["map_width"] = shape[:2]
        row["distortion"] = _address(image.distortion, f"{name}: distortion")
    if image.pixel_cdf is not None:
        cdf = image.pixel_cdf
        _check_floats(cdf.x, (cdf.y.shape[0], cdf.x.shape[1]), f"{name}: pixel_cdf.x")
        _check_floats(cdf.y, cdf.y.shape[:1], f"{name}: pixel_cdf.y")
        check_cdf(cdf.x, f"{name}: pixel_cdf.x")
        check_cdf(cdf.y, f"{name}: pixel_cdf.y")
        row["cdf_height"], row["cdf_width"] = cdf.x.shape
        row["cdf_y"], row["cdf_x"] = _address(cdf.y, f"{name}: pixel_cdf.y"), _address(cdf.x, f"{name}: pixel_cdf.x")


def _check_floats(array: Array, shape: tuple[int, ...], name: str) -> None:
    if array.dtype != np.float32 or array.shape != shape or not array.size:
        raise ValueError(f"{name} of {array.dtype} {array.shape}; float32 {shape} is needed")


def _address(array: Array, name: str) -> int:
    if not array.flags.c_contiguous:
        raise ValueError(f"{name}: a C-contiguous array is needed; make one by ascontiguousarray")
    address = address_of(array)
    if address % 4:
        raise ValueError(f"{name}: the address of the array is not a multiple of 4: pass a copy")
    return address


def _pose(pose: Array, name: str) -> np.ndarray:
    pose = np.asarray(to_host(pose), np.float64)
    if pose.shape != (3, 4):
        raise ValueError(f"{name} of shape {pose.shape}; (3, 4) is needed")
    if not np.isfinite(pose).all():
        raise ValueError(f"{name} has values that are not finite: {pose.tolist()}")
    turn = pose[:, :3]
    if np.abs(turn.T @ turn - np.eye(3)).max() > 1e-3 or np.linalg.det(turn) < 0:
        raise ValueError(f"{name}: its first three columns are not a rotation: {turn.tolist()}")
    u, _, vt = np.linalg.svd(turn)  # u @ vt is the nearest rotation; poses are often rounded to float32
    return np.column_stack([u @ vt, pose[:, 3]])


def _axis_angle(turn: np.ndarray) -> tuple[np.ndarray, float]:
    """Return axis and angle in [0, π] of a rotation matrix, by its unit quaternion."""
    trace = np.trace(turn)
    squares = np.array([1 + trace, *(1 + 2 * np.diag(turn) - trace)])  # 4 times the squared parts of the quaternion
    products = np.array([
        [squares[0], turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]],
        [turn[2, 1] - turn[1, 2], squares[1], turn[0, 1] + turn[1, 0], turn[0, 2] + turn[2, 0]],
        [turn[0, 2] - turn[2, 0], turn[0, 1] + turn[1, 0], squares[2], turn[1, 2] + turn[2, 1]],
        [turn[1, 0] - turn[0, 1], turn[0, 2] + turn[2, 0], turn[1, 2] + turn[2, 1], squares[3]],
    ])  # fmt: skip
    quaternion = products[np.argmax(squares)]  # the row with the largest divisor is the most accurate
    quaternion = quaternion / np.linalg.norm(quaternion) * (1 if quaternion[0] >= 0 else -1)
    length = float(np.linalg.norm(quaternion[1:]))
    angle = 2 * float(np.arctan2(length, quaternion[0]))
    return (quaternion[1:] / length, angle) if length > 1e-12 else (np.array([0.0, 0.0, 1.0]), 0.0)
