"""Look at what a read will find, for a plan that people read: stored sizes, reads, the way of decoding, memory.

In: a :class:`~linumpy.plan.read.ReadPlan`. Out: the plan with a :class:`~linumpy.plan.read.Survey`. Sizes of files and
indexes of shards are looked at, but no chunk is read, and no GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace

from linumpy.errors import ChunkError
from linumpy.gpu.job import Job, make_job
from linumpy.gpu.output import DEFAULT_SCRATCH_BYTES, ReadRequest
from linumpy.gpu.reader import slabs
from linumpy.plan.read import ReadPlan, Survey

#: Looking at more files would take longer than people wait for a plan.
_MOST_OBJECTS = 20_000


def with_survey(plan: ReadPlan) -> ReadPlan:
    """Add a survey to a plan that kvikio can carry out; other plans stay as they are."""
    if plan.layout.unsupported is not None or not plan.region.size:
        return plan
    job = make_job(ReadRequest(plan, plan.layout.dtype, None, DEFAULT_SCRATCH_BYTES), direct=False)
    way = "" if job.way is None else str(job.way)
    survey = Survey(way, job.scratch_bytes, None, None, None, "")
    if plan.object_count > _MOST_OBJECTS:
        return replace(plan, survey=replace(survey, unknown=f"more than {_MOST_OBJECTS:,} files"))
    try:
        return replace(plan, survey=_look(job, survey))
    except ChunkError as error:
        return replace(plan, survey=replace(survey, unknown=str(error)))


def _look(job: Job, survey: Survey) -> Survey:
    if job.plan.layout.shard is None and job.way is None:  # raw chunks have no size to be found
        return replace(survey, pieces=len(job.pieces), reads=len(job.pieces))
    pieces = reads = 0
    for slab in slabs(job, []):
        pieces, reads = pieces + len(slab.pieces) + int((slab.straight >= 0).sum()), reads + len(slab.nbytes)
    return replace(survey, pieces=pieces, reads=reads, stored_nbytes=int(job.stored_nbytes.sum()))
