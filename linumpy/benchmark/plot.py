"""Results as a picture: one panel per case, one bar per path, the limits as lines across the bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linumpy.benchmark.machine import Machine
from linumpy.benchmark.runner import OK, UNAVAILABLE, CaseResult, PathResult
from linumpy.benchmark.table import number, size
from linumpy.io.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_OURS, _OTHERS, _BAD = "#0072B2", "#999999", "#D55E00"
_LIMITS = {"flat": ("#000000", "-"), "h2d": ("#D55E00", "--")}
_GDS = {"native": "native", "not native": "not native", "compat": "off, kvikio in compat mode", "none": "no kvikio"}
_BAR_INCHES, _PANEL_INCHES, _HEAD_INCHES = 0.28, 0.8, 0.9


def draw(results: Sequence[CaseResult], machine: Machine, date: str, path: Path) -> None:
    """Draw the rates of all cases into a file whose ending names its format.

    Parameters
    ----------
    results : sequence of CaseResult
        At least one.
    machine : Machine
        For the title.
    date : str
        For the title; ISO 8601.
    path : Path
        The file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [_PANEL_INCHES + _BAR_INCHES * len(_bars(result)) for result in results]
    figure = Figure(figsize=(10, _HEAD_INCHES + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, result in zip(panels, results, strict=True):
        _panel(panel, result)
    panels[-1].set_xlabel("GiB of decoded bytes per second")
    first = results[0].settings
    cache = "cold" if first.cold else "warm"
    where = (
        f"{machine.gpu}; GDS: {_GDS[machine.gds.mode]}" if machine.gpu else f"{machine.cpu}, no GPU: host paths only"
    )
    figure.suptitle(
        f"{where} — {date[:10]}\n{cache} page cache, medians of {first.runs}, black lines from min to max", fontsize=11
    )
    with replacing(path, overwrite=True) as temporary:
        figure.savefig(temporary, dpi=120, format=Path(path).suffix[1:] or "png")


def _bars(result: CaseResult) -> list[PathResult]:
    return [one for one in result.paths if not one.is_limit]


def _panel(axes: Axes, result: CaseResult) -> None:
    bars = _bars(result)
    case = result.case
    axes.set_title(f"{case.name}  ({size(case.nbytes)}, ratio {case.ratio:.2f})", fontsize=10, loc="left")
    axes.set_yticks(range(len(bars)), [one.title for one in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first path on top
    axes.spines[["top", "right"]].set_visible(False)
    # Room on the right for the number at the end of the longest bar.
    axes.set_xlim(0, 1.12 * max([one.rate or 0 for one in result.paths], default=0) or 1)
    for row, one in enumerate(bars):
        _bar(axes, row, one)
    _limits(axes, [one for one in result.paths if one.is_limit and one.rate])


def _bar(axes: Axes, row: int, one: PathResult) -> None:
    room: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    room["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a limit's line stops at the text
    if one.verdict != OK or one.rate is None:
        colour = "dimgray" if one.verdict == UNAVAILABLE else _BAD
        text = f"{one.verdict}: {one.note}"
        axes.annotate(text if len(text) < 72 else text[:71] + "…", (0, row), color=colour, **room)
        return
    axes.barh(row, one.rate, height=0.68, color=_OURS if one.name.startswith("linumpy") else _OTHERS)
    low, high = (one.nbytes / seconds / 2**30 for seconds in (max(one.seconds), min(one.seconds)))
    axes.hlines(row, low, high, colors="black", linewidth=1.5)
    axes.annotate(number(one.rate), (max(high, one.rate), row), **room)


def _limits(axes: Axes, limits: Sequence[PathResult]) -> None:
    """Draw the limits' lines across the bars; a legend above the panel names them, where no bar is."""
    for one in limits:
        colour, style = _LIMITS.get(one.name, ("black", ":"))
        assert one.rate is not None
        label = f"{one.title} {number(one.rate)}"
        axes.axvline(one.rate, color=colour, linestyle=style, linewidth=1.2, zorder=0.5, label=label)
    if limits:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(limits), fontsize=8, frameon=False, borderpad=0)
