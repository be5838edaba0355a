"""Look at what a read will find, for a plan that people read: stored sizes, reads, where chunks are decoded, memory.

In: a :class:`~linumpy.plan.read.plan.ReadPlan`. Out: the plan with a :class:`~linumpy.plan.read.plan.Survey`. Sizes of
files and indexes of shards are looked at, but no chunk is read, and no GPU is needed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from linumpy.gpu.loop.jobs import Regions, make_request
from linumpy.gpu.loop.limits import Limits, limits_for
from linumpy.gpu.loop.locate import IndexCache, locate
from linumpy.gpu.loop.ticket import Ticket
from linumpy.gpu.loop.wave import Part
from linumpy.gpu.loop.works import Cutter, Work, estimate_scratch, long_way, way_of
from linumpy.gpu.read.request import DEFAULT_SCRATCH_BYTES
from linumpy.gpu.staging.scatter import Conversion
from linumpy.io.reads.file_reads import ReadEngine
from linumpy.plan.read.pieces import c_strides
from linumpy.plan.read.plan import ReadPlan, Survey

#: More device memory than there is.
_ENOUGH = 2**50
#: Looking at more files, or at indexes of more chunks, would take longer than people wait for a plan.
_MOST_OBJECTS, _MOST_CHUNKS = 20_000, 2_000_000


def with_survey(plan: ReadPlan) -> ReadPlan:
    """Add a survey to a plan that the reader can carry out; other plans stay as they are."""
    layout = plan.layout
    if layout.unsupported is not None or not plan.region.size:
        return plan
    limits = limits_for(DEFAULT_SCRATCH_BYTES, on_device=True, decode_on=None, slab_nbytes=None)
    way = ""
    if layout.chain is not None:
        kind = (layout.chain, layout.chunk_nbytes)
        chosen = way_of(kind, plan.chunk_count, limits)
        way, long = str(chosen), long_way(chosen, kind, limits, lambda: _ENOUGH)
        if chosen.slot is None and long.slot is not None:
            needed = f"{2 * long.slot.nbytes / 2**30:.1f} GiB"
            way = f"{long}, where {needed} of device memory are free beside the result; else {way}"
    survey = Survey(way, estimate_scratch(plan, limits), None, None, None, _why_too_many(plan))
    return replace(plan, survey=survey if survey.unknown else _look(plan, limits, survey))


def _why_too_many(plan: ReadPlan) -> str:
    if plan.object_count > _MOST_OBJECTS:
        return f"more than {_MOST_OBJECTS:,} files"
    return f"more than {_MOST_CHUNKS:,} chunks" if plan.chunk_count > _MOST_CHUNKS else ""


def _look(plan: ReadPlan, limits: Limits, survey: Survey) -> Survey:
    layout = plan.layout
    longest = limits.box_nbytes(layout.chunk_nbytes, raw=layout.chain is None)
    if layout.shard is None and layout.chain is None:  # raw chunks have no size to be found
        count = plan.count(longest).pieces
        return replace(survey, pieces=count, reads=count)
    part = _part(plan, limits)
    engine, cutter = ReadEngine(), Cutter([part], limits, lambda _: 0)
    try:
        works = list(cutter.cut(lambda one: locate(one, engine, IndexCache()), lambda *_: None))
    finally:
        engine.close()
    (ticket,) = part.tickets
    if ticket.error is not None:
        return replace(survey, unknown=str(ticket.error))
    reads = sum(
        len(work.slab.nbytes) if work.slab is not None else _spans(work) for work in works if work.kind != "fill"
    )
    pieces = sum(_spans(work) for work in works if work.kind != "fill")
    return replace(survey, pieces=pieces, reads=reads, stored_nbytes=int(part.stored_nbytes.sum()))


def _spans(work: Work) -> int:
    return sum(len(spans) for _, spans in work.rows)


def _part(plan: ReadPlan, limits: Limits) -> Part:
    """Want the whole region, of nobody: nothing is read."""
    layout, region = plan.layout, plan.region
    start, stop = (np.array(side, np.int64).reshape(1, -1) for side in (region.start, region.stop))
    strides = np.array([c_strides(region.box_shape)], np.int64).reshape(1, -1) * layout.dtype.itemsize
    regions = Regions(np.zeros(1, np.int64), start, stop, strides, np.zeros(1, np.int64))
    ticket = Ticket(None, layout.name, lambda *_: None, None)
    conversion = Conversion(layout.dtype, layout.dtype, layout.swapped)
    return Part([make_request(limits, [layout], conversion, regions, plan.chunk_count, None, [ticket])])
