"""Time reading a Zarr array into GPU memory: another name of "linum-benchmark read"."""

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; 0 where all went well, 1 where a result was wrong, 2 where nothing could be run."""
    from linumpy.benchmark.read import SUITE
    from linumpy.benchmark.timing import run_suite

    return run_suite("linum-benchmark-kvikio-zarr", SUITE, arguments)
