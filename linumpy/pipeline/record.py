"""Records of finished tasks, so that a stopped run can be continued.

In: a task, and its request, a digest of everything that the outputs of the task depend on. Out: a file for each task,
written completely or not at all, with the request and the identities of the outputs
(:mod:`linumpy.resample.identity`). A task is not repeated if its request and its outputs are unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from linumpy.io.output.files import replacing
from linumpy.pipeline.stages import Task
from linumpy.resample.identity import digest_of, identify_path
from linumpy.resample.resumable import locked
from linumpy.version import __version__

#: Folder of the records, in the folder of the results.
FOLDER = ".pipeline"


class Records:
    """The records of a folder; made by :func:`open_records`."""

    def __init__(self, output: Path) -> None:
        self._output = output

    def find(self, task: Task) -> float | None:
        """Return how many seconds a finished task took; None if inputs, options or outputs have changed since."""
        with suppress(OSError, ValueError, TypeError, KeyError):
            record = json.loads(self._path(task).read_text())
            if record["request"] == request_of(task) and record["outputs"] == self._identities(task):
                return float(record["seconds"])
        return None

    def add(self, task: Task, request: str, seconds: float) -> None:
        """Record that a task is finished, which means that all its outputs are complete.

        - `request`: result of :func:`request_of` from before the task began. If an input changes while the task runs,
          the record does not match, and the next run repeats the task.
        """
        record = {"request": request, "outputs": self._identities(task), "seconds": round(seconds, 3)}
        with replacing(self._path(task), overwrite=True) as path:
            path.write_text(json.dumps(record, indent=1))

    def clear(self) -> None:
        """Remove all records, so that every task is repeated."""
        for path in (self._output / FOLDER).glob("*.json"):
            path.unlink()

    def _identities(self, task: Task) -> dict[str, str]:
        return {str(path.relative_to(self._output)): identify_path(path) for path in task.outputs.values()}

    def _path(self, task: Task) -> Path:
        return self._output / FOLDER / f"{task.stage}-{task.name}.json"


def request_of(task: Task) -> str:
    """Return a digest of everything that the outputs of a task depend on."""
    request = {
        "stage": task.stage,
        "version": __version__,
        "options": repr(task.options),
        "common": repr(task.common),
        "inputs": {role: [identify_path(path) for path in paths] for role, paths in task.inputs.items()},
    }
    return digest_of(request)


@contextmanager
def open_records(output: Path, *, overwrite: bool = False) -> Iterator[Records]:
    """Yield the records of a folder of results; the folder is made if it does not exist, and locked.

    Raises `FileNotFoundError`: the parent of the folder does not exist. `FileExistsError`: the folder has files but no
    records, and `overwrite` is False. With `overwrite` results may replace files. `ResumeError`: another run fills the
    folder.
    """
    folder = output / FOLDER
    if output.is_dir() and not folder.is_dir() and any(output.iterdir()) and not overwrite:
        raise FileExistsError(f"{output} is not empty, and no folder of this pipeline: choose another folder")
    with suppress(FileExistsError):
        output.mkdir()
    with locked(folder, output):
        yield Records(output)
