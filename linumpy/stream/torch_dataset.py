"""A pipeline as PyTorch's ``IterableDataset``. PyTorch is imported on use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from linumpy.errors import not_pickled
from linumpy.stream.config import Config, Sample
from linumpy.stream.pipeline import Pipeline


def torch_dataset(config: Config, samples: Iterable[Sample], *, reader: Any = None) -> Any:
    """Make a dataset that yields batches as tensors on the device.

    Parameters
    ----------
    config : Config
        Of the pipeline that each iteration makes; `rank` and `world_size` divide the samples between processes.
    samples : iterable of Sample
        Pushed anew by each iteration.
    reader : linumpy.gpu.Reader, optional
        As for :class:`Pipeline`.

    Returns
    -------
    torch.utils.data.IterableDataset
        It yields a tensor, or a dict of them where samples have parts. Pass it to ``DataLoader(dataset,
        batch_size=None, num_workers=0)``: it batches itself, and reads ahead in threads. It has ``state_dict()`` and
        ``load_state_dict(state)``, for the iteration that runs and for the next one.
    """
    from torch.utils import dlpack
    from torch.utils.data import IterableDataset, get_worker_info

    class StreamDataset(IterableDataset):  # type: ignore[misc,type-arg]
        """Batches of a pipeline."""

        def __reduce__(self) -> NoReturn:
            raise not_pickled(self, "DataLoader(num_workers=0) takes it, which reads ahead in threads")

        def __init__(self) -> None:
            super().__init__()
            self._pipeline: Pipeline | None = None
            self._state: Mapping[str, int] | None = None

        def __iter__(self) -> Iterator[Any]:
            if get_worker_info() is not None:
                raise RuntimeError("batches are on the device of one process: use DataLoader(num_workers=0)")
            with Pipeline(config, reader=reader) as pipeline:
                self._pipeline = pipeline
                if self._state is not None:
                    pipeline.load_state_dict(self._state)
                    self._state = None
                pipeline.push(samples)
                for batch in pipeline.batches():
                    names = batch.tensors._fields
                    made = [dlpack.from_dlpack(tensor) for tensor in batch]
                    batch.release()
                    yield made[0] if len(made) == 1 else dict(zip(names, made, strict=True))

        def state_dict(self) -> dict[str, int]:
            """Return the state behind the last batch of the iteration that runs."""
            if self._pipeline is None:
                raise RuntimeError("no iteration has begun")
            return self._pipeline.state_dict()

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            """Let the next iteration go on from a state."""
            self._state = state

    return StreamDataset()
