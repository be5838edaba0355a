"""Functions on arrays in memory, timed by CUDA events beside a peer and a copy of as many bytes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import ModuleType

from linumpy.arrays import Array
from linumpy.benchmark.timing import GIB, Bench, Check, Suite
from linumpy.device import is_device_array

#: A call to time.
Call = Callable[[], object]


def suite_of_arrays(help: str | None, cases: Mapping[str, Callable[[Bench], None]], runs: int = 20) -> Suite:
    """Return a suite whose cases run on the GPU unless ``--device cpu`` is given."""

    def run(bench: Bench, args: argparse.Namespace) -> None:
        for name, case in cases.items():
            if bench.wants(name):
                case(bench)

    return Suite(run=run, help=help or "", cases=tuple(cases), runs=runs, device="cuda")


def time_arrays(
    bench: Bench, name: str, array: Array, nbytes: float, ours: Call, check: Check, *,
    peer: Call | None = None, peer_name: str = "", share: float = 1.0,
    others: Mapping[str, Callable[[], Call]] | None = None,
) -> None:  # fmt: skip
    """Time a function on arrays.

    - `bench`, `name`, `ours`, `check`: the case, its call, and the check of the result.
    - `array`: what the case is described by.
    - `nbytes`: bytes that must at least be read and written; the row "copy" reads and writes as many.
    - `peer`, `peer_name`, `share`: the same work by another function, by default of CuPy or, on the CPU, SciPy; `share`
      is the part of the work that the call does.
    - `others`: name and maker of the call of further peers, which may be missing.
    """
    source = bench.xp.zeros(max(1, int(nbytes) // 2), "u1")
    target = bench.xp.empty_like(source)
    with bench.case(name, nbytes / GIB, description=f"{array.dtype} {array.shape}", by_events=True) as case:
        case.time("linumpy", ours, check, warm_ups=3)
        if peer is not None:
            case.time(peer_name or ("CuPy" if bench.on_gpu else "SciPy"), peer, share=share)
        for other, make in (others or {}).items():
            with case.attempt(other):
                case.time(other, make())
        case.time("copy", lambda: bench.xp.copyto(target, source), warm_ups=3)


def scaled(length: int, bench: Bench, minimum: int = 16) -> int:
    """Return the length of an axis at the scale of the benchmark."""
    return max(minimum, round(length * bench.scale))


def ndimage_of(array: Array) -> ModuleType:
    """Return cupyx's ``ndimage`` for arrays on the device, else SciPy's."""
    if is_device_array(array):
        import cupyx.scipy.ndimage as ndimage
    else:
        import scipy.ndimage as ndimage
    module: ModuleType = ndimage
    return module
