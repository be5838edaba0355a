"""Run trace.cu: march rays, drawn from images or given, through a grid.

In: CuPy arrays for the kernel on the device, NumPy arrays for its host build in the native core (in tests also for the
emulated kernel). Out: the arrays of :class:`~linumpy.rays.samples.RaySamples`, equal bit for bit. Nothing here
synchronizes. Only tables are copied to the device: records and extra dimensions of images once, the table of sRGB once
for each stream. Errors: :class:`~linumpy.errors.CoreUnavailableError` for NumPy arrays without the native core.
"""

from __future__ import annotations

import functools
from types import ModuleType

import numpy as np

from linumpy.arrays import Array
from linumpy.gpu.kernels import KernelSpec, Uploaded, address_of, current_queue, load, uploaded
from linumpy.rays.images import RECORD, Images
from linumpy.rays.occupancy import OccupancyGrid
from linumpy.rays.setting import MOST_POINTS, STEPS, Setting

#: Random numbers reserved for a ray. It uses the first five: u, v, time, jitter and level.
NUMBERS_PER_RAY = 8
#: Iterations of Newton's method, for lenses without a closed-form inverse.
_NEWTON_STEPS = 12
#: Threads of a block: one warp. With ORDERED a block waits for the blocks before it, and larger blocks wait longer.
THREADS = 32
#: Maximum number of runs of a ray in shared memory. A run is a sequence of points in occupied voxels. For a ray with
#: more runs, the kernel walks along the rest of the ray again.
_MOST_RUNS = 32
#: Words of ``counts`` before the words of blocks; trace.cu lists them.
_HEAD_WORDS = 5
_WORDS = (
    *("images", "image_cdf", "linear", "image_extra", "rays_in", "jitter", "bits", "positions", "directions", "dt"),
    *("ray_indices", "rays", "n_steps", "base", "max_level", "extra", "image_indices", "uv", "colors", "pdf"),
    *("sample_max_level", "sample_extra", "counts", "rng_state", "rng_inc", "image_shift"),
)
_NUMBERS = ("n_rays", "n_images", "n_extra", "max_steps", "mips", "snap", "random_level", "keep_empty")
#: ``struct Batch`` of trace.cu.
BATCH = np.dtype(
    [
        *((name, "u8") for name in _WORDS),
        ("max_samples", "i8"),
        *((name, "i4") for name in _NUMBERS),
        *(("box", "f4", 6), ("per_box", "f4", 3), ("centre", "f4", 3)),
        *((name, "f4") for name in ("voxels_per_unit", "near", "dt_scale")),
        ("steps", STEPS),
    ],
    align=True,
)


def kernel_spec(
    *,
    images: bool,
    grows: bool,
    ordered: bool,
    weighted: bool = False,
    lengths: bool = False,
    per_sample: bool = False,
    most_runs: int = _MOST_RUNS,
) -> KernelSpec:
    """Return the specification of trace.cu for the features that a call uses; unused features take no registers.

    - `images`: whether rays are drawn from images; otherwise they are given.
    - `grows`: whether steps grow with distance.
    - `ordered`: whether rays are in the order of their indices.
    - `weighted`: whether images or pixels have distributions.
    - `lengths`: whether directions keep the lengths that they had before normalization.
    - `per_sample`: whether `max_level` and extra dimensions are also written for each sample.
    - `most_runs`: maximum number of runs of a ray in shared memory.
    """
    defines = {
        "IMAGES": int(images),
        "CONE": int(grows),
        "ORDERED": int(ordered),
        "WEIGHTED": int(weighted),
        "LENGTHS": int(lengths),
        "PER_SAMPLE": int(per_sample),
        "THREADS": THREADS,
        "MOST_RUNS": most_runs,
        "MOST_POINTS": MOST_POINTS,
        "NEWTON_STEPS": _NEWTON_STEPS,
        "NUMBERS_PER_RAY": NUMBERS_PER_RAY,
        "HEAD_WORDS": _HEAD_WORDS,
        "IMAGE_NBYTES": RECORD.itemsize,
        "BATCH_NBYTES": BATCH.itemsize,
    }
    # No fused multiply-adds: the samples must equal those of the host build, bit for bit.
    flags = ("-fmad=false",)
    return KernelSpec(
        "trace", "trace", tuple((key, str(value)) for key, value in defines.items()), "linumpy.rays.cuda", flags
    )


def allocate(
    xp: ModuleType, n_rays: int, max_samples: int, n_extra: int, *, from_images: bool, per_sample: bool = False
) -> dict[str, Array]:
    """Allocate the outputs and ``counts``; rows without a ray have 0 samples."""
    arrays = {
        "positions": xp.empty((max_samples, 3), np.float32),
        "directions": xp.empty((max_samples, 3), np.float32),
        "dt": xp.empty(max_samples, np.float32),
        "n_steps": xp.zeros(n_rays, np.int32),
        "base": xp.zeros(n_rays, np.int64),
        "counts": xp.zeros(_HEAD_WORDS + -(-n_rays // THREADS), np.uint64),
    }
    if from_images:
        arrays |= {
            "ray_indices": xp.empty(n_rays, np.uint32),
            "rays": xp.empty((n_rays, 6), np.float32),
            "max_level": xp.empty(n_rays, np.float32),
            "extra": xp.empty((n_rays, n_extra), np.float32),
            "image_indices": xp.empty(n_rays, np.int32),
            "uv": xp.empty((n_rays, 2), np.float32),
            "colors": xp.empty((n_rays, 4), np.float32),
            "pdf": xp.empty((n_rays, 2), np.float32),
        }
    if per_sample:
        arrays |= {
            "sample_max_level": xp.empty(max_samples, np.float32),
            "sample_extra": xp.empty((max_samples, n_extra), np.float32),
        }
    return arrays


def batch_record(
    setting: Setting, grid: OccupancyGrid, arrays: dict[str, Array], n_rays: int, max_samples: int
) -> np.ndarray:
    """Make the kernel's record, for given rays; rays of images need further fields."""
    batch = np.zeros(1, BATCH)
    for name, array in arrays.items():
        batch[name] = address_of(array)
    batch["bits"], batch["mips"] = address_of(grid.bits), grid.mips
    batch["n_rays"], batch["max_samples"] = n_rays, max_samples
    batch["box"], batch["max_steps"], batch["steps"] = setting.box.reshape(6), setting.max_steps, setting.steps
    for name in ("per_box", "centre", "voxels_per_unit", "near", "dt_scale"):
        batch[name] = getattr(setting, name)
    return batch


def run(spec: KernelSpec, n_rays: int, batch: np.ndarray, *, on_device: bool) -> None:
    """Run the kernel on the device, or its host build in the native core."""
    if not n_rays:
        return
    if on_device:
        load(spec)((-(-n_rays // THREADS),), (THREADS,), (batch,))
        return
    from linumpy.core.native import library

    defines = dict(spec.defines)
    features = [int(defines[name]) for name in ("IMAGES", "CONE", "LENGTHS")]
    wrong = library().waiting.lc_trace_rays(*features, batch.ctypes.data, batch.nbytes, RECORD.itemsize)
    assert not wrong, "the native core has other records of rays"


@functools.cache
def _linear_of_bytes() -> np.ndarray:
    """Return the linear value, float32, of each byte 0 to 255 of sRGB (IEC 61966-2-1)."""
    value = np.arange(256) / 255
    return np.where(value <= 0.04045, value / 12.92, ((value + 0.055) / 1.055) ** 2.4).astype(np.float32)


@functools.lru_cache(maxsize=16)
def _linear_upload(queue: tuple[int, int, int]) -> Uploaded:
    import cupy

    return uploaded(cupy.asarray(_linear_of_bytes()))


def tables(images: Images) -> tuple[Array, Array, Array]:
    """Return the records and the extra dimensions of images, and the linear values of bytes, where their pixels are."""
    if not images.on_device:
        return images.table, images.extra, _linear_of_bytes()
    return (*images.uploads.get(), _linear_upload(current_queue()).get())
