"""What is kept of each task that is over, so that a stopped run goes on from there.

In: a task, and a digest of all that its outputs depend on. Out: a file for each task, complete or not at all, with that
digest and the identities of inputs and outputs: a task need not be done again if nothing of these has changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from linumpy import __version__
from linumpy.errors import ResumeError
from linumpy.io.output.files import replacing
from linumpy.io.output.folders import lock_work
from linumpy.io.output.syscalls import unlock
from linumpy.pipeline.stages import Task
from linumpy.resample.identity import identify_path

#: Folder of the records, in the folder of the results.
FOLDER = ".pipeline"


@dataclass(frozen=True)
class Record:
    """A task that is over.

    Attributes
    ----------
    request : str
        Digest of the stage, its options, the version and the identities of its inputs.
    outputs : dict of str to str
        The identity of each output, by its path in the folder of the results.
    seconds : float
        Duration.
    """

    request: str
    outputs: dict[str, str]
    seconds: float


class Records:
    """The records of a folder; made by :func:`open_records`."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def find(self, task: Task) -> Record | None:
        """Return the record of a task whose inputs, options and outputs are still the same; else None."""
        try:
            record = Record(**json.loads(self._path(task).read_text()))
            if record.request != request_of(task) or record.outputs != self._identities(task):
                return None
        except (OSError, ValueError, TypeError):
            return None
        return record

    def add(self, task: Task, request: str, seconds: float) -> Record:
        """Record that a task is over: all its outputs are complete.

        Parameters
        ----------
        task : Task
            The task.
        request : str
            :func:`request_of` from before it began: inputs that change meanwhile are then found.
        seconds : float
            Duration.
        """
        record = Record(request, self._identities(task), round(seconds, 3))
        with replacing(self._path(task), overwrite=True) as path:
            path.write_text(json.dumps(asdict(record), indent=1))
        return record

    def clear(self) -> None:
        """Remove all records, so that every task is done anew."""
        for path in (self._output / FOLDER).glob("*.json"):
            path.unlink()

    def _identities(self, task: Task) -> dict[str, str]:
        return {str(path.relative_to(self._output)): identify_path(path) for path in task.outputs.values()}

    def _path(self, task: Task) -> Path:
        return self._output / FOLDER / f"{task.stage}-{task.name}.json"


def request_of(task: Task) -> str:
    """Return a digest of all that the outputs of a task depend on."""
    asked: dict[str, Any] = {"stage": task.stage, "version": __version__, "options": repr(task.options)}
    asked |= {"common": repr(task.common)}
    asked |= {"inputs": {role: [identify_path(path) for path in paths] for role, paths in task.inputs.items()}}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


@contextmanager
def open_records(output: Path, *, overwrite: bool = False) -> Iterator[Records]:
    """Yield the records of a folder of results, which is made if its parent exists, and locked.

    Raises
    ------
    FileExistsError
        The folder has other files, and no records; with `overwrite`, results may replace these.
    ResumeError
        Another run fills the folder.
    """
    folder = output / FOLDER
    if output.is_dir() and not folder.is_dir() and any(output.iterdir()) and not overwrite:
        raise FileExistsError(f"{output} is not empty, and no folder of this pipeline: choose another one")
    with suppress(FileExistsError):
        output.mkdir()
    try:
        descriptor, _ = lock_work(folder)
    except BlockingIOError:
        raise ResumeError(f"{output} is being filled by another run: wait for it, or choose another folder") from None
    try:
        yield Records(output)
    finally:
        unlock(descriptor)
