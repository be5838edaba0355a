"""Carry out tasks, such as the blocks of a volume, on the workers of a dask cluster.

Workers get bytes, and functions that need only Python: a worker without linumpy can report that. dask is imported
inside functions. Errors: :class:`~linumpy.errors.WorkerError`, which names the worker and its missing requirement;
:class:`~linumpy.errors.GpuUnavailableError`; the errors of tasks.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from linumpy.arrays import DeviceName
from linumpy.device import free_memory, require_cuda, resolve, why_no_cuda
from linumpy.errors import GpuUnavailableError, WorkerError
from linumpy.io.open import open_source
from linumpy.io.output.objects import ObjectFolder, Target
from linumpy.io.paths import split_archive
from linumpy.io.source import Source, describe_source
from linumpy.packages import needs
from linumpy.resample.identity import digest_of
from linumpy.version import __version__

if TYPE_CHECKING:
    from distributed import Client, Future, Worker
    from distributed.deploy import Cluster

Name = TypeVar("Name")
Result = TypeVar("Result")

log = logging.getLogger(__name__)

#: Maximum number of submitted tasks for each thread, unless the caller requests more.
_TASKS_PER_THREAD = 4
#: Seconds between two counts of the threads.
_COUNT_SECONDS = 1.0


@contextmanager
def client_of(distributed: Client | Cluster | str | None) -> Iterator[Client | None]:
    """Yield the client of the caller's `distributed`: a client, a cluster, the address of a scheduler, or None.

    A client that this function makes is closed at the end.
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
        if ":" not in distributed:
            raise ValueError(f"distributed={distributed!r}: no address of a scheduler, such as 'tcp://host:8786'")
        try:
            connected = Client(distributed, set_as_default=False)
        except (OSError, ValueError, TimeoutError) as error:
            raise ConnectionError(f"distributed={distributed!r}: no dask scheduler answers there: {error}") from error
        with connected as client:
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

    Workers that join later take part. If a task or `settle` fails, submitted tasks are cancelled.

    - `submit`: takes the name of a task, submits the task, and returns its future.
    - `settle`: called with the name and the result of each completed task, in this thread, in any order.
    - `task_name`, `memory_parameter`: for errors: a description of a task, and the parameter of which a smaller value
      makes tasks take less memory.
    - `min_pending`: number of tasks to submit even if the workers have few threads.
    """
    from distributed import KilledWorker, as_completed

    waiting, threads, counted = iter(names), 0, -_COUNT_SECONDS
    completed = as_completed(loop=client.loop)
    pending: dict[Future, Name] = {}

    def fill() -> None:
        nonlocal threads, counted
        if time.monotonic() - counted >= _COUNT_SECONDS:
            threads, counted = sum(client.nthreads().values()), time.monotonic()
        while len(pending) < max(min_pending, _TASKS_PER_THREAD * threads, 1):
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


#: Share of the free memory of a host or a device for blocks; limit of a thread's blocks in host memory, in bytes.
_SHARE, _MAX_NBYTES = 0.8, 8 * 2**30
#: Shares of a worker's memory limit: planned for blocks, and the most that blocks may take. At 0.8 dask starts no
#: further block, at 0.95 it ends the worker.
_LIMIT_SHARE, _MAX_LIMIT_SHARE = 0.6, 0.8
#: Minimum number of submitted blocks: an adaptive cluster starts workers according to its waiting tasks.
_MIN_PENDING = 64
#: Seconds without a worker before a warning.
_WARN_SECONDS = 30.0


@dataclass(frozen=True)
class Needs:
    """Requirements of each worker.

    - `source`: the array to read; empty for tiles, which need no check of places: the task opens its source, and the
      caller writes.
    - `metadata`: :func:`metadata_digest` of the array: another machine may have other data at the path.
    - `device` (``"auto"``, ``"cuda"`` or ``"cpu"``): the caller's choice of a device.
    - `block_nbytes`: bytes of a block and of the box of the source that it needs; 0 before blocks are planned.
    - `version`: version of linumpy: another version may make other voxels.
    """

    source: Source
    metadata: str
    target: Target | str
    device: DeviceName
    block_nbytes: int = 0
    version: str = __version__

    def lacking(self) -> str:
        """Return a text that names the first requirement that this process lacks; empty if it lacks none."""
        if self.version != __version__:
            return f"linumpy {self.version}: it has {__version__}"
        if not self.source:
            return ""
        if isinstance(self.source, str) and not os.path.isdir(self.source) and split_archive(self.source) is None:
            return f"the disk of the source: there is no folder {self.source}"
        if metadata_digest(self.source) != self.metadata:
            return f"the source: the array in {describe_source(self.source)} is another one there"
        if isinstance(self.target, ObjectFolder):
            return ""
        if not os.path.isdir(self.target):
            return f"the disk of the target: there is no folder {self.target}"
        if not os.access(self.target, os.W_OK | os.X_OK):
            return f"the right to write to {self.target}"
        return ""


def needs_of(source: Source, target: Target, device: DeviceName) -> Needs:
    """Return the requirements of workers before the target exists: they name the nearest existing parent folder."""
    if isinstance(target, Path):
        target = next(parent for parent in target.parents if parent.is_dir())
    return Needs(source, metadata_digest(source), target, device)


def metadata_digest(source: Source) -> str:
    """Return a digest of the metadata of an array, which is opened anew."""
    return digest_of(open_source(source).metadata.to_dict())


@dataclass(frozen=True)
class Capacity:
    """The device and memory that all workers have.

    - `kind`: ``"cuda"`` if each worker has a GPU, or else ``"cpu"``.
    - `nbytes`: bytes that every thread of every worker has for its blocks.
    - `reason`: the worker, host or GPU with the fewest bytes, and why; empty if the fixed limit is the smallest.
    """

    kind: Literal["cuda", "cpu"]
    nbytes: int
    reason: str


def survey(client: Client, needs: Needs) -> Capacity:
    """Wait for the first worker, and ask all workers for their device and memory."""
    ask, payload = _worker_function("answer"), pickle.dumps(needs)
    # An adaptive cluster starts no worker while its queue is empty.
    first = client.submit(ask, payload, pure=False)
    try:
        answers = [first.result(_WARN_SECONDS)]
    except TimeoutError:
        log.warning("the dask cluster %s has no worker yet; waiting for one", client)
        answers = [first.result()]
    for address, reply in client.run(ask, payload, on_error="return").items():
        if isinstance(reply, OSError):
            continue  # the worker has left, as the worker of the first answer may have
        if isinstance(reply, BaseException):
            raise WorkerError(f"worker {address} does not answer: {reply!r}") from reply
        answers.append(reply)
    for answer in answers:
        if isinstance(answer, str):
            raise WorkerError(answer)
        if answer["refused"]:
            raise GpuUnavailableError(f"worker {answer['address']} on {answer['host']}: {answer['no_gpu']}")
    return _capacity({answer["address"]: answer for answer in answers})


def _worker_function(name: str) -> Callable[..., Any]:
    """Return a function for workers, which calls the named function of this module with bytes.

    dask sends a function that is defined inside a function as code: it runs without linumpy, too, and then reports that
    linumpy is missing.
    """

    def run(payload: bytes, number: int = 0, dask_worker: Worker | None = None) -> Any:
        import importlib

        from distributed import get_worker

        worker = dask_worker or get_worker()
        try:
            module = importlib.import_module("linumpy.resample.workers")
        except ImportError as error:
            return f"worker {worker.address} lacks linumpy: {error}"
        return getattr(module, name)(payload, number, worker)

    return run


def answer(payload: bytes, _: int, worker: Worker) -> dict[str, Any] | str:
    """Return, on a worker, the worker's device and memory, or a text that names the requirement that it lacks."""
    import socket

    import psutil

    needs: Needs = pickle.loads(payload)
    if lacking := needs.lacking():
        return f"worker {worker.address} lacks {lacking}"
    refused, device, free = False, "", 0
    try:
        resolved = resolve(needs.device)
        no_gpu = "" if resolved.is_cuda else resolved.reason
    except GpuUnavailableError as error:
        refused, no_gpu = True, str(error)
    if not no_gpu:
        device, free = require_cuda().cuda.Device().pci_bus_id, free_memory()
    return {
        "address": worker.address,
        "host": socket.gethostname(),
        "threads": worker.state.nthreads,
        "limit": int(worker.memory_manager.memory_limit or 0),
        "used": psutil.Process().memory_info().rss,
        "host_free": psutil.virtual_memory().available,
        "no_gpu": no_gpu,
        "refused": refused,
        "device": device,
        "device_free": free,
    }


def _capacity(answers: Mapping[str, Mapping[str, Any]]) -> Capacity:
    """Compute the smallest memory of a thread of any worker; threads of a host, or of a device, share its memory."""
    kind: Literal["cuda", "cpu"] = "cpu" if any(answer["no_gpu"] for answer in answers.values()) else "cuda"
    shared = ("host", "device") if kind == "cuda" else ("host",)
    threads: Counter[tuple[str, ...]] = Counter()
    for answer in answers.values():
        threads[tuple(answer[key] for key in shared)] += answer["threads"]
    candidates = []
    for address, answer in answers.items():
        count = threads[tuple(answer[key] for key in shared)]
        free = answer["device_free"] if kind == "cuda" else answer["host_free"]
        owner = f"GPU {answer['device']}" if kind == "cuda" else f"host {answer['host']}"
        candidates.append((int(_SHARE * free / count), f"{owner} has {free} bytes free for {count} threads"))
        if kind == "cpu":
            candidates.append((_MAX_NBYTES, ""))
            if answer["limit"]:
                remaining = max(0, int(_LIMIT_SHARE * answer["limit"]) - answer["used"]) // answer["threads"]
                counts = f"{answer['limit']} bytes for {answer['threads']} threads"
                text = f"a memory limit of {counts}, and uses {answer['used']}"
                candidates.append((remaining, f"worker {address} has {text}"))
    nbytes, reason = min(candidates)
    return Capacity(kind, nbytes, reason)


def make_on(
    client: Client,
    make: Callable[[Any, int], object],
    job: Any,
    needs: Needs,
    blocks: Mapping[int, Name],
    done: Callable[[Name], object],
    *,
    block_name: str,
) -> None:
    """Make blocks on the workers of a dask cluster; another worker repeats the block of a lost worker.

    - `make`: function, defined in a module, that takes the job and the number of a block and makes the block; making a
      block twice must be harmless.
    - `job`: the parameters of all blocks, which can be pickled, among them `target` and `device`.
    - `blocks`: a name (such as a box) of each block to make, by its number; `done` is called with it, in this thread.
    - `block_name`: a description of a block, for errors.
    """
    payload, sent = pickle.dumps((replace(needs, target=job.target), make, job)), _worker_function("make_sent_block")

    def settle(number: int, lacking: str) -> None:
        if lacking:
            raise WorkerError(lacking)
        done(blocks[number])

    # Not pure: the block must be written again, even if dask still has the result of an equal task.
    carry_out_on(
        client, blocks, lambda number: client.submit(sent, payload, number, pure=False), settle,
        task_name=block_name, memory_parameter="memory_bytes=", min_pending=_MIN_PENDING,
    )  # fmt: skip


def make_sent_block(payload: bytes, number: int, worker: Worker) -> str:
    """Make a block, on a worker; return a text that names the requirement the worker lacks, empty if it lacks none."""
    needs, make, job = pickle.loads(payload)
    lacking = needs.lacking() or _lacking_for_blocks(needs, job.device, worker)
    if lacking:
        return f"worker {worker.address} lacks {lacking}"
    try:
        make(job, number)
    except Exception as error:
        if lacking := needs.lacking():  # such as a disk that was just unmounted
            return f"worker {worker.address} lacks {lacking}"
        error.add_note(f"on worker {worker.address}")
        raise
    return ""


def _lacking_for_blocks(needs: Needs, device: DeviceName, worker: Worker) -> str:
    """Return a text about the GPU or memory that a worker lacks; a worker that joined late was not in the survey."""
    if device == "cuda":
        missing = why_no_cuda()
        return f"a GPU: {missing}" if missing else ""
    limit, threads = int(worker.memory_manager.memory_limit or 0), worker.state.nthreads
    if limit and needs.block_nbytes * threads > _MAX_LIMIT_SHARE * limit:
        return (
            f"memory: its limit is {limit} bytes for {threads} threads, and a block takes {needs.block_nbytes}: pass a "
            "smaller memory_bytes="
        )
    return ""
