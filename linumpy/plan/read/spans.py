"""Where the stored bytes of chunks lie: raw or encoded, in files of their own or in shards.

In: what is known of stored objects: sizes of files, indexes of shards. Out: offset and length of each chunk, or that it
is not stored.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from linumpy.plan.layout import ArrayLayout


def object_grid(layout: ArrayLayout, chunk: np.ndarray) -> np.ndarray:
    """Find the stored object of each chunk: coordinates in the grid of chunk files or shards, (n, rank)."""
    return chunk if layout.shard is None else chunk // np.array(layout.shard.chunks_per_shard)


def number_rows(rows: np.ndarray) -> np.ndarray:
    """Give each row of coordinates a number: equal rows the same one, and in the order of the rows.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, columns)
        Coordinates.

    Returns
    -------
    numpy.ndarray of int64, (n,)
        The numbers; not all below the largest need occur.
    """
    if not len(rows):
        return np.zeros(0, np.int64)
    # Counted from the first one, so that no number leaves int64 however large the array is.
    first = rows.min(axis=0)
    size = (rows.max(axis=0) - first + 1).tolist()
    steps = [1] * len(size)
    for column in reversed(range(1, len(size))):
        steps[column - 1] = steps[column] * size[column]
    if steps[0] * size[0] >= 2**62:
        return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
    return (rows - first) @ np.array(steps, np.int64)


def shard_spans(
    layout: ArrayLayout, chunk: np.ndarray, number: np.ndarray, indexes: Iterable[tuple[int, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Find inner chunks in their shards.

    Parameters
    ----------
    layout : ArrayLayout
        Of the array.
    chunk : numpy.ndarray of int64, (n, rank)
        Inner chunks.
    number : numpy.ndarray of int64, (n,)
        Shard of each, in rising order.
    indexes : iterable of (int, numpy.ndarray of int64, (chunks, 2))
        For each shard its number, and first byte and length of every inner chunk, the first -1 where it is not stored.
        A shard that is left out is not stored.

    Returns
    -------
    offset, nbytes : numpy.ndarray of int64, (n,)
        Bytes of each chunk in its shard; -1 and 0 where it is not stored.
    """
    assert layout.shard is not None
    shape = layout.shard.chunks_per_shard
    inner = np.ravel_multi_index(tuple((chunk % np.array(shape)).T), shape)
    offset, nbytes = np.full(len(chunk), -1, np.int64), np.zeros(len(chunk), np.int64)
    first_span = np.searchsorted(number, np.arange(number[0], number[-1] + 2)) if len(number) else number
    for shard, index in indexes:
        mine = slice(*first_span[shard - number[0] : shard - number[0] + 2].tolist())
        offset[mine], nbytes[mine] = index[inner[mine]].T
    return offset, nbytes
