"""Format results for people and programs: as a table, a JSON document and a plot.

In: :class:`~linumpy.benchmark.runner.CaseResult` records. Out: text, a JSON document, a picture. The table is at most
:data:`WIDTH` columns wide. In the JSON document (``schema`` 2) times are in seconds, sizes in bytes, and rates in GiB
per second, of the bytes that the case counts; values that were not measured are null.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linumpy.benchmark.cases import Case
from linumpy.benchmark.machine import Machine
from linumpy.benchmark.runner import OK, UNAVAILABLE, CaseResult, EntryResult, MarkResult, Settings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, SCHEMA = 105, 2
#: Units of the numbers in a document.
UNITS = "times in seconds, sizes in bytes, rates in GiB per second of the case's nbytes; null was not measured"
_TITLE = 30
_HEADER = f"{'':<{_TITLE}}{'check':<7}{'GiB/s':>7}{'median':>10}{'min – max':>19}{'linumpy ×':>11}"


# ---- the table


def machine_text(machine: Machine) -> str:
    """Describe the machine, the versions, and whether GPUDirect Storage is used."""
    return "\n".join(_wrapped(line, indent=10) for line in machine.header_lines())


def case_text(result: CaseResult) -> str:
    """Describe a case, and show a row for each entry with the ratio of linumpy's rate to the entry's rate."""
    lines = [result.case.name, *(f"  {line}" for line in (*result.case.description, _how(result)))]
    lines = [_wrapped(line, indent=2) for line in lines]
    lines += [_HEADER, "─" * WIDTH]
    lines += [_row(result, entry) for entry in result.entries]
    lines += [f"to reach: linumpy {_mark_text(mark)}: {_judgement(result, mark)}" for mark in result.marks]
    return "\n".join(lines)


def summary_text(results: Sequence[CaseResult]) -> str:
    """Show the rate that was reached in each case with a mark."""
    lines = [f"{'case':<42}{'linumpy':>10}{'GiB/s':>8}{'got':>8}  to reach", "─" * WIDTH]
    for result in results:
        ours = result.ours
        time, rate = (None, None) if ours is None else (ours.median, ours.rate)
        for mark in result.marks:
            head = f"{_cut(result.case.name, 41):<42}{_time(time):>10}{number(rate):>8}"
            judgement = ours.verdict if ours is not None and ours.verdict != OK else _judgement(result, mark)
            lines.append(f"{head}{number(mark.got):>8}  {_cut(_goal(mark), WIDTH - 72 - len(judgement))}  {judgement}")
    return "\n".join(lines)


def progress_text(case: Case, title: str) -> str:
    """Return the text of the progress bar for an entry."""
    return _cut(f"{case.name}: {title}", 60)


def _how(result: CaseResult) -> str:
    how = "each after the files were dropped from the page cache" if result.settings.cold else "after warm-ups"
    clock = "CUDA events" if result.case.clock == "device" else "the wall clock"
    runs = f"{result.settings.runs} run{'s' * (result.settings.runs != 1)}"
    return f"medians of up to {runs} by {clock}, {how}; results were checked first"


def _row(result: CaseResult, entry: EntryResult) -> str:
    head = f"{_cut(entry.title, _TITLE - 1):<{_TITLE}}{entry.verdict:<6} "
    if entry.verdict != OK:
        head = f"{_cut(entry.title, _TITLE - 1):<{_TITLE}}{entry.verdict}: "
        return head + _cut(entry.note, WIDTH - len(head))
    spread = f"{_time(min(entry.seconds))} – {_time(max(entry.seconds))}"
    times = "" if entry is result.ours else number(result.times_faster(entry))
    numbers = f"{number(entry.rate):>7}{_time(entry.median):>10}{spread:>19}{times:>11}"
    return _cut(f"{head}{numbers}  {entry.note}".rstrip(), WIDTH)


def _goal(mark: MarkResult) -> str:
    return f"≥ {mark.mark.least:g} {mark.mark.label}"


def _mark_text(mark: MarkResult) -> str:
    return _goal(mark) + (f", got {number(mark.got)}" if mark.got is not None else "")


def _judgement(result: CaseResult, mark: MarkResult) -> str:
    if mark.met is not None:
        return "met" if mark.met else "MISSED"
    return f"not judged: {result.case.not_judged or 'a time is missing'}"


def size(nbytes: int) -> str:
    """Format a number of bytes in a fitting unit."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    return f"{nbytes / unit:.3g} {name}"


def number(value: float | None) -> str:
    """Format a rate or a ratio with about three digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    unit, name = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")
    value = seconds / unit
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


# ---- the JSON document


def document(
    results: Sequence[CaseResult], machine: Machine, settings: Settings, command: str, date: str
) -> dict[str, object]:
    """Return the JSON document: results, machine, settings, command and date (ISO 8601)."""
    hardware = ("gpu", "why_no_gpu", "cpu", "cores", "memory_bytes", "file_system")
    described = asdict(machine)
    return {
        "schema": SCHEMA,
        "units": UNITS,
        "date": date,
        "command": command,
        "hardware": {key: described[key] for key in hardware},
        "versions": dict(machine.versions),
        "gds": {"mode": machine.gds.mode, "how": machine.gds.evidence, "warning": machine.gds.warning},
        "settings": {
            "runs": settings.runs,
            "cache": "cold" if settings.cold else "warm",
            "kvikio_threads": machine.kvikio_threads,
            "task_bytes": machine.task_bytes,
        },
        "cases": [_case(result) for result in results],
    }


def write_json(path: Path, content: dict[str, object]) -> None:
    """Write a document with indentation."""
    from linumpy.io.output.files import replacing  # imports zarr, which no help text needs

    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    with replacing(path, overwrite=True) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _case(result: CaseResult) -> dict[str, object]:
    marks = [
        {"least": mark.mark.least, "of": list(mark.mark.of), "label": mark.mark.label, "got": mark.got, "met": mark.met}
        for mark in result.marks
    ]
    return {
        "name": result.case.name,
        "nbytes": result.case.nbytes,
        "clock": result.case.clock,
        **result.case.facts,
        "not_judged": result.case.not_judged,
        "marks": marks,
        "entries": [_entry(result, entry) for entry in result.entries],
    }


def _entry(result: CaseResult, entry: EntryResult) -> dict[str, object]:
    return {
        "name": entry.name,
        "title": entry.title,
        "role": entry.role,
        "verdict": entry.verdict,
        "note": entry.note,
        "seconds": list(entry.seconds),
        "median_s": entry.median,
        "min_s": min(entry.seconds, default=None),
        "max_s": max(entry.seconds, default=None),
        "gib_per_s": entry.rate,
        "linumpy_times_faster": result.times_faster(entry),
    }


# ---- the plot

# Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
_OURS, _OTHERS, _BAD = "#0072B2", "#999999", "#D55E00"
_LIMITS = (("#000000", "-"), ("#D55E00", "--"), ("#009E73", ":"))
_GDS = {"native": "native", "not native": "not native", "compat": "off, kvikio in compat mode", "none": "no kvikio"}
_BAR_INCHES, _PANEL_INCHES, _HEAD_INCHES = 0.28, 0.8, 0.9


def draw(results: Sequence[CaseResult], machine: Machine, date: str, path: Path) -> None:
    """Draw the rates: a panel for each case, a bar for each entry, the limits as lines across the bars.

    The title names the machine and the date (ISO 8601); the ending of the path names the format.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from linumpy.io.output.files import replacing

    heights = [_PANEL_INCHES + _BAR_INCHES * len(_bars(result)) for result in results]
    figure = Figure(figsize=(10, _HEAD_INCHES + sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(results), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for panel, result in zip(panels, results, strict=True):
        _panel(panel, result)
    panels[-1].set_xlabel("GiB per second")
    first = results[0].settings
    cache = "cold" if first.cold else "warm"
    hardware = f"{machine.gpu}; GDS: {_GDS[machine.gds.mode]}" if machine.gpu else f"{machine.cpu}, no GPU"
    figure.suptitle(
        f"{hardware} — {date[:10]}\n{cache} page cache, medians of {first.runs}, black lines from min to max",
        fontsize=11,
    )
    with replacing(path, overwrite=True) as temporary:
        figure.savefig(temporary, dpi=120, format=Path(path).suffix[1:] or "png")


def _bars(result: CaseResult) -> list[EntryResult]:
    """Return the entries that are drawn as bars: the entries that are not limits, or all if there are only limits."""
    return [entry for entry in result.entries if entry.role != "limit"] or list(result.entries)


def _panel(axes: Axes, result: CaseResult) -> None:
    bars = _bars(result)
    axes.set_title(f"{result.case.name}  ({size(result.case.nbytes)})", fontsize=10, loc="left")
    axes.set_yticks(range(len(bars)), [entry.title for entry in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)  # the first entry on top
    axes.spines[["top", "right"]].set_visible(False)
    # Free space on the right for the number at the end of the longest bar.
    axes.set_xlim(0, 1.12 * max([entry.rate or 0 for entry in result.entries], default=0) or 1)
    for row, entry in enumerate(bars):
        _bar(axes, row, entry)
    _limits(axes, [entry for entry in result.entries if entry.rate and entry not in bars])


def _bar(axes: Axes, row: int, entry: EntryResult) -> None:
    text: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    text["bbox"] = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # hides the lines of limits behind the text
    if entry.verdict != OK or entry.rate is None:
        colour = "dimgray" if entry.verdict == UNAVAILABLE else _BAD
        axes.annotate(_cut(f"{entry.verdict}: {entry.note}", 72), (0, row), color=colour, **text)
        return
    axes.barh(row, entry.rate, height=0.68, color=_OURS if entry.role == "ours" else _OTHERS)
    low, high = (entry.nbytes / seconds / 2**30 for seconds in (max(entry.seconds), min(entry.seconds)))
    axes.hlines(row, low, high, colors="black", linewidth=1.5)
    axes.annotate(number(entry.rate), (max(high, entry.rate), row), **text)


def _limits(axes: Axes, limits: Sequence[EntryResult]) -> None:
    """Draw the limits as lines across the bars, named in a legend above the panel."""
    for index, entry in enumerate(limits):
        colour, style = _LIMITS[index % len(_LIMITS)]
        assert entry.rate is not None
        label = f"{entry.title} {number(entry.rate)}"
        axes.axvline(entry.rate, color=colour, linestyle=style, linewidth=1.2, zorder=0.5, label=label)
    if limits:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(limits), fontsize=8, frameon=False, borderpad=0)
