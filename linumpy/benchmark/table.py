"""Results as text for a terminal, at most :data:`WIDTH` columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from linumpy.benchmark.cases import Case
from linumpy.benchmark.machine import Machine
from linumpy.benchmark.runner import OK, CaseResult, PathResult, Settings
from linumpy.benchmark.specs import REACH_OF

WIDTH = 105
_TITLE = 29
_HEADER = f"{'path':<{_TITLE}}{'check':<7}{'GiB/s':>7}{'median':>10}{'min – max':>19}{'× flat':>8}{'× zarr-gpu':>12}"


def machine_text(machine: Machine) -> str:
    """Describe the machine, the versions and the way to the disk."""
    return "\n".join(_wrapped(line, indent=10) for line in machine.lines())


def case_text(result: CaseResult) -> str:
    """Describe a case and show a row per path."""
    lines = [_wrapped(line, indent=2) for line in (*_case_lines(result.case), _how(result.settings))]
    lines += [_HEADER, "─" * WIDTH]
    lines += [_row(result, path) for path in result.paths]
    reach = reach_text(result)
    return "\n".join([*lines, *([reach] if reach else [])])


def summary_text(results: Sequence[CaseResult]) -> str:
    """Show what was reached in each case."""
    lines = [f"{'case':<40}{'linumpy auto':>13}{'flat file':>11}{'× flat':>8}{'got':>8}  to reach", "─" * WIDTH]
    for result in results:
        mine, flat = result.path("linumpy-auto"), result.path("flat")
        ratio = None if mine is None else result.ratio(mine, "flat")
        rates = [number(one.rate if one else None) for one in (mine, flat)]
        lines.append(
            f"{_cut(result.case.name, 39):<40}{rates[0]:>13}{rates[1]:>11}{number(ratio):>8}"
            f"{number(result.got if result.case.reach else None):>8}  {_mark(result)}  {_judgement(result)}".rstrip()
        )
    return "\n".join(lines)


def reach_text(result: CaseResult) -> str:
    """Say whether ``linumpy auto`` reached its mark; empty where there is none."""
    if result.case.reach is None:
        return ""
    got = f", got {number(result.got)}" if result.got is not None else ""
    return f"to reach: linumpy auto {_mark(result)}, warm page cache{got}: {_judgement(result)}"


def _mark(result: CaseResult) -> str:
    reach = result.case.reach
    return "–" if reach is None else f"≥ {reach:g} {REACH_OF[result.case.reach_of]}"


def case_progress(case: Case, title: str) -> str:
    """Say what is under way."""
    return _cut(f"{case.name}: {title}", 60)


def _judgement(result: CaseResult) -> str:
    if result.reached is not None:
        return "met" if result.reached else "MISSED"
    if result.case.reach is None:
        return ""
    if not result.settings.gpu:
        return "not judged: no GPU"
    return "not judged: cold page cache" if result.settings.cold else "not judged: a time is missing"


def _case_lines(case: Case) -> list[str]:
    shards = f", in shards {_times(case.shards)}" if case.shards else ""
    region = f", of which {_times(case.result_shape)} are read" if case.region else ""
    return [
        case.name,
        f"  {_times(case.shape)} {case.dtype}, chunks {_times(case.chunks)}{shards}{region}, codecs {case.codecs}, "
        f"zarr v{case.zarr_format}",
        f"  {size(case.nbytes)} decoded, {size(case.stored_bytes)} in {case.chunk_files:,} files "
        f"(ratio {case.ratio:.2f}); voxels: {case.data}",
    ]


def _how(settings: Settings) -> str:
    if settings.cold:
        how = "each after these files were dropped from the page cache"
    else:
        how = "after an untimed warm-up (warm page cache)"
    return f"  medians of {settings.runs} runs, {how}; checked against zarr-python"


def size(nbytes: int) -> str:
    """Write a number of bytes in the unit that fits."""
    unit, name = (2**30, "GiB") if nbytes >= 2**30 else (2**20, "MiB") if nbytes >= 2**20 else (2**10, "KiB")
    return f"{nbytes / unit:.3g} {name}"


def _row(result: CaseResult, path: PathResult) -> str:
    head = f"{path.title:<{_TITLE}}{path.verdict:<6} "
    if path.verdict != OK:
        head = f"{path.title:<{_TITLE}}{path.verdict}: "
        return head + _cut(path.note, WIDTH - len(head))
    spread = f"{_time(min(path.seconds))} – {_time(max(path.seconds))}"
    numbers = (
        f"{number(path.rate):>7}{_time(path.median):>10}{spread:>19}"
        f"{number(result.ratio(path, 'flat')):>8}{number(result.ratio(path, 'zarr-gpu')):>12}"
    )
    return _cut(f"{head}{numbers}  {path.note}".rstrip(), WIDTH)


def number(value: float | None) -> str:
    """Write a rate or a ratio with about three digits; a dash where there is none."""
    if value is None:
        return "–"
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    unit, name = (1.0, "s") if seconds >= 1 else (1e-3, "ms") if seconds >= 1e-3 else (1e-6, "µs")
    value = seconds / unit
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {name}"


def _times(sizes: Sequence[int] | None) -> str:
    return "×".join(map(str, sizes or ()))


def _wrapped(text: str, indent: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"
