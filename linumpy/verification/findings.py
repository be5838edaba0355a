"""What a verification found: the results of arrays, and findings in order of harm; as text and as JSON."""

from __future__ import annotations

import html
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from linumpy.plan.read import format_nbytes, format_shape, html_table

Harm = Literal["damaged", "missing", "suspicious", "misplaced", "metadata", "leftover"]
#: Kinds of findings, the most harmful first, and what each means.
HARMS: dict[Harm, str] = {
    "damaged": "voxels are lost: they cannot be read, or stored bytes have changed",
    "missing": "parts are not stored: voxels are read as the fill value, levels and images cannot be opened",
    "suspicious": "voxels can be read and are probably wrong",
    "misplaced": "voxels are right and their positions, spacing or level are not",
    "metadata": "metadata contradict the specification, or what is stored",
    "leftover": "stored objects that no metadata name",
}


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes
    ----------
    harm : str
        A key of :data:`HARMS`.
    path : str
        Path of the chunk, array, group or document in the source; empty for the source itself.
    what : str
        What is wrong there, with the values that disagree.
    effect : str
        What it means for somebody who uses the image.
    advice : str
        What to do about it.
    count : int
        Chunks or objects that the finding is about.
    chunk : tuple of int or None
        Index of the (first) chunk in the grid of the array's chunks.
    """

    harm: Harm
    path: str
    what: str
    effect: str
    advice: str
    count: int = 1
    chunk: tuple[int, ...] | None = None

    def __str__(self) -> str:
        head = f"{self.harm}: {self.path or 'the source'}: {self.what}"
        return "\n  ".join(map(printable, (head, self.effect, self.advice)))


#: Findings that a text lists, and paths that a finding lists that was made of several.
_MAX_LISTED, _MAX_PATHS = 100, 5


def printable(text: str) -> str:
    """Return a text with control characters as escapes: names in a store may hold any."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


#: States of a chunk. One that differs does not agree with another level.
STATES = ("sound", "zero", "missing", "differs", "damaged")
SOUND, ZERO, MISSING, DIFFERS, DAMAGED = range(len(STATES))


@dataclass(frozen=True)
class ArrayResult:
    """What was read of an array.

    Attributes
    ----------
    path : str
        Path of the array in the source; empty for the source itself.
    shape, chunk_shape : tuple of int
        Voxels of the array, and of a chunk (in shards: of an inner chunk).
    dtype : str
        Type of the voxels.
    chunks, damaged, differ, missing, zero : int
        Chunks of the array; those that cannot be read, that disagree with another level, that are not stored, and that
        hold only zeros.
    made_by : str
        How the level was made of the finer one; a reason if that is not known, and empty for arrays without one.
    states : numpy.ndarray of uint8 or None
        The state of each chunk, as an index into :data:`STATES`, in the grid of the chunks.
    """

    path: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    dtype: str
    chunks: int
    damaged: int = 0
    differ: int = 0
    missing: int = 0
    zero: int = 0
    made_by: str = ""
    states: np.ndarray | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        counts = {
            "damaged": self.damaged, "differ from a level": self.differ, "missing": self.missing, "of zeros": self.zero,
        }  # fmt: skip
        parts = [f"{count:,} {name}" for name, count in counts.items() if count]
        chunks = f"{self.chunks:,} chunk{'s' * (self.chunks != 1)}"
        made = f"; {self.made_by}" if self.made_by else ""
        voxels = f"{format_shape(self.shape)} {self.dtype}"
        return f"{printable(self.path) or '.'}: {voxels}, {chunks}, {', '.join(parts) or 'all sound'}{made}"


@dataclass(frozen=True)
class Proposal:
    """Where a level lies by its voxels, where its metadata say otherwise.

    Attributes
    ----------
    image : str
        Path of the image's group in the source.
    multiscale, level : int
        Number of the multiscale image in the group, and of the level.
    scale, translation : tuple of float
        Step between voxels and position of the first voxel along all axes of the arrays, in the units of the axes.
    """

    image: str
    multiscale: int
    level: int
    scale: tuple[float, ...]
    translation: tuple[float, ...]


@dataclass(frozen=True)
class Verification:
    """The result of :func:`linumpy.verify`.

    Attributes
    ----------
    source : str
        Path or URL.
    arrays : tuple of ArrayResult
        Arrays that were read: levels, labels and others.
    findings : tuple of Finding
        The most harmful first; empty if nothing is wrong.
    notes : tuple of str
        What could not be checked, and why.
    nbytes : int
        Decoded bytes that were read.
    seconds : float
        Time that it took.
    proposals : tuple of Proposal
        Metadata of levels that agree with the voxels.
    """

    source: str
    arrays: tuple[ArrayResult, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()
    nbytes: int = 0
    seconds: float = 0.0
    proposals: tuple[Proposal, ...] = ()

    @property
    def sound(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        rate = f"{format_nbytes(self.nbytes)} in {self.seconds:.1f} s"
        count, notes = len(self.findings), [f"not checked: {printable(note)}" for note in self.notes]
        lines = [*map(str, self.arrays), *notes, *map(str, self.findings[:_MAX_LISTED])]
        if count > _MAX_LISTED:
            lines.append(f"and {count - _MAX_LISTED:,} findings more, which JSON and the page list")
        verdict = "sound" if self.sound else f"{count:,} finding{'s' * (count != 1)}"
        return "\n".join([*lines, f"{printable(self.source)}: {verdict} ({rate})"])

    def _repr_html_(self) -> str:
        rows = [["harm", "where", "what", "effect", "what to do"]]
        rows += [[f.harm, f.path or ".", f.what, f.effect, f.advice] for f in self.findings]
        return f"<p>{html.escape(str(self).splitlines()[-1])}</p>{html_table(rows)}"

    def as_json(self) -> dict[str, Any]:
        """Return the result as objects of JSON."""
        content = asdict(replace(self, arrays=tuple(replace(array, states=None) for array in self.arrays)))
        for array in content["arrays"]:
            del array["states"]
        return {**content, "sound": self.sound}


def in_order(findings: list[Finding]) -> tuple[Finding, ...]:
    """Sort findings by harm, then by the number of chunks; those of several groups that say the same become one."""
    order, same = list(HARMS), dict[Any, list[Finding]]()
    for number, finding in enumerate(findings):
        key = (finding.what, finding.effect, finding.advice) if finding.harm == "metadata" else number
        same.setdefault(key, []).append(finding)
    joined = list(map(_joined, same.values()))
    return tuple(sorted(joined, key=lambda finding: (order.index(finding.harm), -finding.count)))


def _joined(findings: list[Finding]) -> Finding:
    paths = list(dict.fromkeys(finding.path or "the source" for finding in findings))
    if len(paths) == 1:
        return findings[0]
    more = f" and {len(paths) - 1 - _MAX_PATHS:,} more" if len(paths) - 1 > _MAX_PATHS else ""
    what = f"{findings[0].what}; the same in {', '.join(paths[1 : 1 + _MAX_PATHS])}{more}"
    return replace(findings[0], what=what, count=sum(finding.count for finding in findings))
