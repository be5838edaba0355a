"""Make the blocks of a resampled volume on the workers of a dask cluster.

In: what the caller passes as `distributed`, and a :class:`~linumpy.resample.pipeline.BlockJob`. Out: the device and
the memory that all workers have (:func:`survey`), and blocks (:func:`make_blocks_on`). What is sent to a worker is
bytes and functions that need nothing but Python, so that one without linumpy answers that it has none. dask is imported
here, inside functions. Errors: :class:`~linumpy.errors.WorkerError`, which names the worker and what it lacks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from linumpy import __version__
from linumpy.device import install_line, require_cuda, resolve, why_no_cuda
from linumpy.errors import GpuUnavailableError, WorkerError
from linumpy.gpu.read.request import free_memory
from linumpy.plan.grid.blocks import Block
from linumpy.resample.pipeline import BlockJob, make_block

log = logging.getLogger(__name__)

#: Of what is free on a host or a device, blocks take so much; in host memory no more than so many bytes for a thread.
_SHARE, _MOST = 0.8, 8 * 2**30
#: Of a worker's memory limit: dask starts no block from 0.8 of it on, and ends the worker at 0.95.
_LIMIT_SHARE, _LIMIT_MOST = 0.6, 0.8
#: Blocks under way for each thread, and at least: an adaptive cluster asks for workers by the tasks that wait.
_A_THREAD, _LEAST = 4, 64
#: Seconds between two looks at how many threads there are.
_LOOK_SECONDS = 1.0
#: After so many seconds without a worker, a warning says what is waited for.
_WARN_SECONDS = 30.0


@contextmanager
def client_of(distributed: Any) -> Iterator[Any]:
    """Give the client of what a caller passes as `distributed`; one that is made here is closed at the end.

    Parameters
    ----------
    distributed : distributed.Client, cluster, str or None
        A client; a cluster, such as ``LocalCluster``; the address of a scheduler; or None, for which there is none.

    Raises
    ------
    TypeError
        Anything else, or a client or cluster of an event loop (``asynchronous=True``).
    ValueError
        A client or cluster that is closed; text that is no address.
    ConnectionError
        No scheduler answers at the address.
    ImportError
        ``distributed`` is not installed.
    """
    if distributed is None:
        yield None
        return
    try:
        from distributed import Client
        from distributed.deploy import Cluster
    except ImportError as error:
        raise ImportError(f"dask is not installed ({error}): {install_line('dask')}") from error
    if not isinstance(distributed, (Client, Cluster, str)):
        raise TypeError(
            f"distributed={distributed!r}: a distributed.Client, a cluster such as LocalCluster, or the address of a "
            "scheduler is needed"
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


def _connected(address: str) -> Any:
    from distributed import Client

    if ":" not in address:
        raise ValueError(f"distributed={address!r}: no address of a scheduler, such as 'tcp://host:8786'")
    try:
        return Client(address, set_as_default=False)
    except (OSError, ValueError, TimeoutError) as error:
        raise ConnectionError(f"distributed={address!r}: no dask scheduler answers there: {error}") from error


@dataclass(frozen=True)
class Needs:
    """What the blocks of a volume need of each worker.

    Attributes
    ----------
    source : str
        Folder of the array that is read.
    metadata : str
        Digest of its metadata, by :func:`metadata_digest`: at the same path another machine may have other data.
    target : str
        Folder that is written to.
    device : {"auto", "cuda", "cpu"}
        What the caller wishes.
    block_nbytes : int
        Bytes of a block and the box that it is made from; 0 before blocks are planned.
    version : str
        Of linumpy: another one may make other voxels.
    """

    source: str
    metadata: str
    target: str
    device: str
    block_nbytes: int = 0
    version: str = __version__

    def lacking(self) -> str:
        """Say what this process lacks; nothing where it has it all."""
        if self.version != __version__:
            return f"linumpy {self.version}: it has {__version__}"
        if not os.path.isdir(self.source):
            return f"the disk of the source: there is no folder {self.source}"
        if metadata_digest(self.source) != self.metadata:
            return f"the disk of the source: the array in {self.source} is another one there"
        if not os.path.isdir(self.target):
            return f"the disk of the target: there is no folder {self.target}"
        if not os.access(self.target, os.W_OK | os.X_OK):
            return f"the right to write to {self.target}"
        return ""


def needs_of(source: str, target: Path, device: str) -> Needs:
    """Say what workers need before the target is there: the nearest folder above it that exists."""
    above = next(one for one in target.parents if one.is_dir())
    return Needs(source, metadata_digest(source), str(above), device)


def metadata_digest(folder: str) -> str:
    """Identify the metadata of an array."""
    digest = hashlib.sha256()
    for name in ("zarr.json", ".zarray"):
        path = Path(folder, name)
        if path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Capacity:
    """What the workers have together.

    Attributes
    ----------
    kind : {"cuda", "cpu"}
        Where they make blocks: the GPU only where each of them has one.
    nbytes : int
        Bytes that blocks may take for one thread of any of them.
    reason : str
        Which worker leaves the fewest, and why.
    """

    kind: str
    nbytes: int
    reason: str


def survey(client: Any, needs: Needs) -> Capacity:
    """Ask the workers what they have; waits for the first one.

    Raises
    ------
    WorkerError
        One of them lacks something.
    GpuUnavailableError
        ``"cuda"`` was asked for, and a worker has none.
    """
    ask, payload = _sent("answer"), pickle.dumps(needs)
    # A task in the queue: without one, an adaptive cluster starts no worker.
    first = client.submit(ask, payload, pure=False)
    try:
        answers = [first.result(_WARN_SECONDS)]
    except TimeoutError:
        log.warning("the dask cluster %s has no worker yet; waiting for one", client.scheduler.address)
        answers = [first.result()]
    for address, one in client.run(ask, payload, on_error="return").items():
        if isinstance(one, OSError):
            continue  # it has just left, as the one that answered first may have
        if isinstance(one, BaseException):
            raise WorkerError(f"worker {address} does not answer: {one!r}") from one
        answers.append(one)
    for one in answers:
        if isinstance(one, str):
            raise WorkerError(one)
        if one["refused"]:
            raise GpuUnavailableError(f"worker {one['address']} on {one['host']}: {one['no_gpu']}")
    return _capacity({one["address"]: one for one in answers})


def _sent(name: str) -> Callable[..., Any]:
    """Make what workers run: the function of this module of a name, with bytes.

    It is sent as code, since it is defined inside a function; so it runs where linumpy is not installed, and says so.
    """

    def run(payload: bytes, number: int = 0, dask_worker: Any = None) -> Any:
        import importlib

        from distributed import get_worker

        worker = dask_worker or get_worker()
        try:
            module = importlib.import_module("linumpy.resample.workers")
        except ImportError as error:
            return f"worker {worker.address} lacks linumpy: {error}"
        return getattr(module, name)(payload, number, worker)

    return run


def answer(payload: bytes, _: int, worker: Any) -> Any:
    """Tell, on a worker, what it has: numbers, or a text that says what it lacks."""
    import socket

    import psutil

    needs: Needs = pickle.loads(payload)
    if lacking := needs.lacking():
        return f"worker {worker.address} lacks {lacking}"
    refused, device, free = False, "", 0
    try:
        found = resolve(needs.device)
        no_gpu = "" if found.is_cuda else found.reason
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
    """Find what every thread of every worker has, where those of one host, or of one device, share its memory."""
    kind = "cpu" if any(one["no_gpu"] for one in answers.values()) else "cuda"
    shared = ("host", "device") if kind == "cuda" else ("host",)
    threads: Counter[tuple[str, ...]] = Counter()
    for one in answers.values():
        threads[tuple(one[key] for key in shared)] += one["threads"]
    found = []
    for address, one in answers.items():
        together = threads[tuple(one[key] for key in shared)]
        free = one["device_free"] if kind == "cuda" else one["host_free"]
        where = f"GPU {one['device']}" if kind == "cuda" else f"host {one['host']}"
        found.append((int(_SHARE * free / together), f"{where} has {free} bytes free for {together} threads"))
        if kind == "cpu":
            found.append((_MOST, ""))
            if one["limit"]:
                left = max(0, int(_LIMIT_SHARE * one["limit"]) - one["used"]) // one["threads"]
                text = f"a memory limit of {one['limit']} bytes for {one['threads']} threads, and uses {one['used']}"
                found.append((left, f"worker {address} has {text}"))
    nbytes, reason = min(found)
    return Capacity(kind, nbytes, reason)


def make_blocks_on(
    client: Any, job: BlockJob, needs: Needs, blocks: Iterable[Block], done: Callable[[Block], object]
) -> None:
    """Make blocks on the workers of a dask cluster; a block whose worker is lost is made again by another.

    A few blocks for each thread of each worker are under way, so that the graph stays small however large the volume.
    Workers that come later take part.

    Parameters
    ----------
    client : distributed.Client
        Of a cluster whose workers see the paths of source and target.
    job, blocks, done
        As for :func:`linumpy.resample.pipeline.make_blocks`.
    needs : Needs
        What each worker must have.

    Raises
    ------
    WorkerError
        A worker that came later lacks something; or workers died, one after another, while they made one block.
    """
    from distributed import KilledWorker, as_completed

    queue = deque(blocks)
    payload, make = pickle.dumps((needs, job)), _sent("make_sent_block")
    threads = _Threads(client)
    under_way = as_completed(loop=client.loop)
    pending: dict[Any, Block] = {}

    def submit() -> None:
        while queue and len(pending) < max(_LEAST, _A_THREAD * threads.count()):
            block = queue.popleft()
            # Not pure: its worth is what it writes, so a result kept from another run must not stand in for it.
            future = client.submit(make, payload, block.number, pure=False)
            pending[future] = block
            under_way.add(future)

    try:
        submit()
        for future in under_way:
            try:
                lacking = future.result()
            except KilledWorker as error:
                raise WorkerError(
                    f"a block of {job.plan.largest} voxels (read, made) was under way on worker after worker when they "
                    f"died, the last of them {error.last_worker.address}: where memory was short, pass a smaller "
                    "device_memory="
                ) from error
            if lacking:
                raise WorkerError(lacking)
            done(pending.pop(future))
            submit()
    finally:
        client.cancel(list(pending))


class _Threads:
    """How many threads the workers have together, asked for now and then."""

    def __init__(self, client: Any) -> None:
        self._client, self._count, self._asked = client, 0, -_LOOK_SECONDS

    def count(self) -> int:
        now = time.monotonic()
        if now - self._asked >= _LOOK_SECONDS:
            self._count, self._asked = sum(self._client.nthreads().values()), now
        return self._count


def make_sent_block(payload: bytes, number: int, worker: Any) -> str:
    """Make a block, on a worker; returns what this one lacks, or nothing where the block is made."""
    needs, job = pickle.loads(payload)
    lacking = needs.lacking() or _lacking_for_blocks(needs, job, worker)
    if lacking:
        return f"worker {worker.address} lacks {lacking}"
    try:
        make_block(job, number)
    except Exception as error:
        if lacking := needs.lacking():  # a disk that went away while the block was made
            return f"worker {worker.address} lacks {lacking}"
        error.add_note(f"on worker {worker.address}")
        raise
    return ""


def _lacking_for_blocks(needs: Needs, job: BlockJob, worker: Any) -> str:
    """Say what a worker lacks of what the others were planned for: one that came later was not asked."""
    if job.device == "cuda":
        missing = why_no_cuda()
        return f"a GPU: {missing}" if missing else ""
    limit, threads = int(worker.memory_manager.memory_limit or 0), worker.state.nthreads
    if limit and needs.block_nbytes * threads > _LIMIT_MOST * limit:
        return (
            f"memory: its limit is {limit} bytes for {threads} threads, and a block takes {needs.block_nbytes}: pass a "
            "smaller device_memory="
        )
    return ""
