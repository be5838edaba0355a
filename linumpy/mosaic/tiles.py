"""Work through tiles: the next one is read while one is computed and the last one is written.

In: boxes, and what reads, computes and writes one. Out: nothing but what is written, in the order of the boxes. At most
three tiles are in memory. Errors: that of whichever step failed first, once, after the others have come to rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from linumpy.device import require_cuda

Box = TypeVar("Box")
Tile = TypeVar("Tile")
Result = TypeVar("Result")


def work_through(
    boxes: Iterable[Box],
    read: Callable[[Box], Tile],
    compute: Callable[[Box, Tile], Result],
    write: Callable[[Box, Result], object],
    *,
    use_gpu: bool = False,
) -> None:
    """Read, compute and write tile after tile, three at a time.

    Parameters
    ----------
    boxes : iterable
        What names each tile.
    read : callable
        Box → tile; in a thread of its own.
    compute : callable
        Box, tile → result; in the caller's thread.
    write : callable
        Takes box and result; in a thread of its own, in the order of the boxes. It is where a device's result goes to
        the host.
    use_gpu : bool
        Whether the threads work on the caller's current CUDA device.
    """
    with ThreadPoolExecutor(1, "linumpy-read") as reader, ThreadPoolExecutor(1, "linumpy-write") as writer:
        here = _same_device(use_gpu)

        def on_device(step: Callable[..., Any], *arguments: Any) -> Any:
            with here():
                return step(*arguments)

        written: Future[Any] | None = None
        for box, tile in _read_ahead(boxes, lambda box: reader.submit(on_device, read, box)):
            result = compute(box, tile)
            del tile
            if written is not None:
                written.result()
            written = writer.submit(on_device, write, box, result)
            del result
        if written is not None:
            written.result()


def _read_ahead(boxes: Iterable[Box], submit: Callable[[Box], Future[Tile]]) -> Iterator[tuple[Box, Tile]]:
    waiting: tuple[Box, Future[Tile]] | None = None
    for box in boxes:
        following = box, submit(box)
        if waiting is not None:
            yield waiting[0], waiting[1].result()
        waiting = following
    if waiting is not None:
        yield waiting[0], waiting[1].result()


def _same_device(use_gpu: bool) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes a thread work on the device that the caller works on: each thread has its own."""
    if not use_gpu:
        return nullcontext
    cupy = require_cuda()
    number = cupy.cuda.Device().id
    return lambda: cupy.cuda.Device(number)  # type: ignore[no-any-return]
