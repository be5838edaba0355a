"""Carry out the tiles of a volume, here or on the workers of a dask cluster.

In this process reading, computing and writing of different tiles overlap (``linumpy.resample.blocks.overlap``). On a
cluster, workers read and compute, and this process writes the results that they send: workers need access to the source
only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from linumpy.device import is_device_array, require_cuda, to_host
from linumpy.resample.blocks.overlap import nothing, work_through
from linumpy.resample.workers import Needs, carry_out_on, client_of, survey
from linumpy.write.tasks import Finish

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

Name = TypeVar("Name")
Source = TypeVar("Source")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TileWork:
    """A function that carries out tiles, in this process or on a cluster.

    - `use_gpu`: whether to read tiles to a GPU and compute there.
    - `client`: client of a cluster; None for this process.
    """

    use_gpu: bool
    client: Client | None = None

    @property
    def xp(self) -> ModuleType:
        """The array module of results in this process; results of workers are in host memory."""
        return require_cuda() if self.use_gpu and self.client is None else np

    def __call__(
        self,
        names: Iterable[Name],
        read: Callable[[Name], Source],
        compute: Callable[[Name, Source], Result],
        write: Callable[[Name, Result], Finish | None] = nothing,
        *,
        done: Callable[[Name], object] = nothing,
    ) -> None:
        """Read, compute and write each tile, as :func:`linumpy.resample.blocks.overlap.work_through` does.

        On a cluster `read` and `compute` are sent to workers with all objects to which they refer, and this thread
        calls `write` and `done`, in any order.
        """
        if self.client is None:
            work_through(names, read, compute, write, use_gpu=self.use_gpu, done=done)
            return
        client = self.client

        def make(name: Name) -> object:
            result = compute(name, read(name))
            return to_host(result) if is_device_array(result) else result

        def settle(name: Name, result: Result) -> None:
            (write(name, result) or nothing)()
            done(name)

        carry_out_on(
            client, names, lambda name: client.submit(make, name, pure=False), settle,
            task_name="a tile", memory_parameter="tile_bytes=",
        )  # fmt: skip


@contextmanager
def tile_work(distributed: Client | Cluster | str | None, *, use_gpu: bool) -> Iterator[TileWork]:
    """Yield the :class:`TileWork` of this process, or of a cluster after checking its workers.

    - `use_gpu`: whether to compute on the GPU of this process, or of each worker.
    """
    with client_of(distributed) as client:
        if client is not None:
            survey(client, _needs("cuda" if use_gpu else "cpu"))
        yield TileWork(use_gpu, client)


def workers_have_gpus(distributed: str) -> bool:
    """Wait for the first worker of a cluster, and return whether each worker has a GPU."""
    with client_of(distributed) as client:
        assert client is not None
        return survey(client, _needs("auto")).kind == "cuda"


def _needs(device: str) -> Needs:
    return Needs(source="", metadata="", target="", device=device)
