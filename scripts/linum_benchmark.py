#!/usr/bin/env python3
"""Time linumpy beside its peers: ``linum-benchmark SUITE``; see :mod:`linumpy.benchmark.command`."""

import sys

from linumpy.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
