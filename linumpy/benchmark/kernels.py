"""Cases of functions on arrays in memory: timed by CUDA events, beside the same function by a peer.

In: makers by their names, an array module, a scale. Out: :class:`~linumpy.benchmark.cases.Case` records, made one
after another so that only one is in memory, after a copy on the device: the limit by which bandwidths are judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import Any

from linumpy.benchmark.cases import Case, Check, Entry, Mark, Prepared, ready
from linumpy.device import require_cuda

#: Makes each case by its name, from an array module and a scale.
Makers = Mapping[str, Callable[[ModuleType, float], Case]]

COPY = "copy on the device"
_WARM_UPS = 3
#: Numbers (float32) that are copied at a scale of 1: 1 GiB.
_COPIED = 2**28
#: Of a slow peer fewer runs are made, so that all take about so many seconds.
_PEER_SECONDS = 10.0


def kernel_case(
    name: str,
    shape: Sequence[int],
    dtype: str,
    ours: Callable[[], Any],
    peer: Callable[[], Any],
    check: Check,
    nbytes: int,
    reach: float | None = None,
    *,
    peer_share: float = 1.0,
    copy_reach: float | None = None,
    third: tuple[str, Callable[[], AbstractContextManager[Prepared]]] | None = None,
    peer_name: str = "CuPy",
) -> Case:
    """Describe a function and its peer.

    Parameters
    ----------
    name : str
        For people, and to choose it by.
    shape, dtype
        Of its volume.
    ours, peer : callable
        Take nothing, return a result. Ours is checked.
    check : callable
        Says why a result is wrong.
    nbytes : int
        What must be read and written at least.
    reach : float, optional
        How many times faster than the peer it should be.
    peer_share : float
        The part of the work that the peer does, where all of it would take too long.
    copy_reach : float, optional
        The part of a plain copy's bandwidth that it should reach.
    third : (str, callable), optional
        Another package, and what prepares its call; it says by an error if it is not installed.
    peer_name : str
        Of the peer.
    """
    entries = [
        Entry("linumpy", "linumpy", ready(ours, check), "ours", _WARM_UPS),
        Entry(peer_name.lower(), peer_name, ready(peer), warm_ups=1, max_seconds=_PEER_SECONDS, share=peer_share),
    ]
    if third is not None:
        entries.append(Entry(third[0], third[0], third[1], warm_ups=_WARM_UPS))
    marks = []
    if reach is not None:
        marks.append(Mark(reach, (peer_name.lower(),), f"× {peer_name}"))
    if copy_reach is not None:
        marks.append(Mark(copy_reach, (f"{COPY}/copy",), "× copy"))
    return Case(
        name=name,
        nbytes=int(nbytes),
        entries=tuple(entries),
        description=(f"{'×'.join(map(str, shape))} {dtype}",),
        facts={"shape": list(shape), "dtype": dtype},
        marks=tuple(marks),
        clock="device",
    )


def kernel_cases(
    makers: Makers, scale: float = 1.0, only: Sequence[str] = (), xp: ModuleType | None = None
) -> Iterator[Case]:
    """Make the copy on the device, then the cases asked for.

    Parameters
    ----------
    makers : mapping
        All cases of the suite.
    scale : float
        Every axis is shrunk by it; marks are judged at 1 only.
    only : sequence of str
        Names of the cases; all by default.
    xp : module, optional
        By default CuPy.

    Raises
    ------
    GpuUnavailableError
        There is no CUDA device, and no other module is asked for.
    ValueError
        A case that is not known, or a scale that is not in 0 to 1.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale={scale}: more than 0, at most 1")
    unknown = [name for name in only if name not in makers]
    if unknown:
        raise ValueError(f"case {unknown[0]!r} is unknown: choose from {', '.join(makers)}")
    return _make(makers, require_cuda() if xp is None else xp, scale, only)


def _make(makers: Makers, xp: ModuleType, scale: float, only: Sequence[str]) -> Iterator[Case]:
    why = "" if scale == 1 else "marks are for a scale of 1"
    yield _copy(xp, scale)
    for name, make in makers.items():
        if not only or name in only:
            yield replace(make(xp, scale), not_judged=why)  # in no variable: the caller alone keeps its arrays alive


def _copy(xp: Any, scale: float) -> Case:
    """Time a copy on the device."""
    source = xp.zeros(max(2**20, round(_COPIED * scale**3)), xp.float32)
    target = xp.empty_like(source)
    entry = Entry("copy", "copy", ready(lambda: xp.copyto(target, source)), "limit", _WARM_UPS)
    return Case(COPY, 2 * int(source.nbytes), (entry,), ("bytes read and written",), clock="device")
