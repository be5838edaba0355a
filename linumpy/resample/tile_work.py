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
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from linumpy.arrays import DeviceName
from linumpy.device import array_module_of, is_device_array, requested_kind, resolve, to_host
from linumpy.resample.blocks.overlap import nothing, work_through
from linumpy.resample.workers import Needs, carry_out_on, client_of, survey
from linumpy.write.tasks import Finish

if TYPE_CHECKING:
    from distributed import Client
    from distributed.deploy import Cluster

#: A dask client, a cluster, or the address of a scheduler; None for this process.
Workers: TypeAlias = "Client | Cluster | str | None"

Name = TypeVar("Name")
Source = TypeVar("Source")
Result = TypeVar("Result")


@dataclass(frozen=True)
class TileWork:
    """A function that carries out tiles, in this process or on a cluster.

    - `device` ("cuda" or "cpu"): where tiles are read to and computed, here or on each worker.
    - `client`: client of a cluster; None for this process.
    """

    device: DeviceName
    client: Client | None = None

    @property
    def xp(self) -> ModuleType:
        """The array module of results in this process; results of workers are in host memory."""
        return array_module_of(self.device_here)

    @property
    def device_here(self) -> DeviceName:
        """Where this process computes what it does not give to workers."""
        return self.device if self.client is None else "cpu"

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
            work_through(names, read, compute, write, device=self.device, done=done)
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
def tile_work(distributed: Workers, *, device: DeviceName | None) -> Iterator[TileWork]:
    """Yield the :class:`TileWork` of this process, or of a cluster after checking its workers.

    - `distributed`: as for :func:`linumpy.resample.workers.client_of`.
    - `device`: as for :func:`linumpy.device.resolve`; with workers ``"auto"`` is the GPU if all have one.

    Raises `GpuUnavailableError`: ``"cuda"``, and this process, or a worker, has no GPU.
    Raises `WorkerError`: a worker lacks linumpy, or has another version.
    """
    with client_of(distributed) as client:
        if client is None:
            yield TileWork(resolve(device).kind)
        else:
            needs = Needs(source="", metadata="", target="", device=requested_kind(device))
            yield TileWork(survey(client, needs).kind, client)
