#!/usr/bin/env python3
"""Time linumpy beside its peers and beside what the hardware allows."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; see :mod:`linumpy.benchmark.command`."""
    from linumpy.benchmark.command import main

    return main(arguments)


if __name__ == "__main__":
    sys.exit(main())
