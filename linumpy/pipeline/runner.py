"""Run the pipeline stage by stage, all slices of a stage at a time, here or on a dask cluster.

In: a :class:`~linumpy.pipeline.settings.Run`. Out: the results, one folder for each stage, and a :class:`Summary`. A
task is one stage of a slice, or of the brain. It is skipped if its record shows that nothing has changed: a stopped run
continues, and after a change of an option only the tasks that depend on it are repeated. Slices without a recorded tile
are left out, with a log line (warning).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from linumpy.arrays import DeviceName
from linumpy.errors import SourceError
from linumpy.io.output.files import replacing
from linumpy.mosaic.io.slice_table import check_mosaics
from linumpy.pipeline.record import Records, open_records, request_of
from linumpy.pipeline.settings import OPTIONS, Run
from linumpy.pipeline.stages import STAGES, Common, Task, carry_out, is_empty
from linumpy.progress import progress_bar
from linumpy.resample.tile_work import TileWork, Workers, tile_work

log = logging.getLogger(__name__)

#: By role, the files of a slice, or of the brain, that the next stage may take as inputs.
_Files = dict[str, tuple[Path, ...]]


@dataclass(frozen=True, kw_only=True)
class StageSummary:
    """The tasks of a stage, and their times.

    - `done`, `kept`: number of tasks that this run carried out, and number of tasks that an earlier run had carried
      out.
    - `seconds`: sum of the durations of all tasks, including those of earlier runs.
    - `wall_seconds`: duration of the stage in this run.
    - `files`: all outputs of the stage that belong to this run, relative to the folder of the results. The folder of
      the stage may have further files, of earlier runs.
    """

    name: str
    done: int
    kept: int
    seconds: float
    wall_seconds: float
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The stages and results of a run.

    - `slices`: names of all slices, also of those that were left out.
    - `empty`: slices that were left out, because nothing was recorded in them.
    - `stages`: in the order in which they ran.
    - `left_out`: stages that the run leaves out.
    - `results`: last files of each role: one of the brain, such as ``stack``, or one of each slice, such as ``image``.
    """

    slices: tuple[str, ...]
    empty: tuple[str, ...]
    stages: tuple[StageSummary, ...]
    left_out: tuple[str, ...]
    results: dict[str, tuple[Path, ...]]

    def __str__(self) -> str:
        rows = [f"{'stage':<14}{'done':>6}{'kept':>6}{'task s':>10}{'run s':>10}"]
        rows += [
            f"{stage.name:<14}{stage.done:>6}{stage.kept:>6}{stage.seconds:>10.2f}{stage.wall_seconds:>10.2f}"
            for stage in self.stages
        ]
        rows.append(f"{len(self.slices)} slices" + (f", empty: {', '.join(self.empty)}" if self.empty else ""))
        return "\n".join(rows)


def run_pipeline(
    run: Run,
    *,
    device: DeviceName | None = "auto",
    overwrite: bool = False,
    distributed: Workers = None,
    progress: Callable[[str], object] | None = None,
) -> Summary:
    """Carry out a run, without the tasks that an earlier run finished.

    Mosaics and tables are checked before the first stage.

    Parameters
    ----------
    run : Run
        Inputs, options and the folder of the results.
    device : {"auto", "cuda", "cpu"}
        Where voxels are read to and computed; ``"auto"`` is the GPU if there is one, and with `distributed` if all
        workers have one.
    overwrite : bool
        Whether to repeat everything, and to use a folder that has other files.
    distributed : distributed.Client, cluster or str, optional
        A dask client, a cluster, or the address of a scheduler. Its workers, which must see all files, carry out the
        tasks of slices, and the blocks of tasks of the brain.
    progress : callable, optional
        Called with a line for each finished task.

    Raises
    ------
    FileNotFoundError, FileExistsError, ResumeError
        No mosaics, or no parent of the folder of results; a folder of results that has other files, or that another run
        fills.
    SourceError, MetadataError, ValueError, OSError, GpuUnavailableError, WorkerError
        As the functions of the stages. Complete results are kept for the next run.
    """
    mosaics = check_mosaics(run.mosaics, shifts=run.shifts, slice_config=run.slice_config, tile_shape=run.tile_shape)
    slices: dict[str, _Files] = {_name(path): {"image": (path,)} for path in mosaics.values()}
    shared: _Files = {"shifts": (run.shifts,)} if run.shifts is not None else {}
    empty: list[str] = []
    stages: list[StageSummary] = []
    summary = _summary(run, mosaics, empty, stages, {})
    with open_records(run.output, overwrite=overwrite) as records, tile_work(distributed, device=device) as work:
        if overwrite:
            records.clear()
        for name in OPTIONS:
            if name in run.skip:
                continue
            of_slices = {slice_name: shared | files for slice_name, files in slices.items()}
            available = {"brain": _gathered(slices, shared)} if STAGES[name].of_brain else of_slices
            tasks = [_task(run, name, task_name, files) for task_name, files in available.items()]
            files = tuple(str(path.relative_to(run.output)) for task in tasks for path in task.outputs.values())
            stages.append(replace(_carry_out_all(name, tasks, records, work, progress), files=files))
            for task in tasks:
                known = shared if STAGES[name].of_brain else slices[task.name]
                known.update({role: (path,) for role, path in task.outputs.items()})
            if name == "survey":
                for slice_name in [key for key, known in slices.items() if is_empty(known["survey"][0])]:
                    log.warning("%s: nothing was recorded, so it is left out", slice_name)
                    del slices[slice_name]
                    empty.append(slice_name)
                if not slices:
                    raise SourceError(f"{run.mosaics}: nothing was recorded in any slice")
            # After each stage, since the report shows the times, and only the files of this run.
            summary = _summary(run, mosaics, empty, stages, _gathered(slices, shared))
            with replacing(run.output / "pipeline.json", overwrite=True) as temporary:
                temporary.write_text(json.dumps(asdict(summary), indent=1, default=str))
    return summary


def _summary(
    run: Run, mosaics: Mapping[int, Path], empty: list[str], stages: list[StageSummary], results: _Files
) -> Summary:
    return Summary(
        slices=tuple(map(_name, mosaics.values())),
        empty=tuple(empty),
        stages=tuple(stages),
        left_out=tuple(name for name in OPTIONS if name in run.skip),
        results=results,
    )


def _name(path: Path) -> str:
    return path.name.removesuffix(".zarr").removesuffix(".ome")


def _gathered(slices: Mapping[str, _Files], shared: _Files) -> _Files:
    """Return the files of the brain by role: those of all slices, and those that belong to the brain."""
    roles = {role for files in slices.values() for role in files}
    return {role: tuple(path for files in slices.values() for path in files.get(role, ())) for role in roles} | shared


def _task(run: Run, name: str, task_name: str, files: _Files) -> Task:
    """Make the task of a stage for a slice, or for the brain."""
    stage = STAGES[name]
    inputs = {role: files[role] for role in (*stage.needs, *stage.optional) if role in files}
    common = Common(
        levels=run.levels,
        codec=run.codec,
        slicing_interval_mm=run.slicing_interval_mm if stage.of_brain else None,
        tile_shape=run.tile_shape,
    )
    folder = run.output / name
    outputs = {}
    for role, suffix in stage.makes.items():
        stem = "" if not suffix.startswith(".") else role if stage.of_brain else task_name
        outputs[role] = folder / f"{stem}{suffix}"
    return Task(stage=name, name=task_name, options=run.options_of(name), common=common, inputs=inputs, outputs=outputs)


def _carry_out_all(
    name: str, tasks: list[Task], records: Records, work: TileWork, progress: Callable[[str], object] | None
) -> StageSummary:
    """Carry out the unfinished tasks of a stage, and record each of them."""
    begin, seconds = time.perf_counter(), 0.0
    kept = {task.name: found for task in tasks if (found := records.find(task)) is not None}
    unfinished = [task for task in tasks if task.name not in kept]

    def add(task: Task, request: str, task_seconds: float) -> None:
        nonlocal seconds
        seconds += task_seconds
        records.add(task, request, task_seconds)
        log.info("%s of %s: %.2f s", name, task.name, task_seconds)
        if progress is not None:
            progress(f"{name} of {task.name}: {task_seconds:.2f} s")

    if STAGES[name].of_brain:
        for task in unfinished:
            add(task, *_timed(task, work))
    else:
        here = TileWork(work.device)
        # A task reads, computes and writes by itself, so the step to read returns the task, and the step to write
        # records it.
        with progress_bar(name, len(unfinished), "slice") as advance:
            TileWork("cpu", work.client)(
                unfinished, lambda task: task, lambda _, task: _timed(task, here),
                lambda task, result: add(task, *result), done=lambda _: advance(1),
            )  # fmt: skip
    seconds += sum(kept.values())
    return StageSummary(
        name=name,
        done=len(unfinished),
        kept=len(kept),
        seconds=round(seconds, 3),
        wall_seconds=round(time.perf_counter() - begin, 3),
    )


def _timed(task: Task, work: TileWork) -> tuple[str, float]:
    """Carry out a task; return its request (:func:`request_of`) from before it began, and the duration in seconds."""
    request, begin = request_of(task), time.perf_counter()
    try:
        carry_out(task, work)
    except Exception as error:
        log.error("%s of %s failed: %s", task.stage, task.name, error)
        raise
    return request, time.perf_counter() - begin
