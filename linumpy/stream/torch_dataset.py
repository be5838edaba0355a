"""A pipeline as PyTorch's ``IterableDataset``. PyTorch is imported on use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from linumpy.errors import not_pickled
from linumpy.stream.arguments import integer
from linumpy.stream.batches.feed import Epochs
from linumpy.stream.config import WORD, Config, Sample
from linumpy.stream.errors import InvalidArgument
from linumpy.stream.pipeline import Pipeline

if TYPE_CHECKING:
    from linumpy.gpu import Reader


def torch_dataset(config: Config, samples: Iterable[Sample], *, reader: Reader | None = None) -> Any:
    """Make a dataset that yields batches as tensors on the device.

    Parameters
    ----------
    config : Config
        Configuration of the pipeline that each iteration makes. `rank` and `world_size` divide the samples between
        processes; `epoch` is the epoch of the first iteration.
    samples : iterable of Sample
        Samples that each iteration pushes again: a sequence or a sampler, since an iterator would be exhausted after
        the first iteration. Each iteration is the next epoch, with other crops of a :class:`CropSampler` and another
        augmentation.
    reader : linumpy.gpu.Reader, optional
        As for :class:`Pipeline`; it stays open.

    Returns
    -------
    torch.utils.data.IterableDataset
        The dataset, which yields a tensor, or a dict of tensors where samples have parts. Pass it to
        ``DataLoader(dataset, batch_size=None, num_workers=0)``, since the dataset itself batches samples and reads
        ahead in threads; with workers it raises RuntimeError. ``state_dict()`` returns the state of the current
        iteration, ``load_state_dict(state)`` sets the state of the next iteration, and ``set_epoch(n)`` is for users
        who count epochs themselves.
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
            self._last: dict[str, Any] | None = None  # state of the previous iteration
            self._state: Mapping[str, object] | None = None
            self._epoch = config.epoch

        def __iter__(self) -> Iterator[object]:
            if get_worker_info() is not None:
                raise RuntimeError("batches are on the device of one process: use DataLoader(num_workers=0)")
            state, self._state = self._state, None
            epoch = self._epoch if state is None else integer("epoch", state["epoch"], 0, WORD)
            self._epoch = epoch + 1
            with Pipeline(replace(config, epoch=epoch), reader=reader) as pipeline:
                if state is not None:
                    pipeline.load_state_dict(state)
                self._pipeline = pipeline
                try:
                    pipeline.push(samples)
                    for batch in pipeline.batches():
                        names = batch.tensors._fields
                        tensors = [dlpack.from_dlpack(tensor) for tensor in batch]
                        batch.release()
                        yield tensors[0] if len(tensors) == 1 else dict(zip(names, tensors, strict=True))
                finally:
                    if self._pipeline is pipeline:
                        self._last, self._pipeline = pipeline.state_dict(), None

        def set_epoch(self, epoch: int) -> None:
            """Set the epoch of the next iteration."""
            self._epoch = integer("epoch", epoch, 0, WORD)
            if isinstance(samples, Epochs):
                samples.set_epoch(epoch)

        def state_dict(self) -> dict[str, Any]:
            """Return the state after the last batch of the current iteration, or of the previous one."""
            state = self._last if self._pipeline is None else self._pipeline.state_dict()
            if state is None:
                raise RuntimeError("no iteration has begun")
            return state

        def load_state_dict(self, state: Mapping[str, object]) -> None:
            """Resume from a state, in the next iteration."""
            if not isinstance(state, Mapping) or "epoch" not in state:
                raise InvalidArgument(f"state must be what state_dict() returned (got {state!r})")
            self._state = state

    return StreamDataset()
