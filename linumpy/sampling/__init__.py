"""Random samples of volumes: pairs of coordinates and values, millions of them per millisecond on a GPU.

>>> from linumpy.sampling import create_sampler
>>> sampler = create_sampler("zarr", "cuda", source="brain.ome.zarr", seed=1)  # doctest: +SKIP
>>> coords, values = sampler.sample(2**22)  # doctest: +SKIP

Coordinates are float32 of shape (count, 3), in order (x, y, z), in [0, 1]. Values are float32, int32 for labels, of
shape (channels, count). The centre of voxel i of N lies at (i + 1/2) / N. On a device, work is queued on CuPy's current
stream, or on torch's current stream if an argument is a torch tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from linumpy.sampling.arguments import Buffer
from linumpy.sampling.field import Field
from linumpy.sampling.renamed import renamed_parameter

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
        0 to 2^64 - 1. The same seed gives the same coordinates on the host and on a device, whatever the sizes of
        batches; ``docs/sampling.md`` lists the exceptions. By default a random seed.
    order : {"iid", "binned", "stratified", "sobol"}
        ``"iid"``: independent samples. ``"binned"``: sorted by boxes of the volume, so that memory is read once; as a
        set, the samples of a window are independent and uniform (see `window`). ``"stratified"``: every block of
        `strata`³ consecutive samples has one sample in each box of a grid. ``"sobol"``: Sobol's sequence, shifted by
        the seed.
    spline_order : {0, 1, 3}
        Nearest voxel, linear, or cubic (as SciPy's with mode ``"mirror"``). ``"virtual_memory"`` takes 0 and 1. The
        devices ``"out_of_core"`` and ``"cuda_out_of_core"``, and all types but ``structuredRegular`` and ``zarr``, take
        only 1.
    interpolation : {"exact"}
        Interpolation weights are float32.
    labels : bool
        Whether voxels are labels: values are then int32, of the nearest voxel. Only with voxels of integers, without
        `range`, on ``"cuda"`` and ``"cpu"``, of the types ``structuredRegular`` and ``zarr``.
    mask : ndarray, optional
        Shape (Z, Y, X), of any size: samples are uniform in the nonzero voxels of the mask. Only for the orders
        ``"iid"`` and ``"binned"``.
    importance : ndarray or "gradient", optional
        The density of samples, (Z, Y, X), of any size; ``"gradient"``: the magnitude of the volume's gradient on a
        coarse grid, plus a tenth of the mean. Only for the orders ``"iid"`` and ``"binned"``; not with `mask`.
    strata : int
        With ``order="stratified"``: boxes of the grid along each axis, a power of two from 2 to 1024.
    window : int, optional
        With ``order="binned"``: number of samples that are sorted together; consecutive calls return consecutive parts
        of a window. By default each call is a window; on ``"cuda_out_of_core"`` a window has two samples per voxel.
    layout : {"rows", "bricks", "quads", "cells"}, optional
        For ``structuredRegular`` and ``zarr`` on device ``"cuda"``: the layout of a copy of the volume for random
        points, which takes 0, 1, 4 or 8 times the memory of the volume. By default the layout with the fewest reads
        that fits into `memory_limit`; layouts that fit into the GPU's L2 cache come first.
    memory_limit : int, optional
        Largest size of that copy in bytes, if `layout` is not given; by default a quarter of the free device memory.
    **source
        Arguments that describe the volume, by type.

        ``structuredRegular``: `filename`, `dims` = [Dx, Dy, Dz], `dtype` (``"uint8"`` to ``"int32"``, ``"float"``,
        ``"double"``, ...), `n_channels` (one after another), `offset` (bytes), `is_big_endian`; or `array` (Z, Y, X) or
        (C, Z, Y, X), which is copied only if the sampler needs another memory, memory order or dtype. `range` (low,
        high) is mapped to 0 to 1; ``"virtual_memory"`` and ``"out_of_core"`` need it. `spacing` (x, y, z) becomes an
        attribute of the sampler and has no effect.
        ``"out_of_core"``: `num_blocks` slabs are in memory, and `num_concurrent_blocks` are replaced after each batch
        (``VNR_NUM_BLOCKS``, ``VNR_NUM_CONCURRENT_BLOCKS``).

        ``zarr``: `source`, with two or three axes of space; `level`, `channel`, `time`; `channel_axis` of a plain array
        of four axes; `range` and `spacing` as above; `storage_options` of a URL. ``"cuda_out_of_core"`` also takes
        `cache_bytes` (device memory for pages; by default a quarter of the free memory), `ahead` (number of independent
        samples made in one pass over the volume) and `reader` (a :class:`linumpy.gpu.Reader`; by default a new one).

        ``openvdb``: `filename`, `field`. ``vtkm``: `files`, `field`. ``exabrick``: `bricks`, `scalar`, `background`.
        ``exastitch``: `umesh`, `grids`, `scalar`, `background`.

    Returns
    -------
    Sampler
        With ``sample(n)``, ``decode(coords)``, ``n_channels()``, ``value_range``.

    Raises
    ------
    ValueError, TypeError
        Wrong arguments; the message names them.
    SourceError, UnsupportedLayoutError, OSError
        The volume cannot be opened or read; the message names the file and the fault.
    GpuUnavailableError
        `device` is a CUDA device and this machine has none.
    """
    from linumpy.sampling.create import Drawing, Evaluation, make_sampler

    evaluation = Evaluation(spline_order, labels, layout, memory_limit, seed)
    drawing = Drawing(order, mask, importance, strata, window)
    return make_sampler(type, device, evaluation, drawing, source, interpolation)


@renamed_parameter("coords_ptr", "coords")
@renamed_parameter("values_ptr", "values")
def sample(sampler: Sampler, coords: Buffer, values: Buffer, count: int, order: str | None = None) -> None:
    """Fill arrays with samples.

    Parameters
    ----------
    sampler : Sampler
        A sampler that :func:`create_sampler` returned.
    coords : int or array
        Receives the coordinates: (count, 3), float32, C-contiguous, in order (x, y, z). A pointer such as
        ``tensor.data_ptr()``, or a NumPy, CuPy, torch or DLPack array; in the sampler's memory.
    values : int or array
        Receives the values: (channels, count), C-contiguous; float32, or int32 for labels. An array (not a pointer) may
        also be float16 or bfloat16 instead of float32.
    count : int
        Number of samples, 0 to 2^33.
    order : str, optional
        By default the sampler's order.
    """
    sampler.sample_into(coords, values, count, order)


@renamed_parameter("coords_ptr", "coords")
@renamed_parameter("values_ptr", "values")
def decode(sampler: Sampler, coords: Buffer, values: Buffer, count: int, gradient: Buffer = None) -> None:
    """Fill an array with the values at points.

    Parameters
    ----------
    sampler, values, count
        As for :func:`sample`.
    coords : int or array
        Points to read; memory, shape and dtype as for :func:`sample`. A point outside [0, 1] has the value at the
        border; a point that is not finite has the value NaN (as a label: the coordinate counts as 0).
    gradient : int or array, optional
        Receives the derivatives along x, y and z per unit of the cube: (channels, 3, count), float32.

    Raises
    ------
    ValueError
        Among others: `gradient` for a volume without derivatives; :meth:`.Sampler.decode` lists them.
    """
    sampler.decode_into(coords, values, count, gradient)


def sample_dataset(
    sampler: Sampler, batch_size: int, batches: int | None = None, order: str | None = None
) -> IterableDataset[tuple[Buffer, Buffer]]:
    """Make a torch ``IterableDataset`` of batches (coords, values).

    Parameters
    ----------
    sampler : Sampler
        The sampler; tensors are in the sampler's memory.
    batch_size : int
        Number of samples of a batch.
    batches : int, optional
        Number of batches of a pass; by default the dataset is endless.
    order : str, optional
        By default the sampler's order.

    Returns
    -------
    torch.utils.data.IterableDataset
        Of coords (batch_size, 3) and values (batch_size, channels), new tensors for each batch. A pass continues the
        sampler's stream. Not for worker processes: use ``DataLoader(dataset, batch_size=None)``.
    """
    from linumpy.sampling.sampler import make_dataset

    return make_dataset(sampler, batch_size, batches, order)
