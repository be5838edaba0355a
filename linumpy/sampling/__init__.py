"""Random samples of volumes: millions of (coordinate, value) pairs per millisecond.

>>> from linumpy.sampling import create_sampler
>>> sampler = create_sampler("zarr", "cuda", source="brain.ome.zarr", seed=1)  # doctest: +SKIP
>>> coords, values = sampler.sample(2**22)  # doctest: +SKIP

Coordinates are float32 of shape (count, 3), in order (x, y, z), in [0, 1]; values float32 of shape (channels, count).
Voxel centres lie at (i + 1/2) / N. Work is queued on CuPy's current stream, or on torch's if it fills torch tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from linumpy.sampling.arguments import Buffer
from linumpy.sampling.field import Field

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset

    from linumpy.arrays import Array
    from linumpy.sampling.sampler import Sampler

__all__ = ["Field", "create_sampler", "decode", "sample", "sample_dataset"]


def create_sampler(
    type: str,
    device: str = "cuda",
    *,
    seed: int | None = None,
    order: str = "iid",
    spline_order: int = 1,
    interpolation: str = "exact",
    labels: bool = False,
    mask: Array | None = None,
    importance: Array | str | None = None,
    strata: int = 16,
    window: int | None = None,
    layout: str | None = None,
    memory_limit: int | None = None,
    **source: Any,
) -> Sampler:
    """Make a sampler of a volume.

    Parameters
    ----------
    type : str
        ``"structuredRegular"``, ``"zarr"``, ``"openvdb"``, ``"vtkm"``, ``"exabrick"`` or ``"exastitch"``.
    device : str
        ``"cuda"`` (CuPy's current device) or ``"cpu"`` (also ``"openvkl"``). ``structuredRegular`` also
        ``"virtual_memory"`` (the file is mapped) and ``"out_of_core"`` (some slabs are in memory); ``zarr`` also
        ``"cuda_out_of_core"`` (some pages are on the device).
    seed : int, optional
        0 to 2^64 - 1; the same seed gives the same coordinates on every device, whatever the sizes of batches. By
        default a random seed.
    order : {"iid", "binned", "stratified", "sobol"}
        ``"iid"``: independent samples. ``"binned"``: sorted by boxes of the volume, so that memory is read once; as a
        set, the samples of a call are independent and uniform. ``"stratified"``: every block of `strata`³ consecutive
        samples has one sample in each box of a grid. ``"sobol"``: Sobol's sequence, shifted by the seed.
    spline_order : {0, 1, 3}
        Nearest voxel, linear, or cubic (SciPy's, mode ``"mirror"``).
    interpolation : {"exact"}
        Weights are float32.
    labels : bool
        Voxels are labels: values are int32, of the nearest voxel.
    mask : ndarray, optional
        Shape (Z, Y, X), of any size: samples are uniform in its nonzero voxels. In order ``"iid"`` or ``"binned"``.
    importance : ndarray or "gradient", optional
        The density of samples, (Z, Y, X), of any size; ``"gradient"``: the magnitude of the volume's gradient on a
        coarse grid. In order ``"iid"`` or ``"binned"``.
    strata : int
        Boxes of the grid along each axis, a power of two.
    window : int, optional
        With ``order="binned"``: number of samples that are sorted together; consecutive calls return consecutive parts
        of a window. By default each call is a window; on ``"cuda_out_of_core"`` a window has two samples per voxel.
    layout : {"rows", "bricks", "quads", "cells"}, optional
        On device ``"cuda"``: the layout of a copy of the volume for random points, which takes 0, 1, 4 or 8 times the
        memory of the volume. By default the layout with the fewest reads that fits.
    memory_limit : int, optional
        Largest size of that copy in bytes; by default a quarter of the free memory.
    **source
        The volume, by type.

        ``structuredRegular``: `filename`, `dims` = [Dx, Dy, Dz], `dtype` (``"uint8"`` to ``"int32"``, ``"float"``,
        ``"double"``, ...), `n_channels` (one after another), `offset` (bytes), `is_big_endian`; or `array` (Z, Y, X) or
        (C, Z, Y, X), which is copied only if its memory or dtype does not fit. `range` (low, high) is mapped to 0 to 1;
        ``"virtual_memory"`` and ``"out_of_core"`` need it. `spacing` (x, y, z) is only kept for the caller.
        ``"out_of_core"``: `num_blocks` slabs are in memory, and `num_concurrent_blocks` are replaced after each batch
        (``VNR_NUM_BLOCKS``, ``VNR_NUM_CONCURRENT_BLOCKS``).

        ``zarr``: `source`, with two or three axes of space; `level`, `channel`, `time`; `channel_axis` of a plain array
        of four axes; `range` and `spacing` as above; `storage_options` of a URL; ``"cuda_out_of_core"`` also
        `cache_bytes`, `ahead` (independent samples made in one pass over the volume) and `reader`.

        ``openvdb``: `filename`, `field`. ``vtkm``: `files`, `field`. ``exabrick``: `bricks`, `scalar`. ``exastitch``:
        `umesh`, `grids`, `scalar`.

    Returns
    -------
    Sampler
        With ``sample(n)``, ``decode(coords)``, ``n_channels()``, ``value_range``.

    Raises
    ------
    ValueError, TypeError
        Wrong arguments; the message names them.
    GpuUnavailableError
        `device` is a CUDA device and this machine has none.
    """
    from linumpy.sampling.create import Drawing, Evaluation, make_sampler

    evaluation = Evaluation(spline_order, labels, layout, memory_limit, seed)
    drawing = Drawing(order, mask, importance, strata, window)
    return make_sampler(type, device, evaluation, drawing, source, interpolation)


def sample(sampler: Sampler, coords: Buffer, values: Buffer, count: int, order: str | None = None) -> None:
    """Fill arrays with samples.

    Parameters
    ----------
    sampler : Sampler
        Of :func:`create_sampler`.
    coords : int or array
        Receives the coordinates: (count, 3), float32, C-contiguous, in order (x, y, z). A pointer such as
        ``tensor.data_ptr()``, or a NumPy, CuPy, torch or DLPack array; in the sampler's memory.
    values : int or array
        Receives the values: (channels, count), float32 (float16 and bfloat16 arrays too, int32 for labels).
    count : int
        0 to 2^33.
    order : str, optional
        By default the sampler's.
    """
    sampler.sample_into(coords, values, count, order)


def decode(sampler: Sampler, coords: Buffer, values: Buffer, count: int, gradient: Buffer = None) -> None:
    """Fill an array with the values at points.

    Parameters
    ----------
    sampler, values, count
        As for :func:`sample`.
    coords : int or array
        Points; see :func:`sample`. A point outside [0, 1] has the value at the border.
    gradient : int or array, optional
        Receives the derivatives along x, y and z per unit of the cube: (channels, 3, count), float32.
    """
    sampler.decode_into(coords, values, count, gradient)


def sample_dataset(
    sampler: Sampler, batch_size: int, batches: int | None = None, order: str | None = None
) -> IterableDataset[tuple[Buffer, Buffer]]:
    """Make a torch ``IterableDataset`` of batches (coords, values).

    Parameters
    ----------
    sampler : Sampler
        Tensors are in its memory.
    batch_size : int
        Number of samples of a batch.
    batches : int, optional
        Number of batches of a pass; by default the dataset is endless.
    order : str, optional
        By default the sampler's.

    Returns
    -------
    torch.utils.data.IterableDataset
        Of coords (batch_size, 3) and values (batch_size, channels), new tensors for each batch. A pass continues the
        sampler's stream. Not for worker processes: use ``DataLoader(dataset, batch_size=None)``.
    """
    from linumpy.sampling.torch_dataset import make_dataset

    return make_dataset(sampler, batch_size, batches, order)
