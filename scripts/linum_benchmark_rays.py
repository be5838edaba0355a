#!/usr/bin/env python3
"""Time samples along rays, beside nerfacc on the same rays, on this machine's GPU.

Timed are 262 144 rays through a grid of 128³ voxels of which 10 % are occupied: given ones (march) and drawn from 100
images of 800 × 800 pixels (generate), in any order and in that of the rays. Beside given rays stands nerfacc's
sampling(), where PyTorch and nerfacc are installed. The samples of the first 1000 rays are compared with those of the
CPU first; a wrong result has no time. Times are medians, by CUDA events after warm-ups.

For example:
  linum-benchmark-rays
  linum-benchmark-rays --only march march-ordered --runs 50 --json rays.json
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from linumpy.benchmark import command
from linumpy.benchmark.suites.rays import MAKERS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    return command.kernels_main("linum-benchmark-rays", __doc__, MAKERS, argv, runs=50, scale="Part of the rays.")


if __name__ == "__main__":
    sys.exit(main())
