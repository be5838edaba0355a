#!/usr/bin/env python3
"""Time voxel operations by Warp on this machine's GPU, beside other methods.

Timed are a boolean operation on two masks of 1024³ voxels (beside CuPy's logical functions, and a plain copy), 1000
capsules removed from 512³ voxels in one pass (beside a launch for each), a dilation by a ball of radius 10
(beside cupyx.scipy.ndimage.binary_dilation) and a sphere of a million triangles made to 512³ voxels, from its vertices
on the device to the mask. Beside each stands SciPy on the host: one core works on a part, and the time is what 16 cores
would take for all of it if nothing were lost.

Each result is checked first; a wrong one is reported as WRONG and has no time. Times are medians, by CUDA events.

For example:
  linum-benchmark-voxel
  linum-benchmark-voxel --only ball mesh --runs 50 --json voxel.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from linumpy.benchmark import command
from linumpy.benchmark.suites.voxel import MAKERS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.kernels_main("linum-benchmark-voxel", __doc__, MAKERS, argv, runs=20, scale="Shrink every axis.")


if __name__ == "__main__":
    sys.exit(main())
