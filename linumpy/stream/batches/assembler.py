"""Assembles batches: crops that were read → :class:`Batch`.

Borders of direct crops are filled, staged crops are resampled, and rows of faulty samples are closed up.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor

from linumpy.stream.batches.batch import Batch, Tensor
from linumpy.stream.batches.in_flight import InFlight
from linumpy.stream.batches.memory import Memory
from linumpy.stream.config import Config
from linumpy.stream.errors import StreamError
from linumpy.stream.on_device import Stream, recorded
from linumpy.stream.resampling.resample import fill_borders, resample


class Assembler:
    """Assembles batches. On a device, the pipeline's stream must be CuPy's current stream.

    `config`: its `pad`, `pad_value` and `batch_size` are used. `memory`: memory of the batches. `stream`: the
    pipeline's stream; None without a GPU. `threads`: threads that resample NumPy arrays.
    """

    def __init__(self, config: Config, memory: Memory, stream: Stream | None, threads: Executor | None) -> None:
        self._config, self._memory, self._stream, self._threads = config, memory, stream, threads

    def errors(self, item: InFlight) -> dict[int, BaseException]:
        """Wait until the crops of a batch are read; return the first error of each faulty row."""
        errors: dict[int, BaseException] = {}
        for rows, ticket in item.tickets:
            for read, error in ticket.errors(self._stream).items():
                errors.setdefault(rows[read], error)
        return errors

    def assemble(self, item: InFlight, errors: Mapping[int, StreamError]) -> Batch:
        """Assemble a batch of the rows without an error; after an interrupt, another call continues the work."""
        config = self._config
        if not item.is_filled:
            for part, array, direct, staged in zip(item.parts, item.arrays, item.direct, item.staged, strict=True):
                fill_borders(array, part, direct, config.pad_value)
                complete = [crop for crop in staged if crop.read.row not in errors]
                if complete:
                    resample(array, part, complete, config.pad or "edge", config.pad_value, self._threads)
            item.is_filled = True
        rows = [row for row in range(len(item.samples)) if row not in errors]
        moves = [(array, target, row) for array in item.arrays for target, row in enumerate(rows) if target != row]
        for array, target, row in moves[item.moved :]:
            array[target] = array[row]
            item.moved += 1
        ready = None if self._stream is None else recorded(self._stream)
        assert item.lease is not None
        tensors: dict[str, Tensor] = {}
        offset = 0
        for part in item.parts:
            array = self._memory.leased(item.lease, offset, (len(rows), *part.kept), part.element)
            tensors[part.name] = Tensor(array, part.dtype, ready, item.lease)
            offset += part.nbytes(config.batch_size)
        samples = tuple(item.samples[row] for row in rows)
        pointer = 0 if self._stream is None else int(self._stream.ptr)
        return Batch(tensors, samples, item.batch_id, pointer, item.all_errors(errors))
