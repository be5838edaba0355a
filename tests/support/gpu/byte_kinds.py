"""Bytes of all kinds that an encoder meets, and of those that are hard for one."""

import numpy as np

from linumpy.testing.stores import oct_voxels


def oct_bytes(shape=(8, 32, 32), dtype="u2", change=0.2634):
    block = tuple(slice(0, n) for n in shape)
    return oct_voxels(np.random.default_rng(1), shape, block, np.dtype(dtype), change).view(np.uint8).reshape(-1)


def grains(rng, nbytes):
    """Copies from a few distances and their neighbours, with and without literals between: every repeated offset."""
    made = list(rng.integers(0, 256, 70, np.uint8))
    distances = rng.integers(1, 60, 4)
    while len(made) < nbytes:
        distance = int(distances[rng.integers(4)]) + int(rng.integers(-1, 2)) or 1
        for _ in range(int(rng.integers(3, 40))):
            made.append(made[-distance])
        made += list(rng.integers(0, 256, int(rng.choice([0, 0, 0, 1, 2, 9])), np.uint8))
    return np.array(made[:nbytes], np.uint8)


def turns(rng, nbytes):
    """Short copies from the distances 1, 2, 4 and 8, one right behind another: no literals before a repeated offset."""
    made = []
    while len(made) < nbytes:
        made += list(rng.integers(0, 256, int(rng.integers(8, 11)), np.uint8))
        for distance in rng.choice([1, 2, 4, 8], int(rng.integers(2, 7))).tolist():
            for _ in range(int(rng.integers(3, 8))):
                made.append(made[-distance])
    return np.array(made[:nbytes], np.uint8)


def fibonacci(rng, nbytes):
    """Literals so unequal in number that their codes are too long for the format."""
    counts = [1, 1]
    while sum(counts) < nbytes:
        counts.append(counts[-1] + counts[-2])
    return rng.permutation(np.repeat(np.arange(len(counts), dtype=np.uint8), counts)[:nbytes])


def words(rng, nbytes):
    """A few words again and again, whole and cut off."""
    every = rng.integers(97, 123, (9, 90), np.uint8)
    return np.resize(np.concatenate([every[k][: rng.integers(3, 90)] for k in rng.integers(0, 9, 200)]), nbytes)


#: From a generator and a size to bytes.
KINDS = {
    "constant": lambda rng, n: np.full(n, rng.integers(256), np.uint8),
    "noise": lambda rng, n: rng.integers(0, 256, n, np.uint8),
    "two": lambda rng, n: rng.integers(0, 2, n, np.uint8),
    "skewed": lambda rng, n: rng.geometric(rng.uniform(0.02, 0.9), n).astype(np.uint8),
    "fibonacci": fibonacci,
    "all": lambda rng, n: np.resize(rng.permutation(256).astype(np.uint8), n),
    "runs": lambda rng, n: np.resize(np.repeat(rng.integers(0, 256, 60, np.uint8), rng.integers(1, 900, 60)), n),
    "words": words,
    "far": lambda rng, n: np.resize(rng.integers(0, 256, int(rng.integers(1, 40000)), np.uint8), n),
    "ends": lambda rng, n: np.concatenate([np.zeros(n // 2, np.uint8), rng.integers(0, 256, n - n // 2, np.uint8)]),
    "grains": grains,
    "turns": turns,
    "oct": lambda _, n: np.resize(oct_bytes(), n),
}  # fmt: skip
