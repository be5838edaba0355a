"""Options that several commands share, and their values as parameters of the library.

In: names of options, or parsed arguments. Out: options for a command, or parameters. Options of a step come from its
record (:func:`options_of`). Errors: ``ValueError`` for a value that makes no sense,
:class:`~linumpy.errors.GpuUnavailableError` if a GPU is requested and there is none.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from linumpy import device as devices
from linumpy.declared import Declared, Help

Record = TypeVar("Record", bound=Declared)


def path_or_url(text: str) -> str | Path:
    """Parse the place of an image: return a URL as text, since ``Path`` would change it, else a path."""
    return text if "://" in text else Path(text)


class Option:
    """An argument of a command: names and settings as for argparse's ``add_argument``, and its group in the help."""

    def __init__(self, *names: str, group: str = "", **settings: Any) -> None:
        self.names, self.group, self.settings = names, group, settings


def options_of(record: type[Declared], group: str = "") -> Iterator[Option]:
    """Yield an option for each field of a record that has a :class:`~linumpy.declared.Help`.

    Names, types, choices and defaults are those of the fields. A boolean that is False becomes a flag; one that is True
    becomes a flag that has also a form with ``--no-``.
    """
    declared = typing.get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        declaration = declared[field.name]
        for text in (part for part in typing.get_args(declaration) if isinstance(part, Help)):
            settings: dict[str, Any] = {"dest": field.name, "help": text.text.replace("%", "%%")}
            if field.default is dataclasses.MISSING:
                settings["required"] = True
            else:
                settings["default"] = field.default
                if field.default is not None and not text.text.endswith("]") and field.default is not False:
                    settings["help"] += f" [{'on' if field.default is True else '%(default)s'}]"
            kind = _bare(declaration)
            if kind is bool:
                settings["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
            elif typing.get_origin(kind) is Literal:
                settings["choices"] = typing.get_args(kind)
            else:
                settings |= {"type": kind, "metavar": text.metavar}
            yield Option(f"--{(text.option or field.name).replace('_', '-')}", group=group, **settings)


def _bare(declaration: Any) -> Any:
    """Return a declared type without its annotations, and without None."""
    if typing.get_origin(declaration) is typing.Annotated:
        return _bare(typing.get_args(declaration)[0])
    if typing.get_origin(declaration) in (Union, types.UnionType):
        return _bare(next(part for part in typing.get_args(declaration) if part is not types.NoneType))
    return declaration


def record_of(parsed: Namespace, record: type[Record]) -> Record:
    """Return a record of the options of :func:`options_of`; ``ValueError`` for a value that it does not allow."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    return record(**{field.name: getattr(parsed, field.name) for field in fields})


def paths(input: str, output: str) -> tuple[Option, Option]:
    """Return ``input``, a source, and ``output``, a path or a URL, with their helps."""
    return (
        Option("input", type=path_or_url, metavar="INPUT", help=input),
        Option("output", type=path_or_url, metavar="OUTPUT", help=output),
    )


#: Options that several commands have. The help ends with the default in brackets.
_SHARED = {
    "overwrite": Option("--overwrite", action="store_true", help="Replace an existing output."),
    "level": Option("--level", type=int, default=0, metavar="N", help="Resolution to read; 0 is the finest. [0]"),
    "levels": Option("--levels", type=int, default=1, metavar="N", help="Number of resolutions to write. [1]"),
    "codec": Option(
        "--codec", metavar="NAME",
        help="How chunks are compressed: zstd, lz4, gzip, none, blosc:lz4 or blosc:zstd with :byte, :bit or :none for "
        "the shuffle; then :small for fewer bytes and more time, +crc32c for a checksum. [as the input's]",
    ),
    "ngff_version": Option("--ngff-version", choices=("0.6", "0.5", "0.4"), help="NGFF of the output. [as the input]"),
    "device": Option(
        "--device", choices=("auto", "cuda", "cpu"),
        help="Where to work: on the GPU (cuda), on the CPU, or on the GPU if there is one. [LINUMPY_DEVICE, or auto]",
    ),
    "cluster": Option(
        "--cluster", dest="distributed", metavar="ADDRESS",
        help="Work on the workers of a dask cluster, whose scheduler has this address. [here]",
    ),
    "tile_shape": Option(
        "--tile-shape", type=int, nargs=2, metavar=("A", "B"),
        help="Voxels of a tile along the lateral axes, in their order in the array (usually y, then x). "
        "[from the metadata that linumpy writes]",
    ),
    "max_tiles": Option(
        "--max-tiles", type=int, default=256, metavar="N", help="Maximum number of tiles to use. [%(default)s]"
    ),
    "shifts": Option(
        "--shifts", type=Path, metavar="CSV",
        help="Table of the motor's shifts, as for linum-stack-slices-motor. [none]",
    ),
    "slice_config": Option(
        "--slice-config", type=Path, metavar="CSV",
        help="Table with the columns slice_id and use (true or false): slices that are not used are left out. [all]",
    ),
    "memory": Option(
        "--memory", dest="memory_bytes", type=float, metavar="GIB",
        help="Memory of the blocks in the pipeline, on the GPU or the host. [80 %% of the free; on the CPU at most 8]",
    ),
    "channel": Option(
        "--channel", type=int, metavar="C", help="Channel to read, counted from 0. [the only one]", group="input"
    ),
    "time": Option("--time", type=int, metavar="T", help="Time to read, counted from 0. [the only one]", group="input"),
    "spacing": Option(
        "--spacing", type=float, nargs=3, metavar=("Z", "Y", "X"), group="input",
        help="Voxel spacing of the finest resolution in µm. [from the metadata]",
    ),
}  # fmt: skip
#: What is read of an image; the last options of a command that works in tiles; those of one that also writes an image.
VOLUME, TILES = ("channel", "time", "spacing"), ("cluster", "device", "overwrite")
IMAGE = ("levels", "codec", *VOLUME, *TILES)


def shared(*names: str, **defaults: str) -> Iterator[Option]:
    """Yield shared options; an option in `defaults` is None by default, and its help says this text of the default."""
    for name in names:
        option = _SHARED[name]
        if name in defaults:
            text = f"{option.settings['help'].partition('[')[0]}[{defaults[name]}]"
            option = Option(*option.names, group=option.group, **option.settings | {"default": None, "help": text})
        yield option


def volume_options(parsed: Namespace) -> dict[str, Any]:
    """Return the options :data:`VOLUME` as parameters of the library."""
    return {"channel": parsed.channel, "time": parsed.time, "spacing": parsed.spacing}


def spacing_of_axes(parsed: Namespace) -> Mapping[str, float] | None:
    """Return ``--spacing`` by the names of the axes, so that an image of y and x uses two of the numbers."""
    return parsed.spacing and dict(zip("zyx", parsed.spacing, strict=True))


def new_spacing(parsed: Namespace) -> float | Sequence[float] | None:
    """Return ``--resolution`` as a parameter of the library: a number for all axes, or a number for each axis."""
    wanted: list[float] | None = parsed.resolution
    return wanted[0] if wanted is not None and len(wanted) == 1 else wanted


def device_and_name(parsed: Namespace) -> tuple[str, str]:
    """Return the parameter `device` of the library by the options ``--device`` and ``--cluster``, and its name.

    Raises
    ------
    GpuUnavailableError
        ``cuda`` is requested, there is no CUDA device, and no ``--cluster``; the message gives the reason.
    ValueError
        ``LINUMPY_DEVICE`` names no device.
    """
    if getattr(parsed, "distributed", None) is not None:
        return parsed.device or "auto", "the workers"
    chosen = devices.resolve(parsed.device)
    return chosen.kind, "GPU" if chosen.is_cuda else "CPU"


def memory_bytes(parsed: Namespace) -> int | None:
    """Return ``--memory`` in bytes; None if it was not passed, ``ValueError`` if it is not above 0."""
    gib: float | None = parsed.memory_bytes
    if gib is None:
        return None
    if not 1 <= gib * 2**30 < 2**60:
        raise ValueError(f"--memory {gib:g}: pass a number of GiB above 0")
    return int(gib * 2**30)
