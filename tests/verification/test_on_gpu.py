"""If this fails, verification on a device finds something else than on the host."""

import numpy as np
import pytest

import linumpy
from linumpy.verification.chunks import _zero_mask
from tests.support.mutated_images import BYTES, CHUNKS, CODECS, MISSING, make, mutate


@pytest.mark.gpu
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("thorough", [False, True])
def test_findings_are_those_of_the_host(tmp_path, codec, thorough):
    rng = np.random.default_rng(7)
    for number, name in enumerate(("none", *BYTES, *MISSING, *CHUNKS)):
        made = make(tmp_path / str(number), [7, number], codec)
        if name != "none":
            mutate(name, rng, made)
        host, device = (linumpy.verify(made.folder, device=one, thorough=thorough) for one in ("cpu", "cuda"))
        assert list(map(str, device.findings)) == list(map(str, host.findings)), name
        assert list(map(str, device.arrays)) == list(map(str, host.arrays)), name


def test_chunks_of_zeros_of_a_block():
    """As on a device: ragged blocks, NaN, and chunks of one voxel."""
    rng = np.random.default_rng(0)
    for shape, chunk in (((5, 7, 9), (2, 3, 4)), ((4, 6), (2, 3)), ((3,), (1,)), ((8, 8), (8, 8))):
        voxels = np.where(rng.random(shape) < 0.1, np.float32(np.nan), 0).astype("f4")
        counts = [-(-n // c) for n, c in zip(shape, chunk, strict=True)]
        mask = _zero_mask(voxels, counts, chunk)
        for index in np.ndindex(*counts):
            part = voxels[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk, strict=True))]
            assert mask[index] == (not np.any(part != 0)), (shape, index)
