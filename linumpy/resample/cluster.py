"""Carry out tasks on the workers of a dask cluster.

In: the caller's `distributed`. Out: a client of the cluster (:func:`client_of`), and results of tasks in the order in
which the tasks end (:func:`carry_out_on`). dask is imported inside functions. Errors:
:class:`~linumpy.errors.WorkerError`, and the errors of tasks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from linumpy.errors import WorkerError
from linumpy.packages import needs

if TYPE_CHECKING:
    from distributed import Client, Future
    from distributed.deploy import Cluster

Name = TypeVar("Name")
Result = TypeVar("Result")

#: Maximum number of submitted tasks for each thread, unless the caller requests more.
_TASKS_PER_THREAD = 4
#: Seconds between two counts of the threads.
_COUNT_SECONDS = 1.0


@contextmanager
def client_of(distributed: Client | Cluster | str | None) -> Iterator[Client | None]:
    """Yield the client of the caller's `distributed`; a client that this function makes is closed at the end.

    - `distributed`: a client; a cluster, such as ``LocalCluster``; the address of a scheduler; or None, which yields
      None.

    Raises `TypeError`: a value of another type, or an asynchronous client or cluster (``asynchronous=True``).
    Raises `ValueError`: a client or cluster that is closed or failed; a str that is not an address.
    Raises `ConnectionError`: no scheduler answers at the address.
    Raises `ImportError`: ``distributed`` is not installed.
    """
    if distributed is None:
        yield None
        return
    with needs("dask", "dask"):
        from distributed import Client
        from distributed.deploy import Cluster
    if not isinstance(distributed, (Client, Cluster, str)):
        raise TypeError(
            f"distributed={distributed!r}: pass a distributed.Client, a cluster such as LocalCluster, or the address "
            "of a scheduler"
        )
    if isinstance(distributed, str):
        with _connected(distributed) as client:
            yield client
        return
    kind = "client" if isinstance(distributed, Client) else "cluster"
    status = getattr(distributed.status, "name", distributed.status)
    if status in ("closed", "closing", "failed"):
        raise ValueError(f"distributed={distributed!r}: this {kind} is {status}; make a new one")
    if distributed.asynchronous:
        raise TypeError(f"distributed={distributed!r}: this {kind} is asynchronous; make one without asynchronous=True")
    if isinstance(distributed, Client):
        yield distributed
    else:
        with Client(distributed, set_as_default=False) as client:
            yield client


def _connected(address: str) -> Client:
    from distributed import Client

    if ":" not in address:
        raise ValueError(f"distributed={address!r}: no address of a scheduler, such as 'tcp://host:8786'")
    try:
        return Client(address, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConnectionError(f"distributed={address!r}: no dask scheduler answers there: {error}") from error


def carry_out_on(
    client: Client,
    names: Iterable[Name],
    submit: Callable[[Name], Future],
    settle: Callable[[Name, Result], object],
    *,
    task_name: str,
    memory_parameter: str,
    min_pending: int = 0,
) -> None:
    """Carry out tasks on the workers of a dask cluster; only a few tasks for each thread are submitted at a time.

    - `client`: client of the cluster. Workers that join later take part.
    - `names`: a name of each task.
    - `submit`: takes the name of a task, submits the task, and returns its future.
    - `settle`: called with the name and the result of each completed task, in this thread, in any order.
    - `task_name`, `memory_parameter`: for errors: a description of a task, and the parameter of which a smaller value
      makes tasks take less memory.
    - `min_pending`: number of tasks to submit even if the workers have few threads.

    Raises `Exception`: a task failed with this error, or `settle` did; submitted tasks are cancelled.
    """
    from distributed import KilledWorker, as_completed

    waiting, threads = iter(names), _Threads(client)
    completed = as_completed(loop=client.loop)
    pending: dict[Future, Name] = {}

    def fill() -> None:
        while len(pending) < max(min_pending, _TASKS_PER_THREAD * threads.count(), 1):
            for name in waiting:
                future = submit(name)
                pending[future] = name
                completed.add(future)
                break
            else:
                return

    try:
        fill()
        for future in completed:
            try:
                result = future.result()
            except KilledWorker as error:
                raise WorkerError(
                    f"several workers died while they ran {task_name}, the last of them "
                    f"{error.last_worker.address}: if memory was short, pass a smaller {memory_parameter}"
                ) from error
            settle(pending.pop(future), result)
            fill()
    finally:
        client.cancel(list(pending))


class _Threads:
    """Counts the threads of all workers, at most once a second."""

    def __init__(self, client: Client) -> None:
        self._client, self._count, self._counted = client, 0, -_COUNT_SECONDS

    def count(self) -> int:
        now = time.monotonic()
        if now - self._counted >= _COUNT_SECONDS:
            self._count, self._counted = sum(self._client.nthreads().values()), now
        return self._count
