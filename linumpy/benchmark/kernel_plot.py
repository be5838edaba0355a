"""Times of kernels as a picture: a group of bars for each case, ours first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from linumpy.io.files import replacing

if TYPE_CHECKING:
    from linumpy.benchmark.kernel_run import KernelResult

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_COLOURS = {"linumpy": "#0072B2", "CuPy": "#999999", "torch": "#E69F00"}
_BAR_INCHES, _HEAD_INCHES = 0.24, 1.3


def bars(result: KernelResult) -> list[tuple[str, float]]:
    """List who took how many ms, in the order of the bars; empty where the result is wrong."""
    times = {"linumpy": result.ours_ms, "CuPy": result.peer_ms, result.other: result.other_ms}
    return [(name, statistics.median(some)) for name, some in times.items() if name and some]


def draw(results: Sequence[KernelResult], gpu: str, path: Path) -> None:
    """Draw the times of all cases, in ms on a logarithmic axis, into a file whose ending names its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    count = sum(len(bars(result)) + 1 for result in results)
    figure = Figure(figsize=(9, _HEAD_INCHES + _BAR_INCHES * count), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.set_xscale("log")
    ticks, names, place, seen = [], [], 0, set()
    for result in results:
        group = bars(result)
        ticks.append(place + max(0, len(group) - 1) / 2)
        names.append(result.name if group else f"{result.name}: WRONG")
        for name, time in group:
            label = name if name not in seen else None
            seen.add(name)
            axes.barh(place, time, height=0.85, color=_COLOURS.get(name, "#56B4E9"), label=label)
            axes.annotate(
                f"{time:.3g}", (time, place), xytext=(3, 0), textcoords="offset points", va="center", fontsize=8
            )
            place += 1
        place += 1 if group else 2
    axes.set_yticks(ticks, names)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms, median")
    if seen:
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(seen), fontsize=9)
    figure.suptitle(gpu, fontsize=11)
    with replacing(path, overwrite=True) as temporary:
        figure.savefig(temporary, dpi=120, format=Path(path).suffix[1:] or "png")
