"""Where the stored bytes of pieces lie: raw or encoded, in files of their own or in shards.

In: pieces, and what is known of their objects: sizes of files, indexes of shards. Out: spans, ordered by object and
offset, and the pieces that are not stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from linumpy.plan.read.pieces import Pieces
from linumpy.plan.read.plan import ReadPlan
from linumpy.plan.read.slabs import Spans


def raw_spans(pieces: Pieces, number: np.ndarray, straight: np.ndarray) -> Spans:
    """Say which bytes of which file the pieces of raw chunks are.

    Parameters
    ----------
    pieces : Pieces
        All of them.
    number : numpy.ndarray of int64, (n,)
        Object that each lies in.
    straight : numpy.ndarray of int64, (n,)
        Byte of the result where a piece that is contiguous there begins; -1 for the others.
    """
    return Spans(np.arange(len(pieces)), number, pieces.offset, pieces.nbytes, straight)


def encoded_spans(rows: np.ndarray, number: np.ndarray, nbytes: np.ndarray) -> Spans:
    """Say the same of encoded chunks, which are read whole.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (m,)
        Pieces that are stored, one a chunk.
    number : numpy.ndarray of int64, (n,)
        Object that each of all pieces lies in.
    nbytes : numpy.ndarray of int64, (m,)
        Size of the file of each.
    """
    return Spans(rows, number[rows], np.zeros_like(rows), nbytes, np.full_like(rows, -1))


def shard_spans(
    plan: ReadPlan,
    pieces: Pieces,
    rows: np.ndarray,
    number: np.ndarray,
    straight: np.ndarray,
    indexes: Iterable[tuple[int, np.ndarray]],
) -> tuple[Spans, np.ndarray]:
    """Do the same for shards, whose indexes say where the inner chunks lie.

    Parameters
    ----------
    plan : ReadPlan
        What is read.
    pieces, number, straight
        As for :func:`raw_spans`.
    rows : numpy.ndarray of int64, (m,)
        Pieces to look for.
    indexes : iterable of (int, numpy.ndarray of int64, (chunks, 2))
        For each shard of `rows` first byte and length of every inner chunk, the first -1 where it is not stored. A
        shard that is left out is not stored. No index is kept when the next one is asked for.

    Returns
    -------
    spans : Spans
        Of the pieces that are stored, in the order in which they lie in the shards.
    missing : numpy.ndarray of int64
        Pieces that are not stored and read as the fill value.
    """
    shape = plan.chunks_per_object
    inner = np.ravel_multi_index(tuple((pieces.chunk[rows] % np.array(shape)).T), shape)
    begin, length = np.full(len(rows), -1, np.int64), np.zeros(len(rows), np.int64)
    shards = number[rows]
    for shard, index in indexes:
        mine = np.flatnonzero(shards == shard)
        begin[mine], length[mine] = index[inner[mine]].T
    there = np.flatnonzero(begin >= 0)
    stored, offset, nbytes = rows[there], begin[there], length[there]
    if plan.layout.chain is None:
        offset, nbytes = offset + pieces.offset[stored], pieces.nbytes[stored]
    order = np.lexsort((offset, number[stored]))
    stored, offset, nbytes = stored[order], offset[order], nbytes[order]
    return Spans(stored, number[stored], offset, nbytes, straight[stored]), rows[begin < 0]
