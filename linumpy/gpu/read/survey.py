"""Look at what a read will find, for a plan that people read: stored sizes, reads, the way of decoding, memory.

In: a :class:`~linumpy.plan.read.plan.ReadPlan`. Out: the plan with a :class:`~linumpy.plan.read.plan.Survey`. Sizes of
files and indexes of shards are looked at, but no chunk is read, and no GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace

from linumpy.errors import ChunkError
from linumpy.gpu.read.job import Transfer, plan_transfer
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES, ReadRequest
from linumpy.gpu.read.slab_loop import slabs
from linumpy.plan.read.plan import ReadPlan, Survey

#: Looking at more files, or at indexes of more chunks, would take longer than people wait for a plan.
_MOST_OBJECTS, _MOST_CHUNKS = 20_000, 2_000_000


def with_survey(plan: ReadPlan) -> ReadPlan:
    """Add a survey to a plan that kvikio can carry out; other plans stay as they are."""
    if plan.layout.unsupported is not None or not plan.region.size:
        return plan
    transfer = plan_transfer(ReadRequest(plan, plan.layout.dtype, None, DEFAULT_SCRATCH_BYTES), direct=False)
    way = "" if transfer.way is None else str(transfer.way)
    survey = Survey(way, transfer.scratch_bytes, None, None, None, _why_too_many(plan))
    if survey.unknown:
        return replace(plan, survey=survey)
    try:
        return replace(plan, survey=_look(transfer, survey))
    except ChunkError as error:
        return replace(plan, survey=replace(survey, unknown=str(error)))


def _why_too_many(plan: ReadPlan) -> str:
    if plan.object_count > _MOST_OBJECTS:
        return f"more than {_MOST_OBJECTS:,} files"
    return f"more than {_MOST_CHUNKS:,} chunks" if plan.chunk_count > _MOST_CHUNKS else ""


def _look(transfer: Transfer, survey: Survey) -> Survey:
    if transfer.request.plan.layout.shard is None and transfer.way is None:  # raw chunks have no size to be found
        return replace(survey, pieces=transfer.count.pieces, reads=transfer.count.pieces)
    pieces = reads = stored = 0
    for job in transfer.jobs():
        for slab in slabs(job, []):
            pieces, reads = pieces + len(slab.pieces) + int((slab.straight >= 0).sum()), reads + len(slab.nbytes)
        stored += int(job.stored_nbytes.sum())
    return replace(survey, pieces=pieces, reads=reads, stored_nbytes=stored)
