"""The arrays of suites that read open arrays: 512×1024×1024 uint16 in several codecs, with and without shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from linumpy.benchmark.data import check_free
from linumpy.benchmark.shared.stores import StoredArray, StoreSpec, generate

SHAPE, CHUNK, SHARD = (512, 1024, 1024), (64, 64, 64), (256, 512, 512)


def make_volumes(
    arrays: Mapping[str, tuple[str, bool]], only: Sequence[str], folder: Path, scale: float
) -> Iterator[StoredArray]:
    """Make arrays, or those named in `only`, one after another; `arrays`: name → codec, and whether with shards."""
    for name in only or arrays:
        codec, sharded = arrays[name]
        spec = StoreSpec(name, SHAPE, CHUNK, "uint16", codec, shards=SHARD if sharded else None).scaled(scale)
        check_free(folder, spec.nbytes)
        yield generate(spec, folder)
