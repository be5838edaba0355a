"""Time linumpy beside its peers and beside what the hardware allows.

"linum-benchmark read" is installed. The other suites need a checkout: "python -m benchmarks" there, or this command if
linumpy is installed from it by "pip install --editable".
"""

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from linumpy import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    root = Path(__file__).resolve().parents[1]
    if (root / "pyproject.toml").is_file() and (root / "benchmarks/__main__.py").is_file():
        sys.path.append(str(root))
        code: int = importlib.import_module("benchmarks.__main__").main(words)
        return code
    parser = cli.Parser("linum-benchmark", description=__doc__)
    parser.add_argument("suite", choices=["read"], help="linum-benchmark read --help describes it.")
    parser.parse_args(words[:1])
    from linumpy.benchmark.read import SUITE
    from linumpy.benchmark.timing import run_suite

    return run_suite("linum-benchmark read", SUITE, words[1:])
