"""Samples as a torch ``IterableDataset``.

In: a sampler. Out: batches of tensors in the sampler's memory, without a copy between host and device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

from linumpy.errors import not_pickled
from linumpy.sampling.arguments import Buffer
from linumpy.sampling.sampler import Sampler

if TYPE_CHECKING:
    from torch.utils.data import IterableDataset as TorchDataset


def make_dataset(
    sampler: Sampler, batch_size: int, batches: int | None, order: str | None
) -> TorchDataset[tuple[Buffer, Buffer]]:
    """Make the dataset; see :func:`linumpy.sampling.sample_dataset`."""
    import torch
    from torch.utils.data import IterableDataset, get_worker_info

    if batch_size < 1 or (batches is not None and batches < 0):
        raise ValueError(f"batch_size={batch_size}, batches={batches}: give 1 or more samples, and 0 or more batches")
    device = "cpu" if sampler.device is None else f"cuda:{sampler.device}"
    dtype = {"float32": torch.float32, "int32": torch.int32}[str(sampler.values_dtype)]

    class SampleDataset(IterableDataset):
        """Batches (coords, values) of a sampler."""

        def __reduce__(self) -> NoReturn:
            raise not_pickled(self, "DataLoader(num_workers=0) takes it")

        def __iter__(self) -> Iterator[tuple[Buffer, Buffer]]:
            if get_worker_info() is not None:
                raise RuntimeError("a sampler is not for worker processes: make the DataLoader with num_workers=0")
            done = 0
            while batches is None or done < batches:
                coords = torch.empty((batch_size, 3), dtype=torch.float32, device=device)
                values = torch.empty((sampler.n_channels(), batch_size), dtype=dtype, device=device)
                sampler.sample_into(coords, values, batch_size, order)
                yield coords, values.T
                done += 1

    return SampleDataset()
