"""Options that several commands share, and their values as parameters of the library.

In: a parser, or parsed arguments. Out: options in the parser, or parameters. Options of a step come from its record
(:func:`add_record`). Errors: ``ValueError`` for a value that makes no sense,
:class:`~linumpy.errors.GpuUnavailableError` if a GPU is requested and there is none.
"""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from linumpy import device as devices
from linumpy.declared import Declared, Help

Record = TypeVar("Record", bound=Declared)
#: A parser, or a group of its options.
_Options = ArgumentParser | argparse._ArgumentGroup


def source(text: str) -> str | Path:
    """Parse a source: return a URL as text, since ``Path`` would change it, and any other text as a path."""
    return text if "://" in text else Path(text)


def add_record(parser: ArgumentParser, record: type[Declared], group: str = "") -> None:
    """Add an option for each field of a record that has a :class:`~linumpy.declared.Help`, maybe in a group.

    Names, types, choices and defaults are those of the fields. A boolean that is False becomes a flag; one that is True
    becomes a flag that has also a form with ``--no-``.
    """
    options: _Options = parser.add_argument_group(group) if group else parser
    declared = typing.get_type_hints(record, include_extras=True)
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        declaration = declared[field.name]
        for text in (part for part in typing.get_args(declaration) if isinstance(part, Help)):
            name = f"--{(text.option or field.name).replace('_', '-')}"
            shared: dict[str, Any] = {"dest": field.name, "help": text.text.replace("%", "%%")}
            if field.default is dataclasses.MISSING:
                shared["required"] = True
            else:
                shared["default"] = field.default
                if field.default is not None and not text.text.endswith("]") and field.default is not False:
                    shared["help"] += f" [{'on' if field.default is True else '%(default)s'}]"
            kind = _bare(declaration)
            if kind is bool:
                action = argparse.BooleanOptionalAction if field.default else "store_true"
                options.add_argument(name, action=action, **shared)
            elif typing.get_origin(kind) is Literal:
                options.add_argument(name, choices=typing.get_args(kind), **shared)
            else:
                options.add_argument(name, type=kind, metavar=text.metavar, **shared)


def _bare(declaration: Any) -> Any:
    """Return a declared type without its annotations, and without None."""
    if typing.get_origin(declaration) is typing.Annotated:
        return _bare(typing.get_args(declaration)[0])
    if typing.get_origin(declaration) in (Union, types.UnionType):
        return _bare(next(part for part in typing.get_args(declaration) if part is not types.NoneType))
    return declaration


def record_of(parsed: Namespace, record: type[Record]) -> Record:
    """Return a record of the options of :func:`add_record`; ``ValueError`` for a value that it does not allow."""
    fields = dataclasses.fields(record)  # type: ignore[arg-type]
    return record(**{field.name: getattr(parsed, field.name) for field in fields})


def values_of(parsed: Namespace, record: type[Declared]) -> dict[str, Any]:
    """Return the checked options of :func:`add_record` as keyword parameters."""
    return dataclasses.asdict(record_of(parsed, record))  # type: ignore[call-overload,no-any-return]


def add_paths(
    parser: ArgumentParser, input: str, output: str, *, metavars: tuple[str, str] = ("INPUT", "OUTPUT")
) -> None:
    """Add ``input``, a source, and ``output``, a path or a URL, with their helps."""
    parser.add_argument("input", type=source, metavar=metavars[0], help=input)
    parser.add_argument("output", type=image_output, metavar=metavars[1], help=output)


def image_output(text: str) -> str | Path:
    """Return an image to write as a path, or a URL as it is."""
    return text if "://" in text else Path(text)


def add_common_arguments(parser: ArgumentParser) -> None:
    """Add ``--verbose`` and ``--overwrite``."""
    parser.add_argument("-v", "--verbose", action="count", default=0, help="Log more; twice, with tracebacks.")
    parser.add_argument("--overwrite", action="store_true", help="Replace an existing output.")


def add_level_argument(parser: ArgumentParser) -> None:
    """Add ``--level``, the resolution to read."""
    parser.add_argument("--level", type=int, default=0, metavar="N", help="Resolution to read; 0 is the finest. [0]")


def add_levels_argument(parser: ArgumentParser, default_text: str = "") -> None:
    """Add ``--levels``, the number of resolution levels to write.

    The default is 1; with `default_text`, which describes the default in the help, it is None.
    """
    parser.add_argument(
        "--levels", type=int, default=None if default_text else 1, metavar="N",
        help=f"Number of resolutions to write. [{default_text or 1}]",
    )  # fmt: skip


def add_codec_argument(parser: ArgumentParser, default_text: str = "as the input's") -> None:
    """Add ``--codec``, how chunks are compressed; `default_text` describes the default in the help."""
    parser.add_argument(
        "--codec", metavar="NAME",
        help="How chunks are compressed: zstd, lz4, gzip, none, blosc:lz4 or blosc:zstd with :byte, :bit or :none for "
        f"the shuffle; then :small for fewer bytes and more time, +crc32c for a checksum. [{default_text}]",
    )  # fmt: skip


def add_ngff_argument(parser: ArgumentParser) -> None:
    """Add ``--ngff-version``, the version of NGFF to write."""
    parser.add_argument("--ngff-version", choices=("0.6", "0.5", "0.4"), help="NGFF of the output. [as the input]")


def add_device_argument(parser: ArgumentParser) -> None:
    """Add ``--device``; the default is as ``LINUMPY_DEVICE`` says, or else the GPU if any."""
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"),
        help="Where to work: on the GPU (cuda), on the CPU, or on the GPU if there is one. [LINUMPY_DEVICE, or auto]",
    )  # fmt: skip


def add_cluster_argument(parser: ArgumentParser) -> None:
    """Add ``--cluster``; with it :func:`device_and_name` leaves the choice of a device to the workers."""
    parser.add_argument(
        "--cluster", dest="distributed", metavar="ADDRESS",
        help="Work on the workers of a dask cluster, whose scheduler has this address. [here]",
    )  # fmt: skip


def add_tile_arguments(parser: ArgumentParser) -> None:
    """Add the last options of every command that works in tiles: cluster, device, and the options of all commands."""
    add_cluster_argument(parser)
    add_device_argument(parser)
    add_common_arguments(parser)


def add_image_arguments(parser: ArgumentParser, *, all_of_them: bool = False) -> None:
    """Add the last options of a command that writes an image in tiles: levels, codec, volume, cluster and others.

    `all_of_them` is as for :func:`add_volume_arguments`.
    """
    add_levels_argument(parser)
    add_codec_argument(parser)
    add_volume_arguments(parser, all_of_them=all_of_them)
    add_tile_arguments(parser)


def add_tile_shape_argument(parser: ArgumentParser) -> None:
    """Add ``--tile-shape``; the default is the tile shape in the metadata."""
    parser.add_argument(
        "--tile-shape", type=int, nargs=2, metavar=("A", "B"),
        help="Voxels of a tile along the lateral axes, in their order in the array (usually y, then x). "
        "[from the metadata that linumpy writes]",
    )  # fmt: skip


def add_slice_tables(parser: ArgumentParser, shifts: str | None = None) -> None:
    """Add ``--shifts``, if `shifts` says what they are for, and ``--slice-config``, the table of the slices used."""
    if shifts is not None:
        parser.add_argument(
            "--shifts", type=Path, metavar="CSV",
            help=f"Table of the motor's shifts, as for linum-stack-slices-motor{shifts}. [none]",
        )  # fmt: skip
    parser.add_argument(
        "--slice-config", type=Path, metavar="CSV",
        help="Table with the columns slice_id and use (true or false): slices that are not used are left out. [all]",
    )  # fmt: skip


def add_memory_argument(parser: ArgumentParser) -> None:
    """Add ``--memory``, which :func:`memory_bytes` returns in bytes."""
    parser.add_argument(
        "--memory", dest="memory_bytes", type=float, metavar="GIB",
        help="Memory of the blocks in the pipeline, on the GPU or the host. [80 %% of the free; on the CPU at most 8]",
    )  # fmt: skip


def add_volume_arguments(parser: ArgumentParser, *, all_of_them: bool) -> None:
    """Add the options that select a channel and a time of an image and replace its voxel spacing.

    - `all_of_them`: whether the command processes all times and channels if none is selected; otherwise the image may
      have only one.
    """
    default = "all" if all_of_them else "the only one"
    group = parser.add_argument_group("input")
    group.add_argument("--channel", type=int, metavar="C", help=f"Channel to read, counted from 0. [{default}]")
    group.add_argument("--time", type=int, metavar="T", help=f"Time to read, counted from 0. [{default}]")
    add_spacing_argument(group)


def add_spacing_argument(parser: _Options) -> None:
    """Add ``--spacing``, which replaces the spacing in the metadata."""
    parser.add_argument(
        "--spacing", type=float, nargs=3, metavar=("Z", "Y", "X"),
        help="Voxel spacing of the finest resolution in µm. [from the metadata]",
    )  # fmt: skip


def volume_options(parsed: Namespace) -> dict[str, Any]:
    """Return the options of :func:`add_volume_arguments` as parameters of the library."""
    return {"channel": parsed.channel, "time": parsed.time, "spacing": parsed.spacing and tuple(parsed.spacing)}


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
