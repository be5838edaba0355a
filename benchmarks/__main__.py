"""``python -m benchmarks SUITE``, which is ``linum-benchmark SUITE`` in a checkout."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from linumpy import cli
from linumpy.benchmark.timing import Suite, run_suite

#: Module of each suite, by the name of its sub-command. ``benchmarks.brains`` is a program of its own.
MODULES = {
    "read": "linumpy.benchmark.read",
    "regions": "benchmarks.regions",
    "stream": "benchmarks.stream",
    "remote": "benchmarks.remote",
    "latency": "benchmarks.latency",
    "verify": "benchmarks.verify",
    "write": "benchmarks.write",
    "resampling": "benchmarks.resampling",
    "tissue": "benchmarks.tissue",
    "correction": "benchmarks.correction",
    "scripts": "benchmarks.scripts",
    "pipeline": "benchmarks.pipeline",
    "sampling": "benchmarks.sampling",
    "paging": "benchmarks.paging",
    "rays": "benchmarks.rays",
    "voxel": "benchmarks.voxel",
    "fields": "benchmarks.fields",
}
_DESCRIPTION = """Time linumpy beside its peers and the limits of the hardware, on this machine.

Each result is checked before it is timed; a wrong result is reported as WRONG and has no time. Times are medians after
warm-ups. A peer that is not installed is reported, with what to install. Suites:
"""


def load(name: str) -> Suite:
    """Import a suite."""
    suite: Suite = importlib.import_module(MODULES[name]).SUITE
    return suite


def main(argv: Sequence[str] | None = None) -> int:
    """Run a suite, or print the list of them."""
    words = sys.argv[1:] if argv is None else list(argv)
    if words and words[0] in MODULES:
        return run_suite(f"linum-benchmark {words[0]}", load(words[0]), words[1:])
    lines = [f"  {name:16}{load(name).help.partition(chr(10))[0]}" for name in MODULES] if words[:1] != [] else []
    text = _DESCRIPTION + "\n".join(lines)
    parser = cli.Parser("linum-benchmark", usage="linum-benchmark SUITE ...", description=text)
    parser.add_argument("suite", choices=MODULES, metavar="SUITE", help="linum-benchmark SUITE --help describes it.")
    parser.parse_args(words[:1])
    return 2


if __name__ == "__main__":
    sys.exit(main())
