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


def number_rows(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Number equal rows of coordinates alike.

    Parameters
    ----------
    rows : numpy.ndarray of int64, (n, rank)
        Coordinates.

    Returns
    -------
    unique : numpy.ndarray of int64, (k, rank)
        Each row once, in C order.
    number : numpy.ndarray of int64, (n,)
        Which of them each row is.
    """
    if len(rows) < 2 or not rows.shape[1]:
        return rows[:1], np.zeros(len(rows), np.int64)
    # Counted from the first one, so that no number leaves int64 however large the array is.
    first = rows.min(axis=0)
    size = (rows.max(axis=0) - first + 1).tolist()
    total = 1
    for n in size:
        total *= n
    if total >= 2**62:
        return np.unique(rows, axis=0, return_inverse=True)
    flat = rows[:, 0] - first[0]
    for axis in range(1, rows.shape[1]):
        flat = flat * size[axis] + (rows[:, axis] - first[axis])
    if (flat[1:] > flat[:-1]).all():
        return rows, np.arange(len(rows))
    _, where, number = np.unique(flat, return_index=True, return_inverse=True)
    return rows[where], number


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
        Shard of each.
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
    order = np.argsort(number, kind="stable")
    in_order = number[order]
    for shard, index in indexes:
        begin, end = np.searchsorted(in_order, (shard, shard + 1))
        mine = order[begin:end]
        offset[mine], nbytes[mine] = index[inner[mine]].T
    return offset, nbytes
